"""Strategy `gop` as a plan: every frame once, every picture decoded once and before it is needed, the
reservoir never over its bound, every position resumable (LD-14)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrstream.errors import ByteBudgetError
from lrstream.streaming.gop_strategy import planned_bytes
from lrstream.streaming.gop_table import GopTable, format_windows
from lrstream.streaming.pool import AnchorPlan, PlanBlock

Deltas = tuple[int, ...]


@st.composite
def plans(draw: st.DrawFn) -> tuple[AnchorPlan, list[int], list[Deltas]]:
    """A plan, its episodes' lengths and each camera's window; the reservoir as small as it may be, or not."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    num_cameras = draw(st.integers(0, 2))
    starts: list[int] = []
    offsets = [0]
    for length in lengths:
        inner = draw(st.sets(st.integers(1, length - 1), max_size=4)) if length > 1 else set()
        starts += [0, *sorted(inner)]
        offsets.append(len(starts))
    sizes = draw(st.lists(st.integers(1, 5), min_size=num_cameras, max_size=num_cameras))
    cameras = tuple(f"camera:{number}" for number in range(num_cameras))
    window = st.lists(st.integers(-5, 4), min_size=1, max_size=3).map(lambda d: tuple(sorted(set(d))))
    deltas = [draw(st.just((0,)) | window) for _ in cameras]
    table = GopTable(
        cameras,
        np.array(starts, dtype=np.int32),
        np.array(offsets, dtype=np.int64),
        np.tile(np.array(sizes, dtype=np.int64), (len(lengths), 1)),
    )
    frames = None
    if draw(st.booleans()):
        frames = [np.array(sorted(draw(st.sets(st.integers(0, n - 1)))), dtype=np.int64) for n in lengths]
    bytes_of = draw(st.none() | st.lists(st.integers(1, 30), min_size=len(lengths), max_size=len(lengths)))
    fields = {
        "pool_size": draw(st.integers(1, 4)),
        "strategy": "gop",
        "seed_key": (draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 3))),
        "frames": frames,
        "sizes": bytes_of,
        "budget_bytes": None if bytes_of is None else draw(st.integers(max(bytes_of), 90)),
        "gops": table,
        "picture_windows": format_windows(dict(zip(cameras, deltas, strict=True))),
    }
    needed = 1
    try:
        AnchorPlan(lengths, reservoir_bytes=needed, **fields)  # type: ignore[arg-type]
    except ByteBudgetError as error:
        needed = int(error.fields["size_bytes"])
    reservoir = needed + draw(st.sampled_from((0, 0, 7, 60, 1000)))
    return AnchorPlan(lengths, reservoir_bytes=reservoir, **fields), lengths, deltas  # type: ignore[arg-type]


def anchors_of(blocks: Iterable[PlanBlock]) -> list[tuple[int, int]]:
    return [pair for b in blocks for pair in zip(b.episode.tolist(), b.frame.tolist(), strict=True)]


def needs_of(frame: int, length: int, deltas: list[Deltas]) -> set[tuple[int, int]]:
    """(camera, frame) of every picture of an anchor, by LeRobot's clamping."""
    return {
        (camera, min(max(frame + delta, 0), length - 1))
        for camera, window in enumerate(deltas)
        for delta in window
    }


class NaiveReservoir:
    """Carries a plan out with sets and sums."""

    def __init__(self, plan: AnchorPlan, lengths: list[int], deltas: list[Deltas]) -> None:
        self.plan, self.lengths, self.deltas = plan, lengths, deltas
        self.entered: set[tuple[int, int]] = set()
        self.held: dict[tuple[int, int, int], int] = {}
        self.left = {e: set(plan.anchors_of(e).tolist()) for e in range(len(lengths))}
        self.peak = 0

    def is_needed(self, episode: int, camera: int, frame: int) -> bool:
        return any(
            (camera, frame) in needs_of(anchor, self.lengths[episode], self.deltas)
            for anchor in self.left[episode]
        )

    def enter(self, episode: int, first: int, stop: int) -> None:
        for frame in range(first, stop):
            assert (episode, frame) not in self.entered, "decoded twice"
            self.entered.add((episode, frame))
            for camera in range(len(self.deltas)):
                if self.is_needed(episode, camera, frame):
                    size = int(self.plan.gops.picture_bytes[episode, camera])
                    self.held[episode, camera, frame] = size
        self.peak = max(self.peak, sum(self.held.values()))
        assert sum(self.held.values()) <= planned_bytes(self.plan.reservoir_bytes)

    def deliver(self, episode: int, frame: int) -> None:
        for camera, wanted in needs_of(frame, self.lengths[episode], self.deltas):
            assert (episode, camera, wanted) in self.held, "delivered before it was decoded"
        self.left[episode].remove(frame)
        for key in [key for key in self.held if key[0] == episode]:
            if not self.is_needed(*key):
                del self.held[key]

    def run(self, block: PlanBlock) -> None:
        entries = list(block.entries)
        held = previous = 0
        for place, (episode, frame) in enumerate(anchors_of([block])):
            while entries and entries[0].at <= place:
                entry = entries.pop(0)
                before = sum(self.held.values())
                self.enter(entry.episode, entry.first, entry.stop)
                unit_bytes = sum(self.held.values()) - before
                # As soon as it fits: not an anchor earlier, unless another one came first.
                if entry.at > previous:
                    assert held + unit_bytes > planned_bytes(self.plan.reservoir_bytes)
                previous = entry.at
            held = sum(self.held.values())
            self.deliver(episode, frame)
        for entry in entries:
            assert entry.at == 0
            assert len(block) == 0
            self.enter(entry.episode, entry.first, entry.stop)


LIMITS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@LIMITS
@given(plans())
def test_each_picture_is_decoded_once_within_the_bound(
    drawn: tuple[AnchorPlan, list[int], list[Deltas]],
) -> None:
    plan, lengths, deltas = drawn
    naive = NaiveReservoir(plan, lengths, deltas)
    resident: set[int] = set()
    admitted: list[int] = []
    seen: Counter[tuple[int, int]] = Counter()
    for block in plan:
        assert len(block) > 0
        resident |= set(block.admitted)
        admitted += block.admitted
        assert len(resident) <= plan.pool_size
        unfinished = {episode for episode in admitted if naive.left[episode]}
        assert len(unfinished) <= 2 * plan.pool_size
        assert plan.budget_bytes is None or sum(map(plan.size_of, resident)) <= plan.budget_bytes
        assert {entry.episode for entry in block.entries} <= resident
        naive.run(block)
        seen.update(anchors_of([block]))
        resident -= set(block.retired)
    assert seen == Counter((e, f) for e in range(len(lengths)) for f in plan.anchors_of(e).tolist())
    assert not resident
    assert not naive.held
    assert admitted == plan.admission_order().tolist()


@LIMITS
@given(plans())
def test_every_position_restores_the_reservoir(drawn: tuple[AnchorPlan, list[int], list[Deltas]]) -> None:
    plan, lengths, deltas = drawn
    whole = anchors_of(plan)
    for start in range(plan.num_anchors + 1):
        tail = plan.skip(start)
        naive = NaiveReservoir(plan, lengths, deltas)
        delivered = set(whole[:start])
        naive.left = {e: {f for f in left if (e, f) not in delivered} for e, left in naive.left.items()}
        for episode, anchors in tail.left.items():
            assert set(anchors.tolist()) == naive.left[episode]
        blocks = list(tail.blocks)
        admitted = [episode for block in blocks for episode in block.admitted]
        assert admitted == [*tail.resident, *tail.upcoming.tolist()]
        assert {episode for episode, _ in whole[start:]} == set(admitted)
        for block in blocks:
            naive.run(block)
        assert anchors_of(blocks) == whole[start:]


@LIMITS
@given(plans())
def test_the_rest_of_a_position_fits_pool_and_budget(
    drawn: tuple[AnchorPlan, list[int], list[Deltas]],
) -> None:
    # Episodes that had left the pool come back one by one, so that they need no bytes beside it.
    plan, _, _ = drawn
    for start in range(0, plan.num_anchors, 3):
        resident: set[int] = set()
        for block in plan.skip(start).blocks:
            resident |= set(block.admitted)
            assert len(resident) <= plan.pool_size
            assert plan.budget_bytes is None or sum(map(plan.size_of, resident)) <= plan.budget_bytes
            resident -= set(block.retired)
