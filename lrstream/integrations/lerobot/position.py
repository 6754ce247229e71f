"""Where training stands in the data, kept beside LeRobot's checkpoints so that a resume is exact (LD-10).

LeRobot's loop takes one batch on every rank for each step, without end: at the end of an epoch a rank goes on
with its next one, and ranks need not do so at the same step. So a step number places every rank, as long as
the numbers that share out the data stay the same. These are recorded with the step; a rank finds its epoch
and its place in it by its own number of batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lrstream.errors import InputError, NotFoundError, UsageError
from lrstream.integrations.lerobot.options import PREFIX, ResumeMode
from lrstream.streaming.dataset import StreamingLeRobotDataset
from lrstream.streaming.state import LoaderState, check_compatible

__all__ = ["RECORD_FORMAT_VERSION", "RECORD_NAME", "PositionRecord", "TrainingPosition"]

logger = logging.getLogger("lrstream.lerobot")

RECORD_NAME = "lrstream.json"
"""File in ``training_state/`` of a checkpoint."""

RECORD_FORMAT_VERSION = 1

_STATE_DIRECTORY = "training_state"
_STEP_FILE = "training_step.json"
_START_ANEW = f"{PREFIX}resume=next-epoch begins a new epoch of the data instead."


@dataclass(frozen=True, slots=True)
class PositionRecord:
    """What `RECORD_NAME` holds.

    Attributes:
        step: Training step of the checkpoint.
        base_step: Step at which every rank began epoch `base_epoch`.
        base_epoch: See `base_step`.
        newest_epoch: The latest epoch that a rank is in.
        loader: Numbers that share out the data, as a loader state at the start of an epoch.
        options: Options of the loader that were given.
    """

    step: int
    base_step: int
    base_epoch: int
    newest_epoch: int
    loader: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def read(cls, checkpoint: Path) -> PositionRecord | None:
        """The record of a checkpoint; None where it has none, as of a run without lrstream.

        Raises:
            InputError: It cannot be read.
        """
        path = checkpoint / _STATE_DIRECTORY / RECORD_NAME
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise InputError(f"{path} is no JSON: {error}.", hint=_START_ANEW) from error
        version = values.pop("format_version", None) if isinstance(values, dict) else None
        if version != RECORD_FORMAT_VERSION or set(values) != set(cls.__dataclass_fields__):
            raise InputError(
                f"{path} has format version {version!r}, but this lrstream reads {RECORD_FORMAT_VERSION}.",
                hint=f"Resume with the lrstream that wrote it. {_START_ANEW}",
            )
        return cls(**values)

    def write(self, checkpoint: Path) -> None:
        """Write the record into a checkpoint that LeRobot has just saved."""
        values = {"format_version": RECORD_FORMAT_VERSION}
        values |= {name: getattr(self, name) for name in self.__dataclass_fields__}
        path = checkpoint / _STATE_DIRECTORY / RECORD_NAME
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


class TrainingPosition:
    """Places a dataset that LeRobot trains with, and records where it stands.

    Args:
        dataset: The dataset of this rank.
        batch_size: Of its DataLoader.
        num_workers: Likewise.
        options: Options of the loader that were given; recorded.
    """

    def __init__(
        self,
        dataset: StreamingLeRobotDataset,
        *,
        batch_size: int,
        num_workers: int,
        options: Mapping[str, Any],
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._options = dict(options)
        self._base_step = self._base_epoch = 0
        report = dataset.partition_report(num_workers=num_workers, batch_size=batch_size)
        self._batches = [int(count) for count in report.batches_per_rank(batch_size, drop_last=False)]
        self._numbers = LoaderState.from_dict(
            dataset.state_dict(batches=0, batch_size=batch_size, num_workers=num_workers, drop_last=False)
        )

    @property
    def batches_per_rank(self) -> list[int]:
        """Batches of one epoch, rank by rank."""
        return list(self._batches)

    def resume(self, checkpoint: Path, *, mode: ResumeMode = "exact", ignore: Collection[str] = ()) -> None:
        """Place the dataset where the run of a checkpoint stands.

        Args:
            checkpoint: Its directory, which holds ``training_state/``.
            mode: "exact" or "next-epoch".
            ignore: As in `check_compatible`; for "exact".

        Raises:
            UsageError: The run was fed by another loader, or the data or the numbers that share it out have
                changed, so that there is no exact place.
            InputError: The record cannot be read.
        """
        if mode == "next-epoch":
            record = _read_or_none(checkpoint)
            step = _step_of(checkpoint) if record is None else record.step
            self._base_step, self._base_epoch = step, 0 if record is None else record.newest_epoch + 1
            self._dataset.set_epoch(self._base_epoch)
            logger.info("Resuming at step %d with a new epoch, number %d", step, self._base_epoch)
            return
        record = PositionRecord.read(checkpoint)
        if record is None:
            raise UsageError(
                f"{checkpoint} has no {_STATE_DIRECTORY}/{RECORD_NAME}: the run was not fed by lrstream, so "
                "the next sample is not known.",
                hint=_START_ANEW,
            )
        self._check(record, ignore)
        self._base_step, self._base_epoch = record.base_step, record.base_epoch
        epoch, inside = self._place(record.step, self._dataset.rank)
        self._dataset.set_epoch(epoch)
        if inside:
            self._dataset.resume(batches=inside, batch_size=self._batch_size, num_workers=self._num_workers)
        logger.info("Resuming at step %d: epoch %d, batch %d", record.step, epoch, inside)

    def record(self, step: int) -> PositionRecord:
        """The record of a checkpoint after `step` steps, counted from the first step of the run."""
        newest = max(self._place(step, rank)[0] for rank in range(len(self._batches)))
        return PositionRecord(
            step=step,
            base_step=self._base_step,
            base_epoch=self._base_epoch,
            newest_epoch=newest,
            loader=self._numbers.to_dict(),
            options=self._options,
        )

    def _place(self, step: int, rank: int) -> tuple[int, int]:
        """(epoch, batches taken of it) of a rank after `step` steps."""
        epochs, inside = divmod(step - self._base_step, self._batches[rank])
        return self._base_epoch + epochs, inside

    def _check(self, record: PositionRecord, ignore: Collection[str]) -> None:
        saved = LoaderState.from_dict(record.loader)
        try:
            check_compatible(saved, replace(self._numbers, epoch=saved.epoch), ignore=ignore)
        except UsageError as error:
            raise UsageError(
                f"The checkpoint of step {record.step} cannot be resumed exactly. {error.message}",
                hint=f"Use the saved values; data_root and revision may differ with {PREFIX}ignore. "
                f"{_START_ANEW}",
                **error.fields,
            ) from error


def _read_or_none(checkpoint: Path) -> PositionRecord | None:
    """The record, or None where there is none that can be read."""
    try:
        return PositionRecord.read(checkpoint)
    except InputError as error:
        logger.warning("%s", error.message)
        return None


def _step_of(checkpoint: Path) -> int:
    """The step that LeRobot has saved in a checkpoint."""
    path = checkpoint / _STATE_DIRECTORY / _STEP_FILE
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist, so this is no checkpoint to resume from.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not say the step: {error}.") from error
