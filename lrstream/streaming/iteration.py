"""One iteration over a dataset in one process: epoch after epoch, counted sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from lrstream.streaming.batches import Sample
from lrstream.streaming.checkpoint import Progress

__all__ = ["DatasetIterator", "SampleStream", "failing_iterator"]


class SampleStream(Protocol):
    """The rest of one epoch of one worker, one sample after the other."""

    is_complete: bool
    """Whether all of it has been delivered, rather than given up."""

    def __next__(self) -> Sample:
        """The next sample."""
        ...

    def __iter__(self) -> Iterator[Sample]:
        """Itself."""
        ...


class DatasetIterator(Iterator[Sample]):
    """Samples of one worker's share, from where it stands.

    Belongs to one process and thread. Its threads end with it.

    Args:
        start: Starts the pipeline of what `Progress` says; None where the worker has nothing to do.
        progress: Where the iteration begins; moved on with each sample that is delivered.
        worker: Number of this worker, whose share is read in later epochs.
        repeat: Whether the next epoch follows.
        after_sample: Called after each sample.
        at_end: Called at the end of each epoch.
    """

    def __init__(
        self,
        start: Callable[[Progress], SampleStream | None],
        progress: Progress,
        worker: int,
        *,
        repeat: bool,
        after_sample: Callable[[Progress], None],
        at_end: Callable[[Progress], None],
    ) -> None:
        self._start = start
        self._progress = progress
        self._worker = worker
        self._repeat = repeat
        self._after_sample = after_sample
        self._at_end = at_end
        self._pipeline: SampleStream | None = None
        self._is_started = self._is_ended = False
        # The rest of an epoch may be empty without the next one being so.
        self._may_be_empty = progress.num_samples > 0 or progress.stage > 0

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Sample:
        while not self._is_ended:
            try:
                if not self._is_started:
                    self._pipeline, self._is_started = self._start(self._progress), True
                sample = None if self._pipeline is None else next(self._pipeline, None)
            except BaseException:
                # An epoch that has failed must not be mistaken for one that goes on (K19).
                self._is_ended, self._pipeline = True, None
                raise
            if sample is not None:
                self._progress.num_samples += 1
                self._may_be_empty = True
                self._after_sample(self._progress)
                return sample
            self._finish()
        raise StopIteration

    def _finish(self) -> None:
        """End the epoch, and begin the next one if iterations go on."""
        was_closed = self._pipeline is not None and not self._pipeline.is_complete
        self._pipeline, self._is_started = None, False
        self._at_end(self._progress)
        if was_closed or not self._repeat or not self._may_be_empty:
            self._is_ended = True
            return
        following = self._progress.next_epoch(self._worker)
        # In place: the checkpointer holds this very object.
        self._progress.state, self._progress.part = following.state, following.part
        self._progress.num_samples, self._progress.frames = 0, None
        self._may_be_empty = False


def failing_iterator(error: Exception) -> Iterator[Sample]:
    """An iterator that raises `error` where the first sample is asked for."""

    def fail() -> Sample:
        raise error

    return (fail() for _ in (None,))
