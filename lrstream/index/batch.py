"""Rows of one record batch of the mapped index, without an Arrow object for each cell."""

from __future__ import annotations

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


class BatchRows:
    """A checked record batch.

    Args:
        batch: As read; its columns stay where they are mapped.

    Raises:
        ArrowException: The batch contradicts itself.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        # Checking every offset of every column takes longer than reading a few rows: only paths, which are
        # searched, are checked as a whole here, others as they are used.
        batch.validate()
        self._columns = batch.columns
        self._paths = self._columns[_PATH]
        self._paths.validate(full=True)

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, place: int) -> str:
        """Path of the row at a place."""
        path: str = self._paths[place].as_py()
        return path

    def fingerprint(self, place: int) -> str | None:
        """Fingerprint of the row at a place."""
        text: str | None = self._fingerprints[place].as_py()
        return text

    def column(self, name: str) -> list[Any]:
        """One cell of each row."""
        column = self._columns[SCHEMA.names.index(name)]
        column.validate(full=True)
        values: list[Any] = column.to_pylist()
        return values

    def row(self, place: int) -> dict[str, Any]:
        """One row by column name; encoded arrays as views of the mapped file."""
        row: dict[str, Any] = {"path": self.path(place), "fingerprint": self.fingerprint(place)}
        for name, numbers in self._numbers.items():
            row[name] = numbers.item(place)
        for name, (choices, values) in self._shared.items():
            row[name] = values[choices.item(place)]
        for name, (bounds, data) in self._buffers.items():
            start, stop = bounds[place : place + 2].tolist()
            if not 0 <= start <= stop <= len(data):
                raise ValueError(f"the column {name} places a cell at [{start}, {stop}) of {len(data)} bytes")
            row[name] = data[start:stop]
        return row

    @cached_property
    def _fingerprints(self) -> pa.Array:
        column = self._columns[_FINGERPRINT]
        column.validate(full=True)
        return column

    @cached_property
    def _numbers(self) -> dict[str, NDArray[Any]]:
        return {name: _numbers_of(self._columns[place], name) for place, name in _NUMBERS}

    @cached_property
    def _shared(self) -> dict[str, tuple[NDArray[Any], list[Any]]]:
        """For each dictionary column the number of each row's value, and the values."""
        columns = {}
        for place, name in _SHARED:
            column = self._columns[place]
            column.validate(full=True)
            columns[name] = _numbers_of(column.indices, name), column.dictionary.to_pylist()
        return columns

    @cached_property
    def _buffers(self) -> dict[str, tuple[NDArray[np.int64], memoryview]]:
        """For each binary column where cells begin and end, and all their bytes."""
        columns = {}
        for place, name in _BUFFERS:
            column = self._columns[place]
            _require_values(column, name)
            buffers = column.buffers()
            data = memoryview(b"" if buffers[_DATA] is None else buffers[_DATA])
            bounds = np.frombuffer(buffers[_OFFSETS], np.int64, len(column) + 1, 8 * column.offset)
            columns[name] = bounds, data
        return columns


def _numbers_of(column: pa.Array, name: str) -> NDArray[Any]:
    _require_values(column, name)
    # Bits of truth values are the only ones that have to be copied.
    return np.asarray(column.to_numpy(zero_copy_only=not pa.types.is_boolean(column.type)))


def _require_values(column: pa.Array, name: str) -> None:
    if column.null_count:
        raise ValueError(f"the column {name} has no value in {column.null_count} rows")
