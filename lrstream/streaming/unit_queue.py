"""Units in the order in which they enter the reservoir.

Each has a time (`lrstream.streaming.clocks`), and the next one is that with the least. It is chosen when the
one before it enters, so whoever joins later comes after it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lrstream.streaming.gop_units import BYTES, NUM_ROWS, EpisodeUnits

__all__ = ["UnitQueue"]

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


class UnitQueue:
    """See the module. Not thread-safe."""

    def __init__(self) -> None:
        self._now = 0.0  # time of the next unit, or where there is none, of the last one that entered
        self._times: Float64Array = np.empty(0)
        self._table = np.empty((NUM_ROWS, 0), dtype=np.int64)
        self._ends = np.empty(0, dtype=np.int64)  # bytes of all units up to and including each
        self._place = 0  # of the next unit
        self._joining: list[EpisodeUnits] = []
        self.next_bytes = 0
        """Bytes of the next unit; 0 where none has been chosen yet."""

    def add(self, units: EpisodeUnits) -> None:
        """Let all units of an episode join."""
        self._joining.append(units)

    def next_units(self, room: int) -> tuple[Int64Array, Int64Array]:
        """The next units as far as they fit, without taking them out.

        Args:
            room: Bytes.

        Returns:
            Their columns as in `EpisodeUnits.table`, int64[7, n], and the bytes of all up to and including
            each, int64[n].
        """
        if self._joining:
            self._merge()
        place = self._place
        before = int(self._ends[place - 1]) if place else 0
        stop = int(self._ends.searchsorted(before + room, side="right"))
        return self._table[:, place:stop], self._ends[place:stop] - before

    def take(self, count: int) -> None:
        """Take out as many of the units that `next_units` gave, at least one."""
        self._place += count
        self._choose()

    def _merge(self) -> None:
        """Let those that have joined take their places."""
        place = self._place
        times = np.concatenate([self._times[place:], *(units.times + self._now for units in self._joining)])
        table = np.concatenate([self._table[:, place:], *(units.table for units in self._joining)], axis=1)
        order = times.argsort(kind="stable")
        self._times, self._table = times[order], table.take(order, axis=1)
        self._ends = self._table[BYTES].cumsum()
        self._place = 0
        self._joining.clear()
        self._choose()

    def _choose(self) -> None:
        place = self._place
        is_left = place < len(self._times)
        self._now = float(self._times[place if is_left else place - 1])
        self.next_bytes = int(self._table[BYTES, place]) if is_left else 0
