"""Write a whole demonstration dataset in the layout of LeRobotDataset v3.0."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lrstream.demo.features import episode_columns, feature_entries, numeric_keys, row_schema
from lrstream.demo.pictures import DEPTH_CODE_MAX, Painter, depth_codes
from lrstream.demo.spec import DemoCamera, DemoSpec, WrittenDataset
from lrstream.demo.video import write_video
from lrstream.errors import UsageError

__all__ = ["write_dataset"]

_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def write_dataset(root: Path | str, spec: DemoSpec | None = None) -> WrittenDataset:
    """Write a dataset; `root` appears complete or not at all.

    Args:
        root: Directory to create. It may exist if it is empty.
        spec: What to write; None for the default demonstration.

    Returns:
        Paths and contents of what was written.

    Raises:
        UsageError: `root` is not empty or not a directory, the spec cannot be written, or an encoder is
            missing. Nothing has been changed.
    """
    spec = DemoSpec() if spec is None else spec
    spec.check()
    root = Path(root)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UsageError(
            f"{root} exists and is not an empty directory; a demonstration dataset never overwrites.",
            hint="Choose another directory, or remove this one yourself.",
        )
    root.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        unfinished = work / "dataset"
        unfinished.mkdir()
        data_files, video_files = _Writer(unfinished, spec).write()
        if root.exists():
            root.rmdir()
        unfinished.rename(root)
    finally:
        shutil.rmtree(work)
    return WrittenDataset(root, spec, data_files, video_files)


class _Writer:
    def __init__(self, root: Path, spec: DemoSpec) -> None:
        self._root = root
        self._spec = spec
        self._painters = {
            camera.key: Painter(number, camera.height, camera.width, spec.seed)
            for number, camera in enumerate(spec.cameras)
            if not camera.is_depth
        }

    def write(self) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        spec = self._spec
        columns = [episode_columns(spec, episode, self._painters) for episode in range(spec.num_episodes)]
        data_files = self._write_rows(columns)
        video_files = {
            camera.key: self._write_videos(number, camera)
            for number, camera in enumerate(spec.cameras)
            if camera.kind == "video"
        }
        stats = [self._episode_stats(episode, columns[episode]) for episode in range(spec.num_episodes)]
        self._write_episodes(stats)
        self._write_tasks()
        self._write_json("meta/info.json", self._info())
        self._write_json("meta/stats.json", self._dataset_stats(columns, stats))
        return data_files, video_files

    # Rows and videos ------------------------------------------------------------------------------

    def _write_rows(self, columns: list[dict[str, Any]]) -> tuple[str, ...]:
        spec, schema = self._spec, row_schema(self._spec)
        paths = []
        for number, episodes in enumerate(_groups(spec.num_episodes, spec.episodes_per_data_file)):
            path = _DATA_PATH.format(**self._place(number))
            with pq.ParquetWriter(self._file(path), schema, compression="snappy") as writer:
                for start in range(0, len(episodes), spec.episodes_per_row_group):
                    group = episodes[start : start + spec.episodes_per_row_group]
                    tables = [_table(columns[episode], schema) for episode in group]
                    table = pa.concat_tables(tables)
                    writer.write_table(table, row_group_size=len(table))
            paths.append(path)
        return tuple(paths)

    def _write_videos(self, number: int, camera: DemoCamera) -> tuple[str, ...]:
        paths = []
        for file_number, episodes in enumerate(_groups(self._spec.num_episodes, camera.episodes_per_file)):
            path = _VIDEO_PATH.format(video_key=camera.key, **self._place(file_number))
            pictures = (self._pictures(number, camera, episode) for episode in episodes)
            write_video(self._file(path), camera, self._spec.fps, pictures, faststart=self._spec.faststart)
            paths.append(path)
        return tuple(paths)

    def _pictures(self, number: int, camera: DemoCamera, episode: int) -> Iterator[NDArray[Any]]:
        for frame in range(self._spec.episode_lengths[episode]):
            yield self._picture(number, camera, episode, frame)

    def _picture(self, number: int, camera: DemoCamera, episode: int, frame: int) -> NDArray[Any]:
        if camera.is_depth:
            return depth_codes(number, episode, frame, camera.height, camera.width)
        return self._painters[camera.key].paint(episode, frame)

    # Metadata -------------------------------------------------------------------------------------

    def _write_episodes(self, stats: list[dict[str, dict[str, Any]]]) -> None:
        spec = self._spec
        clocks = {camera.key: 0.0 for camera in spec.cameras if camera.kind == "video"}
        per_file = spec.episodes_per_metadata_file or spec.num_episodes
        for number, episodes in enumerate(_groups(spec.num_episodes, per_file)):
            rows = []
            for episode in episodes:
                row = self._episode_row(episode, clocks)
                if spec.episode_stats:
                    for key, values in stats[episode].items():
                        row |= {f"stats/{key}/{name}": value for name, value in values.items()}
                place = self._place(number)
                row["meta/episodes/chunk_index"] = place["chunk_index"]
                row["meta/episodes/file_index"] = place["file_index"]
                rows.append(row)
            path = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
            table = pa.Table.from_pylist(rows)
            pq.write_table(table, self._file(path.format(**self._place(number))), compression="snappy")

    def _episode_row(self, episode: int, clocks: dict[str, float]) -> dict[str, Any]:
        spec = self._spec
        length = spec.episode_lengths[episode]
        start = sum(spec.episode_lengths[:episode])
        data = self._place(episode // spec.episodes_per_data_file)
        row: dict[str, Any] = {
            "episode_index": episode,
            "tasks": [spec.tasks[episode % len(spec.tasks)]],
            "length": length,
            "data/chunk_index": data["chunk_index"],
            "data/file_index": data["file_index"],
            "dataset_from_index": start,
            "dataset_to_index": start + length,
        }
        for camera in spec.cameras:
            if camera.kind != "video":
                continue
            if episode % camera.episodes_per_file == 0:
                clocks[camera.key] = 0.0
            place = self._place(episode // camera.episodes_per_file)
            row[f"videos/{camera.key}/chunk_index"] = place["chunk_index"]
            row[f"videos/{camera.key}/file_index"] = place["file_index"]
            row[f"videos/{camera.key}/from_timestamp"] = clocks[camera.key]
            # LeRobot adds durations up as floats, rounding errors included.
            clocks[camera.key] += length / spec.fps
            row[f"videos/{camera.key}/to_timestamp"] = clocks[camera.key]
        return row

    def _write_tasks(self) -> None:
        tasks = list(self._spec.tasks)
        table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks)})
        # What pandas stores for a frame whose index is the task; without it `read_parquet` gives a
        # plain column, and LeRobot finds no task by its string.
        column = {"field_name": "task_index", "name": "task_index", "pandas_type": "int64"}
        index = {"field_name": "task", "name": "task", "pandas_type": "unicode"}
        pandas = {
            "index_columns": ["task"],
            "column_indexes": [
                {
                    "name": None,
                    "field_name": None,
                    "pandas_type": "unicode",
                    "numpy_type": "object",
                    "metadata": {"encoding": "UTF-8"},
                }
            ],
            "columns": [
                column | {"numpy_type": "int64", "metadata": None},
                index | {"numpy_type": "object", "metadata": None},
            ],
            "attributes": {},
            "creator": {"library": "pyarrow", "version": pa.__version__},
            "pandas_version": "2.2.0",
        }
        table = table.replace_schema_metadata({"pandas": json.dumps(pandas)})
        pq.write_table(table, self._file("meta/tasks.parquet"))

    def _info(self) -> dict[str, Any]:
        spec = self._spec
        has_video = any(camera.kind == "video" for camera in spec.cameras)
        return {
            "codebase_version": "v3.0",
            "fps": spec.fps,
            "features": feature_entries(spec),
            "total_episodes": spec.num_episodes,
            "total_frames": spec.num_frames,
            "total_tasks": len(spec.tasks),
            "chunks_size": spec.chunks_size,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "data_path": _DATA_PATH,
            "video_path": _VIDEO_PATH if has_video else None,
            "robot_type": "demo",
            "splits": {"train": f"0:{spec.num_episodes}"},
        }

    # Statistics -----------------------------------------------------------------------------------

    def _episode_stats(self, episode: int, columns: dict[str, Any]) -> dict[str, dict[str, Any]]:
        spec = self._spec
        stats = {key: _statistics(np.asarray(columns[key])) for key in numeric_keys(spec)}
        for number, camera in enumerate(spec.cameras):
            # LeRobot samples pictures, too; the ends of an episode are enough here.
            frames = sorted({0, spec.episode_lengths[episode] - 1})
            pictures = [self._picture(number, camera, episode, frame) for frame in frames]
            stats[camera.key] = _picture_statistics(np.stack(pictures), camera)
        return stats

    def _dataset_stats(
        self, columns: list[dict[str, Any]], stats: list[dict[str, dict[str, Any]]]
    ) -> dict[str, dict[str, Any]]:
        spec = self._spec
        whole = {
            key: _statistics(np.concatenate([np.asarray(episode[key]) for episode in columns]))
            for key in numeric_keys(spec)
        }
        for number, camera in enumerate(spec.cameras):
            pictures = [self._picture(number, camera, episode, 0) for episode in range(spec.num_episodes)]
            whole[camera.key] = _picture_statistics(np.stack(pictures), camera)
            whole[camera.key]["count"] = [sum(episode[camera.key]["count"][0] for episode in stats)]
        return whole

    # Files ----------------------------------------------------------------------------------------

    def _place(self, number: int) -> dict[str, int]:
        chunk, file = divmod(number, self._spec.chunks_size)
        return {"chunk_index": chunk, "file_index": file}

    def _file(self, path: str) -> Path:
        full = self._root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        return full

    def _write_json(self, path: str, content: dict[str, Any]) -> None:
        self._file(path).write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")


def _groups(num_episodes: int, size: int) -> Iterable[range]:
    for start in range(0, num_episodes, size):
        yield range(start, min(start + size, num_episodes))


def _table(columns: dict[str, Any], schema: pa.Schema) -> pa.Table:
    arrays = []
    for field in schema:
        values = columns[field.name]
        if isinstance(values, np.ndarray) and values.ndim == 2:
            flat = pa.array(values.reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type))
        else:
            listed = values.tolist() if isinstance(values, np.ndarray) and values.ndim > 2 else values
            arrays.append(pa.array(listed, type=field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _statistics(values: NDArray[Any]) -> dict[str, Any]:
    numbers = values.astype(np.float64)
    stats: dict[str, Any] = {
        "min": numbers.min(axis=0),
        "max": numbers.max(axis=0),
        "mean": numbers.mean(axis=0),
        "std": numbers.std(axis=0),
    }
    stats |= {name: np.quantile(numbers, share, axis=0) for name, share in _QUANTILES.items()}
    listed = {name: np.atleast_1d(value).tolist() for name, value in stats.items()}
    return listed | {"count": [len(values)]}


def _picture_statistics(pictures: NDArray[Any], camera: DemoCamera) -> dict[str, Any]:
    scale = DEPTH_CODE_MAX if camera.is_depth else 255
    channels = 1 if camera.is_depth else 3
    stats = _statistics(pictures.reshape(-1, channels) / scale)
    shaped = {name: [[[value]] for value in values] for name, values in stats.items() if name != "count"}
    return shaped | {"count": [len(pictures)]}
