"""What training scripts ask a LeRobot dataset about itself (`dataset.meta`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lrstream.layout.layout import DatasetLayout

__all__ = ["DatasetMeta", "EpisodesView"]

_MM_PER_M = 1000.0


class EpisodesView:
    """The episodes table as LeRobot's scripts read it: `episodes[3]["length"]`, `episodes["length"]`.

    Args:
        layout: The dataset.
    """

    def __init__(self, layout: DatasetLayout) -> None:
        table, info = layout.episodes, layout.info
        self._columns: dict[str, Any] = {
            "episode_index": table.episode_index,
            "length": table.length,
            "dataset_from_index": table.dataset_from_index,
            "dataset_to_index": table.dataset_to_index,
        }
        for key, camera in table.cameras.items():
            self._columns[f"videos/{key}/from_timestamp"] = camera.from_s
            self._columns[f"videos/{key}/to_timestamp"] = camera.to_s
        self._table = table
        self._info = info

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return [*self._columns, "tasks"]

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...

    def __getitem__(self, key: str | int) -> list[Any] | dict[str, Any]:
        if isinstance(key, str):
            return self._table.tasks if key == "tasks" else list(self._columns[key].tolist())
        if not -len(self) <= key < len(self):
            raise IndexError(f"There are {len(self)} episodes, no number {key}.")
        row: dict[str, Any] = {name: column[key].item() for name, column in self._columns.items()}
        row["tasks"] = self._table.tasks[key]
        return row

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[position] for position in range(len(self)))


class DatasetMeta:
    """Metadata of a whole dataset, whatever episodes of it are selected, and of the features delivered.

    Args:
        layout: The dataset.
        repo_id: Its name.
        revision: Its revision, None where the storage has none.
        depth_unit: Unit in which depth is delivered; statistics of depth are converted to it.
    """

    def __init__(self, layout: DatasetLayout, *, repo_id: str, revision: str | None, depth_unit: str) -> None:
        self._layout = layout
        self._depth_unit = depth_unit
        self.repo_id = repo_id
        self.revision = revision

    @property
    def root(self) -> str:
        """Directory or URL of the dataset."""
        return self._layout.store.location.root

    @property
    def info(self) -> dict[str, Any]:
        """`meta/info.json` as parsed, with the features that are delivered."""
        return self._layout.info.raw

    @cached_property
    def features(self) -> dict[str, dict[str, Any]]:
        """Features as in info.json, with shapes as tuples."""
        declared = self._layout.info.raw["features"]
        return {
            key: {**declared[key], "shape": feature.shape}
            for key, feature in self._layout.info.features.items()
        }

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self._layout.info.fps

    @property
    def robot_type(self) -> str | None:
        """Robot, as recorded."""
        value = self.info.get("robot_type")
        return None if value is None else str(value)

    @property
    def tasks(self) -> Mapping[int, str]:
        """Task strings by ``task_index``."""
        return self._layout.tasks

    @cached_property
    def episodes(self) -> EpisodesView:
        """The episodes table."""
        return EpisodesView(self._layout)

    @property
    def total_episodes(self) -> int:
        """Episodes of the dataset."""
        return len(self._layout.episodes)

    @property
    def total_frames(self) -> int:
        """Frames of the dataset."""
        return self._layout.episodes.num_frames

    @property
    def total_tasks(self) -> int:
        """Different tasks."""
        return len(self._layout.tasks)

    @property
    def video_keys(self) -> list[str]:
        """Features stored as video, RGB and depth."""
        return self._keys("video", "depth")

    @property
    def image_keys(self) -> list[str]:
        """Features stored as images in the tables, RGB and depth."""
        return self._keys("image", "depth_image")

    @property
    def camera_keys(self) -> list[str]:
        """All features that are pictures."""
        return self._keys("video", "depth", "image", "depth_image")

    @property
    def depth_keys(self) -> list[str]:
        """Features that are depth, stored either way."""
        return self._keys("depth", "depth_image")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declared shape of every feature."""
        return {key: feature.shape for key, feature in self._layout.info.features.items()}

    @property
    def names(self) -> dict[str, Any]:
        """Declared names of the dimensions of every feature."""
        return {key: feature.names for key, feature in self._layout.info.features.items()}

    @cached_property
    def stats(self) -> dict[str, dict[str, NDArray[np.generic]]] | None:
        """`meta/stats.json` as arrays, depth in the delivered unit; None if there is none."""
        stats = self._layout.stats
        if stats is None:
            return None
        converted = dict(stats)
        for key in self.depth_keys:
            depth = self._layout.info.features[key].depth
            if key not in stats or depth is None or depth.unit in (None, self._depth_unit):
                continue
            factor = _MM_PER_M if depth.unit == "m" else 1 / _MM_PER_M
            converted[key] = {
                name: value if name == "count" else np.asarray(value, dtype=np.float64) * factor
                for name, value in stats[key].items()
            }
        return converted

    def _keys(self, *kinds: str) -> list[str]:
        return [key for key, feature in self._layout.info.features.items() if feature.kind in kinds]

    def __getstate__(self) -> dict[str, Any]:
        # What is derived is derived again, rather than sent to every worker.
        return {name: value for name, value in self.__dict__.items() if name not in _DERIVED}


_DERIVED = frozenset({"features", "episodes", "stats"})
