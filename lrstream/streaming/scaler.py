"""FFmpeg's scaler, told where to write: 4:2:0 becomes RGB planes in memory of the caller's.

PyAV converts a picture into a new one, from which its planes are then copied. For small pictures that costs
as much again as the conversion. The function behind it, ``sws_scale`` of libswscale, takes pointers: here it
is called in the very library that PyAV has loaded. Its interface has been the same for more than ten years,
but how PyAV sets it up is its own affair. So a `PlaneScaler` is for one kind of picture, and whoever makes
one compares what it writes with what PyAV gives (`lrstream.streaming.pictures`).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import av
from numpy.typing import NDArray

from lrstream.errors import DecodeError

__all__ = ["PictureKind", "PlaneScaler", "kind_of"]

_BILINEAR = 2  # SWS_BILINEAR, what PyAV converts with
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG
# Brightness, contrast and saturation that change nothing, as 16.16 fixed point.
_NEUTRAL = (0, 1 << 16, 1 << 16)

# Pixels up to which a conversion, some 20 microseconds, takes less time than to get the interpreter back from
# other threads. Larger pictures let go of it.
_MOST_HOLDING_PIXELS = 100_000

_Pointers = ctypes.c_void_p * 4
_Strides = ctypes.c_int * 4


class PictureKind(NamedTuple):
    """All that a conversion to RGB of the same size depends on.

    Attributes:
        pixel_format: FFmpeg's name.
        width: Pixels.
        height: Pixels.
        colorspace: FFmpeg's ``AVColorSpace``.
        color_range: FFmpeg's ``AVColorRange``.
        is_interlaced: Whether its rows are of two fields, which newer releases of PyAV convert one by one.
    """

    pixel_format: str
    width: int
    height: int
    colorspace: int
    color_range: int
    is_interlaced: bool


def kind_of(picture: av.VideoFrame) -> PictureKind:
    """What kind of picture this is."""
    return PictureKind(
        picture.format.name,
        picture.width,
        picture.height,
        picture.colorspace,
        picture.color_range,
        bool(picture.interlaced_frame),
    )


class PlaneScaler:
    """Converts pictures of one kind, planar 4:2:0 or 4:2:2, to RGB planes. One thread at a time; not forked.

    They are not interlaced.

    Args:
        kind: Of all pictures.

    Raises:
        OSError: PyAV's libswscale cannot be found or called here, or refuses this kind.
    """

    def __init__(self, kind: PictureKind) -> None:
        library = _library()
        is_small = kind.width * kind.height <= _MOST_HOLDING_PIXELS
        self._scale = library.scale_holding if is_small else library.scale
        self._kind = kind
        size = kind.width, kind.height
        source, target = library.pixel_format(kind.pixel_format), library.pixel_format("gbrp")
        self._context = library.get_context(*size, source, *size, target, _BILINEAR, None, None, None)
        if not self._context:
            raise OSError(f"libswscale does not convert {kind.pixel_format} to gbrp.")
        weakref.finalize(self, library.free_context, self._context).atexit = False
        # Filled for each picture: making them takes longer than all else here but the conversion.
        self._source, self._source_strides = _Pointers(), _Strides()
        self._target, self._target_strides = _Pointers(), _Strides(*[kind.width] * 3)
        coefficients = library.get_coefficients(kind.colorspace)
        is_full = int(kind.color_range == _FULL_RANGE or kind.pixel_format.startswith("yuvj"))
        if library.set_details(self._context, coefficients, is_full, coefficients, 1, *_NEUTRAL) < 0:
            raise OSError(f"libswscale takes no colour space for {kind.pixel_format}.")

    def write(self, picture: av.VideoFrame, out: NDArray[Any]) -> None:
        """Convert a picture of this scaler's kind.

        Args:
            picture: A decoded picture.
            out: uint8 ``(3, height, width)``, C-contiguous, written in full.

        Raises:
            DecodeError: The scaler refused the picture.
        """
        height, size = self._kind.height, self._kind.width * self._kind.height
        source, strides, target = self._source, self._source_strides, self._target
        for number, plane in enumerate(picture.planes):
            source[number], strides[number] = plane.buffer_ptr, plane.line_size
        start = ctypes.addressof(ctypes.c_char.from_buffer(out.data))
        # Planes of `gbrp` are green, blue, red.
        target[0], target[1], target[2] = start + size, start + 2 * size, start
        num_rows = self._scale(self._context, source, strides, 0, height, target, self._target_strides)
        if num_rows != height:
            raise DecodeError(f"libswscale wrote {num_rows} of {height} rows of a {self._kind.pixel_format}.")


@dataclass(frozen=True, slots=True)
class _Library:
    """Functions of libswscale and libavutil, which let go of the interpreter.

    Attributes:
        scale_holding: `scale`, but it keeps the interpreter.
    """

    scale: Any
    scale_holding: Any
    get_context: Any
    free_context: Any
    get_coefficients: Any
    set_details: Any
    get_pixel_format: Any

    def pixel_format(self, name: str) -> int:
        return int(self.get_pixel_format(name.encode()))


@cache
def _library() -> _Library:
    swscale, avutil = (ctypes.CDLL(_loaded_library(name)) for name in ("swscale", "avutil"))
    number, pointer = ctypes.c_int, ctypes.c_void_p
    picture = _Pointers, _Strides
    scale = number, pointer, *picture, number, number, *picture
    try:
        return _Library(
            _declared(swscale.sws_scale, *scale),
            _declared(ctypes.PyDLL(swscale._name).sws_scale, *scale),
            _declared(swscale.sws_getContext, pointer, *[number] * 7, *[pointer] * 3),
            _declared(swscale.sws_freeContext, None, pointer),
            _declared(swscale.sws_getCoefficients, pointer, number),
            _declared(
                swscale.sws_setColorspaceDetails, number, pointer, pointer, number, pointer, *[number] * 4
            ),
            _declared(avutil.av_get_pix_fmt, number, ctypes.c_char_p),
        )
    except AttributeError as error:
        raise OSError(f"A function is missing in FFmpeg's libraries: {error}.") from error


def _declared(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _loaded_library(name: str) -> str:
    """Path of one of FFmpeg's libraries, the copy that PyAV has loaded: there may be others here."""
    return _path_of(name, Path("/proc/self/maps").read_bytes(), Path(av.__file__).resolve().parent)


def _path_of(name: str, maps: bytes, package: Path) -> str:
    """Where the library of a package lies, by the system's list of mapped files.

    Raises:
        OSError: That cannot be told.
    """
    # Names of files, of which any may be mapped, need not be text.
    paths = {
        os.fsdecode(line.split(maxsplit=5)[5]) for line in maps.split(b"\n") if f"/lib{name}".encode() in line
    }
    # PyAV's wheels bring their own, beside the package; otherwise they are the system's.
    places = package, package.with_name(f"{package.name}.libs")
    own = {path for path in paths if any(Path(path).is_relative_to(place) for place in places)}
    found = own or paths
    if len(found) != 1:
        raise OSError(f"{len(found)} copies of lib{name} are loaded, expected 1.")
    return found.pop()
