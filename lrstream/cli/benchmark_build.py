"""`lrstream benchmark build`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lrstream.cli.benchmark_text import (
    COMPARISON_HELP,
    Check,
    CompareOption,
    ConnectionsOption,
    PlotOption,
    load,
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
    SourceArgument,
    Texts,
    VerboseOption,
)
from lrstream.cli.progress import ProgressLine
from lrstream.cli.screen import Column, Screen, count, megabytes

if TYPE_CHECKING:
    from lrstream.commands.benchmark_build import BuildBenchmark

__all__ = ["TEXTS", "build"]

TEXTS = Texts(
    "Index some videos from scratch.",
    f"""\
Index videos of a dataset from scratch: how fast, with how many requests and bytes, where the time goes.

Everything is read anew, and the result goes into a temporary directory: no cached or published sidecar
is looked at, and none is left. Several processes (--processes) are measured as
a whole, without stages.

{COMPARISON_HELP}""",
    (
        "lrstream benchmark build ./demo",
        "lrstream benchmark build ./demo --videos 4 --workers 2 --json",
        "lrstream benchmark build OWNER/NAME --videos 200 --workers 32",
    ),
)
_KEY_FIGURES = (
    "videos_per_s",
    "frames_per_s",
    "requests",
    "bytes_read",
    "bytes_over_moov",
    "archive_bytes_per_frame",
    "stages.transfer",
    "stages.parse",
    "stages.compress",
    "reads_at_once",
    "cpu_s",
)


def build(
    source: SourceArgument,
    videos: Annotated[
        int,
        typer.Option(
            "--videos",
            metavar="N",
            min=1,
            help="Most videos, spread evenly over the dataset.",
            show_default=True,
        ),
    ] = 64,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Videos indexed at once.", show_default=True)
    ] = 16,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="N",
            min=1,
            max=256,
            help="Processes that share --workers; by default 1 for few videos, else by processors.",
        ),
    ] = None,
    connections: ConnectionsOption = None,
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

    def measure(progress: ProgressLine, check: Check) -> BuildBenchmark:
        from lrstream.commands.benchmark_build import BuildOptions, benchmark_build
        from lrstream.commands.benchmark_common import DatasetFacts
        from lrstream.commands.opened import open_dataset

        layout = open_dataset(source, repo_type=repo_type.value, revision=revision).layout
        if check is not None:
            check(DatasetFacts.of(layout).digest)
        return benchmark_build(
            layout, BuildOptions(videos, workers, connections, processes), progress=progress
        )

    run_benchmark(
        "benchmark.build",
        CommonOptions(as_json, quiet, verbose, debug, cache_dir),
        compare=compare,
        plot=plot,
        measure=measure,
        show=_show,
        key_figures=_KEY_FIGURES,
    )


def _show(screen: Screen, report: BuildBenchmark) -> None:
    read = f"{megabytes(report.bytes_read)} in {count(report.requests)} requests"
    per_frame = f"{report.archive_bytes_per_frame:.1f} bytes per frame"
    facts = [
        ("videos", f"{count(report.videos)} with {count(report.frames)} frames"),
        ("time", f"{report.elapsed_s:.2f} s, and {report.listing_s:.2f} s to list the files"),
        ("videos/s", rate(report.videos_per_s)),
        ("frames/s", rate(report.frames_per_s)),
        ("read", read),
    ]
    if report.moov_bytes is not None:
        moov = f"{megabytes(report.moov_bytes)}; {report.bytes_over_moov:.2f} x that was read"
        facts.append(("moov boxes", moov))
    facts.append(("sidecar", f"{megabytes(report.archive_bytes)}, {per_frame}"))
    if report.reads_at_once is not None:
        at_once = f"{report.reads_at_once:.1f} on average, {report.most_reads_at_once} at most"
        facts.append(("reads at once", at_once))
    facts += [
        ("processes", count(report.processes)),
        ("processor", f"{report.cpu_s:.2f} s"),
        ("load", load(report.load_average)),
    ]
    screen.facts(facts)
    stages = report.stages
    if stages is None:
        return
    screen.line()
    rows = [
        (name, f"{seconds:.3f}", f"{1000 * seconds / report.videos:.2f}")
        for name, seconds in (
            ("transfer", stages.transfer),
            ("parse", stages.parse),
            ("compress", stages.compress),
        )
    ]
    names = ("s, all threads", "ms per video")
    screen.table([Column("stage"), *(Column(name, is_number=True) for name in names)], rows)
