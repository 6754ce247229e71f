"""DataLoader workers without processes: the same calls in the same order, thousands of times a minute.

What processes add (copies of the dataset, shared memory, queues) is tested with real ones, at fewer points.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from lrstream.demo import DemoCamera, DemoSpec
from lrstream.streaming.dataset import StreamingLeRobotDataset

__all__ = ["SHORT", "SMALL", "as_worker", "batches_in_turn"]

SMALL = DemoSpec(
    (7, 3, 5, 8, 2, 6, 4, 5, 3, 6),
    (DemoCamera("observation.images.front", 16, 96, kind="image"),),
    fps=10,
    episodes_per_data_file=5,
)
"""Ten unequal episodes of 49 frames without video."""

SHORT = DemoSpec((4, 1, 3, 5, 2, 1, 4, 2, 2, 1), SMALL.cameras, fps=10, episodes_per_data_file=5)
"""As many episodes and only 25 frames, for tests that read it from every one of its positions."""


@contextmanager
def as_worker(dataset: IterableDataset[Any], number: int, num_workers: int) -> Iterator[None]:
    """Make `get_worker_info()` say that this is a DataLoader worker; with 0 workers nothing."""
    before = torch_worker._worker_info
    if num_workers:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=number, num_workers=num_workers, seed=0, dataset=dataset
        )
    try:
        yield
    finally:
        torch_worker._worker_info = before


def batches_in_turn(
    dataset: StreamingLeRobotDataset, num_workers: int, batch_size: int, drop_last: bool = False
) -> Iterator[list[int]]:
    """Values of ``index``, batch by batch, as a DataLoader takes them from its workers."""
    readers: list[Iterator[dict[str, Any]]] = []
    for number in range(max(1, num_workers)):
        with as_worker(dataset, number, num_workers):
            readers.append(iter(dataset))
    while readers:
        for reader in list(readers):
            batch = [int(sample["index"]) for sample in itertools.islice(reader, batch_size)]
            if not batch or (drop_last and len(batch) < batch_size):
                readers.remove(reader)
            else:
                yield batch
