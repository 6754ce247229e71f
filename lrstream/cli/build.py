"""`lrstream build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lrstream.cli.options import (
    CacheDirOption,
    CommonOptions,
    DebugOption,
    JsonOption,
    QuietOption,
    RepoIdOption,
    RepoType,
    RepoTypeOption,
    RevisionOption,
    SourceArgument,
    Texts,
    VerboseOption,
)
from lrstream.cli.output import Answer
from lrstream.cli.progress import ProgressLine
from lrstream.cli.publish import ACTIONS
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Screen, count, megabytes

__all__ = ["TEXTS", "build"]

TEXTS = Texts(
    "Index the videos of a dataset.",
    """\
Index the videos of a dataset: make its sidecar, unless a valid one is there.

Reads the sample tables of every MP4 file, not its pictures, and installs the result in the local cache,
where training finds it. With --output it is written to a file instead.

The result appears complete or not at all. Other processes that need the same sidecar meanwhile wait
for it.

A build that was interrupted, in whatever way, is continued by the same command. Files that have not
changed are taken from an earlier sidecar of the dataset, if the cache or what is published has one.
""",
    (
        "lrstream build ./demo",
        "lrstream build OWNER/NAME --revision v3.0",
        "lrstream build OWNER/NAME --push",
        "lrstream build ./demo -o demo.npz",
        "lrstream build ./demo -o new.npz --base demo.npz",
        "lrstream build ./demo --episodes 0-3,7,10- -o some.npz --json",
    ),
)


def build(
    source: SourceArgument,
    repo_id: RepoIdOption = None,
    repo_type: RepoTypeOption = RepoType.dataset,
    revision: RevisionOption = None,
    episodes: Annotated[
        str | None,
        typer.Option(
            "--episodes",
            metavar="SPEC",
            help="Only the files of these episodes, such as 0-9,12,20- (ends included); needs --output.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the sidecar to this file, not to the cache."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Files indexed at once.", show_default=True)
    ] = 16,
    lock_timeout: Annotated[
        float,
        typer.Option(
            "--lock-timeout",
            metavar="SECONDS",
            min=0,
            help="Longest wait for another process that builds the same sidecar.",
            show_default=True,
        ),
    ] = 1800.0,
    force: Annotated[
        bool, typer.Option("--force", help="Build even if a valid sidecar is there, reading every file.")
    ] = False,
    no_resume: Annotated[
        bool,
        typer.Option(
            "--no-resume", help="Begin anew: neither continue an interrupted build nor keep its progress."
        ),
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="SIDECAR",
            help="Take files that have not changed from this sidecar of another revision.",
        ),
    ] = None,
    push: Annotated[
        bool, typer.Option("--push", help="Publish it beside the dataset afterwards (see publish).")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, build, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.build import build_dataset
        from lrstream.commands.publish import publish_built, require_push_target

        if push:
            # Before any long work: whether it can be published there at all.
            require_push_target(
                source, repo_type=repo_type.value, revision=revision, repo_id=repo_id, episodes=episodes
            )
        result = build_dataset(
            source,
            repo_id=repo_id,
            repo_type=repo_type.value,
            revision=revision,
            episodes=episodes,
            output=output,
            workers=workers,
            force=force,
            resume=not no_resume,
            base=base,
            lock_timeout_s=lock_timeout,
            progress=progress,
        )
        pushed = publish_built(result.path) if push and result.path is not None else None

        def show(screen: Screen) -> None:
            if result.path is None or result.origin is None:
                screen.line("The dataset has no video: there is nothing to index.")
                return
            facts = [
                ("sidecar", str(result.path)),
                ("origin", _ORIGINS[result.origin]),
                ("covers", "the complete dataset" if result.complete else "a part of the dataset"),
                ("files", count(result.files)),
                ("episodes", count(result.episodes)),
                ("frames", count(result.frames)),
            ]
            if result.origin == "built":
                facts.append(("read", f"{megabytes(result.bytes_read)} in {count(result.requests)} requests"))
                if result.reused:
                    facts.append(("unchanged", f"{count(result.reused)} files, not read again"))
            if pushed is not None:
                facts.append(("published", f"{pushed.report.path} ({ACTIONS[pushed.report.action]})"))
            screen.facts([*facts, ("time", f"{result.elapsed_s:.2f} s")])

        facts_of_push = {} if pushed is None else {"publication": pushed.to_json()}
        return Answer(result={**result.to_json(), **facts_of_push}, show=show)

    run_command("build", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)


_ORIGINS = {
    "cache": "found in the local cache, still valid",
    "published": "taken from what is published beside the dataset",
    "built": "built now",
}
