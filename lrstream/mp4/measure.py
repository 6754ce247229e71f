"""Sizes of the mini-MP4s of many episodes of one file, by arithmetic instead of building each (MP-6).

Everything in a mini-MP4's header is a count: runs of durations and of composition offsets, keyframes,
samples, chunks and runs of chunks. Where such runs begin is found once in the whole file; how many begin
inside a span is then the difference of two look-ups, whatever its length. `mini_mp4_size` builds
the tables and is what the results here have to equal; rare spans (beyond 2 GiB, values that no MP4
stores) are left to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lrstream.mp4.span import Span, Spans, reduced
from lrstream.mp4.synthesis import MAX_PLAIN_PAYLOAD_BYTES, HeaderCounts, header_size, mini_mp4_size
from lrstream.mp4.track import TrackIndex

__all__ = ["mini_mp4_sizes"]

_Int64 = NDArray[np.int64]
_U32_MAX = 0xFFFF_FFFF


def mini_mp4_sizes(track: TrackIndex, spans: Spans) -> _Int64:
    """Exact size of the mini-MP4 of each span, int64[k], header and payload.

    Args:
        track: Index of the file.
        spans: As `SpanFinder.find_all` gives them: their bytes are exactly those of their samples.

    Raises:
        MalformedMp4Error: The index holds values that no MP4 can store.
    """
    if len(spans.first_sample) == 0:
        return np.zeros(0, dtype=np.int64)
    tables = _Tables(track)
    payload = spans.stop_byte - spans.start_byte
    sizes = header_size(track, tables.counts(spans)) + payload
    plain = (payload <= MAX_PLAIN_PAYLOAD_BYTES) & (sizes <= _U32_MAX) & tables.storable
    for place in np.flatnonzero(~plain).tolist():
        sizes[place] = mini_mp4_size(track, Span(*(int(column[place]) for column in spans)))
    return sizes


class _Tables:
    """Where runs begin in the sample table of one file."""

    def __init__(self, track: TrackIndex) -> None:
        samples = track.samples
        # Indexes may hold small integer types; nothing below may wrap in them.
        durations = samples.durations_ticks.astype(np.int64, copy=False)
        self._offsets_ticks = samples.composition_offsets_ticks.astype(np.int64, copy=False)
        self._sizes = samples.sizes_bytes.astype(np.int64, copy=False)
        self._sync = samples.sync_samples
        self._duration_changes = _changes(durations)
        self._offset_changes = _changes(self._offsets_ticks)
        # Decode time of each sample, and of the end.
        self._decoded = np.zeros(len(durations) + 1, dtype=np.int64)
        np.cumsum(durations, out=self._decoded[1:])
        offsets = samples.offsets_bytes.astype(np.int64, copy=False)
        gaps = np.flatnonzero(offsets[1:] != (offsets + self._sizes)[:-1]) + 1
        # First sample of each chunk, and the number of samples; then chunks unlike the one before in size.
        self._chunks = np.concatenate(([0], gaps, [len(offsets)]))
        self._chunk_changes = _changes(np.diff(self._chunks))
        highest = max(int(self._offsets_ticks.max()), -int(self._offsets_ticks.min()))
        self.storable = (
            int(durations.min()) >= 0
            and int(durations.max()) <= _U32_MAX
            and int(self._sizes.min()) >= 0
            and int(self._sizes.max()) <= _U32_MAX
            # Offsets may be raised by as much as the lowest is below 0.
            and 2 * highest <= _U32_MAX >> 1
        )

    def counts(self, spans: Spans) -> HeaderCounts:
        first, stop = spans.first_sample, spans.stop_sample
        offset_runs = 1 + _between(self._offset_changes, first, stop - 1)
        has_offsets = (offset_runs > 1) | (self._raised_first(first, stop) != 0)
        num_chunks, chunk_runs = self._count_chunks(first, stop)
        return HeaderCounts(
            duration_ticks=self._decoded[stop] - self._decoded[first],
            num_samples=stop - first,
            num_sync=np.searchsorted(self._sync, stop) - np.searchsorted(self._sync, first),
            duration_runs=1 + _between(self._duration_changes, first, stop - 1),
            offset_runs=np.where(has_offsets, offset_runs, 0),
            has_sizes=self._has_sizes(first, stop),
            num_chunks=num_chunks,
            chunk_runs=chunk_runs,
        )

    def _raised_first(self, first: _Int64, stop: _Int64) -> _Int64:
        """Composition offset of the first sample of each span, as written: nothing is presented before 0."""
        offsets = self._offsets_ticks
        if len(self._offset_changes) == 0:
            earliest = offsets[first]  # durations are not negative
        else:
            presented = self._decoded[:-1] + offsets
            earliest = reduced(np.minimum, presented, first, stop) - self._decoded[first]
        return offsets[first] - np.minimum(earliest, 0)

    def _has_sizes(self, first: _Int64, stop: _Int64) -> NDArray[np.bool_]:
        """Whether the samples of each span differ in size (or are empty, which is stored the same way)."""
        sizes = self._sizes
        second = np.minimum(first + 1, stop - 1)
        differ: NDArray[np.bool_] = (sizes[first] != sizes[second]) | (sizes[first] == 0)
        for place in np.flatnonzero(~differ).tolist():  # hardly any: two neighbours of one size
            differ[place] = (sizes[first[place] : stop[place]] != sizes[first[place]]).any()
        return differ

    def _count_chunks(self, first: _Int64, stop: _Int64) -> tuple[_Int64, _Int64]:
        """Chunks of each span, and runs of chunks of one size; the outer ones may be cut."""
        bounds = self._chunks
        low = np.searchsorted(bounds, first, side="right") - 1
        high = np.searchsorted(bounds, stop - 1, side="right") - 1
        head = np.minimum(bounds[low + 1], stop) - first
        tail = stop - np.maximum(bounds[high], first)
        # Chunks strictly between the first and the last are whole.
        after, before = np.minimum(low + 1, len(bounds) - 2), np.maximum(high - 1, 0)
        inner = np.where(high - low > 2, _between(self._chunk_changes, after, before), 0)
        whole_after, whole_before = bounds[after + 1] - bounds[after], bounds[before + 1] - bounds[before]
        differs_at_head = head != np.where(high - low > 1, whole_after, tail)
        differs_at_tail = tail != whole_before
        runs = 1 + inner + (differs_at_head & (high > low)) + (differs_at_tail & (high - low > 1))
        return high - low + 1, runs


def _changes(values: _Int64) -> _Int64:
    """Elements that differ from the one before, ascending."""
    if values.strides == (0,):  # one value for all, which takes no memory in an index
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(values[1:] != values[:-1]) + 1


def _between(changes: _Int64, first: _Int64, last: _Int64) -> _Int64:
    """How many of `changes` are in ``(first, last]``, for each pair."""
    counts: _Int64 = np.searchsorted(changes, last, side="right") - np.searchsorted(
        changes, first, side="right"
    )
    return counts
