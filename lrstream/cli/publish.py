"""`lrstream publish`."""

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
    RepoType,
    RepoTypeOption,
    RevisionOption,
    SourceArgument,
    Texts,
    VerboseOption,
)
from lrstream.cli.output import Answer
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Screen, count, megabytes

__all__ = ["ACTIONS", "TEXTS", "publish"]

TEXTS = Texts(
    "Publish a sidecar beside its dataset on the Hub.",
    """\
Publish a sidecar beside its dataset on the Hub, so that nobody else has to build it.

SIDECAR must be valid and cover the complete dataset as it is now. It goes to the branch lerobot-sidecars
of a dataset repository, or to meta/mp4-sidecars/ in a bucket. No other branch and no tag is touched.

Payload checksums beside it (build --checksums) are published with it, in the same commit.

Write access is checked first. If the same bytes, or another valid sidecar of the same snapshot, are
published already, nothing is written.
""",
    (
        "lrstream publish some.npz OWNER/NAME --dry-run",
        "lrstream publish some.npz hf://datasets/OWNER/NAME/path",
        "lrstream publish some.npz OWNER/BUCKET --repo-type bucket --json",
    ),
)


def publish(
    sidecar: Annotated[
        Path, typer.Argument(metavar="SIDECAR", help="The sidecar, FILE.npz.", show_default=False)
    ],
    source: SourceArgument,
    repo_type: RepoTypeOption = RepoType.dataset,
    revision: RevisionOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace another valid sidecar of the same snapshot.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, publish, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.publish import publish_archive

        result = publish_archive(
            sidecar,
            source,
            repo_type=repo_type.value,
            revision=revision,
            force=force,
            dry_run=dry_run,
        )
        report = result.report

        def show(screen: Screen) -> None:
            facts = [
                ("result", ACTIONS[report.action] + (" (dry run: nothing was written)" if dry_run else "")),
                ("where", f"{report.repo_id}{f', branch {report.branch}' if report.branch else ''}"),
                ("path", report.path),
                ("size", megabytes(report.size)),
                ("files", count(report.num_sources)),
            ]
            if report.branch_created:
                facts.append(("branch", "would be created" if dry_run else "created"))
            if report.checksums is not None:
                facts.append(("checksums", f"{report.checksums.path} ({ACTIONS[report.checksums.action]})"))
            if report.checksums_refused is not None:
                facts.append(("checksums", f"not published: {report.checksums_refused}"))
            if report.commit is not None:
                facts.append(("commit", report.commit))
            screen.facts([*facts, ("time", f"{result.elapsed_s:.2f} s")])

        return Answer(result=result.to_json(), show=show)

    run_command("publish", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)


ACTIONS = {
    "published": "published",
    "replaced": "published in place of another file",
    "unchanged": "these bytes were published already",
    "equivalent": "another valid sidecar of this snapshot was published already and was left alone",
}
