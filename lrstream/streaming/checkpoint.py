"""Where the iterations of a dataset stand, across its DataLoader workers: save and continue (LD-10, LD-15).

`Checkpointer` belongs to the adapter. It remembers a loaded position until the next iteration begins, in
whichever process that is, and the position of the iteration of its own process. The arithmetic is in
`state` and `position`, the plans in `planning`.

Processes share a few integers in shared memory: the epoch, how often a position was loaded, and which
workers have begun the iteration that continues it. Without the last, workers that are started anew for
every epoch would each find the loaded position again, and every later epoch would lack its beginning (K18).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lrstream.errors import UsageError
from lrstream.storage.per_process import PerProcess
from lrstream.streaming.loading import KEY_OF_WORKER, Figures, Loaded, Shares, StateLoading
from lrstream.streaming.planning import Frames
from lrstream.streaming.position import batches_of_samples
from lrstream.streaming.state import (
    STATE_FORMAT_VERSION,
    LoaderState,
    check_compatible,
)

__all__ = ["Checkpointer", "Progress"]

# Places of the shared integers; behind them one for each worker: the load that it has continued.
_EPOCH, _LOADS, _READERS, _STARTS, _PINNED, _FIRST_WORKER = range(6)
_MAX_WORKERS = 1024
_ANY_WORKERS = -1


@dataclass(slots=True)
class Progress:
    """Where one iteration of one process stands.

    Attributes:
        state: Epoch, stage and settings of the iteration; the batches in it do not matter.
        part: The share that is read: the number of the worker that the plan knows.
        num_samples: Samples of this share delivered in this stage of the epoch.
        frames: Anchors of each selected episode in this stage; None = all.
    """

    state: LoaderState
    part: int
    num_samples: int = 0
    frames: Frames | None = field(default=None, repr=False)

    @property
    def stage(self) -> int:
        """How often the epoch was planned anew."""
        return len(self.state.earlier_stages)

    def next_epoch(self, worker: int) -> Progress:
        """The start of the next epoch, which is whole."""
        return Progress(self.state.at_epoch(self.state.epoch + 1), worker)


class Checkpointer:
    """Positions of one dataset object and its copies in DataLoader workers.

    Picklable; a copy in a worker shares the epoch with its parent.

    Args:
        template: The state at the start of epoch 0, read in this process, in batches of one sample.
        shares: Who delivers how much.
        repeat: Whether iterations go from epoch to epoch.
    """

    def __init__(self, template: LoaderState, shares: Shares, *, repeat: bool) -> None:
        self._template = template
        self._shares = shares
        self._loading = StateLoading(template, shares)
        self._repeat = repeat
        self._loaded: Loaded | None = None
        self._num_loads = 0
        self._followed: LoaderState | None = None
        self._num_followed = 0
        self._progress: PerProcess[list[Progress]] = PerProcess(list)
        # In shared memory, so that workers which live on between epochs see what the parent sets.
        self._shared = torch.zeros(_FIRST_WORKER + _MAX_WORKERS, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    # -- epochs and iterations --------------------------------------------------------------------

    @property
    def template(self) -> LoaderState:
        """The state at the start of epoch 0, read in this process, in batches of one sample."""
        return self._template

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return int(self._shared[_EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a position in another epoch is forgotten."""
        at_epoch = self._template.at_epoch(epoch)  # refuses what is no epoch
        if epoch == self.epoch:
            return
        self._shared[_EPOCH] = at_epoch.epoch
        self._shared[_READERS] = 0
        self._loaded = self._followed = None

    def begin(self, worker: int, num_workers: int) -> Progress:
        """The start of an iteration in this process.

        Args:
            worker: Number of this DataLoader worker, 0 without workers.
            num_workers: DataLoader workers, 0 = none.

        Raises:
            UsageError: A loaded position cannot be continued by this worker.
        """
        loaded = self._take(worker, num_workers)
        self._shared[_READERS] = num_workers
        if worker == 0:
            self._shared[_STARTS] += 1
        self._followed = None
        if loaded is None:
            progress = Progress(replace(self._template, epoch=self.epoch, num_workers=num_workers), worker)
        else:
            part = loaded.own_part
            if part is None:
                part = (loaded.next_worker + worker) % max(1, num_workers)
            progress = Progress(
                replace(loaded.state, num_workers=num_workers),
                part,
                loaded.samples[part] if loaded.samples else 0,
                loaded.frames,
            )
        self._progress.get()[:] = [progress]
        return progress

    def _take(self, worker: int, num_workers: int) -> Loaded | None:
        """The loaded position, once for each worker; None if there is none for this iteration."""
        if self._num_loads != int(self._shared[_LOADS]):
            raise UsageError(
                "A loader state was loaded after this DataLoader worker had been started, so the worker "
                "does not know the position.",
                hint="Load the state before iterating; where workers are persistent, make a new DataLoader.",
            )
        loaded = self._loaded
        if loaded is None:
            return None
        if loaded.own_part is not None:
            self._loaded = None
            return loaded
        if worker >= _MAX_WORKERS:
            raise UsageError(f"A position can be continued by at most {_MAX_WORKERS} workers.")
        is_taken = int(self._shared[_FIRST_WORKER + worker]) == self._num_loads
        if is_taken or loaded.state.epoch != self.epoch:
            return None
        if int(self._shared[_PINNED]) not in (_ANY_WORKERS, num_workers):
            return None  # another DataLoader has continued it
        if loaded.num_workers not in (None, num_workers):
            raise UsageError(
                f"The loader state does not fit this DataLoader: num_workers: saved {loaded.num_workers}, "
                f"now {num_workers}.",
                hint="Use the saved number, or load the state with elastic=True.",
                different={"num_workers": (loaded.num_workers, num_workers)},
            )
        self._shared[_PINNED] = num_workers
        self._shared[_FIRST_WORKER + worker] = self._num_loads
        return loaded

    # -- saving -----------------------------------------------------------------------------------

    def state(
        self,
        *,
        worker: int | None,
        batches: int | None,
        samples: int | None,
        numbers: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The position as plain values.

        Args:
            worker: Number of this DataLoader worker; None in the training process.
            batches: Batches that training was given in this epoch, if it counts them itself.
            samples: Likewise, samples.
            numbers: Those of `num_workers`, `batch_size`, `drop_last` that are known.
        """
        if worker is not None:
            return self._state_of_worker(worker)
        if batches is not None or samples is not None:
            return self._counted(batches, samples, numbers).to_dict()
        if self._followed is not None:
            return self._followed.at_batch(self._followed.num_batches + self._num_followed).to_dict()
        if int(self._shared[_READERS]):
            raise UsageError(
                f"Where {int(self._shared[_READERS])} DataLoader workers stand does not say what training "
                "has got of it: batches wait between them.",
                hint="Iterate over `dataset.follow(loader)`, or give state_dict(batches=..., batch_size=...) "
                "a number, or use torchdata's StatefulDataLoader.",
            )
        progress = next(iter(self._progress.get()), None)
        if progress is not None and (self._repeat or progress.state.epoch == self.epoch):
            return replace(
                progress.state, batch_size=1, drop_last=False, num_batches=progress.num_samples
            ).to_dict()
        return self._begun_with().to_dict()

    def _begun_with(self) -> LoaderState:
        """The loaded state as far as it concerns the iteration that is under way, else an epoch's start."""
        loaded = self._loaded
        if loaded is not None and int(self._shared[_STARTS]) - loaded.starts <= 1:
            return loaded.state
        return self._template.at_epoch(self.epoch)

    def _counted(self, batches: int | None, samples: int | None, numbers: Mapping[str, Any]) -> LoaderState:
        self._refuse_repeat()
        base = self._begun_with()
        given = dict(numbers)
        if "num_workers" not in given and base.num_workers == 0:
            given["num_workers"] = int(self._shared[_READERS])
        frames = None if self._loaded is None else self._loaded.frames
        return self._at(replace(base, **given), batches, samples, frames)

    def _at(
        self, base: LoaderState, batches: int | None, samples: int | None, frames: Frames | None
    ) -> LoaderState:
        if (batches is None) == (samples is None):
            raise UsageError("Give the position either in batches or in samples.")
        if batches is not None:
            return base.at_batch(batches)
        assert samples is not None
        if base.num_workers <= 1:
            # One share: a position inside a batch is as good as any other.
            return replace(base, batch_size=1, drop_last=False, num_batches=samples)
        owned = self._shares.owned(base, frames)[base.rank]
        return base.at_batch(batches_of_samples(samples, base.batch_size, owned, drop_last=base.drop_last))

    def _state_of_worker(self, worker: int) -> dict[str, Any]:
        progress = next(iter(self._progress.get()), None)
        if progress is None:
            progress = Progress(self._template.at_epoch(self.epoch), worker)
        return {
            "format_version": STATE_FORMAT_VERSION,
            KEY_OF_WORKER: progress.part,
            "samples": progress.num_samples,
            "loader": replace(progress.state, batch_size=1, drop_last=False, num_batches=0).to_dict(),
        }

    def _refuse_repeat(self) -> None:
        if self._repeat:
            raise UsageError(
                "With repeat=True, batches of workers reach from one epoch into the next, so their number is "
                "no position in an epoch.",
                hint="Use torchdata's StatefulDataLoader, or repeat=False and set_epoch.",
            )

    # -- following a DataLoader -------------------------------------------------------------------

    def first_followed(self, numbers: Mapping[str, Any]) -> LoaderState | None:
        """The state with which a DataLoader of these numbers begins; None where batches are no position.

        Raises:
            UsageError: A loaded position does not fit the DataLoader.
        """
        if self._repeat:
            return None
        loaded = self._loaded
        if loaded is None or int(self._shared[_STARTS]) != loaded.starts:
            return replace(self._template, epoch=self.epoch, **numbers)
        if loaded.num_workers is None:
            return replace(loaded.state, **numbers)
        state = loaded.state
        if numbers["num_workers"] == state.num_workers <= 1 and numbers["batch_size"] != state.batch_size:
            batches, inside = divmod(loaded.samples[0], numbers["batch_size"])
            if not inside:
                return replace(state, **numbers, num_batches=batches)
        check_compatible(state, replace(state, **numbers))
        return state

    def follow(self, state: LoaderState | None, num_batches: int = 0) -> None:
        """Take note of what training was given. Cheap, since training waits meanwhile.

        Args:
            state: Where its DataLoader began; None where batches are no position.
            num_batches: Batches that it gave since then.
        """
        self._followed, self._num_followed = state, num_batches

    # -- loading ----------------------------------------------------------------------------------

    def load(
        self,
        values: Mapping[str, Any],
        figures: Figures,
        *,
        worker: tuple[int, int] | None,
        elastic: bool = False,
        ignore: Collection[str] = (),
        numbers: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin the next iteration at a saved position, which also chooses the epoch.

        Args:
            values: From `state`.
            figures: Of the index; asked for only where earlier stages have to be run again.
            worker: Number of this DataLoader worker and of all workers; None in the training process.
            elastic: Whether ranks, workers and batches may differ.
            ignore: Of "data_root", "revision" and "content_digest", those that may differ.
            numbers: Those of `num_workers`, `batch_size`, `drop_last` that are known.

        Raises:
            UsageError: The state is of another kind, or of other data or settings.
        """
        if isinstance(values, Mapping) and KEY_OF_WORKER in values:
            self._loaded = self._loading.of_worker(values, figures, worker, elastic=elastic, ignore=ignore)
            if not self._repeat:
                self._shared[_EPOCH] = self._loaded.state.epoch
            return
        if worker is not None:
            raise UsageError(
                "The state of a whole loader cannot be loaded in one of its workers.",
                hint="Load it in the training process, before the DataLoader is iterated.",
            )
        saved = LoaderState.from_dict(values)
        if elastic:
            self._place(self._loading.elastic(saved, figures, ignore))
        else:
            self._place(self._loading.exact(saved, figures, ignore, numbers))

    def resume(
        self,
        *,
        epoch: int,
        batches: int | None,
        samples: int | None,
        numbers: Mapping[str, Any],
        figures: Figures,
    ) -> None:
        """Begin the next iteration of an epoch after so many batches or samples of this rank."""
        self._refuse_repeat()
        start = replace(self._template, epoch=epoch, **numbers)
        self._place(self._loading.exact(self._at(start, batches, samples, None), figures))

    def _place(self, loaded: Loaded) -> None:
        self._shared[_EPOCH] = loaded.state.epoch
        self._shared[_LOADS] += 1
        self._shared[_READERS] = 0
        self._shared[_PINNED] = _ANY_WORKERS
        self._num_loads = int(self._shared[_LOADS])
        self._loaded = replace(loaded, starts=int(self._shared[_STARTS]))
        self._followed = None
        self._progress.get().clear()
