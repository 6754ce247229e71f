"""Any selection is covered exactly once, and as evenly as whole episodes allow."""

from __future__ import annotations

from itertools import chain, product

from hypothesis import given, settings
from hypothesis import strategies as st

from lrstream.streaming.partition import partition_episodes, rank_share, worker_share

LENGTHS = st.lists(st.integers(1, 400), max_size=40)


@given(LENGTHS, st.integers(1, 9))
def test_parts_are_disjoint_complete_and_ascending(lengths: list[int], num_parts: int) -> None:
    parts = [part.tolist() for part in partition_episodes(lengths, num_parts)]
    assert len(parts) == num_parts
    assert sorted(chain(*parts)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    assert sum(1 for part in parts if part) == min(num_parts, len(lengths))


@given(LENGTHS.filter(bool), st.integers(1, 9))
def test_no_single_move_makes_the_heaviest_part_lighter(lengths: list[int], num_parts: int) -> None:
    parts = [[lengths[i] for i in part] for part in partition_episodes(lengths, num_parts)]
    heaviest = max(parts, key=sum)
    mean = sum(lengths) / num_parts
    is_even = sum(heaviest) <= 1.01 * mean
    is_forced = len(heaviest) == 1
    is_stuck = sum(heaviest) - min(heaviest) <= mean
    assert is_even or is_forced or is_stuck


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(2, 3))
def test_the_heaviest_part_is_near_the_best_possible_one(lengths: list[int], num_parts: int) -> None:
    # All assignments, tried one by one. The bound is the proven one of longest-first assignment.
    best = min(
        max(sum(n for n, part in zip(lengths, choice, strict=True) if part == k) for k in range(num_parts))
        for choice in product(range(num_parts), repeat=len(lengths))
    )
    heaviest = max(sum(lengths[i] for i in part) for part in partition_episodes(lengths, num_parts))
    assert heaviest <= best * (4 / 3 - 1 / (3 * num_parts))


@given(st.lists(st.integers(1, 400), min_size=3, max_size=30), st.integers(1, 3), st.integers(0, 5))
def test_workers_split_the_share_of_their_rank(lengths: list[int], world_size: int, num_workers: int) -> None:
    everything: list[int] = []
    for rank in range(world_size):
        owned = [
            position
            for worker in range(max(1, num_workers))
            for position in worker_share(lengths, rank, world_size, worker, num_workers).tolist()
        ]
        # How many workers a rank runs does not change which episodes it owns.
        assert sorted(owned) == rank_share(lengths, rank, world_size).tolist()
        everything += owned
    assert sorted(everything) == list(range(len(lengths)))
