"""`lrstream inspect plan`: who gets which share of an epoch, and how well it is mixed (K15, K17)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lrstream.commands.inspect_figures import finding
from lrstream.errors import UsageError
from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.problems import Problem
from lrstream.streaming.partition import partition_report
from lrstream.streaming.planning import DEFAULT_SEED, PlanSettings, plan_streams
from lrstream.streaming.pool import episodes_per_batch
from lrstream.streaming.strategies import ANCHOR_STRATEGIES

__all__ = ["Mixing", "PlanReport", "RankShare", "WorkerShare", "inspect_plan"]


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """One worker's part of an epoch."""

    worker: int
    num_episodes: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part of an epoch.

    Attributes:
        rank: Its number.
        num_episodes: Episodes it owns.
        num_frames: Frames it delivers.
        num_batches: Batches of its DataLoader; every worker may end with a partial one.
        num_full_batches: Those that are left with ``drop_last=True``.
        workers: Its workers.
    """

    rank: int
    num_episodes: int
    num_frames: int
    num_batches: int
    num_full_batches: int
    workers: tuple[WorkerShare, ...]


@dataclass(frozen=True, slots=True)
class Mixing:
    """How many different episodes the batches of one strategy hold, over all ranks and workers.

    Attributes:
        strategy: Its name.
        mean: Mean number of episodes in a batch.
        least: Smallest.
        p10: 10th percentile.
        largest: Largest.
    """

    strategy: str
    mean: float
    least: int
    p10: int
    largest: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Partition and mixing of one epoch.

    Attributes:
        num_episodes: Episodes.
        num_frames: Frames.
        world_size: Ranks.
        num_workers: DataLoader workers of each rank.
        batch_size: Samples of a batch.
        pool_size: Pool of each busy worker.
        rank_balance: Largest rank share over the mean one.
        worker_balance: Largest worker share over the mean one.
        num_idle_workers: Workers without an episode.
        ranks: Shares.
        mixing: Episodes per batch by strategy.
        findings: What deserves attention.
    """

    num_episodes: int
    num_frames: int
    world_size: int
    num_workers: int
    batch_size: int
    pool_size: int
    rank_balance: float
    worker_balance: float
    num_idle_workers: int
    ranks: tuple[RankShare, ...]
    mixing: tuple[Mixing, ...]
    findings: tuple[Problem, ...]


def inspect_plan(
    layout: DatasetLayout,
    *,
    world_size: int = 1,
    num_workers: int = 0,
    batch_size: int = 64,
    episode_pool_size: int | None = None,
    seed: int = DEFAULT_SEED,
    epoch: int = 0,
) -> PlanReport:
    """Plan an epoch from metadata alone. The byte budget is left aside: see `inspect budget`.

    So is strategy `gop`, whose plan needs the index: see `benchmark plan`.

    Raises:
        UsageError: A rank would have no episode, or a number cannot work.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, expected at least 1.")
    lengths = layout.episodes.length
    shares = partition_report(lengths, world_size, num_workers)
    batches = shares.batches_per_rank(batch_size, drop_last=False)
    full = shares.batches_per_rank(batch_size, drop_last=True)
    ranks = tuple(
        RankShare(
            rank=rank,
            num_episodes=int(shares.rank_episodes[rank]),
            num_frames=int(shares.rank_frames[rank]),
            num_batches=int(batches[rank]),
            num_full_batches=int(full[rank]),
            workers=tuple(
                WorkerShare(worker, int(episodes), int(frames))
                for worker, (episodes, frames) in enumerate(
                    zip(shares.worker_episodes[rank], shares.worker_frames[rank], strict=True)
                )
            ),
        )
        for rank in range(world_size)
    )
    mixing = []
    pool_size = 0
    for strategy in ANCHOR_STRATEGIES:
        settings = PlanSettings(
            seed=seed,
            epoch=epoch,
            world_size=world_size,
            num_workers=num_workers,
            strategy=strategy,
            episode_pool_size=episode_pool_size,
        )
        counts = []
        for _, _, stream in plan_streams(lengths, settings):
            counts.append(episodes_per_batch(stream.plan, batch_size))
            pool_size = max(pool_size, stream.plan.pool_size)
        together = np.sort(np.concatenate(counts))
        if together.size:
            mixing.append(
                Mixing(
                    strategy,
                    float(together.mean()),
                    int(together[0]),
                    int(together[(together.size - 1) // 10]),
                    int(together[-1]),
                )
            )
    return PlanReport(
        num_episodes=len(lengths),
        num_frames=int(lengths.sum()),
        world_size=world_size,
        num_workers=num_workers,
        batch_size=batch_size,
        pool_size=pool_size,
        rank_balance=shares.rank_balance,
        worker_balance=shares.worker_balance,
        num_idle_workers=shares.num_idle_workers,
        ranks=ranks,
        mixing=tuple(mixing),
        findings=tuple(_findings(ranks, shares.num_idle_workers, num_workers)),
    )


def _findings(ranks: tuple[RankShare, ...], num_idle: int, num_workers: int) -> list[Problem]:
    found = []
    for name, counts in (
        ("batches", [rank.num_batches for rank in ranks]),
        ("batches with drop_last=True", [rank.num_full_batches for rank in ranks]),
    ):
        if min(counts) != max(counts):
            found.append(
                finding(
                    "uneven-batches",
                    f"Ranks get between {min(counts)} and {max(counts)} {name} in an epoch.",
                    f"Let every rank stop after {min(counts)}, or use torch's Join; otherwise the others "
                    "wait for ever for the first one that ends.",
                )
            )
    if num_idle:
        found.append(
            finding(
                "idle-workers",
                f"{num_idle} workers own no episode: a rank has fewer episodes than {num_workers} workers.",
                f"Use num_workers={min(rank.num_episodes for rank in ranks)} or fewer.",
            )
        )
    return found
