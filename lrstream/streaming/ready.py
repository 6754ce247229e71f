"""Anchors that may be drawn, each with equal probability.

An anchor is one number, ``episode << 32 | frame``. Many are drawn at a time: random slots, of which those
that have been drawn before are passed over, which is the law of drawing one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lrstream.streaming.keys import RandomKeys, scale_to_ranges

__all__ = ["ReadyAnchors"]

Int64Array = npt.NDArray[np.int64]

# Slots that have been drawn are kept until they are this part of all, and so are few of those tried.
_PART_DRAWN = 8
# Of more than this part of the slots, too many would be tried twice.
_PART_TRIED = 4
_NOBODY = np.iinfo(np.int64).max


class ReadyAnchors:
    """See the module. Not thread-safe.

    Args:
        random: Source of the draws.
    """

    def __init__(self, random: RandomKeys) -> None:
        self._random = random
        self._slots = np.empty(1024, dtype=np.int64)
        # For each slot the number of the try that drew it; numbers ascend, also from call to call.
        self._drawn_by = np.full(1024, _NOBODY)
        self._num_slots = 0
        self._num_drawn = 0  # of these slots
        self._num_tries = 0

    def __len__(self) -> int:
        """Number of anchors that may be drawn."""
        return self._num_slots - self._num_drawn

    def add(self, anchors: Int64Array) -> None:
        """Let anchors join."""
        end = self._num_slots + len(anchors)
        if end > len(self._slots):
            more = max(len(self._slots), end)
            self._slots = np.concatenate([self._slots, np.empty(more, dtype=np.int64)])
            self._drawn_by = np.concatenate([self._drawn_by, np.full(more, _NOBODY)])
        self._slots[self._num_slots : end] = anchors
        self._num_slots = end

    def take(self, count: int) -> Int64Array:
        """Draw anchors one after the other.

        Args:
            count: How many at most, at least 1 and at most as many as there are. They are fewer where tries
                find what has been drawn, so that their number says nothing about which they are.

        Returns:
            int64, at least one.
        """
        if self._num_drawn * _PART_DRAWN > self._num_slots or count * _PART_TRIED > len(self):
            self._close_gaps()
        if count * _PART_TRIED > len(self):
            return self._take_by_order(count)
        size = np.uint64(self._num_slots)
        while True:
            tried = scale_to_ranges(self._random.raw(count), size)
            numbers = np.arange(self._num_tries, self._num_tries + count)
            self._num_tries += count
            drawn_by = self._drawn_by
            np.minimum.at(drawn_by, tried, numbers)
            chosen = tried[drawn_by[tried] == numbers]
            if chosen.size:
                self._num_drawn += len(chosen)
                drawn: Int64Array = self._slots[chosen]
                return drawn

    def _take_by_order(self, count: int) -> Int64Array:
        """Draw exactly `count` of slots without gaps."""
        size = self._num_slots
        slots = self._slots[:size][self._random.permutation(size)]
        self._num_slots = size - count
        self._slots[: size - count] = slots[count:]
        return slots[:count]

    def _close_gaps(self) -> None:
        """Forget the slots that have been drawn."""
        drawn_by = self._drawn_by[: self._num_slots]
        left = self._slots[: self._num_slots][drawn_by == _NOBODY]
        drawn_by.fill(_NOBODY)
        self._slots[: len(left)] = left
        self._num_slots, self._num_drawn = len(left), 0
