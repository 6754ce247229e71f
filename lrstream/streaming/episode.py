"""A loaded episode: its rows as arrays, its pictures as coded bytes, ready for any anchor in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lrstream.layout.rows import EpisodeRows
from lrstream.streaming.clip import NO_PICTURE, Clip, pictures_of_rows
from lrstream.streaming.row_plan import PackedRows, pack_rows
from lrstream.timebase import row_tolerance_s

__all__ = ["CameraRecord", "EpisodeRecord"]


@dataclass(frozen=True, slots=True, eq=False)
class CameraRecord:
    """One camera of one episode.

    Attributes:
        clip: The coded pictures.
        ranks: Presentation rank of each row's picture, int64 ``(rows,)``; -1 where there is none within
            the tolerance.
        from_s: Start of the episode in the clip's clock, seconds.
        timestamps: Time of each row in the episode, float32 seconds ``(rows,)``.
        tolerance_s: Largest distance between a row and its picture.
        is_incomplete: Whether a row has no picture.
    """

    clip: Clip
    ranks: NDArray[np.int64]
    from_s: float
    timestamps: NDArray[np.float32]
    tolerance_s: float
    is_incomplete: bool

    @classmethod
    def match(
        cls, clip: Clip, from_s: float, timestamps: NDArray[np.float32], tolerance_s: float
    ) -> CameraRecord:
        """Find the picture of every row at once."""
        ranks = pictures_of_rows(clip.table.times_s, from_s, timestamps, tolerance_s)
        return cls(clip, ranks, from_s, timestamps, tolerance_s, bool((ranks == NO_PICTURE).any()))

    def rank_of(self, frame: int) -> int:
        """Presentation rank of the picture of one row; see `ranks_of`."""
        rank = int(self.ranks[frame])
        return rank if rank != NO_PICTURE else int(self.ranks_of(np.array([frame]))[0])

    def ranks_of(self, frames: NDArray[np.int64]) -> NDArray[np.int64]:
        """Presentation ranks of the pictures of some rows, int64, shape of `frames`.

        Raises:
            TimestampError: A row has no picture within the tolerance (K05).
        """
        ranks: NDArray[np.int64] = self.ranks[frames]
        if self.is_incomplete and ranks.min() == NO_PICTURE:
            frame = int(frames[int(np.argmin(ranks))])
            row = self.timestamps[frame : frame + 1]
            allowed_s = float(row_tolerance_s(row, self.tolerance_s)[0])
            raise self.clip.no_picture_error(frame, self.from_s + float(row[0]), allowed_s)
        return ranks


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeRecord:
    """All that samples of one episode are made of. Immutable, shared by the decode threads.

    Attributes:
        rows: Its rows.
        packed: The numeric features of the rows side by side; the same memory as theirs.
        cameras: Its video features, RGB and depth, by key.
    """

    rows: EpisodeRows
    packed: PackedRows
    cameras: Mapping[str, CameraRecord]

    @classmethod
    def of(cls, rows: EpisodeRows, cameras: Mapping[str, CameraRecord]) -> EpisodeRecord:
        """Pack the rows of an episode."""
        packed = pack_rows(rows.arrays)
        return cls(replace(rows, arrays={key: packed[key] for key in rows.arrays}), packed, cameras)

    @property
    def episode_index(self) -> int:
        """The episode's number in the dataset."""
        return self.rows.episode_index

    def gop_of(self, frame: int) -> int:
        """Number of the GOP, in the first camera, that holds the picture of a frame; -1 = unknown."""
        for camera in self.cameras.values():
            rank = int(camera.ranks[frame])
            table = camera.clip.table
            return -1 if rank == NO_PICTURE else table.entries[table.samples[rank]]
        return -1

    def __len__(self) -> int:
        """Number of frames."""
        return len(self.rows)
