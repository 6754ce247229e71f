"""Training samples from a loaded episode, each equal to what LeRobot's map-style reader returns (LD-4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lrstream.errors import DecodeError
from lrstream.layout.info import Feature
from lrstream.streaming.batches import BatchMemory, Place, Sample
from lrstream.streaming.coded import DecodeHook, run_hook
from lrstream.streaming.decode import PictureSource
from lrstream.streaming.episode import CameraRecord, EpisodeRecord
from lrstream.streaming.pictures import (
    convert_depth_unit,
    decode_image,
    depth_table,
    to_unit_range,
)
from lrstream.streaming.row_plan import row_plan
from lrstream.streaming.targets import CameraTarget
from lrstream.streaming.windows import Window, WindowSpec

__all__ = ["ReturnUint8", "Sample", "SampleBuilder"]

ReturnUint8 = bool | Literal["all"]

_PICTURES = frozenset({"video", "depth", "image", "depth_image"})


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
        decode_hooks: By camera of RGB video, what is called in place of decoding; its result is left alone.
    """

    features: Mapping[str, Feature]
    tasks: Mapping[int, str]
    windows: WindowSpec
    return_uint8: ReturnUint8 = False
    depth_unit: str = "mm"
    image_transforms: Callable[[torch.Tensor], Any] | None = None
    decode_hooks: Mapping[str, DecodeHook] = field(default_factory=dict)
    _depth_tables: Mapping[str, NDArray[np.float32]] = field(init=False)
    _rgb_keys: tuple[str, ...] = field(init=False)
    _in_windows: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        tables = {
            key: depth_table(feature.depth, self.depth_unit)
            for key, feature in self.features.items()
            if feature.kind == "depth" and feature.depth is not None
        }
        rgb = tuple(
            key
            for key, feature in self.features.items()
            if feature.kind in ("video", "image") and key not in self.decode_hooks
        )
        object.__setattr__(self, "_depth_tables", tables)
        object.__setattr__(self, "_rgb_keys", rgb)
        object.__setattr__(self, "_in_windows", frozenset(self.windows.keys))

    def build(
        self,
        episode: EpisodeRecord,
        frames: Sequence[int],
        source: PictureSource,
        *,
        memory: BatchMemory | None = None,
        places: Sequence[Place | None] | None = None,
    ) -> list[Sample]:
        """The samples around some frames of one episode, without image transforms.

        Pictures that several of them show, or that lie in one GOP, are decoded once.

        Args:
            episode: The loaded episode.
            frames: Anchors, in ``[0, len(episode))``.
            source: Where pictures come from.
            memory: What stacks the samples later; None = PyTorch.
            places: Rows of batches to write each sample into, as far as its tensors fit; None = new memory.

        Raises:
            TimestampError: A row of a window has no picture.
            DecodeError: A picture cannot be decoded.
        """
        if places is None:
            places = [None] * len(frames)
        samples = [Sample(memory, place) for place in places]
        length = len(episode)
        windows = [self.windows.around(frame, length) for frame in frames]
        for key, camera in episode.cameras.items():
            group = self.windows.keys.get(key)
            if group is None:
                ranks = [[camera.rank_of(frame)] for frame in frames]
            else:
                ranks = [camera.ranks_of(window[group].frames).tolist() for window in windows]
            self._add_pictures(key, camera, ranks, samples, source)
        plan = row_plan(episode.packed.dtype, self._in_windows)
        for frame, window, sample in zip(frames, windows, samples, strict=True):
            sample.put_row(plan, episode.packed, frame)
            self._add_others(episode, frame, window, sample)
            sample["task"] = self.tasks[int(episode.rows.arrays["task_index"][frame])]
        return samples

    @property
    def has_pictures(self) -> bool:
        """Whether there is anything to decode, be it video or stored images."""
        return any(feature.kind in _PICTURES for feature in self.features.values())

    def tensors_like(self, episode: EpisodeRecord) -> dict[str, torch.Tensor]:
        """Tensors of the shapes and types that those of this episode's samples will have, without values.

        Empty where that is not known beforehand: with hooks and transforms, or stored images. The sizes are
        those that files promise, pictures may turn out to be different.
        """
        if self.decode_hooks or self.image_transforms is not None:
            return {}
        if any(self.features[key].kind in ("image", "depth_image") for key in episode.rows.objects):
            return {}
        found: dict[str, torch.Tensor] = {}
        groups = self.windows.keys
        for key, camera in episode.cameras.items():
            size = camera.clip.config.height, camera.clip.config.width
            is_depth = key in self._depth_tables
            num_pictures = len(self.windows.groups[groups[key]]) if key in groups else 1
            shape = (1 if is_depth else 3, *size)
            found[key] = torch.empty(
                shape if num_pictures == 1 else (num_pictures, *shape),
                dtype=torch.uint8 if self.return_uint8 and not is_depth else torch.float32,
                device="meta",
            )
        for key, column in episode.rows.arrays.items():
            value = (
                column[0] if key not in groups else column[np.zeros_like(self.windows.groups[groups[key]])]
            )
            found[key] = torch.from_numpy(np.array(value))
        for key, group in groups.items():
            found[f"{key}_is_pad"] = torch.empty(len(self.windows.groups[group]), dtype=torch.bool)
        return found

    @property
    def video_keys(self) -> list[str]:
        """Cameras of RGB video."""
        return [key for key, feature in self.features.items() if feature.kind == "video"]

    def gop_of(self, episode: EpisodeRecord, frame: int) -> int:
        """What anchors of one episode have in common that are best built together; -1 = nothing known."""
        return episode.gop_of(frame)

    def _add_others(
        self, episode: EpisodeRecord, frame: int, windows: Sequence[Window], sample: Sample
    ) -> None:
        """Add windows of numeric features, and features that are neither numeric nor video."""
        groups = self.windows.keys
        for key, group in groups.items():
            if (column := episode.rows.arrays.get(key)) is not None:
                _put(sample, key, column[windows[group].frames])
        for key, values in episode.rows.objects.items():
            feature = self.features[key]
            in_window = groups.get(key)
            if feature.kind not in ("image", "depth_image"):
                sample[key] = values[frame]
            elif in_window is not None:
                sample[key] = self._images(feature, values, windows[in_window].frames, episode)
            else:
                sample[key] = self._images(feature, values, np.array([frame]), episode)[0]
        for key, group in groups.items():
            _put(sample, f"{key}_is_pad", windows[group].is_pad)

    def transform(self, sample: Sample) -> Sample:
        """Apply the image transforms to every RGB camera of a sample, in place."""
        if self.image_transforms is not None:
            for key in self._rgb_keys:
                sample[key] = self.image_transforms(sample[key])
        return sample

    def _add_pictures(
        self,
        key: str,
        camera: CameraRecord,
        ranks: list[list[int]],
        samples: Sequence[Sample],
        source: PictureSource,
    ) -> None:
        """Add one camera, of which each sample shows pictures by rank: CHW for one of them, else TCHW."""
        hook = self.decode_hooks.get(key)
        if hook is not None:
            for wanted, sample in zip(ranks, samples, strict=True):
                sample[key] = run_hook(hook, camera.clip, wanted, is_window=len(wanted) > 1)
            return
        table = self._depth_tables.get(key)
        is_scaled = table is None and not self.return_uint8
        # Transforms get pictures of their own; they may keep them.
        may_place = table is not None or self.image_transforms is None
        places = [_place_of(sample, key) if may_place else None for sample in samples]
        target = CameraTarget(ranks, table, [None] * len(samples) if is_scaled else places)
        source.write(camera.clip, target.ranks, target)
        for sample, place, array in zip(samples, places, target.arrays, strict=True):
            pictures = to_unit_range(array, place) if is_scaled else array
            _add(sample, key, pictures, is_placed=pictures is place)

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


def _place_of(sample: Sample, key: str) -> NDArray[Any] | None:
    """Where the tensor of a key of this sample belongs in its batch."""
    place = sample.place
    if place is None or not place.lease.has_rows(key):
        return None
    array = place.lease.arrays[key]
    part: NDArray[Any] = array[place.row, ...]
    return part


def _put(sample: Sample, key: str, values: NDArray[Any]) -> None:
    """Add a tensor with a copy of some values, in the sample's row of its batch if they fit there."""
    place = _place_of(sample, key)
    if place is not None and place.shape == values.shape and place.dtype == values.dtype:
        place[...] = values
        _add(sample, key, place, is_placed=True)
    else:
        _add(sample, key, np.array(values), is_placed=False)


def _add(sample: Sample, key: str, values: NDArray[Any], *, is_placed: bool) -> None:
    """Add an array as a tensor, which is left to stacking if it is the batch's row."""
    if is_placed:
        sample.filled.append(key)
    else:
        sample[key] = torch.from_numpy(values)
