"""What the planner knows of units before the first of them enters.

All of it is computed when an episode is about to be admitted, and for many episodes at once: pictures of a
unit that has not entered cannot have been let go, so neither its bytes nor the anchors that become ready
with it depend on what is drawn. *Places* of frames and units here count through all episodes of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lrstream.streaming.clocks import Waits
from lrstream.streaming.gop_table import GopTable
from lrstream.streaming.picture_needs import needed_frames

__all__ = [
    "BYTES",
    "EPISODE",
    "FIRST",
    "IS_LAST",
    "NUM_ROWS",
    "READY_FIRST",
    "READY_STOP",
    "STOP",
    "EpisodeBlock",
    "EpisodeUnits",
    "rotated_units",
    "shuffled_units",
]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

# Rows of `EpisodeUnits.table`.
EPISODE, FIRST, STOP, BYTES, READY_FIRST, READY_STOP, IS_LAST = range(7)
NUM_ROWS = 7
# Sorting numbers of 16 bits takes a fraction of the time.
_SHORT = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeUnits:
    """Those units of one episode that somebody needs something of, in no particular order.

    Attributes:
        times: float64[n >= 1], when each enters, from the time at which the episode joins.
        table: int64[7, n]: the episode; first frame of each unit and the end of its frames, excluded; bytes
            of its pictures that somebody needs; range in `codes` of the anchors that become ready with it;
            1 for the one that enters last, else 0.
        codes: int64, anchors as ``episode << 32 | frame``.
        needs: For each group of cameras, how often each frame is needed, int64; nothing without windows.
    """

    times: Float64Array
    table: Int64Array
    codes: Int64Array
    needs: tuple[Int64Array, ...]


class EpisodeBlock:
    """Some episodes one after the other.

    Args:
        table: Units of all episodes.
        lengths: int64[n], frames of all episodes.
        episodes: Those of the block, at least one.
        anchors: Anchors of each of them, ascending, at least one.
    """

    def __init__(
        self, table: GopTable, lengths: Int64Array, episodes: Sequence[int], anchors: Sequence[Int32Array]
    ) -> None:
        self.episodes = np.array(episodes, dtype=np.int64)
        self.lengths = lengths[self.episodes]
        self.frame_ends = self.lengths.cumsum()
        """Places of the ends of the episodes."""
        frame_bases = self.frame_ends - self.lengths
        self.anchors = np.concatenate(anchors).astype(np.int64)
        num_anchors = [len(frames) for frames in anchors]
        self.anchor_first = np.repeat(frame_bases, num_anchors)
        """Place of the first frame of each anchor's episode."""
        self.anchor_last = np.repeat(self.frame_ends - 1, num_anchors)
        """Place of the last frame of each anchor's episode."""
        self.codes = self.anchors | np.repeat(self.episodes << 32, num_anchors)
        self.anchors += self.anchor_first  # as places

        first = table.offsets[self.episodes]
        self.num_units = table.offsets[self.episodes + 1] - first
        self.unit_ends = self.num_units.cumsum()
        self.unit_bases = self.unit_ends - self.num_units
        self.number = np.repeat(np.arange(len(episodes)), self.num_units)
        """Number in the block of each unit's episode."""
        places = np.arange(self.unit_ends[-1]) + np.repeat(first - self.unit_bases, self.num_units)
        self.frame_bases = frame_bases[self.number]
        """Place of the first frame of each unit's episode."""
        self.starts = table.starts[places] + self.frame_bases
        """Places of the first frames of all units."""
        self.stops = np.append(self.starts[1:], self.frame_ends[-1])

    def split(
        self,
        units: Int64Array,
        unit_bytes: Int64Array,
        ready_bounds: Int64Array,
        codes: Int64Array,
        times: Float64Array,
        lasts: Int64Array,
        needs: Sequence[Int64Array],
    ) -> list[EpisodeUnits]:
        """The units of each episode.

        Args:
            units: int64[n], places of the units that are used, episode after episode.
            unit_bytes: int64[n], bytes of each.
            ready_bounds: int64[n + 1], where their anchors begin in `codes`, and the end.
            codes: Anchors, unit after unit.
            times: float64[n].
            lasts: For each episode the number in `units` of the one that enters last.
            needs: For each group of cameras how often each frame is needed.
        """
        table = np.zeros((NUM_ROWS, len(units)), dtype=np.int64)
        number = self.number[units]
        table[EPISODE] = self.episodes[number]
        np.subtract(self.starts[units], self.frame_bases[units], out=table[FIRST])
        np.subtract(self.stops[units], self.frame_bases[units], out=table[STOP])
        table[BYTES] = unit_bytes
        table[READY_FIRST] = ready_bounds[:-1]
        table[READY_STOP] = ready_bounds[1:]
        table[IS_LAST, lasts] = 1
        ends = np.searchsorted(number, np.arange(len(self.episodes)), side="right").tolist()
        found = []
        start = first = 0
        for end, last in zip(ends, self.frame_ends.tolist(), strict=True):
            found.append(
                EpisodeUnits(
                    times[start:end],
                    table[:, start:end],
                    codes,
                    tuple(counts[first:last] for counts in needs),
                )
            )
            start, first = end, last
        return found


def shuffled_units(block: EpisodeBlock, anchor_bytes: Int64Array, waits: Waits) -> list[EpisodeUnits]:
    """Units without windows: in any order, each chosen in proportion to its anchors, which are ready at once.

    Args:
        block: The episodes.
        anchor_bytes: Bytes of the pictures of one anchor, for all episodes.
        waits: Source of the order.
    """
    ready_firsts = np.searchsorted(block.anchors, block.starts)
    counts = np.diff(ready_firsts, append=len(block.anchors))
    units = counts.nonzero()[0]
    counts = counts[units]
    # Units without anchors begin where the next one does.
    ready_bounds = np.append(ready_firsts[units], len(block.anchors))
    number = block.number[units]
    times = waits.take(len(units)) / counts
    firsts = np.searchsorted(number, np.arange(len(block.episodes)))
    # Of equal times the later one comes last.
    is_latest = times == np.maximum.reduceat(times, firsts)[number]
    latest = is_latest.nonzero()[0]
    lasts = latest[np.searchsorted(number[latest], np.arange(len(block.episodes)), side="right") - 1]
    unit_bytes = counts * anchor_bytes[block.episodes][number]
    return block.split(units, unit_bytes, ready_bounds, block.codes, times, lasts, ())


def rotated_units(
    block: EpisodeBlock,
    deltas: Sequence[Int64Array],
    picture_bytes: Sequence[Int64Array],
    first_units: Int64Array,
    waits: Waits,
) -> list[EpisodeUnits]:
    """Units under windows: those of an episode one after the other, from a given one on and around.

    An episode is chosen in proportion to the frames of its units that are left, and an anchor is ready with
    the last of the units that its pictures are in.

    Args:
        block: The episodes.
        deltas: For each group of cameras the frames that an anchor needs, relative to it.
        picture_bytes: For each group bytes of one picture, for all episodes.
        first_units: For each episode of the block the number of its first unit.
        waits: Source of the order.
    """
    num_frames, num_units = int(block.frame_ends[-1]), len(block.starts)
    # Places of units on the way around: of each, and of the one that each frame is in.
    places = (
        block.unit_bases[block.number]
        + (np.arange(num_units) - (block.unit_bases + first_units)[block.number])
        % block.num_units[block.number]
    )
    place_of_frame = np.repeat(places, block.stops - block.starts)

    needs = []
    is_used = np.zeros(num_frames, dtype=bool)
    is_used[block.anchors] = True  # also where there is no camera
    ready_with = place_of_frame[block.anchors]
    unit_bytes = np.zeros(num_units, dtype=np.int64)
    for deltas_of_group, size in zip(deltas, picture_bytes, strict=True):
        counts = np.zeros(num_frames, dtype=np.int64)
        for needed in needed_frames(block.anchors, block.anchor_first, block.anchor_last, deltas_of_group):
            counts += np.bincount(needed, minlength=num_frames)
            np.maximum(ready_with, place_of_frame[needed], out=ready_with)
        needs.append(counts)
        is_needed = counts > 0
        is_used |= is_needed
        num_needed = np.add.reduceat(is_needed, block.starts, dtype=np.int64)
        unit_bytes += num_needed * size[block.episodes][block.number]

    order = np.empty(num_units, dtype=np.int64)
    order[places] = np.arange(num_units)
    weights = np.add.reduceat(is_used, block.starts, dtype=np.int64)[order]
    ends = np.append(0, np.bincount(ready_with, minlength=num_units).cumsum())
    by_unit = np.argsort(ready_with.astype(np.uint16) if num_units < _SHORT else ready_with, kind="stable")

    # Units that nobody needs anything of are passed over; no anchor is ready with them.
    used = weights.nonzero()[0]
    units, weights = order[used], weights[used]
    number = block.number[units]
    last_of = np.searchsorted(number, np.arange(len(block.episodes)), side="right") - 1
    sums = weights.cumsum()
    left = sums[last_of][number] - sums + weights
    # One after the other, hence the same everywhere.
    times = (waits.take(len(units)) / left).cumsum()
    times -= np.append(0.0, times[last_of[:-1]])[number]
    ready_bounds = np.append(ends[used], len(block.anchors))
    return block.split(units, unit_bytes[units], ready_bounds, block.codes[by_unit], times, last_of, needs)
