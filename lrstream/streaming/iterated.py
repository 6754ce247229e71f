"""The part of a dataset that is one iteration after the other: begin, log lines, end (LD-9, LD-13)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from torch.utils.data import get_worker_info

from lrstream.errors import UsageError
from lrstream.streaming.batches import Sample
from lrstream.streaming.checkpoint import Progress
from lrstream.streaming.follow import refuse_sharding
from lrstream.streaming.iteration import DatasetIterator, SampleStream, failing_iterator
from lrstream.streaming.observed import ObservedDataset
from lrstream.streaming.report import PeriodicReport

__all__ = ["IteratedDataset"]


class IteratedDataset(ObservedDataset):
    """A dataset that is read from where its position says, in whatever process asks for its samples.

    Attributes:
        log_interval_s: Seconds between two log lines of a worker on its counters, 0 = none.
    """

    log_interval_s: float

    @property
    @abstractmethod
    def _repeats(self) -> bool:
        """Whether one iteration goes on with the next epoch."""

    @abstractmethod
    def _streams(self) -> Callable[[Progress], SampleStream | None]:
        """What starts the stream of a position, for one iteration; None where there is nothing to do."""

    @abstractmethod
    def _log(self) -> PeriodicReport:
        """Log lines of this process."""

    @abstractmethod
    def close(self) -> None:
        """End iterations of this process."""

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        number, num_workers = (0, 0) if worker is None else (worker.id, worker.num_workers)
        try:
            refuse_sharding(getattr(worker, "dataset", None))
            progress = self._checkpoint.begin(number, num_workers)
        except UsageError as error:
            if worker is None:
                raise
            # A worker that lives on would die of an error here, instead of handing it to training.
            return failing_iterator(error)
        return DatasetIterator(
            self._streams(),
            progress,
            number,
            repeat=self._repeats,
            after_sample=self._ticker(),
            at_end=self._tell,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ticker(self) -> Callable[[Progress], None]:
        """What is called after each sample of one iteration."""
        log, export = self._log(), self._export

        def tick(progress: Progress) -> None:
            if self.log_interval_s > 0 and log.is_due(self.log_interval_s):
                log.tell(self._who(progress), self.metrics())
            export.tick(progress.part, self.metrics)

        return tick

    def _tell(self, progress: Progress) -> None:
        if self.log_interval_s > 0:
            self._log().tell(f"{self._who(progress)} has ended", self.metrics())
        self._export.tell(progress.part, self.metrics)

    def _who(self, progress: Progress) -> str:
        return f"rank {self.rank} worker {progress.part} epoch {progress.state.epoch}"
