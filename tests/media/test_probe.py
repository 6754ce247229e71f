"""Which bytes are asked for (MP-4), and what is said of files that hold no usable movie (MP-3, K10, K11)."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from lrstream.errors import LrstreamError, MalformedMp4Error, Mp4Error, TransferError, UnsupportedMp4Error
from lrstream.mp4.probe import FIRST_PROBE_BYTES, ByteRange, RangeReply, drive, probe_track
from lrstream.mp4.span import episode_span
from lrstream.mp4.synthesis import mini_mp4, mini_mp4_time_offset_s
from lrstream.mp4.track import TrackIndex
from tests.media.clips import H264, H264_BFRAMES
from tests.support.media import (
    Node,
    assemble,
    clip_bytes,
    decode,
    demux,
    edit,
    find,
    index,
    parse,
    table,
    to_co64,
    with_moov_last,
    with_wide_mdat,
)


def run(data: bytes, **options: int) -> tuple[TrackIndex, list[ByteRange]]:
    """Index, and every range as it was asked for."""
    probe = probe_track("a.mp4", **options)
    ranges = [next(probe)]
    while True:
        start, stop, _ = ranges[-1]
        try:
            ranges.append(probe.send(RangeReply(data[start:stop], len(data))))
        except StopIteration as done:
            return done.value, ranges


def padded(data: bytes, size: int, kind: bytes = b"free") -> bytes:
    """The same movie with a `moov` made at least ``size`` bytes long by a box that is stepped over."""
    return edit(data, lambda nodes: find(nodes, b"moov").children.append(Node(kind, bytes(size))))


def moov_range(data: bytes) -> tuple[int, int]:
    moov = find(parse(data), b"moov")
    return moov.position - 8, moov.position - 8 + len(moov.to_bytes())


def with_payload(data: bytes, size: int) -> bytes:
    """The same movie with ``size`` more bytes in `mdat`, behind the pictures."""

    def grow(nodes: list[Node]) -> None:
        find(nodes, b"mdat").payload += bytes(size)

    return edit(data, grow)


# --- ranges ---------------------------------------------------------------------------------------


def test_front_moov_within_the_first_probe_is_one_range() -> None:
    data = with_payload(clip_bytes(H264), 2 * FIRST_PROBE_BYTES)
    assert run(data)[1] == [ByteRange(0, FIRST_PROBE_BYTES)]


def test_front_moov_beyond_the_first_probe_is_grown_exactly_to_its_end() -> None:
    data = with_payload(padded(clip_bytes(H264), 3 * FIRST_PROBE_BYTES), 2 * FIRST_PROBE_BYTES)
    track, ranges = run(data)
    assert ranges == [
        ByteRange(0, FIRST_PROBE_BYTES),
        ByteRange(FIRST_PROBE_BYTES, moov_range(data)[1] + 16, continues=True),  # with mdat's header
    ]
    # The header of mdat was not read, yet the record is right.
    mdat = find(parse(data), b"mdat")
    assert (track.mdat_offset, track.mdat_payload_offset) == (mdat.position - 8, mdat.position)
    assert track.faststart
    assert track.samples.offsets_bytes.tolist() == demux(data).positions


def behind_moov(data: bytes, *boxes: Node) -> bytes:
    """The same movie with more boxes between `moov` and `mdat`."""

    def insert(nodes: list[Node]) -> None:
        place = next(number for number, node in enumerate(nodes) if node.kind == b"moov") + 1
        nodes[place:place] = boxes

    return edit(data, insert)


@pytest.mark.parametrize("unusual", ["payload", "free", "two free", "moov last"])
def test_the_index_does_not_depend_on_how_much_is_read_at_first(unusual: str) -> None:
    # Builds choose that by what earlier files needed; an archive must not depend on which these were.
    data = with_payload(padded(clip_bytes(H264), 40_000), 30_000)
    if unusual == "moov last":
        data = edit(data, with_moov_last)
    elif unusual != "payload":
        boxes = {
            "free": [Node(b"free", bytes(9000))],
            "two free": [Node(b"free", b""), Node(b"skip", bytes(20_000))],
        }
        data = behind_moov(data, *boxes[unusual])
    whole, _ = run(data, first_probe_bytes=len(data))
    mdats = [
        (node.position - 8, node.position, len(node.payload)) for node in parse(data) if node.kind == b"mdat"
    ]
    assert (whole.mdat_offset, whole.mdat_payload_offset, whole.mdat_payload_size) == mdats[-1]
    for size in (4096, 20_000, moov_range(data)[1] - 1, moov_range(data)[1], moov_range(data)[1] + 7, 60_000):
        track, ranges = run(data, first_probe_bytes=size)
        for name in ("mdat_offset", "mdat_payload_offset", "mdat_payload_size", "moov_offset", "faststart"):
            assert getattr(track, name) == getattr(whole, name), (name, size)
        assert len(ranges) <= (2 if unusual == "payload" else 4)


@pytest.mark.parametrize("extra", [0, FIRST_PROBE_BYTES // 2, 3 * FIRST_PROBE_BYTES])
@pytest.mark.parametrize("payload", [0, FIRST_PROBE_BYTES + 77, 5 * FIRST_PROBE_BYTES])
def test_tail_moov_takes_at_most_three_ranges_and_no_payload(extra: int, payload: int) -> None:
    data = with_payload(edit(padded(clip_bytes(H264), extra), with_moov_last), payload)
    track, ranges = run(data)
    start, stop = moov_range(data)
    assert len(ranges) <= 3
    assert ranges[0] == ByteRange(0, FIRST_PROBE_BYTES)
    # Behind the first probe, nothing but the box is read, and no byte of it twice.
    assert all(wanted.start >= min(start, FIRST_PROBE_BYTES) for wanted in ranges[1:])
    if payload > FIRST_PROBE_BYTES:
        assert sum(wanted.stop - wanted.start for wanted in ranges[1:]) == stop - start
    assert not track.faststart
    assert track.samples.offsets_bytes.tolist() == demux(data).positions


@pytest.mark.parametrize("probe_bytes", [1, 4096, 5000, 20_000, 1 << 20])
@pytest.mark.parametrize("tail", [False, True])
def test_the_size_of_the_first_probe_changes_nothing(probe_bytes: int, tail: bool) -> None:
    data = padded(clip_bytes(H264), 6000)
    data = edit(data, with_moov_last) if tail else data
    track, ranges = run(data, first_probe_bytes=probe_bytes)
    assert track.samples.offsets_bytes.tolist() == demux(data).positions
    assert ranges[0] == ByteRange(0, max(probe_bytes, 4096))
    assert len(ranges) <= (3 if tail else 2)


def test_many_separate_reads_are_refused() -> None:
    boxes = b"".join(Node(b"mdat", bytes(5000)).to_bytes() for _ in range(100))
    data = parse(clip_bytes(H264))[0].to_bytes() + boxes
    with pytest.raises(UnsupportedMp4Error, match="separate reads"):
        run(data, first_probe_bytes=4096)


def test_replies_are_checked() -> None:
    data = clip_bytes(H264)
    probe = probe_track("a.mp4")
    next(probe)
    with pytest.raises(TransferError, match="expected"):
        probe.send(RangeReply(data[:-1], len(data)))
    data = padded(data, FIRST_PROBE_BYTES)
    probe = probe_track("a.mp4")
    start, stop, _ = next(probe)
    start, stop, _ = probe.send(RangeReply(data[start:stop], len(data)))
    with pytest.raises(TransferError, match="size changed"):
        probe.send(RangeReply(data[start:stop], len(data) + 1))


def test_errors_of_the_reader_pass_through() -> None:
    def read(start: int, stop: int) -> RangeReply:
        raise TransferError("connection lost")

    with pytest.raises(TransferError, match="connection lost"):
        drive(probe_track("a.mp4"), read)


# --- files that are not there, not whole, or no MP4 (K11) --------------------------------------------


def test_each_kind_of_bad_file_has_its_own_message() -> None:
    whole = clip_bytes(H264)
    tail = edit(whole, with_moov_last)
    nodes = [node for node in parse(tail) if node.kind != b"moov"]
    nodes[-1].size_form = "open"  # what FFmpeg leaves behind when it is killed
    open_mdat = assemble(nodes)
    lfs = (
        b"version https://git-lfs.github.com/spec/v1\n"
        b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
    )
    cases: dict[str, bytes] = {
        "the file is empty": b"",
        "Git LFS pointer": lfs,
        "not an MP4": b"<!DOCTYPE html><html>Too many requests</html>",
        "not an MP4 file": b"PK",
        "no moov: truncated, the file ends": tail[: moov_range(tail)[0]],
        "no moov: truncated, the box ends": tail[:5000],
        "no moov": open_mdat,
        "the box ends at byte": tail[:-10],
    }
    for reason, data in cases.items():
        with pytest.raises(MalformedMp4Error, match=reason) as caught:
            index(data, "videos/x.mp4")
        assert caught.value.fields["file_path"] == "videos/x.mp4"
        assert {"box", "offset"} <= caught.value.fields.keys()
    with pytest.raises(MalformedMp4Error) as caught:
        index(lfs)
    assert "git lfs pull" in str(caught.value)


def test_matroska_is_not_an_mp4() -> None:
    with pytest.raises(MalformedMp4Error, match="not an MP4"):
        index(bytes.fromhex("1a45dfa3") + bytes(500))


@pytest.mark.parametrize("tail", [False, True])
def test_every_truncation_is_an_error_of_ours(tail: bool) -> None:
    data = clip_bytes(H264_BFRAMES)
    data = edit(data, with_moov_last) if tail else data
    start, stop = moov_range(data)
    cuts = sorted(
        {*range(64), *range(start, stop, 7), *range(stop - 20, min(stop + 40, len(data))), len(data) - 1}
    )
    for cut in cuts:
        if cut == len(data):
            continue
        with pytest.raises(Mp4Error) as caught:
            index(data[:cut])
        assert caught.value.fields["box"], cut
    assert index(data).samples.num_samples == H264_BFRAMES.frames


def test_garbage_between_boxes_is_located() -> None:
    data = bytearray(edit(clip_bytes(H264), with_moov_last))
    at = moov_range(bytes(data))[0]
    data[at + 4 : at + 8] = b"\0\1\2\3"
    with pytest.raises(MalformedMp4Error, match="no box stands here") as caught:
        index(bytes(data))
    assert caught.value.fields["offset"] == at


@pytest.mark.parametrize("size", [2, 7])
def test_impossible_top_level_sizes(size: int) -> None:
    data = bytearray(clip_bytes(H264))
    at = moov_range(bytes(data))[0]
    data[at : at + 4] = struct.pack(">I", size)
    with pytest.raises(MalformedMp4Error, match="smaller than its own header"):
        index(bytes(data))


def test_absurd_moov_is_refused_before_it_is_read() -> None:
    head = parse(clip_bytes(H264))[0].to_bytes() + struct.pack(">I4sQ", 1, b"moov", 1 << 40)

    def read(start: int, stop: int) -> RangeReply:
        assert stop - start <= FIRST_PROBE_BYTES
        return RangeReply(head.ljust(stop - start, b"\0"), 1 << 41)

    with pytest.raises(UnsupportedMp4Error, match="more than the limit"):
        drive(probe_track("a.mp4"), read)


@pytest.mark.parametrize("trailer", [b"\0", bytes(100), b"\xff" * 9, Node(b"mdat").to_bytes()])
def test_bytes_behind_the_movie_do_not_matter(trailer: bytes) -> None:
    data = clip_bytes(H264) + trailer
    assert index(data).samples.offsets_bytes.tolist() == demux(data).positions


# --- above 4 GiB (K10) ------------------------------------------------------------------------------


def test_samples_behind_4_gib(tmp_path: Path) -> None:
    """A sparse file: `ftyp`, an `mdat` of 5 GiB with the pictures at its end, `moov` with `co64`."""
    shift = 5 << 30
    small = edit(edit(clip_bytes(H264), to_co64), with_moov_last)
    nodes = parse(small)
    mdat = find(nodes, b"mdat")
    pictures = mdat.payload
    start = find(nodes, b"co64")
    first = index(small).samples.offsets_bytes[0] - mdat.position

    path = tmp_path / "sparse.mp4"
    with path.open("wb") as output:
        output.write(nodes[0].to_bytes())
        payload_at = output.tell() + 16
        output.write(struct.pack(">I4sQ", 1, b"mdat", 16 + shift + len(pictures)))
        output.seek(payload_at + shift)
        output.write(pictures)
        start.payload = table(0, [(payload_at + shift + first,)], "Q")
        moov_at = output.tell()
        output.write(find(nodes, b"moov").to_bytes())
    assert path.stat().st_blocks * 512 < 1 << 20, "the file system keeps the hole"

    ranges = []
    with path.open("rb") as file:

        def read(start: int, stop: int) -> RangeReply:
            ranges.append((start, stop))
            return RangeReply(os.pread(file.fileno(), stop - start, start), path.stat().st_size)

        track = drive(probe_track("sparse.mp4"), read)
        assert ranges == [(0, FIRST_PROBE_BYTES), (moov_at, path.stat().st_size)]
        packets = demux(path)
        assert track.samples.offsets_bytes.tolist() == packets.positions
        assert track.samples.offsets_bytes.min() > 1 << 32
        assert (track.mdat_payload_offset, track.mdat_payload_size) == (payload_at, shift + len(pictures))

        span = episode_span(track.samples, 0.5, 1.0)
        mini = mini_mp4(track, span, os.pread(file.fileno(), span.num_bytes, span.start_byte))
    assert b"co64" not in mini  # offsets are small again
    offset = mini_mp4_time_offset_s(track, span)
    whole = {round(time, 6): picture for time, picture in decode(clip_bytes(H264))}
    ours = [(round(time + offset, 6), picture) for time, picture in decode(mini)]
    assert len(ours) >= 15
    assert all((whole[time] == picture).all() for time, picture in ours)


def test_offsets_that_lost_their_high_bits_are_noticed() -> None:
    # 5 GiB of mdat behind the movie, whose stco kept 32 bits of the offsets.
    data = edit(clip_bytes(H264), with_wide_mdat)
    mdat = find(parse(data), b"mdat")
    head = bytearray(data[: mdat.position])
    struct.pack_into(">Q", head, mdat.position - 8, 16 + (5 << 30))
    at = bytes(head).index(b"stco") + 12
    struct.pack_into(">I", head, at, 100)
    size = mdat.position + (5 << 30)

    def read(start: int, stop: int) -> RangeReply:
        stop = min(stop, size)
        return RangeReply(bytes(head[start:stop]).ljust(stop - start, b"\0"), size)

    with pytest.raises(MalformedMp4Error, match=r"outside mdat.*32-bit") as caught:
        drive(probe_track("a.mp4"), read)
    assert isinstance(caught.value, LrstreamError)
