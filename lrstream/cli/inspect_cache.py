"""`lrstream inspect cache`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from lrstream.cli.inspect_text import findings, span_of_time
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
from lrstream.errors import UsageError

__all__ = ["TEXTS", "cache"]

# Paths below the cache take some 90 columns, beside 40 for the rest.
_WIDE_COLUMNS = 130

TEXTS = Texts(
    "Show what lies in the caches, and clean up.",
    """\
Show sidecars, mapped indexes and their generations, unfinished builds, sizes and last use.

With --prune it shows what nobody needs any more, asks, and removes it: files of builds that were killed,
damaged sidecars, and, if not used for --idle-days, superseded or orphaned generations and journals of
interrupted builds. Nothing else is touched: only files that lrstream made, only inside its own
directories, never through a link.
""",
    (
        "lrstream inspect cache",
        "lrstream inspect cache --prune --yes",
    ),
)


def cache(
    prune: Annotated[bool, typer.Option("--prune", help="Remove what nobody needs, after asking.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    idle_days: Annotated[
        float,
        typer.Option(
            "--idle-days",
            metavar="DAYS",
            min=0,
            help="Superseded files stay this long after their last use.",
            show_default=True,
        ),
    ] = 7.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, look, ask, remove, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.inspect_cache import inspect_cache
        from lrstream.commands.inspect_prune import prune_cache

        if yes and not prune:
            raise UsageError("--yes answers the question of --prune, which is not given.")
        report = inspect_cache(idle_s=idle_days * 86400)
        result = {
            **jsonable(report),
            "size_bytes": report.size_bytes,
            "removable_bytes": report.removable_bytes,
            "pruned": None,
        }
        lines: list[str] = []
        if prune and report.removable:
            if not yes and not _agrees(report, as_json=as_json):
                lines.append("Nothing was removed.")
            else:
                pruned = prune_cache(report)
                result["pruned"] = jsonable(pruned)
                lines.append(f"Removed {count(len(pruned.removed))} files, {megabytes(pruned.freed_bytes)}.")
                lines += [f"Kept {path}: {reason}." for path, reason in pruned.kept]
        elif prune:
            lines.append("There is nothing to remove.")
            result["pruned"] = {"removed": [], "freed_bytes": 0, "kept": []}

        def show(screen: Screen) -> None:
            _show(screen, report)
            if lines:
                screen.line()
            for line in lines:
                screen.line(line)

        return Answer(result=result, show=show, problems=report.findings)

    run_command("inspect.cache", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)


def _agrees(report: Any, *, as_json: bool) -> bool:
    """Show on stderr what would go, and ask there; stdout is for the answer."""
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            "--prune asks before it removes anything, and there is nobody to ask.",
            hint="Look at the list without --prune, then add --yes.",
        )
    screen = Screen(sys.stderr)
    screen.line(f"To be removed ({megabytes(report.removable_bytes)}):")
    for entry in report.removable:
        screen.line(f"  {entry.path}  ({entry.reason})")
    return bool(typer.confirm("Remove these files?", err=True))


def _show(screen: Screen, report: object) -> None:
    from lrstream.commands.inspect_cache import CacheReport

    assert isinstance(report, CacheReport)
    screen.facts(
        [
            ("cache", str(report.home)),
            ("size", f"{megabytes(report.size_bytes)} in {count(len(report.entries))} entries"),
            (
                "removable",
                f"{megabytes(report.removable_bytes)} in {count(len(report.removable))} entries",
            ),
        ]
    )
    if report.entries:
        screen.line()
    is_narrow = screen.columns is not None and screen.columns < _WIDE_COLUMNS
    columns = [
        Column("what"),
        Column("state"),
        Column("MiB", is_number=True),
        Column("unused", is_number=True),
        Column("file"),
    ]
    if report.entries:
        screen.table(
            columns,
            [
                (
                    entry.kind,
                    entry.state + (" *" if entry.is_removable else ""),
                    f"{entry.size_bytes / 2**20:,.2f}",
                    span_of_time(report.now - entry.last_used),
                    _short(entry, report, is_narrow=is_narrow),
                )
                for entry in report.entries
            ],
        )
    if report.removable:
        screen.line()
        screen.line("* is removed by 'lrstream inspect cache --prune'.")
    findings(screen, report.findings)


def _short(entry: Any, report: Any, *, is_narrow: bool) -> str:
    """The path below the cache, its name alone where there is little room, and of which dataset it is."""
    path = entry.path.name if is_narrow else str(entry.path.relative_to(report.home))
    return f"{path} ({entry.repo_id})" if entry.repo_id else str(path)
