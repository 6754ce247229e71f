"""One training sample from a loaded episode, equal to what LeRobot's map-style reader returns (LD-4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import av
import numpy as np
import torch
from numpy.typing import NDArray

from lrstream.errors import DecodeError
from lrstream.layout.info import Feature
from lrstream.streaming.decode import PictureSource
from lrstream.streaming.episode import CameraRecord, EpisodeRecord
from lrstream.streaming.pictures import (
    PictureConverter,
    convert_depth_unit,
    decode_image,
    depth_table,
    to_unit_range,
)
from lrstream.streaming.windows import WindowSpec

__all__ = ["ReturnUint8", "Sample", "SampleBuilder"]

Sample = dict[str, Any]
ReturnUint8 = bool | Literal["all"]


@dataclass(frozen=True, slots=True, eq=False)
class SampleBuilder:
    """Makes samples. Immutable and thread-safe; picklable if the transforms are.

    Attributes:
        features: All features of the dataset, by key.
        tasks: Task strings by ``task_index``.
        windows: Windows of the keys that have one.
        return_uint8: Whether RGB video stays uint8; "all" keeps 8-bit stored images so, too.
        depth_unit: Unit of depth, "m" or "mm".
        image_transforms: Applied to every RGB camera.
    """

    features: Mapping[str, Feature]
    tasks: Mapping[int, str]
    windows: WindowSpec
    return_uint8: ReturnUint8 = False
    depth_unit: str = "mm"
    image_transforms: Callable[[torch.Tensor], Any] | None = None
    _depth_tables: Mapping[str, NDArray[np.float32]] = field(init=False)
    _rgb_keys: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        tables = {
            key: depth_table(feature.depth, self.depth_unit)
            for key, feature in self.features.items()
            if feature.kind == "depth" and feature.depth is not None
        }
        rgb = tuple(key for key, feature in self.features.items() if feature.kind in ("video", "image"))
        object.__setattr__(self, "_depth_tables", tables)
        object.__setattr__(self, "_rgb_keys", rgb)

    def build(self, episode: EpisodeRecord, frame: int, pictures: PictureSource) -> Sample:
        """The sample around one frame, without image transforms.

        Args:
            episode: The loaded episode.
            frame: Anchor, in ``[0, len(episode))``.
            pictures: Where pictures come from.

        Raises:
            TimestampError: A row of the window has no picture.
            DecodeError: A picture cannot be decoded.
        """
        windows = self.windows.around(frame, len(episode))
        window_of = {key: windows[group] for key, group in self.windows.keys.items()}
        anchor = np.array([frame])
        sample: Sample = {}
        for key, camera in episode.cameras.items():
            frames = window_of[key].frames if key in window_of else anchor
            sample[key] = self._pictures(key, camera, frames, pictures)
        for key, column in episode.rows.arrays.items():
            # `...` makes a view of one row of any shape, also of scalars; without the copy a sample
            # would keep its whole episode in memory.
            rows = column[window_of[key].frames] if key in window_of else column[frame, ...].copy()
            sample[key] = torch.from_numpy(rows)
        for key, values in episode.rows.objects.items():
            feature = self.features[key]
            if feature.kind not in ("image", "depth_image"):
                sample[key] = values[frame]
            elif key in window_of:
                sample[key] = self._images(feature, values, window_of[key].frames, episode)
            else:
                sample[key] = self._images(feature, values, anchor, episode)[0]
        for key, window in window_of.items():
            sample[f"{key}_is_pad"] = torch.from_numpy(window.is_pad.copy())
        sample["task"] = self.tasks[int(episode.rows.arrays["task_index"][frame])]
        return sample

    def transform(self, sample: Sample) -> Sample:
        """Apply the image transforms to every RGB camera of a sample, in place."""
        if self.image_transforms is not None:
            for key in self._rgb_keys:
                sample[key] = self.image_transforms(sample[key])
        return sample

    def _pictures(
        self, key: str, camera: CameraRecord, frames: NDArray[np.int64], pictures: PictureSource
    ) -> torch.Tensor:
        """Pictures of some rows of one camera: CHW for one row, else TCHW."""
        ranks = camera.ranks_of(frames).tolist()
        # Repeated pictures (padding, or deltas given twice) are decoded once and copied.
        places: dict[int, int] = {}
        copies = [
            (place, first)
            for place, rank in enumerate(ranks)
            if (first := places.setdefault(rank, place)) != place
        ]
        table = self._depth_tables.get(key)
        target = _Target(list(places.values()), len(ranks), table)
        pictures.write(camera.clip, list(places), target)
        array = target.pictures
        for place, first in copies:
            array[place] = array[first]
        tensor = torch.from_numpy(array)
        if table is None and not self.return_uint8:
            tensor = to_unit_range(tensor)
        return tensor[0] if len(ranks) == 1 else tensor

    def _images(
        self, feature: Feature, values: list[bytes], frames: NDArray[np.int64], episode: EpisodeRecord
    ) -> torch.Tensor:
        """Stored images of some rows, TCHW."""
        images: dict[int, torch.Tensor] = {}
        for frame in frames.tolist():
            if frame not in images:
                images[frame] = self._image(feature, values[frame], frame, episode)
        try:
            return torch.stack([images[frame] for frame in frames.tolist()])
        except RuntimeError as error:
            raise DecodeError(
                f"Images of {feature.key} in episode {episode.episode_index} differ in size: {error}."
            ) from error

    def _image(self, feature: Feature, encoded: bytes, frame: int, episode: EpisodeRecord) -> torch.Tensor:
        try:
            image = decode_image(encoded, keep_uint8=self.return_uint8 == "all")
        except DecodeError as error:
            raise DecodeError(
                f"Frame {frame} of episode {episode.episode_index}, feature {feature.key}: {error.message}",
                hint=error.hint,
                episode_index=episode.episode_index,
                camera=feature.key,
                frame_index=frame,
            ) from error
        if feature.kind == "depth_image" and feature.depth is not None:
            return convert_depth_unit(image, feature.depth.unit, self.depth_unit)
        return image


class _Target:
    """Array that the pictures of one request are written into; as large as the first one says.

    Args:
        places: Place in the array of each picture of the request.
        count: Pictures that the array has room for.
        table: Depth of each code, or None for RGB.
    """

    def __init__(self, places: list[int], count: int, table: NDArray[np.float32] | None) -> None:
        self._places = places
        self._count = count
        self._table = table
        self._pictures: NDArray[Any] | None = None

    @property
    def pictures(self) -> NDArray[Any]:
        """uint8 ``(count, 3, H, W)``, or float32 ``(count, 1, H, W)`` for depth."""
        if self._pictures is None:
            raise DecodeError("No picture was decoded.")
        return self._pictures

    def __call__(self, position: int, picture: av.VideoFrame, converter: PictureConverter) -> None:
        if self._pictures is None:
            size = (picture.height, picture.width)
            if self._table is None:
                self._pictures = np.empty((self._count, 3, *size), dtype=np.uint8)
            else:
                self._pictures = np.empty((self._count, 1, *size), dtype=np.float32)
        out = self._pictures[self._places[position]]
        if self._table is None:
            converter.write_rgb(picture, out)
        else:
            converter.write_depth(picture, self._table, out)
