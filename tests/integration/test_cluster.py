"""Indexing on a real Dask cluster: a scheduler and worker processes, some of which do not survive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest

from lrstream.commands.build import BuildResult, build_dataset
from lrstream.errors import LrstreamError, MalformedMp4Error, UsageError
from lrstream.sidecar import cluster as cluster_module
from lrstream.sidecar.cluster import ClusterError, ClusterIndexer
from tests.cli.program import Program
from tests.support import faults
from tests.support.cluster import DaskCluster
from tests.support.hub import LoopbackHub
from tests.support.many_files import video_path, write_many_files
from tests.support.remote import hurry_retries
from tests.support.slow_http import SlowHttpServer

pytest.importorskip("distributed")
pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(240)

# Comparing times takes a quiet machine and a larger dataset, so it is done where a variable asks for it.
IS_TIMED = bool(os.environ.get("LRSTREAM_CLUSTER_TIMES"))
NUM_FILES = 48 if IS_TIMED else 16
# Of each worker process; one read of each file.
AT_ONCE = 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many_files(tmp_path_factory.mktemp("many") / "set", NUM_FILES)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    """A scheduler and one worker, without any credentials."""
    nothing = {"HF_TOKEN": None, "HF_ENDPOINT": None, "HF_HOME": "/nonexistent", "HF_TOKEN_PATH": None}
    with DaskCluster(tmp_path_factory.mktemp("cluster"), nothing) as started:
        started.start_worker()
        started.wait_for_workers(1)
        yield started


@pytest.fixture
def lrstream(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def timed_build(server: SlowHttpServer, output: Path, scheduler: str) -> tuple[BuildResult, float]:
    started = time.monotonic()
    result = build_dataset(server.url, output=output, workers=AT_ONCE, scheduler=scheduler)
    return result, time.monotonic() - started


@pytest.mark.skipif(not IS_TIMED, reason="set LRSTREAM_CLUSTER_TIMES=1 to compare times")
def test_two_workers_write_the_same_bytes_in_less_time(
    root: Path, cluster: DaskCluster, tmp_path: Path
) -> None:
    cluster.one_worker()
    with SlowHttpServer(root, 0.15) as server:
        build_dataset(server.url, output=tmp_path / "single.npz")
        server.forget()
        one, one_s = timed_build(server, tmp_path / "one.npz", cluster.address)
        assert server.most_at_once == AT_ONCE
        assert (one.files, one.requests, len(server.reads)) == (NUM_FILES, NUM_FILES, NUM_FILES)
        server.forget()
        cluster.second_worker()
        two, two_s = timed_build(server, tmp_path / "two.npz", cluster.address)
        assert server.most_at_once == 2 * AT_ONCE
        assert (two.reused, len(server.reads)) == (0, NUM_FILES)
        print(f"one worker {one_s:.2f} s, two workers {two_s:.2f} s, ratio {two_s / one_s:.2f}")
    single = (tmp_path / "single.npz").read_bytes()
    assert (tmp_path / "one.npz").read_bytes() == single
    assert (tmp_path / "two.npz").read_bytes() == single
    # 24 rounds of reads against 12; what remains besides is the same for both.
    assert two_s <= 0.7 * one_s


def test_a_killed_worker_is_replaced_by_the_other(root: Path, cluster: DaskCluster, tmp_path: Path) -> None:
    victim = cluster.second_worker()
    with SlowHttpServer(root, 0.0) as server:
        build_dataset(server.url, output=tmp_path / "single.npz")
        server.forget()
        server.latency_s = 1.0

        def kill() -> None:
            wait_for(lambda: server.most_at_once == 2 * AT_ONCE)  # both are in the middle of reads
            cluster.kill(victim)
            server.latency_s = 0.02

        killer = threading.Thread(target=kill)
        killer.start()
        result, _ = timed_build(server, tmp_path / "x.npz", cluster.address)
        killer.join()
        reads = Counter(path for path, _ in server.reads)
    assert (result.files, result.reused) == (NUM_FILES, 0)
    assert set(reads) == {video_path(number) for number in range(NUM_FILES)}
    # What the lost one was reading had to be read again, but by far not all.
    assert NUM_FILES + AT_ONCE <= reads.total() < 2 * NUM_FILES
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "single.npz").read_bytes()


def test_ctrl_c_leaves_nothing_running_and_the_build_can_be_continued(
    root: Path, cluster: DaskCluster, tmp_path: Path
) -> None:
    from distributed import Client

    cluster.one_worker()
    with SlowHttpServer(root, 0.1) as server:
        command = ["build", server.url, "-o", str(tmp_path / "x.npz"), "--workers", "2", "--json"]
        command += ["--scheduler", cluster.address]
        child = subprocess.Popen(
            [sys.executable, "-m", "lrstream", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        wait_for(lambda: len(server.reads) >= NUM_FILES * 5 // 8)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        num_read = len(server.reads)
        assert child.returncode == 130
        (problem,) = json.loads(out)["problems"]
        assert "Run the same command again" in problem["hint"]
        assert "Traceback" not in err
        with Client(cluster.address, set_as_default=False) as client:
            assert not any(client.processing().values())
            wait_for(lambda: not any(client.call_stack().values()), 10)
        time.sleep(0.3)
        assert len(server.reads) == num_read < NUM_FILES
        assert server.most_at_once == AT_ONCE
        server.forget()
        server.latency_s = 0.0
        reused = build_dataset(server.url, output=tmp_path / "x.npz", scheduler=cluster.address).reused
        assert reused > 0
        assert len(server.reads) == NUM_FILES - reused
        build_dataset(server.url, output=tmp_path / "single.npz")
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "single.npz").read_bytes()


def test_credentials_reach_the_workers_and_nothing_shows_them(
    loopback_hub: LoopbackHub,
    root: Path,
    cluster: DaskCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from distributed import Client

    loopback_hub.create_dataset("robots/many", root, private=True)
    sources = ["robots/many"]
    if tuple(int(part) for part in huggingface_hub.__version__.split(".")[:2]) >= (1, 6):  # knows buckets
        loopback_hub.create_bucket("robots/bucket", root, private=True)
        sources.append("hf://buckets/robots/bucket")
    loopback_hub.settings.xet = False
    hurry_retries(monkeypatch)
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    names: list[str] = []
    submit = Client.submit

    def watched(self: Client, *args: object, **options: object) -> object:
        future = submit(self, *args, **options)
        names.append(f"{future.key} {future!r} {args!r} {options!r}")
        return future

    monkeypatch.setattr(Client, "submit", watched)
    for source in sources:
        build_dataset(source, output=tmp_path / "single.npz")
        build_dataset(source, output=tmp_path / "x.npz", scheduler=cluster.address)
        assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "single.npz").read_bytes()
        (tmp_path / "x.npz").unlink()
    assert len(names) >= len(sources)
    for text in (*names, cluster.logs(), caplog.text):
        assert "SENTINEL" not in text
    # The workers have no token of their own: without the one that is sent they are refused.
    monkeypatch.setattr("lrstream.storage.hub_client.get_token", lambda: None)
    with pytest.raises(LrstreamError, match="token"):
        build_dataset("robots/many", output=tmp_path / "y.npz", scheduler=cluster.address)


def test_bad_files_are_reported_as_by_a_single_build(
    root: Path, cluster: DaskCluster, tmp_path: Path
) -> None:
    copy = write_many_files(tmp_path / "copy", 6)
    faults.lfs_pointer(copy / video_path(2))
    (copy / video_path(4)).write_bytes(b"<html>" * 100)
    messages = []
    for scheduler in (None, cluster.address):
        with pytest.raises(MalformedMp4Error, match="2 of 6 video files") as caught:
            build_dataset(str(copy), output=tmp_path / "x.npz", scheduler=scheduler, resume=False)
        messages.append((str(caught.value), caught.value.fields["failures"]))
    assert messages[0] == messages[1]
    assert not (tmp_path / "x.npz").exists()


def test_another_compressor_on_the_workers_does_not_change_a_byte(
    root: Path, cluster: DaskCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_dataset(str(root), output=tmp_path / "single.npz")
    monkeypatch.setattr("lrstream.sidecar.cluster.zlib.ZLIB_RUNTIME_VERSION", "another")
    encoded: list[object] = []
    indexed = cluster_module._Run._indexed

    def watched(self: object, *args: object) -> object:
        result = indexed(self, *args)  # type: ignore[arg-type]
        encoded.append(result.encoded)
        return result

    monkeypatch.setattr(cluster_module._Run, "_indexed", watched)
    build_dataset(str(root), output=tmp_path / "x.npz", scheduler=cluster.address)
    assert encoded == [None] * NUM_FILES
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "single.npz").read_bytes()


def test_a_scheduler_that_does_not_answer(
    root: Path, tmp_path: Path, lrstream: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_CONNECT_TIMEOUT_S", 0.5)
    outcome = lrstream(
        "build", root, "-o", tmp_path / "x.npz", "--scheduler", "tcp://127.0.0.1:1", "--json"
    ).without_traceback()
    assert (outcome.code, outcome.codes()) == (5, ["cluster"])
    outcome = lrstream("build", root, "-o", tmp_path / "x.npz", "--scheduler", "nonsense", "--json")
    assert (outcome.code, outcome.codes()) == (2, ["usage"])
    assert not (tmp_path / "x.npz").exists()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match="not installed") as caught, ClusterIndexer("tcp://h:1", workers=1):
        pass
    assert 'pip install "lrstream[distributed]"' in str(caught.value.hint)


def test_a_scheduler_that_dies_on_the_way(root: Path, tmp_path: Path) -> None:
    with SlowHttpServer(root, 0.1) as server, DaskCluster(tmp_path / "cluster") as doomed:
        doomed.start_worker()
        doomed.wait_for_workers(1)

        def kill() -> None:
            wait_for(lambda: len(server.reads) >= 6)
            doomed.kill(doomed.scheduler_process())

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(ClusterError, match=rf"was lost; \d+ of {NUM_FILES} video files had been indexed"):
            build_dataset(server.url, output=tmp_path / "x.npz", workers=2, scheduler=doomed.address)
        killer.join()
    assert not (tmp_path / "x.npz").exists()
