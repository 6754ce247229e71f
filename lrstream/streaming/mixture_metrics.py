"""Counters of several datasets as those of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["combined_metrics"]


def combined_metrics(own: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over the members; samples and waits as the mixture has counted them.

    Args:
        own: Snapshot of the mixture's own counters.
        members: Snapshots of each member, as of `StreamingLeRobotDataset.metrics`.

    Returns:
        The same keys, and ``members`` with each one's by number. ``peak_reserved_bytes`` is a bound: the
        sum of the members' peaks.
    """
    total = {key: _sum([member[key] for member in members]) for key in members[0]}
    for key in ("samples", "wait_s", "batch_wait_s"):
        total[key] = own[key]
    total["fetched_bytes_per_sample"] = total["fetched_bytes"] / own["samples"] if own["samples"] else 0.0
    for stage, counters in total["stages"].items():
        for rate in ("per_s", "samples_per_s"):
            # A rate times its seconds is a number of things again.
            things = sum(
                member["stages"][stage][rate] * member["stages"][stage]["seconds"] for member in members
            )
            counters[rate] = things / counters["seconds"] if counters["seconds"] else 0.0
    total["members"] = {number: dict(member) for number, member in enumerate(members)}
    return total


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {key: _sum([value[key] for value in values]) for key in values[0]}
    return sum(values)
