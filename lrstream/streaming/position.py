"""From batches given to a rank to samples delivered by each of its workers (LD-10).

Pure arithmetic over the frames that each worker owns; which frames these are is the planner's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lrstream.errors import UsageError

__all__ = ["WorkerOffsets", "batches_of_samples", "num_batches_of", "worker_offsets"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WorkerOffsets:
    """What the workers of one rank have delivered.

    Attributes:
        samples: Samples delivered, for each worker.
        batches: Batches delivered, for each worker.
        next_worker: The worker whose batch is next; 0 at the end.
    """

    samples: tuple[int, ...]
    batches: tuple[int, ...]
    next_worker: int


def worker_offsets(
    num_batches: int, batch_size: int, worker_frames: Sequence[int] | Int64Array, *, drop_last: bool = False
) -> WorkerOffsets:
    """Divide the batches that a rank was given among its workers.

    A DataLoader takes batches from its workers in turn and passes over those that have ended, so batch
    number j of worker w is given in round j: order is by (j, w). The last batch of a worker may be
    partial, or dropped.

    Args:
        num_batches: Batches given; more than there are counts as all.
        batch_size: Samples of a full batch.
        worker_frames: int[num_workers], anchors that each worker owns (one entry without workers).
        drop_last: Whether partial batches are dropped.
    """
    if num_batches < 0 or batch_size < 1:
        raise UsageError(f"There is no batch {num_batches} of batch size {batch_size}.")
    frames = np.asarray(worker_frames, dtype=np.int64)
    owned = num_batches_of(frames, batch_size, drop_last=drop_last)
    # Number of complete rounds: the largest r for which rounds 0 to r-1 hold no more than num_batches.
    low, high = 0, int(owned.max(initial=0))
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(owned, middle).sum()) <= num_batches:
            low = middle
        else:
            high = middle - 1
    given = np.minimum(owned, low)
    in_turn = np.flatnonzero(owned > low)
    started = num_batches - int(given.sum())
    given[in_turn[:started]] += 1
    next_worker = int(in_turn[started]) if len(in_turn) else 0
    samples = np.minimum(given * batch_size, frames)
    return WorkerOffsets(tuple(samples.tolist()), tuple(given.tolist()), next_worker)


def num_batches_of(worker_frames: Int64Array, batch_size: int, *, drop_last: bool) -> Int64Array:
    """int64, batches that each worker gives in a whole epoch."""
    return (worker_frames if drop_last else worker_frames + batch_size - 1) // batch_size


def batches_of_samples(
    num_samples: int, batch_size: int, worker_frames: Sequence[int] | Int64Array, *, drop_last: bool = False
) -> int:
    """Number of batches after which a rank was given `num_samples` samples.

    Raises:
        UsageError: That many samples are not a whole number of batches.
    """
    frames = np.asarray(worker_frames, dtype=np.int64)
    low, high = 0, int(num_batches_of(frames, batch_size, drop_last=drop_last).sum())
    while low < high:
        middle = (low + high) // 2
        if sum(worker_offsets(middle, batch_size, frames, drop_last=drop_last).samples) < num_samples:
            low = middle + 1
        else:
            high = middle
    found = sum(worker_offsets(low, batch_size, frames, drop_last=drop_last).samples)
    if found != num_samples:
        raise UsageError(
            f"{num_samples} samples are not a whole number of batches of {batch_size}: batch {low} ends at "
            f"sample {found}.",
            hint="Give the position in batches.",
        )
    return low
