"""Real LeRobot files: tables equal FFmpeg's, every episode's mini-MP4 equals the whole file (MP-1, MP-6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from lrstream.mp4.span import SpanFinder
from lrstream.mp4.synthesis import mini_mp4, mini_mp4_size, mini_mp4_time_offset_s
from tests.media.test_parser import assert_equals_demuxer
from tests.support.media import decode, index
from tests.support.shared import PROJECT, SHARED, requires_shared

ROOT = PROJECT if SHARED is None else SHARED / "datasets"
FILES = [] if SHARED is None else sorted(ROOT.glob("*/videos/*/chunk-*/file-*.mp4"))

pytestmark = requires_shared


def _name(path: Path) -> str:
    return "/".join(path.relative_to(ROOT).parts[::2])


class Interval(NamedTuple):
    episode_index: int
    length: int
    from_s: float
    to_s: float


def _intervals(path: Path) -> list[Interval]:
    """Episodes in one video file, read from the episodes table."""
    root = ROOT / path.relative_to(ROOT).parts[0]
    camera = path.parts[-3]
    place = (int(path.parent.name.removeprefix("chunk-")), int(path.stem.removeprefix("file-")))
    prefix = f"videos/{camera}/"
    columns = ["episode_index", "length"]
    columns += [prefix + name for name in ("chunk_index", "file_index", "from_timestamp", "to_timestamp")]
    table = pq.read_table(str(next(root.glob("meta/episodes/*/*.parquet"))), columns=columns)
    return [
        Interval(
            row["episode_index"], row["length"], row[prefix + "from_timestamp"], row[prefix + "to_timestamp"]
        )
        for row in table.to_pylist()
        if (row[prefix + "chunk_index"], row[prefix + "file_index"]) == place
    ]


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_tables_equal_the_demuxers(path: Path) -> None:
    data = path.read_bytes()
    assert_equals_demuxer(index(data, path.name), data)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_every_episode_decodes_as_in_the_whole_file(path: Path) -> None:
    data = path.read_bytes()
    track = index(data, path.name)
    whole: dict[int, NDArray[np.uint8]] = {round(time * 1e5): picture for time, picture in decode(data)}
    fps = json.loads((ROOT / path.relative_to(ROOT).parts[0] / "meta/info.json").read_text())["fps"]
    finder = SpanFinder(track.samples)
    intervals = _intervals(path)
    assert intervals
    for interval in intervals:
        span = finder.find(interval.from_s, interval.to_s)
        mini = mini_mp4(track, span, data[span.start_byte : span.stop_byte])
        assert len(mini) == mini_mp4_size(track, span)
        offset = mini_mp4_time_offset_s(track, span)
        ours = {round((time + offset) * 1e5): picture for time, picture in decode(mini)}
        for frame in range(interval.length):
            time = round((interval.from_s + frame / fps) * 1e5)
            place = next(each for each in (time, time - 1, time + 1) if each in whole)
            nearest = next(each for each in (place, place - 1, place + 1) if each in ours)
            np.testing.assert_array_equal(ours[nearest], whole[place], err_msg=f"{interval} frame {frame}")
