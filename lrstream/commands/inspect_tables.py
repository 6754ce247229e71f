"""What an episode's rows cost to read: row groups, their statistics, bytes (LD-8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.inspect_figures import Distribution, finding
from lrstream.commands.progress import Progress, no_progress
from lrstream.errors import LrstreamError
from lrstream.layout.layout import DatasetLayout
from lrstream.layout.parquet import ParquetSource, open_parquet
from lrstream.layout.rows import EpisodeRowReader
from lrstream.sidecar.problems import Problem

__all__ = ["RowGroups", "TableReport", "episode_row_groups", "inspect_tables"]

# An episode that reads this many times its own share of a file is worth a word.
_WASTEFUL_RATIO = 4.0


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row groups of one file that have to be read for one episode.

    Attributes:
        groups: Their numbers.
        num_groups: Row groups of the file.
        read_bytes: Compressed bytes of the columns that are read, in these groups.
    """

    groups: tuple[int, ...]
    num_groups: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class TableReport:
    """Parquet files of rows.

    Attributes:
        num_files: Files.
        num_row_groups: Row groups.
        num_with_statistics: Row groups whose statistics say which episodes they hold.
        num_without_statistics: Row groups that have to be looked into.
        rows_per_group: Rows of each row group.
        file_bytes: Compressed bytes of the columns that are read, all row groups together.
        episode_read_bytes: Compressed bytes that reading one episode's rows costs; row groups without
            statistics count for every episode of their file.
    """

    num_files: int
    num_row_groups: int
    num_with_statistics: int
    num_without_statistics: int
    rows_per_group: Distribution
    file_bytes: int
    episode_read_bytes: Distribution


class _File:
    """What is needed of one file's footer.

    Attributes:
        low: Smallest episode_index of each row group, float64; -inf where unknown.
        high: Largest one; inf where unknown.
        rows: Rows of each row group, int64.
        read_bytes: Compressed bytes of the wanted columns of each row group, int64.
    """

    def __init__(self, source: ParquetSource, columns: set[str]) -> None:
        self.low, self.high = source.column_bounds("episode_index")
        metadata = source.metadata
        wanted = _wanted_leaves(source, columns)
        groups = range(metadata.num_row_groups)
        self.rows = np.array([metadata.row_group(group).num_rows for group in groups], dtype=np.int64)
        self.read_bytes = np.array(
            [
                sum(metadata.row_group(group).column(leaf).total_compressed_size for leaf in wanted)
                for group in groups
            ],
            dtype=np.int64,
        )

    @property
    def has_statistics(self) -> NDArray[np.bool_]:
        known: NDArray[np.bool_] = np.isfinite(self.low)
        return known

    def of_episode(self, episode_index: int) -> RowGroups:
        groups = np.flatnonzero((self.low <= episode_index) & (episode_index <= self.high))
        return RowGroups(tuple(groups.tolist()), len(self.low), int(self.read_bytes[groups].sum()))


def episode_row_groups(layout: DatasetLayout, position: int) -> RowGroups:
    """Row groups and bytes of the episode at a position of the episode table.

    Raises:
        NotFoundError, DatasetFormatError, TransferError: Its file cannot be opened.
    """
    file = _open(layout, layout.episodes.data_path(position))
    return file.of_episode(int(layout.episodes.episode_index[position]))


def inspect_tables(
    layout: DatasetLayout, *, progress: Progress = no_progress
) -> tuple[TableReport, list[Problem]]:
    """Read the footers of all data files.

    Returns:
        The report, and findings: files that cannot be read, missing statistics, wasteful row groups.
    """
    episodes = layout.episodes
    findings: list[Problem] = []
    files: list[_File] = []
    costs: list[NDArray[np.int64]] = []
    wasteful: list[str] = []
    without: list[str] = []
    for number, path in enumerate(episodes.data_files):
        progress(number, len(episodes.data_files), "Parquet files")
        try:
            file = _open(layout, path)
        except LrstreamError as error:
            findings.append(finding(error.code, error.message, error.hint, severity="error", source=path))
            continue
        files.append(file)
        members = np.flatnonzero(episodes.data_file == number)
        mine = [file.of_episode(index).read_bytes for index in episodes.episode_index[members].tolist()]
        costs.append(np.array(mine, dtype=np.int64))
        if not file.has_statistics.all():
            without.append(path)
        elif mine and sum(mine) > _WASTEFUL_RATIO * max(1, int(file.read_bytes.sum())):
            wasteful.append(path)
    findings += _told(
        "parquet-no-statistics",
        without,
        "Parquet files have row groups without statistics of episode_index, so each of these is looked "
        "into before an episode of its file can be read",
        "Write them again with statistics (pyarrow does so by default).",
    )
    findings += _told(
        "parquet-large-row-groups",
        wasteful,
        f"Parquet files have row groups of so many episodes that reading one costs over "
        f"{_WASTEFUL_RATIO:.0f} times its share",
        "Write them again with one row group for each episode, as LeRobot does.",
    )
    report = TableReport(
        num_files=len(episodes.data_files),
        num_row_groups=sum(len(file.rows) for file in files),
        num_with_statistics=sum(int(file.has_statistics.sum()) for file in files),
        num_without_statistics=sum(int((~file.has_statistics).sum()) for file in files),
        rows_per_group=Distribution.of(_joined([file.rows for file in files])),
        file_bytes=sum(int(file.read_bytes.sum()) for file in files),
        episode_read_bytes=Distribution.of(_joined(costs)),
    )
    return report, findings


def _told(code: str, paths: list[str], what: str, hint: str) -> list[Problem]:
    if not paths:
        return []
    return [finding(code, f"{len(paths)} {what}, for example {paths[0]}.", hint, source=paths[0])]


def _open(layout: DatasetLayout, path: str) -> _File:
    columns = {feature.key for feature in EpisodeRowReader(layout.store, layout).features}
    source = open_parquet(layout.store, path)
    try:
        return _File(source, columns)
    finally:
        source.close()


def _wanted_leaves(source: ParquetSource, columns: set[str]) -> list[int]:
    """Leaf columns below the wanted top-level ones.

    Feature names contain dots, and so do the dotted paths of leaves: a leaf belongs to the longest
    top-level name that its path begins with.
    """
    names = sorted(source.schema.names, key=len, reverse=True)
    schema = source.metadata.schema
    leaves = []
    for leaf in range(len(schema)):
        path = schema.column(leaf).path
        owner = next((name for name in names if path == name or path.startswith(f"{name}.")), path)
        if owner in columns:
            leaves.append(leaf)
    return leaves


def _joined(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
