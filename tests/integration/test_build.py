"""Building a sidecar from real files (SC-1, SC-2, SC-3, K11), judged by FFmpeg's demuxer."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrstream.demo import WrittenDataset
from lrstream.errors import InputError, MalformedMp4Error, NotFoundError, TransferError, UsageError
from lrstream.layout.layout import DatasetLayout, load_layout
from lrstream.mp4 import movie
from lrstream.mp4 import probe as probe_module
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar import build as build_module
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.build import BuildProgress, SourcesChangedError, build_sidecar
from lrstream.sidecar.finished import Record
from lrstream.sidecar.identity import SourceFile
from lrstream.sidecar.resolve import build_locked
from lrstream.sidecar.writer import EncodedSource, encode_source
from lrstream.storage.byte_source import ByteSource
from lrstream.storage.local import LocalStore
from lrstream.storage.location import parse_location
from lrstream.storage.store import DatasetStore, open_store
from tests.support import faults
from tests.support.datasets import copy_dataset
from tests.support.media import demux
from tests.support.shared import SHARED


def opened(root: Path) -> tuple[DatasetStore, DatasetLayout]:
    store = open_store(parse_location(root))
    return store, load_layout(store)


def video_paths(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob("videos/**/*.mp4"))


def assert_like_ffmpeg(archive: Path, root: Path) -> None:
    """Sizes, offsets, times and keyframes of every file as FFmpeg's demuxer reports them."""
    with np.load(archive, allow_pickle=False) as data:
        manifest = json.loads(data["manifest_json"].item())
        assert [entry["file_path"] for entry in manifest["files"]] == video_paths(root)
        for number, entry in enumerate(manifest["files"]):
            packets = demux(root / entry["file_path"])
            assert data[f"{number}/sample_sizes"].tolist() == packets.sizes
            assert data[f"{number}/sample_offsets"].tolist() == packets.positions
            assert data[f"{number}/sync_samples"].tolist() == packets.keyframes
            np.testing.assert_allclose(data[f"{number}/sample_pts"], packets.pts_s, rtol=0, atol=1e-9)
            assert entry["file_size"] == (root / entry["file_path"]).stat().st_size


@pytest.mark.parametrize("workers", [1, 7])
def test_an_archive_of_a_whole_dataset(
    standard_dataset: WrittenDataset, tmp_path: Path, workers: int
) -> None:
    store, layout = opened(standard_dataset.root)
    report = build_sidecar(store, layout, destination=tmp_path / "x.npz", workers=workers)
    assert_like_ffmpeg(tmp_path / "x.npz", standard_dataset.root)
    files = video_paths(standard_dataset.root)
    assert report.num_sources == len(files)
    assert report.num_samples == 2 * sum(standard_dataset.spec.episode_lengths)
    assert report.requests == len(files)
    assert report.archive_bytes == (tmp_path / "x.npz").stat().st_size
    assert report.source_bytes == sum((standard_dataset.root / path).stat().st_size for path in files)
    assert os.listdir(tmp_path) == ["x.npz"]


@pytest.mark.parametrize("name", ["h264", "hevc_open", "depth"])
def test_reordered_and_deep_videos(dataset_cache: Any, tmp_path: Path, name: str) -> None:
    root = dataset_cache.get(name).root
    build_sidecar(*opened(root), destination=tmp_path / "x.npz")
    assert_like_ffmpeg(tmp_path / "x.npz", root)


def test_the_number_of_workers_does_not_change_a_byte(demo_dataset: WrittenDataset, tmp_path: Path) -> None:
    store, layout = opened(demo_dataset.root)
    for workers in (1, 2, 16):
        build_sidecar(store, layout, destination=tmp_path / f"{workers}.npz", workers=workers)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


@pytest.mark.skipif(SHARED is None, reason="needs the shared datasets")
@pytest.mark.parametrize(
    "name", ["av1_two_cameras", "h264_bframes_gop30", "hevc_gop12", "images_only", "video_and_depth"]
)
def test_datasets_by_lerobots_own_writer(name: str, tmp_path: Path) -> None:
    assert SHARED is not None
    root = SHARED / "datasets" / name
    build_sidecar(*opened(root), destination=tmp_path / "x.npz")
    assert_like_ffmpeg(tmp_path / "x.npz", root)


def test_a_dataset_without_videos(image_dataset: WrittenDataset, tmp_path: Path) -> None:
    report = build_sidecar(*opened(image_dataset.root), destination=tmp_path / "x.npz")
    assert report.num_sources == 0
    with ArchiveReader(tmp_path / "x.npz") as reader:
        assert reader.paths == ()


FAULTS: list[tuple[Callable[[Path], faults.Broken], str]] = [
    (faults.lfs_pointer_mp4, "Git LFS pointer"),
    (faults.empty_mp4, "empty"),
    (faults.not_mp4, "not an MP4"),
    (faults.truncated_before_moov, "truncated"),
    (faults.truncated_payload, "beyond|truncated|end"),
    (faults.fragmented_mp4, "fragment"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_each_fault_has_its_own_message(
    tiny_dataset: WrittenDataset, tmp_path: Path, fault: Callable[[Path], faults.Broken], message: str
) -> None:
    broken = fault(copy_dataset(tiny_dataset, tmp_path / "d"))
    with pytest.raises(InputError, match=f"(?i){message}") as caught:
        build_sidecar(*opened(broken.root), destination=tmp_path / "out" / "x.npz")
    assert broken.path in str(caught.value)
    assert os.listdir(tmp_path / "out") == []


def test_all_bad_files_are_reported_in_one_run(demo_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(demo_dataset, tmp_path / "d")
    files = video_paths(root)
    faults.lfs_pointer(root / files[0])
    (root / files[2]).write_bytes(b"")
    (root / files[4]).write_bytes(b"<html>" * 100)
    before = build_sidecar(*opened(demo_dataset.root), destination=tmp_path / "x.npz").path.read_bytes()
    with pytest.raises(MalformedMp4Error, match=rf"3 of {len(files)} video files") as caught:
        build_sidecar(*opened(root), destination=tmp_path / "x.npz")
    failures = caught.value.fields["failures"]
    assert [failure.path for failure in failures] == [files[0], files[2], files[4]]
    assert len({failure.message for failure in failures}) == 3
    for path in (files[0], files[2], files[4]):
        assert path in str(caught.value)
    assert "git lfs pull" in str(caught.value)
    assert (tmp_path / "x.npz").read_bytes() == before


def test_missing_videos_are_all_named(demo_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(demo_dataset, tmp_path / "d")
    files = video_paths(root)
    for path in files[1:3]:
        (root / path).unlink()
    with pytest.raises(NotFoundError) as caught:
        build_sidecar(*opened(root), destination=tmp_path / "x.npz")
    assert all(path in str(caught.value) for path in files[1:3])


def test_progress_ends_at_the_total(demo_dataset: WrittenDataset, tmp_path: Path) -> None:
    reports: list[BuildProgress] = []
    store, layout = opened(demo_dataset.root)
    build_sidecar(store, layout, destination=tmp_path / "x.npz", workers=3, progress=reports.append)
    assert [report.done for report in reports] == sorted(report.done for report in reports)
    assert reports[0].done == 0
    assert (reports[-1].done, reports[-1].total, reports[-1].failed) == (6, 6, 0)
    assert reports[-1].bytes_read > 0


class CountingStore(LocalStore):
    """A local store that notes how many sources are open at the same time, and may delay or change them."""

    def __init__(
        self, root: Path, on_open: Callable[[str], None] | None = None, reads_at_once: int = 1
    ) -> None:
        super().__init__(parse_location(root))
        # Each read waits until as many have been under way at the same time, however long threads take.
        self.reads_wanted, self.reads_met = reads_at_once, threading.Event()
        self.now = self.most = self.reads = self.most_reads = 0
        self.opened: list[str] = []
        self.guard = threading.Lock()
        self.on_open = on_open

    def open(self, path: str, size: int | None = None) -> Any:
        source: ByteSource = super().open(path, size)
        if not path.endswith(".mp4"):
            return source
        with self.guard:
            self.opened.append(path)
            self.now += 1
            self.most = max(self.most, self.now)
        if self.on_open is not None:
            self.on_open(path)
        read = source.read_upto

        def counted_read(start: int, stop: int) -> tuple[bytes, int]:
            with self.guard:
                self.reads += 1
                self.most_reads = max(self.most_reads, self.reads)
                if self.reads >= self.reads_wanted:
                    self.reads_met.set()
            assert self.reads_met.wait(30), f"{self.most_reads} reads at once, expected {self.reads_wanted}"
            time.sleep(0.02)  # for others that would come in addition
            with self.guard:
                self.reads -= 1
            return read(start, stop)

        source.read_upto = counted_read  # type: ignore[method-assign]
        close, open_sources = source.close, [path]

        def counted_close() -> None:
            with self.guard:
                self.now -= len(open_sources)  # closing twice is allowed
                open_sources.clear()
            close()

        source.close = counted_close  # type: ignore[method-assign]
        return source


def test_no_more_sources_are_read_than_workers(demo_dataset: WrittenDataset, tmp_path: Path) -> None:
    """Or a few more, whose threads wait for a place among those that read, or compress what they have."""
    store = CountingStore(demo_dataset.root, reads_at_once=2)
    build_sidecar(store, load_layout(store), destination=tmp_path / "x.npz", workers=2)
    assert 2 <= store.most <= 2 + min(2, os.cpu_count() or 1)
    assert store.most_reads == 2
    assert store.now == 0
    assert sorted(store.opened) == video_paths(demo_dataset.root)
    with pytest.raises(UsageError, match="workers is 0"):
        build_sidecar(store, load_layout(store), destination=tmp_path / "x.npz", workers=0)


def test_a_video_replaced_during_the_build_is_noticed(demo_dataset: WrittenDataset, tmp_path: Path) -> None:
    """The first build ends without a file, the second has the new content."""
    root = copy_dataset(demo_dataset, tmp_path / "d")
    files = video_paths(root)
    replaced = threading.Event()

    def replace_first_when_last_is_read(path: str) -> None:
        if path == files[-1] and not replaced.is_set():
            replaced.set()
            faults.replace_mp4(root / files[0], keep_mtime=True)

    store = CountingStore(root, replace_first_when_last_is_read)
    layout = load_layout(store)
    with pytest.raises(SourcesChangedError, match=files[0]):
        build_sidecar(store, layout, destination=tmp_path / "out" / "x.npz", workers=1)
    assert os.listdir(tmp_path / "out") == []

    replaced.clear()
    store.opened.clear()
    build_locked(store, layout, destination=tmp_path / "out" / "x.npz", workers=1)
    assert sorted(store.opened) == sorted([*files, files[0]])  # the second attempt reads what has changed
    assert_like_ffmpeg(tmp_path / "out" / "x.npz", root)


def test_a_dataset_that_never_rests_is_an_error(tiny_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(tiny_dataset, tmp_path / "d")
    store = CountingStore(root, lambda path: os.utime(root / path))
    with pytest.raises(SourcesChangedError, match="changed while") as caught:
        build_locked(store, load_layout(store), destination=tmp_path / "out" / "x.npz")
    assert caught.value.exit_code == 5
    assert not (tmp_path / "out" / "x.npz").exists()


class Kept:
    """Records of earlier builds, by content."""

    def __init__(self) -> None:
        self.tracks: dict[tuple[str, str | None], TrackIndex] = {}

    def records(self, source: SourceFile, fingerprint: str | None) -> Iterable[Record]:
        key = source.path, fingerprint
        return [functools.partial(self.tracks.get, key)] if key in self.tracks else []

    def keep(self, track: TrackIndex, fingerprint: str | None) -> None:
        self.tracks[track.file_path, fingerprint] = track

    def keep_packed(self, packed: bytes, fingerprint: str | None) -> None:
        raise AssertionError("only other processes pack what they have made")


def test_only_changed_sources_are_read_again(demo_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(demo_dataset, tmp_path / "d")
    store, kept = CountingStore(root), Kept()
    layout = load_layout(store)
    build_sidecar(store, layout, destination=tmp_path / "x.npz", finished=kept)
    store.opened.clear()
    changed = faults.replaced_mp4(root).path
    report = build_sidecar(store, layout, destination=tmp_path / "x.npz", finished=kept)
    assert store.opened == [changed]
    assert report.num_reused == report.num_sources - 1
    assert_like_ffmpeg(tmp_path / "x.npz", root)


def test_an_unexpected_error_stops_the_build(
    demo_dataset: WrittenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int, track: TrackIndex) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module, "encode_source", fail)
    with pytest.raises(OSError, match="No space left"):
        build_sidecar(*opened(demo_dataset.root), destination=tmp_path / "x.npz")
    assert os.listdir(tmp_path) == []


def test_many_failed_transfers_end_the_build_early(
    demo_dataset: WrittenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(path: str) -> None:
        raise TransferError(f"{path}: connection refused")

    store = CountingStore(demo_dataset.root, down)
    layout = load_layout(store)
    with pytest.raises(TransferError, match="6 of 6 video files"):
        build_sidecar(store, layout, destination=tmp_path / "x.npz", workers=1)
    monkeypatch.setattr(build_module, "_MAX_TRANSFER_FAILURES", 2)
    with pytest.raises(TransferError, match="2 of 6 video files"):
        build_sidecar(store, layout, destination=tmp_path / "x.npz", workers=1)
    assert os.listdir(tmp_path) == []


def build_for_ever(root: Path, destination: Path) -> None:
    # A job that a script started in the background ignores interrupts, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        store, layout = opened(root)
        while True:
            build_locked(store, layout, destination=destination, workers=2)
    except KeyboardInterrupt:
        sys.exit(130)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_builders_leave_nothing_invalid(
    demo_dataset: WrittenDataset, tmp_path: Path, how: signal.Signals
) -> None:
    """Killed again and again at random moments of building and installing (SC-3, K26)."""
    destination = tmp_path / "out" / "x.npz"
    delays = random.Random(how)
    for _ in range(8):
        builder = multiprocessing.get_context("fork").Process(
            target=build_for_ever, args=(demo_dataset.root, destination)
        )
        # An interrupt before the child has got this far would be taken for one of the tests' own process.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        builder.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert builder.pid is not None
        time.sleep(delays.uniform(0.02, 0.2))
        for _ in range(10):
            # Python loses an interrupt that arrives inside a finalizer; a person presses the keys again.
            os.kill(builder.pid, how)
            builder.join(3)
            if builder.exitcode is not None:
                break
        assert builder.exitcode not in (0, None)
        if destination.exists():
            with ArchiveReader(destination) as reader:
                reader.verify()
    store, layout = opened(demo_dataset.root)
    build_locked(store, layout, destination=destination, lock_timeout_s=5)
    assert_like_ffmpeg(destination, demo_dataset.root)
    assert sorted(os.listdir(destination.parent)) == ["x.npz", "x.npz.lock"]


def test_one_worker_reads_one_file_at_a_time(demo_dataset: WrittenDataset, tmp_path: Path) -> None:
    """In their order, whatever compresses meanwhile; and the archive is that of many workers."""
    store = CountingStore(demo_dataset.root)
    layout = load_layout(store)
    one = build_sidecar(store, layout, destination=tmp_path / "1.npz", workers=1)
    assert (store.most, store.most_reads) == (1, 1)
    assert store.opened == sorted(video_paths(demo_dataset.root))
    many = build_sidecar(store, layout, destination=tmp_path / "5.npz", workers=5)
    assert one.path.read_bytes() == many.path.read_bytes()


def test_one_worker_reads_while_it_compresses(
    demo_dataset: WrittenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next file is read before the one before has been compressed."""
    store = CountingStore(demo_dataset.root)
    paths = video_paths(demo_dataset.root)
    held: list[int] = []

    def wait_for_the_next(number: int, track: TrackIndex) -> EncodedSource:
        if number + 1 < len(paths):
            held.append(number)
            deadline = time.monotonic() + 30
            while paths[number + 1] not in store.opened:
                assert time.monotonic() < deadline, f"{paths[number + 1]} was not opened"
                time.sleep(0.001)
        return encode_source(number, track)

    monkeypatch.setattr(build_module, "encode_source", wait_for_the_next)
    kept = Kept()  # that there may be earlier records does not matter
    build_sidecar(store, load_layout(store), destination=tmp_path / "x.npz", workers=1, finished=kept)
    assert held == list(range(len(paths) - 1))


def test_one_thread_parses_at_a_time(
    demo_dataset: WrittenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more results are held than there are processors, whatever the number of workers (SC-1)."""
    guard, now, most = threading.Lock(), {"parsing": 0, "held": 0}, {"parsing": 0, "held": 0}

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with guard:
                now[name] += 1
                most[name] = max(most[name], now[name])
            time.sleep(0.01)
            try:
                return call(*arguments)
            finally:
                with guard:
                    now[name] -= 1

        return run

    monkeypatch.setattr(probe_module, "read_movie", counted("parsing", movie.read_movie))
    monkeypatch.setattr(build_module, "encode_source", counted("held", encode_source))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    build_sidecar(*opened(demo_dataset.root), destination=tmp_path / "x.npz", workers=6)
    assert most["parsing"] == 1
    assert 1 <= most["held"] <= 2
