"""Drawing anchors many at a time follows the law of drawing them one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrstream.streaming.keys import RandomKeys
from lrstream.streaming.ready import ReadyAnchors

# So many anchors join, then so many are drawn.
Steps = list[tuple[int, int]]


def play(ready: ReadyAnchors, steps: Steps) -> list[int]:
    """What is drawn; anchors are numbered as they join."""
    following = itertools.count()
    drawn: list[int] = []
    for joining, count in steps:
        ready.add(np.fromiter(itertools.islice(following, joining), dtype=np.int64))
        while count:
            found = ready.take(count).tolist()
            assert 1 <= len(found) <= count
            count -= len(found)
            drawn += found
    return drawn


def law(steps: Steps) -> dict[tuple[int, ...], Fraction]:
    """Probability of every sequence, by the definition."""

    def go(number: int, ready: frozenset[int], joined: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
        if number == len(steps):
            yield (), Fraction(1)
            return
        joining, count = steps[number]
        present = ready | frozenset(range(joined, joined + joining))
        for taken in itertools.permutations(sorted(present), count):
            each = Fraction(1)
            for place in range(count):
                each /= len(present) - place
            for rest, probability in go(number + 1, present - frozenset(taken), joined + joining):
                yield taken + rest, each * probability

    return dict(go(0, frozenset(), 0))


# Parts so large that an order of all is drawn; or so small that slots are tried (the last three), those that
# were drawn before among them.
@pytest.mark.parametrize(
    "steps",
    [
        [(3, 1), (1, 2), (0, 1)],
        [(4, 4)],
        [(2, 1), (2, 1), (1, 2)],
        [(9, 2)],
        [(18, 1), (0, 1)],
        [(12, 1), (2, 1)],
    ],
)
def test_sequences_are_as_likely_as_when_drawn_one_by_one(steps: Steps) -> None:
    expected = law(steps)
    assert sum(expected.values()) == 1
    trials = 4000
    seen = Counter(tuple(play(ReadyAnchors(RandomKeys(5, seed)), steps)) for seed in range(trials))
    assert seen.keys() <= expected.keys()
    statistic = sum((seen[key] - trials * p) ** 2 / (trials * p) for key, p in expected.items())
    freedom = len(expected) - 1
    # The 99.9 % quantile (Wilson and Hilferty).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


@given(
    st.lists(st.tuples(st.integers(0, 400), st.floats(0, 1) | st.floats(0, 0.1)), min_size=1, max_size=12),
    st.integers(0, 2**32),
)
def test_what_is_drawn_was_there_and_is_drawn_once(parts: list[tuple[int, float]], seed: int) -> None:
    steps: Steps = []
    present = joined = 0
    for joining, part in parts:
        present, joined = present + joining, joined + joining
        count = int(part * present)
        steps.append((joining, count))
        present -= count
    ready = ReadyAnchors(RandomKeys(seed))
    drawn = play(ready, steps)
    assert len(drawn) == len(set(drawn)) == sum(count for _, count in steps)
    assert len(ready) == present
    place = joined = 0
    for joining, count in steps:
        joined += joining
        assert all(anchor < joined for anchor in drawn[place : place + count])
        place += count
    assert {*drawn, *(ready.take(present).tolist() if present else ())} <= set(range(joined))


def test_the_same_calls_give_the_same_draws() -> None:
    steps = [(300, 20), (40, 100), (0, 100), (5000, 300), (0, 300)]
    first, second = (play(ReadyAnchors(RandomKeys(7)), steps) for _ in range(2))
    assert first == second
