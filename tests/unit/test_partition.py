"""Shares of ranks and workers: cover, balance, refusals (LD-1, LD-9, K15, K17)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest

from lrstream.errors import UsageError
from lrstream.streaming.partition import (
    num_streams,
    partition_episodes,
    partition_report,
    partition_streams,
    rank_share,
    worker_share,
)


def test_shares_are_frozen() -> None:
    # Positions of a share may change only with a new format version of the loader state.
    lengths = [50, 10, 40, 10, 30, 20, 20]
    assert [part.tolist() for part in partition_episodes(lengths, 3)] == [[0, 1], [2, 6], [3, 4, 5]]
    assert [part.tolist() for part in partition_episodes(lengths, 1)] == [[0, 1, 2, 3, 4, 5, 6]]


def test_a_swap_repairs_what_longest_first_gets_wrong() -> None:
    # Longest-first gives 3 + 2 + 2 = 7 against 3 + 2 = 5; the best split is 6 against 6.
    parts = partition_episodes([3, 3, 2, 2, 2], 2)
    assert sorted(sum([3, 3, 2, 2, 2][i] for i in part) for part in parts) == [6, 6]


@pytest.mark.parametrize("num_parts", [2, 3, 8, 16])
def test_like_episodes_are_within_a_tenth_of_the_mean(num_parts: int) -> None:
    lengths = np.random.Generator(np.random.PCG64(3)).integers(200, 400, size=10 * num_parts)
    loads = [int(lengths[part].sum()) for part in partition_episodes(lengths, num_parts)]
    assert max(loads) <= 1.1 * sum(loads) / num_parts


def test_one_long_episode_has_a_share_for_itself() -> None:
    parts = partition_episodes([10, 10, 1000, 10, 10], 3)
    assert [2] in [part.tolist() for part in parts]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
@pytest.mark.parametrize("lengths", [[30, 12, 55, 7, 41, 18, 26], [9, 9, 9]])
def test_ranks_and_workers_cover_the_selection_once(
    lengths: list[int], world_size: int, num_workers: int
) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        owned = rank_share(lengths, rank, world_size).tolist()
        of_workers = [
            worker_share(lengths, rank, world_size, worker, num_workers).tolist()
            for worker in range(max(1, num_workers))
        ]
        assert sorted(chain(*of_workers)) == owned
        assert sum(1 for share in of_workers if share) == num_streams(len(owned), num_workers)
        assert of_workers == [p.tolist() for p in partition_streams(lengths, world_size, num_workers)[rank]]
        seen += owned
    assert sorted(seen) == list(range(len(lengths)))


def test_surplus_workers_are_idle() -> None:
    shares = [worker_share([100], 0, 1, worker, 5).tolist() for worker in range(5)]
    assert shares == [[0], [], [], [], []]
    assert partition_report([100], 1, 5).num_idle_workers == 4


def test_a_rank_without_an_episode_is_refused_with_the_remedy() -> None:
    for rank in range(4):  # every rank says so, not only the unlucky one
        with pytest.raises(UsageError) as caught:
            rank_share([10, 20, 30], rank, 4)
        text = str(caught.value)
        assert "3 selected episodes" in text
        assert "4 ranks" in text
        assert "fewer ranks, so that each has at least one selected episode" in text
    with pytest.raises(UsageError, match="A rank has no data"):
        worker_share([10, 20, 30], 0, 4, 0, 2)
    with pytest.raises(UsageError, match="A rank has no data"):
        partition_report([10, 20, 30], 4, 2)


def test_an_empty_selection_is_empty_for_every_rank() -> None:
    assert [rank_share([], rank, 3).tolist() for rank in range(3)] == [[], [], []]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition_episodes([1, 2], 0), "0 parts"),
        (lambda: partition_episodes([1, 0], 2), "position 1 has 0 frames"),
        (lambda: partition_episodes([1.5, 2.0], 2), "integers"),
        (lambda: partition_episodes([[1, 2]], 2), "one-dimensional"),
        (lambda: rank_share([1, 2], 2, 2), "Rank 2 is outside"),
        (lambda: rank_share([1, 2], -1, 2), "Rank -1 is outside"),
        (lambda: worker_share([1, 2], 0, 1, 2, 2), "Worker 2 is outside"),
        (lambda: partition_streams([1, 2], 1, -1), "num_workers is -1"),
        (lambda: num_streams(3, -1), "num_workers is -1"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_report_counts_frames_episodes_and_batches() -> None:
    report = partition_report([10, 10, 100], 2, 0)
    assert sorted(report.rank_frames.tolist()) == [20, 100]
    assert sorted(report.rank_episodes.tolist()) == [1, 2]
    assert report.rank_balance == pytest.approx(100 / 60)
    # 100 frames are 12 batches of 8 and half a one; 20 frames are 2 and half a one.
    assert sorted(report.batches_per_rank(8, drop_last=False).tolist()) == [3, 13]
    assert sorted(report.batches_per_rank(8, drop_last=True).tolist()) == [2, 12]


def test_each_worker_ends_with_its_own_partial_batch() -> None:
    report = partition_report([10, 10], 1, 2)
    assert report.worker_balance == 1.0
    # 20 frames would be 3 batches of 8 for one process, but two workers give 8 + 2 each.
    assert report.batches_per_rank(8, drop_last=False).tolist() == [4]
    assert report.batches_per_rank(8, drop_last=True).tolist() == [2]
