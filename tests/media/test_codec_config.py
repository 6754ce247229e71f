"""Decoder configuration equals what FFmpeg's demuxer gives its decoder."""

from __future__ import annotations

import io
import struct

import av
import pytest

from lrstream.errors import MalformedMp4Error, UnsupportedMp4Error
from lrstream.mp4.codec_config import CodecConfig, ColorInfo, codec_configuration
from tests.media.clips import CLIPS, H264
from tests.support.media import Clip, Node, clip_bytes, index

UNSPECIFIED = 2
FULL_RANGE = 2  # FFmpeg's AVCOL_RANGE_JPEG


def configuration(data: bytes) -> CodecConfig:
    return codec_configuration(index(data).stsd_body)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_extradata_and_names_equal_the_demuxers(clip: Clip) -> None:
    data = clip_bytes(clip)
    ours = configuration(data)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        assert ours.extradata == (context.extradata or b"")
        assert ours.codec == context.codec.canonical_name
        assert (ours.width, ours.height) == (context.width, context.height)
        assert ours.fourcc.encode() == stream.codec_tag.encode()
    assert hash(ours) == hash(configuration(data))


@pytest.mark.parametrize("codec", ["h264", "hevc", "vp9"])
@pytest.mark.parametrize("color", [(1, 1, 1, 1), (1, 1, 1, 2), (9, 16, 9, 1), (6, 6, 6, 1)], ids=str)
def test_color_equals_the_demuxers(codec: str, color: tuple[int, int, int, int]) -> None:
    data = clip_bytes(Clip(codec=codec, color=color, frames=4))
    ours = configuration(data).color
    assert ours is not None
    with av.open(io.BytesIO(data)) as container:
        context = container.streams.video[0].codec_context
        theirs = (context.color_primaries, context.color_trc, context.colorspace)
        assert (ours.primaries, ours.transfer, ours.matrix) == theirs == color[:3]
        assert ours.full_range == (int(context.color_range) == FULL_RANGE)


def test_no_color_boxes_mean_none() -> None:
    assert configuration(clip_bytes(H264)).color is None


def _entry(fourcc: bytes, *boxes: Node, tail: bytes = b"") -> bytes:
    """Body of a sample description with one entry of 32x16 pixels."""
    fields = bytes(24) + struct.pack(">HH", 32, 16) + bytes(50)
    body = fields + b"".join(box.to_bytes() for box in boxes) + tail
    return struct.pack(">II", 0, 1) + Node(fourcc, body).to_bytes()


def test_quicktime_color_and_terminator() -> None:
    color = Node(b"colr", b"nclc" + struct.pack(">HHH", 1, 13, 6))
    config = codec_configuration(_entry(b"avc3", Node(b"avcC", b"\1cfg"), color, tail=bytes(4)))
    assert config == CodecConfig("h264", "avc3", b"\1cfg", ColorInfo(1, 13, 6, None), 32, 16)


def test_profiles_of_color_other_than_code_points_are_no_color() -> None:
    config = codec_configuration(_entry(b"hvc1", Node(b"hvcC", b"x"), Node(b"colr", b"prof" + bytes(40))))
    assert config.color is None


@pytest.mark.parametrize(
    ("body", "error", "reason"),
    [
        (b"", MalformedMp4Error, "no sample description"),
        (struct.pack(">II", 0, 0), MalformedMp4Error, "no sample description"),
        (struct.pack(">III4s", 0, 1, 500, b"avc1"), MalformedMp4Error, "500"),
        (struct.pack(">II", 0, 1) + Node(b"avc1", bytes(40)).to_bytes(), MalformedMp4Error, "78 bytes"),
        (_entry(b"avc1"), MalformedMp4Error, "no avcC box"),
        (_entry(b"hev1", Node(b"avcC", b"x")), MalformedMp4Error, "no hvcC box"),
        (_entry(b"mp4v"), MalformedMp4Error, "no esds box"),
        (_entry(b"mp4v", Node(b"esds", bytes(4))), MalformedMp4Error, "too short"),
        (
            _entry(b"mp4v", Node(b"esds", bytes(4) + b"\x09\x05" + bytes(8))),
            MalformedMp4Error,
            "descriptor 9",
        ),
        (
            _entry(b"mp4v", Node(b"esds", bytes(4) + b"\x03\x15\0\0\0\x04\x11\x6c" + bytes(16))),
            UnsupportedMp4Error,
            "object type 0x6c",
        ),
        (_entry(b"avc1", Node(b"avcC", b"x"), Node(b"colr", b"nclx\0")), MalformedMp4Error, "too short"),
        (_entry(b"apch"), UnsupportedMp4Error, "'apch' is not supported"),
    ],
)
def test_unusable_descriptions(body: bytes, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        codec_configuration(body)
