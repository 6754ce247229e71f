"""`lrstream benchmark plan`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from lrstream.cli.benchmark_text import (
    COMPARISON_HELP,
    BudgetOption,
    Check,
    CompareOption,
    EpisodesOption,
    PlotOption,
    PrefetchOption,
    ProcessConnectionsOption,
    ReservoirOption,
    Strategy,
    StrategyOption,
    milliseconds,
    rate,
    run_benchmark,
    show_limit,
)
from lrstream.cli.options import (
    BatchSizeOption,
    CacheDirOption,
    CommonOptions,
    DebugOption,
    EpochOption,
    JsonOption,
    PoolOption,
    QuietOption,
    RepoType,
    RepoTypeOption,
    RevisionOption,
    SeedOption,
    SourceArgument,
    Texts,
    VerboseOption,
    WorldSizeOption,
)
from lrstream.cli.progress import ProgressLine
from lrstream.cli.screen import Column, Screen, count, megabytes

if TYPE_CHECKING:
    from lrstream.commands.benchmark_plan import PlanBenchmark

__all__ = ["TEXTS", "plan"]

TEXTS = Texts(
    "Simulate an epoch from the index alone.",
    f"""\
Simulate an epoch of one rank from metadata and index, without reading a picture: bytes, requests, memory,
mixing, stalls, what limits, and how long it takes.

Bytes, requests for video, reservations and mixing are exactly those of the loader, whose plan and rules
of admission are run. Times are a model: a latency for each request, a bandwidth that all workers share,
even rates of decoding and training. What is not given limits nothing. Rows of tables are left out.

{COMPARISON_HELP}""",
    (
        "lrstream benchmark plan ./demo --bandwidth 50 --latency 40 --decode-rate 800",
        "lrstream benchmark plan ./demo --latency 40 --prefetch 2 --consumer-rate 500 --json",
        "lrstream benchmark plan OWNER/NAME --world-size 8 --workers 4 --bandwidth 100 --plot epoch.html",
    ),
)
_KEY_FIGURES = (
    "epoch_s",
    "first_batch_s",
    "samples_per_s",
    "bytes",
    "requests",
    "peak_reserved_bytes",
    "mixing.mean",
    "batch_wait_s.p95",
    "batch_wait_s.p99",
    "stalls",
    "stall_s",
)


def plan(
    source: SourceArgument,
    bandwidth: Annotated[
        float | None,
        typer.Option("--bandwidth", metavar="MIB", help="MiB per second that the workers share."),
    ] = None,
    latency: Annotated[
        float,
        typer.Option(
            "--latency", metavar="MS", help="From a request to its first byte, in ms.", show_default=True
        ),
    ] = 0.0,
    decode_rate: Annotated[
        float | None,
        typer.Option(
            "--decode-rate", metavar="N", help="Samples per second that all workers decode together."
        ),
    ] = None,
    consumer_rate: Annotated[
        float | None,
        typer.Option("--consumer-rate", metavar="N", help="Samples per second that training takes."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=0, help="DataLoader workers.", show_default=True)
    ] = 2,
    batch_size: BatchSizeOption = 16,
    strategy: StrategyOption = Strategy.remaining,
    episodes: EpisodesOption = None,
    world_size: WorldSizeOption = 1,
    rank: Annotated[
        int, typer.Option("--rank", metavar="N", min=0, help="The one to simulate.", show_default=True)
    ] = 0,
    pool: PoolOption = None,
    prefetch: PrefetchOption = 8,
    budget: BudgetOption = 8.0,
    reservoir: ReservoirOption = 2.0,
    connections: ProcessConnectionsOption = None,
    queue: Annotated[
        int,
        typer.Option(
            "--queue", metavar="N", min=1, help="Samples that each worker keeps ahead.", show_default=True
        ),
    ] = 8,
    seed: SeedOption = 42,
    epoch: EpochOption = 0,
    compare: CompareOption = None,
    plot: PlotOption = None,
    repo_type: RepoTypeOption = RepoType.dataset,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, simulate, render."""

    def measure(progress: ProgressLine, check: Check) -> PlanBenchmark:
        from lrstream.commands.benchmark_common import choose_episodes
        from lrstream.commands.benchmark_plan import PlanOptions, benchmark_plan

        options = PlanOptions(
            bandwidth_mib=bandwidth,
            latency_ms=latency,
            decode_rate=decode_rate,
            consumer_rate=consumer_rate,
            world_size=world_size,
            rank=rank,
            workers=workers,
            batch_size=batch_size,
            strategy=strategy.value,
            episodes=episodes,
            pool=pool,
            prefetch=prefetch,
            budget_gb=budget,
            reservoir_gb=reservoir,
            connections=connections,
            queue=queue,
            seed=seed,
            epoch=epoch,
        )
        chosen = choose_episodes(source, episodes, repo_type=repo_type.value, revision=revision, check=check)
        return benchmark_plan(chosen, options)

    run_benchmark(
        "benchmark.plan",
        CommonOptions(as_json, quiet, verbose, debug, cache_dir),
        compare=compare,
        plot=plot,
        measure=measure,
        show=_show,
        key_figures=_KEY_FIGURES,
    )


def _show(screen: Screen, report: PlanBenchmark) -> None:
    options, waits, mixing = report.settings, report.batch_wait_s, report.mixing
    reserved = f"{megabytes(report.peak_reserved_bytes)}, {megabytes(report.bound_bytes)} if decoding is slow"
    full = ", which the byte budget limits" if report.is_budget_full else ""
    screen.facts(
        [
            ("epoch", f"{report.epoch_s:,.1f} s (rank {options.rank} of {options.world_size})"),
            ("first batch", f"{report.first_batch_s:,.2f} s"),
            ("samples", f"{count(report.frames)} in {count(report.batches)} batches"),
            ("samples/s", "no limit" if math.isinf(report.samples_per_s) else rate(report.samples_per_s)),
            ("batch wait", ", ".join(milliseconds(value) for value in (waits.p50, waits.p95, waits.p99))),
            ("stalls", f"{count(report.stalls)}, {report.stall_s:.2f} s over all workers"),
            ("fetched", f"{megabytes(report.bytes)} in {count(report.requests)} requests"),
            ("per sample", megabytes(round(report.bytes_per_sample))),
            ("reserved", reserved),
            ("pool", f"{count(report.largest_pool)} episodes of a worker{full}"),
            ("episodes/batch", f"{mixing.mean:.1f} on average, {mixing.least} to {mixing.largest}"),
        ]
    )
    screen.line()
    capacities = report.capacities
    screen.table(
        [Column("stage alone"), Column("samples/s", is_number=True)],
        [
            (name, "no limit" if value is None else rate(value))
            for name, value in (
                ("network", capacities.network),
                ("decode", capacities.decode),
                ("consumer", capacities.consumer),
            )
        ],
    )
    show_limit(screen, report.limit)
