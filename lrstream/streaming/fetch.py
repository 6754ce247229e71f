"""Episodes arrive: one frontier in the order of admission, rows and ranges of several at once (LD-5, LD-6).

`EpisodeLoader` knows how to load one episode, `FetchFrontier` which ones to load now. The frontier moves
along the plan's admission order: what was admitted is fetched first, then up to `prefetch_episodes` more,
as long as the byte budget has room for the very next one. It never passes over an episode that does not
fit, or the one that waits would wait for bytes that nobody gives back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import LrstreamError
from lrstream.layout.layout import DatasetLayout
from lrstream.layout.rows import EpisodeRowReader, EpisodeRows
from lrstream.mp4.excerpt import excerpt
from lrstream.sidecar.checksum_file import ChecksumFile
from lrstream.storage.store import DatasetStore
from lrstream.streaming.budget import EpisodeByteCache
from lrstream.streaming.clip import Clip, ClipTable
from lrstream.streaming.episode import CameraRecord, EpisodeRecord
from lrstream.streaming.gop_index import gop_table
from lrstream.streaming.gop_table import GopTable
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.sources import EpisodeSpans, TrackSource, VideoFiles
from lrstream.streaming.threads import JobThreads
from lrstream.streaming.verify import PayloadReader

__all__ = ["EpisodeLoader", "FetchFrontier"]

# Open MP4 files, and open Parquet files, beyond those that are being read.
_MAX_OPEN_FILES = 16
# Reads in flight are episodes times parts; beyond this many threads the storage's own limits rule.
_MAX_THREADS = 64


class EpisodeLoader:
    """Loads episodes of one dataset in one process. Thread-safe.

    Sample tables are looked up at first use, so a process holds those of its own episodes only (SC-10).

    Args:
        store: Where the dataset is.
        layout: Its metadata.
        tracks: Sample tables of its videos; None for a dataset without video.
        tolerance_s: Largest distance between a row and its picture.
        metrics: Where times and bytes are counted.
        checksums: Checksums of the payload, where there are any.
        require_checksums: Whether payload without a checksum is refused.
    """

    def __init__(
        self,
        store: DatasetStore,
        layout: DatasetLayout,
        tracks: TrackSource | None,
        *,
        tolerance_s: float,
        metrics: LoaderMetrics,
        checksums: ChecksumFile | None = None,
        require_checksums: bool = False,
    ) -> None:
        self._layout = layout
        self._tolerance_s = tolerance_s
        self._metrics = metrics
        self._rows = EpisodeRowReader(store, layout, max_open_files=_MAX_OPEN_FILES)
        self._files = VideoFiles(store, tracks, _MAX_OPEN_FILES)
        self._payload = PayloadReader(checksums, metrics, strict=require_checksums)
        self._spans = EpisodeSpans(layout.episodes, self._files)

    @property
    def num_parts(self) -> int:
        """Reads that one episode is made of: its rows and each camera's range."""
        return 1 + len(self._layout.episodes.cameras)

    def sizes(self, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Exact mini-MP4 bytes of episodes over all cameras, int64, from the index alone.

        Raises:
            TimestampError: The metadata of an episode do not fit its video.
        """
        return self._spans.sizes(positions)

    def gops(self, positions: NDArray[np.int64]) -> GopTable:
        """Units of episodes and the bytes of their pictures, from the index alone; see `gop_table`.

        Raises:
            TimestampError: The metadata of an episode do not fit its video.
        """
        return gop_table(
            self._layout.episodes, self._files, self._spans, positions, fps=self._layout.info.fps
        )

    def parts(self, position: int) -> dict[str, Callable[[], Any]]:
        """The reads of one episode by name ("" for the rows), each to be called on any thread."""
        reads: dict[str, Callable[[], Any]] = {"": partial(self._read_rows, position)}
        for camera in self._layout.episodes.cameras:
            reads[camera] = partial(self._read_clip, position, camera)
        return reads

    def assemble(self, position: int, parts: Mapping[str, Any]) -> EpisodeRecord:
        """The episode from the results of all its `parts`."""
        with self._metrics.timed("assembly"):
            rows: EpisodeRows = parts[""]
            cameras = {
                key: CameraRecord.match(
                    parts[key], float(columns.from_s[position]), rows.timestamp_s, self._tolerance_s
                )
                for key, columns in self._layout.episodes.cameras.items()
            }
        self._metrics.add_episode(len(rows))
        return EpisodeRecord.of(rows, cameras)

    def load(self, position: int) -> EpisodeRecord:
        """One episode, read in the calling thread."""
        return self.assemble(position, {name: read() for name, read in self.parts(position).items()})

    def close(self) -> None:
        """Close files of this process."""
        self._files.close()
        self._rows.close()

    def _read_rows(self, position: int) -> EpisodeRows:
        with self._metrics.timed("rows"):
            return self._rows.read(position)

    def _read_clip(self, position: int, camera: str) -> Clip:
        span = self._spans.span(position, camera)
        episode_index = int(self._layout.episodes.episode_index[position])
        with self._files.use(self._layout.episodes.cameras[camera].path(position)) as file:
            with self._metrics.timed("payload"):
                payload = self._payload.read(file.source, span, episode_index=episode_index, camera=camera)
            self._metrics.add_payload(len(payload))
            return Clip(
                camera=camera,
                episode_index=episode_index,
                file_path=file.track.file_path,
                span=span,
                config=file.config,
                track=excerpt(file.track, span),
                table=ClipTable.from_span(file.track.samples, span),
                payload=payload,
            )


class FetchFrontier:
    """Reserves and fetches episodes in the order of admission.

    All methods are for one thread, the consumer's; fetching itself runs on threads of its own.
    Episodes are named by their number in the plan.

    Args:
        loader: Loads one episode.
        cache: Reservations; a loaded episode is filled in by the fetching thread.
        positions: Position in the episode table of each episode of the plan.
        order: Episodes in the order of admission.
        sizes: Exact bytes of each episode.
        prefetch_episodes: Episodes fetched ahead of the pool.
        max_in_flight: Episodes fetched at once.
    """

    def __init__(
        self,
        loader: EpisodeLoader,
        cache: EpisodeByteCache[int, EpisodeRecord],
        positions: NDArray[np.int64],
        order: Sequence[int],
        sizes: NDArray[np.int64],
        *,
        prefetch_episodes: int,
        max_in_flight: int,
    ) -> None:
        self._loader = loader
        self._cache = cache
        self._positions = positions
        self._sizes = sizes
        self._waiting = deque(order)
        self._prefetch = prefetch_episodes
        self._num_ahead = 0  # fetched or being fetched, but not admitted yet
        self._arrivals: dict[int, Future[None]] = {}
        self._queue = _FetchQueue(loader, cache, max_in_flight)

    def admit(self, episode: int) -> bool:
        """Make an episode resident: fetch it now unless it was prefetched.

        Returns:
            Whether it was admitted; False while the budget has no room for it.
        """
        if episode in self._arrivals:
            self._num_ahead -= 1
            return True
        if self._waiting[0] != episode:
            raise LrstreamError(
                f"Episode {episode} was admitted before its turn, {self._waiting[0]} is next."
            )
        return self._begin()

    def top_up(self) -> None:
        """Prefetch what the limits allow."""
        while self._waiting and self._num_ahead < self._prefetch and self._begin():
            self._num_ahead += 1

    def arrival(self, episode: int) -> Future[None]:
        """Done when the episode is in the cache, or its fetch has failed (then it holds the error)."""
        return self._arrivals[episode]

    def retire(self, episode: int) -> None:
        """No more anchors of the episode will be scheduled."""
        del self._arrivals[episode]
        self._cache.retire(episode)

    def close(self, timeout_s: float) -> bool:
        """Stop fetching; returns whether all threads have ended."""
        return self._queue.close(timeout_s)

    def _begin(self) -> bool:
        episode = self._waiting[0]
        if not self._cache.try_reserve(episode, int(self._sizes[episode])):
            return False
        self._waiting.popleft()
        self._arrivals[episode] = self._queue.fetch(episode, int(self._positions[episode]))
        return True


class _Fetch:
    """An episode under way."""

    def __init__(self, episode: int, position: int, names: Sequence[str]) -> None:
        self.episode = episode
        self.position = position
        self.arrival: Future[None] = Future()
        self.parts: dict[str, Any] = {}
        self.num_missing = len(names)


class _FetchQueue:
    """Fetches whole episodes first in first out, the parts of each in parallel."""

    def __init__(
        self, loader: EpisodeLoader, cache: EpisodeByteCache[int, EpisodeRecord], max_in_flight: int
    ) -> None:
        self._loader = loader
        self._cache = cache
        self._max_in_flight = max(1, max_in_flight)
        self._threads = JobThreads(
            "lrstream-fetch", min(_MAX_THREADS, self._max_in_flight * loader.num_parts)
        )
        self._lock = threading.Lock()
        self._pending: deque[_Fetch] = deque()
        self._num_in_flight = 0

    def fetch(self, episode: int, position: int) -> Future[None]:
        """Queue an episode; the result is done when it has arrived."""
        fetch = _Fetch(episode, position, list(self._loader.parts(position)))
        with self._lock:
            self._pending.append(fetch)
        self._start_next()
        return fetch.arrival

    def close(self, timeout_s: float) -> bool:
        return self._threads.close(timeout_s)

    def _start_next(self) -> None:
        with self._lock:
            if not self._pending or self._num_in_flight >= self._max_in_flight:
                return
            fetch = self._pending.popleft()
            self._num_in_flight += 1
        for name, read in self._loader.parts(fetch.position).items():
            self._threads.submit(partial(self._read_part, fetch, name, read))

    def _read_part(self, fetch: _Fetch, name: str, read: Callable[[], Any]) -> None:
        outcome: Any = None
        error: BaseException | None = None
        try:
            # Once one part has failed, nobody needs the others.
            if not fetch.arrival.done():
                outcome = read()
        except BaseException as caught:  # noqa: BLE001  (raised where the episode is waited for)
            error = caught
        with self._lock:
            fetch.parts[name] = outcome
            fetch.num_missing -= 1
            is_last = fetch.num_missing == 0
            if error is not None and not fetch.arrival.done():
                fetch.arrival.set_exception(error)
        if is_last:
            self._finish(fetch)

    def _finish(self, fetch: _Fetch) -> None:
        try:
            if not fetch.arrival.done():
                record = self._loader.assemble(fetch.position, fetch.parts)
                self._cache.fill(fetch.episode, record)
                fetch.arrival.set_result(None)
        except BaseException as error:  # noqa: BLE001  (raised where the episode is waited for)
            fetch.arrival.set_exception(error)
        with self._lock:
            self._num_in_flight -= 1
        self._start_next()
