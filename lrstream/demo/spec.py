"""What a demonstration dataset holds: lengths, cameras, files and features, and nothing random.

The same spec always gives the same tables and the same painted pictures. Encoded bytes are the same
for one build of FFmpeg.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lrstream.demo.pictures import IDENTITY_HEIGHT, IDENTITY_WIDTH
from lrstream.errors import UsageError

__all__ = ["Codec", "DemoCamera", "DemoSpec", "DepthEncoding", "Extra", "WrittenDataset"]

Codec = Literal["h264", "hevc", "av1", "vp9", "depth"]
"""``depth`` is lossless HEVC of 12-bit gray (video), or a 16-bit TIFF (image)."""

Extra = Literal["string", "bool", "int64", "float2d", "language"]
"""Features beyond LeRobot's usual ones; the keys are in `lrstream.demo.features`."""


@dataclass(frozen=True, slots=True)
class DepthEncoding:
    """How 12-bit codes map to metres, in the parameters of LeRobot's depth videos.

    Attributes:
        min_m: Depth of code 0, metres.
        max_m: Depth of code 4095, metres.
        shift_m: Added before the logarithm, metres.
        use_log: Logarithmic steps, else linear ones.
    """

    min_m: float = 0.01
    max_m: float = 10.0
    shift_m: float = 3.5
    use_log: bool = True


@dataclass(frozen=True, slots=True)
class DemoCamera:
    """One camera of a demonstration dataset.

    Attributes:
        key: Feature key, ``observation.images.<name>``.
        height: Pixels, even; at least 16 unless the camera is a depth camera.
        width: Pixels, even; at least 96 unless the camera is a depth camera.
        codec: Coding of the pictures; for ``kind="image"`` only ``depth`` or not matters.
        gop: Distance between keyframes, pictures. Every episode starts with a keyframe in any case,
            because LeRobot encodes episodes one by one and joins the files.
        bframes: B-pictures between two others (H.264 and HEVC).
        open_gop: Let pictures before a keyframe in time refer across it (H.264 and HEVC).
        kind: Pictures in MP4 files, or encoded images inside the Parquet tables.
        episodes_per_file: Episodes in one MP4 file. Different numbers make the cameras roll over to
            their next file, and to a clock that starts at 0 again, at different episodes.
        depth: Quantization of a depth video.
    """

    key: str
    height: int
    width: int
    codec: Codec = "h264"
    gop: int = 2
    bframes: int = 0
    open_gop: bool = False
    kind: Literal["video", "image"] = "video"
    episodes_per_file: int = 4
    depth: DepthEncoding = DepthEncoding()

    @property
    def is_depth(self) -> bool:
        """Whether the pictures are depth maps."""
        return self.codec == "depth"

    def check(self) -> None:
        """Raise `UsageError` for sizes and numbers that cannot be written."""
        if self.height % 2 or self.width % 2 or self.height < 2 or self.width < 2:
            raise UsageError(
                f"Camera {self.key!r} has {self.height} x {self.width} pixels; height and width must be "
                "even and positive."
            )
        if not self.is_depth and (self.height < IDENTITY_HEIGHT or self.width < IDENTITY_WIDTH):
            raise UsageError(
                f"Camera {self.key!r} has {self.height} x {self.width} pixels; the identity blocks need at "
                f"least {IDENTITY_HEIGHT} x {IDENTITY_WIDTH}."
            )
        if self.gop < 1 or self.bframes < 0 or self.episodes_per_file < 1:
            raise UsageError(
                f"Camera {self.key!r}: gop and episodes_per_file must be at least 1 and bframes at least 0, "
                f"got {self.gop}, {self.episodes_per_file} and {self.bframes}."
            )


_DEMO_LENGTHS = (57, 31, 64, 42, 75, 48, 20, 66, 53, 39, 71, 34)
_DEMO_CAMERAS = (
    DemoCamera("observation.images.top", 96, 128, episodes_per_file=5),
    DemoCamera("observation.images.wrist", 120, 160, episodes_per_file=4),
)


@dataclass(frozen=True, slots=True)
class DemoSpec:
    """A whole demonstration dataset; the default has 12 episodes, 600 frames and two cameras.

    Attributes:
        episode_lengths: Frames of each episode, each at least 1.
        cameras: Cameras; the place in this tuple is the camera number in the painted identity.
        fps: Frames per second.
        episodes_per_data_file: Episodes in one Parquet file of rows.
        episodes_per_row_group: Episodes in one row group (LeRobot writes 1).
        episodes_per_metadata_file: Episodes in one file of ``meta/episodes``; None puts all in one.
        chunks_size: Files in one ``chunk-XXX`` directory.
        tasks: Task strings; episode ``e`` has task ``e % len(tasks)``.
        extras: Additional features.
        faststart: Put `moov` before `mdat`, as LeRobot's joined files have it; else after it.
        episode_stats: Write the ``stats/*`` columns of ``meta/episodes``.
        seed: Of states, actions and textures.
    """

    episode_lengths: tuple[int, ...] = _DEMO_LENGTHS
    cameras: tuple[DemoCamera, ...] = _DEMO_CAMERAS
    fps: int = 30
    episodes_per_data_file: int = 4
    episodes_per_row_group: int = 1
    episodes_per_metadata_file: int | None = None
    chunks_size: int = 1000
    tasks: tuple[str, ...] = ("put the cube in the box", "open the drawer", "stack two cups")
    extras: tuple[Extra, ...] = ()
    faststart: bool = True
    episode_stats: bool = True
    seed: int = 0

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.episode_lengths)

    @property
    def num_frames(self) -> int:
        """Frames of all episodes together."""
        return sum(self.episode_lengths)

    def check(self) -> None:
        """Raise `UsageError` for anything that cannot be written; touches no file."""
        if not self.episode_lengths or min(self.episode_lengths) < 1:
            raise UsageError(f"Every episode needs at least one frame, got lengths {self.episode_lengths}.")
        if not self.tasks:
            raise UsageError("A dataset needs at least one task.")
        counts = [self.episodes_per_data_file, self.episodes_per_row_group, self.chunks_size, self.fps]
        if self.episodes_per_metadata_file is not None:
            counts.append(self.episodes_per_metadata_file)
        if min(counts) < 1:
            raise UsageError("fps, chunks_size and the numbers of episodes per file must be at least 1.")
        keys = [camera.key for camera in self.cameras]
        if len(set(keys)) != len(keys) or len(keys) > 16:
            raise UsageError(f"Camera keys must be distinct and at most 16, got {keys}.")
        for camera in self.cameras:
            camera.check()


@dataclass(frozen=True, slots=True)
class WrittenDataset:
    """Where a demonstration dataset lies and what is in it.

    Attributes:
        root: Dataset root.
        spec: What was written.
        data_files: Parquet files of rows, relative to the root with forward slashes.
        video_files: MP4 files by camera key, relative to the root; video cameras only.
    """

    root: Path
    spec: DemoSpec
    data_files: tuple[str, ...]
    video_files: dict[str, tuple[str, ...]]

    @property
    def episode_lengths(self) -> tuple[int, ...]:
        """Frames of each episode."""
        return self.spec.episode_lengths

    @property
    def num_frames(self) -> int:
        """Frames of all episodes together."""
        return self.spec.num_frames

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Keys of all cameras, in order of their numbers."""
        return tuple(camera.key for camera in self.spec.cameras)

    def frames(self) -> Iterator[tuple[int, int]]:
        """(episode_index, frame_index) of every row, in order of ``index``."""
        for episode, length in enumerate(self.spec.episode_lengths):
            for frame in range(length):
                yield episode, frame

    def identities(self, key: str) -> NDArray[np.int64]:
        """Painted (camera, episode, frame) of every row of one camera, int64, shape ``(num_frames, 3)``."""
        camera = self.camera_keys.index(key)
        rows = [(camera & 0xF, episode & 0xFF, frame & 0xFFF) for episode, frame in self.frames()]
        return np.array(rows, dtype=np.int64)
