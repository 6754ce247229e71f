"""The mapped index gives what the archive holds, opens quickly, and survives replacement (SC-9, SC-10)."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lrstream.errors import AccessError, DiskFullError, NotFoundError, SidecarError
from lrstream.index import open as open_module
from lrstream.index import records
from lrstream.index.batch import BatchRows
from lrstream.index.generation import IndexDirectory, list_generations
from lrstream.index.mapping import IndexMapping
from lrstream.index.open import ArchiveIndex, MappedIndex, find_index, open_index
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.archive import write_archive
from lrstream.sidecar.lock import ProcessLock
from tests.support.tracks import assert_same_track, identity_of, make_track, make_tracks


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def tracks() -> list[TrackIndex]:
    odd = make_track("videos/b/3.mp4", num_samples=40, timescale=1000, duration=33)
    odd.samples.pts_s[5] += 1e-9
    return [
        make_track("videos/a/0.mp4", num_samples=100),
        make_track("videos/a/1.mp4", num_samples=1),
        make_track(
            "videos/b/2.mp4", num_samples=90, reordered=True, gop=30, offset_s=-1 / 15, contiguous=False
        ),
        odd,
        make_track("videos/b/4.mp4", num_samples=50, start=6 * 2**30, gop=1),
    ]


@pytest.fixture
def archive(tmp_path: Path, tracks: list[TrackIndex]) -> Path:
    path = tmp_path / "archive.npz"
    write_archive(path, identity_of(tracks), tracks)
    return path


def mapped(archive: Path, home: Path) -> MappedIndex:
    index = open_index(archive, home=home)
    assert isinstance(index, MappedIndex)
    return index


def test_every_record_equals_the_archive(archive: Path, home: Path, tracks: list[TrackIndex]) -> None:
    index = mapped(archive, home)
    assert index.paths == tuple(track.file_path for track in tracks)
    assert len(index) == 5
    assert index.identity == identity_of(tracks)
    for track in tracks:
        found = index.track(track.file_path)
        assert_same_track(found, track)
        for name in ("pts_s", "sizes_bytes", "durations_ticks", "sync_samples", "offsets_bytes"):
            assert not getattr(found.samples, name).flags.writeable
    for path in ("videos/a/00.mp4", "", "zzz"):
        with pytest.raises(NotFoundError, match="5 source files"):
            index.track(path)


def test_any_number_of_record_batches(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracks = make_tracks(23, num_samples=7)
    path = tmp_path / "x.npz"
    write_archive(path, identity_of(tracks), tracks)
    monkeypatch.setattr("lrstream.index.convert._BATCH_ROWS", 4)
    index = mapped(path, home)
    assert pa.ipc.open_file(pa.memory_map(str(index.path))).num_record_batches == 6
    for track in tracks:
        assert_same_track(index.track(track.file_path), track)
    with pytest.raises(NotFoundError):
        index.track("videos/top/chunk-000/file-000003x.mp4")


def test_an_empty_archive(tmp_path: Path, home: Path) -> None:
    write_archive(tmp_path / "x.npz", identity_of([]), [])
    index = mapped(tmp_path / "x.npz", home)
    assert index.paths == ()
    with pytest.raises(NotFoundError):
        index.track("x")


def test_at_most_five_bytes_for_each_frame_of_a_usual_file(tmp_path: Path, home: Path) -> None:
    usual, reordered = (
        make_track(num_samples=20_000),
        make_track(num_samples=20_000, reordered=True, gop=30, offset_s=-1 / 15),
    )
    for number, track in enumerate((usual, reordered)):
        path = tmp_path / f"{number}.npz"
        write_archive(path, identity_of([track]), [track])
        size = mapped(path, home).path.stat().st_size
        assert size <= 5 * 20_000 + 16_384


def test_conversion_happens_once(archive: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_index(archive, home=home) is None
    first = mapped(archive, home)
    monkeypatch.setattr(open_module, "convert", None)
    monkeypatch.setattr(open_module, "ArchiveReader", None)  # a second open does not read the archive at all
    again = mapped(archive, home)
    assert again.path == first.path
    assert find_index(archive, home=home) is not None


def test_a_touched_or_copied_archive_keeps_its_content_key(
    archive: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mapped(archive, home)
    os.utime(archive, (1, 1))
    assert find_index(archive, home=home) is None
    monkeypatch.setattr(open_module, "convert", None)
    assert mapped(archive, home).path == first.path
    assert find_index(archive, home=home) is not None


def test_a_replaced_archive_makes_a_new_generation_and_live_readers_stay_valid(
    archive: Path, home: Path, tracks: list[TrackIndex]
) -> None:
    old = mapped(archive, home)
    changed = [make_track(track.file_path, num_samples=33, seed=8) for track in tracks]
    write_archive(archive, identity_of(changed), changed)
    new = mapped(archive, home)
    assert new.path != old.path
    for before, after in zip(tracks, changed, strict=True):
        assert_same_track(old.track(before.file_path), before)
        assert_same_track(new.track(after.file_path), after)
    worker_of_old = pickle.loads(pickle.dumps(old))
    assert_same_track(worker_of_old.track(tracks[0].file_path), tracks[0])
    listed = {generation.path: generation.current for generation in list_generations(home)}
    assert listed == {old.path: False, new.path: True}


def test_a_replacement_of_equal_size_and_time_is_noticed(tmp_path: Path, home: Path) -> None:
    """Equal size and restored time stamps: the inode and its change time differ still (K23)."""
    path, other = tmp_path / "x.npz", tmp_path / "y.npz"
    tracks = [make_track(num_samples=50, seed=1)]
    write_archive(path, identity_of(tracks), tracks)
    mapped(path, home)
    before = path.stat()
    data = bytearray(path.read_bytes())
    shutil.copyfile(path, other)
    with other.open("r+b") as file:
        file.write(data)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)
    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert find_index(path, home=home) is None


def read_in_child(index: MappedIndex, path: str, results: multiprocessing.queues.Queue[int]) -> None:
    results.put(int(index.track(path).samples.sizes_bytes.sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same_index(
    archive: Path, home: Path, tracks: list[TrackIndex], method: str
) -> None:
    index = mapped(archive, home)
    index.track(tracks[0].file_path)
    context: Any = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=read_in_child, args=(index, tracks[2].file_path, results))
    child.start()
    assert results.get(timeout=30) == int(tracks[2].samples.sizes_bytes.sum())
    child.join(10)


def test_threads_share_one_index(archive: Path, home: Path, tracks: list[TrackIndex]) -> None:
    index, failures = mapped(archive, home), []

    def read() -> None:
        try:
            for _ in range(20):
                for track in tracks:
                    assert_same_track(index.track(track.file_path), track)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_decoded_records_are_bounded(
    archive: Path, home: Path, tracks: list[TrackIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_CACHE_BYTES", 1)
    index = mapped(archive, home)
    for track in tracks:
        index.track(track.file_path)
    assert index.track(tracks[-1].file_path) is index.track(tracks[-1].file_path)
    assert index.track(tracks[0].file_path) is not None
    assert len(index._mapping.get()._records) == 1


def test_without_a_writable_cache_the_archive_itself_is_read(
    archive: Path, home: Path, tracks: list[TrackIndex],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(self: object, timeout_s: float, **options: object) -> None:
        raise AccessError("read-only file system")

    monkeypatch.setattr(ProcessLock, "acquire", refuse)
    with caplog.at_level(logging.WARNING):
        index = open_index(archive, home=home)
    assert isinstance(index, ArchiveIndex)
    assert "without a mapped index" in caplog.text
    assert index.identity == identity_of(tracks)
    again = pickle.loads(pickle.dumps(index))
    for track in tracks:
        assert_same_track(again.track(track.file_path), track)
    again.close()
    assert_same_track(again.track(tracks[1].file_path), tracks[1])


def test_an_invalid_archive_gives_no_index(archive: Path, home: Path) -> None:
    from tests.support.tracks import replace_member

    replace_member(archive, "2/sample_sizes.npy", b"damaged")
    with pytest.raises(SidecarError, match="sample_sizes"):
        open_index(archive, home=home)
    assert not list(home.rglob("*.arrow"))
    assert not list(home.rglob("*.tmp"))
    with pytest.raises(NotFoundError):
        open_index(archive.with_name("absent.npz"), home=home)


def test_a_full_disk_leaves_nothing(archive: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lrstream.index.convert._batch", full)
    with pytest.raises(DiskFullError):
        open_index(archive, home=home)
    assert not list(home.rglob("*.arrow"))
    assert not list(home.rglob("*.tmp"))


def test_a_damaged_index_is_made_again(archive: Path, home: Path, tracks: list[TrackIndex]) -> None:
    path = mapped(archive, home).path
    whole = path.read_bytes()
    other = pa.BufferOutputStream()
    with pa.ipc.new_file(other, pa.schema([("path", pa.string())])):
        pass
    for data in (b"", whole[:100], whole[: len(whole) // 2], b"x" * 5000, other.getvalue().to_pybytes()):
        path.write_bytes(data)
        again = mapped(archive, home)
        for track in tracks:
            assert_same_track(again.track(track.file_path), track)
        again.close()


def test_a_broken_note_is_ignored(archive: Path, home: Path) -> None:
    mapped(archive, home)
    note = IndexDirectory(archive, home).path / "current.json"
    good = json.loads(note.read_text())
    for text in (
        "",
        "[]",
        "{}",
        json.dumps({**good, "key": "../../x"}),
        json.dumps({**good, "archive_state": 1}),
    ):
        note.write_text(text)
        assert mapped(archive, home).key == good["key"]


def test_opening_does_not_read_more_for_more_files(tmp_path: Path, home: Path) -> None:
    """Looking one file up touches one batch out of many, whatever the number of files."""
    tracks = make_tracks(400, num_samples=3)
    path = tmp_path / "x.npz"
    write_archive(path, identity_of(tracks), tracks)
    index = mapped(path, home)
    again = MappedIndex(index.path)
    mapping = again._mapping.get()
    assert mapping._batches == {}
    start = time.perf_counter()
    assert_same_track(again.track(tracks[377].file_path), tracks[377])
    assert time.perf_counter() - start < 1
    assert len(mapping._batches) == 1


def test_presentation_times_are_exact_for_ntsc_clocks(tmp_path: Path, home: Path) -> None:
    track = make_track(
        num_samples=3000, timescale=30000, duration=1001, reordered=True, offset_s=-2002 / 30000
    )
    write_archive(tmp_path / "x.npz", identity_of([track]), [track])
    found = mapped(tmp_path / "x.npz", home).track(track.file_path)
    np.testing.assert_array_equal(found.samples.pts_s, track.samples.pts_s, strict=True)


def test_arrays_are_made_when_they_are_looked_at(archive: Path, home: Path, tracks: list[TrackIndex]) -> None:
    index = mapped(archive, home)
    samples = index.track(tracks[2].file_path).samples
    assert samples.num_samples == tracks[2].samples.num_samples
    assert samples._made == {}  # type: ignore[attr-defined]
    assert samples.sizes_bytes is samples.sizes_bytes
    assert set(samples._made) == {"sizes"}  # type: ignore[attr-defined]


def test_a_record_outlives_its_index_and_travels(archive: Path, home: Path, tracks: list[TrackIndex]) -> None:
    index = mapped(archive, home)
    records = [index.track(track.file_path) for track in tracks]
    index.close()
    del index
    for record, track in zip(records, tracks, strict=True):
        assert_same_track(pickle.loads(pickle.dumps(record)), track)
        assert_same_track(record, track)


def test_pages_of_old_batches_are_given_back(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many more batches than stay mapped, asked for in any order and again: still the same."""
    tracks = make_tracks(60, num_samples=400)
    write_archive(tmp_path / "x.npz", identity_of(tracks), tracks)
    monkeypatch.setattr("lrstream.index.convert._BATCH_ROWS", 4)
    monkeypatch.setattr("lrstream.index.mapping._MOST_BATCHES", 2)
    given_back: set[bytes] = set()
    original = IndexMapping._give_back

    def give_back(self: IndexMapping, batch: BatchRows) -> None:
        given_back.add(batch.path_bytes(0))
        original(self, batch)

    monkeypatch.setattr(IndexMapping, "_give_back", give_back)
    index = mapped(tmp_path / "x.npz", home)
    rng = np.random.default_rng(0)
    for number in [*rng.permutation(60).tolist(), *rng.permutation(60).tolist()]:
        assert_same_track(index.track(tracks[number].file_path), tracks[number])
        monkeypatch.setattr(records, "_CACHE_BYTES", 0)  # asked for again, a record is made again
    assert given_back == {track.file_path.encode() for track in tracks[::4]}


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to measure a process")
def test_records_all_over_a_large_index_map_little_of_it(tmp_path: Path, home: Path) -> None:
    """A system maps up to 2 MiB around a byte that is looked at, so the records' own data are read."""
    rng = np.random.default_rng(0)
    tracks = make_tracks(2000, num_samples=2)
    one = make_track("x", num_samples=30_000)
    one.samples.sizes_bytes[:] = rng.integers(1, 1 << 24, 30_000)
    one.samples.offsets_bytes[:] = 4096 + np.cumsum(one.samples.sizes_bytes) - one.samples.sizes_bytes
    size = int(one.samples.offsets_bytes[-1] + one.samples.sizes_bytes[-1])
    large = [
        dataclasses.replace(one, file_path=tracks[place].file_path, file_size=size)
        for place in range(0, 2000, 20)
    ]
    tracks[::20] = large
    write_archive(tmp_path / "x.npz", identity_of(tracks), tracks)
    index = mapped(tmp_path / "x.npz", home)
    assert index.path.stat().st_size > 12_000_000
    index.track(tracks[1].file_path)

    def resident() -> int:
        status = Path("/proc/self/smaps").read_text()
        part = status.split(str(index.path), 1)[1]
        return int(next(line for line in part.splitlines() if line.startswith("Rss:")).split()[1]) << 10

    before = resident()
    held = [index.track(track.file_path) for track in large]
    assert len(held) == 100
    assert resident() - before < 4 << 20


def test_a_file_that_was_cut_after_it_was_mapped_is_refused(
    archive: Path, home: Path, tracks: list[TrackIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = mapped(archive, home)
    assert index.track(tracks[3].file_path).samples.num_samples == 40
    pread = os.pread
    monkeypatch.setattr(records, "_CACHE_BYTES", 0)
    index.track(tracks[0].file_path)
    monkeypatch.setattr(os, "pread", lambda file, size, place: pread(file, min(size, 5), place))
    with pytest.raises(SidecarError, match="ends within a cell of 320 bytes, 5 of them are left"):
        index.track(tracks[3].file_path)


@pytest.mark.parametrize("workers", [1, 3])
def test_conversion_by_any_number_of_threads_gives_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    tracks = make_tracks(40, num_samples=50)
    write_archive(tmp_path / "x.npz", identity_of(tracks), tracks)
    expected = mapped(tmp_path / "x.npz", tmp_path / "one").path.read_bytes()
    monkeypatch.setattr("lrstream.index.convert._usable_processors", lambda: workers)
    monkeypatch.setattr("lrstream.index.convert._AHEAD_BYTES", 1)  # each by itself
    found = mapped(tmp_path / "x.npz", tmp_path / "two").path.read_bytes()
    assert found == expected
