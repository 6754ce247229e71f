"""Units of episodes from the index alone, before any byte of a picture is read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lrstream.layout.episodes import EpisodeTable
from lrstream.streaming.gop_table import GopTable, units_of
from lrstream.streaming.sources import EpisodeSpans, VideoFiles

__all__ = ["gop_table"]


def gop_table(
    episodes: EpisodeTable,
    files: VideoFiles,
    spans: EpisodeSpans,
    positions: NDArray[np.int64],
    *,
    fps: float,
) -> GopTable:
    """Where units of episodes begin, and how large their pictures are.

    Frames are found by their nominal times. Where rows are at other times, a unit may begin some frames
    beside its keyframe: that costs decoding, but no picture is a wrong one.

    Args:
        episodes: The episode table.
        files: The source files.
        spans: Spans of the episodes in them.
        positions: int64[n], the episodes, as positions in the table.
        fps: Frames per second of the rows.

    Raises:
        TimestampError: The metadata of an episode do not fit its video.
    """
    wanted = np.asarray(positions, dtype=np.int64)
    if not episodes.cameras:
        return GopTable.whole_episodes(len(wanted))
    keyframes: list[list[NDArray[np.int32]]] = [[] for _ in wanted]
    picture_bytes = np.zeros((len(wanted), len(episodes.cameras)), dtype=np.int64)
    for number, (camera, columns) in enumerate(episodes.cameras.items()):
        # File by file, so that each sample table is looked at once.
        places = np.argsort(columns.file[wanted], kind="stable").tolist()
        for place in places:
            position = int(wanted[place])
            span = spans.span(position, camera)
            with files.use(columns.path(position)) as file:
                samples = file.track.samples
                first, last = np.searchsorted(samples.sync_samples, (span.first_sample, span.stop_sample))
                times_s = samples.pts_s[samples.sync_samples[first:last]]
                picture_bytes[place, number] = file.picture_bytes
            frames = np.rint((times_s - float(columns.from_s[position])) * fps).astype(np.int64)
            frames = np.unique(frames[(frames > 0) & (frames < int(episodes.length[position]))])
            keyframes[place].append(frames.astype(np.int32))
    units = [
        units_of(of_cameras, int(episodes.length[position]))
        for of_cameras, position in zip(keyframes, wanted.tolist(), strict=True)
    ]
    return GopTable(
        tuple(episodes.cameras),
        np.concatenate([np.empty(0, dtype=np.int32), *units]),
        np.cumsum([0, *map(len, units)], dtype=np.int64),
        picture_bytes,
    )
