"""Batches on their way from a DataLoader to training: counted, timed, and checked for a second sharding."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from lrstream.errors import UsageError
from lrstream.streaming.checkpoint import Checkpointer

if TYPE_CHECKING:
    from lrstream.streaming.resumable import ResumableDataset

__all__ = ["follow_batches", "refuse_sharding"]

Batch = TypeVar("Batch")

_SHARDING_HINT = (
    "Give the DataLoader to training as it is: with Accelerate prepare the model and the optimizer only, and "
    "move batches to the device yourself."
)


def refuse_sharding(dataset: object) -> None:
    """Refuse a wrapper that would give each rank a part of its own part.

    Args:
        dataset: What a DataLoader worker iterates over.
    """
    # By name: importing Accelerate to recognise its class would be far too much.
    if type(dataset).__name__ == "IterableDatasetShard":
        raise UsageError(
            "This dataset gives each rank its own frames already, but Accelerate was asked to share them out "
            "once more: each rank would leave out frames that nobody else has.",
            hint=_SHARDING_HINT,
        )


def follow_batches(
    dataset: ResumableDataset, checkpoint: Checkpointer, loader: Iterable[Batch]
) -> Iterator[Batch]:
    """The batches of `loader`, each noted in `checkpoint` and the dataset's metrics when it is handed out.

    Args:
        dataset: What the DataLoader reads.
        checkpoint: Of the dataset.
        loader: A DataLoader.
    """
    source: Any = loader
    refuse_sharding(getattr(source, "dataset", None))
    if getattr(source, "dataset", None) is not dataset or type(source).__name__ == "DataLoaderDispatcher":
        raise UsageError(
            f"The batches of {type(source).__name__} are not those of a DataLoader of this dataset.",
            hint=_SHARDING_HINT,
        )
    numbers = {
        "num_workers": int(source.num_workers),
        "batch_size": int(source.batch_size or 1),
        "drop_last": bool(source.drop_last),
    }
    # Checked here and not at the first batch, so that the error is where the call is.
    state = checkpoint.first_followed(numbers)
    dataset.partition_report(**numbers)
    return _follow(dataset, checkpoint, state, iter(loader))


def _follow(
    dataset: ResumableDataset, checkpoint: Checkpointer, state: Any, batches: Iterator[Batch]
) -> Iterator[Batch]:
    checkpoint.follow(state)
    while True:
        started_s = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        dataset._metrics().add_batch(time.perf_counter() - started_s)
        if state is not None:
            state = state.at_batch(state.num_batches + 1)
            checkpoint.follow(state)
        yield batch
