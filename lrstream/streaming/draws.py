"""Which member of a mixture each sample comes from, without reading anything.

Draws are arranged in *runs* of up to 65,536. The members' parts of each run are fixed by integer arithmetic
and stand in a random order, so that

- any draw comes from a member with the probability of its part, and over a run the parts are exact;
- the count of each member's draws before any position follows from the position: to continue there,
  one run is looked at, however long the epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lrstream.errors import UsageError
from lrstream.streaming.keys import RandomKeys

__all__ = ["RUN_DRAWS", "DrawSequence", "ProportionalDraws", "WeightedDraws", "quotas_of_weights"]

Int64Array = npt.NDArray[np.int64]

RUN_DRAWS = 1 << 16
"""Draws of a run, about."""

# First word of a random stream; those of the planner are small numbers.
_DRAW_STREAM = 101


class DrawSequence(ABC):
    """A sequence of members, a pure function of its arguments. Immutable, safe to share.

    Args:
        seed_key: Integers in [0, 2**64) that name the stream.
    """

    def __init__(self, seed_key: Sequence[int]) -> None:
        self._seed_key = tuple(int(value) for value in seed_key)

    @abstractmethod
    def _quotas_before(self, run: int) -> Int64Array:
        """Draws of each member before a run starts, int64[members]."""

    @abstractmethod
    def _run_at(self, position: int) -> int | None:
        """The run that a position lies in; None at the end of the sequence."""

    def counts_before(self, position: int) -> Int64Array:
        """Draws of each member before a position, int64[members]."""
        counts, _ = self._look(position)
        return counts

    def starting_at(self, position: int) -> Iterator[int]:
        """Members from a position on, one by one; ends with the sequence, if that ends."""
        _, members = self._look(position)
        while len(members):
            yield from members.tolist()
            position += len(members)
            _, members = self._look(position)

    def _look(self, position: int) -> tuple[Int64Array, npt.NDArray[np.int32]]:
        """Counts before a position, and the members from there to the end of its run."""
        if position < 0:
            raise UsageError(f"There is no draw {position}.")
        run = self._run_at(position)
        if run is None:
            return self._quotas_before(-1), np.empty(0, dtype=np.int32)
        before, after = self._quotas_before(run), self._quotas_before(run + 1)
        ordered = np.repeat(np.arange(len(before), dtype=np.int32), after - before)
        order = RandomKeys(_DRAW_STREAM, *self._seed_key, run).permutation(len(ordered))
        members = ordered[order]
        done = position - int(before.sum())
        counts: Int64Array = before + np.bincount(members[:done], minlength=len(before))
        return counts, members[done:]


class ProportionalDraws(DrawSequence):
    """Every anchor of every member once, each draw in proportion to the anchors that remain.

    Args:
        counts: int[members], anchors of each member.
        seed_key: Names the stream.
    """

    def __init__(self, counts: npt.ArrayLike, seed_key: Sequence[int]) -> None:
        super().__init__(seed_key)
        self._counts = np.asarray(counts, dtype=np.int64)
        self.num_draws = int(self._counts.sum())
        self._num_runs = max(1, -(-self.num_draws // RUN_DRAWS))

    def _quotas_before(self, run: int) -> Int64Array:
        if run < 0:
            return self._counts
        quotas: Int64Array = self._counts * run // self._num_runs
        return quotas

    def _run_at(self, position: int) -> int | None:
        if position > self.num_draws:
            raise UsageError(f"There is no draw {position} of {self.num_draws}.")
        if position == self.num_draws:
            return None
        low, high = 0, self._num_runs - 1  # the last run that does not start behind the position
        while low < high:
            middle = (low + high + 1) // 2
            if int(self._quotas_before(middle).sum()) <= position:
                low = middle
            else:
                high = middle - 1
        return low


class WeightedDraws(DrawSequence):
    """Draws by weight, without end.

    Args:
        quotas: int[members], parts of `RUN_DRAWS`, which they add up to (`quotas_of_weights`).
        seed_key: Names the stream.
    """

    def __init__(self, quotas: npt.ArrayLike, seed_key: Sequence[int]) -> None:
        super().__init__(seed_key)
        self._quotas = np.asarray(quotas, dtype=np.int64)
        if int(self._quotas.sum()) != RUN_DRAWS:
            raise UsageError(f"The parts of a run are {self._quotas.tolist()}, which are not {RUN_DRAWS}.")

    def _quotas_before(self, run: int) -> Int64Array:
        return self._quotas * run

    def _run_at(self, position: int) -> int:
        return position // RUN_DRAWS


def quotas_of_weights(weights: Sequence[float | Fraction]) -> Int64Array:
    """Weights as parts of `RUN_DRAWS`, int64, by largest remainder; a weight above 0 gets at least one part.

    Args:
        weights: Not negative; at least one above 0, and far fewer than a run has draws.
    """
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if total <= 0 or min(exact) < 0 or 2 * len(exact) > RUN_DRAWS:
        raise UsageError(f"Weights are {list(map(float, exact))}, expected numbers of 0 or more, not all 0.")
    shares = [weight * RUN_DRAWS / total for weight in exact]
    quotas = [max(int(share), 1 if share else 0) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda member: (quotas[member] - shares[member], member))
    missing = RUN_DRAWS - sum(quotas)
    for member in [member for member in by_remainder if shares[member]][: max(0, missing)]:
        quotas[member] += 1
    # Only where tiny weights were raised to one part; the largest can spare it.
    quotas[quotas.index(max(quotas))] += min(0, missing)
    return np.array(quotas, dtype=np.int64)
