"""Arrow columns as the values that a sample has (LD-4, section 5 of the format notes).

LeRobot's map-style reader turns each row into Python objects and those into tensors, so whatever the
width of a column, its numbers arrive as float32, int64 or bool. The same types are produced here, by
one copy of the whole column.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lrstream.errors import DatasetFormatError
from lrstream.layout.info import Feature

__all__ = ["image_bytes", "language_rows", "numeric_array", "single_array", "strings"]


def numeric_array(column: pa.ChunkedArray | pa.Array, feature: Feature, where: str) -> NDArray[np.generic]:
    """Numbers of a feature, one row per frame.

    Args:
        column: Scalars, or lists (fixed or variable, nested or flat) with one length in every row.
        feature: Its declaration; values are cast to the declared dtype first.
        where: What is being read, for messages.

    Returns:
        A new array of float32, int64 or bool, shape ``(n, *feature.shape)``; a feature of shape
        ``(1,)`` is a scalar per row, shape ``(n,)``.

    Raises:
        DatasetFormatError: If a value is missing, a row has another shape, or a value does not fit the
            declared dtype.
    """
    array = _storage(single_array(column))
    num_rows = len(array)
    stored_shape: list[int] = []
    while _is_list(array.type):
        _refuse_nulls(array, feature, where, rows_per_value=math.prod(stored_shape))
        stored_shape.append(_row_length(array, feature, where))
        array = _storage(array.flatten())
    _refuse_nulls(array, feature, where, rows_per_value=math.prod(stored_shape))
    shape = () if feature.shape == (1,) else feature.shape
    flat = math.prod(stored_shape)
    # Lists of one value are accepted for scalars, and tensors stored flat for shaped features.
    if tuple(stored_shape) != shape and not (
        flat == math.prod(shape) and (len(stored_shape) == 1 or shape == ())
    ):
        raise DatasetFormatError(
            f"{where}: {feature.key} has rows of shape {tuple(stored_shape)}, but meta/info.json declares "
            f"{feature.shape}.",
            column=feature.key,
        )
    return _numbers(array, feature, where).reshape(num_rows, *shape)


def strings(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Strings (or lists of them) of each row; None where missing."""
    return _to_pylist(column)


def language_rows(column: pa.ChunkedArray | pa.Array, feature: Feature, where: str) -> list[Any]:
    """Language annotations of each row as Python objects; tool calls, stored as JSON, are parsed."""
    rows = _to_pylist(column)
    for row in rows:
        for annotation in row if isinstance(row, list) else ():
            if not isinstance(annotation, dict) or not isinstance(annotation.get("tool_calls"), list):
                continue
            try:
                annotation["tool_calls"] = [
                    json.loads(call) if isinstance(call, str) else call for call in annotation["tool_calls"]
                ]
            except (ValueError, RecursionError) as error:
                raise DatasetFormatError(
                    f"{where}: {feature.key} has a tool call that is not valid JSON: {error}.",
                    column=feature.key,
                ) from error
    return rows


def image_bytes(column: pa.ChunkedArray | pa.Array, feature: Feature, where: str) -> list[bytes]:
    """Encoded image (PNG, JPEG, TIFF, ...) of each row.

    Raises:
        DatasetFormatError: If a row has no image, or only the path of one outside the table.
    """
    array = single_array(column)
    paths: list[Any] = []
    if pa.types.is_struct(array.type):
        names = [array.type.field(number).name for number in range(array.type.num_fields)]
        if "bytes" not in names:
            raise DatasetFormatError(
                f"{where}: image feature {feature.key} is stored as {array.type}, which has no 'bytes'."
            )
        fields = dict(zip(names, array.flatten(), strict=True))
        array = fields["bytes"]
        paths = fields["path"].to_pylist() if "path" in fields else []
    if not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
        raise DatasetFormatError(
            f"{where}: image feature {feature.key} is stored as {array.type}, expected encoded bytes."
        )
    values: list[Any] = array.to_pylist()
    for row, value in enumerate(values):
        if not value:
            path = paths[row] if paths else None
            found = f"only the path {path!r} of a file outside the table" if path else "no image"
            raise DatasetFormatError(
                f"{where}: row {row} of {feature.key} holds {found}, expected encoded bytes.",
                hint="Write the dataset with its images embedded in the Parquet files.",
                column=feature.key,
            )
    return values


def _to_pylist(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def single_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One array out of a column's chunks, without a copy where there is only one."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 0:
        return pa.array([], type=column.type)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _storage(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        return _storage(array.storage)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _row_length(array: pa.Array, feature: Feature, where: str) -> int:
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    if len(array) == 0:
        # No row contradicts the declaration.
        return math.prod(feature.shape)
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    if (lengths != lengths[0]).any():
        raise DatasetFormatError(
            f"{where}: {feature.key} has lists of {lengths.min()} to {lengths.max()} values, but "
            f"meta/info.json declares {feature.shape}.",
            column=feature.key,
        )
    return int(lengths[0])


def _refuse_nulls(array: pa.Array, feature: Feature, where: str, rows_per_value: int) -> None:
    if array.null_count:
        first = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DatasetFormatError(
            f"{where}: {feature.key} is missing (null) in row {first // max(rows_per_value, 1)}.",
            column=feature.key,
        )


def _numbers(array: pa.Array, feature: Feature, where: str) -> NDArray[np.generic]:
    declared = pa.bool_() if feature.dtype == "bool" else pa.from_numpy_dtype(np.dtype(feature.dtype))
    try:
        if array.type != declared:
            array = array.cast(declared)
    except (pa.ArrowException, NotImplementedError) as error:
        raise DatasetFormatError(
            f"{where}: {feature.key} is stored as {array.type} and cannot be read as {feature.dtype}, which "
            f"meta/info.json declares: {error}.",
            column=feature.key,
        ) from error
    values: NDArray[np.generic] = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "b":
        return values.astype(np.bool_)
    if values.dtype.kind == "f":
        # A float64 beyond float32 becomes infinite, as it does in a tensor.
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise DatasetFormatError(f"{where}: {feature.key} has a value beyond int64: {values.max()}.")
    return values.astype(np.int64)
