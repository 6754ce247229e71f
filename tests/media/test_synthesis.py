"""Mini-MP4s decode to the pixels of the whole file, and their size is known before (MP-6, K09)."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from lrstream.errors import MalformedMp4Error, TransferError, UsageError
from lrstream.mp4.span import Span, episode_span
from lrstream.mp4.synthesis import mini_mp4, mini_mp4_header, mini_mp4_size, mini_mp4_time_offset_s
from lrstream.mp4.track import SampleTable, TrackIndex
from tests.media.clips import AUDIO, CLIPS, H264, H264_BFRAMES, LAYOUTS, NEGATIVE_OFFSETS
from tests.support.media import (
    Clip,
    Node,
    clip_bytes,
    decode,
    demux,
    edit,
    find,
    index,
    parse,
    remove,
    set_edits,
    table,
    walk,
)

Pictures = dict[int, NDArray[np.uint8]]


def mini_of(data: bytes, from_s: float, to_s: float) -> tuple[bytes, TrackIndex, Span]:
    track = index(data)
    span = episode_span(track.samples, from_s, to_s)
    mini = mini_mp4(track, span, memoryview(data)[span.start_byte : span.stop_byte])
    assert len(mini) == mini_mp4_size(track, span) == len(mini_mp4_header(track, span)) + span.num_bytes
    return mini, track, span


def by_time(data: bytes, offset_s: float = 0.0) -> Pictures:
    """Decoded pictures by presentation time in the source file, in units of 10 microseconds."""
    return {round((time + offset_s) * 1e5): picture for time, picture in decode(data)}


def assert_same_pictures(data: bytes, whole: Pictures, from_s: float, to_s: float) -> int:
    """The mini-MP4 presents every picture of [from_s, to_s) that the whole file does; returns how many."""
    mini, track, span = mini_of(data, from_s, to_s)
    ours = by_time(mini, mini_mp4_time_offset_s(track, span))
    wanted = [time for time in whole if from_s * 1e5 - 1 <= time < to_s * 1e5 - 1]
    for time in wanted:
        assert time in ours, f"{time / 1e5} s is missing"
        np.testing.assert_array_equal(ours[time], whole[time], err_msg=f"{time / 1e5} s")
    return len(wanted)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_pictures_equal_those_of_the_whole_file(clip: Clip) -> None:
    data = clip_bytes(clip)
    whole = by_time(data)
    assert len(whole) == clip.frames
    # Episodes of 7 and 13 frames start and end in the middle of GOPs of 10.
    for length in (7, 13):
        covered = 0
        for first in range(0, clip.frames, length):
            from_s = (first + clip.start) / clip.fps
            covered += assert_same_pictures(data, whole, from_s, from_s + length / clip.fps)
        assert covered == clip.frames


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pictures_from_other_layouts(layout: str) -> None:
    data = edit(clip_bytes(AUDIO), LAYOUTS[layout])
    assert assert_same_pictures(data, by_time(data), 0.5, 1.5) == 30


def test_hidden_lead_in_is_there_for_decoding_and_nothing_wanted_is_lost() -> None:
    data = edit(clip_bytes(H264_BFRAMES), lambda nodes: set_edits(nodes, [(1300, 4 * 512, 0x10000)]))
    whole = by_time(data)
    assert len(whole) < 40
    assert assert_same_pictures(data, whole, 0.0, 0.5) == 15


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_nothing_is_hidden_and_tables_are_exact(clip: Clip) -> None:
    """FFmpeg's demuxer reads the mini-MP4 sample by sample as the index has it."""
    data = clip_bytes(clip)
    mini, track, span = mini_of(data, 0.5, 0.9)
    part, samples, packets = slice(span.first_sample, span.stop_sample), track.samples, demux(mini)
    offset = mini_mp4_time_offset_s(track, span)
    np.testing.assert_allclose(np.add(packets.pts_s, offset), samples.pts_s[part], rtol=0, atol=1e-9)
    assert min(packets.pts_s) >= 0
    assert packets.sizes == samples.sizes_bytes[part].tolist()
    sync = samples.sync_samples
    inside = sync[(sync >= span.first_sample) & (sync < span.stop_sample)]
    assert packets.keyframes == (inside - span.first_sample).tolist()
    steps = np.diff(packets.dts_s) * track.timescale
    np.testing.assert_allclose(steps, samples.durations_ticks[part][:-1], atol=1e-6)
    header = len(mini) - span.num_bytes
    positions = samples.offsets_bytes[part] - span.start_byte + header
    assert packets.positions == positions.tolist()
    assert mini[header:] == data[span.start_byte : span.stop_byte]
    reread = index(mini)
    assert (reread.codec, reread.timescale, reread.width, reread.height) == (
        track.codec, track.timescale, track.width, track.height,
    )  # fmt: skip
    assert reread.stsd_body == track.stsd_body
    assert reread.ftyp == track.ftyp
    assert reread.duration_ticks == samples.durations_ticks[part].sum()
    np.testing.assert_array_equal(reread.samples.durations_ticks, samples.durations_ticks[part])


def test_gaps_between_pictures_become_chunks() -> None:
    mini, _, _ = mini_of(clip_bytes(AUDIO), 0.0, 2.0)
    (num_chunks,) = struct.unpack_from(">I", find(parse(mini), b"stco").payload, 4)
    assert num_chunks > 1
    assert not any(node.payload[8:12] == b"soun" for node in walk(parse(mini)) if node.kind == b"hdlr")


def test_negative_composition_offsets_are_kept_in_version_1() -> None:
    data = clip_bytes(NEGATIVE_OFFSETS)
    assert find(parse(data), b"ctts").payload[0] == 1
    mini, track, span = mini_of(data, 0.0, 1.0)
    reread = index(mini).samples.composition_offsets_ticks
    original = track.samples.composition_offsets_ticks[span.first_sample : span.stop_sample]
    assert reread.min() < 0
    np.testing.assert_array_equal(reread, original)


def test_pictures_that_would_start_before_zero_raise_all_offsets() -> None:
    def lower_offsets(nodes: list[Node]) -> None:
        ctts = find(nodes, b"ctts")
        rows = list(struct.iter_unpack(">Ii", ctts.payload[8:]))
        ctts.payload = table(1, [(count, offset - 2048) for count, offset in rows], "Ii")
        remove(nodes, b"edts")

    data = edit(clip_bytes(NEGATIVE_OFFSETS), lower_offsets)
    mini, track, span = mini_of(data, 0.5, 1.0)
    assert span.first_sample > 0
    shifts = (
        index(mini).samples.composition_offsets_ticks
        - track.samples.composition_offsets_ticks[span.first_sample : span.stop_sample]
    )
    assert np.unique(shifts).tolist() == [2048]
    assert min(demux(mini).pts_s) == 0
    assert assert_same_pictures(data, by_time(data), 0.5, 1.0) == 15


@pytest.mark.parametrize(
    "change",
    [
        lambda nodes: remove(nodes, b"ftyp"),
        lambda nodes: remove(nodes, b"stss"),
        lambda nodes: None,
    ],
    ids=["no-ftyp", "no-stss", "unchanged"],
)
def test_optional_boxes(change: Callable[[list[Node]], None]) -> None:
    data = edit(clip_bytes(H264), change)
    assert assert_same_pictures(data, by_time(data), 0.0, 1.0) == 30
    mini, _, _ = mini_of(data, 0.0, 1.0)
    assert parse(mini)[0].kind == b"ftyp"
    stored = {node.kind for node in walk(parse(mini))}
    assert (b"stss" in stored) == (b"stss" in {node.kind for node in walk(parse(data))})
    assert b"ctts" not in stored
    assert b"edts" not in stored


def _stretched(track: TrackIndex, factor: int, far_bytes: int) -> TrackIndex:
    """The same track with durations times ``factor``, and its second half ``far_bytes`` further on."""
    samples = track.samples
    offsets = samples.offsets_bytes.copy()
    offsets[20:] += far_bytes
    stretched = SampleTable(
        samples.pts_s * factor,
        samples.durations_ticks * factor,
        samples.composition_offsets_ticks,
        samples.sizes_bytes,
        offsets,
        samples.sync_samples,
    )
    return dataclasses.replace(track, samples=stretched)


def test_header_needs_64_bits_only_where_numbers_do() -> None:
    track = index(clip_bytes(H264))
    small = mini_mp4_header(track, episode_span(track.samples, 0.0, 2.0))
    assert b"co64" not in small

    far = _stretched(track, 1, 1 << 32)
    span = episode_span(far.samples, 0.0, 2.0)
    assert span.num_bytes > 1 << 32
    header = mini_mp4_header(far, span)
    assert len(header) + span.num_bytes == mini_mp4_size(far, span)
    moov = header[:-16]
    (mdat_size,) = struct.unpack(">Q", header[-8:])
    assert header[-16:-8] == struct.pack(">I4s", 1, b"mdat")
    assert mdat_size == span.num_bytes + 16
    chunks = struct.unpack_from(">2Q", find(parse(moov), b"co64").payload, 8)
    assert chunks == (len(header), len(header) + int(far.samples.offsets_bytes[20]) - span.start_byte)

    long = _stretched(track, 1 << 20, 0)  # 40 * 512 * 2**20 ticks
    span = episode_span(long.samples, 0.0, 1e9)
    nodes = parse(mini_mp4_header(long, span)[:-8])
    for kind, at in ((b"mvhd", 24), (b"tkhd", 28), (b"mdhd", 24)):
        box = find(nodes, kind)
        assert box.payload[0] == 1
        assert struct.unpack_from(">Q", box.payload, at)[0] == 40 * 512 << 20


def test_payload_and_index_must_belong_together() -> None:
    data = clip_bytes(H264)
    track = index(data)
    span = episode_span(track.samples, 0.0, 1.0)
    with pytest.raises(TransferError, match="expected"):
        mini_mp4(track, span, data[span.start_byte : span.stop_byte - 1])
    with pytest.raises(MalformedMp4Error, match="not all in the bytes"):
        mini_mp4_size(track, dataclasses.replace(span, stop_byte=span.stop_byte - 1))
    for first, stop in ((0, 41), (3, 3), (-1, 5)):
        with pytest.raises(UsageError, match="no part of a track of 40"):
            mini_mp4_size(track, Span(first, stop, span.start_byte, span.stop_byte))
    for name, value in (
        ("durations_ticks", -1),
        ("sizes_bytes", 1 << 33),
        ("composition_offsets_ticks", 1 << 40),
    ):
        broken = getattr(track.samples, name).copy()
        broken[3] = value
        bad = dataclasses.replace(track, samples=dataclasses.replace(track.samples, **{name: broken}))
        with pytest.raises(MalformedMp4Error, match=f"sample {name.rsplit('_', 1)[0].replace('_', ' ')[:4]}"):
            mini_mp4_size(bad, span)


def test_small_integer_types_give_the_same_bytes() -> None:
    track = index(clip_bytes(H264_BFRAMES))
    full = track.samples
    small = SampleTable(
        full.pts_s,
        np.broadcast_to(np.uint16(512), full.durations_ticks.shape),
        full.composition_offsets_ticks.astype(np.uint16),
        full.sizes_bytes.astype(np.uint16),
        full.offsets_bytes.astype(np.uint16),
        full.sync_samples.astype(np.uint8),
    )
    narrow = dataclasses.replace(track, samples=small)
    span = episode_span(full, 0.4, 0.9)
    assert mini_mp4_header(narrow, span) == mini_mp4_header(track, span)
