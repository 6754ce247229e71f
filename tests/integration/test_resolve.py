"""Cache, then published, then built, under one lock among real processes (SC-4, SC-5, SC-8, K23, K25)."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import numpy as np
import pytest

from lrstream.demo import WrittenDataset
from lrstream.errors import DiskFullError, InputError, SidecarLockTimeoutError, TransferError
from lrstream.index.open import ArchiveIndex, MappedIndex, open_index
from lrstream.layout.layout import DatasetLayout, load_layout
from lrstream.sidecar.archive import ArchiveReader, write_archive
from lrstream.sidecar.build import build_sidecar, request_identity
from lrstream.sidecar.identity import SidecarIdentity, SourceFile, cache_path
from lrstream.sidecar.lock import ProcessLock, inspect_lock, lock_path
from lrstream.sidecar.resolve import PublishedCandidate, ResolvedSidecar, build_locked, resolve_sidecar
from lrstream.storage.home import lerobot_home
from lrstream.storage.local import LocalStore
from lrstream.storage.location import parse_location
from lrstream.storage.store import DatasetStore, open_store
from tests.support import faults
from tests.support.datasets import copy_dataset
from tests.support.tracks import plain_arrays, plain_manifest, replace_member, save_plain


def opened(root: Path) -> tuple[DatasetStore, DatasetLayout]:
    store = open_store(parse_location(root))
    return store, load_layout(store)


def resolve(root: Path, **options: Any) -> ResolvedSidecar:
    return resolve_sidecar(*opened(root), repo_id="someone/demo", **options)


@pytest.fixture
def root(tiny_dataset: WrittenDataset, tmp_path: Path) -> Path:
    return copy_dataset(tiny_dataset, tmp_path / "dataset")


@pytest.fixture
def target(root: Path) -> Path:
    """Where the cache entry of the dataset is to be."""
    return cache_path(request_identity(*opened(root), repo_id="someone/demo"), lerobot_home())


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in [directory, *directory.rglob("*")]
    }


def test_built_once_then_cached_without_a_write(root: Path, target: Path) -> None:
    first = resolve(root)
    assert (first.path, first.origin, first.complete) == (target, "built", True)
    assert first.report is not None
    assert all(source.size for source in first.identity.source_files)
    before = snapshot(lerobot_home())
    again = resolve(root)
    assert (again.path, again.origin, again.identity) == (target, "cache", first.identity)
    index = open_index(again)
    assert isinstance(index, MappedIndex)
    assert index.identity == first.identity
    assert snapshot(lerobot_home()) == before


def test_names_and_identity_follow_the_format(root: Path) -> None:
    found = resolve(root)
    identity = found.identity
    assert identity.data_root == str(root)
    assert identity.revision == "v3.0"
    status = (root / identity.paths[0]).stat()
    assert identity.source_fingerprints[identity.paths[0]] == f"{status.st_mtime_ns}:{status.st_ctime_ns}"
    assert found.path.relative_to(lerobot_home()).parts[:2] == ("streaming-sidecars", "someone--demo")
    assert resolve_sidecar(*opened(root)).identity.repo_id == "dataset"


@pytest.mark.parametrize("keep_mtime", [False, True])
def test_a_video_replaced_by_one_of_equal_size(root: Path, keep_mtime: bool) -> None:
    first = resolve(root)
    path = root / first.identity.paths[0]
    before = path.stat().st_size
    faults.replace_mp4(path, keep_mtime=keep_mtime)
    assert path.stat().st_size == before
    second = resolve(root)
    assert second.origin == "built"
    with ArchiveReader(first.path) as old, ArchiveReader(second.path) as new:
        name = first.identity.paths[0]
        assert old.track(name).samples.sizes_bytes.tolist() != new.track(name).samples.sizes_bytes.tolist()


def damage_array(path: Path) -> None:
    replace_member(path, "1/sync_samples.npy", b"damaged")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def outdate(path: Path) -> None:
    with ArchiveReader(path) as reader:
        tracks, identity = list(reader.tracks()), reader.identity
    save_plain(path, {**plain_manifest(identity, tracks), "version": 2}, plain_arrays(tracks))


def belong_to_another_dataset(path: Path) -> None:
    with ArchiveReader(path) as reader:
        tracks, identity = list(reader.tracks()), reader.identity
    other = SidecarIdentity("x/y", identity.revision, identity.data_root, identity.source_files, identity.source_fingerprints)  # fmt: skip  # noqa: E501
    write_archive(path, other, tracks)


def lose_a_source(path: Path) -> None:
    with ArchiveReader(path) as reader:
        tracks, identity = list(reader.tracks())[1:], reader.identity
    write_archive(
        path,
        SidecarIdentity(
            identity.repo_id, identity.revision, identity.data_root, identity.source_files[1:],
            {track.file_path: identity.source_fingerprints[track.file_path] for track in tracks},
        ),
        tracks,
    )  # fmt: skip


@pytest.mark.parametrize("spoil", [damage_array, truncate, outdate, belong_to_another_dataset, lose_a_source])
def test_an_invalid_cache_entry_is_rebuilt_and_never_partly_used(
    root: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = resolve(root)
    good = first.path.read_bytes()
    spoil(first.path)
    with caplog.at_level(logging.WARNING):
        second = resolve(root)
    assert "will be replaced" in caplog.text
    assert second.origin == "built"
    assert second.path.read_bytes() == good
    assert resolve(root).origin == "cache"


def test_an_archive_by_another_tool_is_used(root: Path, target: Path) -> None:
    """A cache entry that numpy alone has written, as upstream's does."""
    store, layout = opened(root)
    report = build_sidecar(store, layout, destination=root.parent / "own.npz")
    with ArchiveReader(report.path) as reader:
        tracks = list(reader.tracks())
    identity = request_identity(store, layout, repo_id="someone/demo")
    target.parent.mkdir(parents=True)
    save_plain(target, plain_manifest(identity, tracks), plain_arrays(tracks))
    assert resolve(root).origin == "cache"


def test_a_read_only_cache(root: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid sidecar, no index yet, and nothing can be written anywhere in the home."""
    resolve(root)
    index_home = lerobot_home() / "streaming-indexes"
    subprocess.run(["rm", "-r", str(index_home)], check=True)
    real_open, real_mkdir = os.open, os.mkdir

    def refuse_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(lerobot_home())):
            raise OSError(30, "Read-only file system", str(path))
        return real_open(path, flags, *arguments, **options)

    def refuse_mkdir(path: Any, *arguments: Any, **options: Any) -> None:
        if str(path).startswith(str(lerobot_home())):
            raise OSError(30, "Read-only file system", str(path))
        real_mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse_open)
    monkeypatch.setattr(os, "mkdir", refuse_mkdir)
    found = resolve(root)
    assert found.origin == "cache"
    index = open_index(found)
    assert isinstance(index, ArchiveIndex)
    assert index.identity == found.identity
    assert not index_home.exists()


# --- published ------------------------------------------------------------------------------------


@dataclass
class Candidate:
    name: str
    content: bytes

    def write_to(self, file: BinaryIO) -> None:
        file.write(self.content)


def test_a_valid_published_sidecar_is_installed(root: Path, target: Path) -> None:
    store, layout = opened(root)
    identity = request_identity(store, layout, repo_id="someone/demo")
    good = build_sidecar(
        store, layout, destination=root.parent / "own.npz", identity=identity
    ).path.read_bytes()
    asked: list[SidecarIdentity] = []

    def published(request: SidecarIdentity) -> Iterable[PublishedCandidate]:
        asked.append(request)
        return [Candidate("broken", good[:-9]), Candidate("good", good), Candidate("unused", b"")]

    found = resolve(root, published=published)
    assert (found.origin, found.path, found.report) == ("published", target, None)
    assert asked == [identity]
    assert found.path.read_bytes() == good
    assert resolve(root, published=published).origin == "cache"
    assert len(asked) == 1
    assert not list(target.parent.glob(".*"))


@pytest.mark.parametrize("content", [b"", b"not a sidecar", None])
def test_an_unusable_published_sidecar_is_not(root: Path, content: bytes | None) -> None:
    def published(request: SidecarIdentity) -> Iterator[PublishedCandidate]:
        if content is None:
            raise TransferError("no connection")
        yield Candidate("bad", content)

    assert resolve(root, published=published).origin == "built"


# --- several processes ----------------------------------------------------------------------------


class NotingStore(LocalStore):
    """Notes every video that it opens in a file, so that builds can be counted over processes."""

    def __init__(self, root: Path, log: Path, delay_s: float = 0.0) -> None:
        super().__init__(parse_location(root))
        self.log, self.delay_s = log, delay_s

    def open(self, path: str, size: int | None = None) -> Any:
        if path.endswith(".mp4"):
            with self.log.open("a") as file:
                file.write(path + "\n")
            time.sleep(self.delay_s)
        return super().open(path, size)


def resolve_in_child(root: Path, log: Path, barrier: Any, results: Any) -> None:
    store = NotingStore(root, log, delay_s=0.05)
    layout = load_layout(store)
    barrier.wait(30)
    found = resolve_sidecar(store, layout, repo_id="someone/demo", lock_timeout_s=30)
    index = open_index(found)
    results.put((found.origin, [index.track(path).samples.num_samples for path in index.paths]))


def test_eight_processes_build_once(root: Path, tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context("fork")
    barrier, results, log = context.Barrier(8), context.Queue(), tmp_path / "opened.txt"
    children = [
        context.Process(target=resolve_in_child, args=(root, log, barrier, results)) for _ in range(8)
    ]
    for child in children:
        child.start()
    answers = [results.get(timeout=40) for _ in children]
    for child in children:
        child.join(10)
    assert sorted(origin for origin, _ in answers) == ["built"] + ["cache"] * 7
    assert len({tuple(samples) for _, samples in answers}) == 1
    assert sorted(log.read_text().split()) == list(
        load_layout(open_store(parse_location(root))).video_files()
    )
    assert len(list(lerobot_home().rglob("*.arrow"))) == 1
    assert not list(lerobot_home().rglob("*.tmp"))
    assert not list(lerobot_home().rglob("*.holder"))


def build_slowly(root: Path, log: Path) -> None:
    store = NotingStore(root, log, delay_s=20)
    resolve_sidecar(store, load_layout(store), repo_id="someone/demo", workers=1)


@pytest.fixture
def slow_builder(root: Path, tmp_path: Path) -> Iterator[Any]:
    log = tmp_path / "opened.txt"
    child: Any = multiprocessing.get_context("fork").Process(target=build_slowly, args=(root, log))
    child.start()
    deadline = time.monotonic() + 20
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield child
    child.kill()
    child.join(10)


def test_waiting_too_long_says_for_whom(root: Path, target: Path, slow_builder: Any) -> None:
    with pytest.raises(SidecarLockTimeoutError) as caught:
        resolve(root, lock_timeout_s=0.2)
    text = str(caught.value)
    for part in (str(lock_path(target)), f"pid {slow_builder.pid}", "still running", "0 of 3 source files"):
        assert part in text


def test_a_killed_builder_is_succeeded(root: Path, target: Path, slow_builder: Any) -> None:
    assert inspect_lock(lock_path(target)).held
    os.kill(slow_builder.pid, signal.SIGKILL)
    slow_builder.join(10)
    assert resolve(root, lock_timeout_s=10).origin == "built"
    assert sorted(path.name for path in target.parent.iterdir()) == [target.name, target.name + ".lock"]


def test_a_waiting_process_uses_a_result_before_the_lock_is_free(root: Path, target: Path) -> None:
    """Another tool may keep its lock for a while after it has installed the file."""
    with ProcessLock(lock_path(target)) as lock:
        lock.acquire(1)
        answers: list[ResolvedSidecar] = []
        waiting = threading.Thread(target=lambda: answers.append(resolve(root, lock_timeout_s=20)))
        waiting.start()
        time.sleep(0.1)
        assert answers == []
        store, layout = opened(root)
        identity = request_identity(store, layout, repo_id="someone/demo")
        build_sidecar(store, layout, destination=target, identity=identity)
        waiting.join(10)
    assert [found.origin for found in answers] == ["cache"]


def test_forced_rebuild(root: Path) -> None:
    first = resolve(root)
    before = first.path.stat().st_ino
    assert resolve(root, rebuild=True).origin == "built"
    assert first.path.stat().st_ino != before
    assert resolve(root).origin == "cache"


def test_a_failed_build_leaves_no_cache_entry(root: Path, target: Path) -> None:
    fault = faults.lfs_pointer_mp4(root)
    with pytest.raises(InputError, match="Git LFS pointer"):
        resolve(root)
    assert not list(target.parent.glob("*.npz"))
    assert not list(lerobot_home().rglob("*.tmp"))
    assert fault.path


# --- storage without a stable identity --------------------------------------------------------------


def test_storage_without_stable_identity_is_indexed_at_each_open(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory file system tells no time stamp or tag; each open gives new fingerprints (SC-6)."""
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/unstable", recursive=True)
    store = open_store(parse_location("memory://unstable"))
    layout = load_layout(store)
    infos = store.file_info(layout.video_files())
    stable = infos == store.file_info(layout.video_files())
    first = resolve_sidecar(store, layout, repo_id="someone/demo")
    second = resolve_sidecar(store, layout, repo_id="someone/demo")
    assert first.origin == "built"
    assert second.origin == ("cache" if stable else "built")
    memory.rm("/unstable", recursive=True)


def test_a_swapped_object_in_memory_storage_is_never_read_with_the_old_index(root: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/swap", recursive=True)
    store = open_store(parse_location("memory://swap"))
    layout = load_layout(store)
    first = resolve_sidecar(store, layout, repo_id="someone/demo")
    name = first.identity.paths[0]
    faults.replace_mp4(root / name)
    memory.put(str(root / name), f"/swap/{name}")
    second = resolve_sidecar(store, layout, repo_id="someone/demo")
    sizes = [open_index(found).track(name).samples.sizes_bytes.tolist() for found in (first, second)]
    assert sizes[0] != sizes[1]
    memory.rm("/swap", recursive=True)


# --- a full disk, for real where a small file system can be mounted -----------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_names_needed_and_free_bytes(
    demo_dataset: WrittenDataset, small_disk: Path, tmp_path: Path
) -> None:
    store, layout = opened(demo_dataset.root)
    (small_disk / "filler").write_bytes(bytes(245 << 10))
    with pytest.raises(DiskFullError, match="bytes are free"):
        resolve_sidecar(store, layout, home=small_disk)
    assert not [path for path in small_disk.rglob("*") if path.suffix in (".npz", ".tmp", ".arrow")]
    elsewhere = build_sidecar(store, layout, destination=tmp_path / "x.npz").path
    with pytest.raises(DiskFullError, match="bytes are free"):
        open_index(elsewhere, home=small_disk)
    assert not [path for path in small_disk.rglob("*") if path.suffix in (".npz", ".tmp", ".arrow")]
    (small_disk / "filler").unlink()
    assert resolve_sidecar(store, layout, home=small_disk).origin == "built"


def test_installed_files_are_readable_by_others(root: Path) -> None:
    umask = os.umask(0o022)
    try:
        found = resolve(root)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o644


def test_a_sidecar_at_a_chosen_path(root: Path, tmp_path: Path) -> None:
    report = build_locked(*opened(root), destination=tmp_path / "out" / "x.npz", repo_id="a/b", revision="r")
    with np.load(io.BytesIO(report.path.read_bytes())) as data:
        sidecar = json.loads(data["manifest_json"].item())["sidecar"]
    assert (sidecar["repo_id"], sidecar["revision"]) == ("a/b", "r")
    assert [SourceFile(**entry) for entry in sidecar["source_files"]] == list(report.identity.source_files)
