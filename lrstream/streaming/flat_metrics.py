"""Counters as experiment trackers take them: one number by one name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["flat_metrics"]


def flat_metrics(metrics: Mapping[str, Any], prefix: str = "lrstream/") -> dict[str, float]:
    """The counters of `StreamingLeRobotDataset.metrics` for TensorBoard, W&B and the like.

    Args:
        metrics: What ``dataset.metrics()`` returned.
        prefix: Begins every name.

    Returns:
        Each number by the names of its place, joined with slashes: ``lrstream/samples``,
        ``lrstream/stages/decode/seconds``, ``lrstream/wait_s/p95``. Values are finite; what is no number
        is left out.
    """
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update(flat_metrics(value, f"{prefix}{name}/"))
        elif isinstance(value, (int, float)):
            number = float(value)
            if number - number == 0:  # neither infinite nor NaN
                flat[f"{prefix}{name}"] = number
    return flat
