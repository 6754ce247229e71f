"""Compact forms give back every integer, and are as small as the design promises."""

from __future__ import annotations

import numpy as np
import pytest

from lrstream.errors import SidecarError
from lrstream.index.encoding import CONSTANT, DENSE, RUNS, decode, encode
from lrstream.index.format import derivable_offset_s
from tests.support.tracks import make_track


@pytest.mark.parametrize(
    ("values", "kind", "num_bytes"),
    [
        ([], CONSTANT, 0),
        ([7], CONSTANT, 0),
        ([-5] * 100, CONSTANT, 0),
        (list(range(256)), DENSE, 256),
        (list(range(1000, 1000 + 512 * 200, 512)), DENSE, 200),  # a common factor
        ([0, 65535] * 8 + [1], DENSE, 34),
        ([0, 65536] * 8 + [1], DENSE, 68),
        ([-(2**63), 2**63 - 1, 0], DENSE, 24),
        ([512] * 5000 + [513] + [512] * 5000, RUNS, 8 + 3),
        ([0] * 70_000 + [1] * 3, RUNS, 8 + 2),
    ],
)
def test_form_and_size(values: list[int], kind: int, num_bytes: int) -> None:
    array = np.array(values, np.int64)
    encoded = encode(array)
    assert (encoded.kind, len(encoded.data)) == (kind, num_bytes)
    decoded = decode(encoded, len(values))
    assert decoded.tolist() == values
    assert decoded.dtype == np.int64
    assert not decoded.flags.writeable


def test_a_constant_takes_no_memory() -> None:
    assert decode(encode(np.full(1000, 3)), 10**12).strides == (0,)


def test_data_that_do_not_fit_are_refused() -> None:
    dense = encode(np.arange(10))
    runs = encode(np.array([1] * 500 + [2] * 500))
    assert runs.kind == RUNS
    for encoded, length in [
        (dense, 9), (dense, 11), (dense._replace(width=3), 10), (dense._replace(kind=9), 10),
        (runs, 500), (runs._replace(num_runs=0), 1000), (runs._replace(data=runs.data[:-1]), 1000),
        (runs._replace(data=b""), 1000), (runs._replace(data=bytes(len(runs.data))), 1000),
    ]:  # fmt: skip
        with pytest.raises(SidecarError, match="mapped index"):
            decode(encoded, length)


@pytest.mark.parametrize("offset_s", [0.0, -1 / 15, -1024 / 15360, 2.5, 0.1 + 0.2, 1e-17, -0.033366666])
@pytest.mark.parametrize("reordered", [False, True])
def test_times_that_follow_from_the_formula_are_recognised(offset_s: float, reordered: bool) -> None:
    track = make_track(num_samples=500, reordered=reordered, offset_s=offset_s)
    found = derivable_offset_s(track.samples, track.timescale)
    if found is not None:
        again = make_track(num_samples=500, reordered=reordered, offset_s=found)
        assert again.samples.pts_s.tobytes() == track.samples.pts_s.tobytes()
    assert found is not None or offset_s == 1e-17


def test_times_that_do_not_follow_are_kept_dense() -> None:
    track = make_track(num_samples=50)
    track.samples.pts_s[17] = np.nextafter(track.samples.pts_s[17], 1)
    assert derivable_offset_s(track.samples, track.timescale) is None
