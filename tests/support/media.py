"""Small clips, made once per process, and surgery on their boxes.

Clips are encoded by PyAV; box surgery is a naive tree of Python objects, on purpose another way of
reading MP4 than the package's. `demux` and `decode` are the oracles: FFmpeg's own demuxer and decoder.
"""

from __future__ import annotations

import atexit
import functools
import io
import json
import math
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from numpy.typing import NDArray

from lrstream.mp4.probe import RangeReply, drive, probe_track
from lrstream.mp4.track import TrackIndex

__all__ = [
    "Clip",
    "Node",
    "Packets",
    "assemble",
    "clip_bytes",
    "clip_path",
    "decode",
    "demux",
    "edit",
    "find",
    "index",
    "parse",
    "remove",
    "set_edits",
    "table",
    "to_co64",
    "to_stz2",
    "walk",
    "with_moov_last",
    "with_open_mdat",
    "with_wide_mdat",
]

_ENCODERS = {"h264": "libx264", "hevc": "libx265", "av1": "libsvtav1", "vp9": "libvpx-vp9", "mpeg4": "mpeg4"}
_ENCODE_TIMEOUT_S = 40.0


# --- clips -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clip:
    """What to encode. `start` delays the first picture, in frames; `movflags` are the muxer's."""

    codec: str = "h264"
    frames: int = 40
    gop: int = 10
    bframes: int = 0
    open_gop: bool = False
    fps: int = 30
    size: tuple[int, int] = (64, 48)
    audio: bool = False
    start: int = 0
    movflags: str = "faststart"
    timescale: int = 0
    color: tuple[int, int, int, int] | None = None  # primaries, transfer, matrix, FFmpeg's range (1 or 2)
    mux: tuple[tuple[str, str], ...] = field(default=())

    def __str__(self) -> str:
        parts = [self.codec, f"gop{self.gop}"]
        parts += [f"b{self.bframes}"] * bool(self.bframes) + ["open"] * self.open_gop + ["audio"] * self.audio
        parts += [self.movflags or "tail"] * (self.movflags != "faststart") + [f"start{self.start}"] * bool(
            self.start
        )
        return "-".join(parts)


@functools.cache
def _directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="lrstream-clips-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def clip_path(clip: Clip) -> Path:
    """File of a clip, encoded at the first call."""
    path = _directory() / f"{len(list(_directory().iterdir())):03d}-{clip.codec}.mp4"
    if clip.codec != "av1":
        _encode(clip, path)
        return path
    # SVT-AV1 can hang on a loaded machine, so it runs where it can be ended, and gets a second chance.
    command = [sys.executable, "-m", "tests.support.media", json.dumps(asdict(clip)), str(path)]
    for attempt in (1, 2):
        try:
            subprocess.run(
                command,
                check=True,
                timeout=_ENCODE_TIMEOUT_S,
                cwd=Path(__file__).parents[2],
                capture_output=True,
            )
            break
        except subprocess.TimeoutExpired:
            if attempt == 2:
                raise
    return path


@functools.cache
def clip_bytes(clip: Clip) -> bytes:
    """Content of a clip's file."""
    return clip_path(clip).read_bytes()


def _codec_options(clip: Clip) -> dict[str, str]:
    gop, bframes, open_gop = clip.gop, clip.bframes, int(clip.open_gop)
    if clip.codec == "h264":
        params = f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={bframes}:b-adapt=0:open-gop={open_gop}"
        return {"x264-params": params, "preset": "ultrafast", "crf": "30", "threads": "1"}
    if clip.codec == "hevc":
        params = (
            f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={bframes}:b-adapt=0:open-gop={open_gop}:"
            "log-level=none:pools=1:frame-threads=1"
        )
        return {"x265-params": params, "preset": "ultrafast", "crf": "30"}
    if clip.codec == "av1":
        return {"preset": "12", "crf": "40", "g": str(gop), "svtav1-params": "lp=1"}
    if clip.codec == "vp9":
        return {
            "g": str(gop),
            "deadline": "good",
            "cpu-used": "8",
            "auto-alt-ref": "1",
            "lag-in-frames": "10",
        }
    return {"g": str(gop), "bf": str(bframes)}


def _pictures(clip: Clip) -> Iterator[NDArray[np.uint8]]:
    """A drifting pattern with noise: no two pictures alike, and a wrong reference shows."""
    width, height = clip.size
    noise = np.random.default_rng(7).integers(0, 60, size=(height, width, 3))
    rows, columns = np.mgrid[0:height, 0:width]
    for number in range(clip.frames):
        base = 90 + 60 * np.sin((columns + 3 * number) / 9) + 40 * np.cos((rows - 2 * number) / 7)
        yield np.clip(base[..., None] + np.roll(noise, number, axis=1) - 30, 0, 255).astype(np.uint8)


def _encode(clip: Clip, path: Path) -> None:
    options = {"movflags": clip.movflags} if clip.movflags else {}
    with av.open(str(path), "w", options={**options, **dict(clip.mux)}) as container:
        stream: Any = container.add_stream(_ENCODERS[clip.codec], rate=clip.fps, options=_codec_options(clip))
        stream.width, stream.height = clip.size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        if clip.timescale:
            container.options["video_track_timescale"] = str(clip.timescale)
        if clip.color is not None:
            context = stream.codec_context
            context.color_primaries, context.color_trc, context.colorspace, context.color_range = clip.color
        sound: Any = container.add_stream("aac", rate=8000) if clip.audio else None
        for number, picture in enumerate(_pictures(clip)):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = number + clip.start, Fraction(1, clip.fps)
            container.mux(stream.encode(frame))
            if sound is not None:
                tone = av.AudioFrame.from_ndarray(
                    (0.1 * np.sin(np.arange(8000 // clip.fps) / 5)).astype(np.float32)[None], "fltp", "mono"
                )
                tone.sample_rate = 8000
                container.mux(sound.encode(tone))
        container.mux(stream.encode(None))
        if sound is not None:
            container.mux(sound.encode(None))


# --- oracles -----------------------------------------------------------------------------------


class Packets(NamedTuple):
    """What FFmpeg's demuxer says, in decode order; times in seconds."""

    pts_s: list[float]
    dts_s: list[float]
    sizes: list[int]
    positions: list[int]
    keyframes: list[int]


def _opened(source: Path | bytes) -> Any:
    return av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source))


def demux(source: Path | bytes) -> Packets:
    """Packets of the first video stream."""
    with _opened(source) as container:
        stream = container.streams.video[0]
        base = stream.time_base
        packets = [packet for packet in container.demux(stream) if packet.size]
        return Packets(
            [float(packet.pts * base) for packet in packets],
            [float(packet.dts * base) for packet in packets],
            [packet.size for packet in packets],
            [packet.pos for packet in packets],
            [number for number, packet in enumerate(packets) if packet.is_keyframe],
        )


def decode(source: Path | bytes) -> list[tuple[float, NDArray[np.uint8]]]:
    """Presentation time and pixels of every picture FFmpeg presents, in its order."""
    with _opened(source) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        return [
            (float(frame.pts * stream.time_base), frame.to_ndarray()) for frame in container.decode(stream)
        ]


def index(data: bytes, file_path: str = "clip.mp4") -> TrackIndex:
    """Index of a file held in memory."""
    return drive(probe_track(file_path), lambda start, stop: RangeReply(data[start:stop], len(data)))


# --- boxes -------------------------------------------------------------------------------------

_CONTAINERS = frozenset((b"moov", b"trak", b"edts", b"mdia", b"minf", b"stbl", b"dinf"))


@dataclass
class Node:
    """One box: children if it is a container, else its payload. `position` is the payload's old place."""

    kind: bytes
    payload: bytes = b""
    children: list[Node] = field(default_factory=list)
    position: int = -1
    size_form: str = "compact"  # or "wide" (64 bits) or "open" (0, to the end of the file)

    def child(self, kind: bytes) -> Node:
        return next(child for child in self.children if child.kind == kind)

    def to_bytes(self) -> bytes:
        body = b"".join(child.to_bytes() for child in self.children) + self.payload
        if self.size_form == "wide":
            return struct.pack(">I4sQ", 1, self.kind, len(body) + 16) + body
        size = 0 if self.size_form == "open" else len(body) + 8
        return struct.pack(">I4s", size, self.kind) + body


def parse(data: bytes, base: int = 0) -> list[Node]:
    """Boxes of well-formed bytes, as a tree."""
    nodes, at = [], 0
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        header, form = 8, "compact"
        if size == 1:
            size, header, form = struct.unpack_from(">Q", data, at + 8)[0], 16, "wide"
        elif size == 0:
            size, form = len(data) - at, "open"
        body = data[at + header : at + size]
        node = Node(kind, b"", [], base + at + header, form)
        if kind in _CONTAINERS:
            node.children = parse(body, base + at + header)
        else:
            node.payload = body
        nodes.append(node)
        at += size
    return nodes


def walk(nodes: list[Node]) -> Iterator[Node]:
    """All boxes, depth first."""
    for node in nodes:
        yield node
        yield from walk(node.children)


def find(nodes: list[Node], kind: bytes) -> Node:
    """First box of a kind, wherever it is."""
    return next(node for node in walk(nodes) if node.kind == kind)


def remove(nodes: list[Node], kind: bytes) -> None:
    """Take out all boxes of a kind."""
    nodes[:] = [node for node in nodes if node.kind != kind]
    for node in nodes:
        remove(node.children, kind)


def assemble(nodes: list[Node]) -> bytes:
    """Bytes of a tree, with the chunk offsets moved along with `mdat`."""
    old = next(node.position for node in nodes if node.kind == b"mdat")
    new = 0
    for node in nodes:
        if node.kind == b"mdat":
            new += 16 if node.size_form == "wide" else 8
            break
        new += len(node.to_bytes())
    for node in walk(nodes):
        if node.kind in (b"stco", b"co64"):
            form = ">%dI" if node.kind == b"stco" else ">%dQ"
            (count,) = struct.unpack_from(">I", node.payload, 4)
            offsets = struct.unpack_from(form % count, node.payload, 8)
            node.payload = node.payload[:8] + struct.pack(form % count, *(at + new - old for at in offsets))
    return b"".join(node.to_bytes() for node in nodes)


def edit(data: bytes, change: Callable[[list[Node]], None]) -> bytes:
    """Bytes of ``data`` after ``change`` was made to its tree."""
    nodes = parse(data)
    change(nodes)
    return assemble(nodes)


def table(version: int, rows: list[tuple[int, ...]], form: str, flags: int = 0) -> bytes:
    """Payload of a full box with an entry count; ``form`` is the struct format of one row."""
    return struct.pack(">II", version << 24 | flags, len(rows)) + b"".join(
        struct.pack(">" + form, *row) for row in rows
    )


def set_edits(nodes: list[Node], rows: list[tuple[int, int, int]], version: int = 0) -> None:
    """Give the video track an edit list of rows (duration, media time, 16.16 rate)."""
    trak = video_trak(nodes)
    remove(trak.children, b"edts")
    elst = Node(b"elst", table(version, list(rows), "QqI" if version else "IiI"))
    trak.children.insert(1, Node(b"edts", children=[elst]))


def video_trak(nodes: list[Node]) -> Node:
    """The track whose handler is video."""
    return next(
        node
        for node in walk(nodes)
        if node.kind == b"trak" and node.child(b"mdia").child(b"hdlr").payload[8:12] == b"vide"
    )


def to_co64(nodes: list[Node]) -> None:
    """Store chunk offsets in 64 bits."""
    for node in walk(nodes):
        if node.kind == b"stco":
            (count,) = struct.unpack_from(">I", node.payload, 4)
            offsets = struct.unpack_from(f">{count}I", node.payload, 8)
            node.kind, node.payload = b"co64", table(0, [(at,) for at in offsets], "Q")


def to_stz2(nodes: list[Node], bits: int) -> None:
    """Store sample sizes in fields of 4, 8 or 16 bits."""
    node = find([video_trak(nodes)], b"stsz")
    (count,) = struct.unpack_from(">I", node.payload, 8)
    sizes = struct.unpack_from(f">{count}I", node.payload, 12)
    number = 0
    for size in sizes:
        assert size < 1 << bits, "a sample is too large for this field"
        number = number << bits | size
    length = math.ceil(count * bits / 8)
    number <<= length * 8 - count * bits
    node.kind, node.payload = b"stz2", struct.pack(">III", 0, bits, count) + number.to_bytes(length, "big")


def with_moov_last(nodes: list[Node]) -> None:
    """Put `moov` behind everything else."""
    nodes.sort(key=lambda node: node.kind == b"moov")


def with_wide_mdat(nodes: list[Node]) -> None:
    """Store the size of `mdat` in 64 bits."""
    find(nodes, b"mdat").size_form = "wide"


def with_open_mdat(nodes: list[Node]) -> None:
    """Put `mdat` last, with size 0."""
    nodes.sort(key=lambda node: node.kind == b"mdat")
    find(nodes, b"mdat").size_form = "open"


def _main(arguments: list[str]) -> None:
    values = json.loads(arguments[0])
    values["size"] = tuple(values["size"])
    values["mux"] = tuple(map(tuple, values["mux"]))
    if values["color"] is not None:
        values["color"] = tuple(values["color"])
    _encode(Clip(**values), Path(arguments[1]))


if __name__ == "__main__":
    _main(sys.argv[1:])
