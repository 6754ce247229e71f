"""A contact sheet: evenly spaced frames of an episode with their numbers, as one PNG."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from lrstream.commands.inspect_source import InspectedDataset
from lrstream.errors import UsageError
from lrstream.sidecar.install import write_atomically
from lrstream.streaming.decode import DecoderPool, decode_pictures
from lrstream.streaming.episode import CameraRecord
from lrstream.streaming.fetch import EpisodeLoader
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.pictures import PictureConverter

__all__ = ["evenly_spaced", "write_contact_sheet"]

_TOLERANCE_S = 1e-4
_THUMB_WIDTH = 192
_PER_LINE = 6
_TEXT_HEIGHT = 14
_MARGIN = 4
_BACKGROUND, _INK = (24, 24, 24), (230, 230, 230)


def evenly_spaced(length: int, count: int) -> NDArray[np.int64]:
    """At most `count` different frames from the first to the last of `length`, int64, ascending."""
    if count < 1:
        raise UsageError(f"A contact sheet with {count} frames is none, expected at least 1.")
    return np.unique(np.linspace(0, length - 1, min(count, length)).round().astype(np.int64))


def write_contact_sheet(
    opened: InspectedDataset, position: int, cameras: list[str], path: Path, num_pictures: int
) -> None:
    """Decode frames through the sidecar, as training does, and write them as a PNG, atomically.

    Raises:
        DecodeError: A picture cannot be decoded.
        TimestampError: A row has no picture.
    """
    loader = EpisodeLoader(
        opened.store, opened.layout, opened.tracks, tolerance_s=_TOLERANCE_S, metrics=LoaderMetrics()
    )
    pool = DecoderPool(1)
    try:
        record = loader.load(position)
        frames = evenly_spaced(len(record), num_pictures)
        blocks = []
        for key in cameras:
            pictures = _decode(record.cameras[key], frames, pool)
            title = f"episode {record.episode_index}  {key}"
            blocks.append(_block(title, pictures, frames.tolist(), record.rows.timestamp_s[frames].tolist()))
    finally:
        pool.close()
        loader.close()
    sheet = Image.new("RGB", (max(b.width for b in blocks), sum(b.height for b in blocks)), _BACKGROUND)
    top = 0
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height
    data = io.BytesIO()
    sheet.save(data, format="PNG")
    write_atomically(path, data.getvalue())


def _decode(camera: CameraRecord, frames: NDArray[np.int64], pool: DecoderPool) -> list[Image.Image]:
    ranks = camera.ranks_of(frames).tolist()
    found: dict[int, Image.Image] = {}
    # Several rows may show the same picture; a decoder gives it once.
    distinct = list(dict.fromkeys(ranks))

    def take(position: int, picture: av.VideoFrame, converter: PictureConverter) -> None:
        found[distinct[position]] = _image(picture)

    decode_pictures(camera.clip, distinct, take, pool)
    return [found[rank] for rank in ranks]


def _image(picture: av.VideoFrame) -> Image.Image:
    if picture.format.name.startswith("gray1"):
        # Depth codes: stretched to their own range, because most of a scene lies in a small part of it.
        plane = picture.planes[0]
        rows = np.frombuffer(memoryview(plane), dtype="<u2").reshape(picture.height, plane.line_size // 2)
        codes = rows[:, : picture.width].astype(np.float64)
        low, high = float(codes.min()), float(codes.max())
        scaled = (codes - low) * (255.0 / (high - low) if high > low else 0.0)
        return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")
    return Image.fromarray(picture.to_ndarray(format="rgb24"))


def _block(title: str, pictures: list[Image.Image], frames: list[int], times_s: list[float]) -> Image.Image:
    """One camera: a title, then lines of thumbnails with frame number and time below each."""
    width = min(_THUMB_WIDTH, pictures[0].width)
    height = max(1, round(pictures[0].height * width / pictures[0].width))
    columns = min(_PER_LINE, len(pictures))
    lines = -(-len(pictures) // columns)
    cell_width, cell_height = max(width, 96) + _MARGIN, height + _TEXT_HEIGHT + _MARGIN
    block_width = max(columns * cell_width + _MARGIN, 6 * len(title) + 2 * _MARGIN)
    block = Image.new("RGB", (block_width, _TEXT_HEIGHT + lines * cell_height), _BACKGROUND)
    draw = ImageDraw.Draw(block)
    font = ImageFont.load_default()
    # The built-in font may have Latin letters only.
    draw.text((_MARGIN, 1), title.encode("ascii", "backslashreplace").decode(), fill=_INK, font=font)
    for place, (picture, frame, time_s) in enumerate(zip(pictures, frames, times_s, strict=True)):
        left = _MARGIN + place % columns * cell_width
        top = _TEXT_HEIGHT + place // columns * cell_height
        block.paste(picture.resize((width, height), Image.Resampling.BILINEAR), (left, top))
        draw.text((left, top + height + 1), f"{frame}  {time_s:.2f} s", fill=_INK, font=font)
    return block
