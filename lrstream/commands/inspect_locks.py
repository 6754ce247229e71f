"""`lrstream inspect locks`: who holds which lock, whether that process lives, what to do (SC-5, K25)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lrstream.commands.inspect_figures import finding
from lrstream.errors import NotFoundError
from lrstream.sidecar.lock import IDLE_S, LockStatus, break_lock, inspect_lock, lock_path
from lrstream.sidecar.problems import Problem
from lrstream.storage.home import lerobot_home

__all__ = ["CACHE_DIRECTORIES", "Holder", "LockReport", "LockState", "LocksReport", "inspect_locks"]

CACHE_DIRECTORIES = ("streaming-sidecars", "streaming-indexes")
"""Directories below LeRobot's home in which lrstream keeps files."""

LockState = Literal["free", "held", "held-elsewhere", "held-unknown", "holder-died"]
"""``held``: by a process that runs on this machine. ``held-elsewhere``: by one on another machine or in
another container. ``held-unknown``: by a process that left no note. ``holder-died``: free, because the
process that held it has ended without cleaning up."""

_SUFFIX = ".lock"
_STALLED_S = 60.0  # six heartbeats


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, or held it last; times in seconds since the epoch.

    Attributes:
        host: Name of the machine.
        pid: Process id there.
        user: Its user.
        command: Its program, without arguments.
        since: When it took the lock.
        updated: Its last sign of life.
        is_alive: Whether it still runs; None when that cannot be known from here.
        num_done: Source files finished.
        num_total: Source files in all; 0 while unknown.
        estimated_end: When it will be done at its pace so far; None while that cannot be told.
    """

    host: str
    pid: int
    user: str
    command: str
    since: float
    updated: float
    is_alive: bool | None
    num_done: int
    num_total: int
    estimated_end: float | None


@dataclass(frozen=True, slots=True)
class LockReport:
    """One lock.

    Attributes:
        path: The lock file.
        guards: The file, or directory, that it guards.
        is_held: Asked of the lock itself.
        state: What that and the note beside it amount to.
        holder: The note, if there is one that concerns this state.
        advice: What to do.
        was_broken: Whether it was freed just now.
    """

    path: Path
    guards: Path
    is_held: bool
    state: LockState
    holder: Holder | None
    advice: str
    was_broken: bool = False


@dataclass(frozen=True, slots=True)
class LocksReport:
    """All locks below a place.

    Attributes:
        root: Where was looked.
        now: When, seconds since the epoch.
        locks: Held ones first.
        findings: What deserves attention.
    """

    root: Path
    now: float
    locks: tuple[LockReport, ...]
    findings: tuple[Problem, ...]

    @property
    def num_held(self) -> int:
        """Locks that are held."""
        return sum(lock.is_held for lock in self.locks)


def inspect_locks(path: Path | None = None, *, break_stale: bool = False) -> LocksReport:
    """Look at locks without taking them.

    Args:
        path: A lock, the file it guards, or a directory; None for the local caches.
        break_stale: Free locks of marker files (file systems without `flock`) whose holder is dead or has
            given no sign of life for ten minutes. Everything else needs no breaking.

    Raises:
        NotFoundError: There is no such path.
    """
    root = lerobot_home() if path is None else path.expanduser()
    if path is not None and not root.exists() and not lock_path(root).exists():
        raise NotFoundError(
            f"There is neither a lock nor a directory at {root}.",
            hint="Without a path, the local caches are looked at.",
            path=str(root),
        )
    now = time.time()
    locks = []
    for lock in sorted(_find(root, everything=path is not None)):
        was_broken = break_stale and break_lock(lock)
        locks.append(_report(inspect_lock(lock), now, was_broken))
    locks.sort(key=lambda report: not report.is_held)
    return LocksReport(root, now, tuple(locks), tuple(_findings(locks, now)))


def _find(root: Path, *, everything: bool) -> Iterator[Path]:
    if root.is_dir() or not everything:
        tops = [root] if everything else [root / name for name in CACHE_DIRECTORIES]
        for top in tops:
            # A lock that is called just ".lock" guards its directory.
            yield from (path for path in top.rglob(f"*{_SUFFIX}") if path.is_file())
    elif root.name.endswith(_SUFFIX):
        yield root
    else:
        yield lock_path(root)


def _report(status: LockStatus, now: float, was_broken: bool) -> LockReport:
    holder = _holder(status, now)
    state: LockState
    if not status.held:
        state = "holder-died" if holder is not None and holder.is_alive is False else "free"
    elif holder is None or holder.is_alive is False:
        # Held, yet not by the process that the note names: its successor could not write one.
        state, holder = "held-unknown", None
    else:
        state = "held" if holder.is_alive else "held-elsewhere"
    if state == "free":
        holder = None
    name = status.path.name
    guards = status.path.parent if name == _SUFFIX else status.path.with_name(name[: -len(_SUFFIX)])
    advice = _advise(state, holder, now)
    if was_broken:
        advice = "It was freed. " + advice
    return LockReport(status.path, guards, status.held, state, holder, advice, was_broken)


def _holder(status: LockStatus, now: float) -> Holder | None:
    record = status.holder
    if record is None:
        return None
    end = None
    if status.held and 0 < record.done < record.total and record.updated > record.since:
        # Counted from the last sign of life: a holder that is silent comes no nearer to its end.
        end = record.updated + (record.updated - record.since) * (record.total - record.done) / record.done
    return Holder(
        host=record.process.host,
        pid=record.process.pid,
        user=record.user,
        command=record.command,
        since=record.since,
        updated=record.updated,
        is_alive=status.holder_alive,
        num_done=record.done,
        num_total=record.total,
        estimated_end=end,
    )


def _advise(state: LockState, holder: Holder | None, now: float) -> str:
    if state == "free":
        return "Nothing to do."
    if state == "holder-died":
        return (
            "Nothing to do: the lock is free, its last holder ended without finishing. "
            "The next process that needs the file makes it."
        )
    if state == "held-unknown" or holder is None:
        return (
            "Find the process with lsof or fuser on the lock file; the lock ends with it. "
            "Do not delete the lock file."
        )
    silent_s = now - holder.updated
    if state == "held":
        if silent_s > _STALLED_S:
            return (
                f"Process {holder.pid} runs but gave no sign of life for {silent_s:.0f} s: it may be "
                "stopped. Ending it frees the lock."
            )
        return "Wait for it, or raise sidecar_lock_timeout_s. Ending the process frees the lock."
    if silent_s > IDLE_S:
        return (
            f"Look on {holder.host} whether process {holder.pid} still runs. If not, free the lock with "
            "`lrstream inspect locks --break`."
        )
    return f"Wait for it: process {holder.pid} on {holder.host} gave a sign of life {silent_s:.0f} s ago."


def _findings(locks: list[LockReport], now: float) -> list[Problem]:
    found = []
    for lock in locks:
        silent_s = 0.0 if lock.holder is None else now - lock.holder.updated
        if lock.is_held and lock.holder is not None and silent_s > _STALLED_S:
            found.append(
                finding(
                    "lock-silent",
                    f"The lock {lock.path} is held by process {lock.holder.pid} on {lock.holder.host}, which "
                    f"gave no sign of life for {silent_s:.0f} s.",
                    lock.advice,
                    source=str(lock.path),
                )
            )
        elif lock.state == "holder-died" and lock.holder is not None:
            found.append(
                finding(
                    "lock-holder-died",
                    f"The last holder of the lock {lock.path}, process {lock.holder.pid} (user "
                    f"{lock.holder.user}), ended without finishing.",
                    lock.advice,
                    source=str(lock.path),
                )
            )
    return found
