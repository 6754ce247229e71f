"""Counters of one loader in one process: where time goes, and how long training waits (LD-13)."""

from __future__ import annotations

import math
import threading
import time
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

__all__ = ["LoaderMetrics", "PayloadCheck", "Stage", "WaitHistogram"]

Stage = Literal["rows", "payload", "assembly", "unit", "decode", "transform"]
"""Per episode: Parquet rows, MP4 ranges, building the record. Per unit of strategy `gop`: decoding it. Per
sample: decoding (with `gop` conversion alone), image transforms."""

_STAGES: tuple[Stage, ...] = ("rows", "payload", "assembly", "unit", "decode", "transform")

_FETCHES: tuple[Stage, ...] = ("rows", "payload")

PayloadCheck = Literal["correct", "unchecked", "healed", "damaged"]
"""What came of checking a span: right at once, no checksum, right when read again, wrong twice."""

# Waits are counted in buckets whose bounds grow by a quarter of a power of two from a microsecond on, so
# a percentile is right within 19 % and the memory is constant.
_FIRST_BOUND_S = 1e-6
_BUCKETS_PER_DOUBLING = 4
_NUM_BUCKETS = 36 * _BUCKETS_PER_DOUBLING


class WaitHistogram:
    """Distribution of waiting times in constant memory. Not thread-safe."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self.count = 0
        self.total_s = 0.0
        self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one wait."""
        bucket = 0
        if seconds > _FIRST_BOUND_S:
            bucket = math.ceil(math.log2(seconds / _FIRST_BOUND_S) * _BUCKETS_PER_DOUBLING)
        self._counts[min(bucket, _NUM_BUCKETS - 1)] += 1
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def percentile_s(self, percent: float) -> float:
        """Upper bound of the bucket in which the percentile lies, seconds; 0 without waits."""
        if self.count == 0:
            return 0.0
        wanted = math.ceil(self.count * percent / 100)
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return min(self.longest_s, _FIRST_BOUND_S * 2 ** (bucket / _BUCKETS_PER_DOUBLING))
        return self.longest_s

    def summary(self) -> dict[str, Any]:
        """Count, and seconds: total, longest, and percentiles."""
        percentiles = {f"p{percent}": self.percentile_s(percent) for percent in (50, 95, 99)}
        return {"count": self.count, "total": self.total_s, "max": self.longest_s, **percentiles}


class _BusyTime:
    """Time in which at least one thread was at something. The caller holds a lock."""

    def __init__(self) -> None:
        self._num_active = 0
        self._since_s = 0.0
        self._total_s = 0.0

    def enter(self, now_s: float) -> None:
        if self._num_active == 0:
            self._since_s = now_s
        self._num_active += 1

    def leave(self, now_s: float) -> None:
        self._num_active -= 1
        if self._num_active == 0:
            self._total_s += now_s - self._since_s

    def total_s(self, now_s: float) -> float:
        return self._total_s + (now_s - self._since_s if self._num_active else 0.0)


def _per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


class _Timed:
    """A piece of work that is being timed; a class, since one is made for every sample."""

    __slots__ = ("_count", "_metrics", "_stage", "_started_s")

    def __init__(self, metrics: LoaderMetrics, stage: Stage, count: int) -> None:
        self._metrics = metrics
        self._stage = stage
        self._count = count

    def __enter__(self) -> None:
        self._started_s = time.perf_counter()
        if self._stage in _FETCHES:
            self._metrics._begin(self._started_s)

    def __exit__(self, *_: object) -> None:
        self._metrics._end(self._stage, self._count, self._started_s)


class LoaderMetrics:
    """Thread-safe counters; they only grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = dict.fromkeys(_STAGES, 0.0)
        self._counts: dict[str, int] = dict.fromkeys(_STAGES, 0)
        self._fetching = _BusyTime()
        self._waits = WaitHistogram()
        self._samples = 0
        self._batch_waits = WaitHistogram()
        self._episodes = 0
        self._frames_loaded = 0
        self._fetched_bytes = 0
        self._refill_stalls = 0
        self._refill_stall_s = 0.0
        self._peak_reserved_bytes = 0
        self._payload_checks: dict[str, int] = dict.fromkeys(get_args(PayloadCheck), 0)
        self._peak_reservoir_bytes = 0
        self._pictures = 0

    def timed(self, stage: Stage, count: int = 1) -> AbstractContextManager[None]:
        """Count work of a stage, by default one piece, and the wall time it took, also if it fails."""
        return _Timed(self, stage, count)

    def _begin(self, started_s: float) -> None:
        with self._lock:
            self._fetching.enter(started_s)

    def _end(self, stage: Stage, count: int, started_s: float) -> None:
        ended_s = time.perf_counter()
        with self._lock:
            self._seconds[stage] += ended_s - started_s
            self._counts[stage] += count
            if stage in _FETCHES:
                self._fetching.leave(ended_s)

    def add_payload(self, num_bytes: int) -> None:
        """Count bytes of MP4 payload that arrived."""
        with self._lock:
            self._fetched_bytes += num_bytes

    def add_payload_check(self, outcome: PayloadCheck) -> None:
        """Count a span that was held against its checksum, or had none."""
        with self._lock:
            self._payload_checks[outcome] += 1

    def add_episode(self, num_frames: int) -> None:
        """Count an episode that was loaded, and its frames."""
        with self._lock:
            self._episodes += 1
            self._frames_loaded += num_frames

    def add_sample(self, waited_s: float) -> None:
        """Count a delivered sample and how long the consumer waited for it."""
        with self._lock:
            self._samples += 1
            self._waits.add(waited_s)

    def add_batch(self, waited_s: float) -> None:
        """Count a batch that training got, and how long it waited for it."""
        with self._lock:
            self._batch_waits.add(waited_s)

    def add_refill_stall(self, seconds: float) -> None:
        """Count an anchor that had to wait for its episode to arrive, with nothing else left to give."""
        with self._lock:
            self._refill_stalls += 1
            self._refill_stall_s += seconds

    def add_peak(self, reserved_bytes: int) -> None:
        """Take note of the largest reservation of an epoch that has ended."""
        with self._lock:
            self._peak_reserved_bytes = max(self._peak_reserved_bytes, reserved_bytes)

    def add_pictures(self, count: int) -> None:
        """Count pictures that were decoded for a reservoir."""
        with self._lock:
            self._pictures += count

    def add_reservoir_peak(self, held_bytes: int) -> None:
        """Take note of the most decoded pictures that an epoch which has ended kept."""
        with self._lock:
            self._peak_reservoir_bytes = max(self._peak_reservoir_bytes, held_bytes)

    def snapshot(self) -> dict[str, Any]:
        """All counters: plain numbers by name.

        A stage has `count` (of reads, episodes or samples), `seconds` (of all its threads together), `per_s`
        (counts per thread and second) and `samples_per_s`: the same in samples, where a loaded episode
        counts as many as it has frames. `fetch_busy_s` is the time in which at least one read was under way.
        Of units, delivered samples are counted.
        """
        with self._lock:
            samples = self._samples
            num_samples = {
                stage: self._counts[stage] if stage in ("decode", "transform") else self._frames_loaded
                for stage in _STAGES
            }
            num_samples["unit"] = samples
            return {
                "samples": samples,
                "episodes_loaded": self._episodes,
                "frames_loaded": self._frames_loaded,
                "fetched_bytes": self._fetched_bytes,
                "fetched_bytes_per_sample": self._fetched_bytes / samples if samples else 0.0,
                "stages": {
                    stage: {
                        "count": self._counts[stage],
                        "seconds": self._seconds[stage],
                        "per_s": _per_second(self._counts[stage], self._seconds[stage]),
                        "samples_per_s": _per_second(num_samples[stage], self._seconds[stage]),
                    }
                    for stage in _STAGES
                },
                "fetch_busy_s": self._fetching.total_s(time.perf_counter()),
                "wait_s": self._waits.summary(),
                "batch_wait_s": self._batch_waits.summary(),
                "refill_stalls": self._refill_stalls,
                "refill_stall_s": self._refill_stall_s,
                "peak_reserved_bytes": self._peak_reserved_bytes,
                "payload_checks": dict(self._payload_checks),
                "reservoir_pictures": self._pictures,
                "peak_reservoir_bytes": self._peak_reservoir_bytes,
            }
