"""Waiting for a builder, saying who it is, and locks that outlive their holders (SC-5, K25)."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lrstream.errors import AccessError, SidecarLockTimeoutError
from lrstream.sidecar import lock as lock_module
from lrstream.sidecar.install import PendingFile, leftovers, reclaim_leftovers
from lrstream.sidecar.lock import ProcessLock, break_lock, inspect_lock
from lrstream.sidecar.lock_holder import holder_path, read_holder
from lrstream.sidecar.marker_lock import MarkerLock
from lrstream.sidecar.process import ProcessName, host_name

HOLD = """
import sys, time
from pathlib import Path
from lrstream.sidecar.lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]))
lock.acquire(5)
lock.progress(3, 7)
print("held", flush=True)
time.sleep(60)
"""

# The same on a file system without flock.
HOLD_MARKER = (
    "import fcntl, errno\ndef no(*a): raise OSError(errno.ENOSYS, 'no flock')\nfcntl.flock = no\n" + HOLD
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.npz.lock"


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)


def start_holder(path: Path, code: str = HOLD) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path), "--token=hf_SENTINEL"], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start_holder(path)
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_timeout_names_lock_holder_and_progress(path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(SidecarLockTimeoutError) as caught:
        ProcessLock(path).acquire(0.1)
    text = str(caught.value)
    for part in (
        str(path), f"pid {holder.pid} on {host_name()}", "user ", "since 20", "still running",
        "3 of 7 source files done", "may still be indexing", "sidecar_lock_timeout_s",
    ):  # fmt: skip
        assert part in text
    status = inspect_lock(path)
    assert status.held
    assert status.holder_alive is True
    assert "SENTINEL" not in holder_path(path).read_text()


def test_a_killed_holder_frees_the_lock_and_its_note_misleads_nobody(
    path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    status = inspect_lock(path)
    assert not status.held
    assert status.holder is not None
    assert status.holder.process.pid == holder.pid
    assert status.holder_alive is False
    assert status.describe().startswith("not held; last held by")
    with ProcessLock(path) as lock:
        assert lock.acquire(1) is None
        assert inspect_lock(path).held
        record = read_holder(path)
        assert record is not None
        assert record.process == ProcessName.current()
    assert not inspect_lock(path).held
    assert not holder_path(path).exists()


def test_a_holder_without_a_note_is_not_confused_with_the_last_one(
    path: Path, holder: subprocess.Popen[str]
) -> None:
    """Another tool that uses the same lock leaves no note of ours."""
    note = json.loads(holder_path(path).read_text())
    note["process_started"] += 1  # a process id that was used again
    holder_path(path).write_text(json.dumps(note))
    assert "left no note" in inspect_lock(path).describe()
    holder_path(path).write_text("not json")
    assert inspect_lock(path).describe() == "held by a process that left no note"


def test_waiting_ends_as_soon_as_the_result_is_there(path: Path, holder: subprocess.Popen[str]) -> None:
    answers = iter([None, None, "ready"])
    lock = ProcessLock(path)
    assert lock.acquire(30, ready=lambda: next(answers)) == "ready"
    assert not lock.held


def test_waiting_is_logged(
    path: Path,
    holder: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(lock_module, "LOG_EVERY_S", 0.1)
    with caplog.at_level(logging.WARNING), pytest.raises(SidecarLockTimeoutError):
        ProcessLock(path).acquire(0.35)
    lines = [record.getMessage() for record in caplog.records]
    assert 2 <= len(lines) <= 3
    assert f"pid {holder.pid}" in lines[0]
    assert "3 of 7" in lines[0]


def test_threads_of_one_process_exclude_each_other(path: Path) -> None:
    inside, overlaps = [], []

    def work() -> None:
        with ProcessLock(path) as lock:
            lock.acquire(20)
            inside.append(1)
            overlaps.append(len(inside))
            time.sleep(0.002)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [1] * 6


def test_progress_reaches_the_note(path: Path) -> None:
    with ProcessLock(path) as lock:
        lock.acquire(1)
        for done in range(1, 501):
            lock.progress(done, 500)
        record = read_holder(path)
        assert record is not None
        assert (record.done, record.total) == (500, 500)


def test_a_directory_that_refuses_the_lock_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*arguments: object, **options: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        with pytest.raises(AccessError, match=r"Read-only file system.*HF_LEROBOT_HOME"):
            ProcessLock(path).acquire(1)


# --- file systems without flock ------------------------------------------------------------------


@pytest.mark.usefixtures("no_flock")
def test_marker_files_take_over_where_flock_is_missing(path: Path) -> None:
    with ProcessLock(path) as first:
        first.acquire(1)
        assert inspect_lock(path).held
        with pytest.raises(SidecarLockTimeoutError, match="still running"):
            ProcessLock(path).acquire(0.05)
    assert not inspect_lock(path).held
    with ProcessLock(path) as second:
        assert second.acquire(0) is None


@pytest.mark.usefixtures("no_flock")
def test_a_dead_holder_on_this_machine_is_succeeded(path: Path) -> None:
    holder = start_holder(path, HOLD_MARKER)
    with pytest.raises(SidecarLockTimeoutError):
        ProcessLock(path).acquire(0.05)
    holder.kill()
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()
    with ProcessLock(path) as lock:
        assert lock.acquire(1) is None


def foreign_marker(path: Path, idle_s: float) -> Path:
    marker = path.with_name(path.name + ".marker.4")
    process = {"host": "elsewhere", "scope": "other", "pid": 1, "started": 1}
    marker.write_text(json.dumps({"process": process}))
    os.utime(marker, (time.time() - idle_s,) * 2)
    return marker


@pytest.mark.usefixtures("no_flock")
def test_a_holder_on_another_machine_is_broken_only_on_request(path: Path) -> None:
    foreign_marker(path, idle_s=3600)
    with pytest.raises(SidecarLockTimeoutError):
        ProcessLock(path).acquire(0.05)
    assert not break_lock(path, idle_s=7200)
    assert break_lock(path)
    assert not break_lock(path)
    with ProcessLock(path) as lock:
        assert lock.acquire(0) is None


def contend(path: Path, barrier: multiprocessing.synchronize.Barrier, results: Path) -> None:
    """Take a dead marker's place together with others; note the times between which we held it."""
    barrier.wait(20)
    lock = MarkerLock(path)
    deadline = time.monotonic() + 20
    while not lock.try_acquire():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    start = time.monotonic_ns()
    time.sleep(0.01)
    stop = time.monotonic_ns()
    lock.release()
    (results / str(os.getpid())).write_text(f"{start} {stop}")


def test_two_breakers_never_both_hold_the_lock(path: Path, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    name = ProcessName.current()
    process = {"host": name.host, "scope": name.scope, "pid": dead.pid, "started": 1}
    path.with_name(path.name + ".marker.1").write_text(json.dumps({"process": process}))
    results = tmp_path / "results"
    results.mkdir()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(6)
    children = [context.Process(target=contend, args=(path, barrier, results)) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    held = sorted(tuple(map(int, file.read_text().split())) for file in results.iterdir())
    assert len(held) == 6
    for earlier, later in itertools.pairwise(held):
        assert earlier[1] <= later[0]
    assert len(list(tmp_path.glob("*.marker.*"))) == 1


def test_a_process_that_was_too_slow_steps_back(path: Path) -> None:
    """It saw number 1 as free; meanwhile 2 came, went, was deleted, and 3 is held."""
    current = MarkerLock(path)
    assert current.try_acquire()
    current.release()
    assert current.try_acquire()
    current.release()
    assert current.try_acquire()
    assert [p.name for p in path.parent.iterdir()] == ["x.npz.lock.marker.3"]
    slow = MarkerLock(path)
    assert not slow._succeed(1)
    assert [p.name for p in path.parent.iterdir()] == ["x.npz.lock.marker.3"]


# --- leftovers of ended writers -------------------------------------------------------------------


def test_only_the_temporary_files_of_ended_processes_are_reclaimed(tmp_path: Path) -> None:
    destination = tmp_path / "x.npz"
    code = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom lrstream.sidecar.install import PendingFile\n"
        "p = PendingFile(Path(sys.argv[1]))\np.file.write(b'half')\np.file.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for name in ("x.npz", "y.npz"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=False)
    with PendingFile(destination) as mine:
        assert len(leftovers(tmp_path)) == 2
        assert reclaim_leftovers(destination) == 4
        assert mine.temporary.exists()
    assert len(list(tmp_path.iterdir())) == 1  # y's is left to whoever builds y


def test_temporary_files_of_other_machines_are_reclaimed_when_old(tmp_path: Path) -> None:
    foreign = tmp_path / ".x.npz.elsewhere.other-1.77.5.0badcafe.tmp"
    foreign.write_bytes(b"half")
    assert reclaim_leftovers(tmp_path / "x.npz") == 0
    os.utime(foreign, (time.time() - 7200,) * 2)
    assert reclaim_leftovers(tmp_path / "x.npz") == 4
