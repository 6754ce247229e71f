"""The six arrays of one source as ``.npy`` members, written and read without trusting a header.

`numpy.load` allocates what a header claims. Here the claim is first held against the size that
the archive's directory declares, that size against what the compressed bytes can possibly hold
(`zip_directory`), and the shapes of one source against each other; only then is anything decompressed.
"""

from __future__ import annotations

import functools
import io
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from lrstream.errors import SidecarError
from lrstream.mp4.track import SampleTable
from lrstream.sidecar.zip_directory import Member, ZipMembers
from lrstream.sidecar.zip_stream import DeflatedMember, deflate_member

__all__ = [
    "ARRAY_NAMES",
    "MANIFEST_MEMBER",
    "MANIFEST_SLOT",
    "MAX_SAMPLES",
    "NpyHeader",
    "bytes_scalar_header",
    "check_samples",
    "deflate_source",
    "inflate_source",
    "member_name",
    "read_header",
    "read_samples",
    "slot_name",
    "slot_of",
    "source_slots",
]

MANIFEST_MEMBER = "manifest_json.npy"
_MANIFEST_NAME = MANIFEST_MEMBER.encode("ascii")

# JSON-side name of each array -> attribute of SampleTable and canonical dtype.
ARRAY_NAMES: Mapping[str, tuple[str, str]] = {
    "sample_pts": ("pts_s", "<f8"),
    "sample_durations": ("durations_ticks", "<i8"),
    "sample_composition_offsets": ("composition_offsets_ticks", "<i8"),
    "sample_sizes": ("sizes_bytes", "<i8"),
    "sample_offsets": ("offsets_bytes", "<i8"),
    "sync_samples": ("sync_samples", "<i8"),
}

# 134 million pictures: more than fifty days at 30 fps in one file, 1 GiB for each array.
MAX_SAMPLES = 2**27

_HEADER_LIMIT = 1024  # a header of a one-dimensional array takes 118 bytes after the magic
_HEADER = re.compile(
    rb"\{'descr': '(?P<descr>[<>|=]?[A-Za-z][0-9]*)', 'fortran_order': (?:True|False), "
    rb"'shape': \((?P<shape>(?:[0-9]+, ?)*[0-9]*)\),? *\} *\n"
)

# Every member has a number: the manifest this one, then the arrays of the first source, the second, ...
MANIFEST_SLOT = 0
_ORDINALS = {f"/{name}.npy".encode(): ordinal for ordinal, name in enumerate(ARRAY_NAMES)}
_SUFFIXES = tuple(f"/{name}.npy" for name in ARRAY_NAMES)
_MAX_DIGITS = 9  # of a source's number


class NpyHeader(NamedTuple):
    """Shape and dtype of a member, and the number of bytes before its data."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    data_start: int


def deflate_source(number: int, samples: SampleTable) -> list[DeflatedMember]:
    """Compress the arrays of source `number` into members, in the order of the format."""
    members = []
    for name, (attribute, dtype) in ARRAY_NAMES.items():
        array = np.ascontiguousarray(getattr(samples, attribute), dtype=dtype)
        header = _array_header(dtype, len(array))
        members.append(deflate_member(member_name(number, name), b"".join((header, array.data))))
    return members


@functools.lru_cache(maxsize=1024)
def _array_header(dtype: str, length: int) -> bytes:
    """The ``.npy`` header of a one-dimensional array."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": (length,)})
    return header.getvalue()


def inflate_source(number: int, members: Sequence[DeflatedMember], path: str, file_size: int) -> SampleTable:
    """The inverse of `deflate_source`, with every check of `read_samples`.

    Raises:
        SidecarError: These are not the members of source `number`, or they cannot describe the file.
    """
    headers: dict[str, NpyHeader] = {}
    data: dict[str, bytes] = {}
    for member, name in zip(members, ARRAY_NAMES, strict=True):
        if member.name != member_name(number, name):
            raise SidecarError(f"{member.name} stands at the place of {member_name(number, name)}.")
        try:
            data[name] = zlib.decompress(member.data, -15, member.size)
        except zlib.error as error:
            raise SidecarError(f"The member {member.name!r} cannot be unpacked: {error}.") from error
        if len(data[name]) != member.size or zlib.crc32(data[name]) != member.crc:
            raise SidecarError(f"The sidecar's member {member.name!r} is not what was compressed.")
        start = io.BytesIO(data[name][:_HEADER_LIMIT])
        shape, dtype = _parse_header(member.name, start)
        headers[name] = NpyHeader(shape, dtype, start.tell())
    _check_shapes(headers, path)
    samples = _table(headers, data)
    check_samples(samples, path, file_size)
    return samples


def bytes_scalar_header(length: int) -> bytes:
    """The ``.npy`` header of a zero-dimensional bytes array of `length` bytes."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": f"|S{length}", "fortran_order": False, "shape": ()})
    return header.getvalue()


def member_name(number: int, name: str) -> str:
    """Name of array `name` of source `number` inside the archive."""
    return f"{number}/{name}.npy"


def slot_of(name: bytes) -> int:
    """Number of the member of this name; -1 where the format has none."""
    if name == _MANIFEST_NAME:
        return MANIFEST_SLOT
    digits, slash, rest = name.partition(b"/")
    ordinal = _ORDINALS.get(slash + rest, -1)
    is_number = digits.isdigit() and len(digits) <= _MAX_DIGITS and (digits == b"0" or digits[:1] != b"0")
    if ordinal < 0 or not is_number:
        return -1
    return 1 + len(_ORDINALS) * int(digits) + ordinal


def slot_name(slot: int) -> str:
    """Name of the member with this number."""
    if slot == MANIFEST_SLOT:
        return MANIFEST_MEMBER
    number, ordinal = divmod(slot - 1, len(_ORDINALS))
    return f"{number}{_SUFFIXES[ordinal]}"


def source_slots(number: int) -> range:
    """Numbers of the members of source `number`, in the order of `ARRAY_NAMES`."""
    return range(1 + len(_ORDINALS) * number, 1 + len(_ORDINALS) * (number + 1))


def read_header(archive: ZipMembers, member: Member) -> NpyHeader:
    """Read the ``.npy`` header of a member and hold it against the member's declared size."""
    name = member.name
    start = io.BytesIO(archive.head(member, _HEADER_LIMIT))
    shape, dtype = _parse_header(name, start)
    if dtype.hasobject:
        raise SidecarError(f"The sidecar's member {name!r} holds Python objects, which are never loaded.")
    count = math.prod(shape)
    if start.tell() + count * dtype.itemsize != member.size:
        raise SidecarError(
            f"The sidecar's member {name!r} claims {count} values of {dtype.itemsize} bytes, "
            f"but has {member.size - start.tell()} bytes of data."
        )
    return NpyHeader(shape, dtype, start.tell())


def _parse_header(name: str, start: io.BytesIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Parse the header as numpy writes it, without evaluating it as Python (which numpy does)."""
    magic = start.read(8)
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(magic)
    text = start.read(int.from_bytes(start.read(width), "little")) if width else b""
    match = _HEADER.fullmatch(text)
    if match is None:
        raise SidecarError(
            f"The sidecar's member {name!r} has an unreadable .npy header: {(magic + text)[:120]!r}."
        )
    try:
        dtype = np.dtype(match["descr"].decode("ascii"))
    except (TypeError, ValueError) as error:
        raise SidecarError(f"The sidecar's member {name!r} has an unknown type: {error}.") from error
    lengths = match["shape"].replace(b" ", b"").split(b",")
    return tuple(int(length) for length in lengths if length), dtype


def read_samples(
    archive: ZipMembers, find: Callable[[int], Member], number: int, path: str, file_size: int
) -> SampleTable:
    """Read and check the arrays of source `number`.

    Args:
        archive: The open archive.
        find: Gives a member by its number.
        number: Place of the source in the manifest.
        path: Path of the source, for messages.
        file_size: Size of the source in bytes, which no sample may exceed.

    Returns:
        The table with native int64 and float64 arrays, read-only.

    Raises:
        SidecarError: A member is unreadable, or the arrays cannot describe the file.
    """
    members = dict(zip(ARRAY_NAMES, map(find, source_slots(number)), strict=True))
    headers = {name: read_header(archive, member) for name, member in members.items()}
    _check_shapes(headers, path)
    samples = _table(headers, {name: archive.read(member) for name, member in members.items()})
    check_samples(samples, path, file_size)
    return samples


def _table(headers: Mapping[str, NpyHeader], data: Mapping[str, bytes]) -> SampleTable:
    """The arrays behind headers that agree with each other."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, (attribute, dtype) in ARRAY_NAMES.items():
        header = headers[name]
        array = np.frombuffer(data[name], dtype=header.dtype, offset=header.data_start)
        # No copy where the bytes have the machine's order already; read-only as `bytes` are.
        array = array.astype(np.dtype(dtype).newbyteorder("="), copy=False)
        array.flags.writeable = False
        arrays[attribute] = array
    return SampleTable(**arrays)


def check_samples(samples: SampleTable, path: str, file_size: int) -> None:
    """Check that a sample table can describe a file of `file_size` bytes.

    Raises:
        SidecarError: Naming the first array and sample that cannot be.
    """
    if not np.isfinite(samples.pts_s).all():
        raise _contradiction(path, "sample_pts", samples.pts_s, ~np.isfinite(samples.pts_s), "a finite time")
    limits = (
        ("sample_durations", samples.durations_ticks, 0, 2**32 - 1),
        ("sample_composition_offsets", samples.composition_offsets_ticks, -(2**31), 2**32 - 1),
        ("sample_sizes", samples.sizes_bytes, 0, 2**32 - 1),
        ("sample_offsets", samples.offsets_bytes, 0, file_size),
        ("sync_samples", samples.sync_samples, 0, samples.num_samples - 1),
    )
    for name, values, low, high in limits:
        if not _are_within(values, low, high):
            wrong = (values < low) | (values > high)
            raise _contradiction(path, name, values, wrong, f"a value from {low} to {high}")
    # Both terms are bounded now, so the sum cannot wrap.
    ends = samples.offsets_bytes + samples.sizes_bytes
    if int(ends.max()) > file_size:
        raise _contradiction(
            path,
            "sample_offsets",
            samples.offsets_bytes,
            ends > file_size,
            f"an end within the file's {file_size} bytes",
        )
    unsorted = samples.sync_samples[1:] <= samples.sync_samples[:-1]
    if unsorted.any():
        raise _contradiction(
            path, "sync_samples", samples.sync_samples[1:], unsorted, "strictly increasing sample numbers"
        )


def _are_within(values: NDArray[np.integer], low: int, high: int) -> bool:
    """Whether all values are from `low` to `high`, in one look at them where that is enough.

    Sources are checked while others are read, and those threads are in each other's way between two looks.
    """
    if low == 0 and values.dtype == np.int64:
        # Taken without their signs, negative values are beyond every limit.
        return int(values.view(np.uint64).max()) <= high
    return low <= int(values.min()) and int(values.max()) <= high


def _check_shapes(headers: Mapping[str, NpyHeader], path: str) -> None:
    """Check the dtypes and lengths of one source's arrays from their headers alone."""
    for name, (_, dtype) in ARRAY_NAMES.items():
        header, wanted = headers[name], np.dtype(dtype)
        if (header.dtype.kind, header.dtype.itemsize) != (wanted.kind, wanted.itemsize) or len(
            header.shape
        ) != 1:
            raise SidecarError(
                f"The sidecar's array {name} of {path} is {header.dtype} with shape {header.shape}, "
                f"expected one dimension of {wanted.name}.",
                file_path=path,
            )
    lengths = {name: headers[name].shape[0] for name in ARRAY_NAMES}
    num_sync = lengths.pop("sync_samples")
    if len(set(lengths.values())) != 1:
        raise SidecarError(
            f"The sidecar's arrays of {path} have different lengths: "
            + ", ".join(f"{name} {length}" for name, length in lengths.items())
            + ".",
            file_path=path,
        )
    num_samples = lengths["sample_pts"]
    if not 1 <= num_samples <= MAX_SAMPLES or not 1 <= num_sync <= num_samples:
        raise SidecarError(
            f"The sidecar's arrays of {path} hold {num_samples} samples and {num_sync} keyframes, "
            f"expected 1 to {MAX_SAMPLES} samples and at least one keyframe.",
            file_path=path,
        )


def _contradiction(
    path: str, name: str, values: NDArray[Any], wrong: NDArray[np.bool_], expected: str
) -> SidecarError:
    at = int(np.argmax(wrong))
    return SidecarError(
        f"The sidecar's array {name} of {path} has {values[at]} at place {at}, expected {expected} "
        f"({int(wrong.sum())} of {len(values)} values are wrong).",
        file_path=path,
    )
