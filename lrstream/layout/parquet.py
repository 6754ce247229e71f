"""Parquet files read by exactly the byte ranges that are needed, from any store.

A file is read through its `ByteSource`: first the footer, then the column chunks of the wanted row
groups, neighbouring ones in one request. pyarrow decodes them in the calling thread: reading Python
objects from its thread pool has been seen to abort the interpreter at exit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lrstream.errors import DatasetFormatError
from lrstream.storage.byte_source import ByteSource
from lrstream.storage.store import DatasetStore

__all__ = ["ParquetSource", "open_parquet"]

_MAGIC = b"PAR1"
# One request gets the footer of most files; LeRobot's data files have a few KiB of it.
_TAIL_BYTES = 64 * 1024
# Most bytes that are held in memory before they are decoded.
_BATCH_BYTES = 32 * 1024 * 1024
# What pyarrow raises for a damaged file: its own classes, and Python's for names that are not UTF-8
# and numbers out of range.
_ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)


class ParquetSource:
    """One open Parquet file. Thread-safe: every read decodes through an object of its own.

    Args:
        source: Where its bytes are.
        metadata: Its parsed footer.
        where: Full name of the file, for messages.
        range_gap_bytes: Column chunks closer than this are fetched in one request.
        content: The whole file, where reading the footer brought it.

    Attributes:
        metadata: Row groups, statistics and Parquet schema.
        schema: Arrow schema.
    """

    def __init__(
        self,
        source: ByteSource,
        metadata: pq.FileMetaData,
        where: str,
        range_gap_bytes: int,
        content: bytes | None = None,
    ) -> None:
        self._source = source
        self.metadata = metadata
        self.where = where
        self._gap = range_gap_bytes
        self._content = content
        try:
            self.schema: pa.Schema = metadata.schema.to_arrow_schema()
            self._leaves = _leaves_by_column(self.schema)
        except _ARROW_ERRORS as error:
            raise DatasetFormatError(f"{where}: its columns cannot be read by Arrow: {error}.") from error

    def require_columns(self, names: Sequence[str]) -> None:
        """Raise DatasetFormatError unless all columns are there."""
        missing = [name for name in names if name not in self._leaves]
        if missing:
            present = [name for name in self.schema.names if not name.startswith("stats/")]
            raise DatasetFormatError(
                f"{self.where} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
                f"it has {', '.join(present) or 'none'}.",
                columns=tuple(missing),
            )

    def read(self, columns: Sequence[str], row_groups: Sequence[int] | None = None) -> pa.Table:
        """Rows of some row groups, in file order, only the named columns.

        Args:
            columns: Names of top-level columns, all present.
            row_groups: Zero-based numbers, None for all.

        Raises:
            DatasetFormatError: If a column is missing or the content cannot be decoded.
            TransferError: If bytes cannot be read.
        """
        self.require_columns(columns)
        groups = list(range(self.metadata.num_row_groups)) if row_groups is None else list(row_groups)
        leaves = [leaf for name in columns for leaf in self._leaves[name]]
        tables = [self._read_batch(batch, columns, leaves) for batch in self._batches(groups, leaves)]
        if not tables:
            return pa.schema([self.schema.field(name) for name in columns]).empty_table()
        return pa.concat_tables(tables)

    def column_bounds(self, column: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Smallest and largest value of an integer column by row group, from its statistics.

        Returns:
            Two float64 arrays of shape ``(num_row_groups,)``; -inf and inf where a row group has no
            statistics, so that it stays a candidate for any value (LD-8).
        """
        self.require_columns([column])
        leaf = self._leaves[column][0]
        count = self.metadata.num_row_groups
        low, high = np.full(count, -np.inf), np.full(count, np.inf)
        try:
            for group in range(count):
                statistics = self.metadata.row_group(group).column(leaf).statistics
                if statistics is not None and statistics.has_min_max:
                    low[group], high[group] = statistics.min, statistics.max
        except _ARROW_ERRORS as error:
            raise DatasetFormatError(f"{self.where}: bad statistics of {column}: {error}.") from error
        return low, high

    def close(self) -> None:
        """Release the file handle."""
        self._source.close()

    def _batches(self, groups: list[int], leaves: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        held = 0
        for group in groups:
            row_group = self.metadata.row_group(group)
            wanted = sum(row_group.column(leaf).total_compressed_size for leaf in leaves)
            if batch and held + wanted > _BATCH_BYTES:
                yield batch
                batch, held = [], 0
            batch.append(group)
            held += wanted
        if batch:
            yield batch

    def _read_batch(self, groups: list[int], columns: Sequence[str], leaves: list[int]) -> pa.Table:
        file = _RangedFile(self._source)
        if self._content is None:
            file.fetch(self._merged_ranges(groups, leaves))
        else:
            file.hold(0, self._content)
        try:
            parquet = pq.ParquetFile(pa.PythonFile(file, mode="r"), metadata=self.metadata, pre_buffer=False)
            table = parquet.read_row_groups(groups, columns=list(columns), use_threads=False)
        except _ARROW_ERRORS as error:
            if file.failure is not None:
                raise file.failure from error
            raise DatasetFormatError(
                f"{self.where}: row groups {_span(groups)} cannot be decoded: {error}.",
                hint="The file is damaged; download or convert it again.",
            ) from error
        return table.select(list(columns))

    def _merged_ranges(self, groups: list[int], leaves: list[int]) -> list[tuple[int, int]]:
        ranges = []
        for group in groups:
            row_group = self.metadata.row_group(group)
            for leaf in leaves:
                chunk = row_group.column(leaf)
                start = chunk.data_page_offset
                if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
                    # Zero stands for "none" in files of some writers.
                    start = min(start, chunk.dictionary_page_offset or start)
                ranges.append((start, start + chunk.total_compressed_size))
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if merged and start - merged[-1][1] <= self._gap:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        return merged


class _RangedFile:
    """Read-only file object over a byte source, with some ranges already in memory."""

    closed = False

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._size = source.size()
        self._blocks: list[tuple[int, bytes]] = []
        self._position = 0
        self.failure: Exception | None = None

    def hold(self, start: int, block: bytes) -> None:
        self._blocks.append((start, block))

    def fetch(self, ranges: list[tuple[int, int]]) -> None:
        for start, stop in ranges:
            # Nonsense in a damaged footer is left to Arrow, which reports it.
            if 0 <= start < stop <= self._size:
                self.hold(start, self._source.read(start, stop))

    def read(self, count: int = -1) -> bytes:
        start = self._position
        stop = self._size if count is None or count < 0 else min(start + count, self._size)
        self._position = max(start, stop)
        if stop <= start:
            return b""
        for block_start, block in self._blocks:
            if block_start <= start and stop <= block_start + len(block):
                return block[start - block_start : stop - block_start]
        try:
            return self._source.read(start, stop)
        except Exception as error:
            # Arrow passes errors of Python files on in another form; the original is kept for the caller.
            self.failure = error
            raise

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False


def open_parquet(store: DatasetStore, path: str, size: int | None = None) -> ParquetSource:
    """Open a Parquet file and read its footer.

    Args:
        store: Where it is.
        path: Path relative to the root.
        size: Its size in bytes if known.

    Raises:
        NotFoundError: If it does not exist.
        DatasetFormatError: If it is empty, a Git LFS pointer, has no footer, or is not Parquet; each
            with a message of its own (K11).
    """
    where = f"{store.location}/{path}"
    source = store.open(path, size)
    try:
        footer, content = _read_footer(source, where)
        try:
            metadata = pq.ParquetFile(pa.BufferReader(footer)).metadata
        except _ARROW_ERRORS as error:
            raise DatasetFormatError(
                f"{where}: its Parquet footer cannot be decoded: {error}.", file_path=path
            ) from error
        return ParquetSource(source, metadata, where, store.range_gap_bytes, content)
    except BaseException:
        source.close()
        raise


def _read_footer(source: ByteSource, where: str) -> tuple[bytes, bytes | None]:
    """All that Arrow needs to parse the metadata (footer, its length, closing magic).

    Also the whole content of a file so small that one request brought it.
    """
    size = source.size()
    if size == 0:
        raise DatasetFormatError(f"{where} is empty (0 bytes), expected Parquet.", file_path=source.path)
    tail = source.read(max(0, size - _TAIL_BYTES), size)
    if size < 12 or tail[-4:] != _MAGIC:
        raise _not_parquet(source, tail, size, where)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > size - 4:
        raise DatasetFormatError(
            f"{where}: its Parquet footer claims {length - 8} bytes, but the file has {size}.",
            file_path=source.path,
        )
    if length > len(tail):
        tail = source.read(size - length, size - len(tail)) + tail
    return tail[-length:], tail if len(tail) == size else None


def _not_parquet(source: ByteSource, tail: bytes, size: int, where: str) -> DatasetFormatError:
    head = source.read(0, min(size, 64))
    fields: dict[str, Any] = {"file_path": source.path}
    if head.startswith(b"version https://git-lfs"):
        return DatasetFormatError(
            f"{where} is a Git LFS pointer, not the Parquet file itself.", hint="Run: git lfs pull", **fields
        )
    if tail[-4:] == b"PARE" or head.startswith(b"PARE"):
        return DatasetFormatError(f"{where} is encrypted Parquet, which is not supported.", **fields)
    if head.startswith(_MAGIC):
        return DatasetFormatError(
            f"{where} has no Parquet footer: a recording or copy was interrupted at {size} bytes.",
            hint="Download it again, or record or convert these episodes again.",
            **fields,
        )
    return DatasetFormatError(
        f"{where} is not Parquet: it starts with {head[:8]!r}, expected {_MAGIC!r}.", **fields
    )


def _leaves_by_column(schema: pa.Schema) -> dict[str, range]:
    """Numbers of the Parquet leaf columns of each top-level column.

    Counted rather than taken from dotted paths, because feature names contain dots themselves.
    """
    leaves: dict[str, range] = {}
    first = 0
    for field in schema:
        count = _count_leaves(field.type)
        leaves[field.name] = range(first, first + count)
        first += count
    return leaves


def _count_leaves(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _count_leaves(kind.storage_type)
    if pa.types.is_map(kind):
        return _count_leaves(kind.key_type) + _count_leaves(kind.item_type)
    if pa.types.is_struct(kind):
        return sum(_count_leaves(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _count_leaves(kind.value_type)
    return 1


def _span(groups: list[int]) -> str:
    return str(groups[0]) if len(groups) == 1 else f"{groups[0]} to {groups[-1]}"
