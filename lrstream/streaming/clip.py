"""One camera of one episode, ready to be decoded: bytes in memory and where each picture lies in them.

A *picture* is named by its presentation rank inside the clip: 0 is the first one shown. A *sample* is the
same thing in decode order (ISO BMFF word). Ranks are what packets carry through the decoder as time stamps,
so that every decoded picture names itself, whatever the edit list, time base or reordering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import TimestampError
from lrstream.mp4.codec_config import CodecConfig
from lrstream.mp4.span import Span
from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.timebase import readable_s, row_tolerance_s

__all__ = ["Clip", "ClipTable", "pictures_of_rows"]

# Rank of a row that no picture belongs to.
NO_PICTURE = -1


@dataclass(frozen=True, slots=True, eq=False)
class ClipTable:
    """Samples of a span, numbered from 0 in decode order, and their presentation order.

    Lists rather than arrays: they are read one element at a time, for each packet.

    Attributes:
        starts: Offset of each sample in the clip's bytes.
        stops: Its end, excluded.
        ranks: Presentation rank of each sample.
        samples: Sample of each presentation rank.
        entries: For each sample the sync sample from which decoding must begin to get it: the last one
            that is both decoded and presented no later; -1 if the clip holds none.
        sync_samples: Sync samples, ascending.
        times_s: Presentation times in the source's clock, float64 seconds ``(n,)``, by rank.
    """

    starts: list[int]
    stops: list[int]
    ranks: list[int]
    samples: list[int]
    entries: list[int]
    sync_samples: list[int]
    times_s: NDArray[np.float64]

    @classmethod
    def from_span(cls, table: SampleTable, span: Span) -> ClipTable:
        """The part of a file's sample table that lies in a span."""
        part = slice(span.first_sample, span.stop_sample)
        pts_s = table.pts_s[part]
        starts = table.offsets_bytes[part].astype(np.int64) - span.start_byte
        stops = starts + table.sizes_bytes[part].astype(np.int64)
        order = np.argsort(pts_s, kind="stable")
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.arange(len(order))
        first, last = np.searchsorted(table.sync_samples, (span.first_sample, span.stop_sample))
        sync = table.sync_samples[first:last].astype(np.int64) - span.first_sample
        return cls(
            starts=starts.tolist(),
            stops=stops.tolist(),
            ranks=ranks.tolist(),
            samples=order.tolist(),
            entries=_entries(ranks, sync).tolist(),
            sync_samples=sync.tolist(),
            times_s=pts_s[order],
        )

    def __len__(self) -> int:
        return len(self.starts)


def _entries(ranks: NDArray[np.int64], sync: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sync sample at which to enter for each sample, int64 ``(n,)``; see `ClipTable.entries`."""
    at = np.searchsorted(sync, np.arange(len(ranks)), side="right") - 1
    while True:
        # Pictures decoded after a keyframe but presented before it (open GOP) step back one keyframe.
        early = np.flatnonzero(at >= 0)
        early = early[ranks[sync[at[early]]] > ranks[early]]
        if early.size == 0:
            break
        at[early] -= 1
    return np.where(at >= 0, np.append(sync, -1)[at], -1)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Clip:
    """Coded pictures of one camera of one episode. Immutable, safe to share between threads.

    Attributes:
        camera: Feature key.
        episode_index: The episode, for messages.
        file_path: Source file, relative to the dataset's root.
        span: Samples and bytes of that file.
        config: How to open a decoder for it.
        track: The index of this span alone; offsets count from the start of `payload`.
        table: Where each picture lies in `payload`.
        payload: The bytes ``[span.start_byte, span.stop_byte)`` of the file.
    """

    camera: str
    episode_index: int
    file_path: str
    span: Span
    config: CodecConfig
    track: TrackIndex
    table: ClipTable
    payload: bytes

    @property
    def place(self) -> str:
        """Where this is, for messages."""
        return (
            f"episode {self.episode_index}, camera {self.camera}, file {self.file_path}, "
            f"bytes [{self.span.start_byte}, {self.span.stop_byte})"
        )

    def error_fields(self) -> dict[str, Any]:
        """Where this is, as the fields of an error."""
        return {
            "episode_index": self.episode_index,
            "camera": self.camera,
            "file_path": self.file_path,
            "start_byte": self.span.start_byte,
            "stop_byte": self.span.stop_byte,
        }

    def no_picture_error(self, frame: int, wanted_s: float, tolerance_s: float) -> TimestampError:
        """The error for a row without a picture of its own.

        Args:
            frame: Row in the episode.
            wanted_s: Its time in the clip's clock, seconds.
            tolerance_s: Largest distance allowed.
        """
        nearest = self.table.times_s[int(np.argmin(np.abs(self.table.times_s - wanted_s)))]
        return TimestampError(
            f"Frame {frame} of episode {self.episode_index} is at {wanted_s:.6f} s of camera {self.camera}, "
            f"file {self.file_path}, but the nearest picture is presented at {nearest:.6f} s, "
            f"{readable_s(abs(nearest - wanted_s))} away; allowed is {readable_s(tolerance_s)} (tolerance_s "
            "and the rounding of the row's own float32 time).",
            hint="The table's timestamps and the video do not fit: repair the dataset, leave the episode "
            "out with exclude_episodes, or raise tolerance_s.",
            episode_index=self.episode_index,
            camera=self.camera,
            file_path=self.file_path,
            frame_index=frame,
            wanted_s=wanted_s,
            nearest_s=float(nearest),
            tolerance_s=tolerance_s,
        )


def pictures_of_rows(
    times_s: NDArray[np.float64], from_s: float, timestamps: NDArray[np.float32], tolerance_s: float
) -> NDArray[np.int64]:
    """Presentation rank of the picture of each row (K04, K05).

    Args:
        times_s: float64 ``(n >= 1,)``, ascending presentation times of the clip's pictures.
        from_s: Start of the episode in the clip's clock.
        timestamps: float32 ``(rows,)``, time of each row in the episode.
        tolerance_s: Largest distance between a row and its picture; see `row_tolerance_s`.

    Returns:
        int64 ``(rows,)``: rank of the nearest picture, the earlier one of two equally near; -1 where it
        is further away than the tolerance.
    """
    wanted = from_s + timestamps.astype(np.float64)
    after = np.clip(np.searchsorted(times_s, wanted), 0, len(times_s) - 1)
    before = np.maximum(after - 1, 0)
    is_before = np.abs(times_s[before] - wanted) <= np.abs(times_s[after] - wanted)
    nearest = np.where(is_before, before, after)
    distance = np.abs(times_s[nearest] - wanted)
    return np.where(distance <= row_tolerance_s(timestamps, tolerance_s), nearest, NO_PICTURE)
