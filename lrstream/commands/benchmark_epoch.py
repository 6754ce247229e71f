"""One rank's epoch on paper: its plan walked through once, then played against a clock.

What is admitted and fetched when follows from the plan and the frontier, by the rules of the loader
(`Frontier`); only *how long* everything takes is modelled here. Anchors are not played one by one: between
two moments at which something can happen (a block begins, an episode is needed for the first time, a batch
ends) they are decoded at an even rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.benchmark_events import Clock, Fetches, Link, Process, Signal
from lrstream.commands.inspect_reservation import Frontier
from lrstream.streaming.pool import AnchorPlan

__all__ = ["EpochTimeline", "Rates", "StreamWalk", "play", "walk"]

# Batches that a DataLoader asks of each worker ahead (its own default).
_PREFETCH_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast everything is; None = without limit.

    Attributes:
        bytes_per_s: Bandwidth that the workers of the rank share.
        latency_s: From a request to its first byte.
        decode_per_s: Samples per second that the workers of the rank decode together.
        consumer_per_s: Samples per second that training takes.
        fetches: Episodes that each worker fetches at once.
        decoded_queue_size: Samples that each worker keeps ahead.
    """

    bytes_per_s: float | None
    latency_s: float
    decode_per_s: float | None
    consumer_per_s: float | None
    fetches: int
    decoded_queue_size: int


@dataclass(frozen=True, slots=True, eq=False)
class StreamWalk:
    """What one worker does, by the number of the anchor at which it does it.

    Attributes:
        num_anchors: Anchors of the epoch.
        begun_at: Anchor at which the fetch of each episode begins, int64, in the order of admission.
        needed_at: First anchor of each episode, or the one before which its first unit is decoded, int64,
            in that order.
        num_bytes: Bytes to fetch of each, int64, in that order.
    """

    num_anchors: int
    begun_at: NDArray[np.int64]
    needed_at: NDArray[np.int64]
    num_bytes: NDArray[np.int64]


@dataclass(slots=True)
class EpochTimeline:
    """How an epoch went.

    Attributes:
        first_batch_s: When the first batch was there.
        epoch_s: When the last one had been used.
        waits_s: Wait for each batch after the first, seconds.
        stalls: Times that a worker had to wait for an episode.
        stall_s: Their duration, over all workers.
    """

    first_batch_s: float = 0.0
    epoch_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    stalls: int = 0
    stall_s: float = 0.0


def walk(
    plan: AnchorPlan, num_bytes: NDArray[np.int64], *, budget_bytes: int | None, prefetch_episodes: int
) -> StreamWalk:
    """Walk through the plan of one worker.

    Args:
        plan: Its plan, with sizes.
        num_bytes: Bytes to fetch of each episode of the plan, int64.
        budget_bytes: Its budget.
        prefetch_episodes: Episodes fetched ahead of the pool.
    """
    order = plan.admission_order()
    frontier = Frontier(plan, order.tolist(), budget_bytes, prefetch_episodes)
    begun_at = np.zeros(len(order), dtype=np.int64)
    needed_at = np.full(int(order.max()) + 1 if len(order) else 0, -1, dtype=np.int64)
    done = num_begun = 0
    for block in plan:
        frontier.admit(len(block.admitted))
        begun_at[num_begun : frontier.num_begun] = done
        num_begun = frontier.num_begun
        for entry in block.entries:
            if needed_at[entry.episode] < 0:
                needed_at[entry.episode] = done + entry.at
        episodes, firsts = np.unique(block.episode, return_index=True)
        is_new = needed_at[episodes] < 0
        needed_at[episodes[is_new]] = done + firsts[is_new]
        for episode in block.retired:
            frontier.reserved_bytes -= plan.size_of(episode)
        done += len(block)
    return StreamWalk(done, begun_at, needed_at[order], num_bytes[order])


def play(walks: Sequence[StreamWalk], rates: Rates, *, batch_size: int, in_process: bool) -> EpochTimeline:
    """Play the epoch of one rank.

    Args:
        walks: Of its workers that own episodes.
        rates: How fast everything is.
        batch_size: Samples of a batch.
        in_process: Whether training reads by itself, without workers.
    """
    clock = Clock()
    link = Link(clock, rates.bytes_per_s)
    timeline = EpochTimeline()
    workers = [_Worker(clock, link, one, rates, len(walks), batch_size, timeline) for one in walks]
    for worker in workers:
        clock.start(worker.run(None if in_process else _PREFETCH_FACTOR))
    clock.start(_train(clock, workers, rates, timeline, in_process=in_process))
    clock.run()
    return timeline


class _Worker:
    """A worker, from its first anchor to its last batch."""

    def __init__(
        self,
        clock: Clock,
        link: Link,
        steps: StreamWalk,
        rates: Rates,
        num_workers: int,
        batch_size: int,
        timeline: EpochTimeline,
    ) -> None:
        self._clock, self._steps, self._timeline = clock, steps, timeline
        self._fetches = Fetches(clock, link, latency_s=rates.latency_s, limit=rates.fetches)
        self._anchor_s = 0.0 if rates.decode_per_s is None else num_workers / rates.decode_per_s
        self._queue_s = rates.decoded_queue_size * self._anchor_s
        self._arrivals: list[Signal] = []  # of episodes in the order of admission
        self._need_order = np.argsort(steps.needed_at, kind="stable").tolist()
        self._num_needed = 0
        ends = range(batch_size, steps.num_anchors + batch_size, batch_size)
        self.ends = [min(end, steps.num_anchors) for end in ends]
        self.ready = [Signal() for _ in self.ends]
        self.asked = [Signal() for _ in self.ends]

    def run(self, ahead: int | None) -> Process:
        """Make batch after batch.

        Args:
            ahead: Batches that it may begin before they are asked for; None = it waits to be asked.
        """
        at = 0
        credit_s = 0.0
        for number, end in enumerate(self.ends):
            idle_since_s = self._clock.now_s
            if ahead is None:
                yield self.asked[number]
            elif number >= ahead:
                yield self.asked[number - ahead + 1]
            if number:
                # Decode threads have gone on until the queue was full.
                credit_s = min(self._queue_s, self._clock.now_s - idle_since_s)
            while at < end:
                self._begin_fetches(at)
                yield from self._wait_for_episodes(at)
                stop = min(end, self._next_event(at))
                work_s = (stop - at) * self._anchor_s
                at = stop
                if work_s > credit_s:
                    yield self._clock.now_s + work_s - credit_s
                credit_s = max(0.0, credit_s - work_s)
            self._clock.set(self.ready[number])

    def _begin_fetches(self, at: int) -> None:
        steps = self._steps
        while len(self._arrivals) < len(steps.begun_at) and steps.begun_at[len(self._arrivals)] <= at:
            self._arrivals.append(self._fetches.begin(int(steps.num_bytes[len(self._arrivals)])))

    def _wait_for_episodes(self, at: int) -> Process:
        while self._num_needed < len(self._need_order):
            episode = self._need_order[self._num_needed]
            if self._steps.needed_at[episode] > at:
                return
            since_s = self._clock.now_s
            yield self._arrivals[episode]
            if self._clock.now_s > since_s:
                self._timeline.stalls += 1
                self._timeline.stall_s += self._clock.now_s - since_s
            self._num_needed += 1

    def _next_event(self, at: int) -> int:
        """The next anchor at which a fetch begins or an episode is needed for the first time."""
        following = self._steps.num_anchors
        if len(self._arrivals) < len(self._steps.begun_at):
            following = min(following, int(self._steps.begun_at[len(self._arrivals)]))
        if self._num_needed < len(self._need_order):
            following = min(following, int(self._steps.needed_at[self._need_order[self._num_needed]]))
        return max(following, at + 1)


def _train(
    clock: Clock,
    workers: Sequence[_Worker],
    rates: Rates,
    timeline: EpochTimeline,
    *,
    in_process: bool,
) -> Process:
    """Take the batches of all workers in turn, as a DataLoader gives them, and use each."""
    sample_s = 0.0 if rates.consumer_per_s is None else 1.0 / rates.consumer_per_s
    is_first = True
    for number in range(max((len(worker.ends) for worker in workers), default=0)):
        for worker in workers:
            if number >= len(worker.ends):
                continue
            since_s = clock.now_s
            if in_process:
                clock.set(worker.asked[number])
            yield worker.ready[number]
            if is_first:
                timeline.first_batch_s = clock.now_s
            else:
                timeline.waits_s.append(clock.now_s - since_s)
            is_first = False
            # With workers, taking a batch is what asks for a later one.
            if not in_process and number + 1 < len(worker.asked):
                clock.set(worker.asked[number + 1])
            start = worker.ends[number - 1] if number else 0
            yield clock.now_s + sample_s * (worker.ends[number] - start)
    timeline.epoch_s = clock.now_s
