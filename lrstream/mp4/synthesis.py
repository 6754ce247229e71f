"""Mini-MP4: a self-contained MP4 of one span, from the index and the span's bytes (MP-6).

The header is `ftyp` (the source's), `moov` with one track, and the header of `mdat`; the payload
is the span's byte range as it stands in the source, gaps with other tracks' bytes included, and the
chunk offsets point into it. All of the header follows from the index, so the exact size is known
before any payload is read.

Time: decoding starts at 0 and composition offsets are kept, so the pictures of a mini-MP4 are
presented from 0 or a little later. There is no edit list, so no reader hides anything. Only where
negative offsets would put a picture before 0 are all offsets raised by the same amount.
`mini_mp4_time_offset_s` leads from a time in the mini-MP4 to the time in the source file.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import MalformedMp4Error, TransferError, UsageError
from lrstream.mp4.span import Span
from lrstream.mp4.track import TrackIndex

__all__ = [
    "MAX_PLAIN_PAYLOAD_BYTES",
    "HeaderCounts",
    "header_size",
    "mini_mp4",
    "mini_mp4_frames",
    "mini_mp4_header",
    "mini_mp4_size",
    "mini_mp4_time_offset_s",
]

_U32_MAX = 0xFFFF_FFFF
_DEFAULT_FTYP = struct.pack(">I4s4sI4s4s", 24, b"ftyp", b"isom", 0x200, b"isom", b"iso2")

MAX_PLAIN_PAYLOAD_BYTES = 1 << 31
"""Up to this size a payload needs neither 64-bit chunk offsets nor a 64-bit size: no header is that long."""

_Int64 = NDArray[np.int64]
_Count = NDArray[np.int64] | int


class HeaderCounts(NamedTuple):
    """What the size of a header follows from, for one span or, as arrays int64[k], for many.

    Attributes:
        duration_ticks: Sum of all durations.
        num_samples: Samples.
        num_sync: Keyframes among them.
        duration_runs: Runs of equal durations.
        offset_runs: Runs of equal composition offsets as written; 0 where all are 0.
        has_sizes: Whether samples differ in size, so that each size is stored.
        num_chunks: Chunks, that is runs of samples with nothing in between.
        chunk_runs: Runs of chunks with equally many samples.
    """

    duration_ticks: _Count
    num_samples: _Count
    num_sync: _Count
    duration_runs: _Count
    offset_runs: _Count
    has_sizes: NDArray[np.bool_] | bool
    num_chunks: _Count
    chunk_runs: _Count


def header_size(
    track: TrackIndex, counts: HeaderCounts, *, wide_offsets: bool = False, mdat_header_size: int = 8
) -> _Int64:
    """Bytes before the payload, by counting: sizes of many episodes are asked for where few are fetched.

    Args:
        track: Index of the source file.
        counts: Of one span or of many.
        wide_offsets: Whether chunk offsets take 64 bits.
        mdat_header_size: 8, or 16 where the payload's size takes 64 bits.

    Returns:
        int64 of the shape of the counts.
    """
    duration, num_samples, num_sync, duration_runs, offset_runs, has_sizes, num_chunks, chunk_runs = (
        np.asarray(count, dtype=np.int64) for count in counts
    )
    tables = 8 + len(track.stsd_body) + 16 + 8 * duration_runs
    tables += np.where(offset_runs > 0, 16 + 8 * offset_runs, 0)
    tables += np.where(num_sync < num_samples, 16 + 4 * num_sync, 0)
    tables += 20 + 4 * num_samples * has_sizes
    tables += 16 + 12 * chunk_runs
    tables += 16 + (8 if wide_offsets else 4) * num_chunks
    frame = np.where(duration > _U32_MAX, _FRAME_SIZES[True], _FRAME_SIZES[False])
    size: _Int64 = len(_ftyp(track)) + frame + tables + mdat_header_size
    return size


def mini_mp4_size(track: TrackIndex, span: Span) -> int:
    """Exact size in bytes of the mini-MP4 of ``span``, header and payload.

    Raises:
        MalformedMp4Error: The index holds values that no MP4 can store.
    """
    return _Plan(track, span).header_size + span.num_bytes


def mini_mp4_header(track: TrackIndex, span: Span) -> bytes:
    """Everything before the payload: `ftyp`, `moov` and the header of `mdat`.

    Followed by the source's bytes ``[span.start_byte, span.stop_byte)`` it is the mini-MP4.

    Raises:
        MalformedMp4Error: The index holds values that no MP4 can store.
    """
    return _Plan(track, span).header()


def mini_mp4(track: TrackIndex, span: Span, payload: bytes | bytearray | memoryview) -> bytes:
    """The whole mini-MP4.

    Args:
        track: Index of the source file.
        span: Span in it.
        payload: The source's bytes ``[span.start_byte, span.stop_byte)``.

    Raises:
        TransferError: The payload has another length than the span.
        MalformedMp4Error: The index holds values that no MP4 can store.
    """
    if len(payload) != span.num_bytes:
        raise TransferError(
            f"{track.file_path}: {len(payload)} bytes came for the range "
            f"[{span.start_byte}, {span.stop_byte}), expected {span.num_bytes}.",
            file_path=track.file_path,
        )
    return b"".join((mini_mp4_header(track, span), payload))


def mini_mp4_time_offset_s(track: TrackIndex, span: Span) -> float:
    """Seconds to add to a presentation time in the mini-MP4 to get the time in the source file.

    The sum differs from the index's ``pts_s`` by rounding alone (some 1e-12 s).
    """
    plan = _Plan(track, span)
    first_ticks = int(plan.composition_offsets[0])  # decoding starts at 0
    return float(track.samples.pts_s[span.first_sample]) - first_ticks / track.timescale


def mini_mp4_frames(track: TrackIndex, span: Span) -> tuple[_Int64, _Int64, NDArray[np.bool_]]:
    """What a demuxer finds in the mini-MP4 of ``span``, without one: a row for each of its samples.

    Returns:
        Presentation times and durations, media ticks, int64 ``(n,)``, and which samples are keyframes, bool
        ``(n,)``; in decode order.
    """
    plan = _Plan(track, span)
    durations = track.samples.durations_ticks[span.first_sample : span.stop_sample].astype(np.int64)
    is_sync = np.zeros(len(durations), dtype=np.bool_)
    is_sync[plan.sync] = True
    return np.cumsum(durations) - durations + plan.composition_offsets, durations, is_sync


class _Runs(NamedTuple):
    """Run-length code of an array: ``values[i]`` stands ``counts[i]`` times."""

    counts: _Int64
    values: _Int64


def _runs(array: _Int64) -> _Runs:
    bounds = _bounds(array[1:] != array[:-1])
    return _Runs(bounds[1:] - bounds[:-1], array[bounds[:-1]])


def _bounds(breaks: NDArray[np.bool_]) -> _Int64:
    """Bounds of the runs of ``len(breaks) + 1`` items, ends included; a run ends before each break."""
    inner = np.flatnonzero(breaks)
    bounds = np.empty(len(inner) + 2, dtype=np.int64)
    bounds[0], bounds[-1] = 0, len(breaks) + 1
    np.add(inner, 1, out=bounds[1:-1])
    return bounds


class _Plan:
    """Tables of one mini-MP4, and the header written from them.

    Attributes:
        composition_offsets: As written, media ticks, shape ``(n,)``; raised where a picture would
            otherwise be presented before 0.
        sync: Keyframes, counted from the span's first sample, int64 ``(k,)``.
        header_size: Bytes before the payload.
    """

    def __init__(self, track: TrackIndex, span: Span) -> None:
        samples = track.samples
        if not 0 <= span.first_sample < span.stop_sample <= samples.num_samples:
            raise UsageError(
                f"{track.file_path}: samples [{span.first_sample}, {span.stop_sample}) are no part of "
                f"a track of {samples.num_samples}.",
                file_path=track.file_path,
            )
        part = slice(span.first_sample, span.stop_sample)
        self._track = track
        self._payload_size = span.num_bytes
        # Indexes may hold small integer types; nothing below may wrap in them.
        durations = self._checked(samples.durations_ticks[part], "duration", _U32_MAX)
        self._duration = int(durations.sum())
        self._durations = _runs(durations)
        self.composition_offsets = _from_zero(
            durations, samples.composition_offsets_ticks[part].astype(np.int64)
        )
        self._checked(np.abs(self.composition_offsets), "composition offset", _U32_MAX >> 1)
        self._has_offsets = bool(self.composition_offsets.any())
        self._offset_runs = _runs(self.composition_offsets)
        sync = samples.sync_samples
        low, high = np.searchsorted(sync, (span.first_sample, span.stop_sample))
        self.sync = sync[low:high].astype(np.int64) - span.first_sample
        self._sizes = self._checked(samples.sizes_bytes[part], "size", _U32_MAX)
        self._constant_size = int(self._sizes[0]) if bool((self._sizes == self._sizes[0]).all()) else 0
        offsets = samples.offsets_bytes[part].astype(np.int64) - span.start_byte
        ends = offsets + self._sizes
        if int(offsets.min()) < 0 or int(ends.max()) > span.num_bytes:
            raise MalformedMp4Error(
                f"{track.file_path}: samples {span.first_sample} to {span.stop_sample - 1} are not all "
                f"in the bytes [{span.start_byte}, {span.stop_byte}).",
                file_path=track.file_path,
            )
        # A chunk is a run of samples with nothing in between.
        chunks = _bounds(offsets[1:] != ends[:-1])
        self._chunk_starts = offsets[chunks[:-1]]
        self._chunk_sizes = _runs(chunks[1:] - chunks[:-1])
        self._mdat_header_size = 8 if self._payload_size + 8 <= _U32_MAX else 16
        last_chunk = int(self._chunk_starts.max())
        self._wide_offsets = False
        self.header_size = self._measure()
        if self.header_size + last_chunk > _U32_MAX:
            self._wide_offsets = True
            self.header_size = self._measure()

    def header(self) -> bytes:
        track = self._track
        moov = _movie(
            track.track_id, track.timescale, self._duration, track.width, track.height, self._tables()
        )
        if self._mdat_header_size == 8:
            mdat = struct.pack(">I4s", self._payload_size + 8, b"mdat")
        else:
            mdat = struct.pack(">I4sQ", 1, b"mdat", self._payload_size + 16)
        return b"".join((_ftyp(track), moov, mdat))

    def _measure(self) -> int:
        counts = HeaderCounts(
            duration_ticks=self._duration,
            num_samples=len(self._sizes),
            num_sync=len(self.sync),
            duration_runs=len(self._durations.counts),
            offset_runs=len(self._offset_runs.counts) if self._has_offsets else 0,
            has_sizes=self._constant_size == 0,
            num_chunks=len(self._chunk_starts),
            chunk_runs=len(self._chunk_sizes.counts),
        )
        return int(
            header_size(
                self._track, counts, wide_offsets=self._wide_offsets, mdat_header_size=self._mdat_header_size
            )
        )

    def _checked(self, values: NDArray[np.integer], name: str, limit: int) -> _Int64:
        array = values.astype(np.int64)
        if int(array.min()) < 0 or int(array.max()) > limit:
            raise MalformedMp4Error(
                f"{self._track.file_path}: the index has a sample {name} outside 0 to {limit} "
                f"({int(array.min())} to {int(array.max())}).",
                hint="Build the sidecar of this dataset again.",
                file_path=self._track.file_path,
            )
        return array

    def _tables(self) -> list[bytes]:
        num_samples = len(self._sizes)
        boxes = [_box(b"stsd", self._track.stsd_body)]
        boxes.append(_table_box(b"stts", 0, *self._durations))
        if self._has_offsets:
            version = int(self.composition_offsets.min() < 0)
            boxes.append(_table_box(b"ctts", version, *self._offset_runs))
        if len(self.sync) < num_samples:
            boxes.append(_table_box(b"stss", 0, self.sync + 1))
        stored_sizes = b"" if self._constant_size else self._sizes.astype(">u4").tobytes()
        counts = struct.pack(">II", self._constant_size, num_samples)
        boxes.append(_full_box(b"stsz", 0, 0, counts, stored_sizes))
        first_chunks = np.cumsum(self._chunk_sizes.counts) - self._chunk_sizes.counts + 1
        description = np.ones_like(first_chunks)
        boxes.append(_table_box(b"stsc", 0, first_chunks, self._chunk_sizes.values, description))
        chunk_offsets = self._chunk_starts + self.header_size
        if self._wide_offsets:
            boxes.append(_table_box(b"co64", 0, chunk_offsets, item="u8"))
        else:
            boxes.append(_table_box(b"stco", 0, chunk_offsets))
        return boxes


def _from_zero(durations: _Int64, composition_offsets: _Int64) -> _Int64:
    """Composition offsets under which no picture is presented before 0; unchanged where none is."""
    earliest = int((np.cumsum(durations) - durations + composition_offsets).min())
    return composition_offsets - earliest if earliest < 0 else composition_offsets


_IDENTITY_MATRIX = struct.pack(">9I", 0x0001_0000, 0, 0, 0, 0x0001_0000, 0, 0, 0, 0x4000_0000)
_ENABLED_IN_MOVIE = 3  # tkhd flags: track enabled, used in the presentation
_UNDETERMINED = 0x55C4  # language "und", five bits a letter


def _ftyp(track: TrackIndex) -> bytes:
    return track.ftyp if _is_usable_ftyp(track.ftyp) else _DEFAULT_FTYP


def _is_usable_ftyp(box: bytes) -> bool:
    """Whether a source's `ftyp` can be taken over: readers stumble over brands cut short or not text."""
    brands = box[8:12] + box[16:]
    is_whole = len(box) >= 16 and len(box) % 4 == 0
    return is_whole and brands.isascii() and box[:8] == struct.pack(">I4s", len(box), b"ftyp")


def _movie(
    track_id: int, timescale: int, duration: int, width: int, height: int, tables: list[bytes]
) -> bytes:
    """A `moov` with one video track; its size follows from the tables and the width of durations alone."""
    track_id = max(track_id, 1)
    wide = duration > _U32_MAX  # needs version 1 of the header boxes
    times = struct.pack(">QQ" if wide else ">II", 0, 0)
    ticks = duration.to_bytes(8 if wide else 4, "big")
    scale = struct.pack(">I", timescale)
    mvhd = _full_box(
        b"mvhd", wide, 0, times, scale, ticks, struct.pack(">IH10x", 0x0001_0000, 0x0100),
        _IDENTITY_MATRIX, bytes(24), struct.pack(">I", min(track_id + 1, _U32_MAX)),
    )  # fmt: skip
    tkhd = _full_box(
        b"tkhd", wide, _ENABLED_IN_MOVIE, times, struct.pack(">I4x", track_id), ticks, bytes(16),
        _IDENTITY_MATRIX, struct.pack(">II", width << 16, height << 16),
    )  # fmt: skip
    mdhd = _full_box(b"mdhd", wide, 0, times, scale, ticks, struct.pack(">HH", _UNDETERMINED, 0))
    hdlr = _full_box(b"hdlr", 0, 0, bytes(4), b"vide", bytes(12), b"VideoHandler\0")
    vmhd = _full_box(b"vmhd", 0, 1, bytes(8))
    dinf = _box(b"dinf", _full_box(b"dref", 0, 0, struct.pack(">I", 1), _full_box(b"url ", 0, 1)))
    minf = _box(b"minf", vmhd, dinf, _box(b"stbl", *tables))
    return _box(b"moov", mvhd, _box(b"trak", tkhd, _box(b"mdia", mdhd, hdlr, minf)))


def _box(kind: bytes, *parts: bytes) -> bytes:
    return b"".join((struct.pack(">I4s", 8 + sum(map(len, parts)), kind), *parts))


def _full_box(kind: bytes, version: int, flags: int, *parts: bytes) -> bytes:
    return _box(kind, struct.pack(">I", version << 24 | flags), *parts)


def _table_box(kind: bytes, version: int, *columns: _Int64, item: str = "u4") -> bytes:
    """Full box with an entry count and one row per entry; negative values become two's complement."""
    rows = np.stack(columns, axis=1).astype(f">{item}")
    return _full_box(kind, version, 0, struct.pack(">I", len(rows)), rows.tobytes())


# Size of `moov` without its tables, by whether its duration needs 64 bits.
_FRAME_SIZES = {wide: len(_movie(1, 1, (_U32_MAX + 1) * wide, 0, 0, [])) for wide in (False, True)}
