"""The clips and box layouts that the tests of `lrstream.mp4` go through."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.media import (
    Clip,
    Node,
    find,
    to_co64,
    to_stz2,
    with_moov_last,
    with_open_mdat,
    with_wide_mdat,
)

H264 = Clip()
H264_BFRAMES = Clip(bframes=3)
H264_OPEN_GOP = Clip(bframes=3, open_gop=True)
NEGATIVE_OFFSETS = Clip(bframes=2, movflags="faststart+negative_cts_offsets")
HEVC_OPEN_GOP = Clip(codec="hevc", bframes=3, open_gop=True)
AUDIO = Clip(bframes=2, frames=60, audio=True)
FRAGMENTED = Clip(movflags="frag_keyframe+empty_moov")
NO_PICTURES = Clip(frames=0)

CLIPS = (
    H264,
    H264_BFRAMES,
    H264_OPEN_GOP,
    NEGATIVE_OFFSETS,
    Clip(gop=1),
    Clip(bframes=2, timescale=90_000, movflags=""),
    Clip(bframes=2, start=15),
    Clip(bframes=2, open_gop=True, movflags="faststart+negative_cts_offsets"),
    AUDIO,
    Clip(codec="hevc"),
    Clip(codec="hevc", bframes=3),
    HEVC_OPEN_GOP,
    Clip(codec="av1"),
    Clip(codec="av1", gop=2),
    Clip(codec="vp9"),
    Clip(codec="mpeg4", bframes=2),
)


def _with_timecode_track(nodes: list[Node]) -> None:
    """Put a track of a handler nobody knows before the video track."""
    moov = find(nodes, b"moov")
    mdhd = find(nodes, b"mdhd")
    handler = Node(b"hdlr", bytes(8) + b"tmcd" + bytes(13))
    mdia = Node(b"mdia", children=[Node(b"mdhd", mdhd.payload), handler, Node(b"minf", children=[])])
    moov.children.insert(1, Node(b"trak", children=[Node(b"tkhd", find(nodes, b"tkhd").payload), mdia]))


def _with_unknown_boxes(nodes: list[Node]) -> None:
    """Sprinkle boxes that readers have to step over."""
    nodes.insert(1, Node(b"uuid", bytes(range(32))))
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        find(nodes, kind).children.insert(0, Node(b"\xa9xyz", b"odd"))


def _with_two_mdats(nodes: list[Node]) -> None:
    """Put an empty and an unused `mdat` around the one with the pictures."""
    at = next(number for number, node in enumerate(nodes) if node.kind == b"mdat")
    nodes.insert(at + 1, Node(b"mdat", b"unused" * 10))
    nodes.append(Node(b"mdat"))


def _without_ftyp(nodes: list[Node]) -> None:
    nodes[:] = [node for node in nodes if node.kind != b"ftyp"]


LAYOUTS: dict[str, Callable[[list[Node]], None]] = {
    "moov-last": with_moov_last,
    "co64": to_co64,
    "wide-mdat": with_wide_mdat,
    "open-mdat": with_open_mdat,
    "stz2-16": lambda nodes: to_stz2(nodes, 16),
    "timecode": _with_timecode_track,
    "unknown-boxes": _with_unknown_boxes,
    "two-mdats": _with_two_mdats,
    "no-ftyp": _without_ftyp,
}
