"""How many anchors still need each picture of an episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["PictureNeeds"]


class PictureNeeds:
    """Counts for one episode and one set of windows. Not thread-safe.

    Args:
        anchors: Frames of the episode that are still to be delivered, int.
        length: Frames of the episode.
        deltas: Frames that an anchor needs, relative to it; beyond the episode its first or last one.
    """

    def __init__(self, anchors: npt.NDArray[np.integer], length: int, deltas: Sequence[int]) -> None:
        self._last = length - 1
        self._deltas = tuple(deltas)
        wanted = np.clip(np.add.outer(anchors, np.array(deltas, dtype=np.int64)), 0, self._last)
        self.counts: list[int] = np.bincount(wanted.ravel(), minlength=length).tolist()
        """Needs of each frame that are not met yet; a clamped frame counts each time it is repeated."""

    def release(self, frame: int) -> list[int]:
        """Meet the needs of one anchor; returns the frames that nobody needs any more."""
        counts, last = self.counts, self._last
        freed = []
        for delta in self._deltas:
            wanted = frame + delta
            wanted = 0 if wanted < 0 else last if wanted > last else wanted
            counts[wanted] -= 1
            if counts[wanted] == 0:
                freed.append(wanted)
        return freed
