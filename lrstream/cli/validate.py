"""`lrstream validate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

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
    Texts,
    VerboseOption,
)
from lrstream.cli.output import Answer, jsonable
from lrstream.cli.progress import ProgressLine
from lrstream.cli.runner import run_command
from lrstream.cli.screen import Screen, count
from lrstream.errors import CheckFailedError

if TYPE_CHECKING:
    from lrstream.commands.deep import DeepReport

__all__ = ["TEXTS", "validate"]

TEXTS = Texts(
    "Check a sidecar and the dataset it belongs to.",
    """\
Check a sidecar, and the dataset it belongs to.

TARGET is a sidecar file or a dataset. Of a sidecar file, structure and arrays are checked; with --source
also whether it belongs to that dataset, and whether the files are still the ones that were indexed.

Of a dataset, every episode must have its rows, and every camera exactly its pictures inside one file.
The sidecar that training would find in the cache is checked as well. Where there is none, the videos
are indexed for this check; nothing is kept.

Payload checksums beside the sidecar must belong to it and cover every episode.

With --deep every video is indexed again and compared with the sidecar, and the payload of every episode
with its checksum, if there are checksums. Every codec must have a decoder
here, and the pictures of some episodes (--sample) are decoded both through the sidecar and from the whole
file in order; they must be equal.

All problems are listed, each with a stable code. Exit status 3 if there are any errors.
""",
    (
        "lrstream validate ./demo",
        "lrstream validate ./demo --deep --sample all",
        "lrstream validate demo.npz --source ./demo",
        "lrstream validate OWNER/NAME --json",
    ),
)


def validate(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A sidecar (FILE.npz) or a dataset.", show_default=False)
    ],
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="DATASET", help="Dataset that the sidecar TARGET should belong to."),
    ] = None,
    episodes: Annotated[
        str | None,
        typer.Option("--episodes", metavar="SPEC", help="Check these episodes only, such as 0-9,12,20-."),
    ] = None,
    rows: Annotated[
        bool | None,
        typer.Option(
            "--rows/--no-rows",
            help="Check the rows of the tables too, which reads them (default: if TARGET is a dataset).",
            show_default=False,
        ),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Index every video again; compare sidecar and checksums with it; decode pictures both ways.",
        ),
    ] = False,
    sample: Annotated[
        str,
        typer.Option(
            "--sample",
            metavar="N|all",
            help="With --deep: how many episodes' pictures are compared, evenly spaced.",
            show_default=True,
        ),
    ] = "8",
    repo_id: RepoIdOption = None,
    repo_type: RepoTypeOption = RepoType.dataset,
    revision: RevisionOption = None,
    progress_mode: ProgressOption = ProgressMode.auto,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, check, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.inspect_source import SourceOptions, parse_sample
        from lrstream.commands.validate import validate_target

        num_sampled = parse_sample(sample)
        result = validate_target(
            target,
            source=source,
            episodes=episodes,
            rows=rows,
            deep=deep,
            repo_id=repo_id,
            repo_type=repo_type.value,
            revision=revision,
            progress=progress,
        )

        pictures = None
        if deep and result.source is not None:
            from lrstream.commands.deep import compare_pictures

            result, pictures = compare_pictures(
                result,
                SourceOptions(source or target, repo_id, repo_type.value, revision),
                episodes=episodes,
                sample=num_sampled,
                progress=progress,
            )

        def show(screen: Screen) -> None:
            for problem in result.problems:
                screen.problem(problem)
            if result.problems:
                screen.line()
            facts = [
                ("sidecar", str(result.sidecar or "none in the cache; the videos were indexed for this"))
            ]
            if result.source is not None:
                facts.append(("dataset", result.source))
            if result.files is not None:
                facts.append(("files", count(result.files)))
            if result.episodes is not None:
                rows_too = " with their rows" if result.rows else ""
                facts.append(("episodes", f"{count(result.episodes)}{rows_too}"))
            if result.checksums is not None:
                number = result.spans_with_checksum
                spans = "unusable" if number is None else f"of {count(number)} spans"
                compared = f", {count(result.spans_compared)} compared with the payload" if deep else ""
                facts.append(("checksums", f"{spans}{compared}"))
            if pictures is not None:
                names = ", ".join(f"{item.codec}: {item.decoder or 'none'}" for item in pictures.decoders)
                facts.append(("decoders", f"{names or 'not needed'} (PyAV {pictures.pyav})"))
                compared = f"{count(pictures.num_pictures)} of {count(len(pictures.episodes))} episodes"
                facts.append(("pictures", f"{compared} compared, {count(pictures.num_different)} differ"))
            found = f"{count(result.num_errors)} errors, {count(result.num_warnings)} warnings"
            screen.facts([*facts, ("problems", found if result.problems else "none")])

        return Answer(
            result={**result.to_json(), "pictures": _without_problems(pictures)},
            show=show,
            problems=result.problems,
            exit_code=CheckFailedError.exit_code if result.num_errors else 0,
        )

    run_command("validate", CommonOptions(as_json, quiet, verbose, debug, cache_dir, progress_mode), work)


def _without_problems(report: DeepReport | None) -> dict[str, Any] | None:
    """The report as JSON; its problems stand with all others in the document."""
    if report is None:
        return None
    return {name: value for name, value in jsonable(report).items() if name != "problems"}
