"""`lrstream benchmark loader`."""

from __future__ import annotations

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
    load,
    milliseconds,
    or_unknown,
    rate,
    run_benchmark,
    show_limit,
)
from lrstream.cli.options import (
    BatchSizeOption,
    CacheDirOption,
    CommonOptions,
    DebugOption,
    JsonOption,
    PoolOption,
    QuietOption,
    RepoType,
    RepoTypeOption,
    RevisionOption,
    Texts,
    VerboseOption,
)
from lrstream.cli.progress import ProgressLine
from lrstream.cli.screen import Column, Screen, count, megabytes
from lrstream.errors import CheckFailedError

if TYPE_CHECKING:
    from lrstream.commands.benchmark_report import LoaderBenchmark

__all__ = ["LOADER_TEXTS", "Strategy", "loader"]

LOADER_TEXTS = Texts(
    "Stream an epoch, stage by stage, and check every frame.",
    f"""\
Stream an epoch through a DataLoader, check that every frame arrives exactly once, and say what limits.

Each stage is given by itself (fetching, decoding, assembly), beside a bare decoder: frames of the run, from
memory, in a plain loop, in the same run. The ratio of the two says what the loader itself costs.

With --demo a small dataset is written into a temporary folder first, with pictures that say which frame
they are. It is indexed, validated and streamed, and each picture must be the one of its row. Nothing is
left behind.

With --samples or --seconds the run ends early; then no frame may come twice, but not all must come.

{COMPARISON_HELP}
Exit status 3 if a frame is missing, comes twice, or has another frame's picture.
""",
    (
        "lrstream benchmark loader --demo",
        "lrstream benchmark loader OWNER/NAME --workers 4 --batch-size 64",
        "lrstream benchmark loader ./demo --samples 200 --consumer-rate 500 --plot loader.html",
        "lrstream benchmark loader OWNER/NAME --strategy gop --seconds 60 --json",
    ),
)
_KEY_FIGURES = (
    "samples_per_s",
    "stages.fetch",
    "stages.decode",
    "stages.assembly",
    "ceiling_samples_per_s",
    "ceiling_ratio",
    "ceiling_cpu_ratio",
    "cpu_ms_per_sample",
    "first_batch_s",
    "batch_wait_p50_s",
    "batch_wait_p95_s",
    "batch_wait_p99_s",
    "bytes_per_sample",
    "rss_bytes",
    "pss_bytes",
)


def loader(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="Directory, OWNER/NAME or URL of a dataset; left out with --demo.",
            show_default=False,
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Write a small dataset and use that.")] = False,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=0, help="DataLoader workers.", show_default=True)
    ] = 2,
    batch_size: BatchSizeOption = 16,
    strategy: StrategyOption = Strategy.remaining,
    episodes: EpisodesOption = None,
    decode_threads: Annotated[
        int,
        typer.Option(
            "--decode-threads",
            metavar="N",
            min=1,
            help="Threads that decode in each worker.",
            show_default=True,
        ),
    ] = 2,
    prefetch: PrefetchOption = 8,
    pool: PoolOption = None,
    budget: BudgetOption = 8.0,
    reservoir: ReservoirOption = 2.0,
    connections: ProcessConnectionsOption = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", min=1, help="End after so many samples.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", help="End after so many seconds.")
    ] = None,
    consumer_rate: Annotated[
        float | None,
        typer.Option(
            "--consumer-rate",
            metavar="N",
            help="Samples per second that training takes (default: as they come).",
        ),
    ] = None,
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
    """Parse, measure, render."""

    def measure(progress: ProgressLine, check: Check) -> LoaderBenchmark:
        from lrstream.commands.benchmark import LoaderOptions, benchmark_loader

        options = LoaderOptions(
            workers=workers,
            batch_size=batch_size,
            strategy=strategy.value,
            episodes=episodes,
            decode_threads=decode_threads,
            prefetch=prefetch,
            pool=pool,
            budget_gb=budget,
            reservoir_gb=reservoir,
            connections=connections,
            samples=samples,
            seconds=seconds,
            consumer_rate=consumer_rate,
        )
        return benchmark_loader(
            source,
            demo=demo,
            options=options,
            repo_type=repo_type.value,
            revision=revision,
            progress=progress,
            check_dataset=check,
        )

    run_benchmark(
        "benchmark.loader",
        CommonOptions(as_json, quiet, verbose, debug, cache_dir),
        compare=compare,
        plot=plot,
        measure=measure,
        show=_show,
        key_figures=_KEY_FIGURES,
        exit_code=lambda report: CheckFailedError.exit_code if report.num_errors else 0,
    )


def _show(screen: Screen, report: LoaderBenchmark) -> None:
    options = report.settings
    threads = f"{count(options.workers)} workers, {count(options.decode_threads)} decode threads each"
    screen.facts(
        [
            ("samples/s", f"{rate(report.samples_per_s)} ({threads}, batches of {options.batch_size})"),
            ("frames", f"{count(report.frames)} of {count(report.episodes)} episodes, {report.strategy}"),
            ("delivered", f"{count(report.samples)} in {report.epoch_s:.2f} s"),
            ("first batch", f"{report.first_batch_s:.2f} s"),
            ("batch wait", _waits(report)),
            ("fetched", f"{megabytes(round(report.bytes_per_sample))} per sample"),
            ("requests", f"{count(report.requests)}, {count(report.retries)} repeated"),
            ("refill stalls", f"{count(report.refill_stalls)}, {report.refill_stall_s:.2f} s"),
            ("reserved", f"{megabytes(report.peak_reserved_bytes)} at most"),
            ("memory", _memory(report)),
            ("load", load(report.load_average)),
        ]
    )
    screen.line()
    stages = report.stages
    rows = [
        ("fetch", rate(stages.fetch), ""),
        ("decode", rate(stages.decode), ""),
        ("assembly", rate(stages.assembly), ""),
        ("whole loader", rate(report.samples_per_s), f"{report.cpu_ms_per_sample:.2f}"),
    ]
    if report.ceiling is not None:
        rows.append(
            ("bare decoder", rate(report.ceiling_samples_per_s), f"{report.ceiling_cpu_ms_per_sample:.2f}")
        )
        rows.append(("ratio", _ratio(report.ceiling_ratio), _ratio(report.ceiling_cpu_ratio)))
    names = ("samples/s", "CPU ms/sample")
    screen.table([Column("stage alone"), *(Column(name, is_number=True) for name in names)], rows)
    show_limit(screen, report.limit)
    for problem in report.problems:
        screen.problem(problem)
    if not report.problems:
        pictures = f", {count(report.pictures_checked)} pictures were right" if report.demo else ""
        if report.is_complete:
            screen.line(f"All {count(report.frames)} frames arrived exactly once{pictures}.")
        else:
            screen.line(f"{count(report.samples)} frames arrived, none of them twice{pictures}.")


def _waits(report: LoaderBenchmark) -> str:
    values = (report.batch_wait_p50_s, report.batch_wait_p95_s, report.batch_wait_p99_s)
    return f"{', '.join(milliseconds(value) for value in values)} (p50, p95, p99)"


def _memory(report: LoaderBenchmark) -> str:
    rss, pss = or_unknown(report.rss_bytes, megabytes), or_unknown(report.pss_bytes, megabytes)
    return f"{rss} resident, {pss} with shared pages counted once"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
