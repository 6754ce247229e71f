"""Encode episodes into one MP4 file the way LeRobot's files come to be.

LeRobot encodes each episode by itself and joins the results without encoding again. So each episode
here has an encoder of its own, starts with a keyframe, and its first picture is presented exactly
one frame after the last one of the episode before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.codec.context import Flags
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from lrstream.demo.spec import DemoCamera
from lrstream.errors import UsageError

__all__ = ["write_video"]

_ENCODERS = {
    "h264": ("libx264",),
    "hevc": ("libx265",),
    "depth": ("libx265",),
    "av1": ("libsvtav1", "libaom-av1"),
    "vp9": ("libvpx-vp9",),
}


def write_video(
    path: Path, camera: DemoCamera, fps: int, episodes: Iterable[Iterable[NDArray[Any]]], *, faststart: bool
) -> None:
    """Write one MP4 file with the episodes one after another, the first at time 0.

    Args:
        path: File to write; its directory must exist.
        camera: Codec and its settings.
        fps: Frames per second, constant.
        episodes: Per episode its pictures: uint8 RGB ``(height, width, 3)``, or for a depth camera
            uint16 codes ``(height, width)``.
        faststart: Put `moov` before `mdat`.

    Raises:
        UsageError: No encoder for the codec is part of this build of FFmpeg.
    """
    encoder = _find_encoder(camera.codec)
    options = {"movflags": "+faststart"} if faststart else {}
    with av.open(str(path), "w", format="mp4", options=options) as container:
        stream = container.add_stream(encoder, rate=fps, options=_options(encoder, camera))
        first: Any = stream.codec_context
        converter = _Converter(camera)
        _set_up(first, camera, fps)
        packets: list[Any] = []
        start = 0
        for number, pictures in enumerate(episodes):
            context = first if number == 0 else _new_context(encoder, camera, fps)
            length = 0
            for picture in pictures:
                frame = converter.frame(picture)
                frame.pts = start + length
                frame.time_base = Fraction(1, fps)
                packets.extend(context.encode(frame))
                length += 1
            packets.extend(context.encode(None))
            start += length
        for packet in _with_decode_times(packets, fps):
            packet.stream = stream
            container.mux(packet)


def _find_encoder(codec: str) -> str:
    for name in _ENCODERS[codec]:
        try:
            av.codec.Codec(name, "w")
        except ValueError:  # PyAV's UnknownCodecError: not part of this build
            continue
        return name
    raise UsageError(
        f"No encoder for {codec} is available: this build of PyAV has none of {', '.join(_ENCODERS[codec])}.",
        hint="Install PyAV from its wheels, or choose another codec.",
    )


def _options(encoder: str, camera: DemoCamera) -> dict[str, str]:
    # One thread everywhere: the same bytes on every machine, and no thread storms under test runners.
    gop = camera.gop
    if encoder == "libx264":
        params = f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={camera.bframes}:b-adapt=0"
        params += f":open-gop={int(camera.open_gop)}:threads=1:lookahead-threads=1"
        return {"preset": "veryfast", "crf": "20", "x264-params": params}
    if encoder == "libx265":
        params = f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={camera.bframes}:b-adapt=0"
        params += f":open-gop={int(camera.open_gop)}:pools=none:frame-threads=1:log-level=error"
        if camera.is_depth:
            return {"preset": "ultrafast", "x265-params": params + ":lossless=1"}
        return {"preset": "ultrafast", "crf": "24", "x265-params": params}
    if encoder == "libsvtav1":
        # Faster presets than this skip blocks that have changed: frame 2 was seen with frame 0's identity.
        return {"preset": "8", "crf": "30", "g": str(gop), "svtav1-params": "lp=1"}
    if encoder == "libaom-av1":
        return {"cpu-used": "8", "usage": "realtime", "crf": "30", "g": str(gop), "lag-in-frames": "0"}
    return {
        "deadline": "realtime",
        "cpu-used": "8",
        "crf": "30",
        "b": "0",
        "g": str(gop),
        "keyint_min": str(gop),
        "lag-in-frames": "0",
        "auto-alt-ref": "0",
    }


def _set_up(context: Any, camera: DemoCamera, fps: int) -> None:
    context.width = camera.width
    context.height = camera.height
    context.pix_fmt = "gray12le" if camera.is_depth else "yuv420p"
    context.time_base = Fraction(1, fps)
    context.framerate = Fraction(fps, 1)
    context.thread_count = 1
    context.flags |= Flags.global_header  # parameter sets belong in `stsd`


def _new_context(encoder: str, camera: DemoCamera, fps: int) -> Any:
    context: Any = av.CodecContext.create(encoder, "w")
    context.options = _options(encoder, camera)
    _set_up(context, camera, fps)
    return context


class _Converter:
    """Makes pictures into frames of the encoder's pixel format."""

    def __init__(self, camera: DemoCamera) -> None:
        self._camera = camera
        self._reformatter: Any = VideoReformatter()
        # Where PyAV lets the scaler start threads, it does so for every picture unless told otherwise,
        # which takes longer than the scaling. Older versions have no threads and no such argument.
        self._reformatter_options: dict[str, Any] = {"threads": 1}
        probe = av.VideoFrame(16, 16, "rgb24")
        try:
            self._reformatter.reformat(probe, format="yuv420p", **self._reformatter_options)
        except TypeError:
            self._reformatter_options = {}

    def frame(self, picture: NDArray[Any]) -> Any:
        camera = self._camera
        if not camera.is_depth:
            rgb = av.VideoFrame.from_ndarray(picture, format="rgb24")
            return self._reformatter.reformat(rgb, format="yuv420p", **self._reformatter_options)
        # Through the plane itself: not every PyAV turns an array into 12-bit gray.
        frame = av.VideoFrame(camera.width, camera.height, "gray12le")
        plane = frame.planes[0]
        padded = np.zeros((camera.height, plane.line_size // 2), dtype="<u2")
        padded[:, : camera.width] = picture
        plane.update(padded.tobytes())
        return frame


def _with_decode_times(packets: list[Any], fps: int) -> Iterator[Any]:
    # Encoders that reorder start their decode times before 0 by a delay that they learn from the first
    # pictures, so a short episode gets another delay than a long one and the joined times would run
    # backwards. At a constant rate the place in decode order is the decode time.
    delay = max((place - packet.pts for place, packet in enumerate(packets)), default=0)
    for place, packet in enumerate(packets):
        packet.dts = place - delay
        packet.duration = 1
        packet.time_base = Fraction(1, fps)
        yield packet
