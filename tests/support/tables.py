"""Datasets without pictures, written column by column, so that any part can be made wrong.

`TableDataset` holds what would be written as plain Python values; a test changes what it wants to
see refused and calls `write`. Nothing here comes from the package under test.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
FPS = 10


def scalar(dtype: str) -> dict[str, Any]:
    """Declaration of a scalar feature."""
    return {"dtype": dtype, "shape": [1], "names": None}


class TableDataset:
    """Metadata and rows of a small dataset.

    Args:
        lengths: Frames of each episode.
        cameras: Video keys; their MP4 files are named in the metadata but not written.
        files: For each episode the number of its Parquet file (and of each camera's MP4).

    Attributes:
        info: Content of info.json.
        episodes: Columns of meta/episodes.
        rows: Columns of each data file, by file number.
        arrow_types: Types of row columns that should not be left to inference.
    """

    def __init__(
        self,
        lengths: Sequence[int] = (5, 7, 9),
        cameras: Sequence[str] = ("observation.images.top",),
        files: Sequence[int] | None = None,
    ) -> None:
        files = list(files) if files is not None else [0] * len(lengths)
        starts = [sum(lengths[:episode]) for episode in range(len(lengths))]
        self.info: dict[str, Any] = {
            "codebase_version": "v3.0",
            "fps": FPS,
            "features": {
                "observation.state": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
                **{
                    key: {"dtype": "video", "shape": [16, 16, 3], "names": ["height", "width", "channels"]}
                    for key in cameras
                },
                "timestamp": scalar("float32"),
                **{name: scalar("int64") for name in ("frame_index", "episode_index", "index", "task_index")},
            },
            "total_episodes": len(lengths),
            "total_frames": sum(lengths),
            "chunks_size": 1000,
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if cameras else None,
        }
        self.tasks = ["pick", "place"]
        self.episodes: dict[str, list[Any]] = {
            "episode_index": list(range(len(lengths))),
            "tasks": [[self.tasks[episode % 2]] for episode in range(len(lengths))],
            "length": list(lengths),
            "dataset_from_index": starts,
            "dataset_to_index": [start + length for start, length in zip(starts, lengths, strict=True)],
            "data/chunk_index": [0] * len(lengths),
            "data/file_index": list(files),
        }
        for key in cameras:
            clock = dict.fromkeys(files, 0.0)
            begins, ends = [], []
            for length, file in zip(lengths, files, strict=True):
                begins.append(clock[file])
                clock[file] += length / FPS
                ends.append(clock[file])
            self.episodes |= {
                f"videos/{key}/chunk_index": [0] * len(lengths),
                f"videos/{key}/file_index": list(files),
                f"videos/{key}/from_timestamp": begins,
                f"videos/{key}/to_timestamp": ends,
            }
        self.rows: dict[int, dict[str, list[Any]]] = {}
        for episode, (length, file) in enumerate(zip(lengths, files, strict=True)):
            table = self.rows.setdefault(file, {name: [] for name in _ROW_TYPES})
            for frame in range(length):
                table["observation.state"].append([float(episode), float(frame)])
                table["timestamp"].append(frame / FPS)
                table["frame_index"].append(frame)
                table["episode_index"].append(episode)
                table["index"].append(starts[episode] + frame)
                table["task_index"].append(episode % 2)
        self.arrow_types: dict[str, pa.DataType] = dict(_ROW_TYPES)

    def add_rows(self, name: str, declared: dict[str, Any], values: Sequence[Any], kind: pa.DataType) -> None:
        """Add a column with one value for each row of the dataset, in file order."""
        self.info["features"][name] = declared
        self.arrow_types[name] = kind
        remaining = iter(values)
        for table in self.rows.values():
            table[name] = [next(remaining) for _ in table["index"]]

    def write(self, root: Path, *, row_group_size: int = 1000, statistics: bool = True) -> Path:
        """Write everything under ``root`` and return it."""
        (root / "meta/episodes/chunk-000").mkdir(parents=True)
        (root / "data/chunk-000").mkdir(parents=True)
        (root / "meta/info.json").write_text(json.dumps(self.info), encoding="utf-8")
        pq.write_table(
            pa.table({"task_index": list(range(len(self.tasks))), "__index_level_0__": self.tasks}),
            root / "meta/tasks.parquet",
        )
        pq.write_table(pa.table(self.episodes), root / "meta/episodes/chunk-000/file-000.parquet")
        for file, columns in self.rows.items():
            types = self.arrow_types
            pq.write_table(
                pa.table({name: pa.array(values, types[name]) for name, values in columns.items()}),
                root / DATA_PATH.format(chunk_index=0, file_index=file),
                row_group_size=row_group_size,
                write_statistics=statistics,
            )
        return root


_ROW_TYPES = {
    "observation.state": pa.list_(pa.float32(), 2),
    "timestamp": pa.float32(),
    "frame_index": pa.int64(),
    "episode_index": pa.int64(),
    "index": pa.int64(),
    "task_index": pa.int64(),
}
