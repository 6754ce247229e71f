"""Reading the sample tables of one source in as few requests, and bytes, as its storage allows (MP-4).

How long `moov` is shows in its first bytes. Storage that can read on in the same reply does so, up to
exactly the end of the box: one request for each file with `moov` in front. What has to be said beforehand is
how much the reply may hold at most. That, and all of it where a reply cannot be cut off, follows from the
files of the same camera that were read before, whose tables take as many bytes for each picture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from lrstream.mp4.probe import FIRST_PROBE_BYTES, RangeReply, drive, front_moov_stop, probe_track
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.identity import SourceFile
from lrstream.storage.byte_source import ByteSource, GrowingByteSource
from lrstream.storage.store import DatasetStore

if TYPE_CHECKING:  # a process that indexes needs nothing of the metadata
    from lrstream.layout.layout import DatasetLayout

__all__ = ["MoovSizes", "frames_of_files", "index_source"]

# Tables of a picture of changing duration and offset, in a chunk of its own, take this much; most take 6.
_MOST_BYTES_PER_PICTURE = 48
_OTHER_BYTES = 64 * 1024
# Files of a camera differ a little; a guess that is too short costs a request, one too long these bytes.
_MARGIN = 1.05
_MARGIN_BYTES = 4096
_LEAST_BYTES = 16 * 1024
_MOST_BYTES = 64 << 20


class _Known(NamedTuple):
    """The longest `moov` of a camera so far: bytes for each picture, and in all."""

    bytes_per_picture: float
    num_bytes: int


class MoovSizes:
    """What is known about the length of the tables of a dataset's files. Thread-safe.

    Args:
        frames: Pictures in each file, as far as they are known.
    """

    def __init__(self, frames: Mapping[str, int] | None = None) -> None:
        self._frames = frames or {}
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def expected(self, path: str, num_frames: int = 0) -> int | None:
        """Bytes from the beginning of a file that should hold all of a front `moov`.

        None while no file of its camera has been read.
        """
        num_frames = num_frames or self._frames.get(path, 0)
        with self._lock:
            known = self._known.get(_camera_of(path))
        if known is None:
            return None
        if known.num_bytes == 0:
            return FIRST_PROBE_BYTES
        wanted = known.bytes_per_picture * num_frames if num_frames else known.num_bytes
        return min(max(int(wanted * _MARGIN) + _MARGIN_BYTES, _LEAST_BYTES), _MOST_BYTES)

    def most(self, path: str, num_frames: int = 0) -> int:
        """Bytes that hold any `moov` of so many pictures."""
        num_frames = num_frames or self._frames.get(path, 0)
        wanted = _OTHER_BYTES + _MOST_BYTES_PER_PICTURE * num_frames if num_frames else 0
        return min(max(wanted, FIRST_PROBE_BYTES), _MOST_BYTES)

    def learn(self, track: TrackIndex) -> None:
        """Take a file that has been read into account."""
        # Between a front moov and mdat there is at most some padding.
        num_bytes = track.mdat_offset if track.faststart else 0
        found = _Known(num_bytes / track.samples.num_samples, num_bytes)
        camera = _camera_of(track.file_path)
        with self._lock:
            known = self._known.get(camera, found)
            self._known[camera] = _Known(max(known[0], found[0]), max(known[1], found[1]))


def frames_of_files(layout: DatasetLayout) -> dict[str, int]:
    """Frames that the episodes have in each video file, by path."""
    table = layout.episodes
    frames: dict[str, int] = {}
    for camera in table.cameras.values():
        counts = np.bincount(camera.file, weights=table.length, minlength=len(camera.files))
        for path, count in zip(camera.files, counts.astype(np.int64).tolist(), strict=True):
            frames[path] = frames.get(path, 0) + count
    return frames


def index_source(
    store: DatasetStore,
    source: SourceFile,
    *,
    reading: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    sizes: MoovSizes | None = None,
    num_frames: int = 0,
) -> TrackIndex:
    """Index one source through range reads of its `moov`.

    Args:
        store: Where it is.
        source: The source.
        reading: Makes a context in which each read takes place; entering it may wait, or raise to stop.
        sizes: What is known of other files, and learns from this one.
        num_frames: Pictures in this file, if they are known elsewhere than in `sizes`.
    """
    sizes = sizes or MoovSizes()
    expected = sizes.expected(source.path, num_frames)
    with contextlib.closing(store.open(source.path, source.size)) as opened:
        # Beside this, `isinstance` of a protocol takes as long as parsing a box.
        growing = cast(GrowingByteSource, opened) if hasattr(opened, "read_growing") else None
        # What other files say is enough for this one; only the first of a camera costs a whole probe, and
        # says in a reply that can be cut off how much it needs.
        first = limit = expected or FIRST_PROBE_BYTES
        if growing is not None and expected is None:
            limit = sizes.most(source.path, num_frames)
        reader = _Reader(opened, growing, limit, reading)
        track = drive(probe_track(source.path, first_probe_bytes=first), reader.read)
    sizes.learn(track)
    return track


class _Reader:
    """Answers a probe; the first request brings more than the first probe where that is wanted."""

    def __init__(
        self,
        source: ByteSource,
        growing: GrowingByteSource | None,
        limit: int,
        reading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._source = source
        self._growing = growing
        self._limit = limit
        self._reading = reading
        self._head = b""
        self._size = -1

    def read(self, start: int, stop: int) -> RangeReply:
        """The bytes of ``[start, stop)``, as far as the file goes."""
        if self._size >= 0 and stop <= len(self._head):
            return RangeReply(self._head[start:stop], self._size)
        with self._reading():
            return self._read(start, stop)

    def _read(self, start: int, stop: int) -> RangeReply:
        if self._growing is not None and self._size < 0:
            self._head, self._size = self._growing.read_growing(stop, max(self._limit, stop), self._stop_of)
        if start < len(self._head):
            data = self._head[start:stop]
            if len(self._head) < min(stop, self._size):
                data += self._source.read(len(self._head), min(stop, self._size))
            return RangeReply(data, self._size)
        return RangeReply(*self._source.read_upto(start, stop))

    def _stop_of(self, head: bytes, file_size: int) -> int:
        return front_moov_stop(self._source.path, head, file_size)


def _camera_of(path: str) -> str:
    """What the files of one camera have in common: their path up to chunk and file."""
    return "/".join(path.split("/")[:-2])
