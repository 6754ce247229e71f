"""Figures that several reports share: distributions, GOP lengths, histograms, findings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lrstream.mp4.span import is_reordered
from lrstream.mp4.track import SampleTable
from lrstream.sidecar.problems import Problem, Severity

__all__ = ["Bin", "Distribution", "TrackFigures", "finding", "gop_lengths", "histogram"]


def finding(
    code: str,
    message: str,
    hint: str | None = None,
    *,
    severity: Severity = "warning",
    source: str | None = None,
    episode_index: int | None = None,
) -> Problem:
    """Something a report draws attention to; codes are listed in ``docs/reference/problem-codes.md``."""
    return Problem(code, severity, source, episode_index, message, hint)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of some numbers; percentiles are values that occur (the lower one where it falls between).

    Attributes:
        count: How many.
        total: Their sum.
        mean: Their mean.
        least: Smallest.
        p50: Median.
        p90: 90th percentile.
        p99: 99th percentile.
        largest: Largest.
    """

    count: int
    total: float
    mean: float
    least: float
    p50: float
    p90: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: NDArray[np.integer] | NDArray[np.floating]) -> Distribution:
        """Summary of an array; all zero for an empty one. Integers stay integers, except the mean."""
        if values.size == 0:
            return cls(0, 0, 0.0, 0, 0, 0, 0, 0)
        ordered = np.sort(values, axis=None)
        p50, p90, p99 = (ordered[int(q * (ordered.size - 1) / 100)].item() for q in (50, 90, 99))
        return cls(
            int(values.size),
            values.sum().item(),
            float(values.mean()),
            ordered[0].item(),
            p50,
            p90,
            p99,
            ordered[-1].item(),
        )


@dataclass(frozen=True, slots=True)
class Bin:
    """One bar of a histogram: how many values lie in ``[start, stop)``, the last one with its end."""

    start: float
    stop: float
    count: int


def histogram(values: NDArray[np.integer], num_bins: int = 10) -> tuple[Bin, ...]:
    """Bars of equal width over the range of `values`; none for no values, one for equal ones."""
    if values.size == 0:
        return ()
    low, high = int(values.min()), int(values.max())
    if low == high:
        return (Bin(low, high, int(values.size)),)
    edges = np.linspace(low, high, num_bins + 1)
    # Every bin is half-open but the last, as numpy counts them.
    counts, _ = np.histogram(values, bins=edges)
    return tuple(Bin(float(edges[i]), float(edges[i + 1]), int(n)) for i, n in enumerate(counts))


def gop_lengths(samples: SampleTable) -> NDArray[np.int64]:
    """Samples of each GOP in decode order, int64; what precedes the first keyframe belongs to none."""
    ends = np.append(samples.sync_samples[1:], samples.num_samples)
    lengths: NDArray[np.int64] = (ends - samples.sync_samples).astype(np.int64)
    return lengths


@dataclass(frozen=True, slots=True)
class TrackFigures:
    """What one sample table amounts to.

    Attributes:
        num_frames: Coded pictures.
        picture_bytes: Their bytes.
        gops: Length of each GOP, int64, pictures.
        is_reordered: Whether pictures are stored in another order than shown (B-frames).
    """

    num_frames: int
    picture_bytes: int
    gops: NDArray[np.int64]
    is_reordered: bool

    @classmethod
    def of(cls, samples: SampleTable) -> TrackFigures:
        """Figures of one table."""
        return cls(
            samples.num_samples,
            int(np.sum(samples.sizes_bytes, dtype=np.int64)),
            gop_lengths(samples),
            is_reordered(samples),
        )
