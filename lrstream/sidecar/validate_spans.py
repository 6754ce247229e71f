"""Whether episodes find their pictures in the videos they name.

Works on a sample table and the episode table alone; nothing is decoded. Times are compared as the
loader compares them: the picture of row k is presented at ``from_timestamp + k / fps``, within the
tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lrstream.layout.episodes import CameraColumns
from lrstream.layout.layout import DatasetLayout
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.problems import Problem
from lrstream.timebase import row_tolerance_s

__all__ = ["check_file"]

_METADATA_HINT = (
    "from_timestamp, to_timestamp or the file number of this episode in meta/episodes do not belong to this "
    "video; convert the dataset again, or restore the file."
)


def check_file(
    track: TrackIndex, layout: DatasetLayout, positions: NDArray[np.int64], *, tolerance_s: float
) -> list[Problem]:
    """Check all episodes that lie in one video.

    Args:
        track: The video's index.
        layout: The dataset.
        positions: Positions of the episodes to check, ascending int64; others are not reported on.
        tolerance_s: Largest distance between a row's time and its picture's.

    Returns:
        Problems in order of camera and episode.
    """
    problems: list[Problem] = []
    for key, camera in layout.episodes.cameras.items():
        if track.file_path not in camera.files:
            continue
        here = np.flatnonzero(camera.file == camera.files.index(track.file_path))
        check = _FileCheck(track, layout, key, camera, tolerance_s)
        for position in here[np.isin(here, positions)].tolist():
            problems += check.episode(position)
        problems += check.overlaps(here, positions)
    return problems


class _FileCheck:
    """One camera's episodes in one file."""

    def __init__(
        self, track: TrackIndex, layout: DatasetLayout, key: str, camera: CameraColumns, tolerance_s: float
    ) -> None:
        self._track = track
        self._episodes = layout.episodes
        self._fps = float(layout.info.fps)
        self._key = key
        self._camera = camera
        self._tolerance_s = tolerance_s
        samples = track.samples
        self._order = np.argsort(samples.pts_s, kind="stable")
        self._times = samples.pts_s[self._order]
        last = samples.pts_s + samples.durations_ticks / track.timescale
        self._end_s = float(last.max())

    def episode(self, position: int) -> Iterator[Problem]:
        """Problems of one episode."""
        from_s, to_s = float(self._camera.from_s[position]), float(self._camera.to_s[position])
        length = int(self._episodes.length[position])
        relative_s = np.arange(length, dtype=np.float64) / self._fps
        wanted = from_s + relative_s
        tolerance = row_tolerance_s(relative_s.astype(np.float32), self._tolerance_s)
        nearest = self._nearest(wanted)
        distance = np.abs(self._times[nearest] - wanted)
        missing = distance > tolerance
        if missing.any():
            yield self._missing(position, wanted, distance, missing)
            return
        first_sync = int(self._track.samples.sync_samples[0])
        orphans = int((self._order[nearest] < first_sync).sum())
        if orphans:
            yield self._problem(
                "picture-undecodable",
                position,
                f"{orphans} of {length} pictures precede the first keyframe of the file, sample {first_sync}",
                "Encode the video again so that it begins with a keyframe.",
            )
        # Ends of intervals are sums of rounded durations, so each is given the tolerance.
        inside = np.searchsorted(self._times, (from_s - self._tolerance_s, to_s - self._tolerance_s))
        found = int(inside[1] - inside[0])
        if found != length:
            yield self._problem(
                "picture-count",
                position,
                f"[{from_s:.6f}, {to_s:.6f}) s holds {found} pictures, but the episode has {length} frames",
                "Every row has its picture, so reading works; check to_timestamp and fps.",
                warning=True,
            )

    def overlaps(self, here: NDArray[np.int64], reported: NDArray[np.int64]) -> Iterator[Problem]:
        """Neighbours in time that share a stretch of the video."""
        by_time = here[np.argsort(self._camera.from_s[here], kind="stable")]
        from_s, to_s = self._camera.from_s[by_time], self._camera.to_s[by_time]
        # Against the furthest end so far, since a long episode may cover several others.
        furthest = np.maximum.accumulate(to_s)
        for at in np.flatnonzero(from_s[1:] < furthest[:-1] - self._tolerance_s).tolist():
            other = int(np.argmax(to_s[: at + 1]))
            one, two = int(by_time[other]), int(by_time[at + 1])
            if not np.isin((one, two), reported).any():
                continue
            yield self._problem(
                "episodes-overlap",
                two,
                f"begins at {from_s[at + 1]:.6f} s, but episode {self._episodes.episode_index[one]} of the "
                f"same file lasts until {to_s[other]:.6f} s",
                _METADATA_HINT,
            )

    def _nearest(self, wanted: NDArray[np.float64]) -> NDArray[np.intp]:
        """Place in presentation order of the picture nearest to each time."""
        right = np.clip(np.searchsorted(self._times, wanted), 1, max(len(self._times) - 1, 1))
        right = np.minimum(right, len(self._times) - 1)
        left = np.maximum(right - 1, 0)
        closer_left = wanted - self._times[left] <= self._times[right] - wanted
        return np.where(closer_left, left, right)

    def _missing(
        self,
        position: int,
        wanted: NDArray[np.float64],
        distance: NDArray[np.float64],
        missing: NDArray[np.bool_],
    ) -> Problem:
        if wanted[-1] > self._end_s + self._tolerance_s or wanted[0] < self._times[0] - self._tolerance_s:
            return self._problem(
                "span-outside-file",
                position,
                f"its rows need pictures from {wanted[0]:.6f} to {wanted[-1]:.6f} s, but the file has them "
                f"from {self._times[0]:.6f} to {self._times[-1]:.6f} s ({int(missing.sum())} of "
                f"{len(wanted)} are missing)",
                _METADATA_HINT,
            )
        first, worst = int(np.argmax(missing)), int(np.argmax(distance))
        return self._problem(
            "picture-missing",
            position,
            f"{int(missing.sum())} of {len(wanted)} rows have no picture within {self._tolerance_s:g} s; the "
            f"first is row {first} at {wanted[first]:.6f} s, the worst row {worst}, {distance[worst]:.6f} s "
            "away",
            _METADATA_HINT,
        )

    def _problem(self, code: str, position: int, text: str, hint: str, *, warning: bool = False) -> Problem:
        episode = int(self._episodes.episode_index[position])
        message = f"{self._track.file_path}: episode {episode}, camera {self._key!r}: {text}."
        return Problem(code, "warning" if warning else "error", self._track.file_path, episode, message, hint)
