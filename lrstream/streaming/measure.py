"""One epoch through a DataLoader with a stopwatch, as training would run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from lrstream.streaming.dataset import StreamingLeRobotDataset

__all__ = ["EpochTimes", "measure_epoch"]


@dataclass(frozen=True, slots=True)
class EpochTimes:
    """What an epoch took.

    Attributes:
        num_samples: Samples delivered.
        num_first: Samples of the first batch.
        first_batch_s: From starting the workers to the first batch, seconds; 0 without a batch.
        elapsed_s: From starting the workers to the end, seconds.
        waits_s: Wait for each further batch, float64 seconds, shape ``(batches - 1,)``.
    """

    num_samples: int
    num_first: int
    first_batch_s: float
    elapsed_s: float
    waits_s: NDArray[np.float64]

    @property
    def samples_per_s(self) -> float:
        """Samples per second once the first batch is there; over everything if there is only one batch."""
        num_samples, seconds = self.num_samples - self.num_first, self.elapsed_s - self.first_batch_s
        if num_samples == 0:
            num_samples, seconds = self.num_samples, self.elapsed_s
        return num_samples / seconds if seconds else 0.0


def measure_epoch(
    dataset: StreamingLeRobotDataset,
    *,
    batch_size: int,
    num_workers: int,
    take: Callable[[Mapping[str, Any]], None],
) -> EpochTimes:
    """Run the epoch that `dataset` is set to.

    Args:
        dataset: What to read.
        batch_size: Samples of a batch.
        num_workers: DataLoader workers; 0 reads in this process.
        take: Gets each batch: tensors stacked, everything else as a list. Its time counts, so it
            should only put aside what is looked at later.

    Returns:
        Counts and times.
    """
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, collate_fn=_collate)
    waits: list[float] = []
    counts: list[int] = []
    started_s = before_s = time.perf_counter()
    for batch in loader:
        waits.append(time.perf_counter() - before_s)
        counts.append(len(batch["index"]))
        take(batch)
        before_s = time.perf_counter()
    return EpochTimes(
        sum(counts),
        counts[0] if counts else 0,
        waits[0] if waits else 0.0,
        time.perf_counter() - started_s,
        np.array(waits[1:], dtype=np.float64),
    )


def _collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # The default would also walk into lists and structures of language columns, whose lengths differ.
    return {
        key: default_collate([sample[key] for sample in samples])
        if isinstance(value, torch.Tensor)
        else [sample[key] for sample in samples]
        for key, value in samples[0].items()
    }
