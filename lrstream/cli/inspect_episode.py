"""`lrstream inspect episode`."""

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
from lrstream.cli.output import Answer, jsonable
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Column, Screen, count, megabytes

__all__ = ["TEXTS", "episode"]

TEXTS = Texts(
    "Show where one episode lies, or look at it.",
    """\
Show where one episode lies: files, byte ranges, exact sizes, requests.

With --mini-mp4 the episode of one camera is written as a video file of its own, which any player shows.
With --contact-sheet evenly spaced frames of all cameras (or of one) are written as a PNG with their
numbers, decoded as training decodes them.
""",
    (
        "lrstream inspect episode ./demo 3",
        "lrstream inspect episode ./demo 3 --camera observation.images.top --mini-mp4 episode3.mp4",
        "lrstream inspect episode ./demo 3 --contact-sheet episode3.png",
    ),
)


def episode(
    source: SourceArgument,
    number: Annotated[
        int, typer.Argument(metavar="N", min=0, help="episode_index of the episode.", show_default=False)
    ],
    camera: Annotated[
        str | None, typer.Option("--camera", metavar="KEY", help="Only this camera (default: all).")
    ] = None,
    mini_mp4: Annotated[
        Path | None,
        typer.Option("--mini-mp4", metavar="FILE", help="Write the episode's video to this file."),
    ] = None,
    contact_sheet: Annotated[
        Path | None,
        typer.Option("--contact-sheet", metavar="FILE", help="Write a picture of its frames to this PNG."),
    ] = None,
    pictures: Annotated[
        int,
        typer.Option(
            "--pictures",
            metavar="N",
            min=1,
            max=600,
            help="Frames of each camera on the sheet.",
            show_default=True,
        ),
    ] = 12,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
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
        from lrstream.commands.inspect_episode import EpisodeReport, inspect_episode
        from lrstream.commands.inspect_source import SourceOptions, open_indexed

        options = SourceOptions(source, repo_id, repo_type.value, revision)
        with open_indexed(options, progress=progress) as opened:
            report = inspect_episode(
                opened,
                number,
                camera=camera,
                mini_mp4_path=mini_mp4,
                contact_sheet_path=contact_sheet,
                num_pictures=pictures,
                force=force,
            )

        def show(screen: Screen, report: EpisodeReport = report) -> None:
            _show(screen, report)

        return Answer(result=jsonable(report), show=show)

    run_command("inspect.episode", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)


def _show(screen: Screen, report: object) -> None:
    from lrstream.commands.inspect_episode import EpisodeReport

    assert isinstance(report, EpisodeReport)
    rows = report.rows
    facts = [
        ("episode", count(report.episode_index)),
        ("frames", f"{count(report.num_frames)} ({report.duration_s:.2f} s)"),
        *(("task", task) for task in report.tasks),
        ("rows", f"index [{rows.first_index}, {rows.stop_index}) in {rows.file}"),
        (
            "read",
            f"{len(rows.row_groups)} of {rows.num_row_groups} row groups, {rows.read_bytes / 1024:,.1f} KiB",
        ),
        ("video", f"{megabytes(report.mini_mp4_bytes)} in {count(report.video_requests)} requests"),
    ]
    if report.mini_mp4 is not None:
        facts.append(("mini-MP4", str(report.mini_mp4)))
    if report.contact_sheet is not None:
        facts.append(("contact sheet", str(report.contact_sheet)))
    screen.facts(facts)
    for camera in report.cameras:
        screen.line()
        screen.facts(
            [
                ("camera", camera.key),
                ("file", f"{camera.file} ({camera.codec}, {megabytes(camera.file_bytes)})"),
                ("time", f"[{camera.from_s:.6f}, {camera.to_s:.6f}) s"),
                ("bytes", f"[{camera.start_byte}, {camera.stop_byte})"),
            ]
        )
        names = ("samples", "own", "keyframes", "header B", "payload B", "mini-MP4 B")
        screen.table(
            [Column(name, is_number=True) for name in names],
            [
                tuple(
                    count(value)
                    for value in (
                        camera.stop_sample - camera.first_sample,
                        camera.num_own_pictures,
                        camera.num_keyframes,
                        camera.header_bytes,
                        camera.payload_bytes,
                        camera.mini_mp4_bytes,
                    )
                )
            ],
        )
