"""Who holds a lock, since when and how far it has come: a note beside the lock, for people.

The note decides nothing. Whether a lock is held is asked of the lock itself; the note survives a
crash, and is then read together with the question whether its writer still runs.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lrstream.sidecar.install import write_atomically
from lrstream.sidecar.process import ProcessName, command_name, user_name

__all__ = ["HolderRecord", "holder_path", "read_holder"]


@dataclass(frozen=True, slots=True)
class HolderRecord:
    """One holder of a lock.

    Attributes:
        process: The process.
        user: Its user.
        command: Name of its program, without arguments (which may hold secrets).
        since: When it took the lock, seconds since the epoch.
        updated: Its last sign of life, seconds since the epoch.
        done: Source files finished so far.
        total: Source files in all; 0 while that is not known.
    """

    process: ProcessName
    user: str
    command: str
    since: float
    updated: float
    done: int = 0
    total: int = 0

    @classmethod
    def current(cls) -> HolderRecord:
        """A record of the calling process, taking the lock now."""
        now = time.time()
        return cls(ProcessName.current(), user_name(), command_name(), now, now)

    def updated_now(self, done: int | None = None, total: int | None = None) -> HolderRecord:
        """The record with a new sign of life, and progress where given."""
        return replace(
            self,
            updated=time.time(),
            done=self.done if done is None else done,
            total=self.total if total is None else total,
        )

    def write(self, lock_path: Path) -> None:
        """Put the note beside the lock."""
        document = {
            "host": self.process.host,
            "scope": self.process.scope,
            "pid": self.process.pid,
            "process_started": self.process.started,
            "user": self.user,
            "command": self.command,
            "since": self.since,
            "updated": self.updated,
            "done": self.done,
            "total": self.total,
        }
        write_atomically(holder_path(lock_path), json.dumps(document).encode(), durable=False)

    def describe(self) -> str:
        """One phrase for messages: who, where, since when, whether alive, how far."""
        alive = self.process.is_alive()
        idle = _span(time.time() - self.updated)
        state = {
            True: "still running",
            False: "no longer running",
            None: f"on another machine or container, last sign of life {idle} ago",
        }[alive]
        progress = f", {self.done} of {self.total} source files done" if self.total else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return (
            f"pid {self.process.pid} on {self.process.host} (user {self.user}, {self.command}), "
            f"since {since} ({_span(time.time() - self.since)}), {state}{progress}"
        )


def holder_path(lock_path: Path) -> Path:
    """Where the note of a lock's holder lies."""
    return lock_path.with_name(lock_path.name + ".holder")


def read_holder(lock_path: Path) -> HolderRecord | None:
    """The note beside a lock, or None where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document: dict[str, Any] = json.loads(holder_path(lock_path).read_text("utf-8"))
        return HolderRecord(
            ProcessName(
                str(document["host"]),
                str(document["scope"]),
                int(document["pid"]),
                int(document["process_started"]),
            ),
            str(document["user"]),
            str(document["command"]),
            float(document["since"]),
            float(document["updated"]),
            int(document["done"]),
            int(document["total"]),
        )
    return None


def _span(seconds: float) -> str:
    seconds = max(0, round(seconds))
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
