"""From a plan to samples: admission, fetching, decoding and delivery in planned order.

```
plan ─► frontier ─► fetch threads ─► byte cache ─► decode threads ─► reorder ─► consumer
        (admit, prefetch)            (leases)      (decoded_queue_size ahead)
```
The consumer drives. Each time it asks for a sample, it first moves the frontier and hands out anchors
until `decoded_queue_size` of them are under way, then waits for the one whose turn it is. There is no
thread that plans, hence nothing to synchronize but two queues, and an epoch is abandoned simply by
asking no more. Decode threads finish in any order; samples leave in that of the plan.

An error of any stage is raised at the sample it belongs to, after all samples before it (K19): a failed
fetch at the episode's first anchor, a failed decode at its own.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import LrstreamError
from lrstream.streaming.batches import Placer, Sample
from lrstream.streaming.budget import EpisodeByteCache, Lease
from lrstream.streaming.decode import DecoderPool
from lrstream.streaming.decoding import DecodeStage, Outcome, QueuedAnchor
from lrstream.streaming.episode import EpisodeRecord
from lrstream.streaming.fetch import EpisodeLoader, FetchFrontier
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.pool import AnchorPlan, PlanBlock
from lrstream.streaming.reservoir import HeldAnchor, PictureReservoir
from lrstream.streaming.samples import SampleBuilder
from lrstream.streaming.strategies import UnitEntry
from lrstream.streaming.threads import JobThreads

__all__ = ["EpochPipeline", "PipelineOptions"]

# How long an abandoned epoch waits for reads that are under way; they cannot be interrupted.
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Limits of one worker's pipeline.

    Attributes:
        prefetch_episodes: Episodes fetched ahead of the pool.
        max_in_flight: Episodes fetched at once.
        decode_threads: Threads that assemble and decode samples.
        decoded_queue_size: Samples decoded or being decoded ahead of the consumer.
        transform_in_threads: Whether image transforms run on the decode threads rather than in the
            consumer's (LD-9).
    """

    prefetch_episodes: int
    max_in_flight: int
    decode_threads: int
    decoded_queue_size: int
    transform_in_threads: bool


class _Anchor(NamedTuple):
    """An anchor to be scheduled, and the episodes whose bytes are not needed for more than up to here.

    A block without anchors has one of frame -1, which is nothing but its end.
    """

    episode: int
    frame: int
    retired: tuple[int, ...]


class EpochPipeline:
    """The rest of one epoch of one worker, as an iterator of samples.

    Belongs to one process, and to one thread at a time. Ends its threads when it is exhausted, fails, is
    closed, or is garbage collected; at interpreter exit at the latest.

    Args:
        plan: What to deliver, in which order.
        positions: Position in the episode table of each episode of the plan, int64.
        sizes: Exact bytes of each episode of the plan, int64.
        budget_bytes: Byte budget of this worker; None for no limit.
        loader: Loads episodes.
        builder: Makes samples.
        decoders: Open decoders, shared with other pipelines of the process.
        options: Limits.
        metrics: Where times and counts go.
        skip_anchors: Anchors of the plan that were delivered before.
        placer: Says in which row of a batch each sample is to be made; None = nowhere in particular.
        threads: Decode threads that several pipelines use; None = its own, as many as `options` say.
    """

    def __init__(
        self,
        plan: AnchorPlan,
        positions: NDArray[np.int64],
        sizes: NDArray[np.int64],
        *,
        budget_bytes: int | None,
        loader: EpisodeLoader,
        builder: SampleBuilder,
        decoders: DecoderPool,
        options: PipelineOptions,
        metrics: LoaderMetrics,
        skip_anchors: int = 0,
        placer: Placer | None = None,
        threads: JobThreads | None = None,
    ) -> None:
        self._builder = builder
        self._placer = placer
        self._options = options
        self._metrics = metrics
        self._cache: EpisodeByteCache[int, EpisodeRecord] = EpisodeByteCache(budget_bytes)
        tail = plan.skip(skip_anchors)
        self._frontier = FetchFrontier(
            loader,
            self._cache,
            positions,
            [*tail.resident, *tail.upcoming.tolist()],
            sizes,
            prefetch_episodes=options.prefetch_episodes,
            max_in_flight=options.max_in_flight,
        )
        self._reservoir: PictureReservoir | None = None
        if plan.strategy == "gop":
            self._reservoir = PictureReservoir(plan, tail.left, decoders, metrics)
        self._decoding = DecodeStage(
            builder,
            decoders,
            metrics,
            num_threads=options.decode_threads,
            threads=threads,
            reservoir=self._reservoir,
            is_transforming=options.transform_in_threads,
            memory=None if placer is None else placer.memory,
        )
        # Half of the queue is being decoded and half of it waits, however it is cut into jobs.
        # Without pictures nothing waits.
        num_parts = 2 * max(1, options.decode_threads) if builder.has_pictures else 1
        self._job_size = max(1, options.decoded_queue_size // num_parts)
        self._blocks = tail.blocks
        self._admitting: list[int] = []  # of the current block, still waiting for room; reversed
        self._block: Iterator[_Anchor] = iter(())
        self._entries: deque[UnitEntry] = deque()  # of the current block, still to be decoded
        self._place = -1  # of the next anchor in the current block
        self._next_anchor: _Anchor | None = None
        self._arrived: set[int] = set()  # of the pool, in memory
        self._is_planned_out = False
        self.is_complete = False
        """Whether all that the plan holds has been delivered."""
        self._num_ahead = options.decoded_queue_size
        self._num_scheduled = 0
        self._num_delivered = 0
        self._early: dict[int, Outcome] = {}  # finished before their turn
        self._end = weakref.finalize(self, _end, os.getpid(), self._frontier, self._decoding, self._cache)

    @property
    def cache(self) -> EpisodeByteCache[int, EpisodeRecord]:
        """Reservations and payloads."""
        return self._cache

    @property
    def reservoir(self) -> PictureReservoir | None:
        """Decoded pictures; only with strategy `gop`."""
        return self._reservoir

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if not self._end.alive:
            raise StopIteration
        started = time.perf_counter()
        try:
            self._schedule()
            if self._num_delivered == self._num_scheduled:
                self.is_complete = True
                self.close()
                raise StopIteration
            outcome = self._wait_for(self._num_delivered)
            if outcome.error is not None:
                raise outcome.error
            if outcome.sample is None:
                raise LrstreamError("A decode thread gave neither a sample nor an error.")
            self._num_delivered += 1
            self._metrics.add_sample(time.perf_counter() - started)
            if self._options.transform_in_threads or self._builder.image_transforms is None:
                return outcome.sample
            with self._metrics.timed("transform"):
                return self._builder.transform(outcome.sample)
        except BaseException:
            # Also Ctrl-C: whoever stops here wants no threads to go on.
            self.close()
            raise

    def close(self) -> None:
        """End all threads and drop what is in memory; more calls do nothing."""
        if self._end.alive:
            self._metrics.add_peak(self._cache.peak_reserved_bytes)
            if self._reservoir is not None:
                self._metrics.add_reservoir_peak(self._reservoir.peak_held_bytes)
        self._early.clear()
        self._end()

    def prepare(self, num_ahead: int) -> None:
        """Have so many samples under way from now on, as far as that is possible without waiting.

        For a consumer that takes samples from several pipelines, and knows when it needs which: in place
        of `PipelineOptions.decoded_queue_size`. With 0 episodes begin to be fetched, and no more.
        """
        if not self._end.alive:
            return
        self._num_ahead = max(1, num_ahead)
        if num_ahead:
            self._schedule(may_wait=False)
        elif self._peek() is not None:
            self._admit_block(is_idle=False)

    def _wait_for(self, number: int) -> Outcome:
        while (outcome := self._early.pop(number, None)) is None:
            for finished in self._decoding.outcomes.get():
                self._early[finished.number] = finished
        return outcome

    # -- scheduling -------------------------------------------------------------------------------

    def _schedule(self, *, may_wait: bool = True) -> None:
        """Hand out anchors up to the queue's size, or until one of them has to wait; a few at a time."""
        num_under_way = self._num_scheduled - self._num_delivered
        if may_wait and 0 < num_under_way > self._num_ahead - self._job_size:
            return
        job: list[QueuedAnchor] = []
        while num_under_way < self._num_ahead:
            anchor = self._next_ready(may_wait and num_under_way == 0)
            if anchor is None:
                break
            job.append(anchor)
            num_under_way += 1
            if len(job) == self._job_size:
                self._decoding.submit(job)
                job = []
        if job:
            self._decoding.submit(job)

    def _next_ready(self, is_idle: bool) -> QueuedAnchor | None:
        """The next anchor, with a lease of its episode or pictures; None at the end, or where it has to wait.

        Args:
            is_idle: Whether nothing is under way, so that there is nothing better to do than to wait here.
        """
        while True:
            if not self._admit_block(is_idle):
                return None
            anchor = self._peek()
            if anchor is None:
                if self._is_planned_out:
                    return None
                continue
            if not self._is_available(anchor, is_idle):
                return None
            self._next_anchor = None
            lease: Lease[EpisodeRecord] | HeldAnchor | None = None
            if anchor.frame >= 0:
                lease = (
                    self._cache.lease(anchor.episode)
                    if self._reservoir is None
                    else self._reservoir.anchor(anchor.episode, anchor.frame)
                )
            for episode in anchor.retired:
                self._frontier.retire(episode)
                self._arrived.discard(episode)
            if lease is not None:
                break
        place = None
        if self._placer is not None:
            place = self._placer.next(partial(self._builder.tensors_like, lease.payload))
        number, self._num_scheduled = self._num_scheduled, self._num_scheduled + 1
        return QueuedAnchor(number, lease, anchor.episode, anchor.frame, place)

    def _is_available(self, anchor: _Anchor, is_idle: bool) -> bool:
        """Whether what an anchor needs is in memory, or being decoded; False if that has to wait."""
        if self._reservoir is not None:
            return self._enter_units(self._reservoir, is_idle)
        return self._has_arrived(anchor.episode, is_idle)

    def _has_arrived(self, episode: int, is_idle: bool) -> bool:
        """Whether an episode is in the cache; waits for it, and raises its error, only if `is_idle`."""
        if episode in self._arrived:
            return True
        arrival = self._frontier.arrival(episode)
        if not arrival.done():
            if not is_idle:
                return False  # what is decoded already goes first
            started = time.perf_counter()
            try:
                arrival.result()
            finally:
                self._metrics.add_refill_stall(time.perf_counter() - started)
        if arrival.exception() is not None and not is_idle:
            return False  # raised when its turn comes
        arrival.result()
        self._arrived.add(episode)
        return True

    def _enter_units(self, reservoir: PictureReservoir, is_idle: bool) -> bool:
        """Decode the units that the next anchor comes after, and some ahead; False if they have to wait."""
        while self._entries:
            entry = self._entries[0]
            is_due = entry.at <= self._place
            if not is_due and reservoir.num_pending >= max(1, self._options.decode_threads - 1):
                return True
            if not self._has_arrived(entry.episode, is_idle and is_due):
                return not is_due
            lease = self._cache.lease(entry.episode)
            if not reservoir.enter(entry, lease, self._decoding.run):
                lease.release()
                if is_due and is_idle:
                    # Nothing is on its way, so what the reservoir holds is what was planned.
                    raise LrstreamError("A unit waits for room in the reservoir that nobody gives back.")
                return not is_due
            self._entries.popleft()
        return True

    def _peek(self) -> _Anchor | None:
        """The next anchor of the current block; None where the next block has to be begun."""
        if self._next_anchor is None:
            self._next_anchor = next(self._block, None)
            self._place += 1
            if self._next_anchor is None:
                block = next(self._blocks, None)
                if block is None:
                    self._is_planned_out = True
                else:
                    self._admitting = list(reversed(block.admitted))
                    self._block = _anchors(block)
                    self._entries = deque(block.entries)
                    self._place = -1
        return self._next_anchor

    def _admit_block(self, is_idle: bool) -> bool:
        """Admit what the current block begins with; False where that has to wait for a decode to end."""
        while self._admitting:
            if not self._frontier.admit(self._admitting[-1]):
                if is_idle:
                    if self._reservoir is not None and self._reservoir.wait_for_unit():
                        continue
                    # Nothing is being decoded, so all that is retired has been freed.
                    raise LrstreamError("An admission waits for bytes that nobody gives back.")
                return False
            self._admitting.pop()
        self._frontier.top_up()
        return True


def _anchors(block: PlanBlock) -> Iterator[_Anchor]:
    episodes, frames = block.episode.tolist(), block.frame.tolist()
    last = len(episodes) - 1
    if not episodes:
        yield _Anchor(-1, -1, block.retired)
    for number, (episode, frame) in enumerate(zip(episodes, frames, strict=True)):
        yield _Anchor(episode, frame, block.retired if number == last else ())


def _end(
    pid: int,
    frontier: FetchFrontier,
    decoding: DecodeStage,
    cache: EpisodeByteCache[int, EpisodeRecord],
) -> None:
    """End a pipeline's threads. Takes no reference to the pipeline, so that it can be collected."""
    if os.getpid() != pid:
        return  # a forked child has neither the threads nor the right to wait for their locks (K16)
    cache.close()
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    has_ended = decoding.close(_CLOSE_TIMEOUT_S)
    has_ended = frontier.close(max(0.0, deadline - time.monotonic())) and has_ended
    if not has_ended:
        warnings.warn(
            f"Reads that were under way when an epoch was abandoned did not end within {_CLOSE_TIMEOUT_S} s; "
            "their threads end when the storage answers.",
            RuntimeWarning,
            stacklevel=2,
        )
