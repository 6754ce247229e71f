"""Exact, compact forms of integer arrays: what one row of the mapped index holds for one array.

Three forms, the shortest of which is taken:

    constant   one value for all; no data
    dense      ``base + scale * u`` with ``u`` of 1, 2, 4 or 8 bytes for each element
    runs       the elements at which the value changes, and the values there, as dense stores them

Arithmetic is modulo 2**64, so that every int64 array comes back bit for bit, whatever its range.
All data is little-endian.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import SidecarError

__all__ = ["CONSTANT", "DENSE", "RUNS", "EncodedArray", "Summary", "decode", "encode", "summarize"]

CONSTANT, DENSE, RUNS = 0, 1, 2

_WIDTHS = (1, 2, 4, 8)
_GCD_PROBE = 64


class EncodedArray(NamedTuple):
    """One encoded int64 array.

    Attributes:
        kind: `CONSTANT`, `DENSE` or `RUNS`.
        width: Bytes of each stored value, 0 for a constant.
        num_runs: Number of runs, 0 unless `RUNS`.
        base: Added to every value.
        scale: Factor of every stored value.
        data: The stored values; for runs, the starts (padded to 8 bytes), then the values.
    """

    kind: int
    width: int
    num_runs: int
    base: int
    scale: int
    data: bytes | memoryview


class Summary(NamedTuple):
    """Smallest and largest element of an array, and the sum of all; 0 for an empty one."""

    low: int
    high: int
    total: int


def encode(values: NDArray[np.int64]) -> EncodedArray:
    """The shortest exact form of `values` (int64, one dimension)."""
    if len(values) == 0:
        return EncodedArray(CONSTANT, 0, 0, 0, 1, b"")
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    if len(changes) == 0:
        return EncodedArray(CONSTANT, 0, 0, int(values[0]), 1, b"")
    base, scale, highest = _frame(values)
    width = _width_of(highest)
    starts_width = _width_of(len(values) - 1)
    num_runs = len(changes) + 1
    # Runs hold each distinct stretch once; their values span the same range as all values do.
    if _padded(num_runs * starts_width) + num_runs * width < len(values) * width:
        starts = np.concatenate([np.zeros(1, np.int64), changes])
        packed_starts = starts.astype(f"<u{starts_width}").tobytes()
        packed_starts += bytes(_padded(len(packed_starts)) - len(packed_starts))
        data = packed_starts + _pack(values[starts], base, scale, width)
        return EncodedArray(RUNS, width, num_runs, base, scale, data)
    return EncodedArray(DENSE, width, 0, base, scale, _pack(values, base, scale, width))


def decode(encoded: EncodedArray, length: int) -> NDArray[np.int64]:
    """The array of `length` elements that was encoded; read-only, and without memory for a constant.

    Raises:
        SidecarError: The data do not fit the description.
    """
    if encoded.kind == CONSTANT:
        return np.broadcast_to(np.int64(encoded.base), (length,))
    if encoded.kind == DENSE:
        return _frozen(_widened(encoded, _stored(encoded, 0, length)))
    if encoded.kind == RUNS:
        return _frozen(_decode_runs(encoded, length))
    raise SidecarError(f"The mapped index holds an array of unknown kind {encoded.kind}.")


def summarize(encoded: EncodedArray, length: int) -> Summary:
    """What `decode` would give, in three numbers: exact, and from the stored bytes alone.

    Raises:
        SidecarError: `decode` would refuse, or the elements do not fit 64 bits.
    """
    if length == 0 or encoded.kind == CONSTANT:
        low = high = encoded.base if length else 0
        return Summary(low, high, low * length)
    if encoded.kind == DENSE:
        stored = _stored(encoded, 0, length)
        total = _exact_sum(stored, None)
    elif encoded.kind == RUNS:
        starts, stored = _runs(encoded, length)
        total = _exact_sum(stored, np.diff(starts, append=length))
    else:
        raise SidecarError(f"The mapped index holds an array of unknown kind {encoded.kind}.")
    low, high = (encoded.base + encoded.scale * int(end) for end in (stored.min(), stored.max()))
    if not -(1 << 63) <= low <= high < 1 << 63:
        raise _misfit(encoded, length)
    return Summary(low, high, encoded.base * length + encoded.scale * total)


def _exact_sum(stored: NDArray[Any], counts: NDArray[np.int64] | None) -> int:
    """Sum of stored values, each taken as often as its count says; halves of 32 bits cannot overflow."""
    if stored.dtype.itemsize < 8:
        halves = [stored]
    else:
        halves = [stored & np.uint64(0xFFFF_FFFF), stored >> np.uint64(32)]
    sums = [
        int(half.sum(dtype=np.uint64) if counts is None else (half * counts.astype(np.uint64)).sum())
        for half in halves
    ]
    return sums[0] + (sums[1] << 32 if len(sums) == 2 else 0)


def _decode_runs(encoded: EncodedArray, length: int) -> NDArray[np.int64]:
    starts, stored = _runs(encoded, length)
    return np.repeat(_widened(encoded, stored), np.diff(starts, append=length))


def _runs(encoded: EncodedArray, length: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """First elements of the runs, and the stored value of each."""
    starts_width = _width_of(max(length - 1, 0))
    values_at = _padded(encoded.num_runs * starts_width)
    if not 1 <= encoded.num_runs <= length or values_at > len(encoded.data):
        raise _misfit(encoded, length)
    starts = np.frombuffer(encoded.data, f"<u{starts_width}", encoded.num_runs).astype(np.int64)
    if starts[0] != 0 or starts[-1] >= length or (np.diff(starts) <= 0).any():
        raise _misfit(encoded, length)
    return starts, _stored(encoded, values_at, encoded.num_runs)


def _frame(values: NDArray[np.int64]) -> tuple[int, int, int]:
    """Base, scale and highest stored value of the dense form."""
    base = int(values.min())
    above = _above(values, base)
    # Most arrays have no common factor, which a few elements show already.
    scale = int(np.gcd.reduce(above[:_GCD_PROBE]))
    if scale != 1:
        scale = int(np.gcd.reduce(above))
    return base, scale, int(above.max()) // scale


def _above(values: NDArray[np.int64], base: int) -> NDArray[np.uint64]:
    above: NDArray[np.uint64] = values.view(np.uint64) - np.uint64(base % 2**64)
    return above


def _pack(values: NDArray[np.int64], base: int, scale: int, width: int) -> bytes:
    return (_above(values, base) // np.uint64(scale)).astype(f"<u{width}").tobytes()


def _stored(encoded: EncodedArray, offset: int, count: int) -> NDArray[Any]:
    if encoded.width not in _WIDTHS or len(encoded.data) - offset != count * encoded.width:
        raise _misfit(encoded, count)
    return np.frombuffer(encoded.data, f"<u{encoded.width}", count, offset)


def _widened(encoded: EncodedArray, stored: NDArray[Any]) -> NDArray[np.int64]:
    wide = stored.astype(np.uint64)
    if encoded.scale != 1:
        wide *= np.uint64(encoded.scale)
    if encoded.base != 0:
        wide += np.uint64(encoded.base % 2**64)
    return wide.view(np.int64)


def _width_of(highest: int) -> int:
    return next(width for width in _WIDTHS if highest < 1 << 8 * width)


def _padded(num_bytes: int) -> int:
    return (num_bytes + 7) // 8 * 8


def _frozen(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.flags.writeable = False
    return array


def _misfit(encoded: EncodedArray, length: int) -> SidecarError:
    return SidecarError(
        f"The mapped index holds {len(encoded.data)} bytes (kind {encoded.kind}, width {encoded.width}, "
        f"{encoded.num_runs} runs) for {length} elements."
    )
