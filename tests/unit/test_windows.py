"""Windows against plain loops, and refusals of what cannot be a window (K06, K07)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lrstream.errors import UsageError
from lrstream.layout.info import Feature
from lrstream.streaming.windows import WindowSpec, delta_frames

FEATURES = {
    "observation.state": Feature("observation.state", "numeric", "float32", (6,)),
    "action": Feature("action", "numeric", "float32", (6,)),
    "top": Feature("top", "video", "video", (96, 128, 3)),
    "note": Feature("note", "string", "string", (1,)),
    "language_events": Feature("language_events", "language", "language", ()),
}


def parse(deltas: Any, fps: float = 30, tolerance_s: float = 1e-4) -> WindowSpec:
    return WindowSpec.parse(deltas, FEATURES, fps=fps, tolerance_s=tolerance_s)


def test_without_deltas_there_are_no_windows() -> None:
    nothing: tuple[Any, ...] = (None, {})
    for deltas in nothing:
        spec = parse(deltas)
        assert dict(spec.keys) == {}
        assert spec.around(0, 1) == []


def test_keys_with_equal_deltas_share_one_window() -> None:
    spec = parse({"top": [-1 / 30, 0], "action": [0, 1 / 30], "observation.state": [-1 / 30, 0.0]})
    assert list(spec.keys) == ["top", "action", "observation.state"]
    assert spec.keys["top"] == spec.keys["observation.state"] != spec.keys["action"]
    assert [deltas.tolist() for deltas in spec.groups] == [[-1, 0], [0, 1]]


def test_windows_longer_than_the_episode_are_padded_everywhere_it_ends() -> None:
    """Two episodes of 300 frames and windows beyond both ends (K07)."""
    frames = [-105, -1, 0, 1, 105, 400]
    spec = parse({"action": [frame / 30 for frame in frames]})
    for anchor in range(300):
        (window,) = spec.around(anchor, 300)
        for place, delta in enumerate(frames):
            wanted = anchor + delta
            assert window.is_pad[place] == (not 0 <= wanted < 300)
            assert window.frames[place] == (0 if wanted < 0 else 299 if wanted > 299 else wanted)


def test_an_episode_of_one_frame_is_all_padding_but_one() -> None:
    (window,) = parse({"action": [-1 / 30, 0, 1 / 30]}).around(0, 1)
    assert window.frames.tolist() == [0, 0, 0]
    assert window.is_pad.tolist() == [True, False, True]
    assert window.frames.dtype == np.int64
    assert window.is_pad.dtype == np.bool_


@pytest.mark.parametrize("fps", [10, 15, 25, 29.97, 30, 50, 60])
def test_multiples_of_a_frame_are_accepted_however_they_are_rounded(fps: float) -> None:
    numbers = list(range(-200, 201))
    assert delta_frames("action", [number / fps for number in numbers], fps=fps, tolerance_s=1e-4) == numbers
    rounded = [round(number / fps, 4) for number in numbers]
    assert delta_frames("action", rounded, fps=fps, tolerance_s=1e-4) == numbers


def test_numpy_deltas_are_deltas() -> None:
    assert delta_frames("action", np.arange(-2, 3) / 10, fps=10, tolerance_s=1e-4) == [-2, -1, 0, 1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ({"speed": [0.0]}, "'speed', which is no feature.*observation.state"),
        ({"note": [0.0]}, "'note', but string features have no windows"),
        ({"language_events": [0.0]}, "language features have no windows"),
        ({"action": []}, r"is \[\], expected a list of seconds"),
        ({"action": 0.1}, "expected a list of seconds"),
        ({"action": "0.1"}, "expected a list of seconds"),
        ({"action": [0.0, None]}, "expected a list of seconds"),
        ({"action": [float("nan")]}, "contains nan"),
        ({"action": [float("inf")]}, "contains inf"),
        ({"action": [0.0, 0.02, 0.05]}, r"contains 0.02, 0.05, which lie between two frames.*1/30"),
    ],
)
def test_what_cannot_be_a_window_is_refused(deltas: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(deltas)


def test_the_tolerance_decides_what_lies_between_frames() -> None:
    assert delta_frames("action", [0.0334], fps=30, tolerance_s=1e-4) == [1]
    with pytest.raises(UsageError):
        delta_frames("action", [0.0335], fps=30, tolerance_s=1e-4)
    assert delta_frames("action", [0.0335], fps=30, tolerance_s=1e-3) == [1]


@pytest.mark.parametrize("fps", [10, 15, 29.97, 30, 60])
def test_without_tolerance_exact_multiples_are_accepted_and_others_told_by_how_much(fps: float) -> None:
    numbers = list(range(-200, 201))
    assert delta_frames("action", [number / fps for number in numbers], fps=fps, tolerance_s=0) == numbers
    with pytest.raises(UsageError, match=r"up to 1 µs away; allowed is 0 s \(tolerance_s\)"):
        delta_frames("action", [0.0, 3 / fps + 1e-6], fps=fps, tolerance_s=0)
