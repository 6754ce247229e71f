"""The draws of a mixture and how it is shared out: exact, in proportion, and the same from any position."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrstream.errors import ByteBudgetError, UsageError
from lrstream.streaming import draws
from lrstream.streaming.draws import ProportionalDraws, WeightedDraws, quotas_of_weights
from lrstream.streaming.mixture_plan import MixtureLaw, MixtureShares, divide_budget, member_seed

RUN = 32
COUNTS = st.lists(st.integers(0, 90), min_size=1, max_size=5)
WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-12, 1e12), st.integers(1, 5)), min_size=1, max_size=6
).filter(any)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small examples have several runs."""
    monkeypatch.setattr(draws, "RUN_DRAWS", RUN)


@settings(max_examples=25, deadline=None)
@given(COUNTS, st.integers(0, 2**64 - 1))
def test_every_anchor_is_drawn_once_and_any_position_is_a_start(counts: list[int], seed: int) -> None:
    sequence = ProportionalDraws(counts, (seed, 3))
    whole = list(sequence.starting_at(0))
    assert Counter(whole) == Counter({member: count for member, count in enumerate(counts) if count})
    for position in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)} - {-1}:
        if position <= len(whole):
            assert list(sequence.starting_at(position)) == whole[position:]
            expected = [whole[:position].count(member) for member in range(len(counts))]
            assert sequence.counts_before(position).tolist() == expected
    with pytest.raises(UsageError):
        sequence.counts_before(len(whole) + 1)


@settings(max_examples=25, deadline=None)
@given(COUNTS, st.integers(0, 1000))
def test_members_are_interleaved_in_proportion_everywhere(counts: list[int], seed: int) -> None:
    """After any draw, each member has had its part of the draws, to within a run and one sample."""
    whole = list(ProportionalDraws(counts, (seed,)).starting_at(0))
    had = np.zeros(len(counts))
    for number, member in enumerate(whole, 1):
        had[member] += 1
        due = np.array(counts) * number / len(whole)
        assert (np.abs(had - due) <= RUN + 1).all()


def test_a_draw_is_in_proportion_to_what_remains() -> None:
    """3, 2 and 4 left give 3/9, 2/9 and 4/9; after that the second draw has one less of what was drawn."""
    seeds = 3000
    pairs = Counter(
        tuple(itertools.islice(ProportionalDraws([3, 2, 4], (seed,)).starting_at(0), 2))
        for seed in range(seeds)
    )
    counts = [3, 2, 4]
    for first, second in itertools.product(range(3), repeat=2):
        expected = Fraction(counts[first], 9) * Fraction(counts[second] - (first == second), 8)
        deviation = (float(expected) * (1 - float(expected)) / seeds) ** 0.5
        assert abs(pairs[first, second] / seeds - float(expected)) < 5 * deviation


@settings(max_examples=25, deadline=None)
@given(WEIGHTS, st.integers(0, 1000), st.integers(0, 200))
def test_weighted_draws_have_exact_parts_in_every_run(weights: list[float], seed: int, position: int) -> None:
    quotas = quotas_of_weights(weights)
    assert int(quotas.sum()) == RUN
    assert [quota > 0 for quota in quotas.tolist()] == [weight > 0 for weight in weights]
    total = sum(map(Fraction, weights))
    for quota, weight in zip(quotas.tolist(), weights, strict=True):
        # Within one part, but for what weights that are less than a part got as a gift.
        assert abs(quota - Fraction(weight) * RUN / total) <= len(weights)
    sequence = WeightedDraws(quotas, (seed,))
    whole = list(itertools.islice(sequence.starting_at(0), 8 * RUN))
    for run in range(8):
        part = whole[run * RUN : (run + 1) * RUN]
        assert [part.count(member) for member in range(len(weights))] == quotas.tolist()
    assert list(itertools.islice(sequence.starting_at(position), RUN)) == whole[position : position + RUN]
    expected = [whole[:position].count(member) for member in range(len(weights))]
    assert sequence.counts_before(position).tolist() == expected


@pytest.mark.parametrize("weights", [[], [0.0], [0, 0], [-1, 2], [1.0] * (RUN // 2 + 1)])
def test_weights_that_give_no_draws_are_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="Weights are"):
        quotas_of_weights(weights)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 30), max_size=7), min_size=1, max_size=4).filter(any),
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
)
def test_shares_cover_every_episode_once(
    lengths: list[list[int]], world_size: int, num_workers: int, is_weighted: bool
) -> None:
    law = MixtureLaw(42, tuple(float(bool(own)) for own in lengths), 1000) if is_weighted else MixtureLaw(42)
    arrays = [np.array(own, dtype=np.int64) for own in lengths]
    if is_weighted and sum(map(len, lengths)) < world_size:
        with pytest.raises(UsageError, match="has no data"):
            MixtureShares(law, arrays, world_size, num_workers)
        return
    shares = MixtureShares(law, arrays, world_size, num_workers)
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(world_size):
        for worker in range(max(1, num_workers)):
            part = shares.slice_of(rank, worker, epoch=5)
            for member, own in enumerate(part.parts):
                found.update((member, position) for position in own.positions.tolist())
                assert own.num_frames == sum(lengths[member][p] for p in own.positions)
                assert shares.frames[rank, worker, member] == own.num_frames
            assert shares.samples[rank, worker] == part.num_samples
            if not is_weighted:
                assert part.num_samples == sum(own.num_frames for own in part.parts)
            elif not any(own.num_frames for own in part.parts):
                assert part.num_samples == 0
    assert found == Counter(
        (member, place) for member, own in enumerate(lengths) for place in range(len(own))
    )
    if is_weighted:
        assert int(shares.samples.sum()) == 1000
        ranks = shares.samples.sum(axis=1)
        assert int(ranks.max() - ranks.min()) <= 1
    else:
        # Of at least as many episodes as ranks, no rank stays without.
        assert sum(map(len, lengths)) < world_size or shares.samples.sum(axis=1).min() > 0
    np.testing.assert_allclose(shares.expected_shares().sum(), 1.0)


def test_small_members_do_not_all_fall_to_the_first_rank() -> None:
    members = [np.array([10]) for _ in range(8)]
    shares = MixtureShares(MixtureLaw(42), members, 4, 2)
    assert shares.samples.tolist() == [[10, 10]] * 4


def test_one_member_is_shared_as_if_it_were_alone() -> None:
    from lrstream.streaming.partition import partition_streams

    lengths = np.array([9, 4, 7, 12, 3, 8, 5, 10])
    shares = MixtureShares(MixtureLaw(42), [lengths], 3, 2)
    for rank, row in enumerate(partition_streams(lengths, 3, 2)):
        for worker, positions in enumerate(row):
            (part,) = shares.slice_of(rank, worker, 0).parts
            assert (part.rank, part.worker) == (rank, worker)
            np.testing.assert_array_equal(part.positions, positions)
    assert member_seed(7, 0) == 7
    assert len({member_seed(7, member) for member in range(100)}) == 100


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 10**6), max_size=5), st.integers(1, 32)), min_size=1, max_size=5
    ),
    st.integers(0, 10**7),
)
def test_a_budget_is_divided_so_that_all_can_go_on(members: list[tuple[list[int], int]], budget: int) -> None:
    sizes = [np.array(own, dtype=np.int64) for own, _ in members]
    pools = [pool for _, pool in members]
    names = [[f"episode {number}" for number in range(len(own))] for own, _ in members]
    largest = [max(own, default=0) for own, _ in members]
    if sum(largest) > budget:
        with pytest.raises(ByteBudgetError, match=str(max(largest)) if max(largest) > budget else "together"):
            divide_budget(budget, sizes, pools, names)
        return
    parts = divide_budget(budget, sizes, pools, names)
    assert sum(parts) <= budget
    assert all(part >= least for part, least in zip(parts, largest, strict=True))
    assert all(part == 0 for part, own in zip(parts, sizes, strict=True) if not own.any())
    if any(largest):
        assert budget - sum(parts) < len(parts), "next to nothing is left over"
