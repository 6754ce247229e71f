"""Sample tables equal what FFmpeg's demuxer reports (MP-1, MP-2), and what it says of refused files."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import av
import numpy as np
import pytest

from lrstream.errors import MalformedMp4Error, Mp4Error, UnsupportedMp4Error
from lrstream.mp4.boxes import MAX_DEPTH, Box
from lrstream.mp4.probe import RangeReply, drive, probe_track
from lrstream.mp4.track import TrackIndex
from tests.media.clips import (
    AUDIO,
    CLIPS,
    FRAGMENTED,
    H264,
    H264_BFRAMES,
    LAYOUTS,
    NEGATIVE_OFFSETS,
)
from tests.support.media import (
    Clip,
    Node,
    clip_bytes,
    clip_path,
    decode,
    demux,
    edit,
    find,
    index,
    parse,
    remove,
    set_edits,
    table,
    to_stz2,
    video_trak,
)

UNIT = 0x0001_0000


def assert_equals_demuxer(track: TrackIndex, data: bytes) -> None:
    packets, samples = demux(data), track.samples
    half_tick = 0.5 / track.timescale  # FFmpeg rounds the delay of an empty edit to a tick
    np.testing.assert_allclose(samples.pts_s, packets.pts_s, rtol=0, atol=half_tick + 1e-9)
    assert samples.sizes_bytes.tolist() == packets.sizes
    assert samples.offsets_bytes.tolist() == packets.positions
    assert samples.sync_samples.tolist() == packets.keyframes
    dts = np.cumsum(samples.durations_ticks) - samples.durations_ticks
    np.testing.assert_allclose(
        dts / track.timescale, np.subtract(packets.dts_s, packets.dts_s[0]), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_sample_table_equals_demuxer(clip: Clip) -> None:
    data = clip_bytes(clip)
    track = index(data)
    assert_equals_demuxer(track, data)
    assert (track.width, track.height) == clip.size
    assert track.file_size == len(data)
    assert data[track.moov_offset + 4 : track.moov_offset + 8] == b"moov"
    assert data[track.mdat_offset + 4 : track.mdat_offset + 8] == b"mdat"
    assert track.mdat_payload_offset + track.mdat_payload_size == parse_end(data, track.mdat_offset)
    assert track.faststart == (track.moov_offset < track.mdat_offset)
    assert track.ftyp == parse(data)[0].to_bytes()
    assert track.stsd_body == find([video_trak(parse(data))], b"stsd").payload
    for array in dataclasses.astuple(track.samples)[1:]:
        assert array.dtype == np.int64


def parse_end(data: bytes, at: int) -> int:
    """End of the compact box at ``at``."""
    (size,) = struct.unpack_from(">I", data, at)
    return at + int(size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clip", [H264_BFRAMES, AUDIO, NEGATIVE_OFFSETS], ids=str)
def test_layouts_of_the_same_track_give_the_same_table(clip: Clip, layout: str) -> None:
    data = edit(clip_bytes(clip), LAYOUTS[layout])
    assert data != clip_bytes(clip)
    assert_equals_demuxer(index(data), data)


@pytest.mark.parametrize("bits", [4, 8])
def test_compact_sizes_of_4_and_8_bits(bits: int) -> None:
    # No encoder makes pictures this small, so the samples are cut out of a clip's bytes; the sizes
    # must still be those FFmpeg reads.
    sizes = [1 + (7 * number) % (1 << bits) % 15 for number in range(41)]

    def shrink(nodes: list[Node]) -> None:
        stbl = find(nodes, b"stbl")
        find(nodes, b"stsz").payload = struct.pack(">III41I", 0, 0, 41, *sizes)
        find(nodes, b"stts").payload = table(0, [(41, 512)], "II")
        find(nodes, b"stsc").payload = table(0, [(1, 41, 1)], "III")
        find(nodes, b"stss").payload = table(0, [(1,)], "I")
        stbl.children.remove(stbl.child(b"stco"))
        mdat = find(nodes, b"mdat")
        stbl.children.append(Node(b"stco", table(0, [(mdat.position,)], "I")))
        to_stz2(nodes, bits)

    data = edit(clip_bytes(H264), shrink)
    track = index(data)
    assert track.samples.sizes_bytes.tolist() == sizes == demux(data).sizes
    assert track.samples.offsets_bytes.tolist() == demux(data).positions


def test_no_stss_means_every_sample_is_sync() -> None:
    data = edit(clip_bytes(H264), lambda nodes: remove(nodes, b"stss"))
    assert index(data).samples.sync_samples.tolist() == list(range(H264.frames))


def test_media_duration_falls_back_to_the_movie() -> None:
    def forget(nodes: list[Node]) -> None:
        mdhd = find(nodes, b"mdhd")
        mdhd.payload = mdhd.payload[:16] + bytes(4) + mdhd.payload[20:]

    track = index(edit(clip_bytes(H264), forget))
    with av.open(str(clip_path(H264))) as container:
        movie_s = (container.duration or 0) / av.time_base
    assert track.duration_ticks / track.timescale == pytest.approx(movie_s, abs=2e-3)


# --- edit lists (MP-2, K08) -----------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(1334, 0, UNIT)],
        [(1000, 3 * 512, UNIT)],
        [(250, -1, UNIT), (1000, 0, UNIT)],
        [(250, -1, UNIT), (125, -1, UNIT), (1200, 1024, UNIT)],
    ],
    ids=["empty", "identity", "lead-in", "delay", "two-delays-and-lead-in"],
)
def test_accepted_edit_lists_shift_times_as_ffmpeg_does(
    rows: list[tuple[int, int, int]], version: int
) -> None:
    data = edit(clip_bytes(H264), lambda nodes: set_edits(nodes, rows, version))
    track = index(data)
    ours = dict(zip(track.samples.offsets_bytes.tolist(), track.samples.pts_s.tolist(), strict=True))
    packets = demux(data)
    assert len(packets.positions) > 30
    for position, pts_s in zip(packets.positions, packets.pts_s, strict=True):
        assert ours[position] == pytest.approx(pts_s, abs=0.5 / track.timescale + 1e-9)


def test_hidden_lead_in_is_indexed_before_time_zero() -> None:
    data = edit(clip_bytes(H264), lambda nodes: set_edits(nodes, [(1234, 3 * 512, UNIT)]))
    pts = index(data).samples.pts_s
    presented = [time for time, _ in decode(data)]
    assert len(pts) == 40
    assert len(presented) == 37
    np.testing.assert_allclose(pts[pts >= 0], presented, atol=1e-9)
    assert np.count_nonzero(pts < 0) == 3


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(1000, 0, 0)], "rate 0"),
        ([(1000, 0, 2 * UNIT)], "rate 2"),
        ([(1000, 0, UNIT // 2)], "rate 0.5"),
        ([(500, 0, UNIT), (500, 512, UNIT)], "2 media edits"),
        ([(500, 0, UNIT), (500, 0, UNIT)], "2 media edits"),
        ([(500, 0, UNIT), (500, -1, UNIT)], "empty edit after"),
        ([(500, 0, UNIT), (500, -1, UNIT), (5, 0, UNIT)], "2 media edits"),
        ([(500, -1, UNIT)], "only empty edits"),
        ([(500, -7, UNIT)], "negative"),
    ],
)
def test_other_edit_lists_are_refused(rows: list[tuple[int, int, int]], reason: str) -> None:
    data = edit(clip_bytes(H264), lambda nodes: set_edits(nodes, rows))
    with pytest.raises(Mp4Error, match=reason) as caught:
        index(data, "videos/a.mp4")
    assert caught.value.fields["file_path"] == "videos/a.mp4"
    assert caught.value.fields["box"] == "moov/trak/edts/elst"
    at = caught.value.fields["offset"]
    assert data[at + 4 : at + 8] == b"elst"


# --- refusals (MP-3) ------------------------------------------------------------------------------


def _payload(kind: bytes, payload: bytes) -> Callable[[list[Node]], None]:
    def change(nodes: list[Node]) -> None:
        find(nodes, kind).payload = payload

    return change


def _patch(kind: bytes, at: int, form: str, *values: int | bytes) -> Callable[[list[Node]], None]:
    def change(nodes: list[Node]) -> None:
        node = find(nodes, kind)
        body = bytearray(node.payload)
        struct.pack_into(form, body, at, *values)
        node.payload = bytes(body)

    return change


def _remove(kind: bytes) -> Callable[[list[Node]], None]:
    return lambda nodes: remove(nodes, kind)


def _second(kind: bytes) -> Callable[[list[Node]], None]:
    def change(nodes: list[Node]) -> None:
        parent = next(n for n in _all(nodes) if any(c.kind == kind for c in n.children))
        parent.children.append(Node(kind, parent.child(kind).payload))

    return change


def _all(nodes: list[Node]) -> list[Node]:
    return [each for node in nodes for each in (node, *_all(node.children))]


def _handler(kind: bytes) -> Callable[[list[Node]], None]:
    def change(nodes: list[Node]) -> None:
        hdlr = find(nodes, b"hdlr")
        hdlr.payload = hdlr.payload[:8] + kind + hdlr.payload[12:]

    return change


def _external(nodes: list[Node]) -> None:
    find(nodes, b"dref").payload = (
        struct.pack(">II", 0, 1) + Node(b"url ", bytes(4) + b"file:///x\0").to_bytes()
    )


def _chunk_per_sample(nodes: list[Node], descriptions: tuple[int, ...]) -> None:
    """Two chunks of half the samples each, with the given sample description numbers."""
    sizes = struct.unpack(">40I", find(nodes, b"stsz").payload[12:])
    start = struct.unpack(">I", find(nodes, b"stco").payload[8:])[0]
    find(nodes, b"stco").payload = table(0, [(start,), (start + sum(sizes[:20]),)], "I")
    find(nodes, b"stsc").payload = table(0, [(1, 20, descriptions[0]), (2, 20, descriptions[1])], "III")


def _with_invalid_child(nodes: list[Node]) -> None:
    find(nodes, b"mdia").children.append(Node(b"none"))
    find(nodes, b"mdia").payload = struct.pack(">I4s", 4000, b"big!")


HUGE = 0xFFFF_FFFF
CASES: dict[str, tuple[Callable[[list[Node]], None], type[Mp4Error], str, str]] = {
    # name: (change, error, reason, box)
    "no mdia": (_remove(b"mdia"), MalformedMp4Error, "no mdia", "moov/trak"),
    "no mvhd": (_remove(b"mvhd"), MalformedMp4Error, "no mvhd", "moov"),
    "no tkhd": (_remove(b"tkhd"), MalformedMp4Error, "no tkhd", "moov/trak"),
    "no hdlr": (_remove(b"hdlr"), MalformedMp4Error, "no hdlr", "moov/trak/mdia"),
    "no stbl": (_remove(b"stbl"), MalformedMp4Error, "no stbl", "moov/trak/mdia/minf"),
    "no stsd": (_remove(b"stsd"), MalformedMp4Error, "no stsd", "stbl"),
    "no stts": (_remove(b"stts"), MalformedMp4Error, "no stts", "stbl"),
    "no stsc": (_remove(b"stsc"), MalformedMp4Error, "no stsc", "stbl"),
    "no stsz": (_remove(b"stsz"), MalformedMp4Error, "no stsz or stz2", "stbl"),
    "no stco": (_remove(b"stco"), MalformedMp4Error, "no stco or co64", "stbl"),
    "two stsz": (_second(b"stsz"), MalformedMp4Error, "second stsz", "stbl/stsz"),
    "no track": (_remove(b"trak"), UnsupportedMp4Error, "no video track", "moov"),
    "sound only": (_handler(b"soun"), UnsupportedMp4Error, "no video track", "moov"),
    "external": (_external, UnsupportedMp4Error, "another file", "dref/url "),
    "child overruns": (_with_invalid_child, MalformedMp4Error, "4000", "moov/trak/mdia/big!"),
    "timescale 0": (_patch(b"mdhd", 12, ">I", 0), MalformedMp4Error, "timescale is 0", "mdia/mdhd"),
    "movie timescale 0": (_patch(b"mvhd", 12, ">I", 0), MalformedMp4Error, "timescale is 0", "moov/mvhd"),
    "short mdhd": (_payload(b"mdhd", bytes(14)), MalformedMp4Error, "too short", "mdia/mdhd"),
    "short tkhd": (_payload(b"tkhd", bytes(70)), MalformedMp4Error, "too short", "trak/tkhd"),
    "version 9": (_patch(b"mdhd", 0, ">B", 9), UnsupportedMp4Error, "version 9", "mdia/mdhd"),
    "zero samples": (
        _payload(b"stsz", bytes(12)), UnsupportedMp4Error, "no samples", "stbl/stsz"),
    "empty sample": (
        _patch(b"stsz", 12 + 4 * 5, ">I", 0), UnsupportedMp4Error, "sample 5 of 40", "stbl/stsz"),
    "stsz count": (_patch(b"stsz", 8, ">I", HUGE), MalformedMp4Error, "announced", "stbl/stsz"),
    "constant size": (
        _payload(b"stsz", struct.pack(">III", 0, 64, HUGE)), MalformedMp4Error, "do not fit a file",
        "stbl/stsz"),
    "sizes beyond file": (_patch(b"stsz", 12, ">I", HUGE), MalformedMp4Error, "add up", "stbl/stsz"),
    "stts count": (_patch(b"stts", 4, ">I", HUGE), MalformedMp4Error, "announced", "stbl/stts"),
    "stts run": (_patch(b"stts", 8, ">I", HUGE), MalformedMp4Error, "covers 4294967295", "stbl/stts"),
    "stts short": (_patch(b"stts", 8, ">I", 39), MalformedMp4Error, "covers 39", "stbl/stts"),
    "stts empty": (_payload(b"stts", bytes(8)), MalformedMp4Error, "covers 0", "stbl/stts"),
    "long sample": (_patch(b"stts", 12, ">I", HUGE), MalformedMp4Error, "lasts", "stbl/stts"),
    "same times": (_patch(b"stts", 12, ">I", 0), MalformedMp4Error, "same time", "minf/stbl"),
    "ctts run": (_patch(b"ctts", 8, ">I", HUGE), MalformedMp4Error, "covers", "stbl/ctts"),
    "ctts sign": (_patch(b"ctts", 12, ">i", -512), MalformedMp4Error, "ambiguous", "stbl/ctts"),
    "colliding ctts": (_patch(b"ctts", 12, ">I", 1024 + 512), MalformedMp4Error, "same time", "minf/stbl"),
    "sync 0": (_patch(b"stss", 8, ">I", 0), MalformedMp4Error, "sync samples", "stbl/stss"),
    "sync order": (_patch(b"stss", 12, ">I", 1), MalformedMp4Error, "sync samples", "stbl/stss"),
    "sync beyond": (_patch(b"stss", 20, ">I", 41), MalformedMp4Error, "sync samples", "stbl/stss"),
    "no sync": (_payload(b"stss", bytes(8)), UnsupportedMp4Error, "no sync sample", "stbl/stss"),
    "stsc start": (_patch(b"stsc", 8, ">I", 2), MalformedMp4Error, "first chunks", "stbl/stsc"),
    "stsc samples": (_patch(b"stsc", 12, ">I", HUGE), MalformedMp4Error, "hold 4294967295", "stbl/stsc"),
    "stsc none": (_payload(b"stsc", bytes(8)), MalformedMp4Error, "0 runs", "stbl/stsc"),
    "stsc zero": (_patch(b"stsc", 12, ">I", 0), MalformedMp4Error, "without samples", "stbl/stsc"),
    "stsc entry": (_patch(b"stsc", 16, ">I", 2), UnsupportedMp4Error, "description 2", "stbl/stsc"),
    "two descriptions": (
        lambda nodes: _chunk_per_sample(nodes, (1, 2)), UnsupportedMp4Error, "switches", "stbl/stsc"),
    "no chunks": (_payload(b"stco", bytes(8)), MalformedMp4Error, "0 chunks", "stbl/stsc"),
    "no stsd entry": (_patch(b"stsd", 4, ">I", 0), MalformedMp4Error, "0 sample descriptions", "stbl/stsd"),
    "stsd entries": (_patch(b"stsd", 4, ">I", 7), MalformedMp4Error, "7 sample descriptions", "stbl/stsd"),
    "encv": (_patch(b"stsd", 12, ">4s", b"encv"), UnsupportedMp4Error, "encrypted", "stsd/encv"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_contradictions_are_refused_by_name(name: str) -> None:
    change, error, reason, box = CASES[name]
    data = edit(clip_bytes(H264_BFRAMES), change)
    with pytest.raises(error, match=reason) as caught:
        index(data, "videos/a.mp4")
    message, fields = str(caught.value), caught.value.fields
    assert fields["file_path"] == "videos/a.mp4"
    assert message.startswith("videos/a.mp4: ")
    assert fields["box"].endswith(box)
    assert fields["box"] in message
    assert str(fields["offset"]) in message


def test_two_descriptions_of_which_one_is_used_are_accepted() -> None:
    def describe_twice(nodes: list[Node]) -> None:
        stsd = find(nodes, b"stsd")
        stsd.payload = bytes(4) + struct.pack(">I", 2) + 2 * stsd.payload[8:]
        _chunk_per_sample(nodes, (1, 1))

    data = edit(clip_bytes(H264), describe_twice)
    assert_equals_demuxer(index(data), data)


def test_encryption_made_by_ffmpeg_is_refused() -> None:
    clip = Clip(
        mux=(
            ("encryption_scheme", "cenc-aes-ctr"),
            ("encryption_key", "76a6c65c5ea762046bd749a2e632ccbb"),
            ("encryption_kid", "a7e61c373e219033c21091fa607bf3b8"),
        )
    )
    with pytest.raises(UnsupportedMp4Error, match="encrypted"):
        index(clip_bytes(clip))


@pytest.mark.parametrize("movflags", ["frag_keyframe+empty_moov", "frag_keyframe", "frag_keyframe+dash"])
def test_fragmented_files_are_refused(movflags: str) -> None:
    with pytest.raises(UnsupportedMp4Error, match="fragmented"):
        index(clip_bytes(Clip(movflags=movflags)))
    whole = clip_bytes(FRAGMENTED)
    moov_end = next(node.position + len(node.to_bytes()) - 8 for node in parse(whole) if node.kind == b"moov")
    with pytest.raises(UnsupportedMp4Error, match="fragmented"):
        index(whole[:moov_end])  # the movie box says so, even where no fragment follows


def test_an_offset_that_wrapped_round_is_noticed() -> None:
    data = bytearray(edit(clip_bytes(H264), lambda nodes: _chunk_per_sample(nodes, (1, 1))))
    track = index(bytes(data))
    at = bytes(data).index(b"stco") + 4 + 8 + 4  # second chunk
    single = edit(clip_bytes(H264), _patch_first_chunk(4))
    with pytest.raises(MalformedMp4Error, match="outside mdat"):
        index(single)
    for wrapped, reason in (
        (int(track.samples.offsets_bytes[3]), "share bytes"),
        (len(data) - 10, "behind the end"),
        (len(data) + 10, "behind the end"),
    ):
        struct.pack_into(">I", data, at, wrapped)
        with pytest.raises(MalformedMp4Error, match=reason):
            index(bytes(data))


def _patch_first_chunk(offset: int) -> Callable[[list[Node]], None]:
    def change(nodes: list[Node]) -> None:
        # Moved along with mdat afterwards, and nothing before mdat changes its size.
        find(nodes, b"stco").payload = table(0, [(offset,)], "I")

    return change


def test_constant_sizes_without_a_table_are_bounded() -> None:
    def raw_video(nodes: list[Node]) -> None:
        find(nodes, b"stsz").payload = struct.pack(">III", 0, 1, 1 << 31)

    data = edit(clip_bytes(H264), raw_video)
    size = 1 << 33  # large enough to hold them all

    def read(start: int, stop: int) -> RangeReply:
        stop = min(stop, size)
        return RangeReply(data[start:stop].ljust(stop - start, b"\0"), size)

    with pytest.raises(UnsupportedMp4Error, match="2147483648 samples of one size"):
        drive(probe_track("a.mp4"), read)


def test_nesting_and_children_are_bounded() -> None:
    def many(nodes: list[Node]) -> None:
        find(nodes, b"mdia").children[:0] = [Node(b"free") for _ in range(600)]

    with pytest.raises(MalformedMp4Error, match="more than 512 boxes"):
        index(edit(clip_bytes(H264), many))

    deepest = Box("a.mp4", "/".join(["moov"] * MAX_DEPTH), 0, 8, memoryview(Node(b"free").to_bytes()))
    with pytest.raises(MalformedMp4Error, match="nested more than 12"):
        list(deepest.children())
