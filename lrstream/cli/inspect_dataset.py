"""`lrstream inspect dataset`."""

from __future__ import annotations

from lrstream.cli.inspect_text import byte_row, distribution_columns, findings, number_row, span_of_time
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
from lrstream.cli.output import Answer, jsonable
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Column, Screen, count, megabytes

__all__ = ["TEXTS", "dataset"]

TEXTS = Texts(
    "Show what streaming a dataset means, camera by camera.",
    """\
Show what streaming a dataset means: files, codecs, GOPs, bytes per episode, what reading rows costs, and
how far the rows' times and the pictures' times are apart.

The sidecar is found or built, as training would do it. Pictures are not read. Warnings have codes; they
do not change the exit status (see 'lrstream validate' for checks).
""",
    (
        "lrstream inspect dataset ./demo",
        "lrstream inspect dataset OWNER/NAME --revision v3.0 --json",
    ),
)


def dataset(
    source: SourceArgument,
    repo_id: RepoIdOption = None,
    repo_type: RepoTypeOption = RepoType.dataset,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, inspect, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.inspect_dataset import DatasetReport, inspect_dataset
        from lrstream.commands.inspect_source import SourceOptions, open_indexed

        options = SourceOptions(source, repo_id, repo_type.value, revision)
        with open_indexed(options, progress=progress) as opened:
            report = inspect_dataset(opened, progress=progress)

        def show(screen: Screen, report: DatasetReport = report) -> None:
            _show(screen, report)

        return Answer(result=jsonable(report), show=show, problems=report.findings)

    run_command("inspect.dataset", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)


def _show(screen: Screen, report: object) -> None:
    from lrstream.commands.inspect_dataset import DatasetReport

    assert isinstance(report, DatasetReport)
    tables = report.tables
    screen.facts(
        [
            ("dataset", report.root),
            ("version", report.codebase_version),
            ("episodes", count(report.num_episodes)),
            (
                "frames",
                f"{count(report.num_frames)} at {report.fps:g} fps ({span_of_time(report.duration_s)})",
            ),
            ("tasks", count(report.num_tasks)),
            ("sidecar", "none (no video)" if report.sidecar is None else str(report.sidecar)),
            ("tables", f"{count(tables.num_files)} files, {count(tables.num_row_groups)} row groups"),
            (
                "statistics",
                f"{count(tables.num_with_statistics)} row groups with, "
                f"{count(tables.num_without_statistics)} without",
            ),
        ]
    )
    if report.cameras:
        screen.line()
        names = ("files", "frames", "B/frame")
        screen.table(
            [Column("camera"), Column("format"), *(Column(name, is_number=True) for name in names)],
            [
                (
                    camera.key,
                    f"{'/'.join(camera.codecs)} {'/'.join(camera.sizes)}",
                    count(camera.num_files),
                    count(camera.num_pictures),
                    f"{camera.bytes_per_picture:,.0f}",
                )
                for camera in report.cameras
            ],
        )
        screen.line()
        figures = ("GOP", "longest", "fetched/needed", "drift ms")
        screen.table(
            [Column("camera"), Column("B-frames"), *(Column(name, is_number=True) for name in figures)],
            [
                (
                    camera.key,
                    "yes" if camera.has_bframes else "no",
                    count(int(camera.gop.p50)),
                    count(int(camera.gop.largest)),
                    f"{camera.span_ratio:.2f}",
                    f"{camera.drift_s * 1e3:.3f}",
                )
                for camera in report.cameras
            ],
        )
    screen.line()
    screen.table(distribution_columns("per episode"), [number_row("frames", report.episode_frames)])
    screen.line()
    rows = [byte_row(camera.key, camera.episode_bytes) for camera in report.cameras]
    if len(rows) > 1:
        rows.append(byte_row("all cameras", report.episode_bytes))
    rows.append(byte_row("rows (Parquet)", tables.episode_read_bytes))
    screen.table(distribution_columns("KiB per episode"), rows)
    if report.cameras:
        total = sum(camera.source_bytes for camera in report.cameras)
        screen.line()
        screen.line(f"All video files together: {megabytes(total)}.")
    findings(screen, report.findings)
