"""The mapped index: one Arrow IPC file, one row for each source file, sorted by path.

Any Arrow tool reads it; `docs/reference` describes the columns. A row holds the scalars of a
`TrackIndex` and, for each array of its sample table, the encoded form of `encoding`:

    durations, compositions, sizes   as they are
    offsets                          less the sizes before them where ``offsets_contiguous``, since
                                     samples mostly follow each other without a gap
    sync                             the first keyframe, and the steps from one to the next
    pts                              nothing where `presentation_times_s` gives the same bits from
                                     ``pts_offset_s``; dense float64 elsewhere
    checksum                         CRC-32 of all other cells, since most damage would give values
                                     that are as plausible as the right ones

Rows are grouped into record batches of bounded size, so that writing needs no more memory than
one of them, and a reader maps only the batches that it looks into.
"""

from __future__ import annotations

import math
import zlib
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lrstream.errors import SidecarError
from lrstream.index.encoding import EncodedArray, Summary, encode, summarize
from lrstream.index.samples import MappedSamples, StoredSamples, bytes_before
from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.members import MAX_SAMPLES
from lrstream.timebase import presentation_times_s

__all__ = ["FORMAT_VERSION", "SCHEMA", "identity_checksum", "row_checksum", "track_from_row", "track_to_row"]

# A new number gives a new directory beside the old one (SC-9), and readers refuse other numbers.
FORMAT_VERSION = 1

ENCODED = ("durations", "compositions", "sizes", "offsets", "sync")

_SCALARS: dict[str, pa.DataType] = {
    "file_size": pa.int64(),
    "moov_offset": pa.int64(),
    "mdat_offset": pa.int64(),
    "mdat_payload_offset": pa.int64(),
    "mdat_payload_size": pa.int64(),
    "faststart": pa.bool_(),
    "timescale": pa.uint32(),
    "duration_ticks": pa.int64(),
    "track_id": pa.uint32(),
    "width": pa.uint16(),
    "height": pa.uint16(),
}
# A dataset has few different ones, shared by all files of a camera.
_SHARED: dict[str, pa.DataType] = {"codec": pa.string(), "ftyp": pa.binary(), "stsd_body": pa.binary()}


def _schema() -> pa.Schema:
    fields = [pa.field("path", pa.string(), nullable=False), pa.field("fingerprint", pa.string())]
    fields += [pa.field(name, kind, nullable=False) for name, kind in _SCALARS.items()]
    fields += [
        pa.field(name, pa.dictionary(pa.int32(), kind), nullable=False) for name, kind in _SHARED.items()
    ]
    plain: dict[str, pa.DataType] = {
        "num_samples": pa.int64(),
        "num_sync": pa.int64(),
        "sync_first": pa.int64(),
        "offsets_contiguous": pa.bool_(),
        "pts_derived": pa.bool_(),
        "pts_offset_s": pa.float64(),
        "pts_data": pa.large_binary(),
    }
    fields += [pa.field(name, kind, nullable=False) for name, kind in plain.items()]
    for name in ENCODED:
        parts = {
            "kind": pa.uint8(), "width": pa.uint8(), "num_runs": pa.int64(),
            "base": pa.int64(), "scale": pa.uint64(), "data": pa.large_binary(),
        }  # fmt: skip
        fields += [pa.field(f"{name}_{part}", kind, nullable=False) for part, kind in parts.items()]
    fields.append(pa.field("checksum", pa.uint32(), nullable=False))
    return pa.schema(fields)


SCHEMA = _schema()

_CELLS = {name: itemgetter(*(f"{name}_{part}" for part in EncodedArray._fields)) for name in ENCODED}
_DATA_CELLS = [name for name in SCHEMA.names if name.endswith("_data") or name in ("ftyp", "stsd_body")]
_TEXT_CELLS = itemgetter(*(name for name in SCHEMA.names if name != "checksum" and name not in _DATA_CELLS))
_TRACK_FIELDS = (*_SCALARS, *_SHARED)
_TRACK_CELLS = itemgetter(*_TRACK_FIELDS)


def track_to_row(track: TrackIndex, fingerprint: str | None) -> dict[str, Any]:
    """One row as Python values by column name.

    Args:
        track: A checked track with int64 and float64 arrays.
        fingerprint: Content identity of the source, if the sidecar has one.
    """
    samples = track.samples
    row: dict[str, Any] = {"path": track.file_path, "fingerprint": fingerprint}
    row |= {name: getattr(track, name) for name in _TRACK_FIELDS}
    row |= {
        "num_samples": samples.num_samples,
        "num_sync": len(samples.sync_samples),
        "sync_first": int(samples.sync_samples[0]),
    }
    sizes, offsets = _int64(samples.sizes_bytes), _int64(samples.offsets_bytes)
    plain, gapless = encode(offsets), encode(offsets - bytes_before(sizes))
    row["offsets_contiguous"] = len(gapless.data) < len(plain.data)
    arrays = {
        "durations": encode(_int64(samples.durations_ticks)),
        "compositions": encode(_int64(samples.composition_offsets_ticks)),
        "sizes": encode(sizes),
        "offsets": gapless if row["offsets_contiguous"] else plain,
        "sync": encode(np.diff(_int64(samples.sync_samples))),
    }
    for name, array in arrays.items():
        row |= {f"{name}_{part}": value for part, value in array._asdict().items()}
    offset_s = derivable_offset_s(samples, track.timescale)
    row["pts_derived"] = offset_s is not None
    row["pts_offset_s"] = 0.0 if offset_s is None else offset_s
    row["pts_data"] = b"" if offset_s is not None else samples.pts_s.astype("<f8").tobytes()
    row["checksum"] = row_checksum(row)
    return row


def track_from_row(row: dict[str, Any]) -> TrackIndex:
    """The track that `track_to_row` was given; arrays are int64 and float64 and read-only.

    Everything is checked here; the arrays are made when they are first looked at.

    Args:
        row: Values by column name; binary columns may be any buffer, and are referred to.

    Raises:
        SidecarError: The row contradicts itself.
    """
    if row["checksum"] != row_checksum(row):
        raise SidecarError(f"The mapped index's record of {row['path']} does not match its checksum.")
    count, num_sync = row["num_samples"], row["num_sync"]
    if not 1 <= num_sync <= count <= MAX_SAMPLES:
        raise SidecarError(f"The mapped index gives {row['path']} {count} samples and {num_sync} keyframes.")
    if row["timescale"] < 1:
        raise SidecarError(f"The mapped index gives {row['path']} a timescale of {row['timescale']}.")
    arrays = {name: EncodedArray._make(cells(row)) for name, cells in _CELLS.items()}
    if not row["pts_derived"] and len(row["pts_data"]) != 8 * count:
        raise SidecarError(
            f"The mapped index holds {len(row['pts_data'])} bytes of times for {count} samples."
        )
    stored = StoredSamples(
        num_samples=count,
        num_sync=num_sync,
        sync_first=row["sync_first"],
        timescale=row["timescale"],
        offsets_contiguous=row["offsets_contiguous"],
        pts_offset_s=row["pts_offset_s"] if row["pts_derived"] else None,
        pts_data=row["pts_data"],
        arrays=arrays,
    )
    _check_bounds(stored, row)
    scalars = dict(zip(_TRACK_FIELDS, _TRACK_CELLS(row), strict=True))
    return TrackIndex(file_path=row["path"], **scalars, samples=MappedSamples(stored))


def identity_checksum(identity: SidecarIdentity) -> str:
    """CRC-32 of everything that decides whether an index answers a request, as hex digits."""
    parts = [identity.repo_id, identity.revision, identity.data_root]
    for source in identity.source_files:
        parts += [source.path, str(source.size), str(identity.source_fingerprints.get(source.path))]
    return f"{zlib.crc32(_text(parts)):08x}"


def row_checksum(row: dict[str, Any]) -> int:
    """CRC-32 of a row's cells in the order of the schema, numbers and texts first."""
    crc = zlib.crc32(_text(list(map(str, _TEXT_CELLS(row)))))
    for name in _DATA_CELLS:
        crc = zlib.crc32(row[name], zlib.crc32(len(row[name]).to_bytes(8, "little"), crc))
    return crc


def _text(parts: list[str]) -> bytes:
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def derivable_offset_s(samples: SampleTable, timescale: int) -> float | None:
    """The edit offset from which the formula of MP-2 gives the times bit for bit, or None.

    The archive holds the sum of composition time and edit offset, rounded, not the offset. It is
    taken from the sample where the rounding is smallest, then as the nearest whole number of
    ticks (an encoder delay), and every candidate has to reproduce the whole array.
    """
    durations = _int64(samples.durations_ticks)
    compositions = _int64(samples.composition_offsets_ticks)
    bare = presentation_times_s(durations, compositions, timescale, 0.0)
    wanted = np.ascontiguousarray(samples.pts_s, np.float64).view(np.int64)
    smallest = (int(np.argmin(np.abs(bare))), int(np.argmin(np.abs(samples.pts_s))), 0)
    guesses = [0.0]
    for at in smallest:
        difference = float(samples.pts_s[at] - bare[at])
        guesses += [difference, round(difference * timescale) / timescale]
    for guess in dict.fromkeys(guesses):
        derived = bare + guess if guess != 0.0 else bare
        if np.array_equal(derived.view(np.int64), wanted):
            return guess
    return None


def _check_bounds(stored: StoredSamples, row: dict[str, Any]) -> None:
    """Nothing that is read later may lie outside its file: a damaged index must not pass for a good one.

    From the stored form alone, and every array is found to fit its description, so that widening one
    later cannot fail.
    """
    arrays, count, steps = stored.arrays, stored.num_samples, stored.num_sync - 1
    samples = MappedSamples(stored)  # what has to be widened for the check is not kept
    for name in ("durations", "compositions"):
        summarize(arrays[name], count)
    sizes, offsets = summarize(arrays["sizes"], count), summarize(arrays["offsets"], count)
    sync = summarize(arrays["sync"], steps)
    if row["pts_derived"]:
        finite = math.isfinite(row["pts_offset_s"])
    else:
        finite = bool(np.isfinite(samples.pts_s).all())
    if (
        not finite
        or sizes.low < 0
        or row["sync_first"] < 0
        or (steps and sync.low < 1)
        or row["sync_first"] + sync.total >= count
        or not (_surely_inside(offsets, sizes, row) or _inside(samples, row["file_size"]))
    ):
        raise SidecarError(f"The mapped index has values for {row['path']} that lie outside the file.")


def _surely_inside(offsets: Summary, sizes: Summary, row: dict[str, Any]) -> bool:
    """Whether the sums alone show that all samples are inside; in files with much else they may not."""
    longest = sizes.total if row["offsets_contiguous"] else sizes.high
    return offsets.low >= 0 and offsets.high + longest <= row["file_size"]


def _inside(samples: SampleTable, file_size: int) -> bool:
    offsets, sizes = samples.offsets_bytes, samples.sizes_bytes
    highest = max(map(int, (sizes.max(), offsets.max(), (offsets + sizes).max())))
    return int(offsets.min()) >= 0 and highest <= file_size


def _int64(array: NDArray[Any]) -> NDArray[np.int64]:
    return np.ascontiguousarray(array, dtype=np.int64)
