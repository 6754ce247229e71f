"""The numeric features of an episode side by side, so that a sample takes one copy of all (LD-7).

A robot's sample has ten small tensors or more, and making each of them costs more than copying all of their
bytes. An episode therefore keeps its rows as one structured array. A sample that is going to be stacked
copies its row into a row of the batch, and stacking takes the fields apart, for all samples at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PackedRows", "RowPlan", "pack_rows", "row_plan"]

PackedRows = NDArray[np.void]
"""Structured ``(n,)``: a field for each numeric feature."""


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """What samples take from packed rows. Equal ones are one object in a process: `row_plan`.

    Attributes:
        dtype: Of packed rows.
        keys: Fields that samples have as they are; the others are in windows.
    """

    dtype: np.dtype[np.void]
    keys: tuple[str, ...]


@lru_cache(maxsize=64)
def row_plan(dtype: np.dtype[np.void], left_out: frozenset[str]) -> RowPlan:
    """The plan for rows of a type, without some of their fields."""
    return RowPlan(dtype, tuple(key for key in dtype.names or () if key not in left_out))


def pack_rows(columns: Mapping[str, NDArray[Any]]) -> PackedRows:
    """Copy the columns of an episode, each ``(n, *shape)``, into packed rows."""
    dtype = _row_dtype(tuple((key, column.dtype, column.shape[1:]) for key, column in columns.items()))
    packed = np.empty(len(next(iter(columns.values()))), dtype=dtype)
    for key, column in columns.items():
        packed[key] = column
    return packed


@lru_cache(maxsize=64)
def _row_dtype(fields: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> np.dtype[np.void]:
    """One object for rows of one kind: it is compared by identity. Aligned, as tensors need it."""
    return np.dtype(list(fields), align=True)
