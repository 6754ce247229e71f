"""`lrstream benchmark fetch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lrstream.cli.benchmark_text import (
    COMPARISON_HELP,
    Check,
    CompareOption,
    ConnectionsOption,
    EpisodesOption,
    PlotOption,
    load,
    milliseconds,
    rate,
    run_benchmark,
)
from lrstream.cli.options import (
    CacheDirOption,
    CommonOptions,
    DebugOption,
    JsonOption,
    QuietOption,
    RepoType,
    RepoTypeOption,
    RevisionOption,
    SeedOption,
    SourceArgument,
    Texts,
    VerboseOption,
)
from lrstream.cli.progress import ProgressLine
from lrstream.cli.screen import Column, Screen, count, megabytes

if TYPE_CHECKING:
    from lrstream.commands.benchmark_fetch import FetchBenchmark

__all__ = ["TEXTS", "fetch"]

TEXTS = Texts(
    "Fetch episodes, and nothing else.",
    f"""\
Fetch the byte ranges of some episodes as the loader does, one for each camera, and do nothing with them:
throughput, latencies, requests, repetitions and connections.

They are fetched twice. The first pass is cold: no connection is open, no URL resolved. (The system's own
cache of local files is left as it is.) The second one reads the same ranges again.

{COMPARISON_HELP}""",
    (
        "lrstream benchmark fetch ./demo",
        "lrstream benchmark fetch ./demo --count 8 --at-once 4 --plot fetch.html",
        "lrstream benchmark fetch OWNER/NAME --connections 64 --json",
    ),
)
_KEY_FIGURES = (
    *(
        f"{name}.{figure}"
        for name in ("cold", "repeated")
        for figure in ("mib_per_s", "latency_s.p50", "latency_s.p95", "latency_s.p99", "requests", "retries")
    ),
    "frames_per_s",
)


def fetch(
    source: SourceArgument,
    episodes: EpisodesOption = None,
    number: Annotated[
        int,
        typer.Option(
            "--count",
            metavar="N",
            min=1,
            help="Most episodes to fetch, chosen at random of these.",
            show_default=True,
        ),
    ] = 32,
    at_once: Annotated[
        int,
        typer.Option("--at-once", metavar="N", min=1, help="Episodes fetched at once.", show_default=True),
    ] = 16,
    connections: ConnectionsOption = None,
    subranges: Annotated[
        int,
        typer.Option(
            "--subranges", metavar="N", min=1, help="Parallel parts of a read over HTTP.", show_default=True
        ),
    ] = 1,
    seed: SeedOption = 0,
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

    def measure(progress: ProgressLine, check: Check) -> FetchBenchmark:
        from lrstream.commands.benchmark_common import choose_episodes
        from lrstream.commands.benchmark_fetch import FetchOptions, benchmark_fetch

        options = FetchOptions(
            episodes=episodes,
            count=number,
            at_once=at_once,
            connections=connections,
            subranges=subranges,
            seed=seed,
        )
        chosen = choose_episodes(source, episodes, repo_type=repo_type.value, revision=revision, check=check)
        return benchmark_fetch(chosen, options, progress=progress)

    run_benchmark(
        "benchmark.fetch",
        CommonOptions(as_json, quiet, verbose, debug, cache_dir),
        compare=compare,
        plot=plot,
        measure=measure,
        show=_show,
        key_figures=_KEY_FIGURES,
    )


def _show(screen: Screen, report: FetchBenchmark) -> None:
    screen.facts(
        [
            ("episodes", f"{count(report.episodes)} with {count(report.frames)} frames"),
            ("ranges", f"{count(report.cold.reads)} of {count(report.files)} files"),
            ("bytes", megabytes(report.cold.bytes)),
            ("frames/s", f"{rate(report.frames_per_s)} (cold)"),
            ("load", load(report.load_average)),
        ]
    )
    screen.line()
    passes = (report.cold, report.repeated)
    columns = [Column("pass"), Column("cold", is_number=True), Column("repeated", is_number=True)]
    rows = [
        ("MiB/s", *(rate(item.mib_per_s) for item in passes)),
        ("latency p50", *(milliseconds(item.latency_s.p50) for item in passes)),
        ("latency p95", *(milliseconds(item.latency_s.p95) for item in passes)),
        ("latency p99", *(milliseconds(item.latency_s.p99) for item in passes)),
        ("reads at once", *(f"{item.at_once:.1f}" for item in passes)),
        ("requests", *(count(item.requests) for item in passes)),
        ("repetitions", *(count(item.retries) for item in passes)),
        ("connections", *("-" if item.connections is None else count(item.connections) for item in passes)),
    ]
    screen.table(columns, rows)
