"""One mutated archive or mapped index through everything that reads it."""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
from pathlib import Path
from typing import Any

from lrstream.errors import LrstreamError
from lrstream.index.open import MappedIndex, open_index
from lrstream.mp4.span import episode_span
from lrstream.mp4.synthesis import mini_mp4_header, mini_mp4_size
from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.sidecar.archive import ArchiveReader, write_archive
from lrstream.sidecar.identity import SidecarIdentity
from tests.fuzz.limits import Outcome, measured
from tests.fuzz.sidecar_mutations import ARCHIVE_MUTATIONS, INDEX_MUTATIONS, RAW_MUTATIONS
from tests.support.tracks import identity_of, make_track

__all__ = ["run_sidecar_case"]

Content = tuple[SidecarIdentity, list[TrackIndex]]


def _tracks() -> list[TrackIndex]:
    return [
        make_track("videos/a/file-000.mp4", num_samples=9, seed=1),
        make_track("videos/a/file-001.mp4", num_samples=30, gop=6, reordered=True, offset_s=0.25, seed=2),
        make_track("videos/b/file-000.mp4", num_samples=40, contiguous=False, timescale=90_000, seed=3),
    ]


@functools.cache
def _originals() -> tuple[Content, bytes, bytes]:
    """What is stored, and the bytes of its archive and of its mapped index."""
    tracks = _tracks()
    identity = identity_of(tracks)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x.npz")
        write_archive(path, identity, tracks)
        index = open_index(path, home=Path(directory))
        data = index.path.read_bytes()
        index.close()
        return (identity, tracks), path.read_bytes(), data


def run_sidecar_case(number: int, seed: int, directory: Path) -> Outcome:
    """Case `number` of run `seed`, with files in `directory`.

    Raises:
        AssertionError: A limit was exceeded, or damaged content was accepted.
        BaseException: Anything but an error of lrstream escaped.
    """
    rng = random.Random(f"sidecar {seed} {number}")
    content, archive, index = _originals()
    is_archive = rng.random() < 0.6
    is_raw = rng.random() < 0.5
    own = ARCHIVE_MUTATIONS if is_archive else INDEX_MUTATIONS
    mutation = rng.choice(RAW_MUTATIONS if is_raw else own)
    damaged = mutation(rng, archive if is_archive else index)
    path = directory / ("x.npz" if is_archive else "x.arrow")
    path.write_bytes(damaged)
    name = f"{'archive' if is_archive else 'index'}: {mutation.__name__}"
    read = _read_archive if is_archive else _read_index
    found, first = measured(lambda: read(path), len(damaged))
    if found is None:
        return Outcome(name, "refused", first.cpu_s, first.peak_bytes, len(damaged))
    for track in found[1]:
        _check(track)
    # What the formats' own checksums cover cannot have changed without being noticed.
    if is_raw:
        _assert_same(found, content)
    _, second = measured(lambda: _use(found), len(damaged))
    cpu_s, peak = first.cpu_s + second.cpu_s, max(first.peak_bytes, second.peak_bytes)
    if is_archive and second.refusal is None:
        converted, third = measured(lambda: _convert(path, directory), len(damaged))
        assert converted is not None, f"accepted by one reader, refused by the other: {third.refusal}"
        _assert_same(converted, found)
        cpu_s, peak = cpu_s + third.cpu_s, max(peak, third.peak_bytes)
    result = "accepted" if second.refusal is None else "use refused"
    return Outcome(name, result, cpu_s, peak, len(damaged))


def _read_archive(path: Path) -> Content:
    with ArchiveReader(path) as reader:
        return reader.identity, list(reader.tracks())


def _read_index(path: Path) -> Content:
    index = MappedIndex(path)
    try:
        return index.identity, [index.track(name) for name in index.paths]
    finally:
        index.close()


def _convert(path: Path, home: Path) -> Content:
    index = open_index(path, home=home)
    try:
        return index.identity, [index.track(name) for name in index.paths]
    finally:
        index.close()
        if isinstance(index, MappedIndex):
            index.path.unlink()


def _use(content: Content) -> None:
    """Spans and sizes from whatever was accepted."""
    for track in content[1]:
        middle = float(track.samples.pts_s[track.samples.num_samples // 2])
        with contextlib.suppress(LrstreamError):
            span = episode_span(track.samples, middle, middle + 0.3)
            assert len(mini_mp4_header(track, span)) + span.num_bytes == mini_mp4_size(track, span)


def _check(track: TrackIndex) -> None:
    """The rules of the format, one value after the other."""
    samples: SampleTable = track.samples
    count = len(samples.pts_s)
    assert count >= 1
    for name in ("durations_ticks", "composition_offsets_ticks", "sizes_bytes", "offsets_bytes"):
        assert len(getattr(samples, name)) == count
    for offset, size in zip(samples.offsets_bytes.tolist(), samples.sizes_bytes.tolist(), strict=True):
        assert 0 <= offset <= offset + size <= track.file_size
    assert all(-1e308 < time < 1e308 for time in samples.pts_s.tolist())
    earlier = -1
    for sync in samples.sync_samples.tolist():
        assert earlier < sync < count
        earlier = sync


def _assert_same(found: Content, expected: Content) -> None:
    assert found[0] == expected[0], "another identity was accepted"
    assert len(found[1]) == len(expected[1])
    for one, other in zip(found[1], expected[1], strict=True):
        for name in TrackIndex.__slots__:
            if name != "samples":
                assert getattr(one, name) == getattr(other, name), f"{name} changed unnoticed"
        for name in SampleTable.__slots__:
            assert _bytes(one, name) == _bytes(other, name), f"{name} changed unnoticed"


def _bytes(track: TrackIndex, name: str) -> Any:
    return getattr(track.samples, name).tobytes()
