"""Local stores: exact ranges, identities, listings, and handles that respect processes and threads."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import pytest

from lrstream.errors import AccessError, DatasetFormatError, NotFoundError, TransferError, UsageError
from lrstream.storage.byte_source import ByteSource
from lrstream.storage.local import LocalByteSource, LocalStore
from lrstream.storage.location import parse_location
from lrstream.storage.per_process import PerProcess
from lrstream.storage.store import DatasetStore, open_store

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "videos/top").mkdir(parents=True)
    (tmp_path / "videos/top/file-000.mp4").write_bytes(CONTENT)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/info.json").write_bytes(b"{}")
    opened = open_store(parse_location(tmp_path))
    assert isinstance(opened, LocalStore)
    return opened


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_protocols(store: LocalStore) -> None:
    assert isinstance(store, DatasetStore)
    assert isinstance(store.open("meta/info.json"), ByteSource)


def test_ranges_are_exact(store: LocalStore) -> None:
    source = store.open("videos/top/file-000.mp4")
    for start, stop in [(0, 0), (0, 1), (3, 700), (0, 1024), (1024, 1024)]:
        assert source.read(start, stop) == CONTENT[start:stop]
    assert source.size() == 1024
    assert source.read_upto(1000, 5000) == (CONTENT[1000:], 1024)
    assert source.read_upto(5000, 6000) == (b"", 1024)
    assert store.counters.requests == 7
    assert store.counters.bytes_read == 0 + 1 + 697 + 1024 + 0 + 24 + 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4)])
def test_nonsense_ranges_are_refused(store: LocalStore, start: int, stop: int) -> None:
    with pytest.raises(UsageError, match="no range"):
        store.open("meta/info.json").read(start, stop)


def test_a_range_beyond_the_file_is_an_error_and_allocates_nothing(store: LocalStore) -> None:
    with pytest.raises(TransferError, match="ends at 1024"):
        store.open("videos/top/file-000.mp4").read(1000, 10**15)


def test_a_file_that_shrinks_while_it_is_read(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store.open("videos/top/file-000.mp4")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: real(fd, n, at) if at == 0 and n > 1000 else b"")
    assert source.read(0, 1024) == CONTENT
    with pytest.raises(TransferError, match=r"\[100, 200\) were wanted, but the file ends at 100"):
        source.read(100, 200)


def test_partial_system_calls_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: real(fd, min(n, 100), at))
    assert store.open("videos/top/file-000.mp4").read(7, 1000) == CONTENT[7:1000]


def test_errors_name_the_file(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match=r"videos/none\.mp4 does not exist"):
        store.open("videos/none.mp4").read(0, 1)
    with pytest.raises(NotFoundError, match=r"info\.json/x does not exist"):
        store.read_bytes("meta/info.json/x")
    with pytest.raises(NotFoundError, match="is a directory"):
        store.open("videos/top").read(0, 1)

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AccessError, match=r"info\.json may not be read"):
        store.open("meta/info.json").read(0, 1)


@pytest.mark.parametrize("path", ["../secret", "a/../../b", "/etc/passwd", "", "a//b", "a\\b", "a\0b", "./a"])
def test_paths_stay_inside_the_root(store: LocalStore, path: str) -> None:
    with pytest.raises(DatasetFormatError, match="no path inside a dataset"):
        store.open(path)
    with pytest.raises(DatasetFormatError, match="no path inside a dataset"):
        store.exists(path)


def test_listing(store: LocalStore, tmp_path: Path) -> None:
    assert list(store.list_files()) == ["meta/info.json", "videos/top/file-000.mp4"]
    assert list(store.list_files("videos")) == ["videos/top/file-000.mp4"]
    assert list(store.list_files("videos/")) == ["videos/top/file-000.mp4"]
    assert store.list_files("vid") == {}
    assert store.list_files("none") == {}
    assert store.list_files()["meta/info.json"].size == 2
    # Linked directories are followed, under each of their names, and loops end.
    (tmp_path / "videos/side").symlink_to(tmp_path / "videos/top")
    (tmp_path / "videos/top/loop").symlink_to(tmp_path / "videos")
    names = set(store.list_files("videos"))
    assert {"videos/top/file-000.mp4", "videos/side/file-000.mp4"} <= names
    assert len(names) < 10


def test_a_listing_shows_what_was_written_since(store: LocalStore, tmp_path: Path) -> None:
    assert not store.exists("meta/new.json")
    store.list_files()
    (tmp_path / "meta/new.json").touch()
    assert store.exists("meta/new.json")
    assert "meta/new.json" in store.list_files("meta")
    assert not store.exists("meta")


def test_file_info_names_everything_missing(store: LocalStore) -> None:
    info = store.file_info(["videos/top/file-000.mp4", "meta/info.json"])
    assert list(info) == ["videos/top/file-000.mp4", "meta/info.json"]
    assert [entry.size for entry in info.values()] == [1024, 2]
    with pytest.raises(NotFoundError, match=r"2 of 3 files do not exist .*: a\.mp4, b\.mp4") as caught:
        store.file_info(["a.mp4", "meta/info.json", "b.mp4"])
    assert caught.value.fields["paths"] == ("a.mp4", "b.mp4")


def test_replacement_of_equal_size_changes_the_fingerprint(store: LocalStore, tmp_path: Path) -> None:
    path = "videos/top/file-000.mp4"
    file = tmp_path / path
    before, status = store.file_info([path])[path], file.stat()
    assert before.fingerprint == f"{status.st_mtime_ns}:{status.st_ctime_ns}"
    # Even with the modification time restored, as copying tools do.
    replacement = tmp_path / "new"
    replacement.write_bytes(CONTENT[::-1])
    os.utime(replacement, ns=(status.st_atime_ns, status.st_mtime_ns))
    replacement.replace(file)
    after = store.file_info([path])[path]
    assert after.size == before.size
    assert after.fingerprint != before.fingerprint


def test_close_and_reopen(store: LocalStore) -> None:
    before = open_descriptors()
    source = store.open("videos/top/file-000.mp4")
    assert open_descriptors() == before
    source.read(0, 1)
    assert open_descriptors() == before + 1
    source.close()
    source.close()
    assert open_descriptors() == before
    assert source.read(1, 2) == b"\x01"
    del source
    assert open_descriptors() == before


def test_a_failed_open_leaks_nothing(store: LocalStore) -> None:
    before = open_descriptors()
    for _ in range(50):
        with pytest.raises(NotFoundError):
            store.open("none").read(0, 1)
    assert open_descriptors() == before


def test_closing_never_takes_the_descriptor_from_a_read(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed descriptor goes to the next opened file, whose bytes must not appear."""
    source = store.open("videos/top/file-000.mp4")
    reading, closed = threading.Event(), threading.Event()
    real = os.pread

    def slow(number: int, count: int, position: int) -> bytes:
        reading.set()
        assert closed.wait(5)
        return real(number, count, position)

    monkeypatch.setattr(os, "pread", slow)
    result: list[bytes] = []
    thread = threading.Thread(target=lambda: result.append(source.read(0, 8)))
    thread.start()
    assert reading.wait(5)
    before = open_descriptors()
    source.close()
    (tmp_path / "other").write_bytes(b"x" * 100)
    with (tmp_path / "other").open("rb"):
        closed.set()
        thread.join(5)
    assert result == [CONTENT[:8]]
    assert open_descriptors() == before - 1


def test_pickling_keeps_no_handle(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store.open("videos/top/file-000.mp4")
    source.read(0, 10)
    # The copy must not depend on the working directory either.
    monkeypatch.chdir("/")
    for copy in (pickle.loads(pickle.dumps(source)), pickle.loads(pickle.dumps(store)).open(source.path)):
        assert isinstance(copy, LocalByteSource)
        assert copy.read(3, 9) == CONTENT[3:9]


def _read_in_child(source: LocalByteSource, answers: multiprocessing.SimpleQueue[tuple[bytes, int]]) -> None:
    before = open_descriptors()
    data = source.read(10, 20)
    answers.put((data, open_descriptors() - before))


def test_a_forked_child_opens_the_file_itself(store: LocalStore) -> None:
    source = store.open("videos/top/file-000.mp4")
    source.read(0, 1)
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[tuple[bytes, int]] = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(source, answers))
    child.start()
    # The inherited descriptor is closed and one of its own is opened.
    assert answers.get() == (CONTENT[10:20], 0)
    child.join(10)
    assert child.exitcode == 0
    assert source.read(0, 4) == CONTENT[:4]


def test_per_process_values_do_not_cross_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    discarded: list[list[int]] = []
    held: PerProcess[list[int]] = PerProcess(list, discarded.append)
    mine = held.get()
    mine.append(1)
    assert held.get() is mine
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert held.get() == []
    assert held.get() is not mine
    assert discarded == [[1]]
