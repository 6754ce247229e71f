"""Random 64-bit keys that are the same on every platform and with every numpy.

Only two parts of `numpy.random` promise a stable stream: `SeedSequence` and the raw output of bit
generators. The methods of `Generator` (shuffle, integers, ...) may change between releases, and a plan
that changed with numpy would make a saved position point elsewhere. So everything here is raw 64-bit
words and integer arithmetic: a shuffle is the order of random keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# By name, so that workers need not load the package, which numpy leaves until somebody looks at it.
from numpy.random import PCG64, SeedSequence

from lrstream.errors import UsageError

__all__ = ["RandomKeys", "scale_to_range", "scale_to_ranges"]

UInt64Array = npt.NDArray[np.uint64]

_LOW_HALF = np.uint64(0xFFFF_FFFF)
_HALF_BITS = np.uint64(32)
_FEW_WORDS = 64


def scale_to_range(raw: UInt64Array, size: int) -> UInt64Array:
    """Map uniform 64-bit words to [0, size) by the high half of the 128-bit product.

    Args:
        raw: uint64 of any shape.
        size: In [1, 2**64).

    Returns:
        uint64 of the same shape, `raw * size >> 64`; monotonic in `raw`, and uniform but for 2**-64.
    """
    if raw.size <= _FEW_WORDS:  # the product itself takes less time than so many operations on arrays
        return np.array([word * size >> 64 for word in raw.ravel().tolist()], np.uint64).reshape(raw.shape)
    raw_high, raw_low = raw >> _HALF_BITS, raw & _LOW_HALF
    size_high, size_low = np.uint64(size >> 32), np.uint64(size & 0xFFFF_FFFF)
    # Each partial sum stays below 2**64: (2**32 - 1)**2 + (2**32 - 1) < 2**64.
    carry = raw_high * size_low + ((raw_low * size_low) >> _HALF_BITS)
    middle = raw_low * size_high + (carry & _LOW_HALF)
    product: UInt64Array = raw_high * size_high + (carry >> _HALF_BITS) + (middle >> _HALF_BITS)
    return product


def scale_to_ranges(raw: UInt64Array, sizes: UInt64Array | np.uint64) -> npt.NDArray[np.int64]:
    """Map uniform 64-bit words to [0, size) by the product with their high halves.

    Args:
        raw: uint64 of any shape.
        sizes: For all of them or for each, in [1, 2**32); the share of a number is right within
            ``size / 2**32`` of it.

    Returns:
        int64 of the same shape.
    """
    words = raw >> _HALF_BITS
    words *= sizes
    words >>= _HALF_BITS
    scaled: npt.NDArray[np.int64] = words.view(np.int64)
    return scaled


class RandomKeys:
    """A stream of random keys, fully determined by a tuple of integers.

    Args:
        *entropy: Integers in [0, 2**64), for example (purpose, seed, epoch, rank, worker). Different
            tuples give independent streams, also where one is a prefix of the other.

    Not thread-safe: the order of calls is part of the stream.
    """

    def __init__(self, *entropy: int) -> None:
        # SeedSequence splits large numbers into 32-bit words and pads with zeros, so [2**32] and [0, 1],
        # or [1] and [1, 0], would be one stream. Two words for each number and the count keep them apart.
        words: list[int] = [len(entropy)]
        for value in entropy:
            if not 0 <= value < 2**64:
                raise UsageError(f"{value} cannot seed a random stream, expected an integer in [0, 2**64).")
            words += [value & 0xFFFF_FFFF, value >> 32]
        self._generator = PCG64(SeedSequence(words))

    def raw(self, shape: int | Sequence[int]) -> UInt64Array:
        """Uniform words, uint64[shape]; rows are consumed in order, whatever the shape."""
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        words: UInt64Array = self._generator.random_raw(math.prod(dims))
        return words.reshape(dims)

    def between(self, low: int, high: int, count: int) -> UInt64Array:
        """`count` keys, uniform in the half-open range [low, high), uint64[count]."""
        return scale_to_range(self.raw(count), high - low) + np.uint64(low)

    def permutation(self, count: int) -> npt.NDArray[np.int64]:
        """A random order of range(count), int64[count]."""
        return np.argsort(self.raw(count), kind="stable").astype(np.int64)
