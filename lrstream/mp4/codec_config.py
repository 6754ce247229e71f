"""Codec configuration from `stsd`: what a decoder must know before its first packet.

The result is what FFmpeg's demuxer would hand to the decoder, so that packets taken straight from
an episode's bytes decode to the same pixels as the file does. Formats: ISO/IEC 14496-12 12.1
(sample entry, `colr`), 14496-15 (`avcC`, `hvcC`), 14496-14 with 14496-1 (`esds`), and the
ISO BMFF bindings of AV1 (`av1C`) and VP9 (`vpcC`).
"""

from __future__ import annotations

from dataclasses import dataclass

from lrstream.mp4.boxes import Box

__all__ = ["CodecConfig", "ColorInfo", "codec_configuration", "visual_extensions"]

_ENTRY_FIELDS = 78  # bytes of a visual sample entry before its child boxes

_CODECS = {
    "avc1": "h264",
    "avc3": "h264",
    "hvc1": "hevc",
    "hev1": "hevc",
    "av01": "av1",
    "vp08": "vp8",
    "vp09": "vp9",
    "mp4v": "mpeg4",
}
_CONFIGURATION_BOXES = {"h264": "avcC", "hevc": "hvcC", "av1": "av1C"}
_MPEG4_VISUAL = 0x20  # objectTypeIndication of MPEG-4 part 2 (14496-1, table 5)
_ES_DESCRIPTOR, _DECODER_CONFIG, _DECODER_SPECIFIC = 3, 4, 5


@dataclass(frozen=True, slots=True)
class ColorInfo:
    """Colour description by the code points of ISO/IEC 23091-2 (FFmpeg numbers them alike).

    Attributes:
        primaries: Colour primaries; 2 is unspecified.
        transfer: Transfer characteristics; 2 is unspecified.
        matrix: Matrix coefficients; 2 is unspecified.
        full_range: Whether luma uses all code values; None where the file does not say.
    """

    primaries: int
    transfer: int
    matrix: int
    full_range: bool | None


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """Configuration of one video codec; hashable, so decoders can be shared by it.

    Attributes:
        codec: FFmpeg's name of the codec (``h264``, ``hevc``, ``av1``, ``vp9``, ...).
        fourcc: Type of the sample entry (``avc1``, ``hev1``, ``av01``, ``vp09``, ...).
        extradata: The decoder's global headers as FFmpeg's demuxer sets them; empty where there are none.
        color: Colour description of the container, None where it has none.
        width: Width of the sample entry, pixels.
        height: Height of the sample entry, pixels.
    """

    codec: str
    fourcc: str
    extradata: bytes
    color: ColorInfo | None
    width: int
    height: int


def codec_configuration(stsd_body: bytes, *, file_path: str = "stsd") -> CodecConfig:
    """Read the first sample description.

    Args:
        stsd_body: Payload of `stsd` (version and flags, entry count, entries).
        file_path: File named in errors.

    Raises:
        UnsupportedMp4Error: The codec is not one of those known here.
        MalformedMp4Error: The description does not fit its boxes, or lacks the decoder's configuration.
    """
    entry = _first_entry(stsd_body, file_path)
    fourcc = entry.path[len("stsd/") :]
    codec = _CODECS.get(fourcc)
    if codec is None:
        raise entry.unsupported(
            f"codec of sample entry {fourcc!r} is not supported",
            hint=f"Supported are {', '.join(_CODECS)}.",
        )
    width, height = entry.uint(24, 2), entry.uint(26, 2)
    if len(entry.payload) < _ENTRY_FIELDS:
        raise entry.malformed(
            f"a visual sample entry has {_ENTRY_FIELDS} bytes or more, not {len(entry.payload)}"
        )
    extensions = _extensions(entry)
    return CodecConfig(
        codec=codec,
        fourcc=fourcc,
        extradata=_extradata(entry, codec, extensions),
        color=_color(extensions),
        width=width,
        height=height,
    )


def visual_extensions(stsd_body: bytes, *, file_path: str = "stsd") -> dict[str, Box]:
    """Boxes inside the first sample entry by type (``avcC``, ``colr``, ...), the first of each.

    Args:
        stsd_body: Payload of `stsd`.
        file_path: File named in errors.

    Raises:
        MalformedMp4Error: The description does not fit its boxes.
    """
    return _extensions(_first_entry(stsd_body, file_path))


def _first_entry(stsd_body: bytes, file_path: str) -> Box:
    stsd = Box(file_path, "stsd", 0, 8, memoryview(stsd_body))
    entry = next(stsd.children(8, padded=True), None)
    if entry is None:
        raise stsd.malformed("there is no sample description")
    return entry


def _extensions(entry: Box) -> dict[str, Box]:
    extensions: dict[str, Box] = {}
    for box in entry.children(_ENTRY_FIELDS, padded=True):
        extensions.setdefault(box.path[len(entry.path) + 1 :], box)
    return extensions


def _extradata(entry: Box, codec: str, extensions: dict[str, Box]) -> bytes:
    name = _CONFIGURATION_BOXES.get(codec)
    if name is not None:
        box = extensions.get(name)
        if box is None:
            raise entry.malformed(f"no {name} box, so there is no decoder configuration")
        return bytes(box.payload)
    if codec == "mpeg4":
        esds = extensions.get("esds")
        if esds is None:
            raise entry.malformed("no esds box, so there is no decoder configuration")
        return _decoder_specific_info(esds)
    return b""  # VP8 and VP9 carry everything in their frames


def _color(extensions: dict[str, Box]) -> ColorInfo | None:
    colr = extensions.get("colr")
    if colr is not None:
        kind = colr.raw(0, 4)
        if kind in (b"nclx", b"nclc"):
            full_range = bool(colr.uint(10, 1) >> 7) if kind == b"nclx" else None
            return ColorInfo(colr.uint(4, 2), colr.uint(6, 2), colr.uint(8, 2), full_range)
    vpcc = extensions.get("vpcC")
    if vpcc is not None and vpcc.version(0, 1) == 1:
        # profile, level, then 4 bits of depth, 3 of chroma subsampling and 1 of range
        return ColorInfo(vpcc.uint(7, 1), vpcc.uint(8, 1), vpcc.uint(9, 1), bool(vpcc.uint(6, 1) & 1))
    return None


def _decoder_specific_info(esds: Box) -> bytes:
    """Decoder-specific information of an MPEG-4 elementary stream descriptor (14496-1, 7.2.6)."""
    at = 4
    tag, _, at = _descriptor(esds, at)
    if tag == _ES_DESCRIPTOR:
        flags = esds.uint(at + 2, 1)
        at += 3
        if flags & 0x80:  # depends on another stream
            at += 2
        if flags & 0x40:  # has a URL
            at += 1 + esds.uint(at, 1)
        if flags & 0x20:  # has a clock of its own
            at += 2
        tag, _, at = _descriptor(esds, at)
    if tag != _DECODER_CONFIG:
        raise esds.malformed(f"descriptor {tag} stands where the decoder configuration belongs")
    object_type = esds.uint(at, 1)
    if object_type != _MPEG4_VISUAL:
        raise esds.unsupported(f"object type 0x{object_type:02x} is not supported, only MPEG-4 visual (0x20)")
    tag, length, at = _descriptor(esds, at + 13)
    if tag != _DECODER_SPECIFIC:
        raise esds.malformed(f"descriptor {tag} stands where the decoder's global headers belong")
    return esds.raw(at, length)


def _descriptor(esds: Box, at: int) -> tuple[int, int, int]:
    """Tag, length and content index of the descriptor at ``at``; a length has up to 4 bytes of 7 bits."""
    tag, at = esds.uint(at, 1), at + 1
    length = 0
    for _ in range(4):
        byte = esds.uint(at, 1)
        at += 1
        length = length << 7 | byte & 0x7F
        if byte < 0x80:
            break
    return tag, length, at
