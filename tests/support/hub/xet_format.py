"""The parts of the xet wire formats the loopback store needs: xorbs and the file section of shards."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# A chunk header: version, stored length (24 bit), compression scheme, raw length (24 bit); little endian.
CHUNK_HEADER_BYTES = 8
_STORED, _LZ4, _GROUPED_LZ4 = 0, 1, 2
# Every record of a shard has this size, the header included.
_SHARD_RECORD_BYTES = 48
_FLAG_VERIFICATION = 1 << 31
_FLAG_METADATA = 1 << 30


def hash_text(stored: bytes) -> str:
    """64 hex digits of a stored 32-byte hash: four little-endian 64-bit words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", stored))


@dataclass(frozen=True)
class Segment:
    """Chunks [start, stop) of a xorb."""

    xorb: str
    start: int
    stop: int


@dataclass(frozen=True)
class ShardFile:
    """A file a shard describes: its segments joined. `sha256` is None if the uploader left it out."""

    xet_hash: str
    sha256: str | None
    segments: tuple[Segment, ...]


def xorb_chunks(data: bytes) -> list[bytes]:
    """Raw chunks of an uploaded xorb (an optional footer is left alone).

    Raises:
        ValueError: The data is cut off or uses an unknown compression.
    """
    chunks: list[bytes] = []
    position = 0
    while position < len(data) and data[position] == 0:
        stored = int.from_bytes(data[position + 1 : position + 4], "little")
        scheme = data[position + 4]
        raw = int.from_bytes(data[position + 5 : position + 8], "little")
        position += CHUNK_HEADER_BYTES
        body = data[position : position + stored]
        if len(body) != stored:
            raise ValueError(f"xorb cut off in chunk {len(chunks)}")
        chunks.append(_expand(body, scheme, raw))
        position += stored
    return chunks


def _expand(body: bytes, scheme: int, raw: int) -> bytes:
    if scheme == _STORED:
        return body
    if scheme not in (_LZ4, _GROUPED_LZ4):
        raise ValueError(f"unknown xorb compression {scheme}")
    import pyarrow as pa

    expanded: bytes = pa.decompress(body, decompressed_size=raw, codec="lz4", asbytes=True)
    if scheme == _LZ4:
        return expanded
    # Grouped: all bytes at positions 0 mod 4, then those at 1 mod 4, and so on.
    result = bytearray(raw)
    position = 0
    for lane in range(4):
        count = len(range(lane, raw, 4))
        result[lane::4] = expanded[position : position + count]
        position += count
    return bytes(result)


def stored_chunks(raw: bytes, chunk_bytes: int) -> list[bytes]:
    """Uncompressed chunks with their headers; joined they are a xorb that can be served."""
    blocks = [raw[start : start + chunk_bytes] for start in range(0, len(raw), chunk_bytes)]
    return [_header(len(block)) + block for block in blocks]


def _header(length: int) -> bytes:
    return bytes([0]) + length.to_bytes(3, "little") + bytes([_STORED]) + length.to_bytes(3, "little")


def shard_files(data: bytes) -> Iterator[ShardFile]:
    """Files an uploaded shard describes.

    Raises:
        struct.error: The shard is cut off.
    """
    position = _SHARD_RECORD_BYTES
    while True:
        file_hash, flags, count, _ = struct.unpack_from("<32sIIQ", data, position)
        if file_hash == b"\xff" * 32:
            return
        position += _SHARD_RECORD_BYTES
        segments = []
        for _ in range(count):
            xorb, _, _, start, stop = struct.unpack_from("<32sIIII", data, position)
            segments.append(Segment(hash_text(xorb), start, stop))
            position += _SHARD_RECORD_BYTES
        if flags & _FLAG_VERIFICATION:
            position += count * _SHARD_RECORD_BYTES
        sha256 = None
        if flags & _FLAG_METADATA:
            sha256 = hash_text(struct.unpack_from("<32s", data, position)[0])
            position += _SHARD_RECORD_BYTES
        yield ShardFile(hash_text(file_hash), sha256, tuple(segments))


def joined(segments: Sequence[Segment], xorbs: dict[str, list[bytes]]) -> bytes:
    """Content of a file from its segments.

    Raises:
        KeyError: A xorb was never uploaded.
    """
    return b"".join(b"".join(xorbs[part.xorb][part.start : part.stop]) for part in segments)
