"""`lrstream inspect budget`: do the episodes fit, and what should the settings be?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.inspect_figures import Bin, Distribution, finding, histogram
from lrstream.commands.inspect_reservation import Reservation, reservation_of
from lrstream.commands.inspect_source import InspectedDataset
from lrstream.errors import ByteBudgetError, UsageError
from lrstream.sidecar.problems import Problem
from lrstream.streaming.budget import oversized_episode_error
from lrstream.streaming.gop_index import gop_table
from lrstream.streaming.gop_table import GopTable
from lrstream.streaming.planning import (
    DEFAULT_BYTE_BUDGET_GB,
    DEFAULT_POOL_SIZE,
    DEFAULT_SEED,
    PlanSettings,
    plan_streams,
)
from lrstream.streaming.strategies import SamplingStrategy

__all__ = ["BudgetReport", "BudgetSettings", "EpisodeSize", "WorkerReservation", "inspect_budget"]

_GIB = 2**30
_NUM_LARGEST = 5


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """Options of the loader that decide what it reserves; meanings and defaults as there."""

    byte_budget_gb: float = DEFAULT_BYTE_BUDGET_GB
    num_workers: int = 0
    episode_pool_size: int | None = None
    world_size: int = 1
    prefetch_episodes: int = 8
    decoded_queue_size: int = 8
    strategy: SamplingStrategy = "remaining"
    seed: int = DEFAULT_SEED
    epoch: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.byte_budget_gb) or self.byte_budget_gb <= 0:
            raise UsageError(f"byte_budget_gb is {self.byte_budget_gb}, expected more than 0.")

    @property
    def byte_budget_bytes(self) -> int:
        """Budget of a rank; one GB of the option is 2**30 bytes."""
        return max(1, int(self.byte_budget_gb * _GIB))


@dataclass(frozen=True, slots=True)
class EpisodeSize:
    """Exact mini-MP4 bytes of one episode over all cameras."""

    episode_index: int
    num_frames: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerReservation:
    """What one worker of one rank holds at most.

    Attributes:
        rank: Its rank.
        worker: Its number.
        num_episodes: Episodes it owns.
        budget_bytes: Its budget.
        pool_size: Its pool.
        reservation: What it reserves.
    """

    rank: int
    worker: int
    num_episodes: int
    budget_bytes: int
    pool_size: int
    reservation: Reservation


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """One busy worker: who it is, among how many, the bytes of its episodes, what it reserves."""

    rank: int
    worker: int
    num_streams: int
    sizes: NDArray[np.int64]
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """How a dataset fits a byte budget.

    Attributes:
        settings: What was asked about.
        num_episodes: Episodes.
        episode_bytes: Exact sizes.
        histogram: The same as bars.
        largest: The largest episodes, largest first.
        num_streams: Busy workers of a rank, which share its budget.
        worker_budget_bytes: Budget of each of them.
        num_oversized: Episodes larger than that; training would refuse to start.
        pool_size: Pool of each busy worker under these settings.
        pool_always_fitting: Largest pool of a worker that fits whatever episodes are in it.
        pool_fitting_on_average: Episodes of mean size that fit a worker's budget.
        workers: Reservations of every busy worker; empty where episodes are oversized.
        rank_peak_bytes: Largest sum over the workers of a rank, decoding keeping up.
        rank_bound_bytes: The same at most.
        needed_gb: Smallest budget of a rank, to three digits, with which nothing ever waits for room.
        recommended_gb: Budget to set.
        recommended_pool: Pool of each worker to set; None = leave it.
        recommendation: The same in words.
        findings: What deserves attention.
    """

    settings: BudgetSettings
    num_episodes: int
    episode_bytes: Distribution
    histogram: tuple[Bin, ...]
    largest: tuple[EpisodeSize, ...]
    num_streams: int
    worker_budget_bytes: int
    num_oversized: int
    pool_size: int
    pool_always_fitting: int
    pool_fitting_on_average: int
    workers: tuple[WorkerReservation, ...]
    rank_peak_bytes: int
    rank_bound_bytes: int
    needed_gb: float
    recommended_gb: float
    recommended_pool: int | None
    recommendation: str
    findings: tuple[Problem, ...]

    @property
    def exit_code(self) -> int:
        """0, or the status that training would end with at once: a limit."""
        return ByteBudgetError.exit_code if self.num_oversized else 0


def inspect_budget(opened: InspectedDataset, settings: BudgetSettings) -> BudgetReport:
    """Plan an epoch of every rank and worker, and count what they hold.

    Raises:
        UsageError: A rank would have no episode, or a setting cannot work.
        TimestampError: An episode's metadata do not fit its video.
    """
    episodes = opened.layout.episodes
    sizes = opened.spans.sizes(np.arange(len(episodes), dtype=np.int64))
    plan_settings = PlanSettings(
        seed=settings.seed,
        epoch=settings.epoch,
        world_size=settings.world_size,
        num_workers=settings.num_workers,
        strategy=settings.strategy,
        episode_pool_size=settings.episode_pool_size,
        byte_budget_bytes=settings.byte_budget_bytes,
    )
    gops = None
    if settings.strategy == "gop":
        positions = np.arange(len(episodes), dtype=np.int64)
        gops = gop_table(episodes, opened.files, opened.spans, positions, fps=opened.layout.info.fps)
    unlimited = _reservations(
        episodes.length, sizes, replace(plan_settings, byte_budget_bytes=None), settings, gops
    )
    # Ranks with fewer episodes than workers have fewer, hence larger, shares of the budget.
    num_streams = max((worker.num_streams for worker in unlimited), default=1)
    budget_bytes = plan_settings.budget_of(num_streams) or 0
    num_oversized = sum(
        int(np.count_nonzero(worker.sizes > (plan_settings.budget_of(worker.num_streams) or 0)))
        for worker in unlimited
    )
    needed_bytes = max((item.num_streams * item.reservation.bound_bytes for item in unlimited), default=0)
    workers = [] if num_oversized else _reservations(episodes.length, sizes, plan_settings, settings, gops)
    order = np.argsort(-sizes, kind="stable")[:_NUM_LARGEST]
    largest = tuple(
        EpisodeSize(int(episodes.episode_index[at]), int(episodes.length[at]), int(sizes[at]))
        for at in order.tolist()
    )
    needed_gb = _sufficient_gb(needed_bytes)
    advice = _advise(settings, sizes, num_streams, budget_bytes, needed_gb, workers)
    findings = []
    if num_oversized:
        error = oversized_episode_error(
            largest[0].episode_index, largest[0].size_bytes, budget_bytes, num_oversized=num_oversized
        )
        findings.append(
            finding(
                error.code,
                error.message,
                error.hint,
                severity="error",
                episode_index=largest[0].episode_index,
            )
        )
    elif any(worker.reservation.is_budget_full for worker in workers):
        findings.append(
            finding(
                "budget-limits-pool",
                f"The byte budget of {settings.byte_budget_gb:g} GB, not the pool size, limits how many "
                "episodes are mixed or prefetched.",
                advice.words,
            )
        )
    return BudgetReport(
        settings=settings,
        num_episodes=len(episodes),
        episode_bytes=Distribution.of(sizes),
        histogram=histogram(sizes),
        largest=largest,
        num_streams=num_streams,
        worker_budget_bytes=budget_bytes,
        num_oversized=num_oversized,
        pool_size=plan_settings.pool_size_of(num_streams),
        pool_always_fitting=_pool_always_fitting(sizes, budget_bytes),
        pool_fitting_on_average=int(budget_bytes // max(1.0, float(sizes.mean()))) if len(sizes) else 0,
        workers=tuple(
            WorkerReservation(
                item.rank,
                item.worker,
                len(item.sizes),
                plan_settings.budget_of(item.num_streams) or 0,
                plan_settings.pool_size_of(item.num_streams),
                item.reservation,
            )
            for item in workers
        ),
        rank_peak_bytes=_rank_sum(workers, "peak_reserved_bytes"),
        rank_bound_bytes=_rank_sum(workers, "bound_bytes"),
        needed_gb=needed_gb,
        recommended_gb=advice.budget_gb,
        recommended_pool=advice.pool_size,
        recommendation=advice.words,
        findings=tuple(findings),
    )


def _reservations(
    lengths: NDArray[np.int64],
    sizes: NDArray[np.int64],
    plan_settings: PlanSettings,
    settings: BudgetSettings,
    gops: GopTable | None,
) -> list[_Stream]:
    found = []
    for rank, worker, stream in plan_streams(lengths, plan_settings, sizes=sizes, gops=gops):
        if not len(stream.positions):
            continue
        reservation = reservation_of(
            stream.plan,
            budget_bytes=plan_settings.budget_of(stream.num_streams),
            prefetch_episodes=settings.prefetch_episodes,
            decoded_queue_size=settings.decoded_queue_size,
        )
        found.append(_Stream(rank, worker, stream.num_streams, sizes[stream.positions], reservation))
    return found


def _pool_always_fitting(sizes: NDArray[np.int64], budget_bytes: int) -> int:
    """How many of the largest episodes fit together."""
    totals = np.cumsum(np.sort(sizes)[::-1])
    return int(np.searchsorted(totals, budget_bytes, side="right"))


def _rank_sum(workers: list[_Stream], name: str) -> int:
    totals: dict[int, int] = {}
    for worker in workers:
        totals[worker.rank] = totals.get(worker.rank, 0) + int(getattr(worker.reservation, name))
    return max(totals.values(), default=0)


def _sufficient_gb(num_bytes: int) -> float:
    """The least budget of three digits that has so many bytes."""
    if num_bytes <= 0:
        return 0.0
    exponent = math.floor(math.log10(num_bytes / _GIB)) - 2
    digits = math.floor(num_bytes / _GIB / 10.0**exponent)
    # Counted up rather than computed: the value is written in decimals and must be enough as it is written.
    while int(float(f"{digits}e{exponent}") * _GIB) < num_bytes:
        digits += 1
    return float(f"{digits}e{exponent}")


@dataclass(frozen=True, slots=True)
class _Advice:
    budget_gb: float
    pool_size: int | None
    words: str


def _advise(
    settings: BudgetSettings,
    sizes: NDArray[np.int64],
    num_streams: int,
    budget_bytes: int,
    needed_gb: float,
    workers: list[_Stream],
) -> _Advice:
    largest = int(sizes.max()) if len(sizes) else 0
    if not workers and largest > budget_bytes:
        least_gb = _sufficient_gb(largest * num_streams)
        return _Advice(
            needed_gb,
            None,
            f"Set byte_budget_gb to {needed_gb:g}; at least {least_gb:g} is needed with {num_streams} "
            f"workers, because the largest episode takes {largest} bytes.",
        )
    if any(worker.reservation.is_budget_full for worker in workers):
        pool = max(1, _pool_always_fitting(sizes, budget_bytes))
        return _Advice(
            needed_gb,
            pool,
            f"Set byte_budget_gb to {needed_gb:g} to keep the pool and prefetch as they are, or "
            f"episode_pool_size to {pool} to stay within {settings.byte_budget_gb:g}.",
        )
    default_pool = max(1, DEFAULT_POOL_SIZE // num_streams)
    pool_words = "" if settings.episode_pool_size in (None, default_pool) else " and the pool"
    return _Advice(
        settings.byte_budget_gb,
        None,
        f"Keep byte_budget_gb{pool_words} as set: nothing ever waits for room. As little as {needed_gb:g} "
        "would do.",
    )
