"""From settings to the plan of one worker: partition, shares of pool and budget, random stream.

The loader, resume, inspectors and the epoch simulation all come through `plan_stream`, so that they
cannot disagree about what a worker does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lrstream.errors import UsageError
from lrstream.streaming.gop_table import GopTable, parse_windows
from lrstream.streaming.partition import num_streams, partition_episodes, partition_streams, rank_share
from lrstream.streaming.pool import AnchorPlan
from lrstream.streaming.strategies import SamplingStrategy, check_strategy

__all__ = [
    "DEFAULT_BYTE_BUDGET_GB",
    "DEFAULT_POOL_SIZE",
    "DEFAULT_RESERVOIR_GB",
    "DEFAULT_SEED",
    "Frames",
    "PlanSettings",
    "StreamPlan",
    "plan_stream",
    "plan_streams",
    "stream_share",
]

DEFAULT_SEED = 42
DEFAULT_POOL_SIZE = 32
DEFAULT_BYTE_BUDGET_GB = 8
DEFAULT_RESERVOIR_GB = 2
# No job is larger; a number beyond it comes from a damaged state, and would ask for as many shares.
_MOST_PROCESSES = 1 << 16

Frames = Sequence[npt.NDArray[np.integer]]


def _whole(name: str, value: object) -> int:
    """An integer of any kind (numpy's, too), but no truth value and nothing that was rounded."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise UsageError(f"{name} is {value!r}, expected an integer.")


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Everything that decides the order of anchors, apart from the episodes themselves.

    Attributes:
        seed: In [0, 2**64); None = 42.
        epoch: In [0, 2**64).
        world_size: Ranks of the job.
        num_workers: DataLoader workers of each rank; 0 = the training process itself.
        strategy: How anchors are drawn from the pool.
        episode_pool_size: Pool of each worker; None = 32 for the rank, shared by its busy workers.
        byte_budget_bytes: Budget of each rank, shared by its busy workers; None = no limit.
        stage: How often this epoch was re-planned for other numbers of ranks or workers (LD-15). Part of
            the random stream, so that the rest of an epoch does not repeat the choices of its beginning.
        reservoir_bytes: Decoded pictures that each rank keeps with strategy `gop`, shared by its busy
            workers; None = 2 GiB. Always None with other strategies, which keep none.
        picture_windows: Windows over pictures (`gop_table.format_windows`), which say with strategy `gop`
            when an anchor's pictures are complete. Always empty with other strategies.
    """

    seed: int | None = DEFAULT_SEED
    epoch: int = 0
    world_size: int = 1
    num_workers: int = 0
    strategy: SamplingStrategy = "remaining"
    episode_pool_size: int | None = None
    byte_budget_bytes: int | None = None
    stage: int = 0
    reservoir_bytes: int | None = None
    picture_windows: str = ""

    def __post_init__(self) -> None:
        if self.seed is None:
            object.__setattr__(self, "seed", DEFAULT_SEED)
        if self.strategy != "gop":
            object.__setattr__(self, "reservoir_bytes", None)
            object.__setattr__(self, "picture_windows", "")
        elif self.reservoir_bytes is None:
            object.__setattr__(self, "reservoir_bytes", DEFAULT_RESERVOIR_GB << 30)
        for name, least in (("seed", 0), ("epoch", 0), ("world_size", 1), ("num_workers", 0), ("stage", 0)):
            value = _whole(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if not least <= value < 2**64:
                raise UsageError(f"{name} is {value}, expected an integer in [{least}, 2**64).")
        for name in ("world_size", "num_workers"):
            value = getattr(self, name)
            if value > _MOST_PROCESSES:
                raise UsageError(f"{name} is {value}, expected at most {_MOST_PROCESSES}.")
        parse_windows(self.picture_windows)
        for name in ("episode_pool_size", "byte_budget_bytes", "reservoir_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, expected at least 1.")
        check_strategy(self.strategy)

    @property
    def num_parts(self) -> int:
        """Shares of a rank: its workers, or 1 where the training process reads by itself."""
        return max(1, self.num_workers)

    @property
    def seed_words(self) -> tuple[int, int, int]:
        """What all random streams of this epoch have in common."""
        return (DEFAULT_SEED if self.seed is None else self.seed, self.epoch, self.stage)

    def pool_size_of(self, num_streams: int) -> int:
        """Pool of each of `num_streams` busy workers of a rank; at least 1."""
        if self.episode_pool_size is not None:
            return self.episode_pool_size
        return max(1, DEFAULT_POOL_SIZE // num_streams)

    def budget_of(self, num_streams: int) -> int | None:
        """Bytes of each of `num_streams` busy workers of a rank; None = no limit."""
        return None if self.byte_budget_bytes is None else self.byte_budget_bytes // num_streams

    def reservoir_of(self, num_streams: int) -> int:
        """Decoded pictures that each of `num_streams` busy workers of a rank keeps, bytes."""
        return 0 if self.reservoir_bytes is None else self.reservoir_bytes // num_streams


@dataclass(frozen=True, slots=True, eq=False)
class StreamPlan:
    """The plan of one worker of one rank.

    Attributes:
        positions: int64[n], the worker's episodes as positions in the selection, ascending; the plan's
            episode number i is `positions[i]`.
        plan: Order of anchors, admissions and retirements.
        num_streams: Busy workers of the rank, among whom pool and budget are shared.
    """

    positions: npt.NDArray[np.int64]
    plan: AnchorPlan
    num_streams: int


def plan_stream(
    lengths: npt.ArrayLike,
    settings: PlanSettings,
    *,
    rank: int,
    worker: int,
    sizes: npt.ArrayLike | None = None,
    frames: Frames | None = None,
    episode_index: npt.ArrayLike | None = None,
    gops: GopTable | None = None,
) -> StreamPlan:
    """Plan one worker's epoch, or the rest of one.

    Args:
        lengths: int[n], frames of each selected episode.
        settings: What decides the order.
        rank: In [0, settings.world_size).
        worker: In [0, max(1, settings.num_workers)).
        sizes: int[n], exact bytes of each selected episode; needed with a byte budget.
        frames: Anchors of each selected episode for the rest of an epoch (`state.remaining_after`), or
            None for all frames. Balanced by these; then a rank may be left without any.
        episode_index: int[n], names for error messages.
        gops: Units of each selected episode; needed with strategy `gop` where there is video.

    Raises:
        UsageError: A rank has no episode (a full epoch only), or an argument is out of range.
        ByteBudgetError: An episode of this worker is larger than the worker's budget.
    """
    positions, num_owned = stream_share(lengths, settings, rank=rank, worker=worker, frames=frames)
    return _plan_share(
        positions, num_owned, lengths, settings, rank, worker, sizes, frames, episode_index, gops
    )


def stream_share(
    lengths: npt.ArrayLike,
    settings: PlanSettings,
    *,
    rank: int,
    worker: int,
    frames: Frames | None = None,
) -> tuple[npt.NDArray[np.int64], int]:
    """The episodes that one worker plans, before anything is known of their sizes.

    Args:
        lengths: int[n], frames of each selected episode.
        settings: Ranks and workers.
        rank: In [0, settings.world_size).
        worker: In [0, max(1, settings.num_workers)).
        frames: As in `plan_stream`.

    Returns:
        Its positions in the selection, int64, ascending, and how many episodes its rank owns.

    Raises:
        UsageError: A rank has no episode (a full epoch only), or an argument is out of range.
    """
    if not 0 <= rank < settings.world_size or not 0 <= worker < settings.num_parts:
        raise UsageError(
            f"Rank {rank}, worker {worker} is outside of {settings.world_size} ranks with "
            f"{settings.num_workers} workers each."
        )
    if frames is None:
        weights = np.asarray(lengths, dtype=np.int64)
        share = rank_share(weights, rank, settings.world_size)
    else:
        weights = np.array([len(anchors) for anchors in frames], dtype=np.int64)
        left = np.flatnonzero(weights)
        share = left[partition_episodes(weights[left], settings.world_size)[rank]]
    parts = partition_episodes(weights[share], settings.num_parts)
    return share[parts[worker]], len(share)


def plan_streams(
    lengths: npt.ArrayLike,
    settings: PlanSettings,
    *,
    sizes: npt.ArrayLike | None = None,
    frames: Frames | None = None,
    episode_index: npt.ArrayLike | None = None,
    gops: GopTable | None = None,
) -> Iterator[tuple[int, int, StreamPlan]]:
    """`plan_stream` of every rank and worker, as (rank, worker, plan), partitioned only once."""
    if frames is None:
        rank_share(lengths, 0, settings.world_size)  # refuses ranks without an episode
        weights = np.asarray(lengths, dtype=np.int64)
    else:
        weights = np.array([len(anchors) for anchors in frames], dtype=np.int64)
    left = np.flatnonzero(weights)
    for rank, shares in enumerate(
        partition_streams(weights[left], settings.world_size, settings.num_workers)
    ):
        num_owned = sum(len(share) for share in shares)
        for worker, share in enumerate(shares):
            plan = _plan_share(
                left[share], num_owned, lengths, settings, rank, worker, sizes, frames, episode_index, gops
            )
            yield rank, worker, plan


def _plan_share(
    positions: npt.NDArray[np.int64],
    num_owned: int,
    lengths: npt.ArrayLike,
    settings: PlanSettings,
    rank: int,
    worker: int,
    sizes: npt.ArrayLike | None,
    frames: Frames | None,
    episode_index: npt.ArrayLike | None,
    gops: GopTable | None,
) -> StreamPlan:
    """Plan the episodes at `positions`, out of the `num_owned` ones of the rank."""
    streams = num_streams(num_owned, settings.num_workers)
    plan = AnchorPlan(
        np.asarray(lengths, dtype=np.int64)[positions],
        pool_size=settings.pool_size_of(streams),
        strategy=settings.strategy,
        seed_key=(*settings.seed_words, rank, worker),
        sizes=None if sizes is None else np.asarray(sizes, dtype=np.int64)[positions],
        budget_bytes=settings.budget_of(streams),
        frames=None if frames is None else [frames[position] for position in positions.tolist()],
        # Without names an error would count episodes within the share, which nobody knows.
        episode_index=positions if episode_index is None else np.asarray(episode_index)[positions],
        gops=None if gops is None or settings.strategy != "gop" else gops.take(positions),
        reservoir_bytes=settings.reservoir_of(streams),
        picture_windows=settings.picture_windows,
    )
    return StreamPlan(positions, plan, streams)
