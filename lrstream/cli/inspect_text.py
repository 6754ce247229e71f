"""Text forms that the `inspect` commands share; plain ASCII."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lrstream.cli.screen import Column, Screen, count

if TYPE_CHECKING:
    from lrstream.commands.inspect_figures import Bin, Distribution
    from lrstream.sidecar.problems import Problem

__all__ = [
    "at_time",
    "bars",
    "byte_row",
    "distribution_columns",
    "findings",
    "number_row",
    "span_of_time",
]

_BAR_CHARS = 40
_FIGURES = ("least", "median", "p90", "p99", "largest")


def number_row(name: str, figures: Distribution) -> tuple[str, ...]:
    """A distribution of counts as a row of a table."""
    return (name, *(count(int(value)) for value in _values(figures)))


def byte_row(name: str, figures: Distribution) -> tuple[str, ...]:
    """A distribution of bytes as a row of a table, in KiB."""
    return (name, *(f"{value / 1024:,.1f}" for value in _values(figures)))


def _values(figures: Distribution) -> tuple[float, ...]:
    return (figures.least, figures.p50, figures.p90, figures.p99, figures.largest)


def distribution_columns(title: str) -> list[Column]:
    """Columns for `number_row` and `byte_row`."""
    return [Column(title), *(Column(name, is_number=True) for name in _FIGURES)]


def span_of_time(seconds: float) -> str:
    """A duration in the unit a person would choose."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"


def at_time(seconds: float) -> str:
    """A moment, given in seconds since the epoch, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def bars(screen: Screen, bins: Sequence[Bin]) -> None:
    """A histogram of bytes, one line for each bar."""
    longest = max((bar.count for bar in bins), default=0)
    unit, name = (2**20, "MiB") if bins and bins[-1].stop >= 10 * 2**20 else (1024, "KiB")
    screen.line(f"{name + ' from':>12}  {'':<{_BAR_CHARS}}  {'episodes':>9}")
    for bar in bins:
        # Every bar that holds something is visible.
        filled = -(-_BAR_CHARS * bar.count // longest) if longest else 0
        screen.line(f"{bar.start / unit:>12,.1f}  {'#' * filled:<{_BAR_CHARS}}  {count(bar.count):>9}")


def findings(screen: Screen, found: Sequence[Problem]) -> None:
    """What deserves attention, below a report."""
    if found:
        screen.line()
    for problem in found:
        screen.problem(problem)
