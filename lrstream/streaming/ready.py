"""Anchors that may be drawn, each with equal probability; more may join between any two draws.

An anchor is one number, ``episode << 32 | frame``. Where a plan needs to know only how many are drawn, the
draws are resolved many at a time: each is a random slot among those that exist by then, and where that was
drawn before, another random slot, which is the law of drawing one by one.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from lrstream.streaming.keys import RandomKeys

__all__ = ["BulkDraws", "SingleDraws"]

Int64Array = npt.NDArray[np.int64]

# Draws that are always worth waiting for, before they are resolved together.
_FEW_PENDING = 64
# The share of a slot among n is right within n / 2**32 of it.
_WORD_BITS = 32
_HALF_BITS = np.uint64(_WORD_BITS)
_NOBODY = np.iinfo(np.int64).max


class BulkDraws:
    """Draws whose results are not needed before `settle`.

    Args:
        random: Source of the draws.
    """

    def __init__(self, random: RandomKeys) -> None:
        self._random = random
        self._words = random.words(_WORD_BITS)
        self._slots = np.empty(1024, dtype=np.int64)
        # For each slot the pending draw that it is given to, while draws are resolved.
        self._drawn_by = np.full(1024, _NOBODY)
        self._num_slots = 0
        self._num_pending = 0
        self._pending: list[tuple[int, int]] = []  # draws, and slots at that time
        self._settled: list[Int64Array] = []

    def __len__(self) -> int:
        """Number of anchors that may be drawn."""
        return self._num_slots - self._num_pending

    def add(self, anchors: Int64Array) -> None:
        """Let anchors join."""
        end = self._num_slots + len(anchors)
        if end > len(self._slots):
            more = max(len(self._slots), end)
            self._slots = np.concatenate([self._slots, np.empty(more, dtype=np.int64)])
            self._drawn_by = np.concatenate([self._drawn_by, np.full(more, _NOBODY)])
        self._slots[self._num_slots : end] = anchors
        self._num_slots = end

    def take(self, count: int) -> None:
        """Draw `count` anchors, at most as many as there are."""
        self._pending.append((count, self._num_slots))
        self._num_pending += count
        # Slots that are given away must stay fewer than the others, or most tries would find one of them.
        if self._num_pending > _FEW_PENDING and 4 * self._num_pending > self._num_slots:
            self._resolve()

    def settle(self) -> Int64Array:
        """What was drawn since the last call, in order."""
        self._resolve()
        settled, self._settled = self._settled, []
        return settled[0] if len(settled) == 1 else np.concatenate([np.empty(0, dtype=np.int64), *settled])

    def _resolve(self) -> None:
        count, size = self._num_pending, self._num_slots
        if not count:
            return
        counts, sizes = zip(*self._pending, strict=True)
        ranges = np.repeat(np.array(sizes, dtype=np.uint64), counts)
        chosen = ((self._random.raw(count) >> _HALF_BITS) * ranges >> _HALF_BITS).astype(np.int64)
        numbers = np.arange(count)
        drawn_by = self._drawn_by
        drawn_by[chosen[::-1]] = numbers[::-1]  # of several draws of one slot the first one stays
        again = np.flatnonzero(drawn_by[chosen] != numbers).tolist()
        if again:
            self._draw_again(again, chosen, ranges)
        self._settled.append(self._slots[chosen])
        drawn_by[chosen] = _NOBODY
        # The last slots move to where others were drawn.
        left = size - count
        is_left = np.ones(count, dtype=bool)
        is_left[chosen[chosen >= left] - left] = False
        self._slots[chosen[chosen < left]] = self._slots[left:size][is_left]
        self._num_slots, self._num_pending = left, 0
        self._pending.clear()

    def _draw_again(self, again: list[int], chosen: Int64Array, ranges: npt.NDArray[np.uint64]) -> None:
        """Give other slots to draws whose slot was drawn earlier, in their order."""
        drawn_by, words = self._drawn_by, self._words
        heapify(again)
        while again:
            number = heappop(again)
            size = int(ranges[number])
            while True:
                slot = next(words) * size >> _WORD_BITS
                owner = int(drawn_by[slot])
                if owner > number:
                    break
            drawn_by[slot] = number
            chosen[number] = slot
            if owner != _NOBODY:  # a later draw, which now finds it gone
                heappush(again, owner)


class SingleDraws:
    """Draws one after the other, for plans in which it matters at once what was drawn.

    Args:
        random: Source of the draws.
    """

    def __init__(self, random: RandomKeys) -> None:
        self._words = random.words(_WORD_BITS)
        self._ready: list[int] = []  # in random order; the last one is next
        self._drawn: list[int] = []

    def __len__(self) -> int:
        """Number of anchors that may be drawn."""
        return len(self._ready)

    def add(self, anchors: Int64Array) -> None:
        """Let anchors join: each gets a random place, so that all orders remain equally likely."""
        ready, words = self._ready, self._words
        size = len(ready)
        ready += anchors.tolist()
        for last in range(size, len(ready)):
            place = next(words) * (last + 1) >> _WORD_BITS
            ready[last], ready[place] = ready[place], ready[last]

    def pop(self) -> int:
        """Draw an anchor."""
        anchor = self._ready.pop()
        self._drawn.append(anchor)
        return anchor

    def settle(self) -> Int64Array:
        """What was drawn since the last call, in order."""
        drawn = np.array(self._drawn, dtype=np.int64)
        self._drawn.clear()
        return drawn
