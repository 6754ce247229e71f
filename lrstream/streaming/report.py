"""What the loader says by itself: a line now and then, and the remedy where something limits (LD-13).

Everything goes to the logger ``lrstream.loader``: progress as INFO, what needs attention as WARNING (which
Python shows on stderr even where logging was not set up).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from lrstream.errors import UsageError
from lrstream.sidecar.build import BuildProgress
from lrstream.streaming.partition import PartitionReport

__all__ = [
    "DEFAULT_LOG_INTERVAL_S",
    "BuildNotice",
    "PeriodicReport",
    "log_interval_s",
    "logger",
    "tell_partition",
]

logger = logging.getLogger("lrstream.loader")

DEFAULT_LOG_INTERVAL_S = 60.0
LOG_INTERVAL_VARIABLE = "LRSTREAM_LOG_INTERVAL_S"

# A build that takes longer than this is announced, and reported so often.
_TOLD_AFTER_S = 2.0
_TOLD_EVERY_S = 15.0
# Refill stalls that take more of the time than this, and more than so many seconds, are worth a warning.
_STALLED_SHARE = 0.1
_STALLED_S = 1.0


def log_interval_s() -> float:
    """Seconds between two lines of a worker, from the environment; 0 = none.

    Raises:
        UsageError: The variable is no number of seconds.
    """
    text = os.environ.get(LOG_INTERVAL_VARIABLE)
    if not text:
        return DEFAULT_LOG_INTERVAL_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"The environment variable {LOG_INTERVAL_VARIABLE} is {text!r}, expected seconds.")
    return seconds


class PeriodicReport:
    """One line on the counters of a process every so often. Belongs to one thread."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._samples = 0
        self._stalls = 0
        self._stall_s = 0.0

    def is_due(self, interval_s: float) -> bool:
        """Whether so many seconds have passed since the last report."""
        return time.monotonic() - self._since_s >= interval_s

    def tell(self, who: str, counters: Mapping[str, Any]) -> None:
        """Report now what has happened since the last time."""
        now_s = time.monotonic()
        seconds = max(now_s - self._since_s, 1e-9)
        waits, storage = counters["wait_s"], counters["storage"]
        samples = counters["samples"] - self._samples
        stalls = counters["refill_stalls"] - self._stalls
        stall_s = counters["refill_stall_s"] - self._stall_s
        logger.info(
            "%s: %d samples (%.1f/s), sample wait p50/p95/p99 %.1f/%.1f/%.1f ms, %d refill stalls (%.1f s), "
            "%.0f bytes per sample, %d bytes reserved, %d resident, %d open decoders, %d retries "
            "(slept %.1f s)",
            who,
            counters["samples"],
            samples / seconds,
            *(1000 * waits[name] for name in ("p50", "p95", "p99")),
            stalls,
            stall_s,
            counters["fetched_bytes_per_sample"],
            counters["reserved_bytes"],
            counters["resident_bytes"],
            counters["open_decoders"],
            storage["retries"],
            storage["slept_s"],
        )
        # The first stall is the filling of the pool.
        if self._samples and stall_s > max(_STALLED_S, _STALLED_SHARE * seconds):
            logger.warning(
                "%s: refill stalls are high: %d took %.1f of %.1f s (wait for a sample: p95 %.1f ms, "
                "p99 %.1f ms). Compare p95 and p99 of the batch wait, reduce contention on the network, "
                "raise prefetch_episodes gradually, and check that the sidecar matches the revision "
                "(lrstream validate).",
                who,
                stalls,
                stall_s,
                seconds,
                1000 * waits["p95"],
                1000 * waits["p99"],
            )
        self._since_s = now_s
        self._samples = counters["samples"]
        self._stalls, self._stall_s = counters["refill_stalls"], counters["refill_stall_s"]


class BuildNotice:
    """Says why the first batch takes long, while an index is being built.

    Args:
        name: Of the dataset.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun_s = time.monotonic()
        self._told_s: float | None = None

    def __call__(self, progress: BuildProgress) -> None:
        """Take note of the progress of a build."""
        now_s = time.monotonic()
        if self._told_s is None:
            if now_s - self._begun_s < _TOLD_AFTER_S:
                return
            logger.warning(
                "The first batch of %s takes long: a sidecar is being built, %d of %d videos are indexed. "
                "Share the cache (HF_LEROBOT_HOME) or publish a validated complete sidecar "
                "(lrstream publish).",
                self._name,
                progress.done,
                progress.total,
            )
        elif now_s - self._told_s < _TOLD_EVERY_S:
            return
        else:
            logger.warning("Building a sidecar: %d of %d videos are indexed.", progress.done, progress.total)
        self._told_s = now_s


def tell_partition(report: PartitionReport, *, rank: int, batch_size: int, drop_last: bool) -> None:
    """One line on how frames and batches are shared, before training (K17)."""
    batches = report.batches_per_rank(batch_size, drop_last=drop_last)
    num_ranks, num_parts = report.worker_frames.shape
    logger.info(
        "Rank %d of %d: %d frames of %d episodes, %d batches of %d from %d workers (%d idle over all ranks); "
        "frames of all ranks %d to %d, batches %d to %d",
        rank,
        num_ranks,
        report.rank_frames[rank],
        report.rank_episodes[rank],
        batches[rank],
        batch_size,
        num_parts,
        report.num_idle_workers,
        report.rank_frames.min(),
        report.rank_frames.max(),
        batches.min(),
        batches.max(),
    )
