"""A DataLoader whose every iteration is the next epoch, for trainers that know nothing of epochs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lrstream.errors import UsageError
from lrstream.streaming.resumable import ResumableDataset

__all__ = ["EpochLoader"]


class EpochLoader(Iterable[Any]):
    """The batches of a DataLoader; each iteration after the first one reads the next epoch.

    The first iteration begins where the dataset stands, also in the middle of an epoch after a resume.
    An iteration that is broken off counts as one: the next iteration is the next epoch.

    It is no `DataLoader`, so that no trainer takes it apart to share the data out among ranks once more.

    Args:
        dataset: The dataset of the DataLoader.
        loader: A `torch.utils.data.DataLoader` of it, without sampler and shuffle.
        is_advancing: Whether iterations go from epoch to epoch; False = always the same one.
        num_batches: Most batches of an iteration; None = all that this rank has.
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
        if self._has_begun and self._is_advancing:
            self.dataset.set_epoch(self.dataset.epoch + 1)
        self._has_begun = True
        batches = itertools.islice(self.dataset.follow(self.loader), self._num_batches)
        return batches if self._place is None else map(self._place, batches)
