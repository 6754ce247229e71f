"""The threads with which one process indexes sources that it is given one by one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.elsewhere import Work
from lrstream.sidecar.index_source import MoovSizes
from lrstream.sidecar.index_work import SourceResult, index_work
from lrstream.sidecar.journal import pack_record
from lrstream.sidecar.permit import Permit, Permits
from lrstream.storage.store import DatasetStore

__all__ = ["IndexThreads"]

# There are as many processes as processors, so that each of them need not use more than one: a second thread
# that works while one compresses costs more in taking turns than it brings.
_RESULTS_AT_ONCE = 1


class IndexThreads:
    """Index what is added, in about the order in which it is.

    Args:
        store: Where the sources are.
        workers: Sources read at the same time.
        packs_records: Whether each record is wanted as a journal keeps it, too.
        put: Takes each result, on the thread that has it.
        fail: Takes an error that is none of a source; the thread ends with it.
        access: Makes a context in which each thread works.
    """

    def __init__(
        self,
        store: DatasetStore,
        workers: int,
        *,
        packs_records: bool,
        put: Callable[[SourceResult], None],
        fail: Callable[[Exception], None],
        access: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._store = store
        self._pack = pack_record if packs_records else _no_record
        self._put, self._fail, self._access = put, fail, access
        self._moov_sizes = MoovSizes()
        self._reads, self._permits = threading.Semaphore(workers), Permits(_RESULTS_AT_ONCE)
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name="lrstream-index", daemon=True)
            for _ in range(workers + 1)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, works: Sequence[Work]) -> None:
        """Let these be indexed."""
        for work in works:
            self._waiting.put(work)

    def stop(self) -> None:
        """Begin nothing any more; the threads end after the reads they are at."""
        self._stop.set()
        for _ in self._threads:
            self._waiting.put(None)

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        try:
            with self._access():
                while (work := self._waiting.get()) is not None and not self._stop.is_set():
                    self._put(self._index(work))
        except _Stopped:
            return
        except Exception as error:  # noqa: BLE001  (raised again by the build)
            self._fail(error)

    def _index(self, work: Work) -> SourceResult:
        with Permit(self._permits) as permit:
            return index_work(
                self._store,
                work,
                reading=lambda: self._reading(permit),
                sizes=self._moov_sizes,
                parsed=permit.end_parsing,
                pack=self._pack,
            )

    @contextlib.contextmanager
    def _reading(self, permit: Permit) -> Iterator[None]:
        """One read: lets another thread parse meanwhile."""
        permit.release()
        with self._reads:
            if self._stop.is_set():
                raise _Stopped
            yield
        permit.acquire()


class _Stopped(Exception):
    """The build has ended; raised between two reads of a source."""


def _no_record(track: TrackIndex, fingerprint: str | None) -> None:
    return None
