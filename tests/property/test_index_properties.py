"""Any table that an archive may hold comes back from the mapped index bit for bit (SC-9)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lrstream.index.encoding import decode, encode
from lrstream.index.format import track_from_row, track_to_row
from lrstream.index.open import MappedIndex, open_index
from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.sidecar.archive import write_archive
from tests.support.tracks import assert_same_track, identity_of, make_track

INT64 = st.integers(-(2**63), 2**63 - 1)
FILE_SIZE = 2**62


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.lists(INT64, max_size=40),
        st.lists(st.sampled_from([0, 512, 513, -7]), max_size=200),
        st.lists(st.tuples(INT64, st.integers(1, 300)), max_size=5).map(
            lambda runs: [value for value, count in runs for _ in range(count)]
        ),
    )
)
def test_integers(values: list[int]) -> None:
    array = np.array(values, np.int64)
    np.testing.assert_array_equal(decode(encode(array), len(values)), array, strict=True)


@st.composite
def tracks(draw: st.DrawFn) -> TrackIndex:
    count = draw(st.integers(1, 30))

    def column(values: st.SearchStrategy[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        constant = draw(st.booleans())
        drawn = [draw(values)] * count if constant else draw(st.lists(values, min_size=count, max_size=count))
        return np.array(drawn, np.int64)

    sync = sorted(draw(st.sets(st.integers(0, count - 1), min_size=1)))
    times = st.floats(-1e6, 1e6, allow_nan=False)
    samples = SampleTable(
        pts_s=np.array(draw(st.lists(times, min_size=count, max_size=count)), np.float64),
        durations_ticks=column(st.integers(0, 2**32 - 1)),
        composition_offsets_ticks=column(st.integers(-(2**31), 2**32 - 1)),
        sizes_bytes=column(st.integers(0, 2**32 - 1)),
        offsets_bytes=column(st.integers(0, FILE_SIZE - 2**32)),
        sync_samples=np.array(sync, np.int64),
    )
    base = make_track(f"videos/{draw(st.integers(0, 10**6))}.mp4", num_samples=1)
    scalars = {
        name: getattr(base, name) for name in TrackIndex.__slots__ if name not in ("samples", "file_size")
    }
    return TrackIndex(**scalars, file_size=FILE_SIZE, samples=samples)


@settings(max_examples=100, deadline=None)
@given(tracks())
def test_rows(track: TrackIndex) -> None:
    assert_same_track(track_from_row(track_to_row(track, None)), track)


@settings(max_examples=15, deadline=None)
@given(st.lists(tracks(), max_size=4, unique_by=lambda track: track.file_path))
def test_files(drawn: list[TrackIndex]) -> None:
    ordered = sorted(drawn, key=lambda track: track.file_path)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        write_archive(home / "x.npz", identity_of(ordered), ordered)
        index = open_index(home / "x.npz", home=home)
        assert isinstance(index, MappedIndex)
        assert index.identity == identity_of(ordered)
        for track in ordered:
            assert_same_track(index.track(track.file_path), track)
        index.close()
