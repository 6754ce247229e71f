"""Rows of one record batch of the mapped index, without an Arrow object for each cell."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lrstream.index.format import SCHEMA

__all__ = ["BatchRows"]

_FIELDS = list(enumerate(SCHEMA))
_NUMBERS = [
    (place, field.name)
    for place, field in _FIELDS
    if pa.types.is_primitive(field.type) or pa.types.is_boolean(field.type)
]
_SHARED = [(place, field.name) for place, field in _FIELDS if pa.types.is_dictionary(field.type)]
_BUFFERS = [(place, field.name) for place, field in _FIELDS if pa.types.is_large_binary(field.type)]
_PATH, _FINGERPRINT = SCHEMA.names.index("path"), SCHEMA.names.index("fingerprint")
_OFFSETS, _DATA = 1, 2  # buffers of a binary column

Cell = Callable[[int], Any]
"""Gives the value of a column at a place, which must be 0 or more."""


class BatchRows:
    """A checked record batch.

    Args:
        batch: As mapped; its columns stay where they are.
        read: Bytes ``[start, stop)`` of one of its buffers, however they are had.

    Raises:
        ArrowException: The batch contradicts itself.
    """

    def __init__(self, batch: pa.RecordBatch, read: Callable[[pa.Buffer, int, int], bytes]) -> None:
        # Checking every offset of every column takes longer than reading a few rows: they are checked as
        # they are used.
        batch.validate()
        self._read = read
        self._columns = batch.columns
        self._paths = _Texts(self._columns[_PATH])

    def __len__(self) -> int:
        return len(self._columns[_PATH])

    @cached_property
    def extent(self) -> tuple[int, int] | None:
        """Addresses ``[start, stop)`` that the buffers lie between; None where there is none."""
        buffers = [buffer for column in self._columns for buffer in column.buffers() if buffer]
        if not buffers:
            return None
        return min(one.address for one in buffers), max(one.address + one.size for one in buffers)

    def path_bytes(self, place: int) -> bytes:
        """Path of the row at a place, UTF-8: in the order of the rows, as texts are."""
        path = self._paths.at(place)
        if path is None:
            raise ValueError(f"the column path has no value in row {place}")
        return path

    def find(self, path: bytes) -> int | None:
        """Place of a path."""
        place = bisect_left(range(len(self)), path, key=self.path_bytes)
        return place if place < len(self) and self.path_bytes(place) == path else None

    def fingerprint(self, place: int) -> str | None:
        """Fingerprint of the row at a place."""
        text = self._fingerprints.at(place)
        return None if text is None else text.decode("utf-8")

    def column(self, name: str) -> list[Any]:
        """One cell of each row."""
        column = self._columns[SCHEMA.names.index(name)]
        column.validate(full=True)
        values: list[Any] = column.to_pylist()
        return values

    def row(self, place: int) -> dict[str, Any]:
        """One row by column name."""
        path = self.path_bytes(place).decode("utf-8")
        row: dict[str, Any] = {"path": path, "fingerprint": self.fingerprint(place)}
        for name, cell in self._numbers:
            row[name] = cell(place)
        for name, cell, values in self._shared:
            number = cell(place)
            if number < 0:
                raise ValueError(f"the column {name} refers to value {number}")
            row[name] = values[number]
        for name, bound, data in self._buffers:
            start, stop = bound(place), bound(place + 1)
            size = 0 if data is None else data.size
            if not 0 <= start <= stop <= size:
                raise ValueError(f"the column {name} places a cell at [{start}, {stop}) of {size} bytes")
            row[name] = b"" if data is None or start == stop else self._read(data, start, stop)
        return row

    @cached_property
    def _fingerprints(self) -> _Texts:
        return _Texts(self._columns[_FINGERPRINT])

    @cached_property
    def _numbers(self) -> list[tuple[str, Cell]]:
        return [(name, _numbers_of(self._columns[place], name).item) for place, name in _NUMBERS]

    @cached_property
    def _shared(self) -> list[tuple[str, Cell, list[Any]]]:
        """For each dictionary column the number of each row's value, and the values."""
        columns: list[tuple[str, Cell, list[Any]]] = []
        for place, name in _SHARED:
            column = self._columns[place]
            column.dictionary.validate(full=True)
            numbers = _numbers_of(column.indices, name)
            columns.append((name, numbers.item, column.dictionary.to_pylist()))
        return columns

    @cached_property
    def _buffers(self) -> list[tuple[str, Cell, pa.Buffer | None]]:
        """For each binary column where cells begin and end, and where all their bytes are."""
        columns: list[tuple[str, Cell, pa.Buffer | None]] = []
        for place, name in _BUFFERS:
            column = self._columns[place]
            _require_values(column, name)
            buffers = column.buffers()
            bounds = np.frombuffer(buffers[_OFFSETS], np.int64, len(column) + 1, 8 * column.offset)
            columns.append((name, bounds.item, buffers[_DATA]))
        return columns


class _Texts:
    """A column of texts, UTF-8."""

    def __init__(self, column: pa.Array) -> None:
        _, offsets, text = column.buffers()
        self._bound = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset).item
        self._text = memoryview(b"" if text is None else text)
        self._length = len(column)
        self._is_valid = column.is_valid().to_numpy(zero_copy_only=False).item if column.null_count else None

    def at(self, place: int) -> bytes | None:
        """The text at a place."""
        if not 0 <= place < self._length:
            raise IndexError(f"there is no row {place} of {self._length}")
        if self._is_valid is not None and not self._is_valid(place):
            return None
        start, stop = self._bound(place), self._bound(place + 1)
        if not 0 <= start <= stop <= len(self._text):
            raise ValueError(f"a text lies at [{start}, {stop}) of {len(self._text)} bytes")
        return bytes(self._text[start:stop])


def _numbers_of(column: pa.Array, name: str) -> NDArray[Any]:
    _require_values(column, name)
    # Bits of truth values are the only ones that have to be copied.
    return np.asarray(column.to_numpy(zero_copy_only=not pa.types.is_boolean(column.type)))


def _require_values(column: pa.Array, name: str) -> None:
    if column.null_count:
        raise ValueError(f"the column {name} has no value in {column.null_count} rows")
