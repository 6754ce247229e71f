"""The strategy `gop`: whole units are decoded once, and their anchors mixed in a bounded reservoir (LD-14).

The reservoir holds decoded pictures up to a number of bytes. Whenever the next unit fits, it enters, and
its frames become *ready*; otherwise the next anchor is drawn, uniformly from all that are ready, and the
pictures that nobody needs any more are let go. The next unit is chosen before it is known whether it fits,
so that large ones are not left over: first an episode, in proportion to the frames it has not given to the
reservoir yet, then one of its units, in proportion to its anchors. An episode leaves the pool, and its
coded bytes are let go, when its last unit has entered.

Windows over pictures reach beyond their unit. Then the units of an episode enter one after the other, from
a random one on and around, an anchor is ready once all its pictures are there, and the pictures at the
open edges are kept until the neighbour has entered. So each picture is decoded once, however long the
windows are. What the edges may hold is set apart when an episode begins, so there is always room for the
next unit of one that has begun; where edges alone would fill the reservoir, fewer episodes are begun.

With a reservoir that is large enough for the pool, everything is ready at once, and this is `remaining`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from lrstream.errors import ByteBudgetError, LrstreamError
from lrstream.streaming.gop_table import GopTable, PictureGroup
from lrstream.streaming.keys import RandomKeys
from lrstream.streaming.picture_needs import PictureNeeds
from lrstream.streaming.ready import BulkDraws, SingleDraws
from lrstream.streaming.strategies import Draw, PoolStrategy, UnitEntry

__all__ = ["GopStrategy", "planned_bytes", "refuse_oversized_units"]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# First word of a random stream; those of `lrstream.streaming.pool` are lower.
_SHUFFLE_STREAM, _UNIT_STREAM, _READY_STREAM = 11, 12, 13
# Anchors drawn before it is looked again whether an episode has come to its end: so many, or where more are
# ready this part of them, but no more than the last number.
_FEW_TAKEN, _PART_TAKEN, _MOST_TAKEN = 64, 16, 512
_FRAME_MASK = 0xFFFF_FFFF


def window_reach(groups: tuple[PictureGroup, ...]) -> tuple[int, int]:
    """How far windows reach back and ahead, frames, both at least 0."""
    deltas = [0, *(delta for group in groups for delta in group.deltas)]
    return -min(deltas), max(deltas)


def planned_bytes(reservoir_bytes: int) -> int:
    """What of a reservoir the plan fills; the rest is for anchors that are still being delivered."""
    return reservoir_bytes - reservoir_bytes // 8


def refuse_oversized_units(
    table: GopTable,
    lengths: Sequence[int],
    windows: str,
    reservoir_bytes: int,
    episode_index: Sequence[int] | npt.NDArray[np.integer],
) -> None:
    """Refuse a reservoir that cannot hold the largest unit beside the open edges of an episode.

    Raises:
        ByteBudgetError: Names the episode, what it needs and the remedy.
    """
    if not len(table):
        return
    back, ahead = window_reach(table.groups(windows))
    holds = np.minimum(np.asarray(lengths), 2 * (back + ahead)) * table.picture_bytes.sum(axis=1)
    largest = int(np.argmax(holds))
    needed = largest_unit_bytes(table, lengths) + int(holds[largest])
    if needed <= planned_bytes(reservoir_bytes):
        return
    needed_bytes = -(-needed * 8 // 7)
    name = int(episode_index[largest])
    raise ByteBudgetError(
        f"The reservoir of decoded pictures is too small: the largest GOPs of this dataset, and what windows "
        f"need beside them (most in episode {name}), take {needed_bytes} bytes "
        f"({needed_bytes / 2**20:.1f} MiB), but its worker's share is {reservoir_bytes} bytes "
        f"({reservoir_bytes / 2**20:.1f} MiB).",
        hint="Use a larger reservoir_gb, fewer workers, shorter windows over pictures, or "
        "sampling_strategy='remaining'.",
        episode_index=name,
        size_bytes=needed_bytes,
        budget_bytes=reservoir_bytes,
    )


def hold_bytes(table: GopTable, episode: int, length: int, groups: tuple[PictureGroup, ...]) -> int:
    """Most bytes that open edges of an episode keep from leaving the reservoir."""
    back, ahead = window_reach(groups)
    return min(length, 2 * (back + ahead)) * int(table.picture_bytes[episode].sum())


class _Shuffled:
    """Units without windows: random order, larger ones sooner, all frames ready at once.

    Args:
        episode: Number of the episode.
        anchors: Its anchors, ascending.
        bounds: First frames of its units, and its length at the end.
        anchor_bytes: Bytes of the pictures of one anchor.
        random: Source of the order.
    """

    holds = 0

    def __init__(
        self, episode: int, anchors: Int32Array, bounds: list[int], anchor_bytes: int, random: RandomKeys
    ) -> None:
        self._bytes = anchor_bytes
        places = np.searchsorted(anchors, bounds)
        used = np.flatnonzero(np.diff(places))
        # The first frame, in a random order of all anchors, of each unit: what drawing anchors one by one
        # and taking the unit of each comes to.
        keys = np.minimum.reduceat(random.raw(len(anchors)), places[:-1][used])
        codes = anchors.astype(np.int64) | (episode << 32)
        ends = places.tolist()
        self._units = [
            ((bounds[unit], bounds[unit + 1]), codes[ends[unit] : ends[unit + 1]])
            for unit in used[np.argsort(keys, kind="stable")[::-1]].tolist()
        ]
        self.weight = len(anchors)

    @property
    def next_bytes(self) -> int:
        """Bytes of the next unit."""
        return len(self._units[-1][1]) * self._bytes

    def enter(self) -> tuple[tuple[int, int], Int64Array]:
        """The next unit's frames, and the anchors that are ready with it."""
        unit = self._units.pop()
        self.weight -= len(unit[1])
        return unit

    def enter_all(self) -> tuple[list[tuple[int, int]], list[Int64Array]]:
        """`enter` for all units that are left."""
        units = self._units[::-1]
        self._units.clear()
        self.weight = 0
        return [frames for frames, _ in units], [codes for _, codes in units]

    def release(self, frame: int) -> int:
        """Bytes that the delivery of an anchor lets go."""
        return self._bytes


class _Rotated:
    """Units under windows: one after the other, from a random one on and around.

    Args:
        episode: Number of the episode.
        anchors: Its anchors, ascending.
        bounds: First frames of its units, and its length at the end.
        groups: What anchors need, with the bytes of one picture of each group.
        holds: Bytes set apart for open edges.
        random: Source of the order.
    """

    def __init__(
        self,
        episode: int,
        anchors: Int32Array,
        bounds: list[int],
        groups: list[tuple[PictureGroup, int]],
        holds: int,
        random: RandomKeys,
    ) -> None:
        self.holds = holds
        self._length = bounds[-1]
        self._codes = (anchors.astype(np.int64) | (episode << 32)).tolist()
        self._anchors: list[int] = anchors.tolist()
        self._needs = [
            (PictureNeeds(anchors, self._length, group.deltas), size_bytes) for group, size_bytes in groups
        ]
        self._back, self._ahead = window_reach(tuple(group for group, _ in groups))
        units = list(pairwise(bounds))
        is_needed = np.zeros(self._length, dtype=np.int64)
        is_needed[anchors] = 1
        for needs, _ in self._needs:
            is_needed |= np.array(needs.counts, dtype=np.int64) > 0
        weights = np.add.reduceat(is_needed, bounds[:-1]).tolist()
        first = int(random.between(0, len(units), 1)[0])
        self._start = units[first][0]
        order = [*range(first, len(units)), *range(first)]
        # Units that nobody needs anything of are passed over.
        self._left = [(units[unit], weights[unit]) for unit in reversed(order) if weights[unit]]
        self.weight = sum(weights)
        # Anchors that are ready next, before and after the way around.
        self._upper = 0 if self._start == 0 else self._start + self._back
        self._lower = 0

    @property
    def next_bytes(self) -> int:
        """Bytes of the next unit: of its pictures that somebody needs."""
        (first, stop), _ = self._left[-1]
        return sum(
            size_bytes * sum(1 for count in needs.counts[first:stop] if count)
            for needs, size_bytes in self._needs
        )

    def enter(self) -> tuple[tuple[int, int], Int64Array]:
        """The next unit's frames, and the anchors that are ready with it."""
        unit, weight = self._left.pop()
        self.weight -= weight
        # What comes before the next unit that somebody needs is as good as there.
        following = self._left[-1][0][0] if self._left else None
        ready: list[int] = []
        if unit[0] >= self._start:
            is_around = following is None or following < self._start
            stop = self._length if is_around else (following or 0) - self._ahead
            ready += self._between(self._upper, stop)
            self._upper = max(self._upper, stop)
            if is_around and self._start:
                stop = (self._start if following is None else following) - self._ahead
                ready += self._advance_lower(stop, is_last=following is None)
        else:
            stop = (self._start if following is None else following) - self._ahead
            ready += self._advance_lower(stop, is_last=following is None)
        return unit, np.array(ready, dtype=np.int64)

    def _advance_lower(self, stop: int, *, is_last: bool) -> list[int]:
        if is_last:
            stop = min(self._start + self._back, self._length)
        ready = self._between(self._lower, stop)
        self._lower = max(self._lower, stop)
        return ready

    def _between(self, first: int, stop: int) -> list[int]:
        """Anchors among the frames [first, stop)."""
        if stop <= first:
            return []
        codes: list[int] = self._codes[bisect_left(self._anchors, first) : bisect_left(self._anchors, stop)]
        return codes

    def release(self, frame: int) -> int:
        """Bytes that the delivery of an anchor lets go."""
        return sum(size_bytes * len(needs.release(frame)) for needs, size_bytes in self._needs)


class GopStrategy(PoolStrategy):
    """See the module.

    Args:
        table: Units of the episodes.
        lengths: Frames of each.
        windows: From `format_windows`.
        capacity_bytes: Most bytes of decoded pictures. Every unit, together with what `hold_bytes` sets
            apart for its episode, must fit.
        seed_key: Names the random streams.
    """

    def __init__(
        self,
        table: GopTable,
        lengths: Sequence[int],
        *,
        windows: str,
        capacity_bytes: int,
        seed_key: Sequence[int],
    ) -> None:
        self._table = table
        self._lengths = lengths
        self._groups = table.groups(windows)
        self._is_shuffled = window_reach(self._groups) == (0, 0)
        anchor_bytes = table.picture_bytes.sum(axis=1)
        is_uniform = self._is_shuffled and (not anchor_bytes.size or anchor_bytes.min() == anchor_bytes.max())
        # Bytes that every anchor lets go; None where they differ.
        self._anchor_bytes = int(anchor_bytes.max(initial=0)) if is_uniform else None
        self._capacity = capacity_bytes
        self._shuffle = RandomKeys(_SHUFFLE_STREAM, *seed_key)
        self._unit_words = RandomKeys(_UNIT_STREAM, *seed_key).words()
        random = RandomKeys(_READY_STREAM, *seed_key)
        self._ready = SingleDraws(random) if self._anchor_bytes is None else BulkDraws(random)
        self._largest_unit = largest_unit_bytes(table, lengths)
        self._held = 0
        self._apart = 0  # for open edges of episodes that have begun
        self._episodes: dict[int, _Shuffled | _Rotated] = {}  # with anchors that are not delivered
        self._num_left = np.zeros(len(lengths), dtype=np.int64)  # anchors of each that are not delivered
        self._waiting: list[int] = []  # episodes with units that have not entered ...
        self._weights: list[int] = []  # ... and the frames in these
        self._lingering: list[int] = []  # the other ones
        self._begun: set[int] = set()  # waiting ones that hold, or may hold, open edges
        self._next: int | None = None  # place among the waiting of the episode whose unit enters next
        self._next_bytes = 0

    @property
    def num_lingering(self) -> int:
        return len(self._lingering)

    def admit(self, episode: int, frames: Int32Array) -> None:
        length = int(self._lengths[episode])
        bounds = [*self._table.units(episode).tolist(), length]
        sizes = self._table.picture_bytes[episode]
        units: _Shuffled | _Rotated
        if self._is_shuffled:
            units = _Shuffled(episode, frames, bounds, int(sizes.sum()), self._shuffle)
        else:
            groups = [(group, int(sizes[list(group.cameras)].sum())) for group in self._groups]
            holds = hold_bytes(self._table, episode, length, self._groups)
            units = _Rotated(episode, frames, bounds, groups, holds, self._shuffle)
        self._episodes[episode] = units
        self._num_left[episode] = len(frames)
        self._waiting.append(episode)
        self._weights.append(units.weight)

    def draw(self) -> Draw:
        entries: list[UnitEntry] = []
        exhausted: list[int] = []
        count = 0
        while True:
            self._fill(count, entries, exhausted)
            if not len(self._ready):
                raise LrstreamError("The reservoir has neither an anchor nor room for a unit.")
            count += self._take(is_one=bool(exhausted))
            # Without units to wait for, only the end of an episode can let another one in.
            if exhausted or not self._waiting:
                break
        drawn = self._ready.settle()
        episodes = drawn >> 32
        np.subtract.at(self._num_left, episodes, 1)
        self._drop_finished()
        return Draw(
            episodes.astype(np.int32),
            (drawn & _FRAME_MASK).astype(np.int32),
            tuple(exhausted),
            tuple(entries),
        )

    # -- units ------------------------------------------------------------------------------------

    def _fill(self, at: int, entries: list[UnitEntry], exhausted: list[int]) -> None:
        """Let units enter as long as the next one fits."""
        if self._anchor_bytes is not None and self._waiting:
            needed = self._held + sum(self._weights) * self._anchor_bytes
            if needed <= self._capacity:
                self._fill_with_all(at, entries, exhausted)
                self._held = needed
                return
        while self._waiting:
            if self._next is None:
                self._next = self._choose()
                self._next_bytes = self._episodes[self._waiting[self._next]].next_bytes
            if self._held + self._next_bytes > self._capacity:
                return
            self._held += self._next_bytes
            place, self._next = self._next, None
            episode = self._waiting[place]
            units = self._episodes[episode]
            (first, stop), ready = units.enter()
            self._ready.add(ready)
            entries.append(UnitEntry(at, episode, first, stop))
            self._weights[place] = units.weight
            if not units.weight:
                del self._waiting[place], self._weights[place]
                self._lingering.append(episode)
                if episode in self._begun:
                    self._begun.remove(episode)
                    self._apart -= units.holds
                exhausted.append(episode)

    def _fill_with_all(self, at: int, entries: list[UnitEntry], exhausted: list[int]) -> None:
        """Let all units enter: who comes first makes no difference to what is drawn."""
        for episode in self._waiting:
            units = self._episodes[episode]
            assert isinstance(units, _Shuffled)
            frames, anchors = units.enter_all()
            entries += [UnitEntry(at, episode, first, stop) for first, stop in frames]
            self._ready.add(np.concatenate(anchors))
        self._lingering += self._waiting
        exhausted += self._waiting
        self._waiting.clear()
        self._weights.clear()
        self._next = None

    def _choose(self) -> int:
        """Place of an episode that has units left, in proportion to its frames in them."""
        weights = self._weights
        if not self._is_shuffled:
            room = self._capacity - self._largest_unit - self._apart
            weights = [
                weight if episode in self._begun or self._episodes[episode].holds <= room else 0
                for episode, weight in zip(self._waiting, weights, strict=True)
            ]
        totals = list(accumulate(weights))
        place = bisect_right(totals, next(self._unit_words) * totals[-1] >> 64)
        if not self._is_shuffled and self._waiting[place] not in self._begun:
            self._begun.add(self._waiting[place])
            self._apart += self._episodes[self._waiting[place]].holds
        return place

    # -- anchors ----------------------------------------------------------------------------------

    def _take(self, *, is_one: bool) -> int:
        """Draw anchors until the next unit fits; one at least and `_MOST_TAKEN` at most, or just one."""
        ready = self._ready
        most = 1 if is_one else min(len(ready), _MOST_TAKEN, max(_FEW_TAKEN, len(ready) // _PART_TAKEN))
        limit = -1 if self._next is None else self._capacity - self._next_bytes
        if isinstance(ready, BulkDraws):
            anchor_bytes = self._anchor_bytes or 0
            if self._next is not None:  # then it does not fit, and anchors have bytes
                most = min(most, -(-(self._held - limit) // anchor_bytes))
            ready.take(most)
            self._held -= most * anchor_bytes
            return most
        taken = 0
        while taken < most and (not taken or self._held > limit):
            code = ready.pop()
            self._held -= self._episodes[code >> 32].release(code & _FRAME_MASK)
            taken += 1
        return taken

    def _drop_finished(self) -> None:
        """Forget episodes without anchors left."""
        left = self._num_left
        for episode in [episode for episode in self._lingering if not left[episode]]:
            self._lingering.remove(episode)
            del self._episodes[episode]


def largest_unit_bytes(table: GopTable, lengths: Sequence[int]) -> int:
    """Bytes of the largest unit of all episodes, all its frames."""
    if not len(table):
        return 0
    ends = np.append(table.starts[1:], 0)
    ends[table.offsets[1:] - 1] = np.asarray(lengths)
    frames = np.maximum.reduceat(ends - table.starts, table.offsets[:-1])
    return int((frames * table.picture_bytes.sum(axis=1)).max())
