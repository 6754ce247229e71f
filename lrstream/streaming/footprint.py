"""Memory of processes, as the system counts it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Footprint", "footprint_of", "total_footprint"]

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one or several processes, in bytes; None where the system does not tell.

    Attributes:
        rss_bytes: Resident now. Pages that several processes share count in each of them.
        pss_bytes: The same with shared pages divided among those that share them.
        private_bytes: Resident and not backed by a file.
        peak_rss_bytes: Largest `rss_bytes` so far.
    """

    rss_bytes: int | None = None
    pss_bytes: int | None = None
    private_bytes: int | None = None
    peak_rss_bytes: int | None = None

    def largest(self, other: Footprint) -> Footprint:
        """The larger one of each figure."""

        def larger(one: int | None, two: int | None) -> int | None:
            known = [value for value in (one, two) if value is not None]
            return max(known) if known else None

        return Footprint(
            larger(self.rss_bytes, other.rss_bytes),
            larger(self.pss_bytes, other.pss_bytes),
            larger(self.private_bytes, other.private_bytes),
            larger(self.peak_rss_bytes, other.peak_rss_bytes),
        )


def footprint_of(pid: int | None = None) -> Footprint:
    """Memory of a process, from ``/proc``; all None where there is none, or the process has ended.

    Args:
        pid: Its number; None = this process.
    """
    directory = Path("/proc") / ("self" if pid is None else str(pid))
    status = _fields(directory / "status")
    return Footprint(
        rss_bytes=status.get("VmRSS"),
        pss_bytes=_fields(directory / "smaps_rollup").get("Pss"),
        private_bytes=status.get("RssAnon"),
        peak_rss_bytes=status.get("VmHWM"),
    )


def total_footprint(pids: Iterable[int]) -> Footprint:
    """Sum over the processes that are alive; None where none of them tells a figure."""
    found = [footprint_of(pid) for pid in pids]

    def total(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return Footprint(
        total([item.rss_bytes for item in found]),
        total([item.pss_bytes for item in found]),
        total([item.private_bytes for item in found]),
        total([item.peak_rss_bytes for item in found]),
    )


def _fields(path: Path) -> dict[str, int]:
    """The lines ``Name: number kB`` of a file, in bytes."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}  # another system, or the process is gone
    fields = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdigit() and words[1] == "kB":
            fields[name] = int(words[0]) * _KIB
    return fields
