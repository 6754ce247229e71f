"""An epoch, or the beginning of one, through a DataLoader with a stopwatch, as training would run it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lrstream.errors import LrstreamError
from lrstream.streaming.batches import Sample
from lrstream.streaming.checkpoint import Progress
from lrstream.streaming.dataset import StreamingLeRobotDataset
from lrstream.streaming.footprint import Footprint, total_footprint

__all__ = ["EpochTimes", "MeasuredDataset", "ProcessReport", "RunLimits", "measure_epoch"]

# A process reports so often; its memory is looked at after this time, and after twice as long each time.
_REPORT_EVERY_S = 0.25
_FIRST_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Where a run ends, and how fast training takes batches.

    Attributes:
        num_samples: Samples after which it ends; None = all.
        seconds: Time after which it ends; None = never.
        consumer_rate: Samples per second that training takes; None = as they come.
    """

    num_samples: int | None = None
    seconds: float | None = None
    consumer_rate: float | None = None

    def are_reached(self, num_samples: int, seconds: float) -> bool:
        """Whether a run that has come so far ends."""
        return (self.num_samples is not None and num_samples >= self.num_samples) or (
            self.seconds is not None and seconds >= self.seconds
        )


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What one reading process has done since its iteration began.

    Attributes:
        worker: Its number.
        pid: Its process.
        wall_s: Time, seconds.
        cpu_s: Processor time of all its threads, seconds.
        num_samples: Samples it has made.
        collate_s: Time in which it put batches together, seconds.
        counters: `StreamingLeRobotDataset.metrics` of the process.
    """

    worker: int
    pid: int
    wall_s: float
    cpu_s: float
    num_samples: int
    collate_s: float
    counters: Mapping[str, Any]


class MeasuredDataset(StreamingLeRobotDataset):
    """A dataset whose processes report what they do; otherwise the same. One iteration only."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Made here, so that workers inherit it however they are started.
        self._outbox: Any = multiprocessing.get_context().SimpleQueue()
        self._latest: dict[int, ProcessReport] = {}
        self._began_s = self._began_cpu_s = self._next_report_s = self._collate_s = 0.0
        self._maker_pid = os.getpid()

    def __iter__(self) -> Any:
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()
        self._next_report_s, self._collate_s = 0.0, 0.0
        return super().__iter__()

    def stack(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """A batch of samples as PyTorch makes it, but with everything that is no tensor in a list."""
        started_s = time.perf_counter()
        memory = samples[0].memory
        if memory is None:
            raise LrstreamError("A sample to be measured does not know where it was made.")
        # The default would also walk into lists and structures of language columns, whose lengths differ.
        batch = memory.collate(samples, others=list)
        self._collate_s += time.perf_counter() - started_s
        return batch

    def reports(self) -> tuple[ProcessReport, ...]:
        """The last report of each process that reads, by worker. For the process that made this."""
        while not self._outbox.empty():
            report = self._outbox.get()
            self._latest[report.worker] = report
        return tuple(report for _, report in sorted(self._latest.items()))

    def _ticker(self) -> Callable[[Progress], None]:
        tick_loader = super()._ticker()

        def tick(progress: Progress) -> None:
            tick_loader(progress)
            if time.perf_counter() >= self._next_report_s:
                self._report(progress)

        return tick

    def _tell(self, progress: Progress) -> None:
        super()._tell(progress)
        self._report(progress)

    def _report(self, progress: Progress) -> None:
        now_s = time.perf_counter()
        counters = self.metrics()
        report = ProcessReport(
            progress.part,
            os.getpid(),
            now_s - self._began_s,
            time.process_time() - self._began_cpu_s,
            counters["samples"],
            self._collate_s,
            counters,
        )
        self._next_report_s = now_s + _REPORT_EVERY_S
        if os.getpid() == self._maker_pid:
            self._latest[report.worker] = report
        else:
            self._outbox.put(report)


@dataclass(frozen=True, slots=True)
class EpochTimes:
    """What a run took.

    Attributes:
        num_samples: Samples delivered.
        num_first: Samples of the first batch.
        first_batch_s: From starting the workers to the first batch, seconds; 0 without a batch.
        elapsed_s: From starting the workers to the end, seconds.
        waits_s: Wait for each further batch, float64 seconds, shape ``(batches - 1,)``.
        is_complete: Whether the epoch came to its end, rather than a limit.
        consumer_s: Time in which training was pretended to compute, seconds.
        cpu_s: Processor time of this process, seconds.
        memory: Largest sums over this process and its workers that were seen.
        reports: The last report of each process that reads.
        is_in_process: Whether this process read by itself, without workers.
    """

    num_samples: int
    num_first: int
    first_batch_s: float
    elapsed_s: float
    waits_s: NDArray[np.float64]
    is_complete: bool
    consumer_s: float
    cpu_s: float
    memory: Footprint
    reports: tuple[ProcessReport, ...]
    is_in_process: bool

    @property
    def samples_per_s(self) -> float:
        """Samples per second once the first batch is there; over everything if there is only one batch."""
        num_samples, seconds = self.num_samples - self.num_first, self.elapsed_s - self.first_batch_s
        if num_samples == 0:
            num_samples, seconds = self.num_samples, self.elapsed_s
        return num_samples / seconds if seconds else 0.0


def measure_epoch(
    dataset: MeasuredDataset,
    *,
    batch_size: int,
    num_workers: int,
    take: Callable[[Mapping[str, Any]], None],
    limits: RunLimits | None = None,
) -> EpochTimes:
    """Run the epoch that `dataset` is set to, up to a limit.

    Args:
        dataset: What to read.
        batch_size: Samples of a batch.
        num_workers: DataLoader workers; 0 reads in this process.
        take: Gets each batch: tensors stacked, everything else as a list. Its time counts, so it
            should only put aside what is looked at later.
        limits: Where to end, and how fast to take batches.

    Returns:
        Counts and times.
    """
    limits = limits or RunLimits()
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, collate_fn=dataset.stack)
    waits: list[float] = []
    num_samples = num_first = 0
    memory = _LargestMemory(dataset)
    consumer_s = 0.0
    is_complete = True
    started_cpu_s = time.process_time()
    started_s = before_s = time.perf_counter()
    iterator = iter(loader)
    for batch in iterator:
        now_s = time.perf_counter()
        waits.append(now_s - before_s)
        count = len(batch["index"])
        num_samples += count
        num_first = num_first or count
        take(batch)
        memory.look(now_s)
        if limits.consumer_rate is not None:
            step_s = max(0.0, count / limits.consumer_rate - (time.perf_counter() - now_s))
            time.sleep(step_s)
            consumer_s += step_s
        before_s = time.perf_counter()
        if limits.are_reached(num_samples, before_s - started_s):
            is_complete = num_samples == len(dataset)
            break
    elapsed_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s - memory.cpu_s
    memory.look(None)
    reports = dataset.reports()
    del iterator  # ends the workers of a run that was cut short
    return EpochTimes(
        num_samples,
        num_first,
        waits[0] if waits else 0.0,
        elapsed_s,
        np.array(waits[1:], dtype=np.float64),
        is_complete,
        consumer_s,
        cpu_s,
        memory.largest,
        reports,
        num_workers == 0,
    )


class _LargestMemory:
    """Largest memory of this process and the ones that have reported, looked at less and less often.

    The system walks through all pages of a process for its share of common ones, which takes tens of
    milliseconds. So the first looks are soon, for short runs, and what they take is taken off.
    """

    def __init__(self, dataset: MeasuredDataset) -> None:
        self._dataset = dataset
        self._next_s = 0.0
        self._interval_s = _FIRST_INTERVAL_S
        self.largest = Footprint()
        self.cpu_s = 0.0

    def look(self, now_s: float | None) -> None:
        """Look if it is time to; None = in any case."""
        if now_s is not None and now_s < self._next_s:
            return
        began_s = time.thread_time()
        self._next_s = (now_s or 0.0) + self._interval_s
        self._interval_s *= 2
        found = total_footprint({os.getpid(), *(report.pid for report in self._dataset.reports())})
        self.largest = self.largest.largest(found)
        self.cpu_s += time.thread_time() - began_s
