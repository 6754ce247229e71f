"""`lrstream benchmark open`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lrstream.cli.benchmark_text import (
    COMPARISON_HELP,
    Check,
    CompareOption,
    EpisodesOption,
    PlotOption,
    load,
    milliseconds,
    or_unknown,
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
    from lrstream.commands.benchmark_open import OpenBenchmark

__all__ = ["TEXTS", "open_"]

TEXTS = Texts(
    "Convert a sidecar, open it, look its records up.",
    f"""\
Make the mapped index of a dataset's sidecar in a temporary directory, open it, look up the files of one
worker's share, and compute the exact sizes of its episodes: time and memory of each step.

The steps run in new processes, so that their memory is not hidden by what was loaded before. The sidecar
itself is found, or built where there is none, as training would do it.

{COMPARISON_HELP}""",
    (
        "lrstream benchmark open ./demo",
        "lrstream benchmark open OWNER/NAME --world-size 2 --workers 2 --json",
        "lrstream benchmark open OWNER/NAME --world-size 64 --workers 8 --plot open.html",
    ),
)
_KEY_FIGURES = (
    *(
        f"{step}.{figure}"
        for step in ("convert", "open", "records", "sizes")
        for figure in ("seconds", "rss_growth_bytes")
    ),
    "index_bytes_per_frame",
    "private_bytes_per_frame",
    "peak_rss_bytes",
)


def open_(
    source: SourceArgument,
    episodes: EpisodesOption = None,
    world_size: Annotated[
        int, typer.Option("--world-size", metavar="N", min=1, help="Ranks of the job.", show_default=True)
    ] = 1,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", metavar="N", min=0, help="DataLoader workers of each rank.", show_default=True
        ),
    ] = 0,
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

    def measure(progress: ProgressLine, check: Check) -> OpenBenchmark:
        from lrstream.commands.benchmark_common import choose_episodes
        from lrstream.commands.benchmark_open import OpenOptions, benchmark_open

        chosen = choose_episodes(source, episodes, repo_type=repo_type.value, revision=revision, check=check)
        return benchmark_open(chosen, OpenOptions(episodes, world_size, workers), progress=progress)

    run_benchmark(
        "benchmark.open",
        CommonOptions(as_json, quiet, verbose, debug, cache_dir),
        compare=compare,
        plot=plot,
        measure=measure,
        show=_show,
        key_figures=_KEY_FIGURES,
    )


def _show(screen: Screen, report: OpenBenchmark) -> None:
    private = report.private_bytes_per_frame
    screen.facts(
        [
            ("files", f"{count(report.files)}, {count(report.share_files)} of them in the share"),
            ("frames", f"{count(report.frames)} pictures, {count(report.share_frames)} frames in the share"),
            ("episodes", f"{count(report.share_episodes)} in the share"),
            ("sidecar", _size(report.archive_bytes, report.archive_bytes_per_frame)),
            ("mapped index", _size(report.index_bytes, report.index_bytes_per_frame)),
            ("private", "unknown" if private is None else f"{private:.1f} B per frame of the share"),
            ("peak memory", or_unknown(report.peak_rss_bytes, megabytes)),
            ("load", load(report.load_average)),
        ]
    )
    screen.line()
    rows = [
        (
            name,
            milliseconds(step.seconds),
            or_unknown(step.rss_growth_bytes, megabytes),
            or_unknown(step.private_growth_bytes, megabytes),
        )
        for name, step in (
            ("convert", report.convert),
            ("open", report.open),
            ("records", report.records),
            ("sizes", report.sizes),
        )
    ]
    names = ("time", "memory", "private")
    screen.table([Column("step"), *(Column(name, is_number=True) for name in names)], rows)


def _size(num_bytes: int, per_frame: float) -> str:
    return f"{megabytes(num_bytes)}, {per_frame:.1f} B per picture"
