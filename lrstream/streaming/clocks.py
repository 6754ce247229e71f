"""Random waiting times that are the same on every platform and with every numpy.

Whoever comes next after an exponentially distributed time, at a rate of its own, is next with a probability
in proportion to its rate, whatever has happened before. So a whole order that is drawn in proportion to
weights can be had by sorting, and those who join later take part from then on.

numpy's own logarithm may differ in its last bits between platforms. What is used here is exact everywhere:
splitting off the exponent, and sums, products and quotients, which IEEE 754 rounds in one way only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lrstream.streaming.keys import RandomKeys, UInt64Array

__all__ = ["Waits", "waits_of"]

Float64Array = npt.NDArray[np.float64]

_LN_2 = 0.6931471805599453
# ln m = 2 artanh((m - 1) / (m + 1)), as a series; for m in [1/2, 1) what is left out is below 1e-14 of it.
_SERIES = tuple(1 / power for power in range(25, 0, -2))
_SPARE_BITS = np.uint64(12)
_FEWEST, _MOST = 64, 4096


def waits_of(words: UInt64Array) -> Float64Array:
    """Exponentially distributed numbers of mean 1 from uniform words: float64 of the same shape, positive."""
    # 52 bits and a half, so that neither 0 nor 1 comes out.
    uniform = ((words >> _SPARE_BITS).astype(np.float64) + 0.5) * 2.0**-52
    mantissa, exponent = np.frexp(uniform)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.full_like(square, _SERIES[0])
    for factor in _SERIES[1:]:
        series = series * square + factor
    waits: Float64Array = -(exponent * _LN_2 + 2.0 * ratio * series)
    return waits


class Waits:
    """A stream of `waits_of`, made many at a time. Not thread-safe.

    Args:
        random: Source of the words.
    """

    def __init__(self, random: RandomKeys) -> None:
        self._random = random
        self._waits: Float64Array = np.empty(0)
        self._place = 0
        self._size = _FEWEST // 2

    def take(self, count: int) -> Float64Array:
        """The next `count` of them, float64[count]."""
        while self._place + count > len(self._waits):
            # Few at first: most plans of tests, and many of small datasets, need no more.
            self._size = min(2 * self._size, _MOST)
            more = waits_of(self._random.raw(self._size))
            self._waits = np.concatenate([self._waits[self._place :], more])
            self._place = 0
        self._place += count
        return self._waits[self._place - count : self._place]
