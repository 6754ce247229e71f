"""`lrstream build`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from lrstream.cli.options import (
    CacheDirOption,
    CommonOptions,
    DebugOption,
    JsonOption,
    ProgressMode,
    ProgressOption,
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
from lrstream.errors import UsageError

__all__ = ["TEXTS", "build"]

TEXTS = Texts(
    "Index the videos of a dataset.",
    """\
Index the videos of a dataset: make its sidecar, unless a valid one is there.

Reads the sample tables of every MP4 file, not its pictures, and installs the result in the local cache,
where training finds it. With --output it is written to a file instead.

The result appears complete or not at all. Other processes that need the same sidecar meanwhile wait
for it.

With --checksums every picture is read as well, once, and a checksum is kept of all that training fetches
for an episode. Training then notices every byte that is changed where it lies or on its way.

A build that was interrupted, in whatever way, is continued by the same command. Files that have not
changed are taken from an earlier sidecar of the dataset, if the cache or what is published has one.

With --shard I/N only every N-th file is indexed. Such builds know nothing of each other, so that N jobs
can run at once on N machines; `lrstream convert --merge` makes the sidecar of their results.

Several processes of this machine share the files where there are many (--processes).
With --scheduler the files are indexed by the processes of a Dask cluster, and this one writes the sidecar.
""",
    (
        "lrstream build ./demo",
        "lrstream build OWNER/NAME --revision v3.0",
        "lrstream build OWNER/NAME --push",
        "lrstream build ./demo --checksums",
        "lrstream build ./demo -o demo.npz",
        "lrstream build ./demo -o new.npz --base demo.npz",
        "lrstream build ./demo --episodes 0-3,7,10- -o some.npz --json",
        "lrstream build ./demo --shard 1/2 -o one.npz",
        "lrstream build ./demo --shard 2/2 -o two.npz",
        "lrstream build OWNER/NAME --scheduler tcp://host:8786",
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
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Index only part I of N of the files, counted from 1, for `convert --merge`.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the sidecar to this file, not to the cache."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            max=1024,
            help="Files indexed at once; with --scheduler ADDRESS by each process of the cluster.",
            show_default=True,
        ),
    ] = 16,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="N",
            min=1,
            max=256,
            help="Processes that share --workers; by default 1 for few files, else by processors.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="ADDRESS|local",
            help="Index on the Dask cluster with this scheduler, or on one started here for the build.",
        ),
    ] = None,
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
    checksums: Annotated[
        bool,
        typer.Option("--checksums", help="Make checksums of the payload, too, which reads every video once."),
    ] = False,
    push: Annotated[
        bool, typer.Option("--push", help="Publish it beside the dataset afterwards (see publish).")
    ] = False,
    progress_mode: ProgressOption = ProgressMode.auto,
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
        from lrstream.sidecar.shards import parse_shard

        part = None if shard is None else parse_shard(shard)
        if part is not None and push:
            raise UsageError(
                "A shard cannot be published.", hint="Merge all shards first, then publish the result."
            )
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
            shard=part,
            output=output,
            workers=workers,
            force=force,
            resume=not no_resume,
            base=base,
            scheduler=scheduler,
            processes=processes,
            lock_timeout_s=lock_timeout,
            checksums=checksums,
            progress=progress,
        )
        pushed = publish_built(result.path) if push and result.path is not None else None

        def show(screen: Screen) -> None:
            if result.path is None or result.origin is None:
                screen.line("The dataset has no video: there is nothing to index.")
                return
            facts = [
                ("sidecar" if result.shard is None else f"shard {result.shard}", str(result.path)),
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
            if result.checksums is not None:
                made = result.checksums
                spans = f"{count(made.num_spans)} spans in {count(made.num_files)} files"
                facts += [("checksums", str(made.path)), ("of", spans)]
                if made.num_reused < made.num_files:
                    facts.append(("payload", f"{megabytes(made.bytes_read)} read"))
                if made.num_verified:
                    facts.append(("verified", f"{count(made.num_verified)} files have their listed hash"))
                if made.num_without_span:
                    facts.append(("without span", f"{count(made.num_without_span)} episodes left out"))
            if pushed is not None:
                facts.append(("published", f"{pushed.report.path} ({ACTIONS[pushed.report.action]})"))
                if pushed.report.checksums is not None:
                    published = pushed.report.checksums
                    facts.append(("published", f"{published.path} ({ACTIONS[published.action]})"))
            screen.facts([*facts, ("time", f"{result.elapsed_s:.2f} s")])
            if result.shard is not None:
                screen.line(f"When all are built: lrstream convert --merge {quote(str(result.path.parent))}")

        facts_of_push = {} if pushed is None else {"publication": pushed.to_json()}
        return Answer(result={**result.to_json(), **facts_of_push}, show=show)

    run_command("build", CommonOptions(as_json, quiet, verbose, debug, cache_dir, progress_mode), work)


_ORIGINS = {
    "cache": "found in the local cache, still valid",
    "published": "taken from what is published beside the dataset",
    "built": "built now",
}
