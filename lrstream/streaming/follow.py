"""Batches on their way from a DataLoader to training: counted, timed, and checked for a second sharding."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from lrstream.errors import UsageError
from lrstream.streaming.ahead import BatchesAhead
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
    dataset: ResumableDataset, checkpoint: Checkpointer, loader: Iterable[Batch], ahead: int
) -> Generator[Batch]:
    """The batches of `loader`, each noted in `checkpoint` and the dataset's metrics when it is handed out.

    Args:
        dataset: What the DataLoader reads.
        checkpoint: Of the dataset.
        loader: A DataLoader.
        ahead: Batches that a thread takes from it in advance.
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
    _check_ahead(ahead, source, is_position_known=state is not None)
    return _follow(dataset, checkpoint, state, iter(loader), ahead)


def _check_ahead(ahead: int, loader: Any, *, is_position_known: bool) -> None:
    """Refuse batches in advance where a position would count them although training never saw them."""
    if not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0:
        raise UsageError(f"ahead is {ahead!r}, expected a number of batches, 0 or more.")
    if ahead == 0:
        return
    if hasattr(loader, "state_dict"):
        raise UsageError(
            f"The state of {type(loader).__name__} counts batches when they are taken from it, so with "
            f"ahead={ahead} it would skip those that training has not got yet.",
            hint="Leave `ahead` out, or use PyTorch's own DataLoader and save dataset.state_dict().",
        )
    if loader.num_workers == 0 and not is_position_known:
        raise UsageError(
            f"With repeat=True and without workers the dataset counts its samples when they are made, so "
            f"with ahead={ahead} a saved position would skip those that training has not got yet.",
            hint="Leave `ahead` out, use workers, or repeat=False and set_epoch.",
        )


def _follow(
    dataset: ResumableDataset, checkpoint: Checkpointer, state: Any, batches: Iterator[Batch], ahead: int
) -> Generator[Batch]:
    checkpoint.follow(state)
    with contextlib.ExitStack() as stack:
        if ahead:
            batches = stack.enter_context(contextlib.closing(BatchesAhead(batches, ahead)))
        for num_batches in itertools.count(1):
            started_s = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            dataset._metrics().add_batch(time.perf_counter() - started_s)
            checkpoint.follow(state, num_batches)
            # Held by nobody here: its memory is free as soon as training lets go of it, and that is not
            # done, and counted, in the next wait.
            handed = [batch]
            del batch
            yield handed.pop()
