"""Windows of history and future around an anchor, by index arithmetic inside its episode (LD-4).

A window never leaves the episode: beyond its ends the first or last frame is repeated and marked in
``{key}_is_pad``, whatever the length of the window (K07). The episode is always complete in memory, so
there is no buffer whose size could matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import UsageError
from lrstream.layout.info import Feature
from lrstream.streaming.gop_table import format_windows
from lrstream.timebase import readable_s

__all__ = ["Window", "WindowSpec", "delta_frames", "picture_windows"]

Int64Array = NDArray[np.int64]

# What can be stacked into one tensor.
_WINDOW_KINDS = frozenset({"video", "depth", "image", "depth_image", "numeric"})


class Window(NamedTuple):
    """Frames of one window.

    Attributes:
        frames: int64 ``(T,)``, frames of the episode, clamped to it.
        is_pad: bool ``(T,)``, whether a frame was clamped.
    """

    frames: Int64Array
    is_pad: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class WindowSpec:
    """The windows of all keys, in frames.

    Keys with equal deltas (the cameras of a robot, usually) share one computation.

    Attributes:
        keys: Keys with a window, in the order given by the user, and the number of their group.
        groups: Distinct deltas, int64 ``(T,)`` each.
    """

    keys: Mapping[str, int]
    groups: tuple[Int64Array, ...]

    @classmethod
    def parse(
        cls,
        delta_timestamps: Mapping[str, Sequence[float]] | None,
        features: Mapping[str, Feature],
        *,
        fps: float,
        tolerance_s: float,
        left_out: Collection[str] = (),
    ) -> WindowSpec:
        """Check what the user asked for.

        Args:
            delta_timestamps: Seconds relative to the anchor, by feature; None for no windows.
            features: Features that samples have.
            fps: Frames per second.
            tolerance_s: Largest distance from a multiple of ``1 / fps``.
            left_out: Features of the dataset that samples do not have.

        Raises:
            UsageError: An unknown key, a feature that has no windows, or a delta between two frames.
        """
        keys: dict[str, int] = {}
        numbers: dict[tuple[int, ...], int] = {}
        for key, deltas in (delta_timestamps or {}).items():
            feature = features.get(key)
            if key in left_out:
                raise UsageError(
                    f"delta_timestamps names {key!r}, which is not among the features asked for.",
                    hint="Add it to features, or leave out its window.",
                )
            if feature is None:
                raise UsageError(
                    f"delta_timestamps names {key!r}, which is no feature of the dataset.",
                    hint=f"Its features are {', '.join(features)}.",
                )
            if feature.kind not in _WINDOW_KINDS:
                raise UsageError(
                    f"delta_timestamps names {key!r}, but {feature.kind} features have no windows."
                )
            frames = tuple(delta_frames(key, deltas, fps=fps, tolerance_s=tolerance_s))
            keys[key] = numbers.setdefault(frames, len(numbers))
        return cls(keys, tuple(np.array(frames, dtype=np.int64) for frames in numbers))

    def around(self, frame: int, length: int) -> list[Window]:
        """The window of each group around a frame of an episode.

        Args:
            frame: The anchor, in ``[0, length)``.
            length: Frames of the episode.
        """
        windows = []
        for deltas in self.groups:
            wanted = deltas + frame
            frames = np.minimum(np.maximum(wanted, 0), length - 1)
            windows.append(Window(frames, frames != wanted))
        return windows


def picture_windows(windows: WindowSpec, cameras: Iterable[str]) -> str:
    """Windows of cameras in MP4 files as text (`format_windows`), for settings and states."""
    return format_windows(
        {
            camera: windows.groups[windows.keys[camera]].tolist() if camera in windows.keys else [0]
            for camera in cameras
        }
    )


def delta_frames(key: str, deltas: Sequence[float], *, fps: float, tolerance_s: float) -> list[int]:
    """Deltas in seconds as whole frames.

    Args:
        key: Feature, for messages.
        deltas: Seconds; negative is the past.
        fps: Frames per second.
        tolerance_s: Largest distance from a multiple of ``1 / fps``.

    Raises:
        UsageError: Nothing is asked for, or a delta is not a number or lies between two frames.
    """
    if isinstance(deltas, (str, bytes)) or not isinstance(deltas, (Sequence, np.ndarray)) or len(deltas) == 0:
        raise UsageError(f"delta_timestamps of {key!r} is {deltas!r}, expected a list of seconds.")
    try:
        seconds = [float(delta) for delta in deltas]
    except (TypeError, ValueError) as error:
        raise UsageError(f"delta_timestamps of {key!r} is {deltas!r}, expected a list of seconds.") from error
    not_finite = [delta for delta in seconds if not math.isfinite(delta)]
    if not_finite:
        raise UsageError(f"delta_timestamps of {key!r} contains {not_finite[0]}, expected seconds.")
    frames = [round(delta * fps) for delta in seconds]
    between = [
        delta
        for delta, number in zip(seconds, frames, strict=True)
        # Besides the tolerance the rounding of n / fps itself, so that 0 means what it says.
        if abs(delta * fps - number) / fps > tolerance_s + 2 * math.ulp(delta)
    ]
    if between:
        furthest = max(abs(delta - round(delta * fps) / fps) for delta in between)
        raise UsageError(
            f"delta_timestamps of {key!r} contains {', '.join(map(str, between[:5]))}, which lie between two "
            f"frames: they must be multiples of 1/{fps} s, but are up to {readable_s(furthest)} away; "
            f"allowed is {readable_s(tolerance_s)} (tolerance_s).",
            hint="Write them as n / fps.",
        )
    return frames
