"""Every frame once, limits kept, every position resumable, for any settings (LD-2, LD-5, LD-10)."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lrstream.streaming.keys import scale_to_range
from lrstream.streaming.partition import num_streams, rank_share
from lrstream.streaming.planning import PlanSettings, plan_stream, plan_streams
from lrstream.streaming.pool import AnchorPlan, PlanBlock, peak_resident_bytes
from lrstream.streaming.strategies import ANCHOR_STRATEGIES, SAMPLING_STRATEGIES

EPISODES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 50)), min_size=1, max_size=14)


def pairs_of(blocks: list[PlanBlock]) -> list[tuple[int, int]]:
    return [pair for b in blocks for pair in zip(b.episode.tolist(), b.frame.tolist(), strict=True)]


@st.composite
def plans(draw: st.DrawFn) -> AnchorPlan:
    episodes = draw(EPISODES)
    sizes = [size for _, size in episodes]
    budget = draw(st.none() | st.integers(max(1, *sizes, 1), 150))
    frames = None
    if draw(st.booleans()):
        frames = [
            np.array(sorted(draw(st.sets(st.integers(0, length - 1)))), dtype=np.int64)
            for length, _ in episodes
        ]
    return AnchorPlan(
        [length for length, _ in episodes],
        pool_size=draw(st.integers(1, 6)),
        strategy=draw(st.sampled_from(ANCHOR_STRATEGIES)),
        seed_key=(draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 3))),
        sizes=sizes,
        budget_bytes=budget,
        frames=frames,
    )


@given(plans())
def test_limits_hold_and_blocks_agree_with_themselves(plan: AnchorPlan) -> None:
    resident: set[int] = set()
    admitted: list[int] = []
    seen: set[tuple[int, int]] = set()
    last_place: dict[int, int] = {}
    done = 0
    retired_at: dict[int, int] = {}
    peak = 0
    for block in plan:
        assert len(block) > 0
        assert block.episode.dtype == block.frame.dtype == np.int32
        assert not resident & set(block.admitted)
        resident |= set(block.admitted)
        admitted += block.admitted
        assert len(resident) <= plan.pool_size
        held = sum(plan.size_of(episode) for episode in resident)
        peak = max(peak, held)
        assert plan.budget_bytes is None or held <= plan.budget_bytes
        for episode, frame in pairs_of([block]):
            assert episode in resident
            assert (episode, frame) not in seen
            seen.add((episode, frame))
            last_place[episode] = done
            done += 1
        for episode in block.retired:
            resident.remove(episode)
            retired_at[episode] = done - 1
    assert not resident
    assert retired_at == last_place  # nobody keeps a place in the pool after his last anchor
    assert admitted == plan.admission_order().tolist()
    assert len(seen) == plan.num_anchors
    assert peak_resident_bytes(plan) == peak


@settings(max_examples=50)
@given(plans())
def test_every_position_continues_with_the_rest(plan: AnchorPlan) -> None:
    whole = pairs_of(list(plan))
    for start in range(plan.num_anchors + 1):
        tail = plan.skip(start)
        assert pairs_of(list(tail.blocks)) == whole[start:]


@given(
    EPISODES,
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 2**32),
    st.integers(0, 5),
    st.sampled_from(SAMPLING_STRATEGIES),
    st.none() | st.integers(1, 5),
    st.booleans(),
)
def test_all_ranks_and_workers_together_give_each_frame_once(
    episodes: list[tuple[int, int]],
    world_size: int,
    num_workers: int,
    seed: int,
    epoch: int,
    strategy: str,
    pool_size: int | None,
    has_budget: bool,
) -> None:
    lengths = [length for length, _ in episodes]
    sizes = [size for _, size in episodes]
    world_size = min(world_size, len(lengths))
    chosen = PlanSettings(
        seed=seed,
        epoch=epoch,
        world_size=world_size,
        num_workers=num_workers,
        strategy=strategy,  # type: ignore[arg-type]
        episode_pool_size=pool_size,
        byte_budget_bytes=60 * max(1, num_workers) if has_budget else None,
    )
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(world_size):
        rank_peak = 0
        for worker in range(max(1, num_workers)):
            stream = plan_stream(lengths, chosen, rank=rank, worker=worker, sizes=sizes)
            rank_peak += peak_resident_bytes(stream.plan)
            seen.update((int(stream.positions[e]), f) for e, f in pairs_of(list(stream.plan)))
            assert stream.num_streams == num_streams(len(rank_share(lengths, rank, world_size)), num_workers)
        assert chosen.byte_budget_bytes is None or rank_peak <= chosen.byte_budget_bytes
    assert seen == Counter((e, f) for e, length in enumerate(lengths) for f in range(length))


@given(EPISODES, st.integers(1, 3), st.integers(0, 3))
def test_all_streams_at_once_are_the_single_ones(
    episodes: list[tuple[int, int]], world_size: int, num_workers: int
) -> None:
    lengths = [length for length, _ in episodes]
    chosen = PlanSettings(world_size=min(world_size, len(lengths)), num_workers=num_workers)
    count = 0
    for rank, worker, stream in plan_streams(lengths, chosen):
        single = plan_stream(lengths, chosen, rank=rank, worker=worker)
        assert stream.positions.tolist() == single.positions.tolist()
        assert pairs_of(list(stream.plan)) == pairs_of(list(single.plan))
        count += 1
    assert count == chosen.world_size * max(1, num_workers)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 2**64 - 1))
def test_scaling_is_the_high_half_of_the_product(raw: list[int], size: int) -> None:
    scaled = scale_to_range(np.array(raw, dtype=np.uint64), size)
    assert scaled.tolist() == [value * size >> 64 for value in raw]
