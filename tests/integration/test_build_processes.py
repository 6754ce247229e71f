"""Indexing in several processes of this machine: real ones, some of which do not survive."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lrstream.commands.build import BuildResult, build_dataset
from lrstream.errors import LrstreamError, MalformedMp4Error, UsageError
from lrstream.sidecar import processes as processes_module
from lrstream.sidecar.index_work import SourceResult
from lrstream.sidecar.processes import IndexProcessError, ProcessIndexer, automatic_processes
from lrstream.storage.location import parse_location
from tests.cli.program import Program
from tests.support import faults
from tests.support.hub import LoopbackHub
from tests.support.many_files import video_path, write_many_files
from tests.support.slow_http import SlowHttpServer

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

NUM_FILES = 40


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many_files(tmp_path_factory.mktemp("many") / "set", NUM_FILES)


@pytest.fixture(scope="module")
def single(root: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("single") / "single.npz"
    build_dataset(str(root), output=path, processes=1, resume=False)
    return path.read_bytes()


@pytest.fixture
def lrstream(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """Processes that index for this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int(re.sub(r".*\) ", "", (entry / "stat").read_text(), flags=re.DOTALL).split()[1])
            command = (entry / "cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue  # it has ended
        if parent == pid and b"process_child" in command:
            found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        state = re.sub(r".*\) ", "", Path(f"/proc/{pid}/stat").read_text(), flags=re.DOTALL)
    except OSError:
        return False
    return not state.startswith(("Z", "X"))


def start(server: SlowHttpServer, output: Path) -> subprocess.Popen[str]:
    command = ["build", server.url, "-o", str(output), "--workers", "4", "--processes", "3", "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "lrstream", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def build_slowly(server: SlowHttpServer, output: Path) -> BuildResult:
    return build_dataset(server.url, output=output, workers=4, processes=2)


def single_build(server: SlowHttpServer, path: Path) -> bytes:
    """What one process writes; identities name the server."""
    latency_s, server.latency_s = server.latency_s, 0.0
    build_dataset(server.url, output=path, processes=1, resume=False)
    server.latency_s = latency_s
    server.forget()
    return path.read_bytes()


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("resume", [True, False])
def test_the_bytes_of_one_process(
    root: Path, single: bytes, tmp_path: Path, processes: int, resume: bool
) -> None:
    result = build_dataset(
        str(root), output=tmp_path / "x.npz", workers=5, processes=processes, resume=resume
    )
    assert (result.files, result.reused) == (NUM_FILES, 0)
    assert (tmp_path / "x.npz").read_bytes() == single
    assert not list(tmp_path.glob("*.journal"))
    assert children_of(os.getpid()) == []


def test_more_processes_than_workers_or_files(tmp_path: Path) -> None:
    root = str(write_many_files(tmp_path / "few", 2))
    build_dataset(root, output=tmp_path / "one.npz", processes=1)
    build_dataset(root, output=tmp_path / "x.npz", workers=2, processes=8)
    build_dataset(root, output=tmp_path / "y.npz", workers=9, processes=8)
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "one.npz").read_bytes()
    assert (tmp_path / "y.npz").read_bytes() == (tmp_path / "one.npz").read_bytes()


def test_requests_of_the_hub_are_counted(
    root: Path, loopback_hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback_hub.create_dataset("robots/many", root, private=True)
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    build_dataset("robots/many", output=tmp_path / "single.npz", processes=1)
    for processes in (2, 3):
        loopback_hub.log.clear()
        output = tmp_path / f"{processes}.npz"
        result = build_dataset("robots/many", output=output, processes=processes, resume=False)
        records = loopback_hub.log.records(r"\.mp4$")
        assert len({record.path for record in records}) >= NUM_FILES
        assert result.requests == len(records)
        ranges = loopback_hub.log.records(r"\.mp4$", server="cdn")
        assert result.bytes_read == sum(record.bytes_sent for record in ranges)
        assert output.read_bytes() == (tmp_path / "single.npz").read_bytes()


def test_bad_files_are_reported_as_by_threads(tmp_path: Path) -> None:
    copy = write_many_files(tmp_path / "copy", 6)
    faults.lfs_pointer(copy / video_path(2))
    (copy / video_path(4)).write_bytes(b"<html>" * 100)
    messages = []
    for processes in (1, 2, 3):
        with pytest.raises(MalformedMp4Error, match="2 of 6 video files") as caught:
            build_dataset(str(copy), output=tmp_path / "x.npz", processes=processes, resume=False)
        messages.append((str(caught.value), caught.value.fields["failures"]))
    assert messages[0] == messages[1] == messages[2]
    assert not (tmp_path / "x.npz").exists()


def test_a_killed_process_is_replaced(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SlowHttpServer(root, 0.2) as server:
        expected = single_build(server, tmp_path / "single.npz")
        killed: list[int] = []

        def kill() -> None:
            # All reads at once: the other process is at work, too.
            wait_for(lambda: server.most_at_once == 4)
            killed.extend(children_of(os.getpid()))
            os.kill(killed[0], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        result = build_slowly(server, tmp_path / "x.npz")
        killer.join()
        reads = Counter(path for path, _ in server.reads)
    assert len(killed) == 1
    assert (result.files, result.reused) == (NUM_FILES, 0)
    assert set(reads) == {video_path(number) for number in range(NUM_FILES)}
    assert NUM_FILES < reads.total() <= NUM_FILES + 6
    assert (tmp_path / "x.npz").read_bytes() == expected
    assert "ended (SIGKILL)" in caplog.text
    assert children_of(os.getpid()) == []


def test_processes_that_die_again_and_again(root: Path, tmp_path: Path) -> None:
    with SlowHttpServer(root, 0.2) as server:
        ended, killed = threading.Event(), set()

        def kill() -> None:
            while not ended.is_set():
                for pid in children_of(os.getpid()):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                time.sleep(0.02)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with pytest.raises(IndexProcessError, match=r"2 processes ended .*SIGKILL.* \d+ of 40") as caught:
                build_slowly(server, tmp_path / "x.npz")
        finally:
            ended.set()
            killer.join()
        assert len(killed) == 2
        assert "--processes 1" in str(caught.value)
        assert set(caught.value.fields["paths"]) <= {video_path(number) for number in range(NUM_FILES)}
        server.latency_s = 0.0
        assert build_dataset(server.url, output=tmp_path / "x.npz", processes=1).files == NUM_FILES


def test_a_killed_build_leaves_no_process_and_is_continued(root: Path, tmp_path: Path) -> None:
    with SlowHttpServer(root, 0.1) as server:
        expected = single_build(server, tmp_path / "single.npz")
        build = start(server, tmp_path / "x.npz")
        wait_for(lambda: len(server.reads) >= NUM_FILES // 2)
        children = children_of(build.pid)
        build.kill()
        build.communicate(timeout=60)
        assert len(children) == 2
        wait_for(lambda: not any(is_alive(pid) for pid in children), 10)
        num_read = len(server.reads)
        time.sleep(0.3)
        assert len(server.reads) == num_read < NUM_FILES
        server.forget()
        server.latency_s = 0.0
        result = build_slowly(server, tmp_path / "x.npz")
        assert result.reused > 0
        assert len(server.reads) == NUM_FILES - result.reused
    assert (tmp_path / "x.npz").read_bytes() == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_build_leaves_no_process(
    root: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with SlowHttpServer(root, 0.1) as server:
        build = start(server, tmp_path / "x.npz")
        wait_for(lambda: len(server.reads) >= NUM_FILES // 2)
        children = children_of(build.pid)
        assert len(children) == 2
        build.send_signal(number)
        out, err = build.communicate(timeout=60)
        assert not any(is_alive(pid) for pid in children)
    assert build.returncode == code
    (problem,) = json.loads(out)["problems"]
    assert "Run the same command again" in problem["hint"]
    assert "Traceback" not in err
    assert not (tmp_path / "x.npz").exists()


def test_interrupted_while_processes_start(root: Path, tmp_path: Path) -> None:
    with SlowHttpServer(root, 0.1) as server:
        build = start(server, tmp_path / "x.npz")
        wait_for(lambda: len(children_of(build.pid)) == 2)
        children = children_of(build.pid)
        build.send_signal(signal.SIGINT)
        _, err = build.communicate(timeout=60)
        assert not any(is_alive(pid) for pid in children)
    assert (build.returncode, "Traceback" in err) == (130, False)


def test_an_unexpected_error_in_a_process_is_raised(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that fails before its first source, and one that answers with what is no message."""
    for program, match in (
        ("import sys; sys.path[:] = []; import no_such_module_of_ours", "ended one after the other"),
        (
            "import os, time; os.write(1, (3).to_bytes(8, 'little') + b'abc'); time.sleep(9)",
            "unpickling",
        ),
        (
            "import os; from lrstream.sidecar.process_child import *; "
            "os.write(1, packed_message(Raised(ZeroDivisionError('of the other process'))))",
            "of the other process",
        ),
    ):
        monkeypatch.setattr(processes_module, "_PROGRAM", program)
        with pytest.raises(Exception, match=match) as caught, SlowHttpServer(root, 0.5) as server:
            build_slowly(server, tmp_path / "x.npz")
        assert not isinstance(caught.value, KeyError)
        assert children_of(os.getpid()) == []
        assert not (tmp_path / "x.npz").exists()


def test_an_unexpected_error_in_this_process_is_raised(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> SourceResult:
        raise ZeroDivisionError("of this process")

    monkeypatch.setattr("lrstream.sidecar.index_threads.index_work", fail)
    with pytest.raises(ZeroDivisionError, match="of this process"):
        build_dataset(str(root), output=tmp_path / "x.npz", processes=2)
    assert children_of(os.getpid()) == []


def test_warnings_of_other_processes_go_to_the_log(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patch = (
        "import logging, lrstream.sidecar.index_threads as threads; index = threads.index_work; "
        "threads.index_work = lambda *words, **options: ("
        "logging.getLogger('lrstream.x').warning('of %s', 'afar'), index(*words, **options))[1]; "
        "print('not between answers', flush=True); main(answers)"
    )
    monkeypatch.setattr(
        processes_module, "_PROGRAM", processes_module._PROGRAM.replace("main(answers)", patch)
    )
    with SlowHttpServer(root, 0.1) as server:
        build_slowly(server, tmp_path / "x.npz")
    assert ("lrstream.x", 30, "of afar") in caplog.record_tuples


def test_wrong_numbers(root: Path, tmp_path: Path, lrstream: Program) -> None:
    with pytest.raises(UsageError, match="processes is 0"):
        ProcessIndexer(0, 1)
    with pytest.raises(UsageError, match="expected at least 1"):
        build_dataset(str(root), output=tmp_path / "x.npz", processes=-1)
    outcome = lrstream(
        *("build", str(root), "-o", str(tmp_path / "x.npz"), "--json"),
        *("--processes", "2", "--scheduler", "tcp://127.0.0.1:9"),
    ).without_traceback()
    assert (outcome.code, outcome.codes()) == (2, ["usage"])
    with pytest.raises(LrstreamError, match=re.escape("127.0.0.1:9")):
        build_dataset(str(root), output=tmp_path / "x.npz", processes=1, scheduler="tcp://127.0.0.1:9")


def test_how_many_processes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, memory = parse_location("robots/many"), parse_location("memory://many")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [automatic_processes(16, videos, hub) for videos in (0, 100, 2048)] == [1, 1, 4]
    assert [automatic_processes(workers, 2048, hub) for workers in (1, 4, 8, 64)] == [1, 1, 2, 8]
    assert automatic_processes(16, 2048, memory) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert automatic_processes(16, 2048, hub) == 1


def test_a_process_that_cannot_be_started(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(IndexProcessError, match=r"cannot be started.*--processes 1"):
        build_dataset(str(root), output=tmp_path / "x.npz", processes=2)


def test_the_benchmark(root: Path, lrstream: Program) -> None:
    outcome = lrstream("benchmark", "build", str(root), "--processes", "2", "--json")
    assert outcome.code == 0
    found = outcome.document()["result"]
    assert (found["videos"], found["processes"], found["settings"]["processes"]) == (NUM_FILES, 2, 2)
    assert found["stages"] is None
    assert found["requests"] >= NUM_FILES
    outcome = lrstream("benchmark", "build", str(root), "--processes", "2")
    assert "processes" in outcome.out
    assert "transfer" not in outcome.out
