"""How many anchors still need each picture of an episode."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["NeedTable", "count_needs", "needed_frames"]

Int64Array = npt.NDArray[np.int64]

# Frames that a table has room for at first.
_FEW_FRAMES = 4096


def needed_frames(
    anchors: Int64Array, first: int | Int64Array, last: int | Int64Array, deltas: Int64Array
) -> Iterator[Int64Array]:
    """Frames whose pictures anchors need, for one delta after the other: windows may be long.

    Args:
        anchors: int64[n], frames of one episode, or of several that are counted through.
        first: First frame of the episode, or of each anchor's episode.
        last: Last frame of it, included.
        deltas: int64[d], frames that an anchor needs, relative to it; beyond the episode its first or last
            one.

    Yields:
        int64[n], d times.
    """
    for delta in deltas.tolist():
        needed = anchors + delta
        np.maximum(needed, first, out=needed)
        np.minimum(needed, last, out=needed)
        yield needed


def count_needs(anchors: npt.NDArray[np.integer], length: int, deltas: Int64Array) -> Int64Array:
    """How many anchors need each frame of an episode.

    Args:
        anchors: int[n], frames of the episode.
        length: Frames of the episode.
        deltas: As in `needed_frames`.

    Returns:
        int64[length]; a clamped frame counts each time it is repeated.
    """
    counts = np.zeros(length, dtype=np.int64)
    for needed in needed_frames(anchors.astype(np.int64), 0, length - 1, deltas):
        counts += np.bincount(needed, minlength=length)
    return counts


class NeedTable:
    """Needs that are not met yet, of the episodes that are being delivered. Not thread-safe.

    Args:
        deltas: As in `needed_frames`.
        lengths: int64[n], frames of all episodes.
    """

    def __init__(self, deltas: Int64Array, lengths: Int64Array) -> None:
        self._deltas = deltas
        self._lasts = lengths - 1
        self._lengths = lengths
        self._bases = np.zeros(len(lengths), dtype=np.int64)  # place of each episode's first frame
        self._episodes: dict[int, None] = {}  # by base
        # Needs of each frame. One whose needs are met is below 1; its count is not used again.
        self._counts = np.empty(_FEW_FRAMES, dtype=np.int64)
        self._end = 0

    def add(self, episode: int, counts: Int64Array) -> None:
        """Take in an episode, with the needs of its frames."""
        if self._end + len(counts) > len(self._counts):
            self._make_room(len(counts))
        self._bases[episode] = self._end
        self._episodes[episode] = None
        self._counts[self._end : self._end + len(counts)] = counts
        self._end += len(counts)

    def remove(self, episode: int) -> None:
        """Forget an episode whose needs are all met."""
        del self._episodes[episode]

    def release(self, episodes: Int64Array, frames: Int64Array) -> Int64Array:
        """Meet the needs of anchors, one after the other.

        Args:
            episodes: int64[n], episode of each.
            frames: int64[n], frame of each.

        Returns:
            int64[n], how many pictures nobody needs any more after each.
        """
        bases = self._bases[episodes]
        needed: Int64Array = self._deltas[:, None] + (frames + bases)
        np.maximum(needed, bases, out=needed)
        np.minimum(needed, bases + self._lasts[episodes], out=needed)
        flat = needed.T.ravel()  # anchor by anchor
        counts = self._counts
        np.subtract.at(counts, flat, 1)
        met = (counts[flat] == 0).nonzero()[0]
        # Of several needs of a picture the last one lets it go: the one that remains in the count, as a
        # negative number.
        numbers = -1 - met
        places = flat[met]
        np.minimum.at(counts, places, numbers)
        last = met[counts[places] == numbers]
        return np.bincount(last // len(self._deltas), minlength=len(frames))

    def _make_room(self, more: int) -> None:
        """Close the gaps of episodes that are gone, and make the table larger where that is not enough."""
        old, bases = self._counts, self._bases
        pieces = [old[bases[e] : bases[e] + self._lengths[e]] for e in self._episodes]
        left = sum(map(len, pieces))
        self._counts = np.empty(max(_FEW_FRAMES, 2 * (left + more)), dtype=np.int64)
        self._end = 0
        for episode, piece in zip(self._episodes, pieces, strict=True):
            bases[episode] = self._end
            self._counts[self._end : self._end + len(piece)] = piece
            self._end += len(piece)
