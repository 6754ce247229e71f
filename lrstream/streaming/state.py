"""Where a loader stands in an epoch: save, check, resume, and resume with other numbers (LD-10, LD-15).

A position is a number of batches. Every rank of a synchronous job has been given the same number of them,
so the state that any one rank saved tells every rank where it stands: it derives its own offsets from
the plan, which is a pure function of the settings in the state. Without DataLoader workers and without
batches, count samples as batches of size 1.

    saved = LoaderState.from_dict(checkpoint["loader"])
    check_compatible(saved, current)            # refuses what would repeat or skip frames
    offsets = resume_offsets(saved, lengths, rank=rank)

A new DataLoader starts with its worker 0, but the batch after the saved one may be another worker's turn.
So after a resume DataLoader worker i plays the part of worker (offsets.next_worker + i) modulo the
workers, for the rest of this epoch only; `num_batches` keeps counting from the start of the epoch.

Elastic resume closes the current *stage* of the epoch. What earlier stages delivered is found by running
their plans again; the frames left are partitioned and planned anew. An epoch may have any number of stages.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lrstream.errors import UsageError
from lrstream.streaming.gop_table import GopTable
from lrstream.streaming.partition import partition_streams
from lrstream.streaming.planning import PlanSettings, plan_streams
from lrstream.streaming.position import WorkerOffsets, batches_of_samples, num_batches_of, worker_offsets
from lrstream.streaming.strategies import SamplingStrategy

__all__ = [
    "STATE_FORMAT_VERSION",
    "EpochStage",
    "LoaderState",
    "WorkerOffsets",
    "batches_of_samples",
    "check_compatible",
    "offsets_of",
    "owned_frames",
    "remaining_after",
    "replan",
    "resume_offsets",
    "selection_digest",
    "worker_offsets",
]

STATE_FORMAT_VERSION = 4

# What a state of an earlier version did not say yet.
_SINCE_VERSION_2: dict[str, Any] = {"features": None, "content_digest": ""}

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_START_ANEW = "Start the epoch anew with this loader, or load a state that it has saved."


def selection_digest(
    episode_index: npt.ArrayLike, lengths: npt.ArrayLike, sizes: npt.ArrayLike | None = None
) -> str:
    """Name of a selection, as 16 hexadecimal digits.

    Args:
        episode_index: int[n], selected episodes in the order in which they are partitioned.
        lengths: int[n], their frames.
        sizes: int[n], their exact bytes where a byte budget takes part in the plan, else None.
    """
    digest = hashlib.sha256()
    for values in (episode_index, lengths, sizes):
        column = np.empty(0) if values is None else np.asarray(values)
        digest.update(len(column).to_bytes(8, "little") + column.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class EpochStage:
    """A part of an epoch that was planned with one set of numbers.

    Attributes:
        world_size: Ranks.
        num_workers: DataLoader workers of each rank.
        batch_size: Samples of a batch.
        drop_last: Whether a worker drops its last, partial batch.
        strategy: How anchors were drawn.
        episode_pool_size, byte_budget_bytes, reservoir_bytes, picture_windows: As in `PlanSettings`.
        num_batches: Batches that each rank was given (fewer where its share had no more).
    """

    world_size: int
    num_workers: int
    batch_size: int
    drop_last: bool
    strategy: SamplingStrategy
    episode_pool_size: int | None
    byte_budget_bytes: int | None
    num_batches: int
    reservoir_bytes: int | None = None
    picture_windows: str = ""


@dataclass(frozen=True, slots=True)
class LoaderState:
    """A position in an epoch, with all that decides which samples come next.

    Attributes:
        data_root: Root of the dataset.
        revision: Its revision, "" where the storage has none.
        selection_digest: See `selection_digest`.
        seed: Seed of the order.
        epoch: Epoch number, from 0.
        world_size: Ranks.
        rank: The rank that saved this; for people, since the position holds for all ranks.
        num_workers: DataLoader workers of each rank.
        batch_size: Samples of a batch.
        strategy: How anchors are drawn.
        drop_last: Whether a worker drops its last, partial batch.
        episode_pool_size, byte_budget_bytes, reservoir_bytes, picture_windows: As in `PlanSettings`.
        num_batches: Batches given to each rank in this epoch (in this stage of it, after elastic resume).
        features: Keys that are delivered; None = all of the dataset.
        content_digest: Name of the content of the files that are read, "" where it is not known.
        earlier_stages: What came before in this epoch, with other numbers.
        format_version: Version of this record.
    """

    data_root: str
    revision: str
    selection_digest: str
    seed: int
    epoch: int
    world_size: int
    rank: int
    num_workers: int
    batch_size: int
    strategy: SamplingStrategy
    drop_last: bool = False
    episode_pool_size: int | None = None
    byte_budget_bytes: int | None = None
    num_batches: int = 0
    features: tuple[str, ...] | None = None
    content_digest: str = ""
    earlier_stages: tuple[EpochStage, ...] = ()
    format_version: int = STATE_FORMAT_VERSION
    reservoir_bytes: int | None = None
    picture_windows: str = ""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_batches < 0:
            raise UsageError(
                f"A loader cannot be at batch {self.num_batches} of batch size {self.batch_size}."
            )
        _ = self.settings  # refuses what no plan can be made of
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"A loader state of rank {self.rank} in a world of {self.world_size} ranks.")

    @property
    def settings(self) -> PlanSettings:
        """Settings of the plan of the current stage."""
        return _settings_of(self, self.seed, self.epoch, len(self.earlier_stages))

    def at_batch(self, num_batches: int) -> LoaderState:
        """The state after this many batches of the current stage."""
        return replace(self, num_batches=num_batches)

    def at_epoch(self, epoch: int) -> LoaderState:
        """The state at the start of an epoch, which is planned as a whole again."""
        return replace(self, epoch=epoch, num_batches=0, earlier_stages=())

    def to_dict(self) -> dict[str, Any]:
        """Integers, strings, booleans, None, lists and dicts only: for JSON and `torch.save` alike."""
        values = asdict(self)
        values["earlier_stages"] = list(values["earlier_stages"])
        values["features"] = None if self.features is None else list(self.features)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoaderState:
        """The state that `to_dict` gave.

        Raises:
            UsageError: The values come from something else, or from a newer lrstream.
        """
        if not isinstance(values, Mapping) or "format_version" not in values:
            raise UsageError(
                "The loader state has no format version, so it was saved by another loader.", hint=_START_ANEW
            )
        if "mixture" in values:
            raise UsageError(
                "The loader state is of a mixture of datasets, not of one.",
                hint="Load it into a MixtureDataset of the same members.",
            )
        version = values["format_version"]
        if type(version) is not int or not 1 <= version <= STATE_FORMAT_VERSION:
            raise UsageError(
                f"The loader state has format version {version!r}, but this lrstream reads "
                f"versions 1 to {STATE_FORMAT_VERSION}.",
                hint=f"Use the lrstream that saved it. {_START_ANEW}",
            )
        state = dict(values)
        if version < 2:
            state |= _SINCE_VERSION_2
        state["format_version"] = STATE_FORMAT_VERSION
        keys = state.get("features")
        if isinstance(keys, (list, tuple)) and all(isinstance(key, str) for key in keys):
            state["features"] = tuple(keys)
        stages = state.get("earlier_stages")
        if not isinstance(stages, Sequence) or isinstance(stages, str):
            raise UsageError(f"earlier_stages of the loader state is {stages!r}, expected a list.")
        state["earlier_stages"] = tuple(_build(EpochStage, stage) for stage in stages)
        record = _build(cls, state)
        if version < 4 and "gop" in (record.strategy, *(stage.strategy for stage in record.earlier_stages)):
            raise UsageError(
                f"sampling_strategy='gop' draws in another order since version 4, not as in {version}.",
                hint=f"Use the lrstream that saved it. {_START_ANEW}",
            )
        return record


_Record = TypeVar("_Record", LoaderState, EpochStage)

_OPTIONAL_INTEGERS = frozenset({"episode_pool_size", "byte_budget_bytes", "reservoir_bytes"})
_STRINGS = frozenset(
    {"data_root", "revision", "selection_digest", "content_digest", "strategy", "picture_windows"}
)


def _build(cls: type[_Record], values: object) -> _Record:
    """A record from a dict of plain values, each of the right kind."""
    if not isinstance(values, Mapping):
        raise UsageError(f"A part of the loader state is {values!r}, expected a dict.", hint=_START_ANEW)
    known = {field.name for field in fields(cls)}
    if set(values) != known:
        odd = ", ".join(sorted(str(name) for name in known.symmetric_difference(values)))
        raise UsageError(f"The loader state lacks or has unknown fields: {odd}.", hint=_START_ANEW)
    for name, value in values.items():
        if name == "earlier_stages":
            continue
        expected: type = str if name in _STRINGS else bool if name == "drop_last" else int
        if name == "features":
            expected = tuple
        is_absent = value is None and (name in _OPTIONAL_INTEGERS or name == "features")
        if not is_absent and type(value) is not expected:
            raise UsageError(
                f"{name} of the loader state is {value!r}, expected {expected.__name__}.", hint=_START_ANEW
            )
    return cls(**values)


def _settings_of(source: LoaderState | EpochStage, seed: int, epoch: int, stage: int) -> PlanSettings:
    return PlanSettings(
        seed=seed,
        epoch=epoch,
        world_size=source.world_size,
        num_workers=source.num_workers,
        strategy=source.strategy,
        episode_pool_size=source.episode_pool_size,
        byte_budget_bytes=source.byte_budget_bytes,
        stage=stage,
        reservoir_bytes=source.reservoir_bytes,
        picture_windows=source.picture_windows,
    )


# Fields that must be equal whatever happens: other frames would be meant.
_DATA_FIELDS = ("data_root", "revision", "selection_digest", "features", "seed")
# Fields that decide who delivers what, and may differ in an elastic resume.
_STAGE_FIELDS = tuple(field.name for field in fields(EpochStage) if field.name != "num_batches")
_IGNORABLE_FIELDS = frozenset({"data_root", "revision", "content_digest"})


def check_compatible(
    saved: LoaderState, current: LoaderState, *, elastic: bool = False, ignore: Collection[str] = ()
) -> None:
    """Refuse to continue where frames would be repeated or left out.

    Args:
        saved: What was loaded.
        current: What this run would save. Rank, epoch and position do not matter.
        elastic: Asked for explicitly: ranks, workers, batches, strategy, pool and budget may differ; the
            caller then continues with `replan`.
        ignore: Of "data_root" and "revision", those that may differ: the dataset was moved, or a new
            revision holds the same frames (the digest of the selection must be equal all the same).
            "content_digest": say nothing of files that were written anew.

    Raises:
        UsageError: Lists every field that differs, with both values.

    Warns:
        RuntimeWarning: Files of the same sizes were written anew since. It is no refusal, since a fresh
            copy on local disks looks the same, and the position is exact in any case.
    """
    unknown = set(ignore) - _IGNORABLE_FIELDS
    if unknown:
        raise UsageError(
            f"{', '.join(sorted(unknown))} cannot be ignored.",
            hint=f"Only {', '.join(sorted(_IGNORABLE_FIELDS))} can.",
        )
    names = [name for name in _DATA_FIELDS if name not in ignore]
    if not elastic:
        names += _STAGE_FIELDS
    different = {
        name: (getattr(saved, name), getattr(current, name))
        for name in names
        if getattr(saved, name) != getattr(current, name)
    }
    if not different:
        if "content_digest" not in ignore:
            _compare_content(saved, current)
        return
    listing = "; ".join(f"{name}: saved {old!r}, now {new!r}" for name, (old, new) in different.items())
    if any(name in _DATA_FIELDS for name in different):
        hint = "Open the dataset, episodes and seed that the state was saved with, or start the epoch anew."
    else:
        hint = "Use the saved values, or ask for an elastic resume explicitly."
    raise UsageError(f"The loader state does not fit this loader: {listing}.", hint=hint, different=different)


def _compare_content(saved: LoaderState, current: LoaderState) -> None:
    """Warn if files changed; what storages say of files can be compared under one root only."""
    digests = (saved.content_digest, current.content_digest)
    if saved.data_root == current.data_root and all(digests) and digests[0] != digests[1]:
        warnings.warn(
            f"Files of {current.data_root} were written anew since the loader state was saved (same episodes "
            "and sizes): the position is exact, but what is read may be other data. If it is a fresh copy "
            'of the same data, ignore=["content_digest"] silences this.',
            RuntimeWarning,
            stacklevel=2,
        )


def resume_offsets(
    state: LoaderState,
    lengths: npt.ArrayLike,
    *,
    rank: int,
    frames: Sequence[npt.NDArray[np.integer]] | None = None,
) -> WorkerOffsets:
    """Where each worker of a rank stands.

    Args:
        state: The position; its own `rank` does not matter.
        lengths: int[n], frames of each selected episode.
        rank: The rank to be told.
        frames: `remaining_after(state.earlier_stages, ...)` where there are earlier stages.

    Raises:
        UsageError: The position lies beyond the end of the epoch on every rank.
    """
    return offsets_of(state, owned_frames(state, lengths, frames), rank=rank)


def owned_frames(
    state: LoaderState, lengths: npt.ArrayLike, frames: Sequence[npt.NDArray[np.integer]] | None = None
) -> list[Int64Array]:
    """Anchors of each worker, int64[workers], for each rank; arguments as in `resume_offsets`."""
    if state.earlier_stages and frames is None:
        raise UsageError("This epoch was resumed with other numbers; its remaining frames are needed.")
    weights = _weights(lengths, frames)
    left = weights[weights > 0]
    return [
        np.array([int(left[share].sum()) for share in shares], dtype=np.int64)
        for shares in partition_streams(left, state.world_size, state.num_workers)
    ]


def offsets_of(state: LoaderState, owned: Sequence[Int64Array], *, rank: int) -> WorkerOffsets:
    """`resume_offsets` from what each worker of each rank owns."""
    longest = max(int(num_batches_of(f, state.batch_size, drop_last=state.drop_last).sum()) for f in owned)
    if state.num_batches > longest:
        raise UsageError(
            f"The loader state is at batch {state.num_batches}, but the epoch has {longest} batches of "
            f"{state.batch_size} on the longest rank.",
            hint=_START_ANEW,
        )
    return worker_offsets(state.num_batches, state.batch_size, owned[rank], drop_last=state.drop_last)


def _weights(lengths: npt.ArrayLike, frames: Sequence[npt.NDArray[np.integer]] | None) -> Int64Array:
    if frames is None:
        return np.asarray(lengths, dtype=np.int64)
    return np.array([len(anchors) for anchors in frames], dtype=np.int64)


def replan(saved: LoaderState, current: LoaderState) -> LoaderState:
    """The start of a new stage with the numbers of `current`, where `saved` stopped (LD-15).

    Raises:
        UsageError: Data, selection or seed differ. Use `check_compatible` with ``elastic=True`` and what
            may be ignored first.
    """
    check_compatible(saved, current, elastic=True, ignore=_IGNORABLE_FIELDS)
    stages = saved.earlier_stages
    if saved.num_batches:
        closed = {name: getattr(saved, name) for name in _STAGE_FIELDS}
        stages = (*stages, EpochStage(**closed, num_batches=saved.num_batches))
    return replace(current, epoch=saved.epoch, num_batches=0, earlier_stages=stages)


def remaining_after(
    stages: Sequence[EpochStage],
    lengths: npt.ArrayLike,
    *,
    seed: int,
    epoch: int,
    sizes: npt.ArrayLike | None = None,
    gops: GopTable | None = None,
) -> list[Int32Array]:
    """Frames that no rank has been given, by running the plans of all earlier stages again.

    Args:
        stages: The stages, first one first.
        lengths: int[n], frames of each selected episode.
        seed: Seed of the order.
        epoch: Epoch number.
        sizes: int[n], exact bytes of each selected episode, where a stage had a byte budget.
        gops: Units of each selected episode, where a stage had strategy `gop`.

    Returns:
        n arrays int32 of frames, ascending, to be given to `plan_stream` as `frames`. Frames of partial
        batches that were dropped so far are among them.
    """
    counts = np.asarray(lengths, dtype=np.int64)
    stops = np.cumsum(counts)
    starts = stops - counts
    is_left = np.ones(int(counts.sum()), dtype=bool)
    frames: list[Int32Array] | None = None
    for number, stage in enumerate(stages):
        settings = _settings_of(stage, seed, epoch, number)
        plans: dict[int, list[tuple[Int64Array, Any]]] = {}
        for rank, _, stream in plan_streams(counts, settings, sizes=sizes, frames=frames, gops=gops):
            plans.setdefault(rank, []).append((stream.positions, stream.plan))
        for streams in plans.values():
            owned = [plan.num_anchors for _, plan in streams]
            offsets = worker_offsets(stage.num_batches, stage.batch_size, owned, drop_last=stage.drop_last)
            for (positions, plan), delivered in zip(streams, offsets.samples, strict=True):
                for episode, frame in plan.first(delivered):
                    is_left[starts[positions[episode]] + frame] = False
        frames = [
            np.flatnonzero(is_left[start:stop]).astype(np.int32)
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
    if frames is None:
        return [np.arange(count, dtype=np.int32) for count in counts.tolist()]
    return frames
