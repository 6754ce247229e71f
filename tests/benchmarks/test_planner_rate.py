"""The planner must never be what a loader waits for.

Rates are taken over processor time, best of several runs, so that a busy machine does not fail them; the
limits are below what one slow core reaches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from lrstream.commands.benchmark_epoch import Rates, play, walk
from lrstream.commands.inspect_reservation import reservation_of
from lrstream.streaming.gop_table import GopTable, format_windows
from lrstream.streaming.partition import partition_report
from lrstream.streaming.pool import AnchorPlan, episodes_per_batch
from lrstream.streaming.strategies import SAMPLING_STRATEGIES, SamplingStrategy


def best_cpu_s(action: Callable[[], object], runs: int = 3) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("strategy", SAMPLING_STRATEGIES)
def test_planner_rate_for_a_pool_of_32_episodes_of_300_frames(
    strategy: SamplingStrategy,
) -> None:
    plan = AnchorPlan(np.full(1000, 300), pool_size=32, strategy=strategy, seed_key=(1,))
    rate = plan.num_anchors / best_cpu_s(lambda: sum(map(len, plan)))
    print(f"{strategy}: {rate / 1e6:.2f} million anchors/s")
    assert rate >= 1e6


@pytest.mark.parametrize("deltas", [(0,), (-2, -1, 0)])
def test_planner_rate_where_a_reservoir_is_planned(deltas: tuple[int, ...]) -> None:
    starts = np.arange(0, 300, 8, dtype=np.int32)
    plan = AnchorPlan(
        np.full(200, 300),
        pool_size=32,
        strategy="gop",
        seed_key=(1,),
        gops=GopTable(
            ("front", "wrist"),
            np.tile(starts, 200),
            np.arange(201) * len(starts),
            np.full((200, 2), 240 * 320 * 3 // 2),
        ),
        reservoir_bytes=2 << 30,
        picture_windows=format_windows({"front": deltas, "wrist": deltas}),
    )
    rate = plan.num_anchors / best_cpu_s(lambda: sum(map(len, plan)))
    print(f"gop, {len(deltas)} pictures: {rate / 1e6:.2f} million anchors/s")
    assert rate >= 4e5


def test_skipping_is_as_fast_as_planning() -> None:
    plan = AnchorPlan(np.full(1000, 300), pool_size=32, strategy="remaining", seed_key=(1,))
    rate = 299_000 / best_cpu_s(lambda: next(plan.skip(299_000).blocks))
    print(f"skip: {rate / 1e6:.2f} million anchors/s")
    assert rate >= 1e6


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 8), (8, 4), (64, 8)])
def test_100k_episodes_are_partitioned_in_well_under_a_second(world_size: int, num_workers: int) -> None:
    lengths = np.random.Generator(np.random.PCG64(1)).integers(50, 600, size=100_000)
    elapsed_s = best_cpu_s(lambda: partition_report(lengths, world_size, num_workers))
    report = partition_report(lengths, world_size, num_workers)
    print(f"{world_size} x {num_workers}: {elapsed_s:.3f} s, balance {report.worker_balance:.4f}")
    assert elapsed_s < 1.0
    assert report.worker_balance < 1.1


def test_an_epoch_of_300k_frames_is_simulated_in_a_few_seconds() -> None:
    """A million takes three to four times as long, linearly."""
    lengths, sizes = np.full(1000, 300), np.full(1000, 3_000_000)
    plan = AnchorPlan(
        lengths, pool_size=32, strategy="remaining", seed_key=(1,), sizes=sizes, budget_bytes=1 << 30
    )
    rates = Rates(100 * 2.0**20, 0.05, 2000.0, None, 16, 8)

    def simulate() -> None:
        steps = walk(plan, sizes, budget_bytes=1 << 30, prefetch_episodes=8)
        reservation_of(plan, budget_bytes=1 << 30, prefetch_episodes=8, decoded_queue_size=8)
        episodes_per_batch(plan, 64)
        play([steps], rates, batch_size=64, in_process=False)

    elapsed_s = best_cpu_s(simulate, runs=1)
    print(f"{elapsed_s:.2f} s of processor time")
    assert elapsed_s < 6.0
