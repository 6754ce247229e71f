"""Counters of all processes that read one dataset, gathered where they can be looked at.

Each process has its own counters, and a DataLoader's workers are started and ended by others. So every
reading process leaves its counters in a file of its own in a directory that the training process has made,
and the training process puts together what it finds there. Nothing is shared besides: fork and spawn are
alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrstream.storage.per_process import PerProcess
from lrstream.streaming.exposition import GAUGES

__all__ = ["MetricsBoard"]

_WRITE_EVERY_S = 0.5
_SUFFIX = ".json"


class _Page:
    """What one process writes to."""

    def __init__(self) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.written_at = 0.0


class MetricsBoard:
    """A directory with the counters of each reading process. Picklable; usable after fork and spawn.

    Made in the training process, which removes the directory when the board is dropped or the process ends.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="lrstream-metrics-"))
        self._pages = PerProcess(_Page)
        self._maker = os.getpid()
        self._ended: dict[int, dict[str, Any]] = {}
        self._remove = weakref.finalize(self, _remove, self._directory, self._maker)

    def __getstate__(self) -> dict[str, Any]:
        # The others write; reading and removing is the maker's.
        return {"_directory": self._directory, "_pages": self._pages, "_maker": self._maker}

    @property
    def is_makers(self) -> bool:
        """Whether this process made it: it reads, and has its own counters at hand."""
        return os.getpid() == self._maker

    @property
    def is_due(self) -> bool:
        """Whether this process should write again; cheap."""
        return time.monotonic() - self._pages.get().written_at >= _WRITE_EVERY_S

    def write(self, worker: int, counters: Mapping[str, Any]) -> None:
        """Leave the counters of this process; a directory that is gone is none of its business."""
        page = self._pages.get()
        page.written_at = time.monotonic()
        document = json.dumps({"worker": worker, "pid": os.getpid(), "counters": counters})
        temporary = self._directory / f"{page.name}.new"
        with contextlib.suppress(FileNotFoundError):
            temporary.write_text(document, encoding="ascii")
            temporary.replace(self._directory / f"{page.name}{_SUFFIX}")

    def read(self) -> dict[int, dict[str, Any]]:
        """Counters by worker: summed over its processes, since every epoch may have new ones.

        For the process that made the board; one thread at a time.
        """
        running: dict[int, dict[str, Any]] = {}
        for path in sorted(self._directory.glob(f"*{_SUFFIX}"), key=_written_at):
            try:
                document = json.loads(path.read_text(encoding="ascii"))
            except (FileNotFoundError, ValueError):
                continue
            worker, counters = document["worker"], document["counters"]
            if _is_alive(document["pid"]):
                running[worker] = _sum(running.get(worker), counters)
            else:
                self._ended[worker] = _sum(self._ended.get(worker), _without_gauges(counters))
                path.unlink(missing_ok=True)
        workers = sorted(running.keys() | self._ended.keys())
        return {worker: _sum(self._ended.get(worker), running.get(worker, {})) for worker in workers}

    def close(self) -> None:
        """Remove the directory."""
        self._remove()


def _remove(directory: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(directory, ignore_errors=True)


def _written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _sum(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> dict[str, Any]:
    """Both together, number by number; percentiles and other values of now are those of `other`."""
    if not one:
        return dict(other)
    total = dict(one)
    for name, value in other.items():
        before = total.get(name)
        if isinstance(value, Mapping):
            total[name] = _sum(before, value)
        elif before is None or name in GAUGES or name in ("p50", "p95", "p99", "max"):
            total[name] = value
        else:
            total[name] = before + value
    return total


def _without_gauges(counters: Mapping[str, Any]) -> dict[str, Any]:
    """What stays true of a process that has ended."""
    return {name: value for name, value in counters.items() if name not in GAUGES or name.startswith("peak")}
