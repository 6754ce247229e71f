"""Windows have the map-style reader's values for any anchor, episode and deltas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lrstream.layout.info import Feature
from lrstream.streaming.windows import WindowSpec


@st.composite
def cases(draw: st.DrawFn) -> tuple[float, list[int], int, int]:
    fps = draw(st.sampled_from([5, 10, 15, 29.97, 30, 60, 100]))
    deltas = draw(st.lists(st.integers(-2000, 2000), min_size=1, max_size=12))
    length = draw(st.integers(1, 1500))
    return fps, deltas, length, draw(st.integers(0, length - 1))


@given(cases(), st.integers(0, 10**6))
def test_clamped_to_the_episode_and_marked(case: tuple[float, list[int], int, int], start: int) -> None:
    fps, deltas, length, anchor = case
    features = {"x": Feature("x", "numeric", "float32", (1,))}
    spec = WindowSpec.parse({"x": [d / fps for d in deltas]}, features, fps=fps, tolerance_s=1e-4)
    (window,) = spec.around(anchor, length)
    # As the map-style reader computes it, on indices of the whole dataset.
    first, stop, index = start, start + length, start + anchor
    expected = [max(first, min(stop - 1, index + delta)) - first for delta in deltas]
    is_pad = [(index + delta < first) or (index + delta >= stop) for delta in deltas]
    assert window.frames.tolist() == expected
    assert window.is_pad.tolist() == is_pad


@given(st.dictionaries(st.sampled_from("abcde"), st.lists(st.integers(-9, 9), min_size=1, max_size=4)))
def test_every_key_has_its_own_deltas(deltas: dict[str, list[int]]) -> None:
    features = {key: Feature(key, "numeric", "float32", (1,)) for key in "abcde"}
    seconds = {key: [d / 10 for d in frames] for key, frames in deltas.items()}
    spec = WindowSpec.parse(seconds, features, fps=10, tolerance_s=1e-4)
    assert list(spec.keys) == list(deltas)
    for key, frames in deltas.items():
        assert spec.groups[spec.keys[key]].tolist() == frames
    assert len(spec.groups) == len({tuple(frames) for frames in deltas.values()})
