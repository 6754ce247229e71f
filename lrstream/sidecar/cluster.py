"""Indexing on a Dask cluster: this process hands out sources and writes the archive.

Pieces of a few sources each go to the scheduler, about two for each thread of the cluster, so that what is
under way is bounded whatever the size of the dataset. A finished piece is fetched, written and released
before the next one is fetched. The scheduler repeats elsewhere what a lost process was doing, and results it
had not delivered yet. Names of pieces are random, and everything that could show credentials is sealed
(`lrstream.storage.portable`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from lrstream.errors import LrstreamError, NotFoundError, TransferError, UsageError
from lrstream.sidecar.cluster_task import BatchResult, Job, end_job, index_batch
from lrstream.sidecar.elsewhere import IndexedElsewhere, Work
from lrstream.sidecar.index_work import SourceResult
from lrstream.sidecar.writer import decode_source
from lrstream.storage.portable import PortableStore
from lrstream.storage.store import DatasetStore

if TYPE_CHECKING:
    from distributed import Client, Future, LocalCluster

__all__ = ["LOCAL", "ClusterError", "ClusterIndexer"]

logger = logging.getLogger(__name__)

LOCAL = "local"
"""Scheduler address that stands for a cluster on this machine, started for the build."""

# Twice as many pieces as threads keep every thread busy while results travel.
_PIECES_PER_THREAD = 2
_MAX_PIECES = 1024
_MAX_SOURCES_PER_PIECE = 64
_LOOK_EVERY_S = 1.0
_WARN_WITHOUT_WORKERS_S = 30.0
_LONGEST_WITHOUT_WORKERS_S = 1800.0
_CONNECT_TIMEOUT_S = 10.0
_FETCH_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 90.0

T = TypeVar("T")


class ClusterError(TransferError):
    """The scheduler of a cluster cannot be reached, was lost, or gave up; the same call may succeed later."""

    code = "cluster"


class ClusterIndexer:
    """A `lrstream.sidecar.elsewhere.SourceIndexer` that uses a Dask cluster. Use as a context manager.

    Entering connects to the scheduler, so that a wrong address is noticed before any work; a cluster on this
    machine is started when there is something to index.

    Args:
        scheduler: Address of a scheduler, such as ``tcp://host:8786``, or `LOCAL`.
        workers: Sources that each process of the cluster indexes at the same time.

    Raises:
        UsageError: ``distributed`` is not installed, or the address cannot be understood.
        ClusterError: The scheduler does not answer.
    """

    def __init__(self, scheduler: str, *, workers: int) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._client: Client | None = None
        self._cluster: LocalCluster | None = None
        self._is_quiet = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _require_distributed()
        self._is_quiet.enter_context(_quiet_library())
        if self._scheduler != LOCAL:
            try:
                _check_address(self._scheduler)
                self._client = self._connect(self._scheduler)
            except BaseException:
                self._is_quiet.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._client is not None:
                self._client.close(timeout=5)
                self._client = None
            if self._cluster is not None:
                self._cluster.close(timeout=10)
                self._cluster = None
        finally:
            self._is_quiet.close()

    def index(self, store: DatasetStore, sources: Sequence[Work]) -> Generator[IndexedElsewhere]:
        """Index all sources on the cluster; the order is that in which they are finished.

        Raises:
            ClusterError: The scheduler was lost, or has no processes, or one source ends every process
                that indexes it.
            UsageError: The cluster's processes cannot run this release.
        """
        client = self._client or self._start_local()
        run = _Run(client, self._scheduler, store, sources, self._workers)
        try:
            yield from run.results()
        finally:
            run.end()

    def _start_local(self) -> Client:
        from dask.system import CPU_COUNT
        from distributed import LocalCluster, Security

        # One thread for each process: what waits are the reads, and those overlap inside of a piece.
        count = max(1, min(CPU_COUNT, 8))
        self._workers = max(1, math.ceil(self._workers / count))
        self._cluster = LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            worker_dashboard_address=None,
            silence_logs=logging.CRITICAL,
            security=Security(),
        )
        self._client = self._connect(self._cluster.scheduler_address)
        return self._client

    def _connect(self, address: str) -> Client:
        from distributed import Client

        try:
            return Client(
                address,
                timeout=_CONNECT_TIMEOUT_S,
                set_as_default=False,
                name="lrstream-build",
            )
        except OSError as error:
            raise ClusterError(
                f"The Dask scheduler {address} does not answer within {_CONNECT_TIMEOUT_S:.0f} s.",
                hint="Check the address, that the scheduler runs, and that this machine may reach it.",
                scheduler=address,
            ) from error


class _Run:
    """Handing out the sources of one build and collecting what comes back."""

    def __init__(
        self,
        client: Client,
        scheduler: str,
        store: DatasetStore,
        sources: Sequence[Work],
        workers: int,
    ) -> None:
        self._client = client
        self._scheduler = scheduler
        self._store = store
        self._job = Job(f"lrstream-index-{uuid.uuid4().hex}", PortableStore(store), workers)
        self._total = len(sources)
        self._waiting = deque(sources)
        self._paths = {work.number: work.source.path for work in sources}
        self._running: dict[str, tuple[Future, tuple[Work, ...]]] = {}
        self._finished: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._num_pieces = 0
        self._threads = 0
        self._processes = 0
        self._looked_at = -math.inf
        self._worked_at = self._warned_at = time.monotonic()

    def results(self) -> Iterator[IndexedElsewhere]:
        while self._paths:
            self._look()
            self._hand_out()
            try:
                name = self._finished.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                continue
            yield from self._collect(name)

    def end(self) -> None:
        """Let go of everything: nothing of this build runs on the cluster afterwards."""
        futures = [future for future, _ in self._running.values()]
        self._running.clear()
        if self._client.status != "running":
            return
        # Both by themselves are not enough: cancelling keeps pieces from being begun, but what runs in a
        # thread cannot be ended from outside, so it is asked to.
        try:
            if futures:
                self._client.cancel(futures, force=True)
            ended = _within(
                _END_TIMEOUT_S, lambda: self._client.run(end_job, self._job.name, on_error="ignore")
            )
        except Exception as error:  # noqa: BLE001  (the build has ended or failed already; this is tidying up)
            logger.debug("The cluster could not be told that the build has ended: %s", error)
            return
        if not all(ended.values()):
            logger.warning("Some processes of the cluster are still reading the last sources they began.")

    def _look(self) -> None:
        """See what the cluster has, now and then."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        if self._client.status != "running":
            raise self._lost()
        try:
            threads = self._client.nthreads()
        except Exception as error:
            raise self._lost() from error
        self._threads, self._processes = sum(threads.values()), len(threads)
        if self._threads:
            self._worked_at = self._warned_at = now
            return
        if now - self._worked_at > _LONGEST_WITHOUT_WORKERS_S:
            raise ClusterError(
                f"The Dask scheduler {self._scheduler} had no worker processes for "
                f"{_LONGEST_WITHOUT_WORKERS_S:.0f} s; {self._progress()}.",
                hint="Start workers, then run the same command again.",
                scheduler=self._scheduler,
            )
        if now - self._warned_at > _WARN_WITHOUT_WORKERS_S:
            self._warned_at = now
            logger.warning(
                "The Dask scheduler %s has no worker processes; waiting for some.", self._scheduler
            )

    def _hand_out(self) -> None:
        wanted = min(max(_PIECES_PER_THREAD * self._threads, 1), _MAX_PIECES)
        while self._waiting and len(self._running) < wanted:
            size = self._piece_size()
            batch = tuple(self._waiting.popleft() for _ in range(min(size, len(self._waiting))))
            self._submit(batch)

    def _piece_size(self) -> int:
        """Large pieces at first, then smaller ones, so that all threads end at about the same time."""
        # As many as a thread indexes at the same time; fewer would leave it idle.
        least = max(1, math.ceil(self._job.workers * self._processes / max(self._threads, 1)))
        share = len(self._waiting) // (4 * max(self._threads, 1))
        return min(max(share, least), max(_MAX_SOURCES_PER_PIECE, least))

    def _submit(self, batch: tuple[Work, ...]) -> None:
        self._num_pieces += 1
        name = f"{self._job.name}-{self._num_pieces}"
        future = self._client.submit(index_batch, self._job, batch, key=name, pure=False)
        self._running[name] = (future, batch)
        future.add_done_callback(lambda _: self._finished.put(name))

    def _collect(self, name: str) -> Iterator[IndexedElsewhere]:
        future, batch = self._running[name]
        try:
            if future.status == "error":
                raise self._explained(future.exception(), batch)
            if future.status != "finished":
                raise self._lost()
            try:
                result: BatchResult = future.result(timeout=_FETCH_TIMEOUT_S)
            except LrstreamError:
                raise
            except Exception as error:
                raise self._explained(error, batch) from error
        finally:
            del self._running[name]
            future.release()
        self._store.counters.add(requests=result.requests, bytes_read=result.bytes_read)
        self._waiting.extend(result.left)
        for one in result.results:
            path = self._paths.pop(one.number, None)
            if path is not None:
                yield self._indexed(one, result.compressor)

    def _indexed(self, result: SourceResult, compressor: str) -> IndexedElsewhere:
        if result.encoded is None:
            error = result.error
            if isinstance(error, NotFoundError) and self._store.location.kind == "local":
                error.hint = "Every machine of the cluster must have the dataset at the same path."
            return IndexedElsewhere(result.number, error=error)
        track = decode_source(result.encoded)
        # Another release of zlib compresses to other bytes; the archive has those of this machine.
        is_same = compressor == zlib.ZLIB_RUNTIME_VERSION
        return IndexedElsewhere(result.number, track, result.encoded if is_same else None)

    def _explained(self, error: BaseException | None, batch: tuple[Work, ...]) -> BaseException:
        """What to raise where a piece of work failed as a whole."""
        from distributed import KilledWorker

        if isinstance(error, LrstreamError):
            return error
        if isinstance(error, KilledWorker):
            return ClusterError(
                f"Process after process of the cluster ended while it indexed {batch[0].source.path} and "
                f"{len(batch) - 1} other video files; {self._progress()}.",
                hint="Look at the logs of the workers (memory?), then run the same command again.",
                scheduler=self._scheduler,
            )
        if isinstance(error, ImportError):
            return UsageError(
                f"The cluster's processes cannot run lrstream: {error}.",
                hint="Install the same release of lrstream on all machines of the cluster.",
            )
        if isinstance(error, (OSError, TimeoutError)) or type(error).__name__.endswith("CancelledError"):
            return self._lost()
        return error or self._lost()

    def _lost(self) -> ClusterError:
        return ClusterError(
            f"The Dask scheduler {self._scheduler} was lost; {self._progress()}.",
            hint="Run the same command again when it is back; what is indexed is kept.",
            scheduler=self._scheduler,
        )

    def _progress(self) -> str:
        return f"{self._total - len(self._paths)} of {self._total} video files had been indexed"


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call of the library that takes no time limit itself.

    Raises:
        TimeoutError: It did not end in time; it is left to itself.
    """
    results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except Exception as error:  # noqa: BLE001  (handed to the caller)
            results.put((None, error))

    threading.Thread(target=work, name="lrstream-cluster", daemon=True).start()
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _check_address(address: str) -> None:
    from distributed.comm import get_address_host_port

    try:
        get_address_host_port(address)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{address!r} is no address of a Dask scheduler: {error}.",
            hint=f"Expected something like tcp://host:8786, or {LOCAL}.",
        ) from error


def _require_distributed() -> None:
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Building on a cluster needs the package distributed, which is not installed ({error}).",
            hint='Install it: pip install "lrstream[distributed]".',
        ) from error


@contextlib.contextmanager
def _quiet_library() -> Iterator[None]:
    """The library logs to stderr on its own; what matters is told by errors and warnings of ours."""
    library = logging.getLogger("distributed")
    level = library.level
    children = {
        name: logger_.level
        for name, logger_ in logging.root.manager.loggerDict.items()
        if name.startswith("distributed.") and isinstance(logger_, logging.Logger)
    }
    library.setLevel(logging.CRITICAL)
    for name in children:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        library.setLevel(level)
        for name, before in children.items():
            logging.getLogger(name).setLevel(before)
