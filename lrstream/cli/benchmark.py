"""`lrstream benchmark`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from lrstream.cli.options import (
    CacheDirOption,
    CommonOptions,
    DebugOption,
    JsonOption,
    QuietOption,
    RepoType,
    RepoTypeOption,
    RevisionOption,
    Texts,
    VerboseOption,
)
from lrstream.cli.output import Answer
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Column, Screen, count
from lrstream.errors import CheckFailedError

__all__ = ["GROUP_SUMMARY", "LOADER_TEXTS", "Strategy", "loader"]

GROUP_SUMMARY = "Measure how fast a dataset streams."
LOADER_TEXTS = Texts(
    "Stream one epoch and check that every frame arrives once.",
    """\
Stream one epoch through a DataLoader, and check that every frame arrives exactly once.

With --demo a small dataset is written into a temporary folder first, with pictures that say which frame
they are. It is indexed, validated and streamed, and each picture must be the one of its row. Nothing is
left behind.

Exit status 3 if a frame is missing, comes twice, or has another frame's picture.
""",
    (
        "lrstream benchmark loader --demo",
        "lrstream benchmark loader ./demo --workers 4 --batch-size 64",
        "lrstream benchmark loader OWNER/NAME --strategy round_robin --json",
    ),
)


class Strategy(StrEnum):
    """How anchors are drawn from the pool."""

    remaining = "remaining"
    round_robin = "round_robin"


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
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Samples of a batch.", show_default=True)
    ] = 16,
    strategy: Annotated[
        Strategy,
        typer.Option(
            "--strategy",
            metavar="remaining|round_robin",
            help="How frames are drawn from the pool of episodes.",
            show_default=True,
        ),
    ] = Strategy.remaining,
    repo_type: RepoTypeOption = RepoType.dataset,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, measure, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.benchmark import benchmark_loader

        result = benchmark_loader(
            source,
            demo=demo,
            workers=workers,
            batch_size=batch_size,
            strategy=strategy.value,
            repo_type=repo_type.value,
            revision=revision,
            progress=progress,
        )

        def show(screen: Screen) -> None:
            names = (
                "files",
                "episodes",
                "frames",
                "workers",
                "batch",
                "samples/s",
                "first batch",
                "p95 wait",
            )
            row = (
                count(result.files),
                count(result.episodes),
                count(result.frames),
                count(result.workers),
                count(result.batch_size),
                f"{result.samples_per_s:.0f}",
                f"{result.first_batch_s:.2f} s",
                f"{1000 * result.batch_wait_p95_s:.1f} ms",
            )
            screen.table([Column(name, is_number=True) for name in names], [row])
            screen.line()
            for problem in result.problems:
                screen.problem(problem)
            if not result.problems:
                pictures = f", {count(result.pictures_checked)} pictures were right" if result.demo else ""
                screen.line(f"All {count(result.frames)} frames arrived exactly once{pictures}.")

        return Answer(
            result=result.to_json(),
            show=show,
            problems=result.problems,
            exit_code=CheckFailedError.exit_code if result.num_errors else 0,
        )

    run_command("benchmark.loader", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)
