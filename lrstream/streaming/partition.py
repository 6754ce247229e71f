"""Which episodes a rank, and a DataLoader worker inside it, owns (LD-1, LD-9).

Shares are whole episodes, disjoint, and balanced by frames. They are nested: the selection is split
among ranks first, then each rank's share among its workers, so the frames of a rank do not depend on
how many workers it runs. They are the same in every epoch: what a worker has cached stays useful.

Splitting into equal sums is NP-hard. Longest-first assignment to the lightest part is within a third of
the optimum, and nearly exact when episodes are many; moves and swaps out of the heaviest part then help
where episodes are few. Everything is integer arithmetic with ties broken by position, so all processes
of a job compute the same shares without talking to each other.

Surplus workers: a rank with E episodes keeps at most E of its workers busy. The others own an empty
share, deliver nothing and end at once; pool and byte budget are divided among the busy ones only
(`num_streams`). A rank without any episode is refused, because the other ranks would wait for it in the
first collective operation for ever.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lrstream.errors import UsageError

__all__ = [
    "PartitionReport",
    "num_streams",
    "partition_episodes",
    "partition_report",
    "partition_streams",
    "rank_share",
    "worker_share",
]

Int64Array = npt.NDArray[np.int64]

# Refinement stops here: the first batch that differs between parts matters more than one percent.
_BALANCED_RATIO = 1.01
# Pairs of parts that refinement may look at (some tens of microseconds each).
_MAX_PAIRS = 4096


def _as_lengths(lengths: npt.ArrayLike) -> Int64Array:
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(
            f"Episode lengths must be one-dimensional integers, got shape {array.shape}, dtype {array.dtype}."
        )
    counts = array.astype(np.int64)
    if counts.size and int(counts.min()) < 1:
        position = int(np.argmin(counts))
        raise UsageError(
            f"The episode at position {position} has {int(counts[position])} frames, expected >= 1."
        )
    return counts


def partition_episodes(lengths: npt.ArrayLike, num_parts: int) -> list[Int64Array]:
    """Split episodes into parts of nearly equal numbers of frames.

    Args:
        lengths: int[n], frames per episode, each at least 1.
        num_parts: Number of parts, at least 1. With more parts than episodes the last ones are empty.

    Returns:
        `num_parts` arrays int64 of positions in `lengths`, ascending; together each position once.
        With at least as many episodes as parts, none is empty.

    Raises:
        UsageError: `num_parts` or a length is below 1.
    """
    counts = _as_lengths(lengths)
    if num_parts < 1:
        raise UsageError(f"Episodes cannot be split into {num_parts} parts, expected at least 1.")
    if num_parts == 1:
        return [np.arange(len(counts), dtype=np.int64)]
    owner = _assign_longest_first(counts, num_parts)
    _refine(counts, owner, num_parts)
    by_owner = np.argsort(owner, kind="stable")
    stops = np.cumsum(np.bincount(owner, minlength=num_parts))
    return [part.astype(np.int64) for part in np.split(by_owner, stops[:-1])]


def _assign_longest_first(counts: Int64Array, num_parts: int) -> Int64Array:
    """Part of each episode, int64[n]: longest episode first, always to the lightest part."""
    order = np.argsort(-counts, kind="stable")
    # load * num_parts + part: one integer that orders by load, then by part; heaps of tuples are slower.
    heap = list(range(num_parts))
    owner = np.empty(len(counts), dtype=np.int64)
    assigned = []
    for length in counts[order].tolist():
        entry = heap[0]
        assigned.append(entry % num_parts)
        heapq.heapreplace(heap, entry + length * num_parts)
    owner[order] = assigned
    return owner


def _refine(counts: Int64Array, owner: Int64Array, num_parts: int) -> None:
    """Lower the heaviest part by moves and swaps, in place, until balanced or stuck."""
    loads = np.bincount(owner, weights=counts, minlength=num_parts).astype(np.int64)
    good_enough = _BALANCED_RATIO * int(loads.sum()) / num_parts
    pairs_left = _MAX_PAIRS
    while True:
        heavy = int(np.argmax(loads))
        if loads[heavy] <= good_enough:
            return
        mine = np.flatnonzero(owner == heavy)
        if len(mine) < 2:  # one episode forces this load on whichever part owns it
            return
        for light in np.argsort(loads, kind="stable").tolist():
            gap = int(loads[heavy] - loads[light])
            if gap < 2 or pairs_left == 0:
                return
            pairs_left -= 1
            exchange = _best_exchange(counts, mine, np.flatnonzero(owner == light), gap)
            if exchange is not None:
                given, taken, moved = exchange
                owner[given] = light
                if taken is not None:
                    owner[taken] = heavy
                loads[heavy] -= moved
                loads[light] += moved
                break


def _best_exchange(
    counts: Int64Array, mine: Int64Array, theirs: Int64Array, gap: int
) -> tuple[int, int | None, int] | None:
    """The move or swap whose net weight d, 0 < d < gap, is nearest to half the gap.

    Returns:
        (position given away, position taken or None, d), or None if nothing makes the pair more even.
    """
    # An episode of weight zero stands for "take nothing", so a move is a swap like any other.
    order = np.argsort(counts[theirs], kind="stable")
    weights = np.concatenate([np.zeros(1, dtype=np.int64), counts[theirs][order]])
    wanted = counts[mine] - gap // 2
    upper = np.clip(np.searchsorted(weights, wanted), 0, len(weights) - 1)
    best: tuple[int, int, int] | None = None
    for candidate in (upper, np.maximum(upper - 1, 0)):
        moved = counts[mine] - weights[candidate]
        distance = np.where((moved > 0) & (moved < gap), np.abs(2 * moved - gap), gap)
        at = int(np.argmin(distance))
        if distance[at] < gap and (best is None or distance[at] < best[0]):
            best = (int(distance[at]), at, int(candidate[at]))
    if best is None:
        return None
    _, at, slot = best
    taken = None if slot == 0 else int(theirs[order[slot - 1]])
    return int(mine[at]), taken, int(counts[mine[at]] - weights[slot])


def num_streams(num_episodes: int, num_workers: int) -> int:
    """Workers of a rank that own episodes: none configured counts as one, and no more than episodes."""
    if num_workers < 0:
        raise UsageError(f"num_workers is {num_workers}, expected 0 or more.")
    return max(1, min(num_workers, num_episodes))


def rank_share(lengths: npt.ArrayLike, rank: int, world_size: int) -> Int64Array:
    """Positions of the episodes that one rank owns, int64, ascending.

    Raises:
        UsageError: The rank is not in [0, world_size), or there are fewer episodes than ranks. (None at
            all, an empty selection, is the same for every rank and gives empty shares.)
    """
    counts = _as_lengths(lengths)
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"Rank {rank} is outside of a world of {world_size} ranks.")
    if 0 < len(counts) < world_size:
        raise UsageError(
            f"A rank has no data: {len(counts)} selected episodes cannot be shared by {world_size} ranks "
            f"(world size), because episodes are never split.",
            hint="Use fewer ranks, so that each has at least one selected episode.",
            world_size=world_size,
            num_episodes=len(counts),
        )
    return partition_episodes(counts, world_size)[rank]


def worker_share(
    lengths: npt.ArrayLike, rank: int, world_size: int, worker: int, num_workers: int
) -> Int64Array:
    """Positions of the episodes that one worker of one rank owns, int64, ascending.

    Args:
        lengths: int[n], frames per selected episode.
        rank: In [0, world_size).
        world_size: Ranks of the job.
        worker: In [0, max(1, num_workers)).
        num_workers: DataLoader workers of each rank; 0 = the training process itself, one share.

    Returns:
        A subset of `rank_share`; empty for a worker beyond the number of the rank's episodes.

    Raises:
        UsageError: As `rank_share`, or the worker is out of range.
    """
    share = rank_share(lengths, rank, world_size)
    num_parts = max(1, num_workers)
    if num_workers < 0 or not 0 <= worker < num_parts:
        raise UsageError(f"Worker {worker} is outside of the {num_workers} workers of a rank.")
    return share[partition_episodes(np.asarray(lengths)[share], num_parts)[worker]]


def partition_streams(lengths: npt.ArrayLike, world_size: int, num_workers: int) -> list[list[Int64Array]]:
    """All shares at once: `[rank][worker]` equals `worker_share(lengths, rank, ..., worker, ...)`.

    Unlike `rank_share` this accepts fewer episodes than ranks (the surplus shares are empty): it also
    serves the rest of an epoch, where little may be left.
    """
    counts = _as_lengths(lengths)
    if num_workers < 0:
        raise UsageError(f"num_workers is {num_workers}, expected 0 or more.")
    shares = partition_episodes(counts, world_size)
    return [
        [share[part] for part in partition_episodes(counts[share], max(1, num_workers))] for share in shares
    ]


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """How a selection is shared out, for inspection before training (K17).

    Attributes:
        worker_frames: int64[world_size, workers], frames per worker (one column with 0 workers).
        worker_episodes: int64[world_size, workers], episodes per worker.
    """

    worker_frames: Int64Array
    worker_episodes: Int64Array

    @property
    def rank_frames(self) -> Int64Array:
        """int64[world_size], frames per rank."""
        frames: Int64Array = np.sum(self.worker_frames, axis=1, dtype=np.int64)
        return frames

    @property
    def rank_episodes(self) -> Int64Array:
        """int64[world_size], episodes per rank."""
        episodes: Int64Array = np.sum(self.worker_episodes, axis=1, dtype=np.int64)
        return episodes

    @property
    def rank_balance(self) -> float:
        """Largest rank share over the mean one; 1.0 is even."""
        return _ratio(self.rank_frames)

    @property
    def worker_balance(self) -> float:
        """Largest worker share over the mean of all workers, idle ones included; 1.0 is even."""
        return _ratio(self.worker_frames.ravel())

    @property
    def num_idle_workers(self) -> int:
        """Workers, over all ranks, that own no episode."""
        return int(np.count_nonzero(self.worker_episodes == 0))

    def batches_per_rank(self, batch_size: int, *, drop_last: bool) -> Int64Array:
        """int64[world_size], batches a DataLoader gives each rank in one epoch.

        A worker of a DataLoader collates its own samples, so each may end with a partial batch (or drop
        one): the count is not that of the rank's frames divided by the batch size.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, expected at least 1.")
        rounding = 0 if drop_last else batch_size - 1
        batches: Int64Array = np.sum((self.worker_frames + rounding) // batch_size, axis=1, dtype=np.int64)
        return batches


def _ratio(frames: Int64Array) -> float:
    total = int(frames.sum())
    return float(int(frames.max()) * len(frames) / total) if total else 1.0


def partition_report(lengths: npt.ArrayLike, world_size: int, num_workers: int) -> PartitionReport:
    """Frames and episodes of every rank and worker.

    Raises:
        UsageError: Fewer episodes than ranks, or a bad argument.
    """
    counts = _as_lengths(lengths)
    rank_share(counts, 0, world_size)  # the same refusal as at the start of training
    streams = partition_streams(counts, world_size, num_workers)
    frames = [[int(counts[share].sum()) for share in row] for row in streams]
    episodes = [[len(share) for share in row] for row in streams]
    return PartitionReport(np.array(frames, dtype=np.int64), np.array(episodes, dtype=np.int64))
