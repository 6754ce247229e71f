"""Which intervals of which source files a loader fetches, and which of them have checksums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.checksum_file import ChecksumFile

__all__ = ["Coverage", "Intervals", "coverage_of", "wanted_intervals"]

Intervals = dict[str, set[tuple[float, float]]]
"""``(from_s, to_s)`` of episodes, by source file."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many spans of a selection have checksums; a span is one episode of one camera.

    Attributes:
        num_spans: Spans in all.
        num_missing: Those without a checksum.
        first_missing: The first of them: episode index, camera and file.
    """

    num_spans: int
    num_missing: int
    first_missing: tuple[int, str, str] | None

    @property
    def is_complete(self) -> bool:
        """Whether every span has one."""
        return self.num_missing == 0


def wanted_intervals(layout: DatasetLayout, positions: NDArray[np.int64] | None = None) -> Intervals:
    """Intervals ``(from_s, to_s)`` of episodes by source file.

    Args:
        layout: The dataset.
        positions: Positions of the episodes; all when None.
    """
    chosen = np.arange(len(layout.episodes)) if positions is None else positions
    found: Intervals = {}
    for camera in layout.episodes.cameras.values():
        columns = (camera.file[chosen], camera.from_s[chosen], camera.to_s[chosen])
        for file, from_s, to_s in zip(*(column.tolist() for column in columns), strict=True):
            found.setdefault(camera.files[file], set()).add((from_s, to_s))
    return found


def coverage_of(
    checksums: ChecksumFile, layout: DatasetLayout, positions: NDArray[np.int64] | None = None
) -> Coverage:
    """Compare the intervals of episodes with those that have checksums.

    Raises:
        SidecarError: The checksums are damaged.
    """
    chosen = np.arange(len(layout.episodes)) if positions is None else positions
    known = checksums.intervals()
    num_spans = num_missing = 0
    first: tuple[int, str, str] | None = None
    for key, camera in layout.episodes.cameras.items():
        columns = (chosen, camera.file[chosen], camera.from_s[chosen], camera.to_s[chosen])
        for position, file, from_s, to_s in zip(*(column.tolist() for column in columns), strict=True):
            num_spans += 1
            if (camera.files[file], from_s, to_s) not in known:
                num_missing += 1
                if first is None:
                    first = (int(layout.episodes.episode_index[position]), key, camera.files[file])
    return Coverage(num_spans, num_missing, first)
