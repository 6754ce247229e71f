"""What a dataset says and is told about its position: epoch, state, resume (LD-10, LD-15)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from lrstream.streaming.batches import Sample
from lrstream.streaming.checkpoint import Checkpointer
from lrstream.streaming.follow import follow_batches
from lrstream.streaming.loading import Figures
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.partition import PartitionReport

__all__ = ["ResumableDataset"]

Batch = TypeVar("Batch")


def _given(**numbers: int | None) -> dict[str, int]:
    """Those numbers that are not None."""
    return {name: value for name, value in numbers.items() if value is not None}


class ResumableDataset(IterableDataset[Sample]):
    """The part of `StreamingLeRobotDataset` that has to do with positions.

    A subclass sets `_checkpoint`, and says what the abstract methods ask.
    """

    _checkpoint: Checkpointer

    @abstractmethod
    def _sizes(self) -> NDArray[np.int64]:
        """int64[n], exact bytes of each selected episode."""

    def _figures(self) -> Figures:
        """What earlier stages of an epoch were planned with."""
        return Figures(self._sizes)

    @abstractmethod
    def _metrics(self) -> LoaderMetrics:
        """Counters of this process."""

    @abstractmethod
    def partition_report(
        self, num_workers: int = 0, batch_size: int = 1, drop_last: bool = False
    ) -> PartitionReport:
        """Frames, episodes and batches of every rank in one epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, in this process and in all its DataLoader workers.

        A loaded position in another epoch is forgotten.
        """
        self._checkpoint.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._checkpoint.epoch

    def follow(self, loader: Iterable[Batch], *, ahead: int = 0) -> Generator[Batch]:
        """The batches of a DataLoader of this dataset, counted as training gets them.

        So `state_dict()` knows the position whatever waits in workers, and `metrics()` how long training
        waited for batches. A loaded state is checked against the DataLoader's numbers.

        Args:
            loader: The DataLoader.
            ahead: Batches that a thread of this process takes from it while training works on an earlier
                one, so that handing over (and without workers, stacking) costs training no time. They take
                their memory besides. Ending the iteration waits for the one that is being taken.

        Raises:
            UsageError: The DataLoader is of another dataset (also one that shares this one out among
                ranks once more), or has other numbers than a loaded state; `ahead` is negative, or the
                position is counted elsewhere (StatefulDataLoader; repeat=True without workers).
        """
        return follow_batches(self, self._checkpoint, loader, ahead)

    def state_dict(
        self,
        *,
        batches: int | None = None,
        samples: int | None = None,
        batch_size: int | None = None,
        num_workers: int | None = None,
        drop_last: bool | None = None,
    ) -> dict[str, Any]:
        """The position in the epoch as plain values, for JSON and `torch.save` alike (LD-10).

        It is known where batches come through `follow`, without DataLoader workers, and in the workers of
        torchdata's StatefulDataLoader, which calls this by itself. Otherwise say what training got.

        Args:
            batches: Batches that this rank got since the start of the epoch, or since an elastic resume.
            samples: The same in samples; with several workers a whole number of batches.
            batch_size: Of the DataLoader; None = of a loaded state, else 1.
            num_workers: Of the DataLoader; None = of a loaded state, else those seen reading.
            drop_last: Of the DataLoader; None = of a loaded state, else False.

        Raises:
            UsageError: The position is not known.
        """
        worker = get_worker_info()
        return self._checkpoint.state(
            worker=None if worker is None else worker.id,
            batches=batches,
            samples=samples,
            numbers=_given(num_workers=num_workers, batch_size=batch_size, drop_last=drop_last),
        )

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        elastic: bool = False,
        *,
        ignore: Collection[str] = (),
        batch_size: int | None = None,
        num_workers: int | None = None,
        drop_last: bool | None = None,
    ) -> None:
        """Begin the next iteration where a state was saved; this also chooses the epoch.

        Args:
            state: From `state_dict`.
            elastic: Whether ranks, workers, batches, strategy, pool and budget may differ: then the frames
                that no rank was given are shared out anew (LD-15).
            ignore: Of "data_root", "revision" and "content_digest", those that may differ.
            batch_size: Of the DataLoader, to be compared; `follow` compares it by itself.
            num_workers: Likewise; compared when workers start in any case.
            drop_last: Likewise.

        Raises:
            UsageError: The state is of another loader, dataset or seed, or differs in what was not allowed.
        """
        worker = get_worker_info()
        self._checkpoint.load(
            state,
            self._figures(),
            worker=None if worker is None else (worker.id, worker.num_workers),
            elastic=elastic,
            ignore=ignore,
            numbers=_given(num_workers=num_workers, batch_size=batch_size, drop_last=drop_last),
        )

    def resume(
        self,
        *,
        samples: int | None = None,
        batches: int | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Begin the next iteration after what this rank got of the epoch, without a saved state.

        Args:
            samples: Samples that it got; with several workers a whole number of batches.
            batches: The same in batches.
            batch_size: Of the DataLoader.
            num_workers: Of the DataLoader.
            drop_last: Of the DataLoader.
        """
        numbers = _given(num_workers=num_workers, batch_size=batch_size, drop_last=drop_last)
        self._checkpoint.resume(
            epoch=self.epoch, batches=batches, samples=samples, numbers=numbers, figures=self._figures()
        )
