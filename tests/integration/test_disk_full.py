"""A disk that fills up at any moment (SC-3, SC-13, K26): one clear error, nothing lost, nothing left."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lrstream.errors import DiskFullError
from lrstream.index.open import open_index
from lrstream.layout.layout import load_layout
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.resolve import build_locked, resolve_sidecar
from tests.integration.test_build import CountingStore, assert_like_ffmpeg
from tests.support.many_files import change_video, write_many_files

COUNT = 40
POINTS = 10


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_many_files(tmp_path / "d", COUNT)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte, where one can be mounted."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def leave(disk: Path, free_bytes: int) -> None:
    """Fill the disk up to `free_bytes`."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    status = os.statvfs(disk)
    filler.write_bytes(bytes(status.f_bavail * status.f_frsize - free_bytes))


def nothing_unfinished(place: Path) -> None:
    assert [path for path in place.rglob("*") if path.name.endswith(".tmp")] == []
    for path in place.rglob("*.npz"):
        with ArchiveReader(path) as reader:
            assert reader.verify() == 2 * COUNT


def points(seed: int) -> list[int]:
    """Free space in whole pages, as tmpfs counts it; all together take less than 400 KiB."""
    dice = random.Random(seed)
    return [4096 * dice.randrange(1, 60) for _ in range(POINTS)]


def test_full_at_random_points_of_a_first_build(root: Path, disk: Path) -> None:
    errors = []
    for number, free_bytes in enumerate(points(1)):
        home = disk / f"home{number}"
        home.mkdir()
        leave(disk, free_bytes)
        store = CountingStore(root)
        layout = load_layout(store)
        try:
            resolve_sidecar(store, layout, home=home, workers=3)
        except DiskFullError as error:
            errors.append(error)
        nothing_unfinished(home)
        (disk / "filler").unlink()
        kept = sum(path.stat().st_size for path in home.rglob("*.journal"))
        store.opened.clear()
        resolved = resolve_sidecar(store, layout, home=home, workers=3)
        # What the journal had is not read again; if it was not even begun, everything is.
        assert len(store.opened) < COUNT if kept else len(store.opened) in (0, COUNT)
        assert_like_ffmpeg(resolved.path, root)
        open_index(resolved, home=home).close()
        assert [path for path in home.rglob("*") if path.name.endswith((".tmp", ".journal"))] == []
        for path in sorted(home.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert 0 < len(errors) < POINTS
    for caught in errors:
        assert caught.exit_code == 7
        assert caught.fields["free_bytes"] >= 0
        assert "bytes are free" in caught.message
        assert caught.hint


def test_full_while_replacing(root: Path, disk: Path) -> None:
    """The previous file stays, byte for byte, and is used by whoever opens it."""
    output = disk / "x.npz"
    store = CountingStore(root)
    layout = load_layout(store)
    build_locked(store, layout, destination=output)
    before = output.read_bytes()
    failed = 0
    for number, free_bytes in enumerate(points(2)):
        change_video(root, number, 1)
        leave(disk, free_bytes // 3)
        try:
            build_locked(store, layout, destination=output)
        except DiskFullError:
            failed += 1
            assert output.read_bytes() == before
        nothing_unfinished(disk)
        (disk / "filler").unlink()
        build_locked(store, layout, destination=output)
        before = output.read_bytes()
    assert failed
    assert_like_ffmpeg(output, root)


def limited(limit: int, work: Callable[[], object]) -> int:
    """Exit code of `work` in a child that may write no file larger than `limit` bytes."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            work()
            code = 0
        except DiskFullError as error:
            code = error.exit_code if "larger than files may be" in error.message else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits are set in a forked child")
def test_a_limit_of_file_sizes(root: Path, tmp_path: Path) -> None:
    """Works without privileges, and stops writing in the middle of a file like a full disk."""
    store = CountingStore(root)
    layout = load_layout(store)
    build_locked(store, layout, destination=tmp_path / "whole.npz", home=tmp_path / "nowhere")
    whole = (tmp_path / "whole.npz").read_bytes()
    dice, codes = random.Random(3), set()
    for number in range(POINTS):
        output = tmp_path / str(number) / "x.npz"
        limit = dice.randrange(100, int(1.3 * len(whole)))

        def build(output: Path = output) -> None:
            build_locked(store, layout, destination=output, workers=3, home=tmp_path / "nowhere")

        code = limited(limit, build)
        assert code in (0, 7)
        codes.add(code)
        assert output.exists() == (code == 0)
        nothing_unfinished(output.parent)
        kept = output.with_name("x.npz.journal").exists()
        store.opened.clear()
        build()
        assert output.read_bytes() == whole
        if code and kept:
            assert len(store.opened) < COUNT
    assert codes == {0, 7}
