"""A bounded set of open Parquet files, shared by the threads of one process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from lrstream.layout.parquet import ParquetSource

__all__ = ["OpenFile", "OpenFiles"]


class OpenFile:
    """One Parquet file with its parsed footer and the range of one column in each row group.

    Args:
        source: The file.
        column: Integer column by which row groups are pruned.
    """

    def __init__(self, source: ParquetSource, column: str) -> None:
        self.source = source
        self._column = column
        self._low, self._high = source.column_bounds(column)
        self._lock = threading.Lock()

    def candidates(self, value: int) -> list[int]:
        """Row groups that may hold ``value``, ascending (LD-8).

        Row groups without statistics are candidates until there is a choice to make; then this
        column alone is read, once, and its range in each of them remembered.
        """
        with self._lock:
            groups = self._matching(value)
            unknown = [group for group in groups if np.isinf(self._low[group])]
            # A single candidate has to be read in any case.
            if unknown and len(groups) > 1:
                self._look_at(unknown)
                groups = self._matching(value)
            return groups

    def _matching(self, value: int) -> list[int]:
        matching: NDArray[np.intp] = np.flatnonzero((self._low <= value) & (value <= self._high))
        return [int(group) for group in matching]

    def _look_at(self, groups: list[int]) -> None:
        column = self.source.read([self._column], groups).column(0)
        first = 0
        for group in groups:
            num_rows = self.source.metadata.row_group(group).num_rows
            values = column.slice(first, num_rows).drop_null().to_numpy()
            first += num_rows
            # A group without values matches nothing.
            self._low[group] = values.min() if values.size else np.inf
            self._high[group] = values.max() if values.size else -np.inf


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: OpenFile | None = None
        self.users = 0


class OpenFiles:
    """At most so many files kept open, least recently used first out. Thread-safe.

    A file in use is never closed: the bound is exceeded while more threads than it allows read
    different files.

    Args:
        limit: Most idle files kept open, at least 1.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    @contextmanager
    def use(self, path: str, opened: Callable[[], OpenFile]) -> Iterator[OpenFile]:
        """The file at ``path``, opened once by the first thread that asks; the others wait for it."""
        with self._lock:
            entry = self._entries.setdefault(path, _Entry())
            self._entries.move_to_end(path)
            entry.users += 1
        try:
            with entry.lock:
                if entry.file is None:
                    entry.file = opened()
            yield entry.file
        finally:
            with self._lock:
                entry.users -= 1
                self._trim()

    def close(self) -> None:
        """Close all files that are not in use; those in use stay until they fall out of the bound."""
        with self._lock:
            for path in [path for path, entry in self._entries.items() if entry.users == 0]:
                _close(self._entries.pop(path))

    def __len__(self) -> int:
        return len(self._entries)

    def _trim(self) -> None:
        # Entries whose file could not be opened have nothing to keep.
        for path in [
            path for path, entry in self._entries.items() if entry.users == 0 and entry.file is None
        ]:
            del self._entries[path]
        idle = [path for path, entry in self._entries.items() if entry.users == 0]
        for path in idle[: max(0, len(self._entries) - self._limit)]:
            _close(self._entries.pop(path))


def _close(entry: _Entry) -> None:
    if entry.file is not None:
        entry.file.source.close()
