"""Whatever the bytes are, only our errors escape, quickly and in bounded memory (MP-3)."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import av
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrstream.errors import LrstreamError
from lrstream.mp4.codec_config import codec_configuration
from lrstream.mp4.probe import RangeReply, drive, probe_track
from lrstream.mp4.span import episode_span
from lrstream.mp4.synthesis import mini_mp4, mini_mp4_size
from lrstream.mp4.track import TrackIndex
from tests.media.clips import AUDIO, H264, H264_BFRAMES, HEVC_OPEN_GOP, NEGATIVE_OFFSETS
from tests.support.media import Clip, clip_bytes, decode, demux, edit, find, parse, set_edits, with_moov_last

CLIPS = (H264, H264_BFRAMES, NEGATIVE_OFFSETS, AUDIO, HEVC_OPEN_GOP, Clip(codec="mpeg4", bframes=2))
WORDS = (0, 1, 2, 7, 8, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF)

limits = settings(
    max_examples=150,
    deadline=5000,  # milliseconds for one example, which takes a few: nothing loops over what a box claims
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)


@pytest.fixture(autouse=True, scope="module")
def _encoded() -> None:
    """Encode before the clock of an example runs."""
    for clip in CLIPS:
        clip_bytes(clip)


def _moov(data: bytes) -> tuple[int, int]:
    moov = find(parse(data), b"moov")
    return moov.position - 8, moov.position - 8 + len(moov.to_bytes())


def _index(data: bytes) -> TrackIndex | None:
    """Index, or None when it is refused; anything but our errors is a failure, and so is a lot of memory."""
    track, refusal = None, None
    tracemalloc.start()
    try:
        track = drive(probe_track("fuzz.mp4"), lambda start, stop: RangeReply(data[start:stop], len(data)))
    except LrstreamError as error:
        refusal = error
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Tables of a few bytes a sample become about ten arrays of 8 bytes each.
    assert peak < 40 * len(data) + (1 << 20)
    if refusal is not None:
        assert str(refusal).startswith("fuzz.mp4: ")
        assert refusal.fields["file_path"] == "fuzz.mp4"
        assert {"box", "offset"} <= refusal.fields.keys()
    return track


@st.composite
def damaged_movies(draw: st.DrawFn) -> bytes:
    """A clip with a few bytes or words of its tables replaced."""
    data = clip_bytes(draw(st.sampled_from(CLIPS)))
    if draw(st.booleans()):
        data = edit(data, lambda nodes: set_edits(nodes, [(100, -1, 1 << 16), (900, 512, 1 << 16)]))
    if draw(st.booleans()):
        data = edit(data, with_moov_last)
    start, stop = _moov(data)
    damaged = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(start, stop - 4))
        if draw(st.booleans()):
            damaged[at] = draw(st.integers(0, 255))
        else:
            word = draw(st.sampled_from((*WORDS, len(data), len(data) - 1, len(data) + 1)))
            damaged[at : at + 4] = struct.pack(">I", word)
    return bytes(damaged)


@limits
@given(damaged_movies())
def test_damaged_tables(data: bytes) -> None:
    track = _index(data)
    if track is None:
        return
    samples = track.samples
    try:
        codec_configuration(track.stsd_body)
        middle = float(samples.pts_s[samples.num_samples // 2])
        span = episode_span(samples, middle, middle + 0.2)
        mini = mini_mp4(track, span, data[span.start_byte : span.stop_byte])
    except LrstreamError:
        return
    assert len(mini) == mini_mp4_size(track, span)
    # The pictures' bytes are intact, so a mini-MP4 that opens holds exactly the index's samples.
    try:
        packets = demux(mini)
        decode(mini)
    except av.error.FFmpegError:
        return  # the sample description is damaged, and the decoder says so
    part = slice(span.first_sample, span.stop_sample)
    assert packets.sizes == samples.sizes_bytes[part].tolist()


@limits
@given(st.sampled_from(CLIPS), st.integers(0, 1 << 16), st.integers(0, 1 << 16))
def test_pieces_cut_out(clip: Clip, at: int, length: int) -> None:
    data = clip_bytes(clip)
    at %= len(data)
    _index(data[:at] + data[at + length % 64 + 1 :])


@limits
@given(st.binary(max_size=200), st.sampled_from((b"", b"ftyp", b"moov", b"mdat", b"moof", b"free", b"uuid")))
def test_arbitrary_bytes(data: bytes, kind: bytes) -> None:
    assert _index(data) is None
    assert _index(struct.pack(">I4s", len(data) + 8, kind.ljust(4, b"\0")) + data) is None


@limits
@given(st.binary(max_size=300))
def test_arbitrary_sample_descriptions(body: bytes) -> None:
    for prefix in (b"", struct.pack(">II", 0, 1), struct.pack(">III4s", 0, 1, len(body) + 8, b"mp4v")):
        with contextlib.suppress(LrstreamError):
            assert codec_configuration(prefix + body).fourcc
