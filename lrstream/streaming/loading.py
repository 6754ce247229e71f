"""From a saved state to the position with which the next iteration begins, or a refusal (LD-10, LD-15)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lrstream.errors import UsageError
from lrstream.streaming.gop_table import GopTable
from lrstream.streaming.planning import Frames
from lrstream.streaming.state import (
    LoaderState,
    check_compatible,
    offsets_of,
    owned_frames,
    remaining_after,
    replan,
)

__all__ = ["KEY_OF_WORKER", "EpisodeShares", "Figures", "Loaded", "Shares", "StateLoading"]

KEY_OF_WORKER = "worker"
"""What tells the state of one DataLoader worker from that of a whole loader."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What of the index earlier stages of an epoch were planned with, looked up only if it is needed.

    Attributes:
        sizes: Gives int64[n], exact bytes of each selected episode.
        gops: Gives the units of each selected episode; None where there is no video.
    """

    sizes: Callable[[], npt.NDArray[np.int64]]
    gops: Callable[[], GopTable] | None = None


_NUMBERS = ("num_workers", "batch_size", "drop_last")


class Shares(Protocol):
    """Who delivers how much, as far as positions are concerned."""

    def owned(self, state: LoaderState, frames: Frames | None) -> list[npt.NDArray[np.int64]]:
        """Samples of each worker in the current stage of an epoch, int64[workers], for each rank."""
        ...

    def left(self, state: LoaderState, figures: Figures) -> Frames | None:
        """What earlier stages of the epoch have not delivered; None where there are none."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeShares:
    """Shares of one dataset.

    Attributes:
        lengths: int64[n], frames of each selected episode.
    """

    lengths: npt.NDArray[np.int64]

    def owned(self, state: LoaderState, frames: Frames | None) -> list[npt.NDArray[np.int64]]:
        """See `Shares`."""
        return owned_frames(state, self.lengths, frames)

    def left(self, state: LoaderState, figures: Figures) -> Frames | None:
        """See `Shares`."""
        if not state.earlier_stages:
            return None
        with_units = any(stage.strategy == "gop" for stage in state.earlier_stages)
        return remaining_after(
            state.earlier_stages,
            self.lengths,
            seed=state.seed,
            epoch=state.epoch,
            sizes=figures.sizes(),
            gops=figures.gops() if with_units and figures.gops is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A position with which the next iteration begins.

    Attributes:
        state: The position.
        num_workers: Workers that the iteration must have; None = any, at the start of a stage.
        samples: Samples delivered by each share of the plan.
        next_worker: The share whose batch is next.
        frames: As in `Progress`.
        own_part: Set where a worker has loaded its own position.
        starts: Iterations that had begun before.
    """

    state: LoaderState
    num_workers: int | None
    samples: tuple[int, ...] = ()
    next_worker: int = 0
    frames: Frames | None = None
    own_part: int | None = None
    starts: int = 0


@dataclass(frozen=True, slots=True)
class StateLoading:
    """Judges states for one dataset.

    Attributes:
        template: The state at the start of epoch 0, read in this process, in batches of one sample.
        shares: Who delivers how much.
    """

    template: LoaderState
    shares: Shares

    def _own(self, state: LoaderState) -> LoaderState:
        """The state as this process would save it: the dataset may have been moved."""
        here = self.template
        return replace(
            state,
            data_root=here.data_root,
            revision=here.revision,
            content_digest=here.content_digest,
            rank=here.rank,
        )

    def exact(
        self,
        saved: LoaderState,
        figures: Figures,
        ignore: Collection[str] = (),
        numbers: Mapping[str, Any] | None = None,
    ) -> Loaded:
        """The position of a state with equal numbers.

        Args:
            saved: The state.
            figures: Of the index.
            ignore: As in `check_compatible`.
            numbers: Those of `num_workers`, `batch_size`, `drop_last` that are known of this run.
        """
        given = {name: getattr(saved, name) for name in _NUMBERS} | dict(numbers or {})
        check_compatible(saved, replace(self.template, **given), ignore=ignore)
        frames = self.shares.left(saved, figures)
        offsets = offsets_of(saved, self.shares.owned(saved, frames), rank=self.template.rank)
        return Loaded(self._own(saved), saved.num_workers, offsets.samples, offsets.next_worker, frames)

    def elastic(self, saved: LoaderState, figures: Figures, ignore: Collection[str]) -> Loaded:
        """The start of a new stage, with whatever numbers this run has, after a state (LD-15)."""
        current = replace(self.template, epoch=saved.epoch)
        check_compatible(saved, current, elastic=True, ignore=ignore)
        # Refuses a position beyond the end.
        offsets_of(saved, self.shares.owned(saved, self.shares.left(saved, figures)), rank=0)
        state = replan(saved, current)
        return Loaded(state, None, frames=self.shares.left(state, figures))

    def of_worker(
        self,
        values: Mapping[str, Any],
        figures: Figures,
        worker: tuple[int, int] | None,
        *,
        elastic: bool,
        ignore: Collection[str],
    ) -> Loaded:
        """The position of one worker, in that worker.

        Args:
            values: From the same worker of an earlier run.
            figures: As in `exact`.
            worker: Number of this worker and of all workers; None in the training process.
            elastic: Whether other numbers were asked for, which the state of one worker cannot give.
            ignore: As in `check_compatible`.
        """
        if worker is None or elastic:
            raise UsageError(
                "This is the state of one DataLoader worker, as torchdata's StatefulDataLoader keeps it.",
                hint="Load the StatefulDataLoader's own state, with equal numbers; for an elastic resume "
                "save `dataset.state_dict(batches=...)` as well.",
            )
        saved = LoaderState.from_dict(values.get("loader", {}))
        check_compatible(saved, replace(self.template, num_workers=worker[1]), ignore=ignore)
        part, samples = values[KEY_OF_WORKER], values.get("samples", -1)
        if saved.rank != self.template.rank or not 0 <= part < saved.settings.num_parts or samples < 0:
            raise UsageError(
                f"The loader state is at sample {samples} of worker {part} of rank {saved.rank}, but this is "
                f"a worker of rank {self.template.rank} with {worker[1]} workers."
            )
        counts = [0] * saved.settings.num_parts
        counts[part] = samples
        return Loaded(self._own(saved), worker[1], tuple(counts), 0, self.shares.left(saved, figures), part)
