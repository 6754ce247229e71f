"""Where the GOPs of episodes lie, as the planner needs it: arrays, no bytes of any file.

A *unit* is what the strategy `gop` decodes at once: the frames of an episode from one boundary to the
next. Boundaries are the keyframes of the camera with the longest GOPs, the first one named where
several are equal; other cameras are cut at the same frames. Where that is inside one of their GOPs,
both units decode it from its own keyframe, so such a GOP is decoded twice, once for each side. Runs of
GOPs shorter than `LEAST_UNIT_FRAMES` are joined: entering and leaving a decoder costs as much as a
picture or two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lrstream.errors import UsageError

__all__ = ["LEAST_UNIT_FRAMES", "GopTable", "PictureGroup", "format_windows", "parse_windows", "units_of"]

LEAST_UNIT_FRAMES = 8

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def units_of(keyframes: Sequence[Int32Array], length: int) -> Int32Array:
    """First frames of an episode's units.

    Args:
        keyframes: For each camera the frames that decoding can begin at, ascending, within ``[0, length)``;
            0 may be missing where the episode begins inside a GOP.
        length: Frames of the episode, at least 1.

    Returns:
        int32, ascending, first one 0.
    """
    longest = min(keyframes, key=len, default=np.empty(0, dtype=np.int32))
    starts = [0]
    for frame in longest.tolist():
        # A short rest stays with the unit before it, so that no unit but a whole episode is short.
        if frame - starts[-1] >= LEAST_UNIT_FRAMES and length - frame >= LEAST_UNIT_FRAMES:
            starts.append(frame)
    return np.array(starts, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PictureGroup:
    """Cameras whose pictures an anchor needs at the same frames.

    Attributes:
        deltas: These frames, relative to the anchor, ascending.
        cameras: Numbers of the cameras.
    """

    deltas: tuple[int, ...]
    cameras: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GopTable:
    """Units and picture sizes of some episodes. Immutable.

    Attributes:
        cameras: Feature keys of the cameras in MP4 files.
        starts: First frames of all units, int32, episode after episode.
        offsets: int64[n + 1], place of each episode's first unit in `starts`.
        picture_bytes: int64[n, cameras], most bytes of one decoded picture.
    """

    cameras: tuple[str, ...]
    starts: Int32Array
    offsets: Int64Array
    picture_bytes: Int64Array

    @classmethod
    def whole_episodes(cls, num_episodes: int) -> GopTable:
        """One unit for each episode and no picture: what episodes without video are."""
        return cls(
            (),
            np.zeros(num_episodes, dtype=np.int32),
            np.arange(num_episodes + 1, dtype=np.int64),
            np.zeros((num_episodes, 0), dtype=np.int64),
        )

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.offsets) - 1

    def units(self, episode: int) -> Int32Array:
        """First frames of one episode's units, int32, first one 0."""
        return self.starts[self.offsets[episode] : self.offsets[episode + 1]]

    def take(self, episodes: Int64Array) -> GopTable:
        """The table of some of the episodes, in the order given."""
        first, counts = self.offsets[episodes], np.diff(self.offsets)[episodes]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        places = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)
        return GopTable(self.cameras, self.starts[places], offsets, self.picture_bytes[episodes])

    def spread(self, positions: Int64Array, num_episodes: int) -> GopTable:
        """The table of a selection of which only the episodes at `positions` (ascending) are known."""
        counts = np.zeros(num_episodes, dtype=np.int64)
        counts[positions] = np.diff(self.offsets)
        picture_bytes = np.zeros((num_episodes, len(self.cameras)), dtype=np.int64)
        picture_bytes[positions] = self.picture_bytes
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return GopTable(self.cameras, self.starts, offsets, picture_bytes)

    def groups(self, windows: str) -> tuple[PictureGroup, ...]:
        """Cameras by what an anchor needs of them.

        Args:
            windows: From `format_windows`; "" = no camera has a window.

        Raises:
            UsageError: It names other cameras than there are.
        """
        deltas_of = parse_windows(windows)
        if deltas_of and set(deltas_of) != set(self.cameras):
            raise UsageError(
                f"Units were planned for the cameras {', '.join(sorted(deltas_of))}, but the cameras here "
                f"are {', '.join(sorted(self.cameras))}.",
                hint="Read the same cameras as before, or start the epoch anew.",
            )
        found: dict[tuple[int, ...], list[int]] = {}
        for number, camera in enumerate(self.cameras):
            found.setdefault(deltas_of.get(camera, (0,)), []).append(number)
        return tuple(PictureGroup(deltas, tuple(numbers)) for deltas, numbers in found.items())


def format_windows(deltas: Mapping[str, Sequence[int]]) -> str:
    """Windows of all cameras as text, for settings and states: ``camera:-2,-1,0``, one a line.

    Args:
        deltas: Frames relative to the anchor, by camera; ``[0]`` where there is no window. Order and
            repetitions do not matter here.
    """
    return "\n".join(
        f"{camera}:{','.join(str(delta) for delta in sorted({int(delta) for delta in deltas[camera]}))}"
        for camera in sorted(deltas)
    )


def parse_windows(text: str) -> dict[str, tuple[int, ...]]:
    """What `format_windows` was given, ascending and without repetitions.

    Raises:
        UsageError: The text is something else.
    """
    windows = {}
    for line in filter(None, text.split("\n")):
        camera, _, numbers = line.rpartition(":")
        try:
            windows[camera] = tuple(int(number) for number in numbers.split(","))
        except ValueError as error:
            raise UsageError(f"picture_windows has the line {line!r}, expected 'camera:-1,0'.") from error
    return windows
