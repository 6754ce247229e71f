"""The table of episodes: where each one's rows and pictures are.

Plain arrays in episode order, so that it is small to pickle and quick to search at any number of
episodes. `episode_metadata` reads and checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lrstream.errors import NotFoundError

__all__ = ["CameraColumns", "EpisodeTable"]


@dataclass(frozen=True)
class CameraColumns:
    """Where one video feature of each episode is stored.

    Attributes:
        file: Number of the episode's MP4 in `files`, int64, shape ``(n,)``.
        files: Paths relative to the dataset root, sorted, without duplicates.
        from_s: Time of the episode's first picture in its file, float64 seconds, shape ``(n,)``.
        to_s: End of the episode's last picture in its file, float64 seconds, shape ``(n,)``.
    """

    file: NDArray[np.int64]
    files: tuple[str, ...]
    from_s: NDArray[np.float64]
    to_s: NDArray[np.float64]

    def path(self, position: int) -> str:
        """Path of the MP4 file of the episode at a position."""
        return self.files[int(self.file[position])]


@dataclass(frozen=True)
class EpisodeTable:
    """All episodes of a dataset, in ascending order of ``episode_index``.

    A *position* is a row of this table. It equals the episode index in a dataset whose episodes are
    numbered without gaps, which is usual but not required.

    Attributes:
        episode_index: int64, shape ``(n,)``, strictly increasing.
        length: Frames of each episode, int64, shape ``(n,)``, at least 1.
        dataset_from_index: First value of ``index`` of each episode, int64, shape ``(n,)``.
        dataset_to_index: One past its last value of ``index``, int64, shape ``(n,)``.
        data_file: Number of the episode's Parquet file in `data_files`, int64, shape ``(n,)``.
        data_files: Paths relative to the dataset root, sorted, without duplicates.
        cameras: Video features by key, in declared order.
        task_lists: Task strings of each episode as an Arrow list array of length n; None if the
            dataset does not store them.
    """

    episode_index: NDArray[np.int64]
    length: NDArray[np.int64]
    dataset_from_index: NDArray[np.int64]
    dataset_to_index: NDArray[np.int64]
    data_file: NDArray[np.int64]
    data_files: tuple[str, ...]
    cameras: Mapping[str, CameraColumns]
    task_lists: pa.Array | None = None

    def __len__(self) -> int:
        return len(self.episode_index)

    @property
    def num_frames(self) -> int:
        """Frames of all episodes together."""
        return int(self.length.sum())

    @cached_property
    def tasks(self) -> list[list[str]]:
        """Task strings of each episode; converted at first use."""
        if self.task_lists is None:
            return [[] for _ in range(len(self))]
        return [tasks or [] for tasks in self.task_lists.to_pylist()]

    def position(self, episode_index: int) -> int:
        """Row of an episode.

        Raises:
            NotFoundError: If the dataset has no such episode.
        """
        position = int(np.searchsorted(self.episode_index, episode_index))
        if position == len(self) or self.episode_index[position] != episode_index:
            known = f"{self.episode_index[0]} to {self.episode_index[-1]}" if len(self) else "none"
            raise NotFoundError(
                f"The dataset has no episode {episode_index}; it has {len(self)} ({known}).",
                episode_index=int(episode_index),
            )
        return position

    def data_path(self, position: int) -> str:
        """Path of the Parquet file with the rows of the episode at a position."""
        return self.data_files[int(self.data_file[position])]

    def __getstate__(self) -> dict[str, Any]:
        # The converted lists are many small objects; the Arrow array they came from is not.
        return {name: value for name, value in self.__dict__.items() if name != "tasks"}
