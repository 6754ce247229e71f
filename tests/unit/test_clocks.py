"""Waiting times: the logarithm of the mathematics module, the same however they are taken, and frozen."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lrstream.streaming.clocks import Waits, waits_of
from lrstream.streaming.keys import RandomKeys

FROZEN = ["0x1.22bd32abd0628p-1", "0x1.0eb2b4956d265p-2", "0x1.d40465101d824p-1", "0x1.7ba6d8433bf53p-3"]


def test_waits_are_logarithms_of_uniform_words() -> None:
    words = RandomKeys(1).raw(2000)
    words[:6] = [0, 2**64 - 1, 2**63, 2**63 - 1, 2**12, 2**62]
    for word, wait in zip(words.tolist(), waits_of(words).tolist(), strict=True):
        uniform = ((word >> 12) + 0.5) / 2**52
        assert wait > 0
        assert wait == pytest.approx(-math.log(uniform), rel=1e-12, abs=1e-16)


def test_waits_are_frozen() -> None:
    # Their last bits decide orders that saved positions point into, so they are compared exactly.
    assert [wait.hex() for wait in waits_of(RandomKeys(42, 0).raw(4)).tolist()] == FROZEN


def test_pieces_are_the_same_stream() -> None:
    whole = Waits(RandomKeys(3)).take(9000)
    waits = Waits(RandomKeys(3))
    pieces = [waits.take(count) for count in (0, 1, 63, 1, 500, 8000, 435)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert whole.mean() == pytest.approx(1, abs=0.04)
    assert (whole < math.log(2)).mean() == pytest.approx(0.5, abs=0.02)
