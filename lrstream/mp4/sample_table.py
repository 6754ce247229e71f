"""The sample table (`stbl`, ISO/IEC 14496-12, 8.5 to 8.7): run-length coded boxes to plain arrays.

The boxes must agree with each other before anything is expanded: every count is compared with the
sample count of `stsz`/`stz2`, and that one with the box it stands in or, where one size is stored
for all samples, with the file. So memory follows the bytes read, whatever the counts say.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.mp4.boxes import Box, fourcc_text
from lrstream.mp4.track import SampleTable
from lrstream.timebase import presentation_ticks, seconds_of_ticks

__all__ = [
    "MAX_CONSTANT_SIZE_SAMPLES",
    "PlacedSamples",
    "SampleDescription",
    "read_sample_description",
    "read_sample_table",
]

MAX_CONSTANT_SIZE_SAMPLES = 1 << 20
"""Samples accepted when `stsz` stores one size for all: the only count that no table backs with bytes."""

_MAX_TICKS = 1 << 53  # float64 still tells neighbouring ticks apart below this
_U4 = np.dtype(">u4")
_U8 = np.dtype(">u8")
_STTS = np.dtype([("count", ">u4"), ("delta", ">u4")])
_CTTS_V0 = np.dtype([("count", ">u4"), ("offset", ">u4")])
_CTTS_V1 = np.dtype([("count", ">u4"), ("offset", ">i4")])
_STSC = np.dtype([("first_chunk", ">u4"), ("samples", ">u4"), ("description", ">u4")])
_ENCRYPTED = ("encv", "enca", "encm", "enct", "encs", "drmi")
_VISUAL_ENTRY_FIELDS = 78  # bytes of a visual sample entry before its child boxes (12.1.3)

_Int64 = NDArray[np.int64]


class SampleDescription(NamedTuple):
    """What `stsd` says.

    Attributes:
        body: Payload of the box, verbatim.
        codec: Four-character code of the first entry.
    """

    body: bytes
    codec: str


class PlacedSamples(NamedTuple):
    """A sample table, and the range of the file that its samples stand in.

    Attributes:
        samples: The table.
        first_byte: Offset of the first byte of any sample.
        stop_byte: Offset behind the last one.
    """

    samples: SampleTable
    first_byte: int
    stop_byte: int


def read_sample_description(stbl: Box) -> SampleDescription:
    """Read `stsd` and refuse encrypted tracks.

    Raises:
        UnsupportedMp4Error: An entry is encrypted.
        MalformedMp4Error: There is no entry, or entries do not fit the box.
    """
    stsd = stbl.require(b"stsd")
    count = stsd.uint(4, 4)
    entries = list(stsd.children(8, padded=True))
    if count == 0 or len(entries) < count:
        raise stsd.malformed(f"{count} sample descriptions are announced and {len(entries)} are there")
    for entry in entries:
        kind = entry.kind
        encrypted = kind in _ENCRYPTED or any(
            child.kind == "sinf" for child in entry.children(_VISUAL_ENTRY_FIELDS, padded=True)
        )
        if encrypted:
            raise entry.unsupported(
                f"the video track is encrypted (sample entry {kind})",
                hint="Decrypt the file before it becomes part of a dataset.",
            )
    kind_bytes = stsd.raw(12, 4)
    if not all(0x20 <= c < 0x7F for c in kind_bytes):
        raise stsd.malformed(f"sample entry {fourcc_text(kind_bytes)} is no four-character code")
    return SampleDescription(bytes(stsd.payload), kind_bytes.decode("ascii"))


def read_sample_table(stbl: Box, *, timescale: int, edit_offset_s: float, file_size: int) -> PlacedSamples:
    """Resolve a sample table to arrays in decode order.

    Whatever is known of a run is not looked for in its samples: numpy lets go of the interpreter in each step
    over more than 500 of them, and threads that read meanwhile are slow to give it back.

    Args:
        stbl: The sample table box.
        timescale: Media ticks per second, > 0.
        edit_offset_s: Seconds that the edit list adds to every composition time.
        file_size: Size of the whole file in bytes; no sample may end behind it.

    Raises:
        MalformedMp4Error: Tables do not fit their boxes, disagree with each other or the file, or
            give two samples the same presentation time or the same bytes.
        UnsupportedMp4Error: No samples, empty samples, or more than one sample description in use.
    """
    sizes, stops = _sizes(stbl, file_size)
    durations, each_lasts = _durations(stbl, len(sizes))
    offsets_ticks, any_offset = _composition_offsets(stbl, len(sizes))
    ticks = presentation_ticks(durations, offsets_ticks if any_offset else None)
    # Without offsets (no B-frames) the times are the sums of the durations.
    if any_offset or not each_lasts:
        _check_presentation(stbl, ticks)
    offsets, first_byte, stop_byte = _offsets(stbl, sizes, stops, file_size)
    samples = SampleTable(
        pts_s=seconds_of_ticks(ticks, timescale, edit_offset_s),
        durations_ticks=durations,
        composition_offsets_ticks=offsets_ticks,
        sizes_bytes=sizes,
        offsets_bytes=offsets,
        sync_samples=_sync_samples(stbl, len(sizes)),
    )
    return PlacedSamples(samples, first_byte, stop_byte)


def _sizes(stbl: Box, file_size: int) -> tuple[_Int64, _Int64]:
    """Size of each sample, and of all up to and with it."""
    box = stbl.require(b"stsz", b"stz2")
    box.version(0)
    count = box.uint(8, 4)
    if count == 0:
        raise box.unsupported(
            "the video track has no samples",
            hint="The recording may have stopped before its first picture; record or leave out this file.",
        )
    if box.path.endswith("/stz2"):
        sizes = _compact_sizes(box, count)
    else:
        constant = box.uint(4, 4)
        if constant == 0:
            sizes = box.table(12, count, _U4).astype(np.int64)
        else:
            if count * constant > file_size:
                raise box.malformed(
                    f"{count} samples of {constant} bytes do not fit a file of {file_size} bytes"
                )
            if count > MAX_CONSTANT_SIZE_SAMPLES:
                raise box.unsupported(
                    f"{count} samples of one size; at most {MAX_CONSTANT_SIZE_SAMPLES} are supported"
                )
            sizes = np.full(count, constant, dtype=np.int64)
    if int(sizes.min()) == 0:
        first = int(np.argmin(sizes))
        raise box.unsupported(
            f"sample {first} of {count} is empty (0 bytes), so it has no picture", sample=first
        )
    stops = np.cumsum(sizes)  # at most 2**26 table entries of 32 bits: no overflow
    if int(stops[-1]) > file_size:
        raise box.malformed(f"samples add up to {stops[-1]} bytes, but the file has {file_size}")
    return sizes, stops


def _compact_sizes(box: Box, count: int) -> _Int64:
    """Sizes of `stz2` (8.7.3.3): fields of 4, 8 or 16 bits, the first of two in the high bits."""
    field_bits = box.uint(7, 1)
    if field_bits == 4:
        pairs = box.table(12, (count + 1) // 2, np.dtype(np.uint8))
        sizes = np.empty(2 * len(pairs), dtype=np.int64)
        sizes[0::2] = pairs >> 4
        sizes[1::2] = pairs & 15
        return sizes[:count]
    if field_bits == 8:
        return box.table(12, count, np.dtype(np.uint8)).astype(np.int64)
    if field_bits == 16:
        return box.table(12, count, np.dtype(">u2")).astype(np.int64)
    raise box.malformed(f"field size is {field_bits} bits, but 4, 8 or 16 are allowed")


def _expand(
    box: Box, counts: NDArray[np.unsignedinteger], values: NDArray[np.integer], num_samples: int
) -> _Int64:
    """Repeat each value as often as its count, once the counts are known to add up to ``num_samples``."""
    counts64 = counts.astype(np.int64)
    total = int(counts64.sum())
    if total != num_samples:
        raise box.malformed(f"the table covers {total} samples, but the track has {num_samples}")
    if len(values) == 1:
        return np.full(num_samples, int(values[0]), dtype=np.int64)
    return np.repeat(values.astype(np.int64), counts64)


def _durations(stbl: Box, num_samples: int) -> tuple[_Int64, bool]:
    """Duration of each sample, and whether every run of them lasts."""
    box = stbl.require(b"stts")
    box.version(0)
    table = box.table(8, box.uint(4, 4), _STTS)
    # Decoders take a duration with the top bit set for a negative one; no real picture lasts so long.
    if len(table) and int(table["delta"].max()) >= 1 << 31:
        raise box.malformed(f"a sample lasts {int(table['delta'].max())} ticks, beyond 2**31 - 1")
    length = float(np.dot(table["count"].astype(np.float64), table["delta"].astype(np.float64)))
    if length >= _MAX_TICKS:
        raise box.malformed(f"the track lasts {length:.3g} ticks, beyond {_MAX_TICKS}")
    return _expand(box, table["count"], table["delta"], num_samples), bool(table["delta"].all())


def _composition_offsets(stbl: Box, num_samples: int) -> tuple[_Int64, bool]:
    """Offset of each sample, and whether any run of them has one."""
    box = stbl.find(b"ctts")
    if box is None:
        return np.zeros(num_samples, dtype=np.int64), False
    entry = _CTTS_V1 if box.version(0, 1) == 1 else _CTTS_V0
    table = box.table(8, box.uint(4, 4), entry)
    # Version 0 is unsigned, but some writers store negative offsets in it and decoders follow them.
    # Either reading may be wrong, so neither is chosen.
    if len(table) and int(table["offset"].max()) >= 1 << 31:
        raise box.malformed(
            f"composition offset {int(table['offset'].max())} in version 0 is ambiguous",
            hint="Negative offsets need version 1 of this box; remux the file.",
        )
    return _expand(box, table["count"], table["offset"], num_samples), bool(table["offset"].any())


def _check_presentation(stbl: Box, ticks: _Int64) -> None:
    """No two samples are presented at the same time."""
    if bool((ticks[1:] > ticks[:-1]).all()):
        return
    # Not in presentation order: the usual case with B-frames, and the only one that needs a sort.
    order = np.argsort(ticks, kind="stable")
    ordered = ticks[order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(same):
        at = int(same[0])
        raise stbl.malformed(
            f"samples {int(order[at])} and {int(order[at + 1])} are presented at the same time "
            f"({int(ordered[at])} ticks)"
        )


def _sync_samples(stbl: Box, num_samples: int) -> _Int64:
    box = stbl.find(b"stss")
    if box is None:
        return np.arange(num_samples, dtype=np.int64)
    box.version(0)
    numbers = box.table(8, box.uint(4, 4), _U4).astype(np.int64)
    if len(numbers) == 0:
        raise box.unsupported("the track has no sync sample, so nothing in it can be decoded on its own")
    if int(numbers[0]) < 1 or int(numbers[-1]) > num_samples or bool((numbers[1:] <= numbers[:-1]).any()):
        raise box.malformed(f"sync samples are not strictly increasing numbers from 1 to {num_samples}")
    return numbers - 1


def _chunk_offsets(stbl: Box, file_size: int) -> tuple[Box, _Int64]:
    box = stbl.require(b"stco", b"co64")
    box.version(0)
    stored = box.table(8, box.uint(4, 4), _U8 if box.path.endswith("/co64") else _U4)
    if len(stored) and int(stored.max()) >= file_size:  # compared as stored: uint64 may not fit int64
        raise box.malformed(
            f"chunk {int(np.argmax(stored))} starts at byte {int(stored.max())}, behind the end of the file "
            f"({file_size} bytes)",
            hint="The file is truncated; copy or record it again.",
        )
    return box, stored.astype(np.int64)


def _samples_per_chunk(stbl: Box, num_chunks: int) -> tuple[Box, _Int64]:
    box = stbl.require(b"stsc")
    box.version(0)
    runs = box.table(8, box.uint(4, 4), _STSC)
    if len(runs) == 0 or num_chunks == 0:
        raise box.malformed(f"{len(runs)} runs for {num_chunks} chunks leave samples without a place")
    first = runs["first_chunk"].astype(np.int64)
    if int(first[0]) != 1 or int(first[-1]) > num_chunks or bool((first[1:] <= first[:-1]).any()):
        raise box.malformed(
            f"first chunks of the runs are not strictly increasing numbers from 1 to {num_chunks}"
        )
    if int(runs["samples"].min()) == 0:
        raise box.malformed("a run has chunks without samples")
    description, last_description = int(runs["description"].min()), int(runs["description"].max())
    if description != last_description:
        raise box.unsupported(
            f"the track switches between sample descriptions {description} to {last_description}; "
            "one for the whole track is supported",
            hint="Encode the video again with one configuration.",
        )
    if description != 1:
        raise box.unsupported(f"the track uses sample description {description}; only the first is supported")
    per_chunk = runs["samples"].astype(np.int64)
    if len(runs) == 1:
        return box, np.full(num_chunks, per_chunk[0])
    return box, np.repeat(per_chunk, np.diff(first, append=num_chunks + 1))


def _offsets(stbl: Box, sizes: _Int64, stops: _Int64, file_size: int) -> tuple[_Int64, int, int]:
    """Offset of each sample; the first byte of all, and the end of them. Takes `stops` for itself."""
    chunk_box, chunk_offsets = _chunk_offsets(stbl, file_size)
    run_box, per_chunk = _samples_per_chunk(stbl, len(chunk_offsets))
    total = int(per_chunk.sum())
    if total != len(sizes):
        raise run_box.malformed(f"the chunks hold {total} samples, but the track has {len(sizes)}")
    before = stops
    before -= sizes
    first_samples = np.cumsum(per_chunk)
    first_samples -= per_chunk
    offsets = before
    offsets += np.repeat(chunk_offsets - before[first_samples], per_chunk)
    return offsets, *_check_bytes(chunk_box, offsets, sizes, file_size)


def _check_bytes(box: Box, offsets: _Int64, sizes: _Int64, file_size: int) -> tuple[int, int]:
    """First and last bound of all samples, of which no two may share bytes."""
    ends = offsets + sizes
    # In file order, the rule, the last sample ends last.
    is_ordered = bool((offsets[1:] >= ends[:-1]).all())
    last_end = int(ends[-1] if is_ordered else ends.max())
    if last_end > file_size:
        sample = int(np.argmax(ends))
        raise box.malformed(
            f"sample {sample} ends at byte {int(ends[sample])}, behind the end of the file "
            f"({file_size} bytes)",
            hint="The file is truncated; copy or record it again.",
            sample=sample,
        )
    if is_ordered:
        return int(offsets[0]), last_end
    # Chunks may stand in any order, but two samples in the same bytes mean that an offset is wrong,
    # as when a writer let a 32-bit offset wrap round.
    order = np.argsort(offsets, kind="stable")
    shared = np.flatnonzero(offsets[order[1:]] < ends[order[:-1]])
    if len(shared):
        first, second = int(order[shared[0]]), int(order[shared[0] + 1])
        raise box.malformed(
            f"samples {first} and {second} share bytes at {int(offsets[second])}; a chunk offset is wrong",
            sample=second,
        )
    return int(offsets[order[0]]), last_end
