"""Boxes of ISO base media files (ISO/IEC 14496-12, 4.2): headers, nesting, and bounded reading.

Everything here works on bytes already in memory and trusts none of them: a child must end inside
its parent, a table must fit the box that announces it before anything is allocated, and a container
may not hold more children than any real file needs. Nesting is bounded because callers walk named
paths; nothing descends into a box on its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import MalformedMp4Error, UnsupportedMp4Error

__all__ = [
    "MAX_CHILDREN",
    "MAX_DEPTH",
    "Box",
    "BoxHeader",
    "fourcc_text",
    "malformed",
    "read_header",
    "unsupported",
]

MAX_CHILDREN = 512
"""Children that one container may have; real files stay well below a hundred."""

MAX_DEPTH = 12
"""Boxes that may be nested; the deepest path read here (`moov/trak/mdia/minf/stbl/stsd/...`) has eight."""

_SIZE_AND_KIND = struct.Struct(">I4s")
# Type, payload index, header size and size of a child.
_Child = tuple[bytes, int, int, int]


@lru_cache(maxsize=256)
def fourcc_text(kind: bytes) -> str:
    """Box type or sample entry as text; bytes that are not printable ASCII are shown as ``\\xNN``."""
    return "".join(chr(c) if 0x20 <= c < 0x7F else f"\\x{c:02x}" for c in kind)


def malformed(
    file_path: str, what: str, *, box: str, offset: int, hint: str | None = None, **fields: Any
) -> MalformedMp4Error:
    """Error for a file that contradicts the standard or itself, naming file, box and offset."""
    return MalformedMp4Error(
        f"{file_path}: {what} (box {box} at byte {offset}).",
        hint=hint,
        file_path=file_path,
        box=box,
        offset=offset,
        **fields,
    )


def unsupported(
    file_path: str, what: str, *, box: str, offset: int, hint: str | None = None, **fields: Any
) -> UnsupportedMp4Error:
    """Error for a valid file that needs what is refused here, naming file, box and offset."""
    return UnsupportedMp4Error(
        f"{file_path}: {what} (box {box} at byte {offset}).",
        hint=hint,
        file_path=file_path,
        box=box,
        offset=offset,
        **fields,
    )


class BoxHeader(NamedTuple):
    """Header of one box.

    Attributes:
        kind: Four-byte box type.
        size: Size of the box with its header, in bytes; None for "to the end of the file" (stored as 0).
        header_size: 8, or 16 when the size is stored in 64 bits.
    """

    kind: bytes
    size: int | None
    header_size: int


def read_header(data: memoryview, at: int) -> BoxHeader | None:
    """Read the box header at index ``at`` of ``data``; None when ``data`` ends inside the header.

    The size is returned as stored: whether it makes sense is for the caller, who knows what the
    box must fit into.
    """
    if at + 8 > len(data):
        return None
    size, kind = _SIZE_AND_KIND.unpack_from(data, at)
    if size > 1:
        return BoxHeader(kind, size, 8)
    if size == 0:
        return BoxHeader(kind, None, 8)
    if at + 16 > len(data):
        return None
    return BoxHeader(kind, int.from_bytes(data[at + 8 : at + 16], "big"), 16)


class Box:
    """One box whose payload is in memory, with what its error messages need.

    Some twenty are made for each file, so they are as plain as possible. Nothing changes in them.

    Attributes:
        file_path: File the box comes from, for messages.
        path: Box path such as ``moov/trak/mdia``, for messages.
        offset: Absolute offset of the box header in the file.
        header_size: Size of that header in bytes.
        payload: The bytes after the header.
    """

    __slots__ = ("_found", "file_path", "header_size", "offset", "path", "payload")

    def __init__(self, file_path: str, path: str, offset: int, header_size: int, payload: memoryview) -> None:
        self.file_path = file_path
        self.path = path
        self.offset = offset
        self.header_size = header_size
        self.payload = payload
        self._found: list[_Child] | None = None

    @property
    def kind(self) -> str:
        """Type of the box, as text."""
        return self.path.rpartition("/")[2]

    def malformed(self, what: str, *, hint: str | None = None, **fields: Any) -> MalformedMp4Error:
        """Error about the content of this box that contradicts the standard or itself."""
        return malformed(self.file_path, what, box=self.path, offset=self.offset, hint=hint, **fields)

    def unsupported(self, what: str, *, hint: str | None = None, **fields: Any) -> UnsupportedMp4Error:
        """Error about valid content of this box that is refused."""
        return unsupported(self.file_path, what, box=self.path, offset=self.offset, hint=hint, **fields)

    def children(self, start: int = 0, *, padded: bool = False) -> Iterator[Box]:
        """Yield the boxes in the payload from index ``start``, in file order.

        Args:
            start: Payload index of the first child, after any fields of the box itself.
            padded: Accept up to seven bytes after the last child. Sample entries may end in a
                four-byte terminator (QuickTime File Format, "Sound and Video Sample Descriptions").

        Raises:
            MalformedMp4Error: A child is smaller than its header, or ends outside this box.
        """
        for kind, at, header_size, size in self._headers(start, padded):
            yield self._child(kind, at, header_size, size)

    def _child(self, kind: bytes, at: int, header_size: int, size: int) -> Box:
        return Box(
            self.file_path,
            f"{self.path}/{fourcc_text(kind)}",
            self.offset + self.header_size + at,
            header_size,
            self.payload[at + header_size : at + size],
        )

    def _headers(self, start: int, padded: bool) -> Iterator[_Child]:
        """Kind, payload index, header size and size of each child, once it is known to fit."""
        if self.path.count("/") + 1 >= MAX_DEPTH:
            raise self.malformed(f"boxes are nested more than {MAX_DEPTH} deep")
        payload = self.payload
        at, end, count = start, len(payload), 0
        while at < end:
            left = end - at
            if padded and left < 8:
                return
            count += 1
            if count > MAX_CHILDREN:
                raise self.malformed(f"more than {MAX_CHILDREN} boxes in one container")
            header = read_header(payload, at)
            if header is None:
                raise self.malformed(f"{left} bytes after the last box are no box")
            kind, size, header_size = header
            if size is None or size < header_size or size > left:
                got = "0 (open-ended)" if size is None else str(size)
                raise malformed(
                    self.file_path,
                    f"box size is {got}, but {self.path} has {left} bytes left for it",
                    box=f"{self.path}/{fourcc_text(kind)}",
                    offset=self.offset + self.header_size + at,
                )
            yield kind, at, header_size, size
            at += size

    def find(self, *kinds: bytes) -> Box | None:
        """The one child whose type is among ``kinds``, or None.

        Raises:
            MalformedMp4Error: There is more than one, so the file contradicts itself.
        """
        headers = self._found
        if headers is None:
            # A container is asked for each of its children in turn, so it is walked only once.
            headers = self._found = list(self._headers(0, False))
        found: Box | None = None
        for header in headers:
            if header[0] in kinds:
                child = self._child(*header)
                if found is not None:
                    raise child.malformed(f"{self.path} has a second {child.kind} box")
                found = child
        return found

    def require(self, *kinds: bytes) -> Box:
        """Like `find`, for a box that must be there."""
        found = self.find(*kinds)
        if found is None:
            raise self.malformed(f"no {' or '.join(map(fourcc_text, kinds))} box in it")
        return found

    def uint(self, at: int, size: int) -> int:
        """Unsigned big-endian integer of ``size`` bytes at payload index ``at``."""
        field = self.payload[at : at + size]
        if len(field) < size:
            raise self.malformed(
                f"box is too short: {len(self.payload)} bytes of payload, at least {at + size} expected"
            )
        return int.from_bytes(field, "big")

    def raw(self, at: int, size: int) -> bytes:
        """``size`` bytes at payload index ``at``."""
        self.uint(at, size)
        return bytes(self.payload[at : at + size])

    def version(self, *known: int) -> int:
        """Version of a full box, which must be among ``known``."""
        version = self.uint(0, 4) >> 24
        if version not in known:
            raise self.unsupported(f"version {version} of this box is not known (known: {known})")
        return version

    def table(self, at: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """View of ``count`` items at payload index ``at``, shape ``(count,)``; nothing is copied.

        Raises:
            MalformedMp4Error: The box is too small for that many items.
        """
        available = max(len(self.payload) - at, 0)
        if count * dtype.itemsize > available:
            raise self.malformed(
                f"{count} entries of {dtype.itemsize} bytes are announced, "
                f"but the box has {available} bytes for them"
            )
        return np.frombuffer(self.payload, dtype=dtype, count=count, offset=at)
