"""`lrstream benchmark plan`: an epoch from the index alone, for a network and a decoder on paper.

The plan, the admissions and the reservations are those of the loader, exactly. Times are a model: latency,
a shared bandwidth, even rates of decoding and training.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.benchmark_charts import Bars, Chart, Histogram
from lrstream.commands.benchmark_common import (
    ChosenEpisodes,
    DatasetFacts,
    Limit,
    Machine,
    Percentiles,
    refuse_unless,
    this_machine,
)
from lrstream.commands.benchmark_epoch import EpochTimeline, Rates, StreamWalk, play, walk
from lrstream.commands.inspect_plan import Mixing
from lrstream.commands.inspect_reservation import Reservation, reservation_of
from lrstream.errors import UsageError
from lrstream.index.open import open_index
from lrstream.sidecar.problems import Problem
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.streaming.gop_index import gop_table
from lrstream.streaming.planning import (
    DEFAULT_BYTE_BUDGET_GB,
    DEFAULT_RESERVOIR_GB,
    DEFAULT_SEED,
    PlanSettings,
    StreamPlan,
    plan_streams,
)
from lrstream.streaming.pool import episodes_per_batch
from lrstream.streaming.sources import EpisodeSpans, TrackSource, VideoFiles
from lrstream.streaming.strategies import SamplingStrategy, check_strategy

__all__ = ["Capacities", "PlanBenchmark", "PlanOptions", "benchmark_plan"]

_MIB = 2**20
_GIB = 2**30
_MAX_OPEN_FILES = 16
# As the loader: episodes that a worker fetches at once, threads that do it, connections over HTTP.
_MAX_EPISODES_AT_ONCE = 16
_MAX_FETCH_THREADS = 64
_CONNECTIONS = 32
# Below this share of what the slowest stage could do, it is not that stage which limits.
_LOST_TO_STALLS = 0.8


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The loader and its surroundings; names of loader options as there.

    Attributes:
        bandwidth_mib: MiB per second that the workers of the rank share; None = no limit.
        latency_ms: From a request to its first byte, milliseconds.
        decode_rate: Samples per second that the workers of the rank decode together; None = no limit.
        consumer_rate: Samples per second that training takes; None = no limit.
        world_size: Ranks.
        rank: The rank that is simulated.
        workers: Its DataLoader workers.
        batch_size: Samples of a batch.
        strategy: How frames are drawn.
        episodes: Episodes to read, as `parse_episode_spec` takes them; None = all.
        pool: Episodes that each worker mixes; None = 32 / workers.
        prefetch: Episodes fetched ahead of the pool.
        budget_gb: Byte budget of the rank.
        reservoir_gb: Decoded pictures that the rank keeps, with strategy `gop`.
        connections: HTTP connections of each process.
        queue: Samples that each worker keeps ahead.
        seed: Seed.
        epoch: Epoch.

    Raises:
        UsageError: A value cannot work.
    """

    bandwidth_mib: float | None = None
    latency_ms: float = 0.0
    decode_rate: float | None = None
    consumer_rate: float | None = None
    world_size: int = 1
    rank: int = 0
    workers: int = 2
    batch_size: int = 16
    strategy: SamplingStrategy = "remaining"
    episodes: str | None = None
    pool: int | None = None
    prefetch: int = 8
    budget_gb: float = DEFAULT_BYTE_BUDGET_GB
    reservoir_gb: float = DEFAULT_RESERVOIR_GB
    connections: int | None = None
    queue: int = 8
    seed: int = DEFAULT_SEED
    epoch: int = 0

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        unlimited = "Leave the option out for no limit."
        for option, value, hint in (
            ("--bandwidth", self.bandwidth_mib, unlimited),
            ("--decode-rate", self.decode_rate, unlimited),
            ("--consumer-rate", self.consumer_rate, unlimited),
            ("--budget", self.budget_gb, None),
            ("--reservoir", self.reservoir_gb, None),
        ):
            refuse_unless(option, value, lambda number: number > 0, "more than 0", hint)
        refuse_unless("--latency", self.latency_ms, lambda number: number >= 0, "0 or more")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"--rank is {self.rank}, expected less than --world-size, {self.world_size}.")
        self.plan_settings()

    def plan_settings(self) -> PlanSettings:
        """The plan of the epoch."""
        return PlanSettings(
            seed=self.seed,
            epoch=self.epoch,
            world_size=self.world_size,
            num_workers=self.workers,
            strategy=self.strategy,
            episode_pool_size=self.pool,
            byte_budget_bytes=max(1, int(self.budget_gb * _GIB)),
            reservoir_bytes=max(1, int(self.reservoir_gb * _GIB)),
        )

    def fetches_at_once(self, num_cameras: int) -> int:
        """Episodes that one worker fetches at once, each in a request for every camera."""
        by_threads = _MAX_FETCH_THREADS // (num_cameras + 1)
        by_connections = (self.connections or _CONNECTIONS) // max(1, num_cameras)
        return max(1, min(_MAX_EPISODES_AT_ONCE, by_threads, by_connections))


@dataclass(frozen=True, slots=True)
class Capacities:
    """Samples per second that each stage could give; None = without limit.

    Attributes:
        network: Frames per second that bandwidth and latency let through.
        decode: As given.
        consumer: As given.
    """

    network: float | None
    decode: float | None
    consumer: float | None


@dataclass(frozen=True, slots=True)
class PlanBenchmark:
    """One rank's epoch on paper.

    Attributes:
        frames: Samples of the rank.
        batches: Its batches.
        bytes: Bytes of MP4 that it fetches.
        requests: Range requests for them; rows of tables come on top.
        bytes_per_sample: Bytes over samples.
        peak_reserved_bytes: Sum over its workers of what each reserves at most, where decoding keeps up.
        bound_bytes: The same at any speed of decoding.
        peak_pool_bytes: The same of the pools alone.
        largest_pool: Most episodes in the pool of a worker.
        is_budget_full: Whether the byte budget keeps episodes out of pool or prefetch.
        mixing: Episodes per batch.
        epoch_s: Duration of the epoch.
        first_batch_s: When the first batch is there.
        samples_per_s: Samples per second after it.
        batch_wait_s: Waits for later batches.
        stalls: Times that a worker waits for an episode.
        stall_s: Their duration, over all workers.
        capacities: What each stage could give.
        limit: What limits.
        dataset: Which dataset.
        settings: What was asked.
        machine: Where it was computed, which changes no figure.
        waits_s: Each wait.
    """

    frames: int
    batches: int
    bytes: int
    requests: int
    bytes_per_sample: float
    peak_reserved_bytes: int
    bound_bytes: int
    peak_pool_bytes: int
    largest_pool: int
    is_budget_full: bool
    mixing: Mixing
    epoch_s: float
    first_batch_s: float
    samples_per_s: float
    batch_wait_s: Percentiles
    stalls: int
    stall_s: float
    capacities: Capacities
    limit: Limit
    dataset: DatasetFacts
    settings: PlanOptions
    machine: Machine
    waits_s: NDArray[np.float64]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """None: a plan that cannot be carried out is an error."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without the single waits."""
        fields = asdict(self)
        del fields["waits_s"]
        return fields

    def charts(self) -> list[Chart | None]:
        """What a plot shows."""
        rates = [("epoch", self.samples_per_s)]
        rates += [(name, value) for name, value in asdict(self.capacities).items() if value is not None]
        return [
            Bars("Samples per second, and what each stage could give", "samples/s", tuple(rates)),
            Histogram.of("Wait for a batch", self.waits_s),
        ]


def benchmark_plan(chosen: ChosenEpisodes, options: PlanOptions) -> PlanBenchmark:
    """Simulate an epoch. Reads metadata and the index, which is built first where there is none.

    Raises:
        UsageError: A rank would have no episode.
        ByteBudgetError: An episode is larger than a worker's budget.
        LrstreamError: As `resolve_sidecar`.
    """
    layout, positions = chosen
    table = layout.episodes
    tracks: TrackSource | None = None
    if layout.video_files():
        tracks = open_index(resolve_sidecar(layout.store, layout))
    files = VideoFiles(layout.store, tracks, _MAX_OPEN_FILES)
    try:
        spans = EpisodeSpans(table, files)
        settings = options.plan_settings()
        streams: list[StreamPlan] = []
        sizes = spans.sizes(positions)
        lengths = table.length[positions]
        gops = None
        if settings.strategy == "gop":
            gops = gop_table(table, files, spans, positions, fps=layout.info.fps)
        for rank, _, stream in plan_streams(
            lengths, settings, sizes=sizes, episode_index=table.episode_index[positions], gops=gops
        ):
            if rank == options.rank and len(stream.positions):
                streams.append(stream)
        num_bytes = np.zeros(len(positions), dtype=np.int64)
        for camera in table.cameras:
            for place in np.concatenate([stream.positions for stream in streams]).tolist():
                span = spans.span(int(positions[place]), camera)
                num_bytes[place] += span.stop_byte - span.start_byte
    finally:
        files.close()
        if tracks is not None:
            tracks.close()
    walks, reservations = [], []
    for stream in streams:
        budget_bytes = settings.budget_of(stream.num_streams)
        walks.append(
            walk(
                stream.plan,
                num_bytes[stream.positions],
                budget_bytes=budget_bytes,
                prefetch_episodes=options.prefetch,
            )
        )
        reservations.append(
            reservation_of(
                stream.plan,
                budget_bytes=budget_bytes,
                prefetch_episodes=options.prefetch,
                decoded_queue_size=options.queue,
            )
        )
    num_cameras = len(table.cameras)
    rates = Rates(
        bytes_per_s=None if options.bandwidth_mib is None else options.bandwidth_mib * _MIB,
        latency_s=options.latency_ms / 1000,
        decode_per_s=options.decode_rate,
        consumer_per_s=options.consumer_rate,
        fetches=options.fetches_at_once(num_cameras),
        decoded_queue_size=options.queue,
    )
    timeline = play(walks, rates, batch_size=options.batch_size, in_process=options.workers == 0)
    return _report(chosen, options, streams, walks, reservations, timeline, rates, num_cameras)


def _report(
    chosen: ChosenEpisodes,
    options: PlanOptions,
    streams: list[StreamPlan],
    walks: list[StreamWalk],
    reservations: list[Reservation],
    timeline: EpochTimeline,
    rates: Rates,
    num_cameras: int,
) -> PlanBenchmark:
    frames = sum(one.num_anchors for one in walks)
    total_bytes = sum(int(one.num_bytes.sum()) for one in walks)
    num_episodes = sum(len(one.num_bytes) for one in walks)
    together = np.sort(
        np.concatenate([episodes_per_batch(stream.plan, options.batch_size) for stream in streams])
    )
    first = min(options.batch_size, *(one.num_anchors for one in walks))
    seconds = timeline.epoch_s - timeline.first_batch_s
    rate = (frames - first) / seconds if seconds > 0 else math.inf
    capacities = _capacities(rates, walks, total_bytes, options, has_video=num_cameras > 0)
    waits = np.array(timeline.waits_s, dtype=np.float64)
    return PlanBenchmark(
        frames=frames,
        batches=len(together),
        bytes=total_bytes,
        requests=num_episodes * num_cameras,
        bytes_per_sample=total_bytes / frames if frames else 0.0,
        peak_reserved_bytes=sum(item.peak_reserved_bytes for item in reservations),
        bound_bytes=sum(item.bound_bytes for item in reservations),
        peak_pool_bytes=sum(item.peak_pool_bytes for item in reservations),
        largest_pool=max(item.largest_pool for item in reservations),
        is_budget_full=any(item.is_budget_full for item in reservations),
        mixing=Mixing(
            options.strategy,
            float(together.mean()),
            int(together[0]),
            int(together[(together.size - 1) // 10]),
            int(together[-1]),
        ),
        epoch_s=timeline.epoch_s,
        first_batch_s=timeline.first_batch_s,
        samples_per_s=rate,
        batch_wait_s=Percentiles.of(waits),
        stalls=timeline.stalls,
        stall_s=timeline.stall_s,
        capacities=capacities,
        limit=_limit_of(rate, capacities, reservations, timeline),
        dataset=DatasetFacts.of(*chosen),
        settings=options,
        machine=this_machine(),
        waits_s=waits,
    )


def _capacities(
    rates: Rates, walks: list[StreamWalk], total_bytes: int, options: PlanOptions, *, has_video: bool
) -> Capacities:
    frames = sum(one.num_anchors for one in walks)
    bounds = []
    if has_video and rates.bytes_per_s is not None:
        bounds.append(frames * rates.bytes_per_s / total_bytes)
    if has_video and rates.latency_s:
        # Once the pool is full, no more episodes are under way than are fetched ahead of it.
        at_once = len(walks) * min(rates.fetches, max(1, options.prefetch))
        episodes = sum(len(one.num_bytes) for one in walks)
        bounds.append(at_once * frames / episodes / rates.latency_s)
    return Capacities(min(bounds, default=None), rates.decode_per_s, rates.consumer_per_s)


def _limit_of(
    rate: float,
    capacities: Capacities,
    reservations: list[Reservation],
    timeline: EpochTimeline,
) -> Limit:
    known = {name: value for name, value in asdict(capacities).items() if value is not None}
    if not known:
        return Limit("nothing", "no rate was given", ("Give --bandwidth, --latency or --decode-rate.",))
    stage = min(known, key=lambda name: known[name])
    if rate < _LOST_TO_STALLS * known[stage]:
        left = f"{rate:,.0f} of {known[stage]:,.0f} samples/s are left"
        if timeline.stall_s / len(reservations) < sum(timeline.waits_s) / 2:
            return Limit(
                "decode",
                f"decoding and training take turns, {left}",
                ("Raise --workers (num_workers), or --queue (decoded_queue_size).",),
            )
        advice = "Raise --prefetch (prefetch_episodes), or --workers (num_workers)."
        if any(item.is_budget_full for item in reservations):
            advice = "Raise --budget (byte_budget_gb): it is full, which holds prefetch back."
        return Limit("stalls", f"workers wait for episodes, {left}", (advice,))
    reason = f"it gives {known[stage]:,.0f} samples/s"
    if stage == "network":
        return Limit(
            "network",
            reason,
            ("More bandwidth, or more --connections and --prefetch where latency limits.",),
        )
    if stage == "decode":
        return Limit("decode", reason, ("More --decode-threads, workers or processors, or shorter GOPs.",))
    return Limit("consumer", reason, ("Nothing to change.",))
