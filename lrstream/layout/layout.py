"""Everything a dataset says about itself, read once through its store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import DatasetFormatError, NotFoundError, UsageError
from lrstream.layout.episode_metadata import load_episodes
from lrstream.layout.episodes import EpisodeTable
from lrstream.layout.info import DatasetInfo, load_info
from lrstream.layout.tasks import load_tasks
from lrstream.storage.store import DatasetStore

__all__ = ["STATS_PATH", "DatasetLayout", "load_layout", "resolve_selection"]

STATS_PATH = "meta/stats.json"


@dataclass(frozen=True)
class DatasetLayout:
    """Metadata of one dataset at one snapshot. Picklable.

    Attributes:
        info: `meta/info.json`.
        tasks: Task strings by ``task_index``.
        episodes: Where each episode is.
        store: The store it was read from.
        left_out: Features that the dataset has but nobody asked for (`narrow_layout`); they are in none
            of the above.
    """

    info: DatasetInfo
    tasks: Mapping[int, str]
    episodes: EpisodeTable
    store: DatasetStore = field(repr=False, compare=False)
    left_out: frozenset[str] = frozenset()

    def video_files(self) -> tuple[str, ...]:
        """Paths of all MP4 files, relative to the root, sorted, without duplicates."""
        return tuple(sorted({path for camera in self.episodes.cameras.values() for path in camera.files}))

    @cached_property
    def stats(self) -> dict[str, dict[str, NDArray[np.generic]]] | None:
        """`meta/stats.json`: arrays by feature and statistic, None if there is none; read at first use."""
        try:
            data = self.store.read_bytes(STATS_PATH)
        except NotFoundError:
            return None
        where = f"{self.store.location}/{STATS_PATH}"
        try:
            parsed = json.loads(data)
            return {
                key: {name: np.atleast_1d(np.array(value)) for name, value in values.items()}
                for key, values in parsed.items()
                if key not in self.left_out
            }
        except (ValueError, AttributeError) as error:
            raise DatasetFormatError(
                f"{where}: expected JSON with statistics by feature, but: {error}.", file_path=STATS_PATH
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "stats"}


def load_layout(
    store: DatasetStore, *, contradictions: list[DatasetFormatError] | None = None
) -> DatasetLayout:
    """Read and check all metadata of a dataset (DS-2, DS-5).

    Args:
        store: The dataset.
        contradictions: As in `load_episodes`: for checks that list everything.

    Raises:
        NotFoundError: If a file is missing.
        DatasetFormatError: If the version is not v3.x, or something is malformed or contradictory.
    """
    info = load_info(store)
    return DatasetLayout(
        info, load_tasks(store), load_episodes(store, info, contradictions=contradictions), store
    )


def resolve_selection(
    layout: DatasetLayout,
    episodes: Iterable[int] | None = None,
    exclude_episodes: Iterable[int] | None = None,
) -> NDArray[np.int64]:
    """Positions of the selected episodes in the episode table.

    Args:
        layout: The dataset.
        episodes: Episode indices to use, in any order; None for all, empty for none.
        exclude_episodes: Episode indices to leave out of them.

    Returns:
        Ascending positions, int64, shape ``(k,)``. The order of the arguments has no effect, so that
        equal selections are equal.

    Raises:
        UsageError: If an index is given twice, is negative, or is not an integer.
        NotFoundError: If the dataset has no such episode.
    """
    table = layout.episodes
    chosen = np.arange(len(table), dtype=np.int64)
    if episodes is not None:
        chosen = _positions(table, episodes, "episodes")
    if exclude_episodes is not None:
        chosen = np.setdiff1d(chosen, _positions(table, exclude_episodes, "exclude_episodes"))
    return chosen


def _positions(table: EpisodeTable, episodes: Iterable[int], name: str) -> NDArray[np.int64]:
    if isinstance(episodes, (str, bytes)) or not isinstance(episodes, Iterable):
        raise UsageError(f"{name} is {episodes!r}, expected a list of episode indices.")
    # A PyTorch tensor gives tensors one by one, but plain numbers at once.
    listed = getattr(episodes, "tolist", None)
    if callable(listed):
        episodes = listed()
        if not isinstance(episodes, list):
            raise UsageError(f"{name} is a single number ({episodes!r}), expected a list of episode indices.")
    positions: dict[int, int] = {}
    for episode in episodes:
        if isinstance(episode, (bool, np.bool_)) or not isinstance(episode, (int, np.integer)):
            raise UsageError(f"{name} contains {episode!r}, expected integers.")
        if episode < 0:
            raise UsageError(f"{name} contains {episode}; episode indices are 0 or more.")
        if int(episode) in positions:
            raise UsageError(f"{name} contains episode {episode} more than once.")
        positions[int(episode)] = table.position(int(episode))
    return np.array(sorted(positions.values()), dtype=np.int64)
