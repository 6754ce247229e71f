"""The sample table of one row of the mapped index: checked at once, widened when it is looked at.

A process may hold the records of hundreds of files of which it reads a few at a time. The stored form of
a table lies in pages that all processes share; its arrays take ten times as much, so each is made when
somebody asks for it, and kept then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.index.encoding import EncodedArray, decode
from lrstream.mp4.track import SampleTable
from lrstream.timebase import presentation_times_s

__all__ = ["MappedSamples", "StoredSamples", "bytes_before"]


class StoredSamples(NamedTuple):
    """A sample table as a row stores it, checked.

    Attributes:
        num_samples: Number of samples.
        num_sync: Number of keyframes.
        sync_first: The first of them.
        timescale: Media ticks per second.
        offsets_contiguous: Whether offsets are stored less the sizes before them.
        pts_offset_s: Edit offset from which times are computed; None where they are stored.
        pts_data: The stored times, little-endian float64; empty where they are computed.
        arrays: The encoded arrays: durations, compositions, sizes, offsets, and the steps of sync.
    """

    num_samples: int
    num_sync: int
    sync_first: int
    timescale: int
    offsets_contiguous: bool
    pts_offset_s: float | None
    pts_data: Any
    arrays: dict[str, EncodedArray]


class MappedSamples(SampleTable):
    """A `SampleTable` whose arrays are made on first use; int64 and float64, read-only.

    Thread-safe: two threads that ask first make the same array twice, and either is kept.
    """

    __slots__ = ("_made", "_stored")

    _made: dict[str, NDArray[Any]]
    _stored: StoredSamples

    def __init__(self, stored: StoredSamples) -> None:
        object.__setattr__(self, "_stored", stored)
        object.__setattr__(self, "_made", {})

    @property
    def num_samples(self) -> int:
        """Number of samples; needs none of the arrays."""
        return self._stored.num_samples

    @property
    def pts_s(self) -> NDArray[np.float64]:
        return self._array("pts_s", self._make_pts)

    @property
    def durations_ticks(self) -> NDArray[np.integer]:
        return self._array("durations", lambda: self._decoded("durations"))

    @property
    def composition_offsets_ticks(self) -> NDArray[np.integer]:
        return self._array("compositions", lambda: self._decoded("compositions"))

    @property
    def sizes_bytes(self) -> NDArray[np.integer]:
        return self._array("sizes", lambda: self._decoded("sizes"))

    @property
    def offsets_bytes(self) -> NDArray[np.integer]:
        return self._array("offsets", self._make_offsets)

    @property
    def sync_samples(self) -> NDArray[np.integer]:
        return self._array("sync", self._make_sync)

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = (self.pts_s, self.durations_ticks, self.composition_offsets_ticks)
        return SampleTable, (*arrays, self.sizes_bytes, self.offsets_bytes, self.sync_samples)

    def _array(self, name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        array = self._made.get(name)
        if array is None:
            array = make()
            array.flags.writeable = False
            self._made[name] = array
        return array

    def _decoded(self, name: str) -> NDArray[np.int64]:
        return decode(self._stored.arrays[name], self._stored.num_samples)

    def _make_pts(self) -> NDArray[np.float64]:
        stored = self._stored
        if stored.pts_offset_s is None:
            times = np.frombuffer(stored.pts_data, "<f8", stored.num_samples)
            return np.require(times, np.float64, ["ALIGNED"])
        durations, compositions = self._decoded("durations"), self._decoded("compositions")
        return presentation_times_s(durations, compositions, stored.timescale, stored.pts_offset_s)

    def _make_offsets(self) -> NDArray[np.int64]:
        offsets = self._decoded("offsets")
        return offsets + bytes_before(self._decoded("sizes")) if self._stored.offsets_contiguous else offsets

    def _make_sync(self) -> NDArray[np.int64]:
        stored = self._stored
        sync = np.empty(stored.num_sync, np.int64)
        sync[0] = stored.sync_first
        np.cumsum(decode(stored.arrays["sync"], stored.num_sync - 1), out=sync[1:])
        sync[1:] += stored.sync_first
        return sync


def bytes_before(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of all samples before each one, int64."""
    before: NDArray[np.int64] = np.cumsum(sizes)
    before -= sizes
    return before
