"""The order of anchors in one epoch of one stream, and when episodes enter and leave the pool.

`AnchorPlan` is a pure function of its arguments: the loader, resume, the budget inspector and the epoch
simulation all run the same plan (LD-2, LD-3, LD-5, LD-6, LD-10). Episodes are numbered by their place in
the stream's share, 0 to n-1; which episodes of the dataset these are is known to the caller.

Episodes are admitted in a random order, first in first out: the next one enters as soon as the pool has
a place and, with a byte budget, room for its exact size. Nobody is skipped to fit a smaller one in, so
the order is known in advance (prefetch follows it) and large episodes are not left over. Since sizes are
exact before any payload is read, what is planned here can be carried out without waiting in a circle:
an admission waits only for bytes of episodes that are exhausted already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from lrstream.errors import LrstreamError, UsageError
from lrstream.streaming.budget import oversized_episode_error
from lrstream.streaming.gop_strategy import GopStrategy, planned_bytes, refuse_oversized_units
from lrstream.streaming.gop_table import GopTable
from lrstream.streaming.keys import RandomKeys
from lrstream.streaming.strategies import (
    PoolStrategy,
    SamplingStrategy,
    UnitEntry,
    check_strategy,
    make_strategy,
)

__all__ = ["AnchorPlan", "PlanBlock", "PlanTail", "episodes_per_batch", "peak_resident_bytes"]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# First word of a random stream, so that streams for different purposes never coincide.
_ADMISSION_STREAM = 1
_ANCHOR_STREAM = 2


@dataclass(frozen=True, slots=True, eq=False)
class PlanBlock:
    """Consecutive anchors between two changes of the pool.

    Attributes:
        episode: int32[k >= 1], place of each anchor's episode in the share.
        frame: int32[k], frame of each anchor in its episode.
        admitted: Episodes that become resident before the first anchor, in order of admission.
        retired: Episodes whose bytes nobody needs after this block: they have no anchor left, or, where
            units are decoded ahead (strategy `gop`), no unit.
        entries: Units that are decoded in this block, in order; only with strategy `gop`.

    Only the blocks that restore a reservoir (`PlanTail`) may be without an anchor.
    """

    episode: Int32Array
    frame: Int32Array
    admitted: tuple[int, ...]
    retired: tuple[int, ...]
    entries: tuple[UnitEntry, ...] = ()

    def __len__(self) -> int:
        return len(self.episode)


@dataclass(frozen=True, slots=True, eq=False)
class PlanTail:
    """A plan from some anchor on.

    Attributes:
        resident: Episodes in the pool when the first remaining anchor is drawn, in order of admission.
        upcoming: int32, episodes still to be admitted after these, in order.
        blocks: The remaining blocks; the first one lists all of `resident` as admitted, so that a
            consumer needs no case of its own for a resumed epoch. To be iterated once.
            With strategy `gop`, blocks without anchors come before it: they decode again what of earlier
            units is still to be delivered, of episodes that had left the pool.
        left: With strategy `gop`, the anchors still to be delivered of all episodes in those blocks and
            the first one, int32, ascending; of others, all are.
    """

    resident: tuple[int, ...]
    upcoming: Int32Array
    blocks: Iterator[PlanBlock]
    left: Mapping[int, Int32Array] = field(default_factory=dict)


class AnchorPlan:
    """Plan of one epoch of one stream (one worker of one rank).

    Args:
        lengths: int[n], frames per episode of the share; may be empty.
        pool_size: Most episodes resident at one time, at least 1.
        strategy: One of `SAMPLING_STRATEGIES`.
        seed_key: Integers in [0, 2**64) that name the stream: seed, epoch, rank, worker, ...
        sizes: int[n], exact bytes of each episode, or None if unknown.
        budget_bytes: Most bytes resident at one time, or None for no limit; needs `sizes`.
        frames: For each episode the frames that are anchors (int, distinct, within the length), or None
            for all frames. An episode without anchors is never admitted.
        episode_index: int[n], the episodes' names in the dataset, for error messages.
        gops: Units of the episodes, for strategy `gop`; None = each is one unit and has no pictures.
        reservoir_bytes: Most bytes of decoded pictures that strategy `gop` keeps.
        picture_windows: Windows over pictures, from `format_windows`; for strategy `gop`.

    Raises:
        ByteBudgetError: An episode is larger than the whole budget, or a unit than the reservoir.
        UsageError: Any other argument cannot work.

    Iterating gives the blocks from the start, as often as wanted. Immutable, safe to share.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        pool_size: int,
        strategy: SamplingStrategy,
        seed_key: Sequence[int],
        sizes: npt.ArrayLike | None = None,
        budget_bytes: int | None = None,
        frames: Sequence[npt.NDArray[np.integer]] | None = None,
        episode_index: Sequence[int] | Int64Array | None = None,
        gops: GopTable | None = None,
        reservoir_bytes: int = 0,
        picture_windows: str = "",
    ) -> None:
        counts = np.asarray(lengths, dtype=np.int64)
        if pool_size < 1:
            raise UsageError(f"The episode pool size is {pool_size}, expected at least 1.")
        if budget_bytes is not None and sizes is None:
            raise UsageError("A byte budget needs the byte size of every episode, but no sizes were given.")
        if counts.ndim != 1 or (counts.size and int(counts.min()) < 0):
            raise UsageError("Episode lengths must be one-dimensional and not negative.")
        check_strategy(strategy)
        self.pool_size = pool_size
        self.strategy: SamplingStrategy = strategy
        self.budget_bytes = budget_bytes
        self._lengths = counts
        self._sizes = None if sizes is None else np.asarray(sizes, dtype=np.int64)
        self._seed_key = tuple(int(value) for value in seed_key)
        self._names = np.arange(len(counts)) if episode_index is None else np.asarray(episode_index)
        self.gops = GopTable.whole_episodes(len(counts)) if gops is None else gops
        self.reservoir_bytes = reservoir_bytes
        self.picture_windows = picture_windows
        for name, number in (
            ("sizes", len(counts) if self._sizes is None else len(self._sizes)),
            ("frames", len(counts) if frames is None else len(frames)),
            ("episode_index", len(self._names)),
            ("gops", len(self.gops)),
        ):
            if number != len(counts):
                raise UsageError(f"{name} describes {number} episodes, but there are {len(counts)} lengths.")
        self._frames: list[Int32Array] | None = None
        if frames is not None:
            self._frames = [_checked_frames(f, n) for f, n in zip(frames, counts.tolist(), strict=True)]
            counts = np.array([len(anchors) for anchors in self._frames], dtype=np.int64)
        self.num_anchors = int(counts.sum())
        order = RandomKeys(_ADMISSION_STREAM, *self._seed_key).permutation(len(counts))
        self._order = order[counts[order] > 0].astype(np.int32)
        self._order.flags.writeable = False
        self._refuse_oversized()

    def _refuse_oversized(self) -> None:
        if self.strategy == "gop":
            refuse_oversized_units(
                self.gops, self._lengths, self.picture_windows, self.reservoir_bytes, self._names
            )
        if self.budget_bytes is None or self._sizes is None:
            return
        too_large = np.flatnonzero(self._sizes[self._order] > self.budget_bytes)
        if too_large.size:
            sizes = self._sizes[self._order]
            largest = int(self._order[np.argmax(sizes)])
            raise oversized_episode_error(
                int(self._names[largest]),
                int(self._sizes[largest]),
                self.budget_bytes,
                num_oversized=int(too_large.size),
            )

    def admission_order(self) -> Int32Array:
        """All episodes in the order in which they are admitted, int32, read-only."""
        return self._order

    def size_of(self, episode: int) -> int:
        """Bytes of an episode; 0 where sizes were not given."""
        return 0 if self._sizes is None else int(self._sizes[episode])

    def __iter__(self) -> Iterator[PlanBlock]:
        strategy = self._make_strategy()
        waiting = deque(self._order.tolist())
        resident: set[int] = set()
        resident_bytes = 0
        while True:
            admitted = []
            while waiting and self._has_room(
                len(resident), strategy.num_lingering, resident_bytes, waiting[0]
            ):
                episode = waiting.popleft()
                strategy.admit(episode, self.anchors_of(episode))
                resident.add(episode)
                resident_bytes += self.size_of(episode)
                admitted.append(episode)
            if not resident and not strategy.num_lingering:
                return  # then nobody waits either: into an empty pool everybody fits
            draw = strategy.draw()
            for episode in draw.exhausted:
                resident.remove(episode)
                resident_bytes -= self.size_of(episode)
            yield PlanBlock(draw.episode, draw.frame, tuple(admitted), draw.exhausted, draw.entries)

    def first(self, num_anchors: int) -> Iterator[tuple[Int32Array, Int32Array]]:
        """Episodes and frames of the first anchors, or of all if there are fewer, block by block."""
        for block in self:
            if num_anchors <= 0:
                return
            yield block.episode[:num_anchors], block.frame[:num_anchors]
            num_anchors -= len(block)

    def _make_strategy(self) -> PoolStrategy:
        if self.strategy != "gop":
            return make_strategy(self.strategy, RandomKeys(_ANCHOR_STREAM, *self._seed_key))
        return GopStrategy(
            self.gops,
            self._lengths,
            windows=self.picture_windows,
            capacity_bytes=planned_bytes(self.reservoir_bytes),
            seed_key=self._seed_key,
            order=self._order.tolist(),
            anchors_of=self.anchors_of,
        )

    def _has_room(self, num_resident: int, num_lingering: int, resident_bytes: int, episode: int) -> bool:
        # Those that have left the pool hold no coded bytes any more, but rows.
        if num_resident >= self.pool_size or num_resident + num_lingering >= 2 * self.pool_size:
            return False
        return self.budget_bytes is None or resident_bytes + self.size_of(episode) <= self.budget_bytes

    def length_of(self, episode: int) -> int:
        """Frames of an episode."""
        return int(self._lengths[episode])

    def anchors_of(self, episode: int) -> Int32Array:
        """Frames of an episode that are anchors, int32, ascending."""
        if self._frames is not None:
            return self._frames[episode]
        return np.arange(self._lengths[episode], dtype=np.int32)

    def skip(self, num_anchors: int) -> PlanTail:
        """The plan from anchor number `num_anchors` (zero-based) on, to resume an epoch.

        The skipped part is replayed, at the speed of the planner.

        Raises:
            UsageError: The number is negative or larger than the plan.
        """
        if not 0 <= num_anchors <= self.num_anchors:
            raise UsageError(f"Cannot skip {num_anchors} anchors of a plan of {self.num_anchors}.")
        if num_anchors == self.num_anchors:
            return PlanTail((), self._order[:0], iter(()))
        if self.strategy == "gop":
            return self._skip_units(num_anchors)
        blocks = iter(self)
        resident: dict[int, None] = {}
        num_admitted = 0
        left = num_anchors
        for block in blocks:
            resident.update(dict.fromkeys(block.admitted))
            num_admitted += len(block.admitted)
            if left < len(block):
                members = tuple(resident)
                first = PlanBlock(block.episode[left:], block.frame[left:], members, block.retired)
                return PlanTail(members, self._order[num_admitted:], chain((first,), blocks))
            left -= len(block)
            for episode in block.retired:
                del resident[episode]
        raise LrstreamError(f"The plan ended {left} anchors before its own count of {self.num_anchors}.")

    def _skip_units(self, num_anchors: int) -> PlanTail:
        """`skip` for strategy `gop`: units whose anchors are partly delivered are decoded again."""
        starts = np.cumsum(self._lengths) - self._lengths
        is_left = np.ones(int(self._lengths.sum()), dtype=bool)
        entered: dict[int, list[UnitEntry]] = {}
        resident: dict[int, None] = {}
        num_admitted = 0
        done = 0
        blocks = iter(self)
        for block in blocks:
            resident.update(dict.fromkeys(block.admitted))
            num_admitted += len(block.admitted)
            part = max(0, min(len(block), num_anchors - done))
            is_left[starts[block.episode[:part]] + block.frame[:part]] = False
            is_last = done + len(block) > num_anchors
            for entry in block.entries:
                if not is_last or entry.at <= part:
                    entered.setdefault(entry.episode, []).append(entry._replace(at=0))
            if is_last:
                break
            done += len(block)
            for episode in block.retired:
                del resident[episode]
            if len(entered) > 4 * self.pool_size:  # at most half of them have anchors left
                entered = {e: units for e, units in entered.items() if len(self._left_of(e, starts, is_left))}
        else:
            raise LrstreamError(f"The plan ended before anchor {num_anchors} of {self.num_anchors}.")
        left = {episode: self._left_of(episode, starts, is_left) for episode in entered | resident}
        left = {episode: anchors for episode, anchors in left.items() if len(anchors)}
        nothing = block.episode[:0]
        lingering = [episode for episode in left if episode not in resident]
        restoring = [PlanBlock(nothing, nothing, (e,), (e,), tuple(entered[e])) for e in lingering]
        # Some may have ended within the block, before this position.
        members = tuple(episode for episode in resident if episode in left)
        retired = tuple(episode for episode in block.retired if episode in left)
        again = tuple(entry for episode in members for entry in entered.get(episode, ()))
        later = tuple(entry._replace(at=entry.at - part) for entry in block.entries if entry.at > part)
        first = PlanBlock(block.episode[part:], block.frame[part:], members, retired, again + later)
        order = (*lingering, *members)
        return PlanTail(order, self._order[num_admitted:], chain(restoring, (first,), blocks), left)

    def _left_of(self, episode: int, starts: Int64Array, is_left: npt.NDArray[np.bool_]) -> Int32Array:
        anchors = self.anchors_of(episode)
        left: Int32Array = anchors[is_left[starts[episode] + anchors]]
        return left


def _checked_frames(frames: npt.NDArray[np.integer], length: int) -> Int32Array:
    """Anchors of one episode in ascending order; the plan must not depend on how a caller lists them."""
    anchors = np.unique(frames).astype(np.int32)
    if len(anchors) != len(frames) or (len(anchors) and not 0 <= anchors[0] <= anchors[-1] < length):
        raise UsageError(f"Anchors must be distinct frames in [0, {length}), got {np.asarray(frames)!r}.")
    return anchors


def peak_resident_bytes(plan: AnchorPlan) -> int:
    """Most bytes that the pool of a plan holds at one time."""
    peak = resident_bytes = 0
    for block in plan:
        resident_bytes += sum(plan.size_of(episode) for episode in block.admitted)
        peak = max(peak, resident_bytes)
        resident_bytes -= sum(plan.size_of(episode) for episode in block.retired)
    return peak


def episodes_per_batch(plan: AnchorPlan, batch_size: int) -> Int64Array:
    """How well a plan mixes: number of different episodes in each batch, int64[ceil(anchors / batch)].

    The batches are those of this stream alone, as a DataLoader worker collates them; the last one may be
    partial.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, expected at least 1.")
    num_batches = -(-plan.num_anchors // batch_size)
    different = np.zeros(num_batches, dtype=np.int64)
    width = len(plan.admission_order()) and int(plan.admission_order().max()) + 1
    previous = np.empty(0, dtype=np.int64)  # (batch, episode) pairs of the batch that the block before cut
    done = 0
    for block in plan:
        batch = np.arange(done, done + len(block), dtype=np.int64) // batch_size
        pairs = np.unique(batch * width + block.episode)
        pairs = np.setdiff1d(pairs, previous, assume_unique=True)
        if pairs.size:  # only the batches of this block, or the work would grow with the square
            first = int(pairs[0]) // width
            found = np.bincount(pairs // width - first)
            different[first : first + len(found)] += found
        done += len(block)
        open_batch = done // batch_size
        previous = np.concatenate([previous, pairs])
        previous = previous[previous // width == open_batch]
    return different
