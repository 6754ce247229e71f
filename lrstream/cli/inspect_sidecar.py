"""`lrstream inspect sidecar`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from lrstream.cli.screen import Column, Screen, count, megabytes

if TYPE_CHECKING:
    from lrstream.commands.inspect_sidecar import ChecksumsInside

__all__ = ["TEXTS", "sidecar"]

TEXTS = Texts(
    "Show what a sidecar file holds.",
    """\
Show what a sidecar file holds: identity, source files, codecs, sizes, GOP lengths.

FILE is a sidecar archive (.npz) or a mapped index (.arrow). Every array is read and checked. Whether it
still fits its dataset is told by 'lrstream validate FILE --source DATASET'.
""",
    (
        "lrstream inspect sidecar demo.npz",
        "lrstream inspect sidecar demo.npz --json",
    ),
)


def sidecar(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A sidecar (.npz or .arrow).", show_default=False)
    ],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, inspect, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.inspect_sidecar import SidecarReport, inspect_sidecar

        report = inspect_sidecar(file.expanduser())

        def show(screen: Screen, report: SidecarReport = report) -> None:
            no = "; ".join(report.not_publishable_because)
            index_bytes = f"{report.bytes_per_frame_of_index:.2f} bytes/frame"
            screen.facts(
                [
                    ("file", str(report.path)),
                    ("format", "archive, schema 3" if report.format == "npz" else "mapped index"),
                    ("size", f"{megabytes(report.size_bytes)}, {index_bytes}"),
                    ("repo id", report.repo_id),
                    ("revision", report.revision),
                    ("data root", report.data_root),
                    ("digest", report.digest),
                    ("fingerprints", "of every file" if report.has_fingerprints else "none"),
                    ("sources", f"{count(report.num_sources)} files, {megabytes(report.source_bytes)}"),
                    ("frames", count(report.num_frames)),
                    ("complete", "yes, every array is there and valid"),
                    ("publishable", f"no: {no}" if no else "yes, once validated against its dataset"),
                    ("checksums", _checksums(report.checksums)),
                ]
            )
            screen.line()
            names = ("files", "frames", "B/frame", "GOP", "max", "with B", "moov last")
            columns = [Column("codec"), Column("size"), *(Column(name, is_number=True) for name in names)]
            screen.table(
                columns,
                [
                    (
                        group.codec,
                        f"{group.width}x{group.height}",
                        count(group.num_files),
                        count(group.num_frames),
                        f"{group.bytes_per_frame:,.0f}",
                        count(int(group.gop.p50)),
                        count(int(group.gop.largest)),
                        count(group.num_files_with_bframes),
                        count(group.num_files_moov_last),
                    )
                    for group in report.groups
                ],
            )

        return Answer(result=jsonable(report), show=show)

    run_command("inspect.sidecar", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)


def _checksums(found: ChecksumsInside | None) -> str:
    if found is None:
        return "none of the payload"
    spans = f"{count(found.num_spans)} spans in {count(found.num_files)} files, {megabytes(found.size_bytes)}"
    return f"not used: {found.not_used_because}" if found.not_used_because else spans
