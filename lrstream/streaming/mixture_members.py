"""The members of a mixture: datasets that read what they have in common, within parts of the limits."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lrstream.errors import UsageError
from lrstream.layout.projection import narrow_layout
from lrstream.layout.rows import ROW_KEYS
from lrstream.storage.per_process import PerProcess
from lrstream.streaming.dataset import StreamingLeRobotDataset
from lrstream.streaming.meta import DatasetMeta
from lrstream.streaming.mixture_pipeline import MemberStream
from lrstream.streaming.mixture_plan import MixtureLaw, MixtureShares, Slice, divide_budget, member_seed
from lrstream.streaming.observed import MetricsExport
from lrstream.streaming.pipeline import EpochPipeline
from lrstream.streaming.planning import Frames, plan_stream
from lrstream.streaming.position import worker_offsets
from lrstream.streaming.settings import LoaderSettings
from lrstream.streaming.state import LoaderState, check_compatible
from lrstream.streaming.threads import JobThreads
from lrstream.streaming.windows import picture_windows
from lrstream.streaming.worker import ProcessReader

__all__ = ["MixtureMembers", "member_of"]

Int64Array = npt.NDArray[np.int64]
MixtureFrames = Sequence[Frames]

_GIB = 2**30


def member_of(dataset: StreamingLeRobotDataset, features: Sequence[str]) -> StreamingLeRobotDataset:
    """A copy of a dataset that delivers only these features, with readers of its own."""
    member = copy.copy(dataset)
    layout = member._layout = narrow_layout(dataset._layout, features)
    windows = dataset._builder.windows
    kept = {
        key: group for key, group in windows.keys.items() if key in layout.info.features or key in ROW_KEYS
    }
    member._builder = replace(
        dataset._builder, features=layout.info.features, windows=replace(windows, keys=kept)
    )
    member._settings = replace(
        dataset._settings,
        picture_windows=picture_windows(member._builder.windows, layout.episodes.cameras),
    )
    member.meta = DatasetMeta(
        layout,
        repo_id=dataset.repo_id,
        revision=dataset.revision,
        depth_unit=dataset._settings.depth_output_unit,
    )
    if not layout.video_files():
        member._sidecar = None
    member._process = PerProcess(ProcessReader)
    member._export = MetricsExport()  # it is the mixture that is looked at
    return member


@dataclass(frozen=True, eq=False)
class MixtureMembers:
    """All members, and what is divided among them. Picklable.

    Attributes:
        datasets: From `member_of`; only their readers are used, not their positions.
        names: What they are called in messages.
        states: Their states at the start of epoch 0, as one of a single rank with no budget of its own.
        law: What decides the order besides them.
        settings: Limits of all together: budget, decode threads, queue.
    """

    datasets: tuple[StreamingLeRobotDataset, ...]
    names: tuple[str, ...]
    states: tuple[LoaderState, ...]
    law: MixtureLaw
    settings: LoaderSettings

    @classmethod
    def of(
        cls,
        datasets: Sequence[StreamingLeRobotDataset],
        features: Sequence[str],
        names: Sequence[str],
        law: MixtureLaw,
        settings: LoaderSettings,
    ) -> MixtureMembers:
        """The members of a mixture of datasets as they were opened."""
        members = tuple(member_of(dataset, features) for dataset in datasets)
        states = tuple(
            replace(
                dataset._checkpoint.template,
                features=tuple(member._layout.info.features) if member._layout.left_out else None,
                seed=0,
                world_size=1,
                rank=0,
                byte_budget_bytes=None,
                picture_windows=member._settings.plan_fields()["picture_windows"],
            )
            for dataset, member in zip(datasets, members, strict=True)
        )
        for member in members:
            del member._checkpoint
        return cls(members, tuple(names), states, law, settings)

    def __len__(self) -> int:
        return len(self.datasets)

    @property
    def lengths(self) -> list[Int64Array]:
        """For each member int64[n], frames of its selected episodes."""
        return [member._lengths for member in self.datasets]

    def shares(self, world_size: int, num_workers: int, frames: MixtureFrames | None = None) -> MixtureShares:
        """Who reads what, with so many ranks and workers, of all frames or of those that are left."""
        if frames is None:
            return MixtureShares(self.law, self.lengths, world_size, num_workers)
        counts = [np.array([len(left) for left in own], dtype=np.int64) for own in frames]
        return MixtureShares(self.law, counts, world_size, num_workers)

    # -- reading ----------------------------------------------------------------------------------

    def streams(
        self,
        part: Slice,
        shares: MixtureShares,
        *,
        rank: int,
        epoch: int,
        num_workers: int,
        num_delivered: int,
        stage: int,
        frames: MixtureFrames | None,
        threads: JobThreads,
    ) -> list[MemberStream | None]:
        """The members' streams of one worker, from where it stands; nothing is fetched yet.

        Raises:
            ByteBudgetError: The worker's budget cannot hold what it needs.
        """
        sizes = [
            member._episode_loader().sizes(member._positions[own.positions])
            for member, own in zip(self.datasets, part.parts, strict=True)
        ]
        settings = self._settings_of(part, shares, rank, sizes, self.settings.byte_budget_bytes)
        before = part.draws.counts_before(part.first + num_delivered).tolist()
        streams: list[MemberStream | None] = []
        for number, (member, own, limits) in enumerate(zip(self.datasets, part.parts, settings, strict=True)):
            if limits is None:
                streams.append(None)
                continue
            place: dict[str, Any] = {
                "worker": own.worker,
                "num_workers": num_workers,
                "stage": stage,
                "frames": self._frames_of(number, frames, shares.world_size),
                "threads": threads,
            }
            first_pass = epoch if self.law.weights is None else 0
            start = partial(_start, member, limits, place)
            streams.append(MemberStream(start, own.num_frames, before[number], first_pass=first_pass))
        return streams

    def _frames_of(self, number: int, frames: MixtureFrames | None, world_size: int) -> Frames | None:
        if frames is not None:
            return frames[number]
        lengths = self.datasets[number]._lengths
        # A whole epoch of one dataset is refused where a rank has nothing of it; here others may have.
        if len(lengths) < world_size:
            return [np.arange(length, dtype=np.int32) for length in lengths.tolist()]
        return None

    def _settings_of(
        self, part: Slice, shares: MixtureShares, rank: int, sizes: Sequence[Int64Array], budget_bytes: int
    ) -> list[LoaderSettings | None]:
        """Options of each member in one worker; None where it has nothing of it, or never draws it."""
        weights = self.law.weights
        is_read = [
            own.num_frames > 0 and (weights is None or weights[number] > 0)
            for number, own in enumerate(part.parts)
        ]
        pools = [
            member._settings.episode_pool_size or shares.pool_size(part, number, rank)
            for number, member in enumerate(self.datasets)
        ]
        needed = [own if read else own[:0] for own, read in zip(sizes, is_read, strict=True)]
        called = [
            [f"{episode} of {name}" for episode in np.asarray(member.episodes)[own.positions].tolist()]
            for member, own, name in zip(self.datasets, part.parts, self.names, strict=True)
        ]
        budgets = divide_budget(budget_bytes // shares.num_busy(rank), needed, pools, called)
        settings: list[LoaderSettings | None] = []
        for number, (member, own) in enumerate(zip(self.datasets, part.parts, strict=True)):
            if not is_read[number]:
                settings.append(None)
                continue
            mine = member._settings
            settings.append(
                replace(
                    mine,
                    seed=member_seed(self.law.seed, number),
                    rank=own.rank,
                    world_size=shares.world_size,
                    episode_pool_size=pools[number],
                    # Divided again among the streams of the member, each of which has its own part here.
                    byte_budget_gb=max(1, budgets[number]) * own.num_streams / _GIB,
                    prefetch_episodes=mine.prefetch_episodes
                    and shares.part_of(mine.prefetch_episodes, part, number),
                    max_num_shards=shares.part_of(mine.max_num_shards, part, number),
                    decode_threads=self.settings.decode_threads,
                    decoded_queue_size=self.settings.decoded_queue_size,
                )
            )
        return settings

    # -- positions --------------------------------------------------------------------------------

    def remaining_after(self, state: LoaderState) -> list[list[npt.NDArray[np.int32]]]:
        """Frames of each member that the earlier stages of an epoch have not delivered, ascending.

        Every stream of every stage is planned again (LD-15).
        """
        sizes = [member._sizes() for member in self.datasets]
        gops = [
            member._gops() if member._settings.sampling_strategy == "gop" else None
            for member in self.datasets
        ]
        is_left = [[np.ones(length, dtype=bool) for length in own.tolist()] for own in self.lengths]
        frames: list[list[npt.NDArray[np.int32]]] | None = None
        for number, stage in enumerate(state.earlier_stages):
            shares = self.shares(stage.world_size, stage.num_workers, frames)
            budget = stage.byte_budget_bytes or self.settings.byte_budget_bytes
            for rank in range(stage.world_size):
                given = worker_offsets(
                    stage.num_batches, stage.batch_size, shares.samples[rank], drop_last=stage.drop_last
                )
                for worker, delivered in enumerate(given.samples):
                    part = shares.slice_of(rank, worker, state.epoch, number)
                    counts = part.draws.counts_before(delivered).tolist()
                    own_sizes = [own[piece.positions] for own, piece in zip(sizes, part.parts, strict=True)]
                    settings = self._settings_of(part, shares, rank, own_sizes, budget)
                    for member, (limits, count) in enumerate(zip(settings, counts, strict=True)):
                        if limits is None or not count:
                            continue
                        piece = part.parts[member]
                        stream = plan_stream(
                            self.lengths[member],
                            limits.plan_settings(
                                epoch=state.epoch, num_workers=stage.num_workers, stage=number
                            ),
                            rank=piece.rank,
                            worker=piece.worker,
                            sizes=sizes[member],
                            gops=gops[member],
                            frames=self._frames_of(member, frames, stage.world_size),
                        )
                        left = is_left[member]
                        for episodes, drawn in stream.plan.first(count):
                            for position, frame in zip(
                                stream.positions[episodes].tolist(), drawn.tolist(), strict=True
                            ):
                                left[position][frame] = False
            frames = [[np.flatnonzero(kept).astype(np.int32) for kept in own] for own in is_left]
        assert frames is not None
        return frames

    def record(self) -> dict[str, Any]:
        """What a saved position says of the members, as plain values."""
        return {
            "weights": None if self.law.weights is None else list(self.law.weights),
            "samples_per_epoch": self.law.samples_per_epoch,
            "members": [state.to_dict() for state in self.states],
        }

    def check(self, saved: object, *, ignore: Collection[str] = ()) -> None:
        """Refuse a saved position of another mixture.

        Args:
            saved: From `record`.
            ignore: As in `lrstream.streaming.state.check_compatible`, for each member.

        Raises:
            UsageError: Says which member differs in what.
        """
        if not isinstance(saved, Mapping) or not isinstance(saved.get("members"), (list, tuple)):
            raise UsageError(f"The state of the mixture is {saved!r}, expected what state_dict gave.")
        members, here = saved["members"], self.record()
        if len(members) != len(self):
            raise UsageError(
                f"The loader state is of a mixture of {len(members)} datasets, but this one has {len(self)}.",
                hint="Mix the datasets that it was saved with, in the same order.",
            )
        for name in ("weights", "samples_per_epoch"):
            if saved.get(name) != here[name]:
                raise UsageError(
                    f"The loader state does not fit this mixture: {name}: saved {saved.get(name)!r}, "
                    f"now {here[name]!r}."
                )
        for values, state, name in zip(members, self.states, self.names, strict=True):
            try:
                check_compatible(LoaderState.from_dict(values), state, ignore=ignore)
            except UsageError as error:
                raise UsageError(f"{name}: {error.message}", hint=error.hint, **error.fields) from error


def _start(
    member: StreamingLeRobotDataset,
    settings: LoaderSettings,
    place: Mapping[str, Any],
    epoch: int,
    skip_anchors: int,
) -> EpochPipeline | None:
    return member._start_epoch(settings, epoch=epoch, skip_anchors=skip_anchors, **place)
