"""Ticks, timescales and seconds: the only place where one becomes another.

A *tick* is one unit of a track's media timescale (ISO/IEC 14496-12 `mdhd.timescale`, ticks per
second). Seconds are float64 everywhere. Edit lists count their empty part in *movie* ticks
(`mvhd.timescale`) and their media time in *media* ticks, so the two are kept apart by name.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "edit_offset_s",
    "presentation_ticks",
    "presentation_times_s",
    "readable_s",
    "rescale_ticks",
    "row_tolerance_s",
    "seconds_of_ticks",
]


def edit_offset_s(
    empty_movie_ticks: int, movie_timescale: int, media_time_ticks: int, media_timescale: int
) -> float:
    """Seconds that an edit list adds to composition times.

    Args:
        empty_movie_ticks: Sum of the leading empty edits, in movie ticks (a delay, >= 0).
        movie_timescale: Movie ticks per second, > 0.
        media_time_ticks: `media_time` of the one media edit, in media ticks (lead-in to hide, >= 0).
        media_timescale: Media ticks per second, > 0.

    Returns:
        The offset in seconds; negative when lead-in is hidden.
    """
    return empty_movie_ticks / movie_timescale - media_time_ticks / media_timescale


def presentation_times_s(
    durations_ticks: NDArray[np.int64],
    composition_offsets_ticks: NDArray[np.int64],
    timescale: int,
    offset_s: float,
) -> NDArray[np.float64]:
    """Presentation time of each sample in decode order (MP-2), float64 seconds, shape ``(n,)``.

    ``(sum of earlier durations + composition offset) / timescale + offset_s``, in exactly this
    order of operations: sidecars store the result, and the mapped index leaves it out where this
    function gives the same bits again.
    """
    ticks = presentation_ticks(durations_ticks, composition_offsets_ticks)
    return seconds_of_ticks(ticks, timescale, offset_s)


def presentation_ticks(
    durations_ticks: NDArray[np.int64], composition_offsets_ticks: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Presentation time of each sample before the edit list, ticks, shape ``(n,)``; no offsets if None."""
    ticks: NDArray[np.int64] = np.cumsum(durations_ticks, dtype=np.int64)
    ticks -= durations_ticks
    if composition_offsets_ticks is not None:
        ticks += composition_offsets_ticks
    return ticks


def seconds_of_ticks(ticks: NDArray[np.int64], timescale: int, offset_s: float) -> NDArray[np.float64]:
    """Presentation ticks as seconds behind the edit list, the second part of `presentation_times_s`."""
    seconds: NDArray[np.float64] = ticks / np.float64(timescale)
    if offset_s != 0.0:
        seconds += offset_s
    return seconds


def rescale_ticks(ticks: int, from_timescale: int, to_timescale: int) -> int:
    """The same length of time in ticks of another timescale, rounded down."""
    return ticks * to_timescale // from_timescale


def row_tolerance_s(timestamps: NDArray[np.float32], tolerance_s: float) -> NDArray[np.float64]:
    """Largest distance between a row's time and its picture's time, float64 seconds, shape ``(n,)``.

    Tables store ``timestamp`` as float32, whose step is already 0.24 ms after an hour, more than
    the usual tolerance. Half that step is added, so that a late frame of a long episode is not
    refused for the rounding of its own row.
    """
    return tolerance_s + np.spacing(np.abs(timestamps)).astype(np.float64) / 2


def readable_s(seconds: float) -> str:
    """A length of time for people, three digits in the unit that fits: ``33.3 ms``, ``4.88 ns``, ``0 s``."""
    if seconds == 0:
        return "0 s"
    seconds = float(f"{seconds:.3g}")  # first, or 999.9 µs would be 1e+03 µs
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
