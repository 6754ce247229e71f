"""A dataset of any number of small video files, without encoding each of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lrstream.demo import DemoCamera, DemoSpec, write_dataset
from tests.support.faults import edit_info

__all__ = ["CAMERA", "change_video", "video_path", "write_many_files"]

CAMERA = "observation.images.top"


def video_path(number: int) -> str:
    """Path of a video relative to the root."""
    return f"videos/{CAMERA}/chunk-000/file-{number:03d}.mp4"


def write_many_files(root: Path, count: int, frames: int = 2) -> Path:
    """Write a dataset of `count` episodes of `frames` frames, each in an MP4 file of its own content.

    Only metadata and videos are complete: there are rows for the first episode alone.
    """
    work = root.with_name(root.name + ".one")
    write_dataset(work, DemoSpec((frames,), (DemoCamera(CAMERA, 16, 96),), fps=10))
    shutil.move(work, root)
    (table_path,) = (root / "meta/episodes").rglob("*.parquet")
    table = pq.read_table(table_path)
    (row,) = table.to_pylist()
    rows = [
        row
        | {
            "episode_index": number,
            "dataset_from_index": frames * number,
            "dataset_to_index": frames * (number + 1),
            f"videos/{CAMERA}/file_index": number,
        }
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), table_path)
    edit_info(root, lambda info: info.update(total_episodes=count, total_frames=frames * count))
    video = (root / video_path(0)).read_bytes()
    for number in range(count):
        (root / video_path(number)).write_bytes(video + _filler(number))
    return root


def change_video(root: Path, number: int, version: int) -> None:
    """Put other content of the same size in the place of a video, in one step."""
    path = root / video_path(number)
    data = path.read_bytes()
    other = path.with_name(path.name + ".new")
    other.write_bytes(data[:-16] + _filler(number, version))
    other.replace(path)


def _filler(number: int, version: int = 0) -> bytes:
    """A `free` box that differs in every file."""
    return (16).to_bytes(4, "big") + b"free" + number.to_bytes(4, "big") + version.to_bytes(4, "big")
