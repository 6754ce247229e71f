"""Plans: laws of the strategies, admission, budgets, fast-forward, frozen orders (LD-2, LD-3, LD-5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest

from lrstream.errors import ByteBudgetError, UsageError
from lrstream.streaming import strategies
from lrstream.streaming.keys import RandomKeys
from lrstream.streaming.planning import PlanSettings, plan_stream
from lrstream.streaming.pool import AnchorPlan, episodes_per_batch, peak_resident_bytes
from lrstream.streaming.strategies import ANCHOR_STRATEGIES, SAMPLING_STRATEGIES, SamplingStrategy

# 99.9 % quantiles of chi-square by degrees of freedom (printed tables). Seeds are fixed, so a test
# either passes always or never; the quantile says how unlucky a correct planner would have to be.
CHI2_999 = {1: 10.83, 2: 13.82, 4: 18.47, 5: 20.52, 8: 26.12, 23: 49.73}


def make_plan(
    lengths: Sequence[int], *, seed: int = 7, pool: int = 32, strategy: SamplingStrategy = "remaining"
) -> AnchorPlan:
    return AnchorPlan(lengths, pool_size=pool, strategy=strategy, seed_key=(seed,))


def anchors_of(plan: AnchorPlan) -> list[tuple[int, int]]:
    return [pair for block in plan for pair in zip(block.episode.tolist(), block.frame.tolist(), strict=True)]


def first_anchor_of(plan: AnchorPlan) -> tuple[int, int]:
    block = next(iter(plan))
    return int(block.episode[0]), int(block.frame[0])


def chi_square(seen: Counter[object], expected: dict[object, float], trials: int) -> float:
    assert set(seen) <= set(expected)
    return sum((seen[key] - p * trials) ** 2 / (p * trials) for key, p in expected.items())


# -- frozen orders ----------------------------------------------------------------------------------


FROZEN_ADMISSION = [3, 0, 2, 1]
# fmt: off
FROZEN: dict[SamplingStrategy, list[tuple[int, int]]] = {
    "remaining": [(0, 1), (3, 0), (0, 2), (3, 1), (0, 0), (1, 0), (2, 2), (2, 3), (2, 1), (1, 1), (2, 0)],
    "round_robin": [(0, 1), (3, 0), (3, 1), (0, 2), (2, 0), (0, 0), (2, 3), (1, 0), (1, 1), (2, 1), (2, 2)],
    "gop": [(3, 1), (0, 2), (0, 0), (3, 0), (0, 1), (2, 3), (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)],
}
# fmt: on


@pytest.mark.parametrize("strategy", SAMPLING_STRATEGIES)
def test_the_order_is_frozen(strategy: SamplingStrategy) -> None:
    # A changed order makes saved positions point elsewhere: bump the state's format version with it.
    plan = AnchorPlan([3, 2, 4, 2], pool_size=2, strategy=strategy, seed_key=(42, 0, 0, 0, 0))
    assert plan.admission_order().tolist() == FROZEN_ADMISSION
    assert anchors_of(plan) == FROZEN[strategy]


def test_random_words_are_frozen() -> None:
    assert RandomKeys(42, 0).raw(2).tolist() == [10454559157269555144, 14161603167824897524]
    assert RandomKeys(42, 0).permutation(6).tolist() == [5, 2, 0, 1, 4, 3]


# -- the law of `remaining` -------------------------------------------------------------------------


def test_the_first_episode_follows_the_remaining_counts() -> None:
    lengths, trials = [3, 2, 4], 3000
    seen: Counter[object] = Counter(
        first_anchor_of(make_plan(lengths, seed=seed))[0] for seed in range(trials)
    )
    expected: dict[object, float] = {0: 3 / 9, 1: 2 / 9, 2: 4 / 9}
    assert chi_square(seen, expected, trials) < CHI2_999[2]


def test_the_first_anchor_is_uniform_over_all_anchors() -> None:
    trials = 3000
    seen: Counter[object] = Counter(
        first_anchor_of(make_plan([3, 2, 4], seed=seed)) for seed in range(trials)
    )
    expected: dict[object, float] = {(e, f): 1 / 9 for e, n in enumerate([3, 2, 4]) for f in range(n)}
    assert chi_square(seen, expected, trials) < CHI2_999[8]


def test_every_order_of_a_full_pool_is_equally_likely() -> None:
    trials = 4000
    seen: Counter[object] = Counter(tuple(anchors_of(make_plan([1, 3], seed=seed))) for seed in range(trials))
    orders = list(permutations([(0, 0), (1, 0), (1, 1), (1, 2)]))
    assert chi_square(seen, dict.fromkeys(orders, 1 / 24), trials) < CHI2_999[23]


def law_of_remaining(lengths: Sequence[int], pool: int) -> dict[tuple[int, ...], Fraction]:
    """Probability of each sequence of episodes, by the law itself, admitted in the order given."""
    found: dict[tuple[int, ...], Fraction] = {}

    def go(left: dict[int, int], waiting: tuple[int, ...], done: tuple[int, ...], p: Fraction) -> None:
        while waiting and len(left) < pool:
            left = {**left, waiting[0]: lengths[waiting[0]]}
            waiting = waiting[1:]
        total = sum(left.values())
        if total == 0:
            found[done] = found.get(done, Fraction(0)) + p
        for episode, count in left.items():
            after = {e: n - (e == episode) for e, n in left.items()}
            go({e: n for e, n in after.items() if n}, waiting, (*done, episode), p * Fraction(count, total))

    go({}, tuple(range(len(lengths))), (), Fraction(1))
    return found


def test_sequences_with_admissions_follow_the_law() -> None:
    # Three episodes of two frames in a pool of two: the third competes on equal terms once admitted.
    law = law_of_remaining([2, 2, 2], pool=2)
    assert sum(law.values()) == 1
    trials = 4000
    seen: Counter[object] = Counter()
    for seed in range(trials):
        plan = make_plan([2, 2, 2], seed=seed, pool=2)
        number = {episode: n for n, episode in enumerate(plan.admission_order().tolist())}
        seen[tuple(number[episode] for episode, _ in anchors_of(plan))] += 1
    statistic = chi_square(seen, {key: float(p) for key, p in law.items()}, trials)
    # Mean of chi-square is its degrees of freedom, variance twice that; four standard deviations.
    freedom = len(law) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("seed", [1, 2])
def test_the_law_holds_through_a_long_epoch(seed: int) -> None:
    # Keys are rebased several times here. At each draw, compare "the newest resident was drawn" and
    # "the resident with most anchors was drawn" with their probabilities: sums of fair bets.
    rng = np.random.Generator(np.random.PCG64(seed))
    lengths = rng.integers(1, 400, size=120).tolist()
    plan = make_plan(lengths, seed=seed, pool=5)
    left: dict[int, int] = {}
    gain = {"newest": 0.0, "largest": 0.0}
    variance = {"newest": 0.0, "largest": 0.0}
    for block in plan:
        left.update({episode: lengths[episode] for episode in block.admitted})
        for episode in block.episode.tolist():
            total = sum(left.values())
            bets = {"newest": list(left)[-1], "largest": max(left, key=lambda e: left[e])}
            for name, choice in bets.items():
                p = left[choice] / total
                gain[name] += (episode == choice) - p
                variance[name] += p * (1 - p)
            left[episode] -= 1
        for episode in block.retired:
            assert left.pop(episode) == 0
    for name in gain:
        assert abs(gain[name]) < 4 * variance[name] ** 0.5


# -- the law of `round_robin` -----------------------------------------------------------------------


def check_rounds(plan: AnchorPlan, lengths: Sequence[int]) -> None:
    """Play the rounds one anchor at a time; each must visit each resident of its start once."""
    members: list[int] = []
    joining: list[int] = []
    to_visit: set[int] = set()
    left = list(lengths)
    for block in plan:
        joining += block.admitted
        for episode in block.episode.tolist():
            if not to_visit:
                members = [e for e in members if left[e]] + joining
                joining = []
                to_visit = set(members)
            assert episode in to_visit
            to_visit.remove(episode)
            left[episode] -= 1
    assert not to_visit
    assert left == [0] * len(lengths)


@pytest.mark.parametrize("pool", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [1, 9, 3, 3, 2, 8, 1, 1, 4]])
def test_each_round_visits_each_resident_once(lengths: list[int], pool: int) -> None:
    for seed in range(5):
        check_rounds(make_plan(lengths, seed=seed, pool=pool, strategy="round_robin"), lengths)


def test_rounds_are_shuffled_afresh() -> None:
    trials = 3000
    first: Counter[object] = Counter()
    pairs: Counter[object] = Counter()
    for seed in range(trials):
        episodes = [e for e, _ in anchors_of(make_plan([2, 2, 2], seed=seed, strategy="round_robin"))]
        first[tuple(episodes[:3])] += 1
        pairs[(episodes[0], episodes[3])] += 1  # does the second round begin like the first?
    assert chi_square(first, dict.fromkeys(permutations(range(3)), 1 / 6), trials) < CHI2_999[5]
    assert chi_square(pairs, {(a, b): 1 / 9 for a in range(3) for b in range(3)}, trials) < CHI2_999[8]


def test_frames_are_shuffled_inside_an_episode() -> None:
    trials = 3000
    for strategy in SAMPLING_STRATEGIES:
        seen: Counter[object] = Counter(
            tuple(f for _, f in anchors_of(make_plan([3], seed=seed, strategy=strategy)))
            for seed in range(trials)
        )
        assert chi_square(seen, dict.fromkeys(permutations(range(3)), 1 / 6), trials) < CHI2_999[5]


def test_an_episode_admitted_during_a_round_joins_the_next_one() -> None:
    # Of the two in the pool, the one of a single frame ends in round 1 (at place 0 or 1), and the third
    # episode is resident from there; still the other one is visited before round 2 begins.
    places = set()
    for seed in range(40):
        plan = make_plan([1, 1, 1], seed=seed, pool=2, strategy="round_robin")
        blocks = list(plan)
        first, second, third = plan.admission_order().tolist()
        assert blocks[0].admitted == (first, second)
        assert blocks[1].admitted == (third,)
        assert {int(b.episode[0]) for b in blocks[:2]} == {first, second}
        assert int(blocks[2].episode[0]) == third
        places.add(int(blocks[0].episode[0]) == first)
    assert places == {True, False}


def test_planning_in_smaller_pieces_does_not_change_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan([30, 7, 41, 12], pool=3, strategy="round_robin")
    whole = anchors_of(plan)
    monkeypatch.setattr(strategies, "_ROUND_ROBIN_ANCHORS", 7)
    assert anchors_of(plan) == whole
    assert max(len(block) for block in plan) <= 7


# -- admission and budget ---------------------------------------------------------------------------


def test_admission_is_first_in_first_out_and_never_skips() -> None:
    # 60 bytes fit beside nothing, so the pool holds one episode although three places are free and the
    # small ones behind would fit.
    plan = AnchorPlan(
        [4] * 6,
        pool_size=3,
        strategy="remaining",
        seed_key=(3,),
        sizes=[60, 50, 60, 10, 50, 60],
        budget_bytes=100,
    )
    order = plan.admission_order().tolist()
    resident: list[int] = []
    num_admitted = 0
    for block in plan:
        assert list(block.admitted) == order[num_admitted : num_admitted + len(block.admitted)]
        num_admitted += len(block.admitted)
        resident += block.admitted
        held = sum(plan.size_of(episode) for episode in resident)
        assert held <= 100
        if num_admitted < len(order) and len(resident) < 3:
            assert held + plan.size_of(order[num_admitted]) > 100
        resident = [episode for episode in resident if episode not in block.retired]
    assert num_admitted == len(order)


def test_an_oversized_episode_is_refused_by_name_before_anything() -> None:
    with pytest.raises(ByteBudgetError) as caught:
        AnchorPlan(
            [4, 4, 4],
            pool_size=2,
            strategy="remaining",
            seed_key=(3,),
            sizes=[100, 101, 300],
            budget_bytes=100,
            episode_index=[70, 71, 72],
        )
    text = str(caught.value)
    assert "episode 72" in text
    assert "300 bytes" in text
    assert "100 bytes" in text
    assert "1 more" in text
    assert "A smaller pool cannot help" in text
    assert "larger budget per rank" in text
    assert "payload layout with smaller episode spans" in text
    assert caught.value.fields["episode_index"] == 72


def test_peak_is_that_of_a_step_by_step_count() -> None:
    sizes = [10, 20, 30, 40, 50]
    plan = AnchorPlan([3, 1, 4, 1, 5], pool_size=2, strategy="remaining", seed_key=(5,), sizes=sizes)
    order = plan.admission_order().tolist()
    left = dict(enumerate([3, 1, 4, 1, 5]))
    resident, waiting, peak = order[:2], order[2:], 0
    for episode, _ in anchors_of(plan):
        peak = max(peak, sum(sizes[e] for e in resident))
        left[episode] -= 1
        if not left[episode]:
            resident = [e for e in resident if e != episode] + waiting[:1]
            waiting = waiting[1:]
    assert peak_resident_bytes(plan) == peak


@pytest.mark.parametrize("strategy", SAMPLING_STRATEGIES)
@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_episodes_per_batch_is_a_plain_count(strategy: SamplingStrategy, batch_size: int) -> None:
    plan = make_plan([13, 2, 9, 21, 5], pool=3, strategy=strategy)
    episodes = [episode for episode, _ in anchors_of(plan)]
    expected = [len(set(episodes[i : i + batch_size])) for i in range(0, len(episodes), batch_size)]
    assert episodes_per_batch(plan, batch_size).tolist() == expected


# -- fast-forward and subsets -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ANCHOR_STRATEGIES)
def test_skip_names_who_is_resident_and_who_comes(strategy: SamplingStrategy) -> None:
    plan = make_plan([3, 1, 4, 2], pool=2, strategy=strategy)
    order = plan.admission_order().tolist()
    whole = anchors_of(plan)
    for start in range(len(whole) + 1):
        tail = plan.skip(start)
        blocks = list(tail.blocks)
        rest = [p for b in blocks for p in zip(b.episode.tolist(), b.frame.tolist(), strict=True)]
        assert rest == whole[start:]
        if blocks:
            assert blocks[0].admitted == tail.resident
        unfinished = [e for e in order if e in {e for e, _ in rest}]
        assert [*tail.resident, *tail.upcoming.tolist()] == unfinished


def test_skip_beyond_the_plan_is_refused() -> None:
    with pytest.raises(UsageError, match="Cannot skip 11 anchors of a plan of 10"):
        make_plan([4, 6]).skip(11)
    with pytest.raises(UsageError, match="Cannot skip -1"):
        make_plan([4, 6]).skip(-1)


def test_only_the_frames_asked_for_are_anchors() -> None:
    frames = [np.array([5, 0, 2]), np.array([], dtype=np.int64), np.array([1])]
    plan = AnchorPlan(
        [6, 3, 2],
        pool_size=2,
        strategy="remaining",
        seed_key=(1,),
        frames=frames,
        sizes=[1, 999, 1],
        budget_bytes=5,
    )
    assert sorted(anchors_of(plan)) == [(0, 0), (0, 2), (0, 5), (2, 1)]
    assert plan.num_anchors == 4
    # Nothing is fetched for an episode without anchors, so its size does not matter.
    assert sorted(plan.admission_order().tolist()) == [0, 2]


def test_an_empty_share_gives_an_empty_plan() -> None:
    plan = make_plan([])
    assert list(plan) == []
    assert plan.admission_order().tolist() == []
    assert episodes_per_batch(plan, 4).tolist() == []
    assert list(plan.skip(0).blocks) == []


def test_seeds_epochs_ranks_and_workers_have_their_own_orders() -> None:
    keys = [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**32,), (0, 0, 0)]
    orders = {
        tuple(anchors_of(AnchorPlan([9, 9], pool_size=2, strategy="remaining", seed_key=key))) for key in keys
    }
    assert len(orders) == len(keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pool_size": 0}, "pool size is 0"),
        ({"strategy": "random"}, "no sampling strategy 'random'.*remaining, round_robin"),
        ({"seed_key": (-1,)}, "-1 cannot seed"),
        ({"seed_key": (2**64,)}, "cannot seed"),
        ({"budget_bytes": 5}, "no sizes were given"),
        ({"sizes": [1]}, "sizes describes 1 episodes, but there are 2"),
        ({"frames": [[0]]}, "frames describes 1 episodes"),
        ({"frames": [np.array([0, 0]), np.array([1])]}, "distinct frames in"),
        ({"frames": [np.array([3]), np.array([1])]}, r"\[0, 3\)"),
        ({"episode_index": [1, 2, 3]}, "episode_index describes 3"),
        ({"lengths": [-1, 2]}, "not negative"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    usual: dict[str, object] = {
        "lengths": [3, 3],
        "pool_size": 2,
        "strategy": "remaining",
        "seed_key": (1,),
    }
    with pytest.raises(UsageError, match=message):
        AnchorPlan(**(usual | arguments))  # type: ignore[arg-type]


# -- settings ---------------------------------------------------------------------------------------


def test_pool_and_budget_of_a_rank_are_shared_by_its_busy_workers() -> None:
    settings = PlanSettings(num_workers=4, byte_budget_bytes=1000)
    stream = plan_stream([10] * 8, settings, rank=0, worker=1, sizes=[1] * 8)
    assert (stream.plan.pool_size, stream.plan.budget_bytes) == (8, 250)
    # Two episodes keep two workers busy; the idle ones need neither.
    stream = plan_stream([10] * 2, settings, rank=0, worker=1, sizes=[1] * 2)
    assert (stream.plan.pool_size, stream.plan.budget_bytes) == (16, 500)
    explicit = PlanSettings(num_workers=4, episode_pool_size=5)
    assert plan_stream([10] * 8, explicit, rank=0, worker=1).plan.pool_size == 5
    assert PlanSettings(num_workers=64).pool_size_of(64) == 1


def test_no_seed_is_42() -> None:
    def order(seed: int | None) -> list[tuple[int, int]]:
        return anchors_of(plan_stream([9, 9], PlanSettings(seed=seed), rank=0, worker=0).plan)

    assert order(None) == order(42) != order(43)


def test_an_oversized_episode_is_named_as_the_dataset_does() -> None:
    settings = PlanSettings(byte_budget_bytes=10)
    with pytest.raises(ByteBudgetError, match="episode 305 needs 11 bytes"):
        plan_stream([1, 1], settings, rank=0, worker=0, sizes=[1, 11], episode_index=[304, 305])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"world_size": 0}, "world_size is 0"),
        ({"num_workers": -2}, "num_workers is -2"),
        ({"episode_pool_size": 0}, "episode_pool_size is 0"),
        ({"byte_budget_bytes": 0}, "byte_budget_bytes is 0"),
        ({"strategy": "x"}, "no sampling strategy"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PlanSettings(**arguments)  # type: ignore[arg-type]


def test_a_stream_outside_of_the_job_is_refused() -> None:
    with pytest.raises(UsageError, match="Rank 0, worker 1 is outside"):
        plan_stream([1, 1], PlanSettings(), rank=0, worker=1)
