"""Spans and sizes of many episodes at once are those of one after the other, and of the real mini-MP4s."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from lrstream.errors import LrstreamError, MalformedMp4Error, TimestampError
from lrstream.mp4.measure import mini_mp4_sizes
from lrstream.mp4.span import Span, SpanFinder
from lrstream.mp4.synthesis import mini_mp4, mini_mp4_header
from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.timebase import presentation_times_s
from tests.support.tracks import make_track

TIMESCALE = 1000


def random_track(rng: random.Random) -> TrackIndex:
    """Every shape of table that the counts depend on; values do not have to make a decodable video."""
    count = rng.choice((1, 2, 3, rng.randint(4, 60), 60))

    def column(*values: int) -> NDArray[np.int64]:
        drawn = [rng.choice(values) for _ in range(count)]
        return np.array(drawn[:1] * count if rng.random() < 0.5 else drawn, np.int64)

    durations = column(40, 40, 40, 80, 0)
    compositions = column(*rng.choice(((0,), (80,), (-120,), (0, 80, 160), (-200, 40, 300))))
    sizes = column(1, 2, 2, 5)
    gaps = column(*rng.choice(((0,), (0, 0, 0, 0, 7), (0, 3))))
    offsets = 100 + np.cumsum(sizes + gaps) - sizes
    if rng.random() < 0.3:  # chunks in another order in the file
        half = count // 2
        offsets = np.concatenate([offsets[half:] - offsets[half] + 100, offsets[:half] + offsets[-1] + 100])
    every = rng.choice((1, 2, 7, 30))
    sync = np.array(sorted({0, *(n for n in range(count) if rng.random() < 1 / every)}), np.int64)
    is_narrow = rng.random() < 0.5  # an index may hold the smallest types
    samples = SampleTable(
        presentation_times_s(durations, compositions, TIMESCALE, rng.choice((0.0, 1.25))),
        durations,
        compositions.astype(np.int16) if is_narrow else compositions,
        sizes.astype(np.uint8) if is_narrow else sizes,
        offsets.astype(np.uint16) if is_narrow else offsets,
        sync,
    )
    base = make_track(num_samples=1)
    ftyp = rng.choice((base.ftyp, b"", b"odd"))
    return dataclasses.replace(base, file_size=1 << 20, timescale=TIMESCALE, ftyp=ftyp, samples=samples)


def one_by_one(
    finder: SpanFinder, starts: list[float], stops: list[float]
) -> tuple[list[Span], TimestampError | None]:
    """Spans up to the first interval that has none, and the error for that."""
    spans: list[Span] = []
    for from_s, to_s in zip(starts, stops, strict=True):
        try:
            spans.append(finder.find(from_s, to_s))
        except TimestampError as error:
            return spans, error
    return spans, None


@pytest.mark.parametrize("seed", range(5))
def test_many_spans_are_those_of_one_after_the_other(seed: int) -> None:
    num_spans = 0
    for case in range(150):
        rng = random.Random(1000 * seed + case)
        track = random_track(rng)
        finder = SpanFinder(track.samples)
        times = track.samples.pts_s.tolist()
        starts = np.array([rng.choice(times) - rng.uniform(0, 0.1) for _ in range(rng.randint(1, 12))])
        stops = starts + np.array([rng.uniform(0.1, 1.5) for _ in starts])
        if rng.random() < 0.1:
            starts[rng.randrange(len(starts))] += 1e3
        expected, failure = one_by_one(finder, starts.tolist(), stops.tolist())
        if failure is not None:
            with pytest.raises(TimestampError) as caught:
                finder.find_all(starts, stops)
            assert caught.value.message == failure.message
            assert caught.value.fields["interval"] == len(expected)
            starts, stops = starts[: len(expected)], stops[: len(expected)]
        spans = finder.find_all(starts, stops)
        found = [Span(*values) for values in zip(*(column.tolist() for column in spans), strict=True)]
        assert found == expected, case
        built = [len(mini_mp4(track, span, bytes(span.num_bytes))) for span in expected]
        assert mini_mp4_sizes(track, spans).tolist() == built, case
        num_spans += len(expected)
    assert num_spans > 300


def test_spans_that_no_count_covers_are_built() -> None:
    """More than 2 GiB between the samples of a span, and a movie of more than 2**32 ticks."""
    track = make_track(num_samples=4, gop=4, timescale=1000, duration=2000)
    offsets = np.array([100, 5 << 30, 6 << 30, 7 << 30], np.int64)
    far = dataclasses.replace(track.samples, offsets_bytes=offsets)
    slow = dataclasses.replace(
        track.samples,
        durations_ticks=np.full(4, 2**32 - 1),
        pts_s=np.arange(4) * float(2**32 - 1) / 1000,
    )
    for samples in (far, slow):
        wide = dataclasses.replace(track, file_size=8 << 30, samples=samples)
        finder = SpanFinder(samples)
        span = finder.find(0.0, float(samples.pts_s[-1]) + 1)
        spans = finder.find_all(np.array([0.0]), np.array([samples.pts_s[-1] + 1]))
        header = mini_mp4_header(wide, span)
        assert mini_mp4_sizes(wide, spans).tolist() == [len(header) + span.num_bytes]


def test_values_that_no_mp4_stores_are_refused_where_they_are_used() -> None:
    track = make_track(num_samples=60, gop=2)
    sizes = track.samples.sizes_bytes.copy()
    sizes[50] = 2**33
    bad = dataclasses.replace(track, samples=dataclasses.replace(track.samples, sizes_bytes=sizes))
    finder = SpanFinder(bad.samples)
    early = finder.find_all(np.array([0.0]), np.array([0.2]))
    span = finder.find(0.0, 0.2)
    assert mini_mp4_sizes(bad, early).tolist() == [len(mini_mp4(bad, span, bytes(span.num_bytes)))]
    with pytest.raises(MalformedMp4Error, match="sample size"):
        mini_mp4_sizes(bad, finder.find_all(np.array([0.0]), np.array([2.0])))
    with pytest.raises(LrstreamError):
        finder.find_all(np.array([0.0, np.nan]), np.array([0.2, 1.0]))
