"""`lrstream inspect budget`."""

from __future__ import annotations

from typing import Annotated

import typer

from lrstream.cli.inspect_text import bars, byte_row, distribution_columns, findings
from lrstream.cli.options import (
    CacheDirOption,
    CommonOptions,
    DebugOption,
    EpochOption,
    JsonOption,
    PoolOption,
    QuietOption,
    RepoIdOption,
    RepoType,
    RepoTypeOption,
    RevisionOption,
    SeedOption,
    SourceArgument,
    Texts,
    VerboseOption,
    WorldSizeOption,
)
from lrstream.cli.output import Answer, jsonable
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Column, Screen, count, megabytes

__all__ = ["TEXTS", "budget"]

TEXTS = Texts(
    "Show whether the episodes fit a byte budget.",
    """\
Show whether the episodes fit a byte budget, and which setting would.

Plans one epoch exactly as the loader does, from the index alone, and counts what every worker reserves.
Options mean the same as the loader's arguments of these names. No video data are read.

Exit status 7 if an episode is larger than its worker's budget: training would refuse to start.
""",
    (
        "lrstream inspect budget ./demo",
        "lrstream inspect budget ./demo --byte-budget-gb 0.5 --workers 4 --pool 8",
        "lrstream inspect budget OWNER/NAME --workers 8 --json",
    ),
)


def budget(
    source: SourceArgument,
    byte_budget_gb: Annotated[
        float,
        typer.Option(
            "--byte-budget-gb", metavar="GB", help="Budget of a rank; 1 GB is 2**30 bytes.", show_default=True
        ),
    ] = 8.0,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", metavar="N", min=0, help="DataLoader workers of a rank.", show_default=True
        ),
    ] = 0,
    pool: PoolOption = None,
    world_size: WorldSizeOption = 1,
    prefetch: Annotated[
        int,
        typer.Option("--prefetch", metavar="N", min=0, help="Episodes fetched ahead.", show_default=True),
    ] = 8,
    queue: Annotated[
        int, typer.Option("--queue", metavar="N", min=1, help="decoded_queue_size.", show_default=True)
    ] = 8,
    seed: SeedOption = 42,
    epoch: EpochOption = 0,
    repo_id: RepoIdOption = None,
    repo_type: RepoTypeOption = RepoType.dataset,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, plan, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.inspect_budget import BudgetReport, BudgetSettings, inspect_budget
        from lrstream.commands.inspect_source import SourceOptions, open_indexed

        settings = BudgetSettings(
            byte_budget_gb=byte_budget_gb,
            num_workers=workers,
            episode_pool_size=pool,
            world_size=world_size,
            prefetch_episodes=prefetch,
            decoded_queue_size=queue,
            seed=seed,
            epoch=epoch,
        )
        options = SourceOptions(source, repo_id, repo_type.value, revision)
        with open_indexed(options, progress=progress) as opened:
            report = inspect_budget(opened, settings)

        def show(screen: Screen, report: BudgetReport = report) -> None:
            _show(screen, report)

        return Answer(
            result=jsonable(report), show=show, problems=report.findings, exit_code=report.exit_code
        )

    run_command("inspect.budget", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)


def _show(screen: Screen, report: object) -> None:
    from lrstream.commands.inspect_budget import BudgetReport

    assert isinstance(report, BudgetReport)
    screen.table(distribution_columns("KiB"), [byte_row("episode", report.episode_bytes)])
    screen.line()
    bars(screen, report.histogram)
    screen.line()
    names = ("episode", "frames", "bytes")
    screen.table(
        [Column(name, is_number=True) for name in names],
        [
            (str(item.episode_index), count(item.num_frames), count(item.size_bytes))
            for item in report.largest
        ],
    )
    screen.line()
    screen.facts(
        [
            ("budget per rank", f"{report.settings.byte_budget_gb:g} GB, shared by {report.num_streams}"),
            ("budget per worker", megabytes(report.worker_budget_bytes)),
            ("pool per worker", f"{count(report.pool_size)} episodes"),
            ("pool that always fits", f"{count(report.pool_always_fitting)} episodes"),
            ("pool of mean episodes", f"{count(report.pool_fitting_on_average)} episodes"),
            ("oversized episodes", count(report.num_oversized)),
        ]
    )
    if report.workers:
        screen.line()
        figures = ("rank", "worker", "episodes", "pool", "pool B", "reserved B", "at most B")
        screen.table(
            [Column(name, is_number=True) for name in figures],
            [
                (
                    str(item.rank),
                    str(item.worker),
                    count(item.num_episodes),
                    count(item.reservation.largest_pool),
                    count(item.reservation.peak_pool_bytes),
                    count(item.reservation.peak_reserved_bytes),
                    count(item.reservation.bound_bytes),
                )
                for item in report.workers
            ],
        )
    screen.line()
    screen.line(report.recommendation)
    findings(screen, report.findings)
