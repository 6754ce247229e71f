"""The laws by which anchors are drawn from the resident episodes (LD-3).

A strategy knows the resident episodes and their anchors, nothing of bytes, budgets or admission: it is
told whom to admit, and answers with the anchors up to the next moment at which an episode is exhausted,
because only there may the pool change. Anchors leave in whole arrays, never one by one.

To add a strategy: subclass `PoolStrategy`, name it in `SamplingStrategy` and in `_STRATEGIES`. One that
needs more than the anchors, as `lrstream.streaming.gop_strategy` does, is made by `AnchorPlan` itself.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from lrstream.errors import UsageError
from lrstream.streaming.keys import RandomKeys, UInt64Array

__all__ = [
    "ANCHOR_STRATEGIES",
    "SAMPLING_STRATEGIES",
    "Draw",
    "PoolStrategy",
    "SamplingStrategy",
    "UnitEntry",
    "make_strategy",
]

SamplingStrategy = Literal["remaining", "round_robin", "gop"]
SAMPLING_STRATEGIES: tuple[SamplingStrategy, ...] = get_args(SamplingStrategy)

ANCHOR_STRATEGIES: tuple[SamplingStrategy, ...] = ("remaining", "round_robin")
"""Those that decode anchor by anchor, so that an episode stays in the pool until its last anchor."""

Int32Array = npt.NDArray[np.int32]

_KEY_LIMIT = 2**64
# Anchors planned at once by round_robin; bounds memory, does not influence the order.
_ROUND_ROBIN_ANCHORS = 1 << 16


class UnitEntry(NamedTuple):
    """Frames whose pictures are decoded at once and kept until their anchors have been delivered.

    Attributes:
        at: Anchor of the draw, or of the block, before which this has to be decoded; 0 is the first one.
        episode: Their episode.
        first: First frame.
        stop: End of the frames, excluded.
    """

    at: int
    episode: int
    first: int
    stop: int


class Draw(NamedTuple):
    """Consecutive anchors, and who was exhausted by them.

    Attributes:
        episode: int32[k], episode of each anchor.
        frame: int32[k], frame of each anchor in its episode.
        exhausted: Episodes whose last anchor is in this draw, or whose last unit is; they leave the pool at
            its end.
        entries: Units that are decoded for this draw and later ones, in order.
    """

    episode: Int32Array
    frame: Int32Array
    exhausted: tuple[int, ...]
    entries: tuple[UnitEntry, ...] = ()


class PoolStrategy(ABC):
    """Draws the anchors of the resident episodes in random order, each once."""

    @abstractmethod
    def admit(self, episode: int, frames: Int32Array) -> None:
        """Make an episode resident; `frames` int32[n >= 1] are its anchors. Only between draws."""

    @abstractmethod
    def draw(self) -> Draw:
        """The next anchors; at least one. To be called only while an episode has anchors left."""

    @property
    def num_lingering(self) -> int:
        """Episodes that have left the pool, but not with all their anchors."""
        return 0


class RemainingStrategy(PoolStrategy):
    """Each anchor is drawn uniformly from all remaining anchors of the resident episodes.

    That is the same as drawing an episode with probability proportional to its remaining anchors, then
    one of these. Every anchor gets a uniform key when its episode is admitted, and anchors leave in
    ascending order of keys. Knowing that the last key was x says of the remaining keys only that they
    are above x: they are still independent and uniform on (x, top). An episode admitted now gets keys
    uniform on the same interval, so it competes on equal terms, anchor by anchor.

    The interval shrinks as anchors leave. Before it falls below half of the 64-bit range, all keys are
    rebased to x = 0 and doubled, which keeps their order. Equal keys stay as improbable as 2**-63 per
    pair; they leave in order of admission, then of frames.
    """

    def __init__(self, random: RandomKeys) -> None:
        self._random = random
        # In order of admission, not of keys: only those that leave are sorted, which is cheaper than to
        # keep all of them in order.
        self._keys: UInt64Array = np.empty(0, dtype=np.uint64)
        self._codes = np.empty(0, dtype=np.int64)  # episode << 32 | frame, beside the keys
        self._newcomers: list[tuple[UInt64Array, npt.NDArray[np.int64]]] = []
        self._ends: list[tuple[int, int, int]] = []  # heap: (largest key, admission number, episode)
        self._num_admitted = 0
        self._low = 0  # key of the last anchor drawn; all remaining keys are above it ...
        self._top = _KEY_LIMIT  # ... and below this

    def admit(self, episode: int, frames: Int32Array) -> None:
        keys = self._random.between(self._low + 1, self._top, len(frames))
        codes = frames.astype(np.int64) | (episode << 32)
        self._newcomers.append((keys, codes))
        heapq.heappush(self._ends, (int(keys.max()), self._num_admitted, episode))
        self._num_admitted += 1

    def draw(self) -> Draw:
        if self._newcomers:
            self._keys = np.concatenate([self._keys, *(keys for keys, _ in self._newcomers)])
            self._codes = np.concatenate([self._codes, *(codes for _, codes in self._newcomers)])
            self._newcomers.clear()
        event = self._ends[0][0]
        exhausted = []
        while self._ends and self._ends[0][0] == event:
            exhausted.append(heapq.heappop(self._ends)[2])
        leave = self._keys <= np.uint64(event)
        codes = self._codes[leave][np.argsort(self._keys[leave], kind="stable")]
        stay = ~leave
        self._keys, self._codes = self._keys[stay], self._codes[stay]
        self._advance(event)
        return Draw((codes >> 32).astype(np.int32), (codes & 0xFFFF_FFFF).astype(np.int32), tuple(exhausted))

    def _advance(self, event: int) -> None:
        """Move the lower end of the interval to the key just drawn, and widen the interval if short."""
        if not self._ends:
            self._low, self._top = 0, _KEY_LIMIT
            return
        self._low = event
        width = self._top - event
        if width > _KEY_LIMIT // 2:
            return
        shift = 64 - (width - 1).bit_length()
        self._keys = (self._keys - np.uint64(event)) << np.uint64(shift)
        # Order is kept, so the list remains a heap.
        self._ends = [((key - event) << shift, number, episode) for key, number, episode in self._ends]
        self._low, self._top = 0, width << shift


class RoundRobinStrategy(PoolStrategy):
    """Each round takes one anchor from every resident episode, in a fresh random order.

    The anchors of an episode are shuffled when it is admitted. An episode admitted during a round, in
    the place of an exhausted one, joins the next round.
    """

    def __init__(self, random: RandomKeys) -> None:
        self._random = random
        self._residents: list[tuple[int, Int32Array]] = []  # (episode, shuffled anchors still to come)
        self._joining: list[tuple[int, Int32Array]] = []
        self._planned: deque[Draw] = deque()

    def admit(self, episode: int, frames: Int32Array) -> None:
        self._joining.append((episode, frames[self._random.permutation(len(frames))]))

    def draw(self) -> Draw:
        if not self._planned:
            self._plan_rounds()
        return self._planned.popleft()

    def _plan_rounds(self) -> None:
        """Plan all rounds up to and including the one in which an episode is exhausted."""
        self._residents += self._joining
        self._joining = []
        width = len(self._residents)
        shortest = min(len(anchors) for _, anchors in self._residents)
        rounds = min(shortest, max(1, _ROUND_ROBIN_ANCHORS // width))
        order = np.argsort(self._random.raw((rounds, width)), axis=1, kind="stable")
        episodes = np.array([episode for episode, _ in self._residents], dtype=np.int32)
        anchors = np.stack([anchors[:rounds] for _, anchors in self._residents])
        episode = episodes[order].ravel()
        frame = anchors[order, np.arange(rounds)[:, None]].ravel()

        is_ending = np.array([len(anchors) == rounds for _, anchors in self._residents])
        last_round = (rounds - 1) * width
        ends = last_round + np.flatnonzero(is_ending[order[-1]]) + 1
        start = 0
        for stop in ends.tolist():
            exhausted = (int(episode[stop - 1]),)
            self._planned.append(Draw(episode[start:stop], frame[start:stop], exhausted))
            start = stop
        if start < len(episode):
            self._planned.append(Draw(episode[start:], frame[start:], ()))
        self._residents = [(e, anchors[rounds:]) for e, anchors in self._residents if len(anchors) > rounds]


_STRATEGIES: dict[str, type[RemainingStrategy] | type[RoundRobinStrategy]] = {
    "remaining": RemainingStrategy,
    "round_robin": RoundRobinStrategy,
}


def make_strategy(name: str, random: RandomKeys) -> PoolStrategy:
    """A fresh strategy of this name, drawing from `random`; any but "gop".

    Raises:
        UsageError: There is no such strategy.
    """
    check_strategy(name)
    return _STRATEGIES[name](random)


def check_strategy(name: str) -> None:
    """Raise UsageError unless `name` is one of `SAMPLING_STRATEGIES`."""
    if name not in SAMPLING_STRATEGIES:
        raise UsageError(
            f"There is no sampling strategy {name!r}.", hint=f"Use one of: {', '.join(SAMPLING_STRATEGIES)}."
        )
