"""The strategy `gop`: whole units are decoded once, and their anchors mixed in a bounded reservoir (LD-14).

The reservoir holds decoded pictures up to a number of bytes. As soon as the next unit fits, it enters;
pictures that nobody needs any more are let go as anchors are delivered. Anchors are drawn some at a time,
uniformly from all that are *ready*, and those of the units that enter meanwhile join them for the next
ones. The next unit is chosen before it is known whether it fits, so that large ones are not left over:
first an episode, in proportion to the frames it has not given to the reservoir yet, then one of its units,
in proportion to its anchors. An episode leaves the pool, and its coded bytes are let go, when its last unit
has entered.

Windows over pictures reach beyond their unit. Then the units of an episode enter one after the other, from
a random one on and around, an anchor is ready once all its pictures are there, and the pictures at the
open edges are kept until the neighbour has entered. So each picture is decoded once, however long the
windows are. What the edges may hold is set apart before an episode begins, so there is always room for the
next unit of one that has begun; where edges alone would fill the reservoir, fewer episodes are begun.

With a reservoir that is large enough for the pool, everything is ready at once, and this is `remaining`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress

import numpy as np
import numpy.typing as npt

from lrstream.errors import ByteBudgetError, LrstreamError
from lrstream.streaming.clocks import Waits
from lrstream.streaming.gop_table import GopTable, PictureGroup
from lrstream.streaming.gop_units import (
    IS_LAST,
    EpisodeBlock,
    EpisodeUnits,
    rotated_units,
    shuffled_units,
)
from lrstream.streaming.keys import RandomKeys, scale_to_ranges
from lrstream.streaming.picture_needs import NeedTable
from lrstream.streaming.ready import ReadyAnchors
from lrstream.streaming.strategies import Draw, PoolStrategy, UnitEntry
from lrstream.streaming.unit_queue import UnitQueue

__all__ = ["GopStrategy", "planned_bytes", "refuse_oversized_units"]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# First word of a random stream; those of `lrstream.streaming.pool` are lower.
_FIRST_STREAM, _UNIT_STREAM, _READY_STREAM = 11, 12, 13
# Anchors drawn at once, at most: the first part of those that are ready, or the least number where that is
# more, but never more than the last part. Where no unit waits, all that can come is the end of an episode,
# and the last part is drawn.
_FIRST_PART, _LEAST_TAKEN, _LAST_PART, _MOST_TAKEN = 8, 64, 4, 1024
# Needs of the anchors of episodes that are prepared at once, or a little more.
_PREPARED = 1 << 16
_FRAME_MASK = 0xFFFF_FFFF
# `UnitEntry._make`, without a call of Python for each of many.
_unit_entry = partial(tuple.__new__, UnitEntry)
_AT_ONCE = np.zeros(1, dtype=np.int64)


def window_reach(groups: tuple[PictureGroup, ...]) -> tuple[int, int]:
    """How far windows reach back and ahead, frames, both at least 0."""
    deltas = [0, *(delta for group in groups for delta in group.deltas)]
    return -min(deltas), max(deltas)


def planned_bytes(reservoir_bytes: int) -> int:
    """What of a reservoir the plan fills; the rest is for anchors that are still being delivered."""
    return reservoir_bytes - reservoir_bytes // 8


def refuse_oversized_units(
    table: GopTable,
    lengths: Int64Array,
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
    holds = hold_bytes(table, lengths, windows)
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


def hold_bytes(table: GopTable, lengths: Int64Array, windows: str) -> Int64Array:
    """Most bytes that open edges of each episode keep from leaving the reservoir, int64[n]."""
    back, ahead = window_reach(table.groups(windows))
    holds: Int64Array = np.minimum(lengths, 2 * (back + ahead)) * table.picture_bytes.sum(axis=1)
    return holds


class GopStrategy(PoolStrategy):
    """See the module.

    Args:
        table: Units of the episodes.
        lengths: int64[n], frames of each.
        windows: From `format_windows`.
        capacity_bytes: Most bytes of decoded pictures. Every unit, together with what `hold_bytes` sets
            apart for its episode, must fit.
        seed_key: Names the random streams.
        order: Episodes in the order in which they are admitted.
        anchors_of: Anchors of each, int32, ascending, at least one.
    """

    def __init__(
        self,
        table: GopTable,
        lengths: Int64Array,
        *,
        windows: str,
        capacity_bytes: int,
        seed_key: Sequence[int],
        order: Iterable[int],
        anchors_of: Callable[[int], Int32Array],
    ) -> None:
        self._table = table
        self._lengths = lengths
        self._holds = hold_bytes(table, lengths, windows)
        groups = table.groups(windows)
        self._deltas = [np.array(group.deltas, dtype=np.int64) for group in groups]
        # Bytes of one picture of each group, and of all pictures that an anchor has without windows.
        self._group_bytes = [table.picture_bytes[:, list(group.cameras)].sum(axis=1) for group in groups]
        self._anchor_bytes = table.picture_bytes.sum(axis=1)
        self._needs: list[NeedTable] | None = None
        if window_reach(groups) != (0, 0):
            self._needs = [NeedTable(deltas, lengths) for deltas in self._deltas]
        self._capacity = capacity_bytes
        # For open edges, so that the next unit of every episode that has begun always fits.
        self._most_apart = capacity_bytes - largest_unit_bytes(table, lengths)
        self._held = 0
        self._apart = 0
        self._first_units = RandomKeys(_FIRST_STREAM, *seed_key)
        self._waits = Waits(RandomKeys(_UNIT_STREAM, *seed_key))
        self._queue = UnitQueue()
        self._ready = ReadyAnchors(RandomKeys(_READY_STREAM, *seed_key))
        self._order = iter(order)
        self._anchors_of = anchors_of
        self._prepared: dict[int, EpisodeUnits] = {}  # episodes that are admitted next
        self._num_left = np.zeros(len(lengths), dtype=np.int64)  # anchors of each that are not delivered
        self._unopened: deque[tuple[int, EpisodeUnits]] = deque()  # whose edges there is no room for yet
        self._open: dict[int, EpisodeUnits] = {}  # episodes with units that have not entered
        self._lingering: list[int] = []  # episodes whose units have all entered

    @property
    def num_lingering(self) -> int:
        return len(self._lingering)

    def admit(self, episode: int, frames: Int32Array) -> None:
        if not self._prepared:
            self._prepare()
        units = self._prepared.pop(episode)
        for needs, counts in zip(self._needs or (), units.needs, strict=True):
            needs.add(episode, counts)
        self._num_left[episode] = len(frames)
        self._unopened.append((episode, units))

    def _prepare(self) -> None:
        """Find the units of the episodes that are admitted next."""
        num_needs = sum(map(len, self._deltas)) + 1
        episodes: list[int] = []
        anchors: list[Int32Array] = []
        size = 0
        while size < _PREPARED and (episode := next(self._order, None)) is not None:
            episodes.append(episode)
            anchors.append(self._anchors_of(episode))
            size += len(anchors[-1]) * num_needs
        block = EpisodeBlock(self._table, self._lengths, episodes, anchors)
        if self._needs is None:
            units = shuffled_units(block, self._anchor_bytes, self._waits)
        else:
            words = self._first_units.raw(len(episodes))
            firsts = scale_to_ranges(words, block.num_units.astype(np.uint64))
            units = rotated_units(block, self._deltas, self._group_bytes, firsts, self._waits)
        self._prepared = dict(zip(episodes, units, strict=True))

    def draw(self) -> Draw:
        entries: list[UnitEntry] = []
        exhausted: list[int] = []
        chunks: list[Int64Array] = []
        count = 0
        self._open_episodes()
        while True:
            # Also what has come to fit with the last anchor drawn, since the next one is here.
            if self._open and self._held + self._queue.next_bytes <= self._capacity:
                self._enter(count, _AT_ONCE, entries, exhausted)
            if not len(self._ready):
                raise LrstreamError("The reservoir has neither an anchor nor room for a unit.")
            drawn = self._ready.take(self._num_to_draw())
            chunks.append(drawn)
            # Bytes that have been let go before each anchor, and in the end.
            freed = np.zeros(len(drawn) + 1, dtype=np.int64)
            self._release(drawn).cumsum(out=freed[1:])
            if self._open and self._held + self._queue.next_bytes - int(freed[-2]) <= self._capacity:
                self._enter(count, freed[:-1], entries, exhausted)
            self._held -= int(freed[-1])
            count += len(drawn)
            # Without units to wait for, only the end of an episode can let another one in.
            if exhausted or not self._open:
                break
        drawn = np.concatenate(chunks)
        episodes = drawn >> 32
        np.subtract.at(self._num_left, episodes, 1)
        for episode in set(episodes[self._num_left[episodes] == 0].tolist()):
            self._lingering.remove(episode)
            for needs in self._needs or ():
                needs.remove(episode)
        return Draw(
            episodes.astype(np.int32),
            (drawn & _FRAME_MASK).astype(np.int32),
            tuple(exhausted),
            tuple(entries),
        )

    # -- units ------------------------------------------------------------------------------------

    def _enter(self, at: int, freed: Int64Array, entries: list[UnitEntry], exhausted: list[int]) -> None:
        """Let units enter as long as the next one fits.

        Args:
            at: Place in the draw at which this begins.
            freed: int64[n], bytes let go before that place and before each of the following ones.
            entries: Gets the units.
            exhausted: Gets the episodes whose last unit is among them.
        """
        while True:
            room = self._capacity - self._held
            units, ends = self._queue.next_units(room + int(freed[-1]))
            if self._unopened:
                # Others may begin after the last one of an episode.
                stop = int(units[IS_LAST].argmax()) + 1 if units[IS_LAST].any() else len(ends)
                units, ends = units[:, :stop], ends[:stop]
            if not ends.size:
                return
            self._queue.take(len(ends))
            self._held += int(ends[-1])
            places = freed.searchsorted(ends - room)
            places += at
            numbers, firsts, stops, _, ready_firsts, ready_stops, are_last = units.tolist()
            entries += map(_unit_entry, zip(places.tolist(), numbers, firsts, stops, strict=True))
            episodes = self._open
            ready = [
                episodes[number].codes[first:stop]
                for number, first, stop in zip(numbers, ready_firsts, ready_stops, strict=True)
            ]
            self._ready.add(np.concatenate(ready) if len(ready) > 1 else ready[0])
            if 1 not in are_last:
                return
            for number in compress(numbers, are_last):
                del self._open[number]
                self._apart -= int(self._holds[number])
                self._lingering.append(number)
                exhausted.append(number)
            if not self._unopened:
                return
            self._open_episodes()

    def _open_episodes(self) -> None:
        """Let episodes begin, in their order, as long as what their edges may hold can be set apart."""
        while self._unopened:
            episode, units = self._unopened[0]
            apart = self._apart + int(self._holds[episode])
            if apart > self._most_apart:
                return
            self._unopened.popleft()
            self._apart = apart
            self._open[episode] = units
            self._queue.add(units)

    # -- anchors ----------------------------------------------------------------------------------

    def _num_to_draw(self) -> int:
        """How many anchors are drawn before what has entered meanwhile takes part."""
        num_ready = len(self._ready)
        last_part = num_ready // _LAST_PART
        if self._open:
            return max(1, min(last_part, max(_LEAST_TAKEN, min(num_ready // _FIRST_PART, _MOST_TAKEN))))
        return min(num_ready, max(_LEAST_TAKEN, min(last_part, _MOST_TAKEN)))

    def _release(self, drawn: Int64Array) -> Int64Array:
        """Bytes that the delivery of each anchor lets go, int64."""
        episodes = drawn >> 32
        if self._needs is None:
            anchor_bytes: Int64Array = self._anchor_bytes[episodes]
            return anchor_bytes
        frames = drawn & _FRAME_MASK
        released = np.zeros(len(episodes), dtype=np.int64)
        for needs, size_bytes in zip(self._needs, self._group_bytes, strict=True):
            released += needs.release(episodes, frames) * size_bytes[episodes]
        return released


def largest_unit_bytes(table: GopTable, lengths: Int64Array) -> int:
    """Bytes of the largest unit of all episodes, all its frames."""
    if not len(table):
        return 0
    ends = np.append(table.starts[1:], 0)
    ends[table.offsets[1:] - 1] = lengths
    frames = np.maximum.reduceat(ends - table.starts, table.offsets[:-1])
    return int((frames * table.picture_bytes.sum(axis=1)).max())
