"""Pictures of a whole file in order, by FFmpeg's own demuxer and decoder, and digests to compare them by."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import Any, Literal

import av
import numpy as np
from numpy.typing import NDArray

from lrstream.storage.byte_source import ByteSource

__all__ = ["digest_of_picture", "digest_of_pixels", "pictures_in_order"]


def pictures_in_order(source: ByteSource) -> Iterator[tuple[float, av.VideoFrame]]:
    """All pictures of a file with their times in seconds, by FFmpeg's own demuxer."""
    with av.open(_SourceFile(source), "r", format="mp4") as container:
        stream = container.streams.video[0]
        # One thread: parallel decoders have been seen to wait for each other for ever (K12).
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        for picture in container.decode(stream):
            if picture.time is not None:
                yield picture.time, picture


def digest_of_picture(picture: av.VideoFrame, *, is_depth: bool) -> bytes:
    """Digest of the 12-bit codes of a depth map, else of RGB as FFmpeg's scaler gives it by default."""
    if is_depth:
        plane = picture.planes[0]
        rows = np.frombuffer(memoryview(plane), dtype=np.uint8).reshape(picture.height, plane.line_size)
        # Two bytes for each 12-bit code; rows may be padded.
        return digest_of_pixels(rows[:, : 2 * picture.width])
    convert: Any = picture.to_ndarray
    return digest_of_pixels(convert(format="rgb24"))


def digest_of_pixels(pixels: NDArray[np.uint8]) -> bytes:
    """Digest of an array of any shape."""
    return hashlib.blake2b(np.ascontiguousarray(pixels).tobytes(), digest_size=16).digest()


class _SourceFile(io.RawIOBase):
    """A byte source as the file object that PyAV reads."""

    def __init__(self, source: ByteSource) -> None:
        super().__init__()
        self._source = source
        self._size = source.size()
        self._position = 0

    def readable(self) -> Literal[True]:
        return True

    def seekable(self) -> Literal[True]:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._position + size, self._size)
        if stop <= self._position:
            return b""
        data = self._source.read(self._position, stop)
        self._position = stop
        return data
