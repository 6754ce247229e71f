"""The commands below `lrstream inspect`."""

from __future__ import annotations

from collections.abc import Callable

from lrstream.cli import (
    inspect_budget,
    inspect_cache,
    inspect_dataset,
    inspect_episode,
    inspect_locks,
    inspect_plan,
    inspect_sidecar,
)
from lrstream.cli.options import Texts

__all__ = ["COMMANDS", "GROUP_SUMMARY"]

GROUP_SUMMARY = "Look into sidecars, datasets, episodes, budgets, plans, locks and caches."

COMMANDS: tuple[tuple[str, Callable[..., None], Texts], ...] = (
    ("sidecar", inspect_sidecar.sidecar, inspect_sidecar.TEXTS),
    ("dataset", inspect_dataset.dataset, inspect_dataset.TEXTS),
    ("episode", inspect_episode.episode, inspect_episode.TEXTS),
    ("budget", inspect_budget.budget, inspect_budget.TEXTS),
    ("plan", inspect_plan.plan, inspect_plan.TEXTS),
    ("locks", inspect_locks.locks, inspect_locks.TEXTS),
    ("cache", inspect_cache.cache, inspect_cache.TEXTS),
)
"""Name, function and help of each."""
