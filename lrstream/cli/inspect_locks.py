"""`lrstream inspect locks`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from lrstream.cli.inspect_text import at_time, findings, span_of_time
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
from lrstream.cli.screen import Screen, count

__all__ = ["TEXTS", "locks"]

TEXTS = Texts(
    "Show who holds the locks of the caches.",
    """\
Show each lock: held or free, by whom, since when, alive or not, how far it has come, and what to do.

Whether a lock is held is asked of the lock itself, not guessed from its age. Without PATH the local
caches are looked at; PATH may be a lock, the file it guards, or a directory. Free locks are only counted,
unless --all asks for them; --json always has all.

Locks of the operating system end with the process that holds them and need no breaking. Only on file
systems without such locks are they plain files; --break frees those whose holder is dead or has given no
sign of life for ten minutes.
""",
    (
        "lrstream inspect locks",
        "lrstream inspect locks --json",
    ),
)

_STATES = {
    "free": "free",
    "holder-died": "free (its last holder died)",
    "held": "held, by a running process",
    "held-elsewhere": "held, from another machine or container",
    "held-unknown": "held, by an unknown process",
}


def locks(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="A lock, a file or a directory.", show_default=False)
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show free locks too, not just their number.")
    ] = False,
    break_stale: Annotated[
        bool, typer.Option("--break", help="Free locks of dead or silent holders (file locks only).")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Parse, look, render."""

    def work(progress: ProgressLine) -> Answer:
        from lrstream.commands.inspect_locks import LocksReport, inspect_locks

        report = inspect_locks(path, break_stale=break_stale)

        def show(screen: Screen, report: LocksReport = report) -> None:
            _show(screen, report, show_all=show_all)

        result = {**jsonable(report), "num_held": report.num_held}
        return Answer(result=result, show=show, problems=report.findings)

    run_command("inspect.locks", CommonOptions(as_json, quiet, verbose, debug, cache_dir), work)


def _show(screen: Screen, report: object, *, show_all: bool) -> None:
    from lrstream.commands.inspect_locks import LocksReport

    assert isinstance(report, LocksReport)
    screen.line(f"{count(len(report.locks))} locks below {report.root}, {count(report.num_held)} held.")
    # A single lock was asked for by its name.
    is_shown = [
        show_all or len(report.locks) == 1 or lock.state != "free" or lock.was_broken for lock in report.locks
    ]
    for lock in itertools.compress(report.locks, is_shown):
        facts = [("lock", str(lock.path)), ("state", _STATES[lock.state])]
        holder = lock.holder
        if holder is not None:
            alive = {True: "yes", False: "no", None: "cannot be told from here"}[holder.is_alive]
            facts += [
                ("holder", f"pid {holder.pid} on {holder.host}, user {holder.user}, {holder.command}"),
                ("alive", alive),
                ("since", f"{at_time(holder.since)} ({span_of_time(report.now - holder.since)})"),
                ("last sign", f"{span_of_time(report.now - holder.updated)} ago"),
            ]
            if holder.num_total:
                facts.append(("progress", f"{count(holder.num_done)} of {count(holder.num_total)} files"))
            if holder.estimated_end is not None:
                left = holder.estimated_end - report.now
                facts.append(("done in", f"about {span_of_time(left)} ({at_time(holder.estimated_end)})"))
        facts.append(("what to do", lock.advice))
        screen.line()
        screen.facts(facts)
    if not all(is_shown):
        screen.line()
        screen.line(f"{count(is_shown.count(False))} free locks are not shown; --all shows them.")
    findings(screen, report.findings)
