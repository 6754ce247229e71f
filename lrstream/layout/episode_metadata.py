"""Read `meta/episodes/` into an `EpisodeTable`, and refuse what contradicts itself (DS-2, DS-5).

Each file is opened once and only the columns that are needed are read: the per-episode ``stats/*``
columns can be a hundred times larger than the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lrstream.errors import DatasetFormatError, NotFoundError
from lrstream.layout.episodes import CameraColumns, EpisodeTable
from lrstream.layout.info import DatasetInfo
from lrstream.layout.parquet import open_parquet
from lrstream.layout.templates import PathTemplate
from lrstream.storage.store import DatasetStore

__all__ = ["EPISODES_DIRECTORY", "load_episodes"]

EPISODES_DIRECTORY = "meta/episodes"

_ROW_COLUMNS = (
    "episode_index",
    "length",
    "dataset_from_index",
    "dataset_to_index",
    "data/chunk_index",
    "data/file_index",
)
_CAMERA_FIELDS = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
_MOST_FILES = 2**31


def load_episodes(
    store: DatasetStore, info: DatasetInfo, *, contradictions: list[DatasetFormatError] | None = None
) -> EpisodeTable:
    """Read and check all episode metadata.

    Args:
        store: The dataset.
        info: Its info.json.
        contradictions: Where given, every contradiction among episodes is put here instead of the first
            one being raised, each with a ``problem`` field; the table must then not be trained from.

    Raises:
        NotFoundError: If there is none.
        DatasetFormatError: If a file cannot be read, lacks a column, or the episodes contradict each
            other or `info.json`; the message names the episode and what is wrong.
    """
    table, where = _read_table(store, info)
    return _episode_table(table, info, where, contradictions)


def _read_table(store: DatasetStore, info: DatasetInfo) -> tuple[pa.Table, str]:
    needed = [*_ROW_COLUMNS]
    for key in info.video_keys:
        needed += [f"videos/{key}/{field}" for field in _CAMERA_FIELDS]
    tables = []
    for path, size in _metadata_files(store, info):
        parquet = open_parquet(store, path, size)
        try:
            parquet.require_columns(needed)
            optional = ["tasks"] if "tasks" in parquet.schema.names else []
            tables.append(parquet.read([*needed, *optional]))
        finally:
            parquet.close()
    where = f"{store.location}/{EPISODES_DIRECTORY}"
    if not tables:
        raise NotFoundError(
            f"{where} holds no episode metadata (looked for chunk-*/file-*.parquet).",
            hint="The dataset is incomplete; download or convert it again.",
        )
    try:
        return pa.concat_tables(tables, promote_options="permissive"), where
    except pa.ArrowException as error:
        raise DatasetFormatError(f"{where}: the files have columns of different types: {error}.") from error


def _metadata_files(store: DatasetStore, info: DatasetInfo) -> Iterator[tuple[str, int | None]]:
    listed = store.list_files(EPISODES_DIRECTORY)
    found = [
        path for path in listed if path.endswith(".parquet") and path.count("/") == 3 and "/." not in path
    ]
    if found:
        yield from ((path, listed[path].size) for path in sorted(found))
        return
    # Plain web servers have no listings. LeRobot numbers the files without gaps, and the totals in
    # info.json tell afterwards whether one was missed.
    chunk, file = 0, 0
    while True:
        path = f"{EPISODES_DIRECTORY}/chunk-{chunk:03d}/file-{file:03d}.parquet"
        if store.exists(path):
            yield path, None
            chunk, file = (chunk, file + 1) if file + 1 < info.chunks_size else (chunk + 1, 0)
        elif file > 0:
            chunk, file = chunk + 1, 0
        else:
            return


def _episode_table(
    table: pa.Table, info: DatasetInfo, where: str, contradictions: list[DatasetFormatError] | None
) -> EpisodeTable:
    checked = _Columns(table, where)
    rows = {name: checked.integers(name) for name in _ROW_COLUMNS}
    cameras = {key: _camera(checked, key, info) for key in info.video_keys}
    data_file, data_files = _files(rows["data/chunk_index"], rows["data/file_index"], info.data_path, None)
    _check_episodes(rows, where)
    found = _contradictions(rows, info, where)
    if contradictions is None:
        for error in found:
            raise error
    else:
        contradictions.extend(found)
    order = np.argsort(rows["episode_index"], kind="stable")
    lists = table.column("tasks").take(pa.array(order)) if "tasks" in table.column_names else None
    return EpisodeTable(
        episode_index=rows["episode_index"][order],
        length=rows["length"][order],
        dataset_from_index=rows["dataset_from_index"][order],
        dataset_to_index=rows["dataset_to_index"][order],
        data_file=data_file[order],
        data_files=data_files,
        cameras={
            key: CameraColumns(camera.file[order], camera.files, camera.from_s[order], camera.to_s[order])
            for key, camera in cameras.items()
        },
        task_lists=None if lists is None else _one_array(lists),
    )


class _Columns:
    """Columns of the metadata as arrays without missing values, or an error that names the episode."""

    def __init__(self, table: pa.Table, where: str) -> None:
        self._table = table
        self.where = where
        self._episodes: NDArray[np.int64] | None = None
        self._episodes = self.integers("episode_index")

    def episode(self, row: int) -> str:
        return f"episode {self._episodes[row]}" if self._episodes is not None else f"row {row}"

    def integers(self, name: str) -> NDArray[np.int64]:
        values = self._numbers(name)
        if values.dtype.kind == "f":
            # A column that once had missing values is stored as floating point by pandas.
            bad = np.flatnonzero(values != np.floor(values))
            if bad.size:
                raise self.error(int(bad[0]), f"{name} is {values[bad[0]]}, expected an integer")
        return values.astype(np.int64)

    def seconds(self, name: str) -> NDArray[np.float64]:
        return self._numbers(name).astype(np.float64)

    def error(self, row: int, problem: str) -> DatasetFormatError:
        error = DatasetFormatError(f"{self.where}: {self.episode(row)}: {problem}.")
        if self._episodes is not None:
            error.fields["episode_index"] = int(self._episodes[row])
        return error

    def _numbers(self, name: str) -> NDArray[np.generic]:
        column = self._table.column(name)
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            if pa.types.is_null(column.type) and len(column):
                raise self._missing(name, 0)
            raise DatasetFormatError(f"{self.where}: column {name} is {column.type}, expected numbers.")
        if column.null_count:
            raise self._missing(name, int(np.flatnonzero(column.is_null().to_numpy())[0]))
        values: NDArray[np.generic] = column.to_numpy()
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise self._missing(name, int(np.flatnonzero(~np.isfinite(values))[0]))
        return values

    def _missing(self, name: str, row: int) -> DatasetFormatError:
        error = self.error(row, f"{name} is missing (null)")
        if name.startswith("videos/"):
            key = name.removeprefix("videos/").rpartition("/")[0]
            error.hint = (
                f"Every episode needs a place in the video of {key!r}; leave the episode out of the dataset "
                "or repair its metadata."
            )
            error.fields["camera"] = key
        return error


def _camera(columns: _Columns, key: str, info: DatasetInfo) -> CameraColumns:
    prefix = f"videos/{key}"
    from_s, to_s = columns.seconds(f"{prefix}/from_timestamp"), columns.seconds(f"{prefix}/to_timestamp")
    bad = np.flatnonzero((from_s < 0) | (to_s <= from_s))
    if bad.size:
        row = int(bad[0])
        raise columns.error(
            row,
            f"camera {key!r} has pictures from {from_s[row]} s to {to_s[row]} s, expected 0 <= from < to",
        )
    chunk, file = columns.integers(f"{prefix}/chunk_index"), columns.integers(f"{prefix}/file_index")
    for name, values in (("chunk_index", chunk), ("file_index", file)):
        _check_file_numbers(columns, f"{prefix}/{name}", values)
    if info.video_path is None:
        raise DatasetFormatError(f"{columns.where}: {key!r} is a video, but info.json has no video_path.")
    codes, files = _files(chunk, file, info.video_path, key)
    return CameraColumns(codes, files, from_s, to_s)


def _check_file_numbers(columns: _Columns, name: str, values: NDArray[np.int64]) -> None:
    bad = np.flatnonzero((values < 0) | (values >= _MOST_FILES))
    if bad.size:
        raise columns.error(int(bad[0]), f"{name} is {values[bad[0]]}, expected 0 or more")


def _files(
    chunk: NDArray[np.int64], file: NDArray[np.int64], template: PathTemplate, key: str | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Number each episode's file, and the paths the numbers stand for, sorted and unique."""
    pairs, inverse = np.unique(chunk * _MOST_FILES + file, return_inverse=True)
    paths = [
        template.path(chunk_index=pair // _MOST_FILES, file_index=pair % _MOST_FILES, video_key=key or "")
        for pair in pairs.tolist()
    ]
    files = sorted(set(paths))
    number = {path: position for position, path in enumerate(files)}
    renumbered = np.array([number[path] for path in paths], dtype=np.int64)
    return renumbered[inverse.reshape(-1)] if paths else np.empty(0, np.int64), tuple(files)


def _check_episodes(rows: dict[str, NDArray[np.int64]], where: str) -> None:
    """Refuse what no table can be made of."""
    episodes, length = rows["episode_index"], rows["length"]

    def fail(row: int, problem: str) -> DatasetFormatError:
        return DatasetFormatError(
            f"{where}: episode {episodes[row]}: {problem}.", episode_index=int(episodes[row])
        )

    for name in ("episode_index", "data/chunk_index", "data/file_index", "dataset_from_index"):
        bad = np.flatnonzero((rows[name] < 0) | (rows[name] >= 2**62))
        if bad.size:
            raise fail(int(bad[0]), f"{name} is {rows[name][bad[0]]}, expected 0 or more")
    unique, counts = np.unique(episodes, return_counts=True)
    if (counts > 1).any():
        twice = unique[counts > 1]
        raise DatasetFormatError(
            f"{where}: episode {twice[0]} is described {counts[counts > 1][0]} times"
            f"{f', and so are {len(twice) - 1} others' if len(twice) > 1 else ''}.",
            hint="A metadata file was probably copied or appended twice.",
            episode_index=int(twice[0]),
        )
    if (bad := np.flatnonzero(length < 1)).size:
        raise fail(int(bad[0]), f"length is {length[bad[0]]}, expected at least 1 frame")


def _contradictions(
    rows: dict[str, NDArray[np.int64]], info: DatasetInfo, where: str
) -> Iterator[DatasetFormatError]:
    """Everything in which episodes contradict themselves, each other or info.json."""
    episodes, length = rows["episode_index"], rows["length"]
    first, stop = rows["dataset_from_index"], rows["dataset_to_index"]

    def fail(row: int, code: str, problem: str) -> DatasetFormatError:
        episode = int(episodes[row])
        return DatasetFormatError(
            f"{where}: episode {episode}: {problem}.", problem=code, episode_index=episode, file_path=where
        )

    for row in np.flatnonzero(stop - first != length).tolist():
        yield fail(
            row,
            "episode-length",
            f"dataset_from_index {first[row]} to dataset_to_index {stop[row]} are {stop[row] - first[row]} "
            f"frames, but length is {length[row]}",
        )
    by_index = np.argsort(first, kind="stable")
    for place in np.flatnonzero(stop[by_index][:-1] > first[by_index][1:]).tolist():
        one, two = int(by_index[place]), int(by_index[place + 1])
        yield fail(
            two,
            "rows-overlap",
            f"its frames [{first[two]}, {stop[two]}) overlap those of episode {episodes[one]}, "
            f"[{first[one]}, {stop[one]})",
        )
    yield from _wrong_totals(len(episodes), int(length.sum()), info, where)


def _wrong_totals(
    num_episodes: int, num_frames: int, info: DatasetInfo, where: str
) -> Iterator[DatasetFormatError]:
    for name, declared, found in (
        ("total_episodes", info.total_episodes, num_episodes),
        ("total_frames", info.total_frames, num_frames),
    ):
        if declared is not None and declared != found:
            yield DatasetFormatError(
                f"{where} describes {found} {name.removeprefix('total_')}, but meta/info.json says {name} is "
                f"{declared}.",
                hint="Files of meta/episodes are missing or outdated; download or convert the dataset again.",
                problem="totals-differ",
                file_path=where,
            )


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    # Older pyarrow returns a ChunkedArray from combine_chunks when there is no chunk.
    if column.num_chunks == 0:
        return pa.array([], type=column.type)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
