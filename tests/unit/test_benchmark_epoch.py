"""An epoch on paper against plain loops over single anchors and small steps of time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lrstream.commands.benchmark_epoch import Rates, StreamWalk, play, walk
from lrstream.commands.benchmark_events import Clock, Fetches, Link, Process, Signal
from lrstream.streaming.pool import AnchorPlan
from lrstream.streaming.strategies import ANCHOR_STRATEGIES, SamplingStrategy

UNLIMITED: dict[str, Any] = {
    "bytes_per_s": None,
    "latency_s": 0.0,
    "decode_per_s": None,
    "consumer_per_s": None,
    "fetches": 16,
    "decoded_queue_size": 8,
}


def arrivals(jobs: list[tuple[float, int]], bytes_per_s: float | None) -> list[float]:
    """When each transfer of (begin, bytes) has ended, by the link."""
    clock = Clock()
    link = Link(clock, bytes_per_s)
    ended = [0.0] * len(jobs)

    def transfer(number: int, begin_s: float, num_bytes: int) -> Process:
        yield begin_s
        yield link.transfer(num_bytes)
        ended[number] = clock.now_s

    for number, job in enumerate(jobs):
        clock.start(transfer(number, *job))
    clock.run()
    return ended


def arrivals_in_small_steps(jobs: list[tuple[float, int]], bytes_per_s: float) -> list[float]:
    step_s = 1e-3
    left = [float(num_bytes) for _, num_bytes in jobs]
    ended = [0.0] * len(jobs)
    now_s = 0.0
    while any(value > 0 for value in left):
        active = [i for i, (begin_s, _) in enumerate(jobs) if begin_s <= now_s and left[i] > 0]
        for i in active:
            left[i] -= step_s * bytes_per_s / len(active)
            if left[i] <= 0:
                ended[i] = now_s
        now_s += step_s
    return ended


@pytest.mark.parametrize("seed", range(5))
def test_transfers_share_the_bandwidth_evenly(seed: int) -> None:
    random = np.random.Generator(np.random.PCG64(seed))
    jobs = [
        (float(begin_s), int(num_bytes))
        for begin_s, num_bytes in zip(random.uniform(0, 2, 6), random.integers(1, 200, 6), strict=True)
    ]
    assert arrivals(jobs, 100.0) == pytest.approx(arrivals_in_small_steps(jobs, 100.0), abs=0.02)


def test_a_link_without_limit_takes_no_time() -> None:
    assert arrivals([(0.0, 10**12), (1.5, 1)], None) == [0.0, 1.5]


def test_fetches_begin_as_places_get_free() -> None:
    clock = Clock()
    fetches = Fetches(clock, Link(clock, 100.0), latency_s=1.0, limit=2)
    ended: list[float] = []

    def wait(arrived: Signal) -> Process:
        yield arrived
        ended.append(clock.now_s)

    for _ in range(4):
        clock.start(wait(fetches.begin(50)))
    clock.run()
    # Two at a time: a second of latency, then half a second alone or a whole one together.
    assert ended == [2.0, 2.0, 4.0, 4.0]


def naive_epoch_s(
    plan: AnchorPlan,
    sizes: np.ndarray,
    *,
    budget_bytes: int | None,
    prefetch: int,
    rates: Rates,
) -> float:
    """One fetch at a time, anchor by anchor; training takes no time."""
    assert rates.fetches == 1
    assert rates.bytes_per_s is not None
    assert rates.decode_per_s is not None
    order = plan.admission_order().tolist()
    now_s = network_free_s = 0.0
    arrival: dict[int, float] = {}
    admitted = 0
    for block in plan:
        admitted += len(block.admitted)
        while len(arrival) < min(len(order), admitted + prefetch):
            episode = order[len(arrival)]
            held = sum(int(sizes[other]) for other in arrival if arrival[other] != np.inf)
            if len(arrival) >= admitted and budget_bytes is not None and held + sizes[episode] > budget_bytes:
                break
            begin_s = max(now_s, network_free_s)
            network_free_s = begin_s + rates.latency_s + int(sizes[episode]) / rates.bytes_per_s
            arrival[episode] = network_free_s
        for episode in block.episode.tolist():
            now_s = max(now_s, arrival[episode]) + 1 / rates.decode_per_s
        for episode in block.retired:
            arrival[episode] = np.inf
    return now_s


@pytest.mark.parametrize("strategy", ANCHOR_STRATEGIES)
@pytest.mark.parametrize(
    ("pool", "prefetch", "budget_bytes"), [(4, 2, None), (1, 0, None), (3, 5, 900), (32, 8, 2000)]
)
def test_an_epoch_takes_as_long_as_in_a_plain_loop(
    strategy: SamplingStrategy, pool: int, prefetch: int, budget_bytes: int | None
) -> None:
    random = np.random.Generator(np.random.PCG64(5))
    lengths, sizes = random.integers(1, 40, 25), random.integers(10, 300, 25)
    plan = AnchorPlan(
        lengths, pool_size=pool, strategy=strategy, seed_key=(7,), sizes=sizes, budget_bytes=budget_bytes
    )
    rates = Rates(**{**UNLIMITED, "bytes_per_s": 500.0, "latency_s": 0.1, "decode_per_s": 60.0, "fetches": 1})
    steps = walk(plan, sizes, budget_bytes=budget_bytes, prefetch_episodes=prefetch)
    expected_s = naive_epoch_s(plan, sizes, budget_bytes=budget_bytes, prefetch=prefetch, rates=rates)
    timeline = play([steps], rates, batch_size=7, in_process=True)
    assert timeline.epoch_s == pytest.approx(expected_s)
    assert timeline.epoch_s == pytest.approx(timeline.first_batch_s + sum(timeline.waits_s))
    # What is not decoding is waiting for episodes.
    assert timeline.stall_s == pytest.approx(expected_s - int(lengths.sum()) / 60.0)


def test_a_walk_is_what_the_blocks_say() -> None:
    lengths, sizes = np.array([5, 3, 9, 2, 7, 4]), np.array([10, 20, 30, 40, 50, 60])
    plan = AnchorPlan(lengths, pool_size=2, strategy="remaining", seed_key=(1,), sizes=sizes)
    steps = walk(plan, sizes, budget_bytes=None, prefetch_episodes=1)
    order = plan.admission_order().tolist()
    anchors = [episode for block in plan for episode in block.episode.tolist()]
    assert steps.num_anchors == len(anchors) == 30
    assert steps.needed_at.tolist() == [anchors.index(episode) for episode in order]
    assert steps.num_bytes.tolist() == [int(sizes[episode]) for episode in order]
    begun: list[int] = []
    admitted = done = 0
    for block in plan:
        admitted += len(block.admitted)
        begun += [done] * (min(len(order), admitted + 1) - len(begun))
        done += len(block)
    assert steps.begun_at.tolist() == begun


def steps_of(num_anchors: int) -> StreamWalk:
    """One episode that takes no bytes."""
    zero = np.zeros(1, dtype=np.int64)
    return StreamWalk(num_anchors, zero, zero, zero)


def test_workers_decode_side_by_side() -> None:
    rates = Rates(**{**UNLIMITED, "decode_per_s": 100.0})
    timeline = play([steps_of(40), steps_of(40)], rates, batch_size=10, in_process=False)
    # 50 samples/s each; both deliver at the same time, one waits for its turn.
    assert timeline.first_batch_s == pytest.approx(0.2)
    assert timeline.epoch_s == pytest.approx(0.8)
    assert len(timeline.waits_s) == 7


@pytest.mark.parametrize("in_process", [False, True])
def test_a_slow_consumer_never_waits(in_process: bool) -> None:
    rates = Rates(**{**UNLIMITED, "consumer_per_s": 20.0})
    timeline = play([steps_of(45)], rates, batch_size=10, in_process=in_process)
    assert timeline.epoch_s == pytest.approx(45 / 20.0)
    assert timeline.waits_s == [0.0] * 4
    assert timeline.stalls == 0


def test_without_workers_only_the_queue_is_decoded_ahead() -> None:
    rates = Rates(**{**UNLIMITED, "decode_per_s": 10.0, "consumer_per_s": 1.0, "decoded_queue_size": 4})
    timeline = play([steps_of(30)], rates, batch_size=10, in_process=True)
    # Of each later batch 4 samples were decoded while training was busy, 6 are waited for.
    assert timeline.waits_s == pytest.approx([0.6, 0.6])
    assert timeline.epoch_s == pytest.approx(1.0 + 10 + 0.6 + 10 + 0.6 + 10)


def test_workers_do_not_run_away_from_training() -> None:
    """Two batches ahead, as a DataLoader asks for them: a stall behind them is seen."""
    walks = [StreamWalk(60, np.array([0, 30]), np.array([0, 40]), np.array([0, 100]))]
    rates = Rates(**{**UNLIMITED, "latency_s": 5.0, "consumer_per_s": 10.0})
    timeline = play(walks, rates, batch_size=10, in_process=False)
    # Episode 0 takes until 5 s. Anchor 30 is reached when batch 1 is taken, a second later.
    assert timeline.first_batch_s == pytest.approx(5.0)
    assert timeline.stalls == 2
    # The second one arrives at 6 + 5 s, anchor 40 was reached at 7 s, training wants it at 9 s.
    assert timeline.waits_s == pytest.approx([0, 0, 0, 2, 0])
    assert timeline.stall_s == pytest.approx(5.0 + 4.0)
