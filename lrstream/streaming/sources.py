"""Source files of video, a bounded number of them open, and the spans of episodes in them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import LrstreamError, TimestampError
from lrstream.layout.episodes import EpisodeTable
from lrstream.mp4.codec_config import CodecConfig, codec_configuration
from lrstream.mp4.measure import mini_mp4_sizes
from lrstream.mp4.picture_size import decoded_picture_bytes
from lrstream.mp4.span import Span, SpanFinder, Spans
from lrstream.mp4.track import TrackIndex
from lrstream.storage.byte_source import ByteSource
from lrstream.storage.store import DatasetStore

__all__ = ["EpisodeSpans", "TrackSource", "VideoFile", "VideoFiles"]


class TrackSource(Protocol):
    """Sample tables by file, as a mapped index has them."""

    def track(self, file_path: str) -> TrackIndex:
        """Index of one file of the dataset."""
        ...

    def fingerprint(self, file_path: str) -> str | None:
        """Fingerprint of a file when it was indexed; None where the storage needs none."""
        ...

    def close(self) -> None:
        """Release what this process holds of it."""
        ...


class VideoFile:
    """One MP4 file: its sample table and its bytes."""

    def __init__(self, track: TrackIndex, source: ByteSource) -> None:
        self.track = track
        self.source = source
        self.num_users = 0

    @cached_property
    def config(self) -> CodecConfig:
        """How to open a decoder for it."""
        return codec_configuration(self.track.stsd_body, file_path=self.track.file_path)

    @cached_property
    def picture_bytes(self) -> int:
        """Most bytes that one decoded picture of it takes."""
        return decoded_picture_bytes(self.config, self.track.stsd_body)

    @cached_property
    def finder(self) -> SpanFinder:
        """Finds spans of episodes in it."""
        return SpanFinder(self.track.samples)


class VideoFiles:
    """Source files in use, and at most `limit` together with those that wait to be used again (K27).

    Thread-safe; belongs to one process.

    Args:
        store: Where the files are.
        tracks: Their sample tables; None for a dataset without video.
        limit: Most files kept; exceeded only while more of them are in use at one time.
    """

    def __init__(self, store: DatasetStore, tracks: TrackSource | None, limit: int) -> None:
        self._store = store
        self._tracks = tracks
        self._limit = limit
        self._lock = threading.Lock()
        self._files: OrderedDict[str, VideoFile] = OrderedDict()

    @contextmanager
    def use(self, path: str) -> Iterator[VideoFile]:
        """A file, kept open for the duration of the block."""
        if self._tracks is None:
            raise LrstreamError(f"{path}: the dataset was opened without an index of its videos.")
        with self._lock:
            file = self._files.get(path)
            if file is None:
                track = self._tracks.track(path)
                source = self._store.open(path, track.file_size)
                fingerprint = self._tracks.fingerprint(path)
                if fingerprint is not None:
                    source.expect(fingerprint)  # replaced since, its bytes are not where the index says
                file = self._files[path] = VideoFile(track, source)
            self._files.move_to_end(path)
            file.num_users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.num_users -= 1
                self._trim(self._limit)

    def close(self) -> None:
        """Close all files that are not in use."""
        with self._lock:
            self._trim(0)

    def __len__(self) -> int:
        """Number of files kept."""
        return len(self._files)

    def _trim(self, limit: int) -> None:
        idle = [path for path, file in self._files.items() if file.num_users == 0]
        for path in idle[: max(0, len(self._files) - limit)]:
            self._files.pop(path).source.close()


class EpisodeSpans:
    """Spans and exact sizes of episodes, computed once from the index alone.

    Kept as four integers for each episode and camera, since a process may own a hundred thousand of
    them. Thread-safe.

    Args:
        episodes: The episode table.
        files: The source files.
    """

    def __init__(self, episodes: EpisodeTable, files: VideoFiles) -> None:
        self._episodes = episodes
        self._files = files
        self._spans = {camera: np.zeros((len(episodes), 4), dtype=np.int64) for camera in episodes.cameras}
        self._sizes = np.full(len(episodes), -1, dtype=np.int64)

    def sizes(self, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of the mini-MP4s of episodes, over all cameras, int64 of the shape of `positions`.

        Raises:
            TimestampError: The metadata of an episode do not fit its video.
        """
        wanted = np.asarray(positions, dtype=np.int64)
        unknown = np.unique(wanted[self._sizes[wanted] < 0])
        totals = np.zeros(len(unknown), dtype=np.int64)
        for camera, columns in self._episodes.cameras.items():
            numbers = columns.file[unknown]
            order = np.argsort(numbers, kind="stable")
            # File by file, and all episodes of a file at once.
            for group in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
                if len(group):
                    totals[group] += self._measure(unknown[group], camera)
        self._sizes[unknown] = totals
        sizes: NDArray[np.int64] = self._sizes[wanted]
        return sizes

    def span(self, position: int, camera: str) -> Span:
        """Span of the episode at a position of the episode table."""
        known = self._spans[camera][position]
        if not known.any():
            self._find(np.array([position]), camera)
        return Span(*self._spans[camera][position].tolist())

    def _measure(self, positions: NDArray[np.int64], camera: str) -> NDArray[np.int64]:
        """Find and remember the spans of episodes in one file; returns the bytes of their mini-MP4s."""
        with self._files.use(self._episodes.cameras[camera].path(int(positions[0]))) as file:
            return mini_mp4_sizes(file.track, self._find(positions, camera))

    def _find(self, positions: NDArray[np.int64], camera: str) -> Spans:
        """Find and remember the spans of episodes in one file."""
        columns = self._episodes.cameras[camera]
        from_s, to_s = columns.from_s[positions], columns.to_s[positions]
        path = columns.path(int(positions[0]))
        with self._files.use(path) as file:
            try:
                spans = file.finder.find_all(from_s, to_s)
            except TimestampError as error:
                fields = dict(error.fields)
                episode_index = int(self._episodes.episode_index[positions[fields.pop("interval")]])
                place = {"episode_index": episode_index, "camera": camera, "file_path": path}
                raise TimestampError(
                    f"Episode {episode_index}, camera {camera}, file {path}: {error.message}",
                    hint=error.hint,
                    **{**fields, **place},
                ) from error
        self._spans[camera][positions] = np.stack(spans, axis=1)
        return spans
