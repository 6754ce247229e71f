"""One worker's epoch of a mixture: the members' pipelines, driven by one sequence of draws.

The sequence is known in advance, so decoding ahead follows it: each member has as many samples under way
as it has among the next draws, and the samples in memory are as many as those of a single dataset. Decode
threads are shared. Everything else, from fetching to order, is the members' own pipelines' business.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from lrstream.errors import LrstreamError
from lrstream.streaming.batches import BatchMemory, Sample
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.mixture_features import KEY_OF_MEMBER
from lrstream.streaming.pipeline import EpochPipeline
from lrstream.streaming.threads import JobThreads

__all__ = ["MemberStream", "MixturePipeline"]

_CLOSE_TIMEOUT_S = 10.0


class MemberStream:
    """Samples of one member's share, pass after pass.

    Args:
        start: Starts a pass from some anchor on: ``start(number, skip)``; never asked for an empty rest.
        length: Anchors of a pass, at least 1.
        position: Anchors delivered before, over all passes.
        first_pass: Number of the pass that `position` counts from.
    """

    def __init__(
        self,
        start: Callable[[int, int], EpochPipeline | None],
        length: int,
        position: int,
        *,
        first_pass: int = 0,
    ) -> None:
        self._start = start
        self._length = length
        self._position = position
        self._first_pass = first_pass
        self._pipeline: EpochPipeline | None = None

    def prepare(self, num_ahead: int) -> None:
        """Have so many samples under way, or only begin to fetch; waits for nothing."""
        if self._pipeline is None:
            number, skip = divmod(self._position, self._length)
            self._pipeline = self._start(self._first_pass + number, skip)
        if self._pipeline is not None:
            self._pipeline.prepare(num_ahead)

    def take(self) -> Sample:
        """The next sample."""
        pipeline = self._pipeline
        sample = None if pipeline is None else next(pipeline, None)
        if pipeline is None or sample is None:
            raise LrstreamError("A member of a mixture has ended before its own count of anchors.")
        self._position += 1
        if self._position % self._length == 0:
            # Ends its threads and gives back its memory before the next pass begins.
            self._pipeline = None
            if next(pipeline, None) is not None:
                raise LrstreamError("A member of a mixture has more anchors than its own count.")
        return sample

    def close(self) -> None:
        """End the pass that is under way."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()


class MixturePipeline:
    """The rest of one epoch of one worker, as an iterator of samples.

    Belongs to one process, and to one thread at a time. Ends its threads when it is exhausted, fails, is
    closed, or is garbage collected.

    Args:
        draws: Members of the samples to come, of which the first `num_samples` are taken.
        num_samples: Samples to come.
        streams: Of each member; None where this worker has nothing of it, and `draws` never names it.
        threads: Decode threads of the streams; closed with this.
        num_ahead: Samples under way at most, of all members together.
        metrics: Where samples and waits are counted.
        memory: What stacks the samples later.
    """

    def __init__(
        self,
        draws: Iterator[int],
        num_samples: int,
        streams: Sequence[MemberStream | None],
        threads: JobThreads,
        *,
        num_ahead: int,
        metrics: LoaderMetrics,
        memory: BatchMemory | None = None,
    ) -> None:
        self._memory = memory
        self._draws = draws
        self._num_undrawn = num_samples
        self._streams = streams
        self._num_ahead = num_ahead
        self._metrics = metrics
        self._coming: deque[int] = deque()
        self._counts = [0] * len(streams)  # of each member in `_coming`
        self._is_begun = False
        self.is_complete = False
        """Whether all samples have been delivered."""
        self._end = weakref.finalize(
            self, _end, os.getpid(), [stream for stream in streams if stream is not None], threads
        )

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if not self._end.alive:
            raise StopIteration
        started = time.perf_counter()
        try:
            self._look_ahead()
            if not self._coming:
                self.is_complete = True
                raise StopIteration
            member = self._coming.popleft()
            self._counts[member] -= 1
            sample = self._stream(member).take()
        except BaseException:
            self.close()
            raise
        sample[KEY_OF_MEMBER] = torch.from_numpy(np.array(member, dtype=np.int64))
        sample.memory = self._memory
        self._metrics.add_sample(time.perf_counter() - started)
        return sample

    def close(self) -> None:
        """End all threads and drop what is in memory; more calls do nothing."""
        self._end()

    def _look_ahead(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            for stream in self._streams:
                if stream is not None:
                    stream.prepare(0)
        while self._num_undrawn and len(self._coming) < self._num_ahead:
            member = next(self._draws)
            self._coming.append(member)
            self._counts[member] += 1
            self._num_undrawn -= 1
        for member, count in enumerate(self._counts):
            if count:
                self._stream(member).prepare(count)

    def _stream(self, member: int) -> MemberStream:
        stream = self._streams[member]
        if stream is None:
            raise LrstreamError(f"Member {member} of a mixture was drawn where it has no anchors.")
        return stream


def _end(pid: int, streams: Sequence[MemberStream], threads: JobThreads) -> None:
    """End the members' pipelines, then the threads that they share."""
    if os.getpid() != pid:
        return  # a forked child has neither the threads nor the right to wait for their locks (K16)
    for stream in streams:
        stream.close()
    threads.close(_CLOSE_TIMEOUT_S)
