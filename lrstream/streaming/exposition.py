"""Counters in the text format of Prometheus, version 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats/: a HELP and a TYPE line for each family, then one
line for each set of labels. Names end in their unit, and those of counters in ``_total``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["CONTENT_TYPE", "GAUGES", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class _Family(NamedTuple):
    """One number of the counters: its name there, its name here, and what it means."""

    path: tuple[str, ...]
    name: str
    kind: Literal["counter", "gauge"]
    help: str


_FAMILIES = (
    _Family(("samples",), "lrstream_samples_total", "counter", "Samples made by the reading process."),
    _Family(("episodes_loaded",), "lrstream_episodes_loaded_total", "counter", "Episodes loaded."),
    _Family(("frames_loaded",), "lrstream_frames_loaded_total", "counter", "Frames of loaded episodes."),
    _Family(("fetched_bytes",), "lrstream_fetched_bytes_total", "counter", "Bytes of MP4 payload fetched."),
    _Family(
        ("fetch_busy_s",),
        "lrstream_fetch_busy_seconds_total",
        "counter",
        "Time in which at least one read was under way.",
    ),
    _Family(
        ("refill_stalls",),
        "lrstream_refill_stalls_total",
        "counter",
        "Waits for an episode with nothing else to deliver.",
    ),
    _Family(("refill_stall_s",), "lrstream_refill_stall_seconds_total", "counter", "Time of these waits."),
    _Family(
        ("decoders_opened",), "lrstream_decoders_opened_total", "counter", "Decoders opened since the start."
    ),
    _Family(
        ("storage", "requests"), "lrstream_storage_requests_total", "counter", "Requests to the storage."
    ),
    _Family(
        ("storage", "bytes_read"),
        "lrstream_storage_read_bytes_total",
        "counter",
        "Bytes read from the storage.",
    ),
    _Family(
        ("storage", "retries"), "lrstream_storage_retries_total", "counter", "Requests that were repeated."
    ),
    _Family(
        ("storage", "slept_s"),
        "lrstream_storage_slept_seconds_total",
        "counter",
        "Time slept before repeated requests.",
    ),
    _Family(("open_decoders",), "lrstream_open_decoders", "gauge", "Decoders open now."),
    _Family(("reserved_bytes",), "lrstream_reserved_bytes", "gauge", "Bytes reserved of the byte budget."),
    _Family(("resident_bytes",), "lrstream_resident_bytes", "gauge", "Bytes of episodes in memory."),
    _Family(
        ("peak_reserved_bytes",),
        "lrstream_peak_reserved_bytes",
        "gauge",
        "Largest reservation since the process began.",
    ),
)

_STAGES = (
    ("seconds", "lrstream_stage_seconds_total", "Time of a stage, over all threads."),
    ("count", "lrstream_stage_operations_total", "Reads, episodes or samples that went through a stage."),
)

_WAITS = (
    ("wait_s", "lrstream_sample_wait_seconds", "Wait for a sample."),
    ("batch_wait_s", "lrstream_batch_wait_seconds", "Wait of training for a batch."),
)
_QUANTILES = (("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99"))

GAUGES = frozenset(family.path[0] for family in _FAMILIES if family.kind == "gauge")
"""Counters that tell about now, rather than since the start."""


def exposition(processes: Sequence[tuple[Labels, Mapping[str, Any]]]) -> str:
    """All families with a line for each process.

    Args:
        processes: Labels and counters (as `StreamingLeRobotDataset.metrics`) of each.
    """
    return "".join(f"{line}\n" for line in _lines(processes))


def _lines(processes: Sequence[tuple[Labels, Mapping[str, Any]]]) -> Iterator[str]:
    for family in _FAMILIES:
        yield from _head(family.name, family.kind, family.help)
        for labels, counters in processes:
            value: Any = counters
            for step in family.path:
                value = value.get(step, 0)
            yield _line(family.name, labels, value)
    for key, name, text in _STAGES:
        yield from _head(name, "counter", text)
        for labels, counters in processes:
            for stage, numbers in counters.get("stages", {}).items():
                yield _line(name, {**labels, "stage": stage}, numbers[key])
    for key, name, text in _WAITS:
        yield from _head(name, "summary", text)
        for labels, counters in processes:
            waits = counters.get(key)
            if waits is None:
                continue
            for quantile, percentile in _QUANTILES:
                yield _line(name, {**labels, "quantile": quantile}, waits[percentile])
            yield _line(f"{name}_sum", labels, waits["total"])
            yield _line(f"{name}_count", labels, waits["count"])


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _line(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
