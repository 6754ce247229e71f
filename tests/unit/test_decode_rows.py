"""Which picture belongs to a row: by time, per camera, and never by counting (K04, K05)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lrstream.errors import TimestampError
from lrstream.mp4.span import Span
from lrstream.streaming.clip import Clip, ClipTable, pictures_of_rows
from lrstream.streaming.episode import CameraRecord
from tests.support.tracks import make_track


def clip_of(**parameters: object) -> Clip:
    from lrstream.mp4.codec_config import CodecConfig

    track = make_track(**parameters)  # type: ignore[arg-type]
    span = Span(0, track.samples.num_samples, 0, track.file_size)
    return Clip(
        camera="observation.images.top",
        episode_index=3,
        file_path=track.file_path,
        span=span,
        config=CodecConfig("h264", "avc1", b"", None, 64, 48),
        track=track,
        table=ClipTable.from_span(track.samples, span),
        payload=b"",
    )


def test_rows_are_found_by_time_after_the_start_of_the_episode() -> None:
    times = np.arange(100) / 30
    timestamps = (np.arange(20) / 30).astype(np.float32)
    ranks = pictures_of_rows(times, 40 / 30, timestamps, 1e-4)
    np.testing.assert_array_equal(ranks, np.arange(40, 60))


def test_skipped_rows_keep_their_times() -> None:
    times = np.arange(100) / 30
    timestamps = (np.array([0, 3, 4, 9]) / 30).astype(np.float32)
    np.testing.assert_array_equal(pictures_of_rows(times, 10 / 30, timestamps, 1e-4), [10, 13, 14, 19])


def test_the_nearest_picture_counts_and_the_tolerance_decides() -> None:
    times = np.array([0.0, 0.1, 0.2])
    timestamps = np.array([0.00005, 0.09995, 0.1002, 0.15, 0.2004], dtype=np.float32)
    np.testing.assert_array_equal(pictures_of_rows(times, 0.0, timestamps, 1e-4), [0, 1, -1, -1, -1])
    np.testing.assert_array_equal(pictures_of_rows(times, 0.0, timestamps, 1e-3), [0, 1, 1, -1, 2])


def test_late_float32_timestamps_of_a_long_episode_are_accepted() -> None:
    # After five hours the step of float32 is 2 ms, twenty times the tolerance.
    numbers = np.arange(540_000 - 50, 540_000)
    times = numbers / 30
    timestamps = times.astype(np.float32)
    np.testing.assert_array_equal(pictures_of_rows(times, 0.0, timestamps, 1e-4), np.arange(50))


def test_a_slightly_different_rate_finds_the_last_picture_or_refuses() -> None:
    """30.03 pictures a second against 30 rows a second (K05)."""
    times = np.arange(9000) / 30.03
    timestamps = (np.arange(9000) / 30).astype(np.float32)
    ranks = pictures_of_rows(times, 0.0, timestamps, 1e-4)
    assert ranks[0] == 0
    assert ranks[-1] == -1
    # With a tolerance that bridges the drift, the last row is the last picture, not one past it.
    last = pictures_of_rows(times, 0.0, timestamps[-1:], 0.5)
    assert last.tolist() == [8999]


def test_a_row_behind_the_last_picture_is_refused_with_numbers() -> None:
    clip = clip_of(num_samples=30, gop=10)
    timestamps = (np.arange(30) / 30).astype(np.float32)
    timestamps[-1] += np.float32(0.4 / 30)
    camera = CameraRecord.match(clip, 0.0, timestamps, 1e-4)
    assert camera.ranks_of(np.arange(29)).tolist() == list(range(29))
    with pytest.raises(TimestampError) as caught:
        camera.ranks_of(np.array([27, 28, 29]))
    message = str(caught.value)
    for part in (
        "Frame 29",
        "episode 3",
        "observation.images.top",
        clip.file_path,
        "0.966667",
        "13.3 ms",
        "100 µs",
    ):
        assert part in message, message
    assert caught.value.fields["frame_index"] == 29


def test_reordered_samples_are_numbered_by_presentation() -> None:
    track = make_track(num_samples=12, gop=4, reordered=True)
    span = Span(4, 12, 0, track.file_size)
    table = ClipTable.from_span(track.samples, span)
    pts = track.samples.pts_s[4:12].tolist()
    assert [sorted(pts).index(time) for time in pts] == table.ranks
    assert [pts[sample] for sample in table.samples] == sorted(pts)
    assert table.times_s.tolist() == sorted(pts)
    assert table.sync_samples == [0, 4]


def test_offsets_are_relative_to_the_span() -> None:
    track = make_track(num_samples=20, gop=5, contiguous=False)
    samples = track.samples
    span = Span(
        5, 15, int(samples.offsets_bytes[5]), int(samples.offsets_bytes[14] + samples.sizes_bytes[14])
    )
    table = ClipTable.from_span(samples, span)
    for number in range(10):
        assert table.starts[number] + span.start_byte == samples.offsets_bytes[5 + number]
        assert table.stops[number] - table.starts[number] == samples.sizes_bytes[5 + number]


def test_a_clip_cut_at_an_open_gop_knows_what_it_cannot_decode() -> None:
    # Decoded first, shown third: the two pictures after it need the GOP before, which is not there.
    track = make_track(num_samples=8, gop=4)
    pts_s = np.array([0.2, 0.0, 0.1, 0.3, 0.6, 0.4, 0.5, 0.7])
    table = ClipTable.from_span(replace(track.samples, pts_s=pts_s), Span(0, 8, 0, track.file_size))
    assert table.entries == [0, -1, -1, 0, 4, 0, 0, 4]
    assert table.ranks == [2, 0, 1, 3, 6, 4, 5, 7]
    clip = replace(clip_of(), table=table)
    assert clip.place.startswith("episode 3, camera observation.images.top")
