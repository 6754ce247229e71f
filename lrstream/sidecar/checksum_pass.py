"""Reading all payload of a dataset once, for the checksums of its spans.

Files are read in pieces, several at a time, and a piece goes into the checksum of every span that it touches:
neighbouring spans overlap, but no byte is fetched twice. Where the storage tells a hash of the whole file (a
Hub dataset), the file is read to its end and held against it, so that the checksums are known to be those of
the right bytes. Elsewhere they are as good as the one reading that they are made from.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, cast

import numpy as np

from lrstream.errors import (
    AccessError,
    InputError,
    LrstreamError,
    NotFoundError,
    TimestampError,
    TransferError,
)
from lrstream.index.open import SampleIndex
from lrstream.mp4.span import Span, SpanFinder
from lrstream.sidecar.build_failures import joint_error
from lrstream.sidecar.checksum_file import FileChecksums
from lrstream.sidecar.checksum_journal import ChecksumJournal
from lrstream.sidecar.checksum_wanted import Intervals
from lrstream.sidecar.identity import SidecarIdentity, pinned_commit
from lrstream.sidecar.reuse import hub_contents
from lrstream.storage.byte_source import ByteSource
from lrstream.storage.store import DatasetStore

if TYPE_CHECKING:  # nothing of the Hub's client is needed for other storage
    from lrstream.storage.hub_store import HubStore

__all__ = ["PayloadPass"]

logger = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
_MAX_FAILURES = 16


class _Stop(Exception):
    """The pass ends; raised between two pieces of a file."""


class PayloadPass:
    """One reading of some source files.

    Args:
        store: Where they are.
        identity: Of the sidecar.
        index: Its sample tables.
        work: Intervals to cover, by source file.
        workers: Reads at the same time.
        journal: Where finished files are noted.
        hold_against_listing: Whether files are held against a hash that the storage tells.

    Attributes:
        done: Rows of the files that were read.
        num_verified: Files held against a hash.
        num_without_span: Intervals left out.
        failures: Files that cannot be read, each with its error.
    """

    def __init__(
        self,
        store: DatasetStore,
        identity: SidecarIdentity,
        index: SampleIndex,
        work: Intervals,
        workers: int,
        journal: ChecksumJournal | None = None,
        *,
        hold_against_listing: bool = True,
    ) -> None:
        self.done: dict[str, FileChecksums] = {}
        self.num_verified = 0
        self.num_without_span = 0
        self._store = store
        self._identity = identity
        self._index = index
        self._work = work
        self._journal = journal
        self._hold_against_listing = hold_against_listing
        self._workers = max(1, workers)
        self._num_threads = max(1, min(self._workers, len(work)))
        self._ahead = max(1, self._workers // self._num_threads)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.failures: list[tuple[str, LrstreamError]] = []
        self._sizes = {source.path: source.size or 0 for source in identity.source_files}
        self._total = sum(self._sizes[path] for path in work)
        self._done_bytes = 0
        self._hashes: dict[str, str] = {}

    def run(self, tell: Callable[[int, int, int], None]) -> None:
        """Read all files; returns when every thread has ended."""
        if not self._work:
            return
        commit = pinned_commit(self._identity.data_root)
        if self._hold_against_listing and self._store.location.kind == "hub" and commit is not None:
            contents = hub_contents(cast("HubStore", self._store), commit, set(self._work))
            self._hashes = {path: content for path, (content, _) in contents.items()}
        self._tell = tell
        todo: Iterator[str] = iter(self._work)
        with (
            ThreadPoolExecutor(self._workers, thread_name_prefix="lrstream-read") as readers,
            ThreadPoolExecutor(self._num_threads, thread_name_prefix="lrstream-checksum") as threads,
        ):
            try:
                futures = [threads.submit(self._take, todo, readers) for _ in range(self._num_threads)]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # Also on Ctrl-C: the threads end after the piece they are at.
                self._stop.set()
        for future in futures:
            future.result()

    def raise_failures(self) -> None:
        """Raise one error for all files that could not be read, if there are any."""
        if self.failures:
            raise joint_error(self.failures, len(self._work), "cannot be read; no checksums were written")

    def _take(self, todo: Iterator[str], readers: ThreadPoolExecutor) -> None:
        while not self._stop.is_set():
            with self._lock:
                path = next(todo, None)
            if path is None:
                return
            try:
                row = self._read(path, readers)
            except _Stop:
                return
            except (InputError, NotFoundError, AccessError, TransferError) as error:
                with self._lock:
                    self.failures.append((path, error))
                    if len(self.failures) >= _MAX_FAILURES:
                        self._stop.set()
                continue
            if self._journal is not None:
                self._journal.keep(row)
            with self._lock:
                self.done[path] = row
                self._tell(self._done_bytes, self._total, len(self.done))

    def _read(self, path: str, readers: ThreadPoolExecutor) -> FileChecksums:
        spans = self._spans(path)
        size, wanted = self._sizes[path], self._hashes.get(path)
        source = self._store.open(path, size)
        fingerprint = self._identity.source_fingerprints.get(path)
        if fingerprint is not None:
            source.expect(fingerprint)
        with contextlib.closing(source):
            for attempt in (1, 2):
                checksums, content = self._checksums(source, spans, size, wanted, readers)
                if content == wanted:
                    break
                if attempt == 2:
                    raise TransferError(
                        f"{path}: the file that was read has the hash {content}, expected {wanted} as "
                        "listed; twice.",
                        hint="It is damaged where it is stored, or something in between changes it.",
                        file_path=path,
                    )
                logger.warning("%s was damaged on the way; it is read again.", path)
        if wanted is not None:
            with self._lock:
                self.num_verified += 1
        order = sorted(range(len(spans)), key=lambda at: (spans[at][2].start_byte, spans[at][2].stop_byte))
        columns = [
            np.array([spans[at][0] for at in order], dtype=np.float64),
            np.array([spans[at][1] for at in order], dtype=np.float64),
            np.array([spans[at][2].start_byte for at in order], dtype=np.int64),
            np.array([spans[at][2].stop_byte for at in order], dtype=np.int64),
            np.array([checksums[at] for at in order], dtype=np.uint32),
        ]
        return FileChecksums(path, size, *columns)  # type: ignore[arg-type]

    def _spans(self, path: str) -> list[tuple[float, float, Span]]:
        finder = SpanFinder(self._index.track(path).samples)
        found = []
        for from_s, to_s in sorted(self._work[path]):
            try:
                found.append((from_s, to_s, finder.find(from_s, to_s)))
            except TimestampError as error:
                # The loader refuses such an episode; others of the file can be used all the same.
                logger.warning("%s: no checksum for [%s, %s) s: %s", path, from_s, to_s, error.message)
                with self._lock:
                    self.num_without_span += 1
        return found

    def _checksums(
        self,
        source: ByteSource,
        spans: list[tuple[float, float, Span]],
        size: int,
        wanted: str | None,
        readers: ThreadPoolExecutor,
    ) -> tuple[list[int], str | None]:
        """CRC-32 of each span, and the hash of the file if one is `wanted`."""
        by_start = sorted(range(len(spans)), key=lambda at: spans[at][2].start_byte)
        bounds = [(span.start_byte, span.stop_byte) for _, _, span in spans]
        whole = None
        ranges = _merged(sorted(bounds))
        if wanted is not None:
            ranges = [(0, size)]
            is_git = wanted.startswith("blob:")
            whole = hashlib.sha1(usedforsecurity=False) if is_git else hashlib.sha256()
            if is_git:
                whole.update(b"blob %d\0" % size)
        checksums = [0] * len(spans)
        passed = 0
        for start, piece in self._pieces(source, ranges, readers):
            stop = start + len(piece)
            if whole is not None:
                whole.update(piece)
            view = memoryview(piece)
            # Spans that begin behind the piece come later; those that end before it are done.
            while passed < len(by_start) and bounds[by_start[passed]][1] <= start:
                passed += 1
            for at in by_start[passed:]:
                first, last = bounds[at]
                if first >= stop:
                    break
                if last > start:
                    part = view[max(first, start) - start : min(last, stop) - start]
                    checksums[at] = zlib.crc32(part, checksums[at])
            with self._lock:
                self._done_bytes += len(piece)
                self._tell(min(self._done_bytes, self._total), self._total, len(self.done))
        if whole is None or wanted is None:
            return checksums, None
        return checksums, f"{wanted.partition(':')[0]}:{whole.hexdigest()}"

    def _pieces(
        self, source: ByteSource, ranges: list[tuple[int, int]], readers: ThreadPoolExecutor
    ) -> Iterator[tuple[int, bytes]]:
        """The bytes of ascending ranges in pieces, a few of them read ahead."""
        bounds = (
            (at, min(at + _PIECE_BYTES, stop))
            for start, stop in ranges
            for at in range(start, stop, _PIECE_BYTES)
        )
        waiting: deque[tuple[int, Future[bytes]]] = deque()
        try:
            for start, stop in bounds:
                waiting.append((start, readers.submit(self._piece, source, start, stop)))
                if len(waiting) > self._ahead:
                    at, future = waiting.popleft()
                    yield at, future.result()
            while waiting:
                at, future = waiting.popleft()
                yield at, future.result()
        finally:
            for _, future in waiting:
                future.cancel()

    def _piece(self, source: ByteSource, start: int, stop: int) -> bytes:
        if self._stop.is_set():
            raise _Stop
        return source.read(start, stop)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of ascending ranges."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
