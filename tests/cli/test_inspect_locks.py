"""`lrstream inspect locks`: alive, killed, elsewhere and unknown holders are told apart (SC-5, K25)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lrstream.errors import SidecarLockTimeoutError
from lrstream.sidecar.lock import ProcessLock
from lrstream.sidecar.lock_holder import holder_path
from lrstream.sidecar.marker_lock import MarkerLock
from tests.cli.program import Program

HOLDER = """
import sys
from pathlib import Path
from lrstream.sidecar.lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]))
lock.acquire(5)
lock.progress(3, 10)
print("held", flush=True)
sys.stdin.read()
lock.release()
"""


@contextmanager
def held_by_a_process(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds `lock` at 3 of 10 files until it is killed or the block ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
    finally:
        holder.kill()
        holder.wait(20)
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.close()
        holder.stdout.close()


def edit_note(lock: Path, **changes: Any) -> None:
    note = holder_path(lock)
    note.write_text(json.dumps({**json.loads(note.read_text()), **changes}))


@pytest.fixture
def lock(isolated_home: Path) -> Path:
    return isolated_home / "lerobot" / "streaming-sidecars" / "owner--name" / "mp4-v3-main-0.npz.lock"


def only_lock(lrstream: Program, *arguments: str | Path) -> tuple[dict[str, Any], list[str]]:
    outcome = lrstream("inspect", "locks", *arguments, "--json")
    assert outcome.code == 0
    [report] = outcome.document()["result"]["locks"]
    return report, outcome.codes()


def test_live_killed_and_distant_holders_are_told_apart(lock: Path, lrstream: Program) -> None:
    started = time.time()
    with held_by_a_process(lock) as process:
        live, codes = only_lock(lrstream)
        assert (live["state"], live["is_held"], codes) == ("held", True, [])
        holder = live["holder"]
        assert (holder["pid"], holder["is_alive"]) == (process.pid, True)
        assert (holder["num_done"], holder["num_total"]) == (3, 10)
        assert holder["command"]
        assert holder["user"]
        assert abs(holder["since"] - started) < 60
        # 3 files took (updated - since), so 7 more take seven thirds of it.
        pace_s = (holder["updated"] - holder["since"]) / 3
        assert holder["estimated_end"] == pytest.approx(holder["updated"] + 7 * pace_s)
        assert live["guards"] == str(lock.with_suffix(""))

        text = lrstream("inspect", "locks").out
        for fact in (f"pid {process.pid}", holder["host"], "3 of 10 files", "running process", "about"):
            assert fact in text

        # What a person sees whose training has waited in vain.
        with pytest.raises(SidecarLockTimeoutError) as caught:
            ProcessLock(lock).acquire(0.1)
        told = caught.value.message
        assert str(lock) in told
        for fact in (f"pid {process.pid}", holder["host"], holder["user"], "3 of 10", "still running"):
            assert fact in told

        edit_note(lock, host="elsewhere", scope="0123456789ab-1")
        distant, codes = only_lock(lrstream)
        assert (distant["state"], distant["holder"]["is_alive"], codes) == ("held-elsewhere", None, [])
        assert "elsewhere" in distant["advice"]
        edit_note(lock, host="elsewhere", scope="0123456789ab-1", updated=time.time() - 3600)
        distant, codes = only_lock(lrstream)
        assert codes == ["lock-silent"]
        assert "--break" in distant["advice"]

        edit_note(lock, pid=process.pid, host=holder["host"], scope="0123456789ab-1")
        holder_path(lock).unlink()
        unknown, _ = only_lock(lrstream)
        assert (unknown["state"], unknown["holder"]) == ("held-unknown", None)

    free, codes = only_lock(lrstream)
    assert (free["state"], free["is_held"], free["holder"], codes) == ("free", False, None, [])


def test_a_killed_holder_leaves_a_free_lock_and_its_name(lock: Path, lrstream: Program) -> None:
    with held_by_a_process(lock) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
        report, codes = only_lock(lrstream)
        assert (report["state"], report["is_held"], codes) == ("holder-died", False, ["lock-holder-died"])
        assert (report["holder"]["pid"], report["holder"]["is_alive"]) == (process.pid, False)
        assert "Nothing to do" in report["advice"]
        assert "its last holder died" in lrstream("inspect", "locks").out
        with ProcessLock(lock) as mine:
            assert mine.acquire(1) is None
            report, _ = only_lock(lrstream)
            assert (report["state"], report["holder"]["pid"]) == ("held", os.getpid())


def test_a_stopped_holder_is_pointed_out(lock: Path, lrstream: Program) -> None:
    with held_by_a_process(lock) as process:
        os.kill(process.pid, signal.SIGSTOP)
        edit_note(lock, updated=time.time() - 300)
        report, codes = only_lock(lrstream)
        os.kill(process.pid, signal.SIGCONT)
    assert (report["state"], codes) == ("held", ["lock-silent"])
    assert "may be stopped" in report["advice"]


def test_a_lock_is_found_by_any_of_its_names(lock: Path, lrstream: Program) -> None:
    with held_by_a_process(lock):
        for path in (lock, lock.with_suffix(""), lock.parent, lock.parents[2]):
            report, _ = only_lock(lrstream, path)
            assert (report["path"], report["is_held"]) == (str(lock), True)
    outcome = lrstream("inspect", "locks", lock.with_name("absent"), "--json")
    assert (outcome.code, outcome.codes()) == (4, ["not-found"])


def test_free_locks_are_only_counted(tmp_path: Path, lrstream: Program) -> None:
    for number in range(3):
        (tmp_path / f"{number}.npz.lock").touch()
    outcome = lrstream("inspect", "locks", tmp_path)
    assert "3 locks below" in outcome.out
    assert "3 free locks are not shown; --all shows them." in outcome.out
    assert "1.npz" not in outcome.out
    assert lrstream("inspect", "locks", tmp_path, "--all").out.count("Nothing to do.") == 3
    assert len(lrstream("inspect", "locks", tmp_path, "--json").document()["result"]["locks"]) == 3
    assert "Nothing to do." in lrstream("inspect", "locks", tmp_path / "1.npz").out


def test_no_cache_is_no_failure(lrstream: Program, tmp_path: Path) -> None:
    outcome = lrstream("inspect", "locks", "--cache-dir", tmp_path / "none", "--json")
    assert outcome.code == 0
    assert outcome.document()["result"]["locks"] == []
    assert not (tmp_path / "none").exists()


def test_break_frees_file_locks_of_silent_holders_only(
    lock: Path, lrstream: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.parent.mkdir(parents=True)
    lock.touch()
    marker = MarkerLock(lock)
    assert marker.try_acquire()
    [file] = lock.parent.glob("*.marker.*")
    document = json.loads(file.read_text())
    document["process"].update(host="elsewhere", scope="0123456789ab-1")
    file.write_text(json.dumps(document))

    report, _ = only_lock(lrstream, "--break")
    assert (report["is_held"], report["was_broken"]) == (True, False), "it has just given a sign of life"
    os.utime(file, (time.time() - 3600, time.time() - 3600))
    report, _ = only_lock(lrstream)
    assert report["is_held"]
    report, _ = only_lock(lrstream, "--break")
    assert (report["is_held"], report["was_broken"]) == (False, True)


def test_break_leaves_a_live_lock_alone(lock: Path, lrstream: Program) -> None:
    with held_by_a_process(lock):
        edit_note(lock, updated=0.0)
        report, _ = only_lock(lrstream, "--break")
        assert (report["is_held"], report["was_broken"]) == (True, False)
