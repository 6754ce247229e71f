"""A DataLoader whose every iteration is the next epoch, for trainers that know nothing of epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lrstream.errors import UsageError
from lrstream.streaming.resumable import ResumableDataset

__all__ = ["EpochLoader"]


class EpochLoader(Iterable[Any]):
    """The batches of a DataLoader; each iteration after the first one reads the next epoch.

    The first iteration begins where the dataset stands, also in the middle of an epoch after a resume; an
    epoch of which nothing is left is passed over. An iteration that is broken off counts as one: the next
    iteration is the next epoch. One that was asked for no batch counts as none.

    It is no `DataLoader`, so that no trainer takes it apart to share the data out among ranks once more.

    Args:
        dataset: The dataset of the DataLoader.
        loader: A `torch.utils.data.DataLoader` of it, without sampler and shuffle.
        is_advancing: Whether iterations go from epoch to epoch; False = always the same one.
        num_batches: Batches after which an epoch ends, wherever its iteration began; None = all that this
            rank has. The smallest of `PartitionReport.batches_per_rank` makes all ranks end together.
        place: Applied to each batch, to move it to a device.
    """

    def __init__(
        self,
        dataset: ResumableDataset,
        loader: Iterable[Any],
        *,
        is_advancing: bool = True,
        num_batches: int | None = None,
        place: Callable[[Any], Any] | None = None,
    ) -> None:
        if num_batches is not None and num_batches < 1:
            raise UsageError(f"num_batches is {num_batches}, expected at least 1.")
        self.dataset = dataset
        self.loader = loader
        self._is_advancing = is_advancing
        self._num_batches = num_batches
        self._place = place
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        batches = self._iteration()
        return batches if self._place is None else map(self._place, batches)

    def _iteration(self) -> Iterator[Any]:
        # Runs from the first batch on: Lightning makes an iterator that it never uses.
        is_first = not self._has_begun
        self._has_begun = True
        if self._is_advancing and (not is_first or self._is_at_end()):
            self.dataset.set_epoch(self.dataset.epoch + 1)
        yield from self._batches(may_be_over=is_first and self._is_advancing)

    def _batches(self, *, may_be_over: bool) -> Iterator[Any]:
        is_over = may_be_over
        for batch in self.dataset.follow(self.loader):
            is_over = False
            yield batch
            if self._is_at_end():
                return
        if is_over:
            self.dataset.set_epoch(self.dataset.epoch + 1)
            yield from self._batches(may_be_over=False)

    def _is_at_end(self) -> bool:
        """Whether training got all batches that it is to get of this epoch, with `num_batches`."""
        if self._num_batches is None:
            return False
        return bool(self.dataset.state_dict()["num_batches"] >= self._num_batches)
