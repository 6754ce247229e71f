"""The piece of work that a process of a cluster does: index some sources (`lrstream.sidecar.cluster`).

Runs where lrstream is installed, beside whatever else that process does: it leaves no setting changed, and
keeps an open store only while pieces of the same build arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lrstream import __version__
from lrstream.errors import UsageError
from lrstream.sidecar.elsewhere import Work
from lrstream.sidecar.index_source import MoovSizes
from lrstream.sidecar.index_work import SourceResult, StoreCounts, expect_listed, index_work
from lrstream.storage.portable import PortableStore
from lrstream.storage.store import DatasetStore

__all__ = ["BatchResult", "Job", "end_job", "index_batch"]

# Results of a piece of work are held until they are fetched; a piece that has this much ends early.
_MAX_RESULT_BYTES = 8 << 20
_END_TIMEOUT_S = 60.0
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Job:
    """One build, as its pieces know it. Its text shows nothing of the store.

    Attributes:
        name: Unique name.
        store: The dataset.
        workers: Sources that one process indexes at the same time.
        version: Release that asks.
    """

    name: str
    store: PortableStore = field(repr=False)
    workers: int
    version: str = __version__


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one piece of work.

    Attributes:
        results: Of the sources that were indexed.
        left: Those that were not come to.
        requests: Range requests made.
        bytes_read: Bytes fetched.
        compressor: Release of zlib, which decides what the compressed bytes are.
    """

    results: tuple[SourceResult, ...]
    left: tuple[Work, ...]
    requests: int
    bytes_read: int
    compressor: str

    def __repr__(self) -> str:
        return f"BatchResult({len(self.results)} results, {len(self.left)} left)"


class _OpenJob:
    """A job in one process: its store, whether it is to stop, and how many pieces run."""

    def __init__(self, job: Job) -> None:
        self.store: DatasetStore = job.store.open()
        self.stop = threading.Event()
        self.moov_sizes = MoovSizes()
        self.num_running = 0
        # The pieces of a process share one store.
        self.counts = StoreCounts(self.store)

    def close(self) -> None:
        close = getattr(self.store, "close", None)
        if close is not None:
            close()


_lock = threading.Lock()
_open_jobs: dict[str, _OpenJob] = {}
# Of builds that have ended, so that a piece which arrives late is not begun; the last ones are enough.
_ended: deque[str] = deque(maxlen=64)


def index_batch(job: Job, batch: Sequence[Work]) -> BatchResult:
    """Index some sources; a source that cannot be indexed is a result like any other.

    Raises:
        UsageError: This process has another release of lrstream than the one that asks.
    """
    if job.version != __version__:
        raise UsageError(
            f"The cluster's process on {socket.gethostname()} has lrstream {__version__}, "
            f"but the build runs {job.version}.",
            hint="Install the same release on all machines of the cluster.",
        )
    opened = _enter(job)
    try:
        return _Batch(job, opened, batch).run()
    finally:
        with _lock:
            opened.num_running -= 1


async def end_job(name: str) -> bool:
    """Stop all pieces of a job in this process and close its store; whether none runs any more."""
    with _lock:
        _ended.append(name)
        opened = _open_jobs.get(name)
    if opened is None:
        return True
    opened.stop.set()
    for _ in range(int(_END_TIMEOUT_S / _PAUSE_S)):
        if opened.num_running == 0:
            break
        await asyncio.sleep(_PAUSE_S)
    with _lock:
        _open_jobs.pop(name, None)
    opened.close()
    return opened.num_running == 0


def _enter(job: Job) -> _OpenJob:
    with _lock:
        # What a build left open that ended without a word.
        for name in [
            name for name, other in _open_jobs.items() if name != job.name and not other.num_running
        ]:
            _open_jobs.pop(name).close()
        opened = _open_jobs.get(job.name)
        if opened is None:
            opened = _open_jobs[job.name] = _OpenJob(job)
        opened.num_running += 1
        if job.name in _ended:
            opened.stop.set()
    return opened


class _Stopped(Exception):
    """The build has ended; raised between two reads of a source."""


class _Batch:
    """One piece of work while it is done."""

    def __init__(self, job: Job, opened: _OpenJob, batch: Sequence[Work]) -> None:
        self._job = job
        self._opened = opened
        self._waiting = list(reversed(batch))
        self._lock = threading.Lock()
        self._results: list[SourceResult] = []
        self._result_bytes = 0

    def run(self) -> BatchResult:
        threads = min(max(self._job.workers // _own_threads(), 1), len(self._waiting))
        expect_listed(self._opened.store, self._waiting)
        with ThreadPoolExecutor(threads, thread_name_prefix="lrstream-index") as pool:
            for future in [pool.submit(self._work) for _ in range(threads)]:
                future.result()
        requests, bytes_read = self._opened.counts.take()
        return BatchResult(
            tuple(self._results),
            tuple(reversed(self._waiting)),
            requests,
            bytes_read,
            zlib.ZLIB_RUNTIME_VERSION,
        )

    def _work(self) -> None:
        with self._job.store.access():
            while (work := self._next()) is not None:
                try:
                    result = index_work(
                        self._opened.store,
                        work,
                        reading=self._reading,
                        sizes=self._opened.moov_sizes,
                    )
                except _Stopped:
                    return
                with self._lock:
                    self._results.append(result)
                    if result.encoded is not None:
                        self._result_bytes += sum(len(member.data) for member in result.encoded.members)

    def _next(self) -> Work | None:
        with self._lock:
            is_full = self._result_bytes >= _MAX_RESULT_BYTES
            return None if is_full or self._opened.stop.is_set() or not self._waiting else self._waiting.pop()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        if self._opened.stop.is_set():
            raise _Stopped
        yield


def _own_threads() -> int:
    """How many pieces of work this process does at the same time."""
    from distributed import get_worker

    try:
        return int(get_worker().state.nthreads)
    except ValueError:  # called outside of a cluster
        return 1
