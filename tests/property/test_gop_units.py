"""Units and needs as the planner computes them, many at once, against one frame after the other."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrstream.streaming import picture_needs
from lrstream.streaming.clocks import Waits
from lrstream.streaming.gop_table import GopTable
from lrstream.streaming.gop_units import (
    BYTES,
    EPISODE,
    FIRST,
    IS_LAST,
    READY_FIRST,
    READY_STOP,
    STOP,
    EpisodeBlock,
    EpisodeUnits,
    rotated_units,
    shuffled_units,
)
from lrstream.streaming.keys import RandomKeys
from lrstream.streaming.picture_needs import NeedTable, count_needs
from lrstream.streaming.unit_queue import UnitQueue

LIMITS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Episode:
    """An episode of a drawn dataset: its length, bounds of its units, and anchors."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.length = draw(st.integers(1, 14))
        inner = draw(st.sets(st.integers(1, self.length - 1), max_size=5)) if self.length > 1 else set()
        self.bounds = [0, *sorted(inner), self.length]
        frames = st.sets(st.integers(0, self.length - 1), min_size=1)
        self.anchors = sorted(draw(frames | st.just(set(range(self.length)))))

    @property
    def units(self) -> list[range]:
        return list(itertools.starmap(range, itertools.pairwise(self.bounds)))


class Dataset:
    """Episodes, groups of cameras, and which of the episodes make a block, in which order."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.episodes = [Episode(draw) for _ in range(draw(st.integers(1, 5)))]
        window = st.lists(st.integers(-5, 4), min_size=1, max_size=3, unique=True).map(sorted)
        self.windows: list[list[int]] = draw(st.lists(window, max_size=2))
        numbers = range(len(self.episodes))
        self.sizes = [[draw(st.integers(1, 9)) for _ in numbers] for _ in self.windows]
        self.chosen: list[int] = draw(st.permutations(numbers))[: draw(st.integers(1, len(numbers)))]
        self.firsts = [draw(st.integers(0, len(self.episodes[e].units) - 1)) for e in self.chosen]
        self.seed = draw(st.integers(0, 2**32))

    def block(self) -> EpisodeBlock:
        starts = [episode.bounds[:-1] for episode in self.episodes]
        table = GopTable(
            tuple(map(str, range(len(self.windows)))),
            np.array(list(itertools.chain(*starts)), dtype=np.int32),
            np.cumsum([0, *map(len, starts)]),
            np.array(self.sizes, dtype=np.int64).reshape(len(self.windows), len(starts)).T,
        )
        lengths = np.array([episode.length for episode in self.episodes])
        anchors = [np.array(self.episodes[e].anchors, dtype=np.int32) for e in self.chosen]
        return EpisodeBlock(table, lengths, self.chosen, anchors)

    @staticmethod
    def pictures(episode: Episode, anchor: int, window: list[int]) -> list[int]:
        """Frames that an anchor needs, as often as it does."""
        return [min(max(anchor + delta, 0), episode.length - 1) for delta in window]

    def needs(self, episode: Episode, window: list[int]) -> Counter[int]:
        return Counter(frame for a in episode.anchors for frame in self.pictures(episode, a, window))


datasets = st.composite(Dataset)


def codes_of(units: EpisodeUnits, place: int) -> set[tuple[int, int]]:
    """(episode, frame) of the anchors that are ready with a unit."""
    codes = units.codes[units.table[READY_FIRST, place] : units.table[READY_STOP, place]].tolist()
    assert len(set(codes)) == len(codes)
    return {(code >> 32, code & 0xFFFF_FFFF) for code in codes}


@LIMITS
@given(datasets())
def test_shuffled_units_are_those_with_anchors(dataset: Dataset) -> None:
    anchor_bytes = np.arange(len(dataset.episodes)) + 3
    found = shuffled_units(dataset.block(), anchor_bytes, Waits(RandomKeys(dataset.seed)))
    waits = Waits(RandomKeys(dataset.seed))
    for number, units in zip(dataset.chosen, found, strict=True):
        episode = dataset.episodes[number]
        used = [unit for unit in episode.units if set(unit) & set(episode.anchors)]
        assert units.needs == ()
        assert (units.table[EPISODE] == number).all()
        assert units.table[[FIRST, STOP]].T.tolist() == [[unit.start, unit.stop] for unit in used]
        for place, unit in enumerate(used):
            anchors = set(unit) & set(episode.anchors)
            assert codes_of(units, place) == {(number, frame) for frame in anchors}
            assert units.table[BYTES, place] == len(anchors) * anchor_bytes[number]
            assert units.times[place] == waits.take(1)[0] / len(anchors)
        assert units.table[IS_LAST].tolist() == [int(t == max(units.times)) for t in units.times]


class EqualWaits(Waits):
    """All the same."""

    def take(self, count: int) -> npt.NDArray[np.float64]:
        return np.ones(count)


def test_of_equal_times_the_later_unit_is_the_last_one() -> None:
    starts = np.array([0, 2, 4, 0, 1, 2], dtype=np.int32)
    table = GopTable((), starts, np.array([0, 3, 6]), np.zeros((2, 0), dtype=np.int64))
    anchors = [np.arange(6, dtype=np.int32), np.arange(3, dtype=np.int32)]
    block = EpisodeBlock(table, np.array([6, 3]), [0, 1], anchors)
    queue = UnitQueue()
    for units in shuffled_units(block, np.zeros(2, dtype=np.int64), EqualWaits(RandomKeys(0))):
        assert units.table[IS_LAST].tolist() == [0, 0, 1]
        queue.add(units)
    left, _ = queue.next_units(0)
    assert left[[EPISODE, FIRST]].T.tolist() == [[0, 0], [0, 2], [0, 4], [1, 0], [1, 1], [1, 2]]


@LIMITS
@given(datasets())
def test_rotated_units_follow_one_another(dataset: Dataset) -> None:
    deltas = [np.array(window, dtype=np.int64) for window in dataset.windows]
    sizes = [np.array(of_group) for of_group in dataset.sizes]
    firsts = np.array(dataset.firsts)
    waits = Waits(RandomKeys(dataset.seed))
    found = rotated_units(dataset.block(), deltas, sizes, firsts, Waits(RandomKeys(dataset.seed)))
    for number, first, units in zip(dataset.chosen, dataset.firsts, found, strict=True):
        episode = dataset.episodes[number]
        needs = [dataset.needs(episode, window) for window in dataset.windows]
        for counts, expected in zip(units.needs, needs, strict=True):
            assert dict(enumerate(counts.tolist())) == {f: expected[f] for f in range(episode.length)}
        wanted = set(episode.anchors).union(*needs)
        around = episode.units[first:] + episode.units[:first]
        used = [unit for unit in around if set(unit) & wanted]
        assert (units.table[EPISODE] == number).all()
        assert units.table[[FIRST, STOP]].T.tolist() == [[unit.start, unit.stop] for unit in used]
        assert units.table[IS_LAST].tolist() == [0] * (len(used) - 1) + [1]
        entered: set[int] = set()
        ready: set[int] = set()
        time = 0.0
        for place, unit in enumerate(used):
            entered |= set(unit)
            now_ready = {
                anchor
                for anchor in episode.anchors
                if {
                    anchor,
                    *(min(max(anchor + d, 0), episode.length - 1) for w in dataset.windows for d in w),
                }
                <= entered
            }
            assert codes_of(units, place) == {(number, frame) for frame in now_ready - ready}
            ready = now_ready
            assert units.table[BYTES, place] == sum(
                size[number] * len(set(unit) & counts.keys())
                for size, counts in zip(dataset.sizes, needs, strict=True)
            )
            left = sum(len(set(later) & wanted) for later in used[place:])
            time += float(waits.take(1)[0]) / left
            assert units.times[place] == pytest.approx(time, rel=1e-9)
        assert ready == set(episode.anchors)


@LIMITS
@given(datasets(), st.data())
def test_needs_are_met_one_after_the_other(dataset: Dataset, data: st.DataObject) -> None:
    window = dataset.windows[0] if dataset.windows else [0]
    lengths = np.array([episode.length for episode in dataset.episodes])
    with mock.patch.object(picture_needs, "_FEW_FRAMES", data.draw(st.integers(1, 30))):
        table = NeedTable(np.array(window), lengths)
        left = {}
        for number in dataset.chosen:
            episode = dataset.episodes[number]
            counts = count_needs(np.array(episode.anchors), episode.length, np.array(window))
            naive = dataset.needs(episode, window)
            assert counts.tolist() == [naive[frame] for frame in range(episode.length)]
            table.add(number, counts)
            left[number] = (naive, list(data.draw(st.permutations(episode.anchors))))
            open_anchors = [(e, f) for e, (_, anchors) in left.items() for f in anchors]
            count = data.draw(st.integers(0, len(open_anchors)))
            released = data.draw(st.permutations(open_anchors))[:count]
            freed = table.release(
                np.array([e for e, _ in released], dtype=np.int64),
                np.array([f for _, f in released], dtype=np.int64),
            )
            expected = []
            for e, frame in released:
                naive, anchors = left[e]
                before = sum(1 for needed in naive.values() if needed)
                naive.subtract(dataset.pictures(dataset.episodes[e], frame, window))
                expected.append(before - sum(1 for needed in naive.values() if needed))
                anchors.remove(frame)
            assert freed.tolist() == expected
            for e in [e for e, (_, anchors) in left.items() if not anchors]:
                table.remove(e)
                del left[e]


# -- the law ------------------------------------------------------------------------------------------


def enter_all(counts: dict[int, list[int]], seed: int, *, rotated: bool, late: int | None) -> tuple[int, ...]:
    """Episodes in the order in which their units enter; each unit of so many frames, all of them anchors.

    Args:
        counts: Frames of each unit, by episode.
        seed: Of the times.
        rotated: Whether units are in order.
        late: The episode that joins when the first unit has entered.
    """
    bounds = [np.cumsum([0, *frames]) for frames in counts.values()]
    lengths = np.array([ends[-1] for ends in bounds])
    table = GopTable(
        (),
        np.concatenate([ends[:-1] for ends in bounds]).astype(np.int32),
        np.cumsum([0, *map(len, counts.values())]),
        np.zeros((len(counts), 0), dtype=np.int64),
    )
    episodes = list(counts)
    anchors = [np.arange(length, dtype=np.int32) for length in lengths.tolist()]
    block = EpisodeBlock(table, lengths, episodes, anchors)
    waits = Waits(RandomKeys(seed))
    found = (
        rotated_units(block, [], [], np.zeros(len(episodes), dtype=np.int64), waits)
        if rotated
        else shuffled_units(block, np.zeros(len(episodes), dtype=np.int64), waits)
    )
    queue = UnitQueue()
    order: list[int] = []
    for episode, units in zip(episodes, found, strict=True):
        if episode != late:
            queue.add(units)
    while True:
        units_left, _ = queue.next_units(0)
        if not units_left.size:
            return tuple(order)
        order.append(int(units_left[EPISODE, 0]) * 10 + int(units_left[FIRST, 0]))
        queue.take(1)
        if len(order) == 1 and late is not None:
            queue.add(found[episodes.index(late)])


def law(counts: dict[int, list[int]], *, rotated: bool, late: int | None) -> dict[tuple[int, ...], Fraction]:
    """Probability of each order, by the definition: the next unit is chosen when the one before it enters."""
    firsts = {e: np.cumsum([0, *frames]).tolist() for e, frames in counts.items()}

    def go(
        left: dict[int, list[int]], order: tuple[int, ...], chosen: tuple[int, int] | None, part: Fraction
    ) -> None:
        if chosen is not None:
            e, unit = chosen
            left = {**left, e: [u for u in left[e] if u != unit]}
            order = (*order, e * 10 + firsts[e][unit])
        total = sum(counts[e][u] for e, units in left.items() for u in units)
        options: list[tuple[int, int, Fraction]] = []
        for e, units in left.items():
            if rotated and units:
                options.append((e, units[0], Fraction(sum(counts[e][u] for u in units), total)))
            elif not rotated:
                options += [(e, u, Fraction(counts[e][u], total)) for u in units]
        # Whoever is late joins behind the second unit, which is chosen by then.
        joins = late is not None and len(order) == 1
        if not options:
            if joins:
                assert late is not None
                go({late: list(range(len(counts[late])))}, order, None, part)
                return
            found[order] = found.get(order, Fraction(0)) + part
            return
        for e, u, p in options:
            following = {**left, late: list(range(len(counts[late])))} if joins and late is not None else left
            go(following, order, (e, u), part * p)

    found: dict[tuple[int, ...], Fraction] = {}
    start = {e: list(range(len(frames))) for e, frames in counts.items() if e != late}
    go(start, (), None, Fraction(1))
    return found


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("late", [None, 2])
def test_units_are_chosen_in_proportion_to_what_is_left(rotated: bool, late: int | None) -> None:
    counts = {0: [3, 1, 2], 1: [1, 4], 2: [2, 5]} if rotated else {0: [3, 1], 1: [4], 2: [2, 5]}
    expected = law(counts, rotated=rotated, late=late)
    assert sum(expected.values()) == 1
    trials = 2000
    seen = Counter(enter_all(counts, seed, rotated=rotated, late=late) for seed in range(trials))
    assert seen.keys() <= expected.keys()
    statistic = sum(float((seen[key] - trials * p) ** 2 / (trials * p)) for key, p in expected.items())
    freedom = len(expected) - 1
    # The 99.9 % quantile (Wilson and Hilferty).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
