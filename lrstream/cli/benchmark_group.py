"""The commands below `lrstream benchmark`."""

from __future__ import annotations

from collections.abc import Callable

from lrstream.cli import (
    benchmark,
    benchmark_build,
    benchmark_fetch,
    benchmark_open,
    benchmark_plan,
)
from lrstream.cli.options import Texts

__all__ = ["COMMANDS", "GROUP_SUMMARY"]

GROUP_SUMMARY = "Measure building, opening, fetching and loading; simulate epochs."

COMMANDS: tuple[tuple[str, Callable[..., None], Texts], ...] = (
    ("build", benchmark_build.build, benchmark_build.TEXTS),
    ("open", benchmark_open.open_, benchmark_open.TEXTS),
    ("fetch", benchmark_fetch.fetch, benchmark_fetch.TEXTS),
    ("loader", benchmark.loader, benchmark.LOADER_TEXTS),
    ("plan", benchmark_plan.plan, benchmark_plan.TEXTS),
)
"""Name, function and help of each."""
