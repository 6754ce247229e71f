"""The commands below `lrstream benchmark`."""

from __future__ import annotations

from collections.abc import Callable

from lrstream.cli import benchmark, benchmark_plan
from lrstream.cli.options import Texts

__all__ = ["COMMANDS", "GROUP_SUMMARY"]

GROUP_SUMMARY = "Measure building, opening, fetching and loading; simulate epochs."

COMMANDS: tuple[tuple[str, Callable[..., None], Texts], ...] = (
    ("loader", benchmark.loader, benchmark.LOADER_TEXTS),
    ("plan", benchmark_plan.plan, benchmark_plan.TEXTS),
)
"""Name, function and help of each."""
