"""The directory of a sidecar's ZIP file as arrays, and its members by position (APPNOTE.TXT 6.3, 4.3).

`zipfile` keeps an object and a name for each member, half a kilobyte, and one position in the file that all
readers take turns for. An archive of 100,000 sources has 600,001 members. Here each takes the 36 bytes
that are needed to find and check it, and members are read from any number of threads at once.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import SidecarError

__all__ = ["BadDirectoryError", "Member", "ZipDirectory", "ZipMembers"]

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_END64_LOCATOR = struct.Struct("<4sIQI")
_MAX16, _MAX32 = 0xFFFF, 0xFFFF_FFFF
_ZIP64_EXTRA = 1
_ENCRYPTED = 0x1
_STORED, _DEFLATED = 0, 8
_MAX_DEFLATE_RATIO = 1032  # no deflate stream expands further (RFC 1951, 258 bytes from two bits)
_HEADER_LIMIT = 1024
_LOCAL_EXTRA_GUESS = 64
_LISTED_AT_ONCE = 4096


class BadDirectoryError(SidecarError):
    """The file is no complete ZIP archive."""


class Member(NamedTuple):
    """One member as the directory describes it.

    Attributes:
        name: Its name.
        offset: Where its local header stands in the file.
        packed: Number of bytes it takes compressed.
        size: Number of bytes it takes uncompressed.
        crc: CRC-32 of the uncompressed bytes.
        method: How it is compressed.
        flags: General purpose bits.
    """

    name: str
    offset: int
    packed: int
    size: int
    crc: int
    method: int
    flags: int


@dataclass(frozen=True, slots=True, eq=False)
class ZipDirectory:
    """All members in the order of the directory.

    Attributes:
        start: Where the directory begins, and members end.
        comment: What the file says of itself at its end.
        slots: int64[n], what each member is, by the caller's numbers; -1 where the name means nothing.
        offsets: int64[n], as in `Member`; so are the others.
    """

    start: int
    comment: bytes
    slots: NDArray[np.int64]
    offsets: NDArray[np.int64]
    packed: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    methods: NDArray[np.uint16]
    flags: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.slots)

    def member(self, row: int, name: str) -> Member:
        """The member at a place of the directory."""
        return Member(
            name,
            int(self.offsets[row]),
            int(self.packed[row]),
            int(self.sizes[row]),
            int(self.crcs[row]),
            int(self.methods[row]),
            int(self.flags[row]),
        )


def read_directory(file: BinaryIO, slot_of: Callable[[bytes], int]) -> ZipDirectory:
    """Read the central directory of an open file.

    Args:
        file: Buffered, seekable.
        slot_of: The caller's number for a name, -1 for a name that means nothing.

    Raises:
        BadDirectoryError: It is not where and what the file's end says.
    """
    count, length, start, comment = _find(file)
    names = ("slots", "offsets", "packed", "sizes", "crcs", "methods", "flags")
    types = (np.int64, np.int64, np.int64, np.int64, np.uint32, np.uint16, np.uint16)
    columns = {name: np.empty(count, kind) for name, kind in zip(names, types, strict=True)}
    slots, offsets, packed, sizes, crcs, methods, flags = columns.values()
    file.seek(start)
    left = length
    for row in range(count):
        fixed = file.read(_CENTRAL.size)
        if len(fixed) != _CENTRAL.size or left < _CENTRAL.size:
            raise BadDirectoryError("its directory ends early")
        (
            magic, _, _, flags[row], methods[row], _, _, crcs[row], member_packed, member_size,
            name_length, extra_length, comment_length, _, _, _, offset,
        ) = _CENTRAL.unpack(fixed)  # fmt: skip
        rest_length = name_length + extra_length + comment_length
        rest = file.read(rest_length)
        left -= _CENTRAL.size + rest_length
        if magic != b"PK\x01\x02" or len(rest) != rest_length or left < 0:
            raise BadDirectoryError("its directory is damaged")
        if _MAX32 in (member_packed, member_size, offset):
            extra = rest[name_length : name_length + extra_length]
            member_size, member_packed, offset = _widened(extra, member_size, member_packed, offset)
        if offset + member_packed > start or member_size >= 1 << 62:
            # `packed` is bounded by the file, `sizes` by it and the ratio, before anything is allocated.
            raise BadDirectoryError(
                f"its directory places {member_packed} compressed bytes at {offset}, "
                f"but members end at {start}"
            )
        slots[row] = slot_of(rest[:name_length])
        offsets[row], packed[row], sizes[row] = offset, member_packed, member_size
    if left:
        raise BadDirectoryError("its directory is longer than its members")
    return ZipDirectory(start, comment, slots, offsets, packed, sizes, crcs, methods, flags)


def _find(file: BinaryIO) -> tuple[int, int, int, bytes]:
    """Number of members, length and start of the directory, and comment, from the end of the file."""
    file_size = file.seek(0, os.SEEK_END)
    tail_start = max(0, file_size - _END.size - _MAX16)
    file.seek(tail_start)
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - _END.size + 4))
    if at < 0:
        raise BadDirectoryError("its end is missing")
    _, disk, _, _, count, length, start, comment = _END.unpack_from(tail, at)
    end = tail_start + at
    if disk not in (0, _MAX16) or end + _END.size + comment != file_size:
        raise BadDirectoryError("its end is damaged")
    file.seek(max(0, end - _END64_LOCATOR.size))
    locator = file.read(_END64_LOCATOR.size)
    if len(locator) == _END64_LOCATOR.size and locator.startswith(b"PK\x06\x07"):
        end = _END64_LOCATOR.unpack(locator)[2]
        file.seek(min(end, file_size))
        record = file.read(_END64.size)
        if len(record) != _END64.size or not record.startswith(b"PK\x06\x06"):
            raise BadDirectoryError("its end is damaged")
        *_, count, length, start = _END64.unpack(record)
    if start + length != end or count * _CENTRAL.size > length:
        raise BadDirectoryError(f"its directory of {length} bytes at {start} does not end at {end}")
    return count, length, start, tail[at + _END.size :]


def _widened(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Size, packed size and offset with those that need 64 bits taken from the extra field (4.5.3)."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64_EXTRA:
            wide = iter(struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4))
            values = [next(wide, _MAX32) if value == _MAX32 else value for value in (size, packed, offset)]
            return values[0], values[1], values[2]
        at += 4 + length
    return size, packed, offset


class ZipMembers:
    """An open archive whose members are read by position. Thread-safe.

    Args:
        path: The archive.
        slot_of: As for `read_directory`.

    Raises:
        OSError: It cannot be opened.
        BadDirectoryError: It is no complete ZIP archive.
    """

    def __init__(self, path: Path, slot_of: Callable[[bytes], int]) -> None:
        self._file = path.open("rb")
        try:
            self.directory = read_directory(self._file, slot_of)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        self._file.close()

    def head(self, member: Member, length: int) -> bytes:
        """The first `length` uncompressed bytes of a member, unchecked, or all if it has fewer."""
        # Deflate may need some more input than it gives output, never this much.
        raw = self._raw(member, min(member.packed, length + _HEADER_LIMIT))
        if member.method == _STORED:
            return raw[:length]
        try:
            return zlib.decompressobj(-15).decompress(raw, length)
        except zlib.error as error:
            raise _unreadable(member.name, str(error)) from error

    def read(self, member: Member) -> bytes:
        """The whole of a member, its CRC-32 checked.

        Raises:
            SidecarError: It is not what the directory says.
        """
        raw = self._raw(member, member.packed)
        if member.method == _STORED:
            data = raw
        else:
            inflate = zlib.decompressobj(-15)
            try:
                # One byte more than announced is enough to know that it is wrong.
                data = inflate.decompress(raw, member.size + 1)
            except zlib.error as error:
                raise _unreadable(member.name, str(error)) from error
            if not inflate.eof and len(data) == member.size:
                raise _unreadable(member.name, "its compressed data have no end")
        if len(data) != member.size:
            raise SidecarError(
                f"The sidecar's member {member.name!r} has {len(data)} bytes, expected {member.size}."
            )
        if zlib.crc32(data) != member.crc:
            raise _unreadable(member.name, "its CRC-32 is wrong")
        return data

    def _raw(self, member: Member, length: int) -> bytes:
        """The first `length` compressed bytes of a member."""
        if member.flags & _ENCRYPTED:
            raise SidecarError(f"The sidecar's member {member.name!r} is encrypted.")
        if member.method not in (_STORED, _DEFLATED):
            raise SidecarError(
                f"The sidecar's member {member.name!r} uses compression method {member.method}."
            )
        limit = 1 if member.method == _STORED else _MAX_DEFLATE_RATIO
        if member.size > member.packed * limit + _HEADER_LIMIT:
            raise SidecarError(
                f"The sidecar's member {member.name!r} claims {member.size} bytes, "
                f"more than its {member.packed} compressed bytes can hold."
            )
        name = member.name.encode("utf-8", "surrogatepass")
        before = _LOCAL.size + len(name)
        guess = before + _LOCAL_EXTRA_GUESS + length
        piece = self._pread(member, member.offset, guess)
        if len(piece) < before or piece[:4] != b"PK\x03\x04" or piece[_LOCAL.size : before] != name:
            raise _unreadable(member.name, "another one stands at its place")
        name_length, extra_length = struct.unpack_from("<2H", piece, _LOCAL.size - 4)
        start = _LOCAL.size + name_length + extra_length
        if name_length != len(name) or member.offset + start + member.packed > self.directory.start:
            raise _unreadable(member.name, "it reaches into the directory")
        if start + length > len(piece):
            return self._pread(member, member.offset + start, length)
        return piece[start : start + length]

    def _pread(self, member: Member, start: int, length: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), length, start)
        except (OSError, ValueError) as error:
            raise _unreadable(member.name, f"{type(error).__name__}: {error}") from error

    def digest(self, name_of: Callable[[int], str]) -> str:
        """SHA-256 over name, sizes, place and CRC-32 of all members: equal for archives of equal content."""
        found = hashlib.sha256()
        for lines in self.listing(name_of):
            found.update(lines)
        return found.hexdigest()

    def listing(self, name_of: Callable[[int], str]) -> Iterator[bytes]:
        """One line for each member, some thousand at a time."""
        directory = self.directory
        for first in range(0, len(directory), _LISTED_AT_ONCE):
            part = slice(first, first + _LISTED_AT_ONCE)
            columns = (directory.crcs, directory.sizes, directory.packed, directory.offsets)
            names = map(name_of, directory.slots[part].tolist())
            rows = zip(names, *(column[part].tolist() for column in columns), strict=True)
            lines = [f"{name} {crc} {size} {packed} {offset}\n" for name, crc, size, packed, offset in rows]
            yield "".join(lines).encode("utf-8", "surrogatepass")


def _unreadable(name: str, why: str) -> SidecarError:
    return SidecarError(f"The sidecar's member {name!r} cannot be read: {why}.")
