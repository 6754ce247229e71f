"""A plan carried out by threads at any pace keeps within its budget and comes to its end (LD-5)."""

from __future__ import annotations

import queue
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from lrstream.streaming.budget import EpisodeByteCache, Lease
from lrstream.streaming.pool import AnchorPlan
from lrstream.streaming.strategies import ANCHOR_STRATEGIES

PACES_S = (0.0, 0.0, 0.0001, 0.001)


class Run:
    """One epoch: a thread that admits, one that prefetches, several that fetch and decode."""

    def __init__(self, plan: AnchorPlan, budget: int, paces: list[float], num_decoders: int) -> None:
        self.plan = plan
        self.cache: EpisodeByteCache[int, int] = EpisodeByteCache(budget)
        self.budget = budget
        self.paces = paces
        self.decoded: list[tuple[int, int]] = []
        self.faults: list[str] = []
        self.is_filled = {e: threading.Event() for e in plan.admission_order().tolist()}
        self.work: queue.Queue[tuple[Lease[int], int, int] | None] = queue.Queue(maxsize=4)
        self.lock = threading.Lock()
        self.frontier = 0  # next episode that prefetch may take, in order of admission
        self.threads = [threading.Thread(target=self.admit, daemon=True)]
        self.threads += [threading.Thread(target=self.prefetch, daemon=True)]
        self.threads += [
            threading.Thread(target=self.decode, args=(n,), daemon=True) for n in range(num_decoders)
        ]
        self.num_decoders = num_decoders
        self.is_over = threading.Event()

    def pause(self, step: int) -> None:
        time.sleep(self.paces[step % len(self.paces)])
        if self.cache.reserved_bytes > self.budget:
            self.faults.append(f"{self.cache.reserved_bytes} bytes reserved")
        if self.cache.resident_bytes > self.budget:
            self.faults.append(f"{self.cache.resident_bytes} bytes resident")

    def fetch(self, episode: int) -> None:
        self.cache.fill(episode, episode * 1000)
        self.is_filled[episode].set()

    def prefetch(self) -> None:
        order = self.plan.admission_order().tolist()
        step = 0
        while not self.is_over.is_set():
            self.pause(step := step + 1)
            with self.lock:  # one frontier: prefetch and admission reserve in one order
                if self.frontier < len(order):
                    episode = order[self.frontier]
                    if self.cache.try_reserve(episode, self.plan.size_of(episode)):
                        self.frontier += 1
                        self.fetch(episode)
            time.sleep(0.0002)

    def admit(self) -> None:
        step = 0
        for block in self.plan:
            for episode in block.admitted:
                # Waiting with the lock held keeps prefetch from overtaking; decoders do not need it.
                with self.lock:
                    if not self.is_filled[episode].is_set():
                        self.frontier += 1
                        assert self.cache.reserve(episode, self.plan.size_of(episode))
                        self.fetch(episode)
            for episode, frame in zip(block.episode.tolist(), block.frame.tolist(), strict=True):
                self.pause(step := step + 1)
                self.work.put((self.cache.lease(episode), episode, frame))
            for episode in block.retired:
                self.cache.retire(episode)
        for _ in range(self.num_decoders):
            self.work.put(None)

    def decode(self, number: int) -> None:
        step = number
        while (item := self.work.get()) is not None:
            lease, episode, frame = item
            with lease as payload:
                self.pause(step := step + 3)
                if payload != episode * 1000:
                    self.faults.append(f"payload of another episode: {payload}")
                self.decoded.append((episode, frame))

    def finish(self) -> None:
        for thread in self.threads:
            thread.start()
        deadline = time.monotonic() + 20
        for thread in (self.threads[0], *self.threads[2:]):
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "the epoch has come to a halt"
        self.is_over.set()
        self.threads[1].join(5)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 60)), min_size=1, max_size=10),
    st.integers(60, 150),
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.sampled_from(PACES_S), min_size=3, max_size=7),
    st.sampled_from(ANCHOR_STRATEGIES),
)
def test_any_timing_ends_within_the_budget(
    episodes: list[tuple[int, int]],
    budget: int,
    pool_size: int,
    num_decoders: int,
    paces: list[float],
    strategy: str,
) -> None:
    plan = AnchorPlan(
        [length for length, _ in episodes],
        pool_size=pool_size,
        strategy=strategy,  # type: ignore[arg-type]
        seed_key=(1,),
        sizes=[size for _, size in episodes],
        budget_bytes=budget,
    )
    run = Run(plan, budget, paces, num_decoders)
    run.finish()
    assert run.faults == []
    assert sorted(run.decoded) == [(e, f) for e, (length, _) in enumerate(episodes) for f in range(length)]
    assert run.cache.peak_reserved_bytes <= budget
    assert (run.cache.reserved_bytes, run.cache.resident_bytes, len(run.cache)) == (0, 0, 0)
