"""Spans hold what an interval needs (MP-5), against a plain reading of FFmpeg's packets."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lrstream.errors import TimestampError
from lrstream.mp4.span import Span, SpanFinder, episode_span, is_reordered, padding_s
from lrstream.mp4.track import SampleTable
from tests.media.clips import AUDIO, CLIPS, H264, H264_BFRAMES, HEVC_OPEN_GOP
from tests.support.media import Clip, Packets, clip_bytes, demux, index


def naive_span(packets: Packets, from_s: float, to_s: float) -> Span:
    """The rule of MP-5, spelled out over lists."""
    padding = max(0.1, 0.05 * (to_s - from_s))
    times = packets.pts_s
    wanted = [n for n, time in enumerate(times) if from_s - padding <= time <= to_s + padding]
    earliest = min(times[n] for n in wanted)
    starts = [k for k in packets.keyframes if k <= min(wanted) and times[k] <= earliest]
    first = max(starts, default=0)
    stop = max(wanted) + 1
    if times != sorted(times):
        stop = min([k for k in packets.keyframes if k >= stop], default=len(times))
    inside = range(first, stop)
    return Span(
        first,
        stop,
        min(packets.positions[n] for n in inside),
        max(packets.positions[n] + packets.sizes[n] for n in inside),
    )


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_spans_equal_the_rule_spelled_out(clip: Clip) -> None:
    data = clip_bytes(clip)
    samples, packets = index(data).samples, demux(data)
    finder = SpanFinder(samples)
    begin, end = min(packets.pts_s), max(packets.pts_s) + 1 / clip.fps
    edges = np.linspace(begin, end, 14)
    # Interval ends between pictures: at a picture the padded end would be decided by rounding.
    edges = np.floor(edges * clip.fps) / clip.fps + 0.3 / clip.fps
    for low in range(len(edges)):
        for high in range(low + 1, len(edges)):
            from_s, to_s = float(edges[low]), float(edges[high])
            if not any(from_s <= time < to_s for time in packets.pts_s):
                continue
            expected = naive_span(packets, from_s, to_s)
            assert finder.find(from_s, to_s) == expected == episode_span(samples, from_s, to_s)


def test_whole_file_is_one_span() -> None:
    samples = index(clip_bytes(H264)).samples
    span = episode_span(samples, 0.0, 40 / 30)
    assert (span.first_sample, span.stop_sample, span.num_samples) == (0, 40, 40)
    assert span.num_bytes == int(samples.sizes_bytes.sum())
    assert episode_span(samples, -1e9, 1e9) == span


def test_open_gop_keeps_the_preceding_gop() -> None:
    packets = demux(clip_bytes(HEVC_OPEN_GOP))
    samples = index(clip_bytes(HEVC_OPEN_GOP)).samples
    keyframe = packets.keyframes[2]
    leading = [n for n in range(keyframe, len(packets.pts_s)) if packets.pts_s[n] < packets.pts_s[keyframe]]
    assert leading, "the clip has no leading pictures, so it tests nothing"
    from_s = packets.pts_s[leading[-1]] + 0.1  # padded back to a leading picture
    span = episode_span(samples, from_s, from_s + 0.1)
    assert span.first_sample == packets.keyframes[1]


def test_bytes_of_other_tracks_may_lie_in_a_span() -> None:
    samples = index(clip_bytes(AUDIO)).samples
    span = episode_span(samples, 0.0, 2.0)
    assert span.num_bytes > int(samples.sizes_bytes[span.first_sample : span.stop_sample].sum())


def test_reordered_means_b_frames() -> None:
    assert is_reordered(index(clip_bytes(H264_BFRAMES)).samples)
    assert not is_reordered(index(clip_bytes(H264)).samples)


@pytest.mark.parametrize(("length", "expected"), [(0.5, 0.1), (2.0, 0.1), (2.1, 0.105), (60.0, 3.0)])
def test_padding(length: float, expected: float) -> None:
    assert padding_s(7.0, 7.0 + length) == pytest.approx(expected)


def test_a_start_rounded_past_its_picture_still_finds_it() -> None:
    samples = index(clip_bytes(H264)).samples
    last = float(samples.pts_s[-1])
    span = episode_span(samples, math.nextafter(last, math.inf), last + 1 / 30)
    assert span.stop_sample == 40


@pytest.mark.parametrize(
    ("from_s", "to_s", "reason"),
    [
        (5.0, 6.0, r"no picture is presented in \[5.000000, 6.000000\)"),
        (-1.0, -0.5, "no picture"),
        (0.105, 0.11, "no picture"),  # between two pictures, both within the padding
        (1.0, 1.0, "not an interval"),
        (1.0, 0.5, "not an interval"),
        (math.nan, 1.0, "not an interval"),
        (0.0, math.inf, "not an interval"),
    ],
)
def test_intervals_without_pictures_are_refused(from_s: float, to_s: float, reason: str) -> None:
    with pytest.raises(TimestampError, match=reason):
        episode_span(index(clip_bytes(H264)).samples, from_s, to_s)


def test_tables_in_small_integer_types_give_the_same_spans() -> None:
    """A mapped index holds the smallest integer types; sums must not wrap in them."""
    full = index(clip_bytes(H264_BFRAMES)).samples
    small = SampleTable(
        full.pts_s,
        full.durations_ticks.astype(np.uint16),
        full.composition_offsets_ticks.astype(np.uint16),
        full.sizes_bytes.astype(np.uint16),
        full.offsets_bytes.astype(np.uint16),
        full.sync_samples.astype(np.uint8),
    )
    for from_s in (0.0, 0.41, 0.9):
        assert episode_span(small, from_s, from_s + 0.3) == episode_span(full, from_s, from_s + 0.3)
