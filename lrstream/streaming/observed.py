"""The part of a dataset that tells what it does: counters, and where they can be looked at (LD-13)."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from lrstream.errors import UsageError
from lrstream.storage.per_process import PerProcess
from lrstream.streaming.exposition import exposition
from lrstream.streaming.metrics_board import MetricsBoard
from lrstream.streaming.metrics_server import (
    DEFAULT_HOST,
    LARGEST_PORT,
    PORT_VARIABLE,
    MetricsServer,
    environment_address,
)
from lrstream.streaming.report import logger
from lrstream.streaming.resumable import ResumableDataset

__all__ = ["MetricsExport", "ObservedDataset"]

# In the label `worker`; the training process has the waits for batches, and all the rest without workers.
_TRAINING = "main"


class _Served:
    """The server of one process."""

    def __init__(self) -> None:
        self.server: MetricsServer | None = None


def _close_inherited(served: _Served) -> None:
    if served.server is not None:
        served.server.close()


class MetricsExport:
    """Serves the counters of the training process and of all its workers, if asked to. Picklable."""

    def __init__(self) -> None:
        self._board: MetricsBoard | None = None
        self._served: PerProcess[_Served] = PerProcess(_Served, _close_inherited)

    def serve(self, dataset: ObservedDataset, port: int, host: str = DEFAULT_HOST) -> int | None:
        """Begin to serve; see `ObservedDataset.serve_metrics`."""
        served = self._served.get()
        if served.server is not None:
            raise UsageError(f"Metrics of this dataset are served already, on port {served.server.port}.")
        if not 0 <= port <= LARGEST_PORT:
            raise UsageError(f"port is {port}, expected 0 to {LARGEST_PORT}.")
        board = MetricsBoard()
        # A dataset that is dropped without `close` must not live on because somebody may look at it.
        reference = weakref.ref(dataset)

        def text() -> str:
            alive = reference()
            return "" if alive is None else _exposition(alive, board)

        try:
            server = MetricsServer(host, port, text)
        except OSError as error:
            board.close()
            logger.warning(
                "Metrics are not served: port %d of %s cannot be had (%s). Choose another one with "
                "serve_metrics or %s; training goes on.",
                port,
                host,
                error.strerror or error,
                PORT_VARIABLE,
            )
            return None
        weakref.finalize(self, server.close)
        self._board, served.server = board, server
        logger.info("Metrics are served on http://%s:%d/metrics.", host, server.port)
        return server.port

    def tick(self, worker: int, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        """Called after each sample; cheap."""
        if self._board is not None and not self._board.is_makers and self._board.is_due:
            self.tell(worker, snapshot)

    def tell(self, worker: int, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        """Called at the end of an epoch: the counters are final for now."""
        if self._board is not None and not self._board.is_makers:
            self._served.get()  # lets go of the socket that a forked process has inherited
            self._board.write(worker, snapshot())

    def close(self) -> None:
        """Stop serving; does nothing in other processes."""
        served = self._served.drop()
        if served is not None and served.server is not None:
            served.server.close()
            if self._board is not None:
                self._board.close()
                self._board = None


class ObservedDataset(ResumableDataset):
    """The part of `StreamingLeRobotDataset` that tells what it does."""

    _export: MetricsExport

    @property
    @abstractmethod
    def rank(self) -> int:
        """Rank of this process."""

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Counters of this process."""

    def serve_metrics(self, port: int, host: str = DEFAULT_HOST) -> int | None:
        """Serve the counters of this process and of its DataLoader workers for Prometheus.

        To be called before iterating, in the training process. The environment variable
        ``LRSTREAM_PROMETHEUS_PORT`` (``PORT`` or ``HOST:PORT``; ``LOCAL_RANK`` is added) does the same when
        the dataset is opened. Counters of workers are half a second old at most.

        Args:
            port: Port; 0 lets the system choose one.
            host: Address to listen at; others than this machine see it only if this says so.

        Returns:
            The port that is served. None if it cannot be had: there is a warning, and training goes on.

        Raises:
            UsageError: The port is out of range, or metrics of this dataset are served already.
        """
        return self._export.serve(self, port, host)

    def _serve_from_environment(self) -> None:
        address = environment_address()
        if address is not None:
            host, port = address
            self.serve_metrics(port, host)


def _exposition(dataset: ObservedDataset, board: MetricsBoard) -> str:
    rank = str(dataset.rank)
    processes: list[tuple[dict[str, str], Mapping[str, Any]]] = [
        ({"rank": rank, "worker": _TRAINING}, dataset.metrics())
    ]
    processes += [
        ({"rank": rank, "worker": str(worker)}, counters) for worker, counters in board.read().items()
    ]
    return exposition(processes)
