"""The rows of one episode from its Parquet file (LD-8), checked to be that episode's (K01)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lrstream.errors import DatasetFormatError, NotFoundError, UsageError
from lrstream.layout.columns import image_bytes, language_rows, numeric_array, single_array, strings
from lrstream.layout.info import Feature
from lrstream.layout.layout import DatasetLayout
from lrstream.layout.open_files import OpenFile, OpenFiles
from lrstream.layout.parquet import open_parquet
from lrstream.storage.per_process import PerProcess
from lrstream.storage.store import DatasetStore

__all__ = ["ROW_KEYS", "EpisodeRowReader", "EpisodeRows"]

ROW_KEYS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns that every row has, whether or not `info.json` declares them."""

_MISPLACED_HINT = (
    "Its metadata may name the wrong file (data/chunk_index, data/file_index), which early converters did "
    "at a file boundary; convert the dataset again with a current LeRobot."
)


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """All rows of one episode, in the order of ``index``.

    Attributes:
        episode_index: The episode.
        position: Its row in the episode table.
        arrays: Numeric features, each float32, int64 or bool, shape ``(n, *shape)``, or ``(n,)`` for
            scalars (declared shape ``(1,)``). Writable copies.
        objects: Other features, one object per row: encoded images as bytes, strings, language
            annotations.
    """

    episode_index: int
    position: int
    arrays: Mapping[str, NDArray[Any]]
    objects: Mapping[str, list[Any]]

    def __len__(self) -> int:
        return len(self.arrays["index"])

    @property
    def timestamp_s(self) -> NDArray[np.float32]:
        """Time of each row since the start of its episode, float32 seconds, shape ``(n,)``."""
        return self.arrays["timestamp"]


class EpisodeRowReader:
    """Reads episodes' rows. Thread-safe and picklable; each process opens its own files, each once.

    Args:
        store: Where the dataset is.
        layout: Its metadata.
        columns: Features to read besides `ROW_KEYS`; None for all that are stored in tables.
        max_open_files: Most idle files (with their parsed footers) kept open, least recently used
            first out.

    Raises:
        UsageError: If ``columns`` names something that is not stored in tables.
    """

    def __init__(
        self,
        store: DatasetStore,
        layout: DatasetLayout,
        columns: Iterable[str] | None = None,
        *,
        max_open_files: int = 64,
    ) -> None:
        if max_open_files < 1:
            raise UsageError(f"max_open_files is {max_open_files}, expected at least 1.")
        self._store = store
        self._layout = layout
        self._features = _features_to_read(layout, columns)
        self._files = PerProcess(partial(OpenFiles, max_open_files))

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features that are read, `ROW_KEYS` included."""
        return self._features

    @property
    def num_open_files(self) -> int:
        """Files that this process has open now."""
        return len(self._files.get())

    def read(self, position: int) -> EpisodeRows:
        """All rows of the episode at a position of the episode table.

        Raises:
            DatasetFormatError: If the file does not hold exactly this episode's rows (their number,
                ``index`` and ``frame_index``), or a column does not fit its declaration.
            NotFoundError: If the file does not exist.
            TransferError: If it cannot be read.
        """
        episodes = self._layout.episodes
        episode_index, path = int(episodes.episode_index[position]), episodes.data_path(position)
        where = f"{self._store.location}/{path}: episode {episode_index}"
        with self._files.get().use(path, lambda: self._open(path, where, episode_index)) as file:
            names = [feature.key for feature in self._features]
            table = file.source.read(names, file.candidates(episode_index))
        table = _only_episode(table, episode_index)
        expected = int(episodes.length[position])
        if table.num_rows != expected:
            raise DatasetFormatError(
                f"{where} has {table.num_rows} rows in this file, but its metadata say {expected}.",
                hint=_MISPLACED_HINT,
                episode_index=episode_index,
                file_path=path,
            )
        table = _in_index_order(table)
        arrays, objects = self._convert(table, where)
        rows = EpisodeRows(episode_index, position, arrays, objects)
        self._check(rows, where)
        return rows

    def close(self) -> None:
        """Close the files of this process; reading again opens them again."""
        files = self._files.drop()
        if files is not None:
            files.close()

    def _open(self, path: str, where: str, episode_index: int) -> OpenFile:
        try:
            source = open_parquet(self._store, path)
        except NotFoundError as error:
            raise NotFoundError(
                f"{where} should be in this file, but there is no such file.",
                hint=_MISPLACED_HINT,
                episode_index=episode_index,
                file_path=path,
            ) from error
        try:
            source.require_columns([feature.key for feature in self._features])
            kind = source.schema.field("episode_index").type
            if not pa.types.is_integer(kind):
                raise DatasetFormatError(f"{source.where}: episode_index is {kind}, expected integers.")
            return OpenFile(source, "episode_index")
        except BaseException:
            source.close()
            raise

    def _convert(
        self, table: pa.Table, where: str
    ) -> tuple[dict[str, NDArray[np.generic]], dict[str, list[Any]]]:
        arrays: dict[str, NDArray[np.generic]] = {}
        objects: dict[str, list[Any]] = {}
        for feature in self._features:
            column = table.column(feature.key)
            if feature.kind == "numeric":
                arrays[feature.key] = numeric_array(column, feature, where)
            elif feature.kind in ("image", "depth_image"):
                objects[feature.key] = image_bytes(column, feature, where)
            elif feature.kind == "language":
                objects[feature.key] = language_rows(column, feature, where)
            else:
                objects[feature.key] = strings(column)
        return arrays, objects

    def _check(self, rows: EpisodeRows, where: str) -> None:
        episodes = self._layout.episodes
        first = int(episodes.dataset_from_index[rows.position])
        for name, start in (("index", first), ("frame_index", 0)):
            found = rows.arrays[name]
            wrong = np.flatnonzero(found != np.arange(start, start + len(rows)))
            if wrong.size:
                row = int(wrong[0])
                raise DatasetFormatError(
                    f"{where}: {name} is {found[row]} in row {row}, expected {start + row}: its rows are not "
                    f"{start} to {start + len(rows) - 1} in order.",
                    hint=_MISPLACED_HINT,
                    episode_index=rows.episode_index,
                )
        not_finite = np.flatnonzero(~np.isfinite(rows.timestamp_s))
        if not_finite.size:
            row = int(not_finite[0])
            raise DatasetFormatError(
                f"{where}: timestamp is {rows.timestamp_s[row]} in row {row}, expected seconds.",
                episode_index=rows.episode_index,
            )
        for task in np.unique(rows.arrays["task_index"]).tolist():
            if task not in self._layout.tasks:
                raise DatasetFormatError(
                    f"{where}: task_index {task} is not in meta/tasks.parquet.",
                    episode_index=rows.episode_index,
                )


def _features_to_read(layout: DatasetLayout, columns: Iterable[str] | None) -> tuple[Feature, ...]:
    stored = {key: feature for key, feature in layout.info.features.items() if not feature.in_video}
    for key in ROW_KEYS:
        dtype = "float32" if key == "timestamp" else "int64"
        stored.setdefault(key, Feature(key, "numeric", dtype, (1,)))
    if columns is None:
        return tuple(stored.values())
    wanted = {*columns, *ROW_KEYS}
    unknown = sorted(wanted - stored.keys())
    if unknown:
        raise UsageError(f"{', '.join(unknown)} cannot be read from tables, which have {', '.join(stored)}.")
    return tuple(feature for key, feature in stored.items() if key in wanted)


def _only_episode(table: pa.Table, episode_index: int) -> pa.Table:
    """Rows of one episode; a slice without a copy where they stand together."""
    column = single_array(table.column("episode_index"))
    matches = np.flatnonzero(column.to_numpy(zero_copy_only=False) == episode_index)
    if matches.size == 0:
        return table.slice(0, 0)
    first, last = int(matches[0]), int(matches[-1])
    if last - first + 1 == matches.size:
        return table.slice(first, matches.size)
    return table.take(pa.array(matches))


def _in_index_order(table: pa.Table) -> pa.Table:
    index = single_array(table.column("index"))
    if index.null_count or not pa.types.is_integer(index.type):
        # Reported with its row when the column is converted.
        return table
    values = index.to_numpy(zero_copy_only=False)
    if (values[1:] > values[:-1]).all():
        return table
    return table.take(pa.array(np.argsort(values, kind="stable")))
