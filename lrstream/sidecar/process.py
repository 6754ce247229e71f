"""Naming a process so that another one can tell, later and without guessing, whether it still runs.

A process id alone is not enough: ids are reused, another host counts its own, and so does another
container on the same host. A process is therefore named together with the *scope* in which its id
means something (this boot of this kernel, this pid namespace) and the time it was started.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["ProcessName", "command_name", "user_name"]


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One process on one machine.

    Attributes:
        host: Name of the machine, for people; not compared on its own.
        scope: Boot and pid namespace within which `pid` is meaningful.
        pid: Process id inside `scope`.
        started: Start time in clock ticks since boot, or 0 where the system does not tell.
    """

    host: str
    scope: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> ProcessName:
        """The calling process (correct after a fork too)."""
        pid = os.getpid()
        return cls(host_name(), _scope(), pid, _start_ticks(pid) or 0)

    def is_alive(self) -> bool | None:
        """Whether the process still runs; None when that cannot be known from here."""
        if self.scope != _scope() or self.host != host_name():
            return None
        if self.pid == os.getpid():
            return self.started in (0, _start_ticks(self.pid) or 0)
        started = _start_ticks(self.pid)
        if started is not None:
            return self.started in (0, started)
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True  # it exists, but belongs to another user
        # Signalling works but there is no start time: either no /proc here, or it just ended.
        return True if not Path("/proc/self/stat").exists() else None


@lru_cache(maxsize=1)
def host_name() -> str:
    """Name of this machine, reduced to characters that are safe in file names and JSON."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname()) or "host"


def user_name() -> str:
    """Login name of the current user, or the numeric id where it has no name (containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"


def command_name() -> str:
    """Name of the running program without its arguments, which may hold secrets."""
    return Path(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable or "python").name


@lru_cache(maxsize=1)
def _scope() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "noscope"


def _start_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/<pid>/stat``, or None where there is no such process or no /proc.

    The second field is the program's name in parentheses and may itself hold blanks and
    parentheses, so the fields are counted from the last closing one. A zombie has ended: whoever
    started it has just not asked for its exit status yet.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 1 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
