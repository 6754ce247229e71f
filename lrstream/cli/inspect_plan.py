"""`lrstream inspect plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from lrstream.cli.inspect_text import findings
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
from lrstream.cli.output import Answer, jsonable
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Column, Screen, count

__all__ = ["TEXTS", "plan"]

TEXTS = Texts(
    "Show how an epoch is shared out and mixed.",
    """\
Show how an epoch is shared out among ranks and workers, how many batches each rank gets, and how many
different episodes a batch holds under each strategy.

Needs the metadata only: no sidecar, no video.
""",
    (
        "lrstream inspect plan ./demo --world-size 2 --workers 2 --batch-size 16",
        "lrstream inspect plan OWNER/NAME --world-size 8 --workers 4 --json",
    ),
)


def plan(
    source: SourceArgument,
    world_size: WorldSizeOption = 1,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", metavar="N", min=0, help="DataLoader workers of a rank.", show_default=True
        ),
    ] = 0,
    batch_size: BatchSizeOption = 64,
    pool: PoolOption = None,
    seed: SeedOption = 42,
    epoch: EpochOption = 0,
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
        from lrstream.commands.inspect_plan import PlanReport, inspect_plan
        from lrstream.commands.inspect_source import SourceOptions, open_metadata

        layout = open_metadata(SourceOptions(source, None, repo_type.value, revision))
        report = inspect_plan(
            layout,
            world_size=world_size,
            num_workers=workers,
            batch_size=batch_size,
            episode_pool_size=pool,
            seed=seed,
            epoch=epoch,
        )

        def show(screen: Screen, report: PlanReport = report) -> None:
            _show(screen, report)

        return Answer(result=jsonable(report), show=show, problems=report.findings)

    run_command("inspect.plan", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)


def _show(screen: Screen, report: object) -> None:
    from lrstream.commands.inspect_plan import PlanReport

    assert isinstance(report, PlanReport)
    screen.facts(
        [
            ("episodes", count(report.num_episodes)),
            ("frames", count(report.num_frames)),
            ("pool per worker", f"{count(report.pool_size)} episodes"),
            ("largest over mean rank", f"{report.rank_balance:.3f}"),
            ("largest over mean worker", f"{report.worker_balance:.3f}"),
            ("idle workers", count(report.num_idle_workers)),
        ]
    )
    screen.line()
    names = ("rank", "worker", "episodes", "frames", "batches", "full batches")
    rows = []
    for rank in report.ranks:
        numbers = (rank.num_episodes, rank.num_frames, rank.num_batches, rank.num_full_batches)
        rows.append((str(rank.rank), "all", *(count(number) for number in numbers)))
        if report.num_workers > 1:
            rows += [
                ("", str(worker.worker), count(worker.num_episodes), count(worker.num_frames), "", "")
                for worker in rank.workers
            ]
    screen.table([Column(name, is_number=True) for name in names], rows)
    screen.line()
    figures = ("least", "p10", "mean", "most")
    columns = [Column("episodes per batch"), *(Column(name, is_number=True) for name in figures)]
    screen.table(
        columns,
        [
            (item.strategy, count(item.least), count(item.p10), f"{item.mean:.1f}", count(item.largest))
            for item in report.mixing
        ],
    )
    findings(screen, report.findings)
