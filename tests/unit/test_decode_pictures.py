"""Conversion of decoded pictures and stored images, against FFmpeg's `rgb24`, plain formulas and Pillow."""

from __future__ import annotations

import io
import math
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from lrstream.errors import DecodeError, UsageError
from lrstream.layout.info import DepthParameters
from lrstream.streaming import pictures, scaler
from lrstream.streaming.pictures import (
    PictureConverter,
    convert_depth_unit,
    decode_image,
    depth_table,
    to_unit_range,
)
from lrstream.streaming.scaler import PictureKind, PlaneScaler, kind_of

FORMATS = (
    "yuv420p",
    "yuvj420p",
    "yuv422p",
    "yuv444p",
    "yuvj444p",
    "yuv420p10le",
    "yuv444p10le",
    "nv12",
    "gray",
    "gbrp",
    "rgb24",
)
# Elsewhere FFmpeg's libraries are not looked for.
_BEST = pictures._Way.DIRECT if sys.platform == "linux" else pictures._Way.PLANAR
SIZES = ((128, 96), (98, 66), (100, 66), (64, 50), (322, 34), (16, 16), (34, 34))


def noise(pixel_format: str, width: int, height: int, seed: int = 0) -> av.VideoFrame:
    picture = av.VideoFrame(width, height, pixel_format)
    random = np.random.default_rng(seed)
    for plane in picture.planes:
        if "10le" in pixel_format:
            values = random.integers(0, 1024, plane.buffer_size // 2, dtype=np.uint16).astype("<u2")
            plane.update(values.tobytes())
        else:
            plane.update(random.integers(0, 256, plane.buffer_size, dtype=np.uint8).tobytes())
    return picture


def rgb_of(picture: av.VideoFrame) -> NDArray[Any]:
    expected: NDArray[Any] = picture.to_ndarray(format="rgb24").transpose(2, 0, 1)
    return expected


@pytest.mark.parametrize("pixel_format", FORMATS)
def test_rgb_equals_rgb24_for_every_size_and_colour_space(pixel_format: str) -> None:
    converter = PictureConverter()
    for width, height in SIZES:
        for number, (colorspace, color_range) in enumerate(((2, 0), (1, 1), (5, 2), (1, 2), (6, 1))):
            picture = noise(pixel_format, width, height, seed=number)
            picture.colorspace, picture.color_range = colorspace, color_range
            out = np.empty((3, height, width), dtype=np.uint8)
            converter.write_rgb(picture, out)
            np.testing.assert_array_equal(out, rgb_of(picture), err_msg=f"{width}x{height} {colorspace}")


@pytest.mark.parametrize("location", range(6))
def test_where_a_stream_says_its_chroma_lies_makes_no_difference(location: int) -> None:
    """PyAV knows the place of chroma from the decoder, a `PlaneScaler` does not."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt, stream.thread_count = 128, 96, "yuv420p", 1
        stream.options = {"x264-params": f"chromaloc={location}", "crf": "10"}
        for seed in range(2):
            container.mux(stream.encode(noise("yuv420p", 128, 96, seed=seed)))
        container.mux(stream.encode(None))
    file.seek(0)
    with av.open(file, "r") as written:
        pictures_of_file = list(written.decode(video=0))
    assert len(pictures_of_file) == 2
    converter = PictureConverter()
    for picture in pictures_of_file:
        out = np.empty((3, 96, 128), dtype=np.uint8)
        converter.write_rgb(picture, out)
        np.testing.assert_array_equal(out, rgb_of(picture))


@pytest.mark.parametrize(("pixel_format", "height"), [("yuv420p", 96), ("yuv422p", 98), ("yuv444p", 96)])
def test_fields_of_interlaced_pictures_keep_their_own_chroma(pixel_format: str, height: int) -> None:
    """Newer releases of PyAV convert two fields one by one where the decoder says that there are two."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt, stream.thread_count = 128, height, pixel_format, 1
        stream.options = {"x264-params": "interlaced=1:tff=1", "crf": "10"}
        for seed in range(2):
            container.mux(stream.encode(noise(pixel_format, 128, height, seed=seed)))
        container.mux(stream.encode(None))
    file.seek(0)
    with av.open(file, "r") as written:
        pictures_of_file = list(written.decode(video=0))
    assert len(pictures_of_file) == 2
    converter = PictureConverter()
    # A stream may begin with pictures that are not interlaced.
    for picture in (noise(pixel_format, 128, height), *pictures_of_file):
        out = np.empty((3, height, 128), dtype=np.uint8)
        converter.write_rgb(picture, out)
        np.testing.assert_array_equal(out, rgb_of(picture))
    assert all(picture.interlaced_frame for picture in pictures_of_file)


def way_of(pixel_format: str, width: int, height: int) -> pictures._Way:
    return pictures._way_of(kind_of(noise(pixel_format, width, height)))


def test_each_format_takes_the_fastest_way_that_is_exact() -> None:
    pictures._way_of.cache_clear()
    for width, height in ((640, 480), (128, 96), (320, 240)):
        assert way_of("yuv420p", width, height) is _BEST
        assert way_of("yuv444p", width, height) is pictures._Way.PLANAR
    assert way_of("yuv420p", 98, 66) is pictures._Way.PACKED
    assert way_of("yuv420p10le", 128, 96) is pictures._Way.PACKED


def assert_converted(picture: av.VideoFrame, way: pictures._Way) -> None:
    """That a converter which knows nothing yet takes this way, and its pixels are right."""
    pictures._way_of.cache_clear()
    out = np.empty((3, picture.height, picture.width), dtype=np.uint8)
    PictureConverter().write_rgb(picture, out)
    np.testing.assert_array_equal(out, rgb_of(picture))
    assert pictures._way_of(kind_of(picture)) is way
    pictures._way_of.cache_clear()


def test_where_planar_differs_here_the_packed_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_PLANAR_FULL", frozenset({"yuv420p10le"}))  # claims too much
    assert_converted(noise("yuv420p10le", 98, 66), pictures._Way.PACKED)


def refusing(_: PlaneScaler, kind: PictureKind) -> None:
    raise OSError("not here")


def writing(change: Callable[[NDArray[Any]], None]) -> Callable[..., None]:
    write = PlaneScaler.write

    def other(scaling: PlaneScaler, picture: av.VideoFrame, out: NDArray[Any]) -> None:
        write(scaling, picture, out)
        change(out)

    return other


def nothing_written(out: NDArray[Any]) -> None:
    raise DecodeError("libswscale wrote -38 of 96 rows")


def off_by_one(out: NDArray[Any]) -> None:
    out[1, 2, 3] += 1


def beyond_the_end(out: NDArray[Any]) -> None:
    np.lib.stride_tricks.as_strided(out.reshape(-1)[-1:], (2,), (1,))[1] = 0


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("__init__", refusing),
        ("write", writing(nothing_written)),
        ("write", writing(off_by_one)),
        ("write", writing(beyond_the_end)),
    ],
    ids=["absent", "refused", "different", "overrun"],
)
def test_where_writing_in_place_does_not_work_planes_are_copied(
    monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., None]
) -> None:
    monkeypatch.setattr(PlaneScaler, name, function)
    assert_converted(noise("yuv420p", 128, 96), pictures._Way.PLANAR)


def maps_of(*paths: bytes) -> bytes:
    lines = [b"7f00-7f01 r-xp 00000000 fe:01 4711                       " + path for path in paths]
    return b"\n".join([b"7f02-7f03 rw-p 00000000 00:00 0 ", *lines, b""])


def test_of_several_copies_of_a_library_the_one_of_the_package_is_taken() -> None:
    package = Path("/env/my packages/av")
    own = b"/env/my packages/av.libs/libswscale-5e.so.9"
    others = (b"/env/my packages/cv.libs/libswscale-5f.so.9", b"/usr/lib/libswscale.so.5")
    assert scaler._path_of("swscale", maps_of(own, own, *others), package) == os.fsdecode(own)
    assert scaler._path_of("swscale", maps_of(others[1]), package) == os.fsdecode(others[1])
    for paths in (others, ()):
        with pytest.raises(OSError, match=f"{len(paths)} copies of libswscale"):
            scaler._path_of("swscale", maps_of(*paths), package)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere FFmpeg's libraries are not looked for")
def test_a_mapped_file_whose_name_is_no_text_is_no_obstacle(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff", "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            scaler._loaded_library("swscale")


def test_arrays_that_are_not_contiguous_are_written_too() -> None:
    picture = noise("yuv420p", 128, 96)
    wide = np.zeros((3, 96, 160), dtype=np.uint8)
    PictureConverter().write_rgb(picture, wide[:, :, 16:144])
    np.testing.assert_array_equal(wide[:, :, 16:144], rgb_of(picture))
    assert not wide[:, :, :16].any()
    assert not wide[:, :, 144:].any()


def test_one_converter_follows_a_change_of_kind() -> None:
    converter = PictureConverter()
    for pixel_format, width, height, colorspace in (
        ("yuv420p", 128, 96, 1),
        ("yuv420p", 64, 96, 1),
        ("yuv420p", 64, 96, 6),
        ("yuv422p", 64, 96, 6),
        ("yuv420p", 128, 96, 1),
    ):
        picture = noise(pixel_format, width, height)
        picture.colorspace = colorspace
        out = np.empty((3, height, width), dtype=np.uint8)
        converter.write_rgb(picture, out)
        np.testing.assert_array_equal(out, rgb_of(picture))


def test_pictures_go_into_a_part_of_a_larger_array() -> None:
    window = np.zeros((3, 3, 66, 98), dtype=np.uint8)
    picture = noise("yuv420p", 98, 66)
    PictureConverter().write_rgb(picture, window[1])
    np.testing.assert_array_equal(window[1], rgb_of(picture))
    assert not window[0].any()
    assert not window[2].any()


def test_another_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(DecodeError, match=r"64x48.*expected 32x48"):
        PictureConverter().write_rgb(noise("yuv420p", 64, 48), np.empty((3, 48, 32), dtype=np.uint8))
    table = np.zeros(4096, dtype=np.float32)
    with pytest.raises(DecodeError, match=r"64x48.*expected 32x48"):
        PictureConverter().write_depth(noise("gray", 64, 48), table, np.empty((1, 48, 32), dtype=np.float32))


# -- depth ------------------------------------------------------------------------------------------

PARAMETERS = (
    DepthParameters(),
    DepthParameters(min_m=0.1, max_m=4.0, shift_m=0.0),
    DepthParameters(min_m=0.0, max_m=10.0, use_log=False),
    DepthParameters(min_m=0.5, max_m=70.0, use_log=False),
)


def depth_of_code(code: int, parameters: DepthParameters) -> float:
    """Metres, with the formula written out in float64."""
    share = code / 4095
    low, high, shift = parameters.min_m, parameters.max_m, parameters.shift_m
    if not parameters.use_log:
        return low + share * (high - low)
    start, stop = math.log(low + shift), math.log(high + shift)
    return math.exp(start + share * (stop - start)) - shift


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_depth_table_follows_the_formula(parameters: DepthParameters) -> None:
    metres, millimetres = depth_table(parameters, "m"), depth_table(parameters, "mm")
    assert metres.shape == millimetres.shape == (4096,)
    assert metres.dtype == millimetres.dtype == np.float32
    for code in (0, 1, 64, 1024, 2048, 4032, 4095):
        expected = depth_of_code(code, parameters)
        assert metres[code] == pytest.approx(expected, rel=2e-6, abs=2e-6)
        assert abs(millimetres[code] - min(expected * 1000, 65535)) <= 0.51
    np.testing.assert_array_equal(millimetres, np.rint(millimetres))
    assert (np.diff(metres) >= 0).all()


def test_an_unknown_unit_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="depth_output_unit is 'cm'"):
        depth_table(DepthParameters(), "cm")


def test_depth_pictures_are_looked_up_code_by_code() -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 4096, (34, 50), dtype=np.uint16)
    picture = av.VideoFrame(50, 34, "gray12le")
    plane = picture.planes[0]
    rows = np.zeros((34, plane.line_size // 2), dtype="<u2")
    rows[:, :50] = codes
    rows[:, 50:] = 0xFFFF  # padding must not be read
    plane.update(rows.tobytes())
    table = random.random(4096, dtype=np.float32)
    out = np.empty((1, 34, 50), dtype=np.float32)
    PictureConverter().write_depth(picture, table, out)
    np.testing.assert_array_equal(out[0], table[codes])


def test_depth_in_another_pixel_format_is_converted() -> None:
    picture = noise("gray", 32, 16)
    expected = picture.to_ndarray(format="gray12le")
    table = np.arange(4096, dtype=np.float32)
    out = np.empty((1, 16, 32), dtype=np.float32)
    PictureConverter().write_depth(picture, table, out)
    np.testing.assert_array_equal(out[0], expected.astype(np.float32))


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [("m", "mm", 1500.0), ("mm", "m", 0.0015), ("mm", "mm", 1.5), (None, "mm", 1.5), (None, "m", 1.5)],
)
def test_stored_depth_changes_its_unit_alone(stored: str | None, wanted: str, expected: float) -> None:
    depth = torch.full((1, 2, 2), 1.5)
    converted = convert_depth_unit(depth, stored, wanted)
    assert converted.dtype == torch.float32
    assert converted[0, 0, 0].item() == pytest.approx(expected)


# -- stored images ----------------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_png_and_jpeg_become_floats_or_stay_bytes() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    for kind in ("PNG", "JPEG"):
        data = encoded(Image.fromarray(pixels), kind)
        with Image.open(io.BytesIO(data)) as image:
            expected = np.array(image).transpose(2, 0, 1)
        as_bytes, as_floats = decode_image(data, keep_uint8=True), decode_image(data, keep_uint8=False)
        assert as_bytes.dtype == torch.uint8
        assert as_floats.dtype == torch.float32
        np.testing.assert_array_equal(as_bytes.numpy(), expected)
        np.testing.assert_array_equal(as_floats.numpy(), expected.astype(np.float32) / np.float32(255))


@pytest.mark.parametrize("mode", ["L", "RGBA", "1", "F", "I"])
def test_modes_as_torchvision_reads_them(mode: str) -> None:
    gray = Image.fromarray(np.random.default_rng(1).integers(0, 256, (4, 6), dtype=np.uint8))
    image = gray.convert(mode)
    data = encoded(image, "TIFF")
    tensor = decode_image(data, keep_uint8=False)
    channels = {"RGBA": 4}.get(mode, 1)
    assert tensor.shape == (channels, 4, 6)
    expected = np.array(image)
    if mode == "1":
        expected = expected.astype(np.float32)
    elif mode in ("L", "RGBA"):
        expected = expected.astype(np.float32) / 255
    assert tensor.dtype == (torch.int32 if mode == "I" else torch.float32)
    np.testing.assert_array_equal(tensor.numpy(), expected.reshape(4, 6, channels).transpose(2, 0, 1))


def test_sixteen_bit_depth_keeps_its_numbers() -> None:
    depth = np.array([[0, 1, 40000], [65535, 300, 12]], dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        tensor = decode_image(encoded(Image.fromarray(depth), kind), keep_uint8=False)
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(tensor.numpy()[0], depth.astype(np.float32))


def test_the_orientation_in_a_jpeg_is_followed() -> None:
    image = Image.fromarray(np.zeros((4, 6, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    tensor = decode_image(encoded(image, "JPEG", exif=exif.tobytes()), keep_uint8=True)
    assert tensor.shape == (3, 6, 4)


@pytest.mark.parametrize("data", [b"", b"not an image", encoded(Image.new("RGB", (8, 8)))[:40]])
def test_bytes_that_are_no_image_are_an_error(data: bytes) -> None:
    with pytest.raises(DecodeError, match=f"stored image of {len(data)} bytes"):
        decode_image(data, keep_uint8=False)


def test_unit_range_divides_by_255_in_float32() -> None:
    values = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    scaled = torch.from_numpy(to_unit_range(values.numpy()))
    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled, values.to(torch.float32) / 255, rtol=0, atol=0)
