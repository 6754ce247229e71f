"""Indexing all videos of a dataset into one archive (SC-1, SC-3, K11).

Each thread takes the next source, reads and parses it, compresses its arrays and hands them to the archive.
At most `workers` of them read, and no more than there are processors hold what they have parsed: while some
compress, others wait for the network, so that neither waits for the other. A source that cannot be indexed
does not stop the others: all bad files are reported together, and no archive is left.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from lrstream.errors import (
    AccessError,
    InputError,
    LrstreamError,
    NotFoundError,
    TransferError,
    UsageError,
)
from lrstream.layout.layout import DatasetLayout
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.build_failures import SourceFailure, joint_error
from lrstream.sidecar.elsewhere import IndexedElsewhere, SourceIndexer, Work
from lrstream.sidecar.finished import FinishedSources
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from lrstream.sidecar.index_source import MoovSizes, frames_of_files, index_source
from lrstream.sidecar.install import reclaim_leftovers
from lrstream.sidecar.permit import Permit, Permits
from lrstream.sidecar.writer import ArchiveWriter, EncodedSource, encode_source
from lrstream.storage.store import DatasetStore

__all__ = [
    "DEFAULT_WORKERS",
    "BuildProgress",
    "BuildReport",
    "SourceFailure",
    "SourcesChangedError",
    "build_sidecar",
    "request_identity",
]

logger = logging.getLogger(__name__)

DEFAULT_WORKERS = 16

_PROGRESS_EVERY_S = 0.2
# Transfers are repeated below this level already; when this many sources have failed for good, the
# network is down, and trying the other half million helps nobody.
_MAX_TRANSFER_FAILURES = 16


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is.

    Attributes:
        done: Sources finished, including those that failed.
        total: Sources in all.
        failed: Sources that cannot be indexed.
        bytes_read: Bytes fetched so far.
    """

    done: int
    total: int
    failed: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did.

    Attributes:
        path: The installed archive.
        identity: Its identity, with every size.
        num_sources: Source files indexed.
        num_samples: Pictures in all of them.
        num_reused: Sources taken over from an earlier build without reading them.
        source_bytes: Size of all source files.
        archive_bytes: Size of the archive.
        requests: Range requests made.
        bytes_read: Bytes fetched.
        elapsed_s: Duration.
    """

    path: Path
    identity: SidecarIdentity
    num_sources: int
    num_samples: int
    num_reused: int
    source_bytes: int
    archive_bytes: int
    requests: int
    bytes_read: int
    elapsed_s: float


class SourcesChangedError(TransferError):
    """Source files were replaced while they were being indexed; the same call may succeed later."""

    code = "sources-changed"


def request_identity(
    store: DatasetStore, layout: DatasetLayout, *, repo_id: str | None = None, revision: str | None = None
) -> SidecarIdentity:
    """What a sidecar for this dataset as it is now has to match (SC-6).

    Args:
        store: Where the dataset is.
        layout: Its metadata.
        repo_id: Repository id; by default the location's, or the name of its last directory.
        revision: Revision; by default the location's, or the codebase version as upstream has it.

    Raises:
        NotFoundError: Videos are missing; all are named.
    """
    paths = layout.video_files()
    location = store.location
    # A pinned snapshot cannot change, so nothing has to be asked about its files.
    infos = store.file_info(paths) if store.fingerprints_required else {}
    fingerprints = {path: info.fingerprint for path, info in infos.items() if info.fingerprint is not None}
    return SidecarIdentity(
        repo_id=repo_id or location.repo_id or location.root.rstrip("/").rsplit("/", 1)[-1] or "dataset",
        revision=revision or location.revision or layout.info.codebase_version,
        data_root=location.root,
        source_files=tuple(
            SourceFile(path, infos[path].size if path in infos else None) for path in sorted(paths)
        ),
        source_fingerprints=fingerprints,
    )


def build_sidecar(
    store: DatasetStore,
    layout: DatasetLayout,
    *,
    destination: Path,
    workers: int = DEFAULT_WORKERS,
    identity: SidecarIdentity | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
    finished: FinishedSources | None = None,
    indexer: SourceIndexer | None = None,
    comment: bytes = b"",
) -> BuildReport:
    """Index every video of a dataset and install the archive. Takes no lock; callers do.

    Args:
        store: Where the dataset is.
        layout: Its metadata.
        destination: Path of the archive; replaced atomically, or left as it was on any failure.
        workers: Most sources read at the same time, and most that are held parsed; of these no more than
            there are processors either.
        identity: Identity of the archive; from `request_identity` when None.
        progress: Called from worker threads, at most a few times each second and at the end.
        finished: Records of earlier builds.
        indexer: Indexes what no earlier build has, instead of threads of this process.
        comment: Comment of the archive.

    Raises:
        InputError: Some videos cannot be indexed; the error names all of them, each with its
            reason, and ``fields["failures"]`` holds them as `SourceFailure`.
        NotFoundError, AccessError, TransferError: The same, where that is what all failures are.
        SourcesChangedError: Videos were replaced during the build.
        DiskFullError: No space is left.
    """
    if workers < 1:
        raise UsageError(f"workers is {workers}, expected at least 1.")
    if identity is None:
        identity = request_identity(store, layout)
    reclaim_leftovers(destination)
    start = time.monotonic()
    requests, bytes_read = store.counters.requests, store.counters.bytes_read
    with ArchiveWriter(destination, identity, comment=comment) as writer:
        build = _Build(store, identity, writer, progress, finished, indexer, frames_of_files(layout))
        build.run(workers)
        _require_unchanged(store, identity)
        build.raise_failures()
        complete = writer.install()
    return BuildReport(
        path=destination,
        identity=complete,
        num_sources=len(complete.source_files),
        num_samples=build.num_samples,
        num_reused=build.num_reused,
        source_bytes=sum(source.size or 0 for source in complete.source_files),
        archive_bytes=destination.stat().st_size,
        requests=store.counters.requests - requests,
        bytes_read=store.counters.bytes_read - bytes_read,
        elapsed_s=time.monotonic() - start,
    )


class _Build:
    """State that the worker threads of one build share."""

    def __init__(
        self,
        store: DatasetStore,
        identity: SidecarIdentity,
        writer: ArchiveWriter,
        progress: Callable[[BuildProgress], None] | None,
        finished: FinishedSources | None,
        indexer: SourceIndexer | None,
        frames: dict[str, int],
    ) -> None:
        self.num_samples = 0
        self.num_reused = 0
        self._store = store
        self._identity = identity
        self._writer = writer
        self._progress = progress
        self._finished = finished
        self._indexer = indexer
        self._for_indexer: list[Work] = []
        self._frames = frames
        self._moov_sizes = MoovSizes(frames)
        self._sources: Iterator[tuple[int, SourceFile]] = iter(enumerate(identity.source_files))
        self._reads, self._permits = threading.Semaphore(), Permits(1)
        self._turn: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failures: list[tuple[str, LrstreamError]] = []
        self._num_transfer_failures = 0
        self._done = 0
        self._bytes_at_start = store.counters.bytes_read
        self._reported_at = 0.0

    def run(self, workers: int) -> None:
        """Index all sources; returns when every thread has ended."""
        self._report(final=not self._identity.source_files)
        # Threads for what the processors work on, besides those that wait for storage. More of them would
        # only wait for each other.
        extra = min(workers, os.cpu_count() or 1)
        count = min(workers + extra, len(self._identity.source_files))
        if count == 0:
            return
        self._reads, self._permits = threading.Semaphore(workers), Permits(extra)
        if workers == 1 and count > 1:
            # The second thread compresses during the first one's next read, and no more than that: what a
            # file needs follows from the one before, whose tables must have been parsed by then.
            self._turn = threading.Semaphore()
        with ThreadPoolExecutor(count, thread_name_prefix="lrstream-build") as pool:
            try:
                futures = [pool.submit(self._work) for _ in range(count)]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # Also on Ctrl-C: the threads end after the read they are at.
                self._stop.set()
        for future in futures:
            future.result()
        if self._for_indexer:
            self._stop.clear()
            self._run_elsewhere()

    def raise_failures(self) -> None:
        """Raise one error for all sources that failed, if any did."""
        if self._failures:
            raise joint_error(self._failures, len(self._identity.source_files))

    def _work(self) -> None:
        """One thread: sources until none is left or the build stops."""
        while True:
            with contextlib.ExitStack() as turn:
                turn.enter_context(self._turn)
                with self._lock:
                    number, source = next(self._sources, (-1, None))
                if source is None or self._stop.is_set():
                    return
                try:
                    with Permit(self._permits) as permit:
                        indexed = self._index(number, source, turn, permit)
                    if not indexed:
                        continue
                except _StopBuild:
                    return
                except (InputError, NotFoundError, AccessError, TransferError) as error:
                    if isinstance(error, SourcesChangedError):
                        self._stop.set()
                        raise
                    self._fail(source.path, error)
                except BaseException:
                    # Before the next thread has its turn.
                    self._stop.set()
                    raise
                self._count_done()

    def _run_elsewhere(self) -> None:
        """Give the indexer what is left, and take each source from it as it is finished."""
        assert self._indexer is not None
        left = sorted(self._for_indexer, key=lambda work: work.number)
        sources = {work.number: work.source for work in left}
        with contextlib.closing(self._indexer.index(self._store, left)) as found:
            for indexed in found:
                source = sources.pop(indexed.number)
                if indexed.error is not None:
                    self._fail(source.path, indexed.error)
                else:
                    self._take_over(source, indexed)
                self._count_done()
                if self._stop.is_set():
                    return

    def _take_over(self, source: SourceFile, indexed: IndexedElsewhere) -> None:
        if indexed.track is not None:
            self._keep(source, indexed.track)
        elif indexed.packed is not None and self._finished is not None:
            self._finished.keep_packed(indexed.packed, self._identity.source_fingerprints.get(source.path))
        encoded = indexed.encoded
        if encoded is None:
            assert indexed.track is not None
            encoded = encode_source(indexed.number, indexed.track)
        self._add_encoded(source, encoded)

    def _index(self, number: int, source: SourceFile, turn: contextlib.ExitStack, permit: Permit) -> bool:
        """Finish one source; False if the indexer has to. Closes `turn` once it is parsed."""
        fingerprint = self._identity.source_fingerprints.get(source.path)
        track = self._earlier(source, fingerprint, permit)
        if track is not None:
            turn.close()
            permit.end_parsing()
            self._add(number, source, track)
            with self._lock:
                self.num_reused += 1
            return True
        if self._indexer is not None:
            with self._lock:
                self._for_indexer.append(Work(number, source, fingerprint, self._frames.get(source.path, 0)))
            return False
        reading = functools.partial(self._reading, permit)
        track = index_source(self._store, source, reading=reading, sizes=self._moov_sizes)
        turn.close()
        permit.end_parsing()
        self._keep(source, track)
        self._add(number, source, track)
        return True

    def _earlier(self, source: SourceFile, fingerprint: str | None, permit: Permit) -> TrackIndex | None:
        """The record of an earlier build, read with the permit; None if there is none."""
        if self._finished is not None:
            for read in self._finished.records(source, fingerprint):
                permit.acquire()
                track = read()
                if track is not None:
                    return track
        return None

    def _keep(self, source: SourceFile, track: TrackIndex) -> None:
        if self._finished is not None:
            self._finished.keep(track, self._identity.source_fingerprints.get(source.path))

    def _add(self, number: int, source: SourceFile, track: TrackIndex) -> None:
        self._add_encoded(source, encode_source(number, track))

    def _add_encoded(self, source: SourceFile, encoded: EncodedSource) -> None:
        if source.size is not None and encoded.file_size != source.size:
            raise SourcesChangedError(
                f"{source.path} has {encoded.file_size} bytes, but had {source.size} when the build began.",
                hint=_WRITING_HINT,
                file_path=source.path,
            )
        self._writer.add(encoded)
        with self._lock:
            self.num_samples += encoded.num_samples

    def _count_done(self) -> None:
        with self._lock:
            self._done += 1
            done = self._done == len(self._identity.source_files)
        self._report(final=done)

    @contextlib.contextmanager
    def _reading(self, permit: Permit) -> Iterator[None]:
        """One read: lets another thread parse meanwhile."""
        permit.release()
        with self._reads:
            if self._stop.is_set():
                raise _StopBuild
            yield
        permit.acquire()

    def _fail(self, path: str, error: LrstreamError) -> None:
        with self._lock:
            self._failures.append((path, error))
            if isinstance(error, TransferError):
                self._num_transfer_failures += 1
                if self._num_transfer_failures >= _MAX_TRANSFER_FAILURES:
                    self._stop.set()

    def _report(self, *, final: bool) -> None:
        if self._progress is None:
            return
        with self._lock:
            now = time.monotonic()
            if not final and now - self._reported_at < _PROGRESS_EVERY_S:
                return
            self._reported_at = now
            # Called under the lock, so that reports arrive one after the other and in order.
            self._progress(
                BuildProgress(
                    self._done,
                    len(self._identity.source_files),
                    len(self._failures),
                    self._store.counters.bytes_read - self._bytes_at_start,
                )
            )


_WRITING_HINT = "Stop whatever writes the dataset, then build again."


class _StopBuild(Exception):
    """Another thread has ended the build; raised between two reads of a source."""


def _require_unchanged(store: DatasetStore, identity: SidecarIdentity) -> None:
    """Look at the sources again: an index of files that were replaced meanwhile describes neither.

    Only for storage whose fingerprints are properties of the content; others (a random value for
    each look) would differ in any case.
    """
    if store.location.kind not in ("local", "bucket"):
        return
    infos = store.file_info(identity.paths)
    changed = [
        source.path
        for source in identity.source_files
        if infos[source.path].size != source.size
        or infos[source.path].fingerprint != identity.source_fingerprints.get(source.path)
    ]
    if changed:
        raise SourcesChangedError(
            f"{len(changed)} video files changed while they were being indexed, for example {changed[0]}.",
            hint=_WRITING_HINT,
            paths=tuple(changed),
        )
