"""`lrstream convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lrstream.cli.options import (
    CacheDirOption,
    CommonOptions,
    DebugOption,
    JsonOption,
    QuietOption,
    Texts,
    VerboseOption,
)
from lrstream.cli.output import Answer, jsonable
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Screen, count, megabytes

__all__ = ["TEXTS", "Format", "convert"]

TEXTS = Texts(
    "Convert a sidecar to another format.",
    """\
Convert a sidecar: archive (.npz) to mapped index (.arrow) and back without loss, or to Parquet with one
row for each coded picture, for analysis.

The output appears complete or not at all, and an existing one is kept unless --force is given. Sidecars
of schema 1 and 2, and those of buckets without fingerprints, cannot be converted: build them again.
""",
    (
        "lrstream convert demo.npz --dry-run",
        "lrstream convert demo.npz",
        "lrstream convert demo.npz --to parquet -o samples.parquet",
    ),
)


class Format(StrEnum):
    """What a sidecar can be converted to."""

    INDEX = "index"
    NPZ = "npz"
    PARQUET = "parquet"


def convert(
    sidecar: Annotated[
        Path, typer.Argument(metavar="SIDECAR", help="A sidecar (.npz or .arrow).", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write it (default: beside SIDECAR)."),
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
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, convert, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.convert import ConvertReport, convert_sidecar

        report = convert_sidecar(
            sidecar,
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

    run_command("convert", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)
