"""Which samples and bytes of a file an episode needs (MP-5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import TimestampError
from lrstream.mp4.track import SampleTable

__all__ = ["Span", "SpanFinder", "Spans", "episode_span", "is_reordered", "padding_s", "reduced"]

_MIN_PADDING_S = 0.1
_PADDING_RATIO = 0.05

_SLACK_S = 1e-4
"""How far behind a picture an interval may start and still contain it: the default tolerance for a
row's picture. Interval ends in tables come from sums of durations and are rounded."""


@dataclass(frozen=True, slots=True)
class Span:
    """Samples of one episode in one file, and the bytes they lie in; both ranges are half-open.

    Attributes:
        first_sample: First sample, in decode order; a sync sample.
        stop_sample: End of the samples, excluded.
        start_byte: First byte, absolute in the file.
        stop_byte: End of the bytes, excluded. Bytes of other tracks may lie in between.
    """

    first_sample: int
    stop_sample: int
    start_byte: int
    stop_byte: int

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.stop_sample - self.first_sample

    @property
    def num_bytes(self) -> int:
        """Length of the byte range."""
        return self.stop_byte - self.start_byte


class Spans(NamedTuple):
    """Many spans of one file, a column for each attribute of `Span`; int64[k]."""

    first_sample: NDArray[np.int64]
    stop_sample: NDArray[np.int64]
    start_byte: NDArray[np.int64]
    stop_byte: NDArray[np.int64]


def is_reordered(samples: SampleTable) -> bool:
    """Whether decode order differs from presentation order (B-frames)."""
    pts = samples.pts_s
    return bool(np.any(pts[1:] < pts[:-1]))


def padding_s(from_s: float, to_s: float) -> float:
    """Seconds added on both sides of an episode's interval: 5 % of it, at least 0.1 s."""
    return max(_MIN_PADDING_S, _PADDING_RATIO * (to_s - from_s))


def episode_span(samples: SampleTable, from_s: float, to_s: float) -> Span:
    """Span of the interval ``[from_s, to_s)``; see `SpanFinder.find`."""
    return SpanFinder(samples).find(from_s, to_s)


class SpanFinder:
    """Finds the spans of many episodes in one sample table.

    The table is brought into presentation order once, so each further span costs a few binary
    searches, not a pass over the file. Immutable after construction, hence safe to share between
    threads.

    Args:
        samples: Table to search; its arrays are referred to, not copied.
    """

    __slots__ = ("_order", "_presented_s", "_reordered", "_samples", "_sync_pts_s")

    def __init__(self, samples: SampleTable) -> None:
        self._samples = samples
        self._reordered = is_reordered(samples)
        # Sample numbers in presentation order; None stands for 0, 1, 2, ...
        self._order: NDArray[np.intp] | None = (
            np.argsort(samples.pts_s, kind="stable") if self._reordered else None
        )
        self._presented_s = samples.pts_s if self._order is None else samples.pts_s[self._order]
        self._sync_pts_s = samples.pts_s[samples.sync_samples]

    @property
    def reordered(self) -> bool:
        """Whether decode order differs from presentation order."""
        return self._reordered

    def find(self, from_s: float, to_s: float) -> Span:
        """Span of the interval ``[from_s, to_s)`` of presentation times in float64 seconds.

        *Wanted* is every sample presented within the interval and its padding (`padding_s`). The
        span starts at the last sync sample that is presented no later than the first wanted sample
        and decoded no later than any of them: pictures that follow a keyframe in the file but
        precede it in time (open GOP) need the GOP before. It stops behind the last wanted sample,
        or at the end of that sample's GOP when the track is reordered.

        Raises:
            TimestampError: The interval is empty or not finite, or nothing is presented in it.
        """
        if not (math.isfinite(from_s) and math.isfinite(to_s) and from_s < to_s):
            raise TimestampError(
                f"[{from_s}, {to_s}) is not an interval of seconds.", from_s=from_s, to_s=to_s
            )
        presented = self._presented_s
        inside = np.searchsorted(presented, (from_s - _SLACK_S, to_s), side="left")
        if inside[0] >= inside[1]:
            raise TimestampError(
                f"no picture is presented in [{from_s:.6f}, {to_s:.6f}) s; the track has {len(presented)}, "
                f"from {presented[0]:.6f} to {presented[-1]:.6f} s.",
                hint="The episode's from_timestamp and to_timestamp do not belong to this video file.",
                from_s=from_s,
                to_s=to_s,
            )
        padding = padding_s(from_s, to_s)
        low = int(np.searchsorted(presented, from_s - padding, side="left"))
        high = int(np.searchsorted(presented, to_s + padding, side="right"))
        if self._order is None:
            first_wanted, last_wanted = low, high - 1
        else:
            wanted = self._order[low:high]
            first_wanted, last_wanted = int(wanted.min()), int(wanted.max())
        first = self._start(first_wanted, float(presented[low]))
        stop = self._gop_end(last_wanted) if self._reordered else last_wanted + 1
        offsets = self._samples.offsets_bytes[first:stop].astype(np.int64)
        ends = offsets + self._samples.sizes_bytes[first:stop]
        return Span(first, stop, int(offsets.min()), int(ends.max()))

    def find_all(self, from_s: NDArray[np.float64], to_s: NDArray[np.float64]) -> Spans:
        """`find` of many intervals at once, float64[k] each; equal to it span by span.

        Raises:
            TimestampError: As `find`, for the first interval that has none; ``fields["interval"]`` is its
                place.
        """
        presented = self._presented_s
        with np.errstate(invalid="ignore"):  # what is not finite is refused below
            inside = np.searchsorted(presented, from_s - _SLACK_S), np.searchsorted(presented, to_s)
            padding = np.maximum(_MIN_PADDING_S, _PADDING_RATIO * (to_s - from_s))
        good = np.isfinite(from_s) & np.isfinite(to_s) & (from_s < to_s) & (inside[0] < inside[1])
        for place in np.flatnonzero(~good)[:1].tolist():
            try:
                self.find(float(from_s[place]), float(to_s[place]))
            except TimestampError as error:
                error.fields["interval"] = place
                raise
        low = np.searchsorted(presented, from_s - padding)
        high = np.searchsorted(presented, to_s + padding, side="right")
        if self._order is None:
            first_wanted, last_wanted = low, high - 1
        else:
            first_wanted = reduced(np.minimum, self._order, low, high)
            last_wanted = reduced(np.maximum, self._order, low, high)
        sync = self._samples.sync_samples
        first = self._starts(first_wanted, presented[low])
        if self._reordered:
            ends = np.append(sync, self._samples.num_samples)
            stop = ends[np.searchsorted(sync, last_wanted, side="right")]
        else:
            stop = last_wanted + 1
        return Spans(first, stop.astype(np.int64, copy=False), *self._bytes(first, stop))

    def _bytes(
        self, first: NDArray[np.int64], stop: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First byte, and end of the bytes, of the samples between each pair of bounds."""
        offsets = self._samples.offsets_bytes.astype(np.int64, copy=False)
        ends = offsets + self._samples.sizes_bytes
        if (offsets[1:] >= ends[:-1]).all():  # as in nearly every file: bytes follow the decoding order
            return offsets[first], ends[stop - 1]
        return reduced(np.minimum, offsets, first, stop), reduced(np.maximum, ends, first, stop)

    def _starts(
        self, first_wanted: NDArray[np.integer], first_wanted_s: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """`_start` of many, int64[k]."""
        sync = self._samples.sync_samples
        at = np.searchsorted(sync, first_wanted, side="right") - 1
        late = np.flatnonzero(at >= 0)
        while len(late):
            late = late[self._sync_pts_s[at[late]] > first_wanted_s[late]]
            at[late] -= 1
            late = late[at[late] >= 0]
        return np.where(at >= 0, sync[np.maximum(at, 0)], 0).astype(np.int64)

    def _start(self, first_wanted: int, first_wanted_s: float) -> int:
        """Last sync sample decoded by ``first_wanted`` and presented by ``first_wanted_s``."""
        at = int(np.searchsorted(self._samples.sync_samples, first_wanted, side="right")) - 1
        while at >= 0:
            if self._sync_pts_s[at] <= first_wanted_s:
                return int(self._samples.sync_samples[at])
            at -= 1
        # Leading pictures of a file cut at an open GOP: nothing before them exists, so everything
        # there is comes along.
        return 0

    def _gop_end(self, sample: int) -> int:
        """Sample number of the next sync sample behind ``sample``, or the end of the track."""
        sync = self._samples.sync_samples
        at = int(np.searchsorted(sync, sample, side="right"))
        return int(sync[at]) if at < len(sync) else self._samples.num_samples


def reduced(
    ufunc: np.ufunc, values: NDArray[np.integer], first: NDArray[np.integer], stop: NDArray[np.integer]
) -> NDArray[np.int64]:
    """``ufunc.reduce(values[first:stop])`` for each pair of bounds, int64[k]; ranges may overlap, none empty.

    One pass over the values when ranges follow each other, as those of a file's episodes do.
    """
    order = np.argsort(first, kind="stable")
    bounds = np.stack((first[order], stop[order]), axis=1).ravel()
    # A bound may be the end of the values, where reduceat wants an element.
    padded = np.append(values, values[-1:])
    found = np.empty(len(first), dtype=np.int64)
    found[order] = ufunc.reduceat(padded, bounds)[::2]
    return found
