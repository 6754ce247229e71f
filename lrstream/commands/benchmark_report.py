"""What `lrstream benchmark loader` is asked and what it answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.benchmark_ceiling import Ceiling
from lrstream.commands.benchmark_charts import Bars, Chart, Histogram
from lrstream.commands.benchmark_common import DatasetFacts, Limit, Machine, refuse_unless
from lrstream.commands.benchmark_stages import StageRates, TimeShares
from lrstream.sidecar.problems import Problem
from lrstream.sidecar.resolve import Origin
from lrstream.streaming.measure import RunLimits
from lrstream.streaming.planning import DEFAULT_BYTE_BUDGET_GB, DEFAULT_RESERVOIR_GB, PlanSettings
from lrstream.streaming.strategies import SamplingStrategy, check_strategy

__all__ = ["LoaderBenchmark", "LoaderOptions"]


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How a loader is run; meanings as in `StreamingLeRobotDataset`, None for its own defaults.

    Attributes:
        workers: DataLoader workers.
        batch_size: Samples of a batch.
        strategy: How frames are drawn.
        episodes: Episodes to read, as `parse_episode_spec` takes them; None = all.
        decode_threads: Threads that decode in each worker.
        prefetch: Episodes fetched ahead of the pool.
        pool: Episodes that each worker mixes.
        budget_gb: Byte budget of the rank.
        reservoir_gb: Decoded pictures that the rank keeps, with strategy `gop`.
        connections: HTTP connections of each process.
        samples: Samples after which the run ends; None = the whole epoch.
        seconds: Time after which it ends; None = never.
        consumer_rate: Samples per second that training takes; None = as they come.

    Raises:
        UsageError: A value cannot work.
    """

    workers: int = 2
    batch_size: int = 16
    strategy: SamplingStrategy = "remaining"
    episodes: str | None = None
    decode_threads: int = 2
    prefetch: int = 8
    pool: int | None = None
    budget_gb: float = DEFAULT_BYTE_BUDGET_GB
    reservoir_gb: float = DEFAULT_RESERVOIR_GB
    connections: int | None = None
    samples: int | None = None
    seconds: float | None = None
    consumer_rate: float | None = None

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        for option, value in (
            ("--samples", self.samples),
            ("--seconds", self.seconds),
            ("--consumer-rate", self.consumer_rate),
            ("--budget", self.budget_gb),
            ("--reservoir", self.reservoir_gb),
        ):
            refuse_unless(option, value, lambda number: number > 0, "more than 0")

    @property
    def limits(self) -> RunLimits:
        """Where the run ends."""
        return RunLimits(self.samples, self.seconds, self.consumer_rate)

    def plan_settings(self) -> PlanSettings:
        """The plan of the run."""
        return PlanSettings(
            num_workers=self.workers,
            strategy=self.strategy,
            episode_pool_size=self.pool,
            byte_budget_bytes=max(1, int(self.budget_gb * 2**30)),
            reservoir_bytes=max(1, int(self.reservoir_gb * 2**30)),
        )


@dataclass(frozen=True, slots=True)
class LoaderBenchmark:
    """What one run took and whether it was right.

    Attributes:
        source: The dataset; None for a demonstration, which is gone.
        demo: Whether it was a demonstration, so that the pictures were checked too.
        origin: Where its sidecar came from; None without video.
        files: MP4 files.
        episodes: Episodes that were chosen.
        frames: Their frames.
        workers: DataLoader workers.
        batch_size: Samples of a batch.
        strategy: How frames were drawn.
        is_complete: Whether the whole epoch was run, rather than a part of it.
        build_s: Duration of finding or building the sidecar.
        first_batch_s: From starting the workers to the first batch.
        epoch_s: From starting the workers to the end.
        samples_per_s: Samples per second once the first batch was there.
        batch_wait_p50_s: Half of the later batches took at most this long to arrive.
        batch_wait_p95_s: 95 % of them.
        batch_wait_p99_s: 99 % of them.
        samples: Samples that arrived.
        stages: Samples per second of each stage by itself.
        shares: What the reading processes did with their time.
        limit: The stage that limits.
        cpu_ms_per_sample: Processor time of a sample over all processes, milliseconds.
        ceiling: Decoding alone; None without video.
        ceiling_samples_per_s: Its samples per second, of as many threads as the loader can run at once.
        ceiling_cpu_ms_per_sample: Its processor time of a sample, milliseconds.
        ceiling_ratio: `samples_per_s` over `ceiling_samples_per_s`.
        ceiling_cpu_ratio: Processor time of the ceiling over that of the loader; 1 would be perfect.
        bytes_per_sample: Bytes of MP4 fetched for each sample that was made.
        requests: Requests to the storage, by the processes that read.
        retries: Repeated ones.
        refill_stalls: Times that nothing was left to give before an episode arrived.
        refill_stall_s: Their duration, over all processes.
        peak_reserved_bytes: Sum over the processes of the largest reservation of each.
        rss_bytes: Largest resident memory of this process and its workers; None where nobody knows.
        pss_bytes: The same with shared pages counted once.
        load_average: Processes that wanted a processor in the minute before the run.
        pictures_checked: Pictures whose painted identity was compared with their row.
        dataset: Which dataset.
        settings: How it was run.
        machine: Where.
        problems: What was wrong.
        waits_s: Wait for each batch after the first, float64 seconds.
    """

    source: str | None
    demo: bool
    origin: Origin | None
    files: int
    episodes: int
    frames: int
    workers: int
    batch_size: int
    strategy: SamplingStrategy
    is_complete: bool
    build_s: float
    first_batch_s: float
    epoch_s: float
    samples_per_s: float
    batch_wait_p50_s: float
    batch_wait_p95_s: float
    batch_wait_p99_s: float
    samples: int
    stages: StageRates
    shares: TimeShares
    limit: Limit
    cpu_ms_per_sample: float
    ceiling: Ceiling | None
    ceiling_samples_per_s: float | None
    ceiling_cpu_ms_per_sample: float | None
    ceiling_ratio: float | None
    ceiling_cpu_ratio: float | None
    bytes_per_sample: float
    requests: int
    retries: int
    refill_stalls: int
    refill_stall_s: float
    peak_reserved_bytes: int
    rss_bytes: int | None
    pss_bytes: int | None
    load_average: float | None
    pictures_checked: int
    dataset: DatasetFacts
    settings: LoaderOptions
    machine: Machine
    problems: tuple[Problem, ...]
    waits_s: NDArray[np.float64]

    @property
    def num_errors(self) -> int:
        """Problems that are not just warnings."""
        return sum(problem.severity == "error" for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without the problems, which have a place of their own in the document."""
        fields = asdict(self)
        del fields["problems"], fields["waits_s"]
        return fields

    def charts(self) -> list[Chart | None]:
        """What a plot shows."""
        rates = [("whole loader", self.samples_per_s)]
        rates += [(f"{name} alone", rate) for name, rate in asdict(self.stages).items() if rate is not None]
        if self.ceiling_samples_per_s is not None:
            rates.append(("bare decoder", self.ceiling_samples_per_s))
        shares = tuple((name.replace("_", " "), 100 * share) for name, share in asdict(self.shares).items())
        return [
            Bars("Samples per second", "samples/s", tuple(rates)),
            Bars("Time of the reading processes", "%", shares),
            Histogram.of("Wait for a batch", self.waits_s),
        ]
