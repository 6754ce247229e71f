"""How the members of a mixture are shared among ranks and workers, and what each worker gives.

Pure arithmetic, the same in every process. Each member's episodes are partitioned as if it were alone
(LD-1); then it is decided which rank plays which part of the member, so that the parts of all members
together are balanced: a member with fewer episodes than ranks leaves ranks without any of it, and these
should not always be the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lrstream.errors import ByteBudgetError, UsageError
from lrstream.streaming.budget import oversized_episode_error
from lrstream.streaming.draws import (
    DrawSequence,
    ProportionalDraws,
    WeightedDraws,
    quotas_of_weights,
)
from lrstream.streaming.keys import RandomKeys
from lrstream.streaming.partition import num_streams, partition_streams
from lrstream.streaming.planning import DEFAULT_POOL_SIZE

__all__ = ["MemberPart", "MixtureLaw", "MixtureShares", "Slice", "divide_budget", "member_seed"]

Int64Array = npt.NDArray[np.int64]

# First word of the stream that gives members their seeds.
_MEMBER_STREAM = 102
# Below this, neighbouring samples of a rare member would come from one episode for a long time.
_LEAST_POOL = 4


def member_seed(seed: int, member: int) -> int:
    """Seed of one member: the first one has that of the mixture, the same dataset twice differs."""
    return seed if member == 0 else int(RandomKeys(_MEMBER_STREAM, seed, member).raw(1)[0])


class MemberPart(NamedTuple):
    """The part of a member that one worker of one rank reads.

    Attributes:
        rank: Number of the rank in the member's own partition.
        worker: Number of the worker therein.
        positions: int64[n], positions of its episodes in the member's selection, ascending.
        num_streams: Workers of that rank that have episodes of the member.
        num_frames: Its anchors.
    """

    rank: int
    worker: int
    positions: Int64Array
    num_streams: int
    num_frames: int


class Slice(NamedTuple):
    """What one worker gives in one epoch.

    Attributes:
        parts: Its part of each member.
        draws: Which member each sample is from.
        first: Position in `draws` of the epoch's first sample.
        num_samples: Samples of the epoch.
    """

    parts: tuple[MemberPart, ...]
    draws: DrawSequence
    first: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class MixtureLaw:
    """What decides the order of a mixture besides its members.

    Attributes:
        seed: Seed.
        weights: Of each member; None = every frame once per epoch.
        samples_per_epoch: Samples of all ranks in an epoch; with weights only.
    """

    seed: int
    weights: tuple[float, ...] | None = None
    samples_per_epoch: int | None = None


class MixtureShares:
    """Parts of all members for one number of ranks and workers. Immutable.

    Args:
        law: What decides the order.
        frames: For each member int64[n], anchors of its selected episodes; 0 for those that are done.
        world_size: Ranks.
        num_workers: Workers of each rank, 0 = the training process.

    Raises:
        UsageError: A rank has nothing to give, in an epoch that is whole.
    """

    def __init__(
        self, law: MixtureLaw, frames: Sequence[Int64Array], world_size: int, num_workers: int
    ) -> None:
        self.law = law
        self.world_size = world_size
        self.num_parts = max(1, num_workers)
        shape = (world_size, self.num_parts)
        loads = np.zeros(shape, dtype=np.int64)
        self._parts: list[list[list[MemberPart]]] = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
        for anchors in frames:
            self._add(np.asarray(anchors, dtype=np.int64), num_workers, loads)
        self.frames: Int64Array = np.array(
            [[[part.num_frames for part in parts] for parts in row] for row in self._parts], dtype=np.int64
        ).reshape(*shape, len(frames))
        """int64[ranks, workers, members], anchors."""
        self.samples: Int64Array = self._count_samples()
        """int64[ranks, workers], samples in one epoch."""

    def _add(self, anchors: Int64Array, num_workers: int, loads: Int64Array) -> None:
        """Give every rank and worker a part of one more member, the larger ones to those with less so far."""
        left = np.flatnonzero(anchors)
        streams = partition_streams(anchors[left], self.world_size, num_workers)
        by_rank = [[int(anchors[left[share]].sum()) for share in shares] for shares in streams]
        ranks = _matched([sum(row) for row in by_rank], loads.sum(axis=1))
        for rank, played in enumerate(ranks):
            row = by_rank[played]
            busy = num_streams(sum(map(len, streams[played])), num_workers)
            for worker, part in enumerate(_matched(row, loads[rank])):
                positions = left[streams[played][part]]
                self._parts[rank][worker].append(MemberPart(played, part, positions, busy, row[part]))
                loads[rank, worker] += row[part]

    def _count_samples(self) -> Int64Array:
        if self.law.weights is None:
            samples: Int64Array = self.frames.sum(axis=2)
            return samples
        is_drawn = np.array(self.law.weights) > 0
        can_draw: npt.NDArray[np.bool_] = np.count_nonzero(self.frames[:, :, is_drawn], axis=2) > 0
        idle = np.flatnonzero(np.count_nonzero(can_draw, axis=1) == 0)
        if idle.size:
            raise no_data_error(int(idle[0]), self.world_size)
        assert self.law.samples_per_epoch is not None
        return np.array(
            [
                _evenly(of_rank, busy)
                for of_rank, busy in zip(
                    _evenly(self.law.samples_per_epoch, np.ones(self.world_size, dtype=bool)),
                    can_draw,
                    strict=True,
                )
            ],
            dtype=np.int64,
        )

    @property
    def episodes(self) -> Int64Array:
        """int64[ranks, workers], episodes of all members."""
        return np.array(
            [[sum(len(part.positions) for part in parts) for parts in row] for row in self._parts],
            dtype=np.int64,
        )

    def num_busy(self, rank: int) -> int:
        """Workers of a rank that give samples, at least 1."""
        return max(1, int(np.count_nonzero(self.samples[rank])))

    def slice_of(self, rank: int, worker: int, epoch: int, stage: int = 0) -> Slice:
        """What one worker gives in an epoch."""
        parts = tuple(self._parts[rank][worker])
        num_samples = int(self.samples[rank, worker])
        if self.law.weights is None or num_samples == 0:
            key = (self.law.seed, epoch, stage, rank, worker)
            counts = [part.num_frames if num_samples else 0 for part in parts]
            return Slice(parts, ProportionalDraws(counts, key), 0, num_samples)
        # One sequence for all epochs: a member's pass ends where its frames end, not where an epoch does.
        draws = WeightedDraws(self.quotas_of(rank, worker), (self.law.seed, rank, worker))
        return Slice(parts, draws, epoch * num_samples, num_samples)

    def quotas_of(self, rank: int, worker: int) -> Int64Array:
        """int64[members], each member's draws in a run of a worker that has samples."""
        assert self.law.weights is not None
        owned = self.frames[rank, worker] > 0
        return quotas_of_weights(
            [weight if has else 0 for weight, has in zip(self.law.weights, owned, strict=True)]
        )

    def expected_shares(self) -> npt.NDArray[np.float64]:
        """float64[members], parts of all samples that come from each member."""
        if self.law.weights is None:
            totals = self.frames.sum(axis=(0, 1)).astype(np.float64)
        else:
            totals = np.zeros(self.frames.shape[2])
            for rank, worker in zip(*np.nonzero(self.samples), strict=True):
                quotas = self.quotas_of(int(rank), int(worker))
                totals += self.samples[rank, worker] * quotas / quotas.sum()
        shares: npt.NDArray[np.float64] = totals / max(1.0, float(totals.sum()))
        return shares

    def pool_size(self, part: Slice, member: int, rank: int) -> int:
        """Episodes of one member that a worker mixes, where the member does not say: its part of the pool."""
        whole = max(1, DEFAULT_POOL_SIZE // self.num_busy(rank))
        return max(min(_LEAST_POOL, whole), self.part_of(whole, part, member))

    def part_of(self, number: int, part: Slice, member: int) -> int:
        """A member's part of a worker's number of something, in proportion to its draws; at least 1."""
        if self.law.weights is None:
            share = Fraction(part.parts[member].num_frames, max(1, part.num_samples))
        else:
            weights = [
                Fraction(weight) if own.num_frames else Fraction(0)
                for weight, own in zip(self.law.weights, part.parts, strict=True)
            ]
            share = weights[member] / (sum(weights) or 1)
        return max(1, round(number * share))


def no_data_error(rank: int, world_size: int) -> UsageError:
    """The refusal of ranks for which nothing is left (LD-9)."""
    return UsageError(
        f"A rank has no data: rank {rank} of {world_size} has no episode of any member of the mixture that "
        "is drawn, because episodes are never split.",
        hint="Use fewer ranks, so that each has at least one selected episode.",
        rank=rank,
        world_size=world_size,
    )


def divide_budget(
    budget_bytes: int, sizes: Sequence[Int64Array], pools: Sequence[int], names: Sequence[Sequence[str]]
) -> list[int]:
    """Share a worker's byte budget among its members.

    Each gets the bytes of its largest episode, without which it could not go on, and what is left is
    divided in proportion to the bytes of full pools (pool size times mean episode).

    Args:
        budget_bytes: Of the worker.
        sizes: For each member int64[n], exact bytes of its episodes in this worker.
        pools: Episodes that each member mixes.
        names: What each member's episodes are called in messages.

    Returns:
        Bytes of each member, together at most `budget_bytes`.

    Raises:
        ByteBudgetError: An episode is larger than the whole budget, or the largest ones of all members
            do not fit it together.
    """
    largest = [int(own.max(initial=0)) for own in sizes]
    if max(largest, default=0) > budget_bytes:
        member = largest.index(max(largest))
        name = names[member][int(np.argmax(sizes[member]))]
        num_oversized = sum(int(np.count_nonzero(own > budget_bytes)) for own in sizes)
        raise oversized_episode_error(name, largest[member], budget_bytes, num_oversized=num_oversized)
    left = budget_bytes - sum(largest)
    if left < 0:
        listing = ", ".join(
            f"{own_names[int(np.argmax(own))]} ({size} bytes)"
            for own, size, own_names in zip(sizes, largest, names, strict=True)
            if size
        )
        raise ByteBudgetError(
            f"Byte budget exceeded: each member of a mixture needs room for its largest episode, together "
            f"{sum(largest)} bytes, but the worker's whole budget is {budget_bytes} bytes: {listing}.",
            hint="Use fewer workers, a larger budget per rank, or fewer members with video.",
            size_bytes=sum(largest),
            budget_bytes=budget_bytes,
        )
    wanted = [pool * int(own.sum()) // max(1, len(own)) for pool, own in zip(pools, sizes, strict=True)]
    total = max(1, sum(wanted))
    return [size + left * want // total for size, want in zip(largest, wanted, strict=True)]


def _matched(parts: Sequence[int], loads: Int64Array) -> list[int]:
    """Which part each place gets: the heaviest one to the place with the least; each part once."""
    if not loads.any():
        return list(range(len(parts)))
    places = np.argsort(loads, kind="stable").tolist()
    heaviest = sorted(range(len(parts)), key=lambda part: (-parts[part], part))
    matched = [0] * len(parts)
    for place, part in zip(places, heaviest, strict=True):
        matched[place] = part
    return matched


def _evenly(number: int, takes_part: npt.NDArray[np.bool_]) -> list[int]:
    """Split a number among those that take part, the first ones get one more."""
    takers = np.flatnonzero(takes_part)
    split = [0] * len(takes_part)
    each, more = divmod(number, max(1, len(takers)))
    for count, taker in enumerate(takers.tolist()):
        split[taker] = each + (count < more)
    return split
