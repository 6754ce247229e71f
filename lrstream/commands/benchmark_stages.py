"""Where the time of a loader goes: stages by themselves, and the one that limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lrstream.commands.benchmark_common import Limit, LimitingStage, num_usable_cpus
from lrstream.streaming.measure import EpochTimes, ProcessReport

__all__ = [
    "StageRates",
    "TimeShares",
    "cpu_ms_per_sample",
    "fetched_bytes_per_sample",
    "limit_of",
    "stage_rates",
    "time_shares",
    "total_cpu_s",
    "total_of",
]

# Training that waits for less of its time than this is not limited by the loader.
_HARDLY_WAITING = 0.05
_SATURATED = 0.85


@dataclass(frozen=True, slots=True)
class StageRates:
    """Samples per second that each stage would give by itself, over all workers; None without such work.

    Attributes:
        fetch: Frames of the episodes that arrived, over the time in which at least one read was under way.
        decode: Samples that were decoded, over the time that decode threads took, times their number.
        assembly: Samples over the time for joining rows with pictures and stacking batches.
    """

    fetch: float | None
    decode: float | None
    assembly: float | None


@dataclass(frozen=True, slots=True)
class TimeShares:
    """What the reading processes did with their time, shares of 1.

    Attributes:
        waiting_for_episodes: Nothing was left to give before an episode arrived.
        waiting_for_pictures: The next sample was not decoded yet.
        assembling: Stacking batches, handing them over, and waiting to be asked for more.
    """

    waiting_for_episodes: float
    waiting_for_pictures: float
    assembling: float


def stage_rates(reports: Sequence[ProcessReport], decode_threads: int) -> StageRates:
    """Rates of all processes together.

    Args:
        reports: Of each process.
        decode_threads: Threads that decode in each of them.
    """
    fetch = decode = assembly = 0.0
    for report in reports:
        counters = report.counters
        stages = counters["stages"]
        fetch += _rate(counters["frames_loaded"], counters["fetch_busy_s"])
        # With strategy `gop` decoding is counted by unit, and converting by sample.
        decode_s = stages["decode"]["seconds"] + stages["unit"]["seconds"]
        decode += _rate(stages["decode"]["count"] * decode_threads, decode_s)
        per_sample_s = _each(stages["assembly"]["seconds"], counters["frames_loaded"]) + _each(
            report.collate_s, report.num_samples
        )
        assembly += _rate(1, per_sample_s)
    return StageRates(fetch or None, decode or None, assembly or None)


def time_shares(times: EpochTimes) -> TimeShares:
    """How the processes spent their time; all zero where none has reported."""
    total = sum(report.wall_s for report in times.reports)
    if not total:
        return TimeShares(0.0, 0.0, 0.0)
    episodes = sum(report.counters["refill_stall_s"] for report in times.reports)
    pictures = sum(report.counters["wait_s"]["total"] for report in times.reports) - episodes
    # Without workers, the time in which training computes passes in the reading process, too.
    rest = total - episodes - pictures
    if times.is_in_process:
        total, rest = max(total - times.consumer_s, 1e-9), max(rest - times.consumer_s, 0.0)
    return TimeShares(episodes / total, max(pictures, 0.0) / total, max(rest, 0.0) / total)


def limit_of(times: EpochTimes, shares: TimeShares, *, strategy: str, load: float | None) -> Limit:
    """The stage that limits a run.

    Args:
        times: The run.
        shares: What its readers did with their time.
        strategy: How frames were drawn.
        load: Processes that wanted a processor before it; None where nobody knows.
    """
    seconds = times.elapsed_s - times.first_batch_s
    waited = float(times.waits_s.sum()) / seconds if seconds > 0 and len(times.waits_s) else 1.0
    if times.consumer_s and waited < _HARDLY_WAITING:
        return Limit("consumer", f"training waited for {waited:.1%} of its time", ("Nothing to change.",))
    if not times.consumer_s and not times.is_in_process and waited < _HARDLY_WAITING:
        return Limit(
            "assembly",
            f"batches were waited for during {waited:.1%} of the time",
            ("The process that takes batches limits: larger batches, fewer features.",),
        )
    parts: dict[LimitingStage, float] = {
        "network": shares.waiting_for_episodes,
        "decode": shares.waiting_for_pictures,
        "assembly": shares.assembling,
    }
    stage = max(parts, key=lambda name: parts[name])
    share = f"{parts[stage]:.0%} of their time"
    if stage == "network":
        return Limit(
            stage,
            f"readers waited for episodes {share}",
            (
                "Raise --prefetch (prefetch_episodes), then --connections over HTTP.",
                "Where the byte budget is full, raise --budget (byte_budget_gb).",
            ),
        )
    if stage == "decode":
        return Limit(stage, f"readers waited for pictures {share}", _decode_advice(times, strategy, load))
    return Limit(
        stage,
        f"readers stacked and handed over batches {share}",
        ("Raise --workers (num_workers); keep pictures as bytes (return_uint8).",),
    )


def _decode_advice(times: EpochTimes, strategy: str, load: float | None) -> tuple[str, ...]:
    used = total_cpu_s(times) / times.elapsed_s if times.elapsed_s else 0.0
    if used < _SATURATED * num_usable_cpus():
        if load is not None and load > num_usable_cpus():
            return ("Other processes keep the processors busy: measure again without them.",)
        return ("Raise --decode-threads (decode_threads) or --workers: processors idle.",)
    remedies = ["Use more processors, or shorter GOPs in the videos: all are busy."]
    if strategy != "gop":
        remedies.insert(0, "Decode each GOP once: --strategy gop.")
    return tuple(remedies)


def total_cpu_s(times: EpochTimes) -> float:
    """Processor time of the run over all its processes, seconds."""
    workers = 0.0 if times.is_in_process else sum(report.cpu_s for report in times.reports)
    return times.cpu_s + workers


def cpu_ms_per_sample(times: EpochTimes) -> float:
    """Processor time of a sample over all processes, milliseconds.

    Workers are ahead of what was delivered when a run is cut short, so theirs is divided by what they made.
    """
    made = sum(report.num_samples for report in times.reports)
    if not times.num_samples or not made:
        return 0.0
    workers = 0.0 if times.is_in_process else sum(report.cpu_s for report in times.reports) / made
    return 1000 * (times.cpu_s / times.num_samples + workers)


def fetched_bytes_per_sample(reports: Sequence[ProcessReport]) -> float:
    """Bytes of MP4 that were fetched for each sample that was made."""
    made = sum(report.num_samples for report in reports)
    return sum(report.counters["fetched_bytes"] for report in reports) / made if made else 0.0


def total_of(reports: Sequence[ProcessReport], *path: str) -> Any:
    """Sum of one counter over all processes."""
    total = 0
    for report in reports:
        value: Any = report.counters
        for name in path:
            value = value[name]
        total += value
    return total


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _each(seconds: float, count: int) -> float:
    return seconds / count if count else 0.0
