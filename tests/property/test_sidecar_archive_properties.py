"""Only lrstream's errors leave the archive reader, whatever the bytes (K29)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrstream.errors import LrstreamError
from lrstream.sidecar.archive import ArchiveReader, write_archive
from tests.support.tracks import assert_same_track, identity_of, make_track, make_tracks


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("archive") / "good.npz"
    tracks = make_tracks(2, num_samples=9)
    write_archive(path, identity_of(tracks), tracks)
    return path.read_bytes()


def read_all(data: bytes) -> bool:
    """Whether the archive was accepted; any error but our own fails the test."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x.npz")
        path.write_bytes(data)
        try:
            with ArchiveReader(path) as reader:
                reader.verify()
        except LrstreamError:
            return False
        return True


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bytes(good: bytes, data: st.DataObject) -> None:
    mutated = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    read_all(bytes(mutated))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bytes_in_the_directory(good: bytes, data: st.DataObject) -> None:
    """The central directory, where a ZIP keeps sizes and offsets, gets more attention."""
    start = good.index(b"PK\x01\x02")
    mutated = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        mutated[data.draw(st.integers(start, len(good) - 1))] = data.draw(st.integers(0, 255))
    read_all(bytes(mutated))


@settings(max_examples=60, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_truncated_files_are_never_accepted(good: bytes, cut: float) -> None:
    assert not read_all(good[: int(cut * len(good))])


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    assert not read_all(data)


@settings(max_examples=30, deadline=None)
@given(
    num_samples=st.integers(1, 200),
    gop=st.integers(1, 40),
    reordered=st.booleans(),
    contiguous=st.booleans(),
    timescale=st.sampled_from([30, 1000, 15360, 90000]),
    duration=st.integers(0, 2**31),
    seed=st.integers(0, 99),
)
def test_round_trip(
    num_samples: int, gop: int, reordered: bool, contiguous: bool, timescale: int, duration: int, seed: int
) -> None:
    track = make_track(
        num_samples=num_samples, gop=gop, timescale=timescale, reordered=reordered,
        duration=duration // 4, contiguous=contiguous, seed=seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x.npz")
        write_archive(path, identity_of([track]), [track])
        with ArchiveReader(path) as reader:
            assert_same_track(reader.track(track.file_path), track)
