"""`lrstream convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lrstream.cli.options import (
    CacheDirOption,
    CommonOptions,
    DebugOption,
    JsonOption,
    ProgressMode,
    ProgressOption,
    QuietOption,
    Texts,
    VerboseOption,
)
from lrstream.cli.output import Answer, jsonable
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Screen, count, megabytes
from lrstream.errors import UsageError

if TYPE_CHECKING:
    from lrstream.commands.merge import MergeReport

__all__ = ["TEXTS", "Format", "convert"]

TEXTS = Texts(
    "Convert a sidecar to another format.",
    """\
Convert a sidecar: archive (.npz) to mapped index (.arrow) and back without loss, or to Parquet with one
row for each coded picture, for analysis.

The output appears complete or not at all, and an existing one is kept unless --force is given. Sidecars
of schema 1 and 2, and those of buckets without fingerprints, cannot be converted: build them again.

With --merge the arguments are the shards that `lrstream build --shard I/N` has written, or directories of
them. They become the sidecar that one build would have written, in the local cache or in --output. All
shards must be there and belong together; what is missing is named, with the command that builds it.
""",
    (
        "lrstream convert demo.npz --dry-run",
        "lrstream convert demo.npz",
        "lrstream convert demo.npz --to parquet -o samples.parquet",
        "lrstream convert --merge one.npz two.npz --dry-run",
        "lrstream convert --merge one.npz two.npz -o both.npz",
    ),
)


class Format(StrEnum):
    """What a sidecar can be converted to."""

    INDEX = "index"
    NPZ = "npz"
    PARQUET = "parquet"


def convert(
    sidecars: Annotated[
        list[Path],
        typer.Argument(
            metavar="SIDECAR...",
            help="A sidecar (.npz or .arrow); with --merge the shards of one, or directories of shards.",
            show_default=False,
        ),
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the shards of a sidecar into the sidecar.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write it (default: beside SIDECAR; with --merge: the local cache).",
        ),
    ] = None,
    to: Annotated[
        Format | None,
        typer.Option(
            "--to",
            metavar="index|npz|parquet",
            help="Format (default: index of an archive, npz of an index).",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and check everything, write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False,
    progress_mode: ProgressOption = ProgressMode.auto,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, convert, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.convert import ConvertReport, convert_sidecar
        from lrstream.commands.merge import merge_sidecar

        if merge:
            if to is not None:
                raise UsageError(
                    f"Merging gives a sidecar archive, and --to asks for {to.value}.",
                    hint="Merge first, then convert the result.",
                )
            merged = merge_sidecar(
                sidecars,
                output,
                dry_run=dry_run,
                force=force,
                progress=lambda done, total: progress(done, total, "files merged"),
            )
            return Answer(result=jsonable(merged), show=lambda screen: _show_merged(screen, merged))
        if len(sidecars) > 1:
            raise UsageError(
                f"{len(sidecars)} sidecars were named; one is converted at a time.",
                hint="Merge shards of one sidecar with --merge.",
            )
        report = convert_sidecar(
            sidecars[0],
            output,
            to=None if to is None else to.value,
            dry_run=dry_run,
            force=force,
            progress=lambda done, total: progress(done, total, "files converted"),
        )

        def show(screen: Screen, report: ConvertReport = report) -> None:
            size = report.output_bytes
            written = "not written (dry run)" if size is None else megabytes(size)
            screen.facts(
                [
                    ("from", f"{report.source} ({report.source_format}, {megabytes(report.source_bytes)})"),
                    ("to", f"{report.output} ({report.output_format}, {written})"),
                    ("sources", count(report.num_sources)),
                    ("frames", count(report.num_frames)),
                ]
            )

        return Answer(result=jsonable(report), show=show)

    run_command("convert", CommonOptions(as_json, quiet, verbose, debug, cache_dir, progress_mode), work)


def _show_merged(screen: Screen, report: MergeReport) -> None:
    if report.is_dry_run:
        state = "not written (dry run)"
    elif report.unchanged:
        state = "was there already, still valid"
    else:
        state = megabytes(report.output_bytes or 0)
    screen.facts(
        [
            ("shards", count(len(report.shards))),
            ("sidecar", f"{report.output} ({state})"),
            ("place", "the local cache" if report.installed else "a file"),
            ("sources", count(report.num_sources)),
            ("frames", count(report.num_frames)),
            ("time", f"{report.elapsed_s:.2f} s"),
        ]
    )
