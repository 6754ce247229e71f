"""Decoded pictures and stored images become tensors: RGB planes, depth codes, PNG and JPEG bytes.

RGB leaves FFmpeg's scaler as three planes (`gbrp`), which are channel-first already, and goes straight
into the sample's tensor. That is exact only where the scaler uses the same arithmetic for `gbrp` and for
`rgb24`, which is what LeRobot asks for. It does so for the usual 4:2:0 video whose width is a multiple of
16, and for 4:4:4; elsewhere (98 pixels wide, ten bits, semi-planar, interlaced, ...) the two differ, most
visibly in how chroma is interpolated. `PictureConverter` therefore takes the planar way only for formats
known to be exact, checks the claim once with noise on the machine it runs on, and otherwise converts to
`rgb24`. The same check decides whether the scaler may be told where to write (`PlaneScaler`), or hands out
a picture whose planes are copied.
"""

from __future__ import annotations

import io
import math
import random
from enum import Enum, auto
from functools import cache
from typing import Any

import av
import numpy as np
import torch
from av.video.plane import VideoPlane
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray
from PIL import Image, ImageOps

from lrstream.errors import DecodeError, UsageError
from lrstream.layout.info import DepthParameters
from lrstream.streaming.scaler import PictureKind, PlaneScaler, kind_of

__all__ = [
    "DEPTH_UNITS",
    "PictureConverter",
    "check_depth_unit",
    "convert_depth_unit",
    "decode_image",
    "depth_table",
    "to_unit_range",
]

DEPTH_UNITS = ("m", "mm")

_MM_PER_M = 1000.0
_DEPTH_CODES = 4096
_UINT16_MAX = 65535.0
_DEPTH_FORMAT = "gray12le"

# Formats for which `gbrp` and `rgb24` may agree: with subsampled chroma only where the width is a
# multiple of 16 and the height even, because the fast path of `gbrp` rounds the rest of a row differently.
_PLANAR_SUBSAMPLED = frozenset({"yuv420p", "yuvj420p", "yuv422p", "yuvj422p"})
_PLANAR_FULL = frozenset({"yuv444p", "yuvj444p"})
# What is checked depends on the width; rows are all alike, but for the chroma that two of them share.
_MOST_CHECKED_ROWS = 64
_MARGIN_BYTE = 165
# Plane of `gbrp` that holds red, green, blue.
_RGB_PLANES = (2, 0, 1)
_UINT16_MODES = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})


class _Way(Enum):
    """How pictures of a kind become RGB planes; all give the same."""

    DIRECT = auto()
    """The scaler writes them where they are wanted."""
    PLANAR = auto()
    """It writes planes of its own, which are copied."""
    PACKED = auto()
    """It writes pixels, which are taken apart."""


class PictureConverter:
    """Writes decoded pictures into arrays. Belongs to one decoder; used by one thread at a time.

    Scaler contexts are kept, with one thread: FFmpeg's default would start threads of its own for every
    picture, beside the decode threads that keep the processor busy already (K12).
    """

    def __init__(self) -> None:
        self._scaler = VideoReformatter()
        self._ways: dict[PictureKind, tuple[_Way, PlaneScaler | None]] = {}

    def write_rgb(self, picture: av.VideoFrame, out: NDArray[np.uint8]) -> None:
        """Convert one picture to RGB.

        Args:
            picture: A decoded picture of any pixel format.
            out: uint8 ``(3, height, width)``, written in full; equal to
                ``picture.to_ndarray(format="rgb24")`` channel-first.

        Raises:
            DecodeError: The picture has another size than `out`.
        """
        kind = kind_of(picture)
        height, width = kind.height, kind.width
        if out.shape != (3, height, width):
            raise DecodeError(
                f"The decoded picture has {width}x{height} pixels, expected {out.shape[2]}x{out.shape[1]}."
            )
        known = self._ways.get(kind)
        if known is None:
            way = _way_of(kind)
            known = self._ways[kind] = way, PlaneScaler(kind) if way is _Way.DIRECT else None
        way, direct = known
        if direct is not None and out.flags.c_contiguous and out.dtype == np.uint8:
            direct.write(picture, out)
        elif way is not _Way.PACKED:
            _write_planar(self._scaler, picture, out)
        else:
            packed = _scale(self._scaler, picture, "rgb24").planes[0]
            rows = _rows(packed, height)
            np.copyto(out, rows[:, : 3 * width].reshape(height, width, 3).transpose(2, 0, 1))

    def write_depth(
        self, picture: av.VideoFrame, table: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:
        """Convert one picture of 12-bit codes to depth.

        Args:
            picture: A decoded picture; converted to ``gray12le`` unless it is that.
            table: float32 ``(4096,)``, depth of each code (`depth_table`).
            out: float32 ``(1, height, width)``, written in full.

        Raises:
            DecodeError: The picture has another size than `out`.
        """
        height, width = picture.height, picture.width
        if out.shape != (1, height, width):
            raise DecodeError(
                f"The decoded depth map has {width}x{height} pixels, expected {out.shape[2]}x{out.shape[1]}."
            )
        if picture.format.name != _DEPTH_FORMAT:
            picture = _scale(self._scaler, picture, _DEPTH_FORMAT)
        plane = picture.planes[0]
        codes = _rows(plane, height).view("<u2")[:, :width]
        # A 12-bit decoder cannot give more than 4095; "clip" only spares `take` a buffered second pass.
        np.take(table, codes, out=out[0], mode="clip")


@cache
def _way_of(kind: PictureKind) -> _Way:
    """The fastest way that is exact, here and now: the scaler depends on the processor."""
    is_subsampled = kind.pixel_format in _PLANAR_SUBSAMPLED
    if kind.is_interlaced:
        return _Way.PACKED  # fields may have odd heights, and a picture of noise has none
    if is_subsampled and (kind.width % 16 or kind.height % 2):
        return _Way.PACKED
    if not is_subsampled and kind.pixel_format not in _PLANAR_FULL:
        return _Way.PACKED
    noise, expected = _noise(kind)
    planar = np.empty_like(expected)
    _write_planar(VideoReformatter(), noise, planar)
    if not np.array_equal(planar, expected):
        return _Way.PACKED
    return _Way.DIRECT if is_subsampled and _is_direct_exact(noise, expected) else _Way.PLANAR


def _noise(kind: PictureKind) -> tuple[av.VideoFrame, NDArray[np.uint8]]:
    """A picture of noise and its RGB pixels ``(3, height, width)``, with few rows."""
    noise = av.VideoFrame(kind.width, min(kind.height, _MOST_CHECKED_ROWS), kind.pixel_format)
    noise.colorspace, noise.color_range = kind.colorspace, kind.color_range
    noise_bytes = random.Random(0)
    for plane in noise.planes:
        plane.update(noise_bytes.randbytes(plane.buffer_size))
    return noise, np.ascontiguousarray(noise.to_ndarray(format="rgb24").transpose(2, 0, 1))


def _is_direct_exact(picture: av.VideoFrame, expected: NDArray[np.uint8]) -> bool:
    """Whether `PlaneScaler` works here, writes what PyAV gives, and nothing beside it.

    The memory around it belongs to other samples of a batch.
    """
    margin = expected.size // expected.shape[1]
    memory = np.full(margin + expected.size + margin, _MARGIN_BYTE, dtype=np.uint8)
    out = memory[margin:-margin].reshape(expected.shape)
    try:
        PlaneScaler(kind_of(picture)).write(picture, out)
    except (OSError, DecodeError):
        return False  # not this system's libraries
    margins = np.concatenate([memory[:margin], memory[-margin:]])
    return np.array_equal(out, expected) and bool((margins == _MARGIN_BYTE).all())


def _write_planar(scaler: VideoReformatter, picture: av.VideoFrame, out: NDArray[np.uint8]) -> None:
    """Convert to planes and copy these."""
    height, width = out.shape[1:]
    planes = _scale(scaler, picture, "gbrp").planes
    for channel, plane in enumerate(_RGB_PLANES):
        rows = _rows(planes[plane], height)
        out[channel] = rows if rows.shape[1] == width else rows[:, :width]


def _rows(plane: VideoPlane, height: int) -> NDArray[np.uint8]:
    """View of a plane, uint8 ``(height, bytes of a row with its padding)``."""
    # A plane is a buffer, which only its stub does not say.
    return np.frombuffer(plane, dtype=np.uint8).reshape(height, -1)  # type: ignore[call-overload,no-any-return]


def _scale(scaler: VideoReformatter, picture: av.VideoFrame, pixel_format: str) -> av.VideoFrame:
    if _SCALER_TAKES_THREADS:
        return scaler.reformat(picture, format=pixel_format, threads=1)
    return scaler.reformat(picture, format=pixel_format)


def _scaler_takes_threads() -> bool:
    """Whether this PyAV has `reformat(threads=...)`; releases without it scale in the calling thread."""
    try:
        VideoReformatter().reformat(av.VideoFrame(16, 16, "yuv420p"), format="rgb24", threads=1)
    except TypeError:
        return False
    return True


_SCALER_TAKES_THREADS = _scaler_takes_threads()


def depth_table(parameters: DepthParameters, unit: str) -> NDArray[np.float32]:
    """Depth of every 12-bit code in `unit` ("m" or "mm"; whole millimetres), float32 ``(4096,)``.

    The same float32 operations that LeRobot applies to each pixel, applied once to each code.

    Raises:
        UsageError: Unknown unit.
    """
    check_depth_unit(unit)
    low, high, shift = parameters.min_m, parameters.max_m, parameters.shift_m
    if parameters.use_log:
        low, high = math.log(low + shift), math.log(high + shift)
    depth = torch.arange(_DEPTH_CODES, dtype=torch.float32)
    depth.mul_((high - low) / (_DEPTH_CODES - 1)).add_(low)
    if parameters.use_log:
        depth.exp_().sub_(shift)
    depth.clamp_(parameters.min_m, parameters.max_m)
    if unit == "mm":
        depth.mul_(_MM_PER_M).round_().clamp_(0.0, _UINT16_MAX)
    table: NDArray[np.float32] = depth.numpy()
    return table


def check_depth_unit(unit: str) -> None:
    """Refuse a depth unit other than "m" and "mm"."""
    if unit not in DEPTH_UNITS:
        raise UsageError(f"depth_output_unit is {unit!r}, expected one of {', '.join(DEPTH_UNITS)}.")


def convert_depth_unit(depth: torch.Tensor, stored: str | None, unit: str) -> torch.Tensor:
    """Depth stored as an image, in another unit; unchanged where the dataset does not say its unit.

    Args:
        depth: float32, any shape.
        stored: Unit in the dataset, "m" or "mm"; None = not recorded.
        unit: Unit wanted, "m" or "mm".
    """
    if stored is None or stored == unit:
        return depth
    return depth * _MM_PER_M if stored == "m" else depth / _MM_PER_M


def to_unit_range(pictures: NDArray[np.uint8], out: NDArray[Any] | None = None) -> NDArray[np.float32]:
    """uint8 pictures as float32 in [0, 1]: divided by 255.

    By numpy, because torch would start its pool of OpenMP threads beside every decode thread.

    Args:
        pictures: uint8, any shape.
        out: Where to write the result; used only if it is float32 of that shape.

    Returns:
        `out`, or a new array.
    """
    if out is None or out.shape != pictures.shape or out.dtype != np.float32:
        out = np.empty(pictures.shape, dtype=np.float32)
    np.divide(pictures, np.float32(255), out=out, dtype=np.float32)
    return out


def decode_image(encoded: bytes, *, keep_uint8: bool) -> torch.Tensor:
    """Decode one PNG, JPEG or TIFF image as a table stores it.

    Args:
        encoded: The file's bytes.
        keep_uint8: Whether 8-bit images stay uint8 rather than becoming float32 in [0, 1].

    Returns:
        ``(C, H, W)``; float32 in [0, 1] for 8-bit images (or uint8), float32 in stored units for depth
        maps of 16-bit integers or floats, int32 for 32-bit integers.

    Raises:
        DecodeError: Pillow cannot read the bytes.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode in _UINT16_MODES:
                return torch.from_numpy(np.array(image, dtype=np.float32))[None]
            pixels = np.array(image, dtype=_IMAGE_DTYPES.get(image.mode, np.uint8), copy=True)
    except (OSError, ValueError, SyntaxError) as error:
        raise DecodeError(f"A stored image of {len(encoded)} bytes cannot be decoded: {error}.") from error
    if image.mode == "1":
        pixels *= 255
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    channels_first = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    if channels_first.dtype != torch.uint8 or keep_uint8:
        return channels_first
    return torch.from_numpy(to_unit_range(channels_first.numpy()))


_IMAGE_DTYPES: dict[str, type[np.generic]] = {"I": np.int32, "F": np.float32}
