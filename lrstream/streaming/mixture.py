"""`MixtureDataset`: several datasets as one stream of samples, exact and resumable like each of them."""

from __future__ import annotations

import hashlib
import json
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import UsageError
from lrstream.storage.per_process import PerProcess
from lrstream.streaming.batches import BatchMemory
from lrstream.streaming.checkpoint import Checkpointer, Progress
from lrstream.streaming.dataset import StreamingLeRobotDataset
from lrstream.streaming.iterated import IteratedDataset
from lrstream.streaming.iteration import SampleStream
from lrstream.streaming.loading import Figures
from lrstream.streaming.meta import DatasetMeta
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.metrics_server import environment_address
from lrstream.streaming.mixture_features import check_frame_rates, common_features, member_names
from lrstream.streaming.mixture_members import MixtureMembers
from lrstream.streaming.mixture_metrics import combined_metrics
from lrstream.streaming.mixture_pipeline import MixturePipeline
from lrstream.streaming.mixture_plan import MixtureLaw, no_data_error
from lrstream.streaming.mixture_settings import checked_length, checked_members, checked_weights, place_of
from lrstream.streaming.observed import MetricsExport
from lrstream.streaming.partition import PartitionReport
from lrstream.streaming.planning import DEFAULT_SEED, Frames
from lrstream.streaming.report import PeriodicReport, log_interval_s, tell_partition
from lrstream.streaming.state import LoaderState
from lrstream.streaming.threads import JobThreads

__all__ = ["MixtureDataset"]

_KEY_IN_STATE = "mixture"
# A member whose samples deviate more than this from its weight is worth a warning.
_SHARE_DEVIATION = 0.01


class MixtureDataset(IteratedDataset):
    """Several datasets as one stream, for a `DataLoader` without a sampler and without ``shuffle``.

    Without weights an epoch has every selected frame of every member exactly once, over all ranks and
    workers, and each sample is drawn from the members in proportion to their remaining frames. With
    weights each sample is drawn by weight; a member that is exhausted starts its next pass, so that each
    member's own passes have every frame exactly once, and continue from epoch to epoch.

    Samples have what all members have in common, and ``dataset_index``, int64: which member they are
    from. Each member keeps its selection, windows, transforms, strategy and pool; seed, byte budget,
    decode threads, rank and repetition are the mixture's.

    Args:
        datasets: The members, in an order that is part of the mixture. They are not used up: each can be
            iterated by itself, too.
        weights: Of each member, numbers of 0 or more; they need not add up to 1. None = exact coverage.
        samples_per_epoch: With weights, samples of all ranks in one epoch; None = the members' frames.
            Each rank gets the same number, or one more.
        seed: Seed of the order; None = 42. The first member is read as with this seed alone.
        byte_budget_gb: MP4 bytes that a rank may hold, shared by its workers and in each by its members:
            every member gets its largest episode, and the rest is divided in proportion to full pools.
            1 GB counts as 2**30 bytes.
        decode_threads: Threads that decode in each worker, for all members together.
        decoded_queue_size: Samples that each worker keeps ahead, of all members together.
        allow_different_fps: Whether frame rates may differ. Windows are then each member's own multiples
            of 1 / fps; nothing is resampled.
        repeat: Whether an iteration never ends.
        rank: This process's rank; None = that of the members.
        world_size: Number of ranks; None = likewise.

    Attributes:
        metas: Metadata of each member, as far as it is delivered.
        repo_ids: Their names.
        log_interval_s: As in `StreamingLeRobotDataset`.

    Raises:
        UsageError: The members do not fit together, an argument cannot work, or a rank has no data.

    Warns:
        RuntimeWarning: Features that only some members have are left out; all are named.
    """

    def __init__(
        self,
        datasets: Sequence[StreamingLeRobotDataset],
        weights: Iterable[float] | None = None,
        *,
        samples_per_epoch: int | None = None,
        seed: int | None = DEFAULT_SEED,
        byte_budget_gb: float = 8.0,
        decode_threads: int = 2,
        decoded_queue_size: int = 8,
        allow_different_fps: bool = False,
        repeat: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        members = checked_members(datasets)
        rank, world_size = place_of(members, rank, world_size)
        settings = replace(
            members[0]._settings,
            sampling_strategy="remaining",
            seed=DEFAULT_SEED if seed is None else seed,
            byte_budget_gb=byte_budget_gb,
            decode_threads=decode_threads,
            decoded_queue_size=decoded_queue_size,
            repeat=repeat,
            rank=rank,
            world_size=world_size,
        )
        names = member_names([dataset.repo_id for dataset in members])
        check_frame_rates([dataset.fps for dataset in members], names, allow_different=allow_different_fps)
        features = common_features([dataset._builder for dataset in members], names)
        num_frames = sum(dataset.num_frames for dataset in members)
        law = MixtureLaw(
            int(settings.plan_settings(epoch=0, num_workers=0).seed or 0),
            checked_weights(weights, members, names),
            checked_length(samples_per_epoch, weights is not None, num_frames, world_size),
        )
        self._settings = settings
        self._members = MixtureMembers.of(members, features, names, law, settings)
        self.metas: list[DatasetMeta] = [member.meta for member in self._members.datasets]
        self.repo_ids: list[str] = [member.repo_id for member in self._members.datasets]
        shares = self._members.shares(world_size, 0)
        idle = np.flatnonzero(shares.samples.sum(axis=1) == 0)
        if num_frames and idle.size:
            raise no_data_error(int(idle[0]), world_size)
        self._share_samples = int(shares.samples[rank].sum())
        self._record = self._members.record()
        template = replace(
            members[0]._checkpoint.template,
            data_root="",
            revision="",
            selection_digest=_digest([state.selection_digest for state in self._members.states]),
            features=None,
            content_digest="",
            **settings.plan_fields() | {"strategy": "remaining", "episode_pool_size": None},
            rank=rank,
        )
        self._checkpoint = Checkpointer(template, _MixturePositions(self._members), repeat=repeat)
        self.log_interval_s = log_interval_s()
        self._process: PerProcess[_MixtureReader] = PerProcess(_MixtureReader)
        self._export = MetricsExport()
        if environment_address() is not None:
            for dataset in members:
                dataset._export.close()  # they have taken the port, but it is the mixture that is read
            self._serve_from_environment()

    # -- what it is -------------------------------------------------------------------------------

    @property
    def num_frames(self) -> int:
        """Selected frames of all members, over all ranks."""
        return sum(member.num_frames for member in self._members.datasets)

    @property
    def num_episodes(self) -> int:
        """Selected episodes of all members, over all ranks."""
        return sum(member.num_episodes for member in self._members.datasets)

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """Features that samples have, as the first member declares them."""
        return self.metas[0].features

    @property
    def weights(self) -> list[float] | None:
        """Weights as given; None = exact coverage."""
        return None if self._members.law.weights is None else list(self._members.law.weights)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._settings.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._settings.world_size

    def __len__(self) -> int:
        """Samples that this rank delivers in one epoch, all its workers together."""
        return self._share_samples

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.repo_ids!r}, weights={self.weights!r}, "
            f"num_episodes={self.num_episodes}, num_frames={self.num_frames}, "
            f"rank={self.rank} of {self.world_size})"
        )

    # -- iteration --------------------------------------------------------------------------------

    @property
    def _repeats(self) -> bool:
        return self._settings.repeat

    def _streams(self) -> Callable[[Progress], SampleStream | None]:
        return self._start_pipeline

    def _log(self) -> PeriodicReport:
        return self._process.get().report

    def _start_pipeline(self, progress: Progress) -> MixturePipeline | None:
        reader = self._process.get()
        state, members = progress.state, self._members
        frames: Any = progress.frames
        shares = members.shares(self.world_size, state.num_workers, frames)
        part = shares.slice_of(self.rank, progress.part, state.epoch, progress.stage)
        if self.rank == progress.part == 0:
            self._warn_of_shares(shares.expected_shares(), state.num_workers)
        if part.num_samples == 0:
            if progress.stage == 0 and self.num_frames and not any(own.num_frames for own in part.parts):
                warnings.warn(
                    f"Worker {progress.part} of rank {self.rank} has no data: the rank has "
                    f"{int(shares.episodes[self.rank].sum())} episodes for {state.num_workers} workers.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None
        threads = JobThreads("lrstream-decode", self._settings.decode_threads)
        streams = members.streams(
            part,
            shares,
            rank=self.rank,
            epoch=state.epoch,
            num_workers=state.num_workers,
            num_delivered=progress.num_samples,
            stage=progress.stage,
            frames=frames,
            threads=threads,
        )
        pipeline = MixturePipeline(
            part.draws.starting_at(part.first + progress.num_samples),
            part.num_samples - progress.num_samples,
            streams,
            threads,
            num_ahead=self._settings.decoded_queue_size,
            metrics=reader.metrics,
            memory=reader.batches,
        )
        reader.pipelines.add(pipeline)
        return pipeline

    def _warn_of_shares(self, expected: NDArray[np.float64], num_workers: int) -> None:
        weights = self._members.law.weights
        if weights is None:
            return
        total = sum(weights)
        off = [
            f"{name} {100 * found:.1f} % instead of {100 * weight / total:.1f} %"
            for name, weight, found in zip(self._members.names, weights, expected.tolist(), strict=True)
            if abs(found - weight / total) > _SHARE_DEVIATION
        ]
        if off:
            warnings.warn(
                f"Samples deviate from the weights, since not all workers ({max(1, num_workers)} on each of "
                f"{self.world_size} ranks) have episodes of every member: {', '.join(off)}. "
                "Use fewer workers.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _metrics(self) -> LoaderMetrics:
        return self._process.get().metrics

    def _sizes(self) -> NDArray[np.int64]:
        return np.concatenate([member._sizes() for member in self._members.datasets])

    # -- positions --------------------------------------------------------------------------------

    def state_dict(
        self,
        *,
        batches: int | None = None,
        samples: int | None = None,
        batch_size: int | None = None,
        num_workers: int | None = None,
        drop_last: bool | None = None,
    ) -> dict[str, Any]:
        """The position, with what it says of every member; see `StreamingLeRobotDataset.state_dict`."""
        state = super().state_dict(
            batches=batches,
            samples=samples,
            batch_size=batch_size,
            num_workers=num_workers,
            drop_last=drop_last,
        )
        return {**state, _KEY_IN_STATE: self._record}

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
        """Begin the next iteration where a state was saved; see `StreamingLeRobotDataset.load_state_dict`.

        Args:
            state: From `state_dict` of a mixture of the same datasets in the same order.
            elastic: Whether ranks, workers, batches and budget may differ; without weights only.
            ignore: As there, for every member.
            batch_size: As there.
            num_workers: As there.
            drop_last: As there.

        Raises:
            UsageError: As there; or members or weights differ.
        """
        if not isinstance(state, Mapping) or _KEY_IN_STATE not in state:
            LoaderState.from_dict(state)  # says what else may be wrong with it
            raise UsageError(
                "The loader state is of a single dataset, not of a mixture.",
                hint="Load it into a StreamingLeRobotDataset, or start the epoch anew.",
            )
        if elastic and self._members.law.weights is not None:
            raise UsageError(
                "With weights a position cannot be continued with other numbers of ranks or workers: members "
                "are in the middle of passes of their own, in each worker another one.",
                hint="Use the saved numbers, or set_epoch for the start of another epoch.",
            )
        self._members.check(state[_KEY_IN_STATE], ignore=ignore)
        super().load_state_dict(
            {name: value for name, value in state.items() if name != _KEY_IN_STATE},
            elastic,
            ignore=ignore,
            batch_size=batch_size,
            num_workers=num_workers,
            drop_last=drop_last,
        )

    # -- reports and end --------------------------------------------------------------------------

    def partition_report(
        self, num_workers: int = 0, batch_size: int = 1, drop_last: bool = False
    ) -> PartitionReport:
        """Samples, episodes and batches of every rank in one epoch, before it is run (K17); also logged.

        Args:
            num_workers: DataLoader workers of each rank.
            batch_size: Of the DataLoader, for the log line; see `PartitionReport.batches_per_rank`.
            drop_last: Likewise.
        """
        shares = self._members.shares(self.world_size, num_workers)
        report = PartitionReport(shares.samples, shares.episodes)
        tell_partition(report, rank=self.rank, batch_size=batch_size, drop_last=drop_last)
        return report

    def expected_shares(self, num_workers: int = 0) -> list[float]:
        """Part of the samples of an epoch that comes from each member, over all ranks.

        With weights it differs from them where workers have no episode of a member.

        Args:
            num_workers: DataLoader workers of each rank.
        """
        shares: list[float] = self._members.shares(self.world_size, num_workers).expected_shares().tolist()
        return shares

    def metrics(self) -> dict[str, Any]:
        """Counters of this process: as of `StreamingLeRobotDataset.metrics`, of all members together.

        ``members`` has each one's own, by its number.
        """
        own = self._process.get().metrics.snapshot()
        return combined_metrics(own, [member.metrics() for member in self._members.datasets])

    def close(self) -> None:
        """End iterations of this process and close its files and decoders; iterating opens them again."""
        self._export.close()
        reader = self._process.drop()
        if reader is not None:
            for pipeline in list(reader.pipelines):
                pipeline.close()
        for member in self._members.datasets:
            member.close()


class _MixtureReader:
    """What one process counts, and what it has to end."""

    def __init__(self) -> None:
        self.metrics = LoaderMetrics()
        self.report = PeriodicReport()
        self.pipelines: weakref.WeakSet[MixturePipeline] = weakref.WeakSet()
        self.batches = BatchMemory()


@dataclass(frozen=True, slots=True)
class _MixturePositions:
    """`lrstream.streaming.loading.Shares` of a mixture."""

    members: MixtureMembers

    def owned(self, state: LoaderState, frames: Frames | None) -> list[NDArray[np.int64]]:
        left: Any = frames
        return list(self.members.shares(state.world_size, state.num_workers, left).samples)

    def left(self, state: LoaderState, figures: Figures) -> Frames | None:
        if not state.earlier_stages:
            return None
        left: Any = self.members.remaining_after(state)
        return left  # type: ignore[no-any-return]  # one list for each member


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode("utf-8")).hexdigest()[:16]
