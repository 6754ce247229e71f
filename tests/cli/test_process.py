"""What only a process of its own can show: signals, closed pipes, poor encodings, secrets, exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lrstream.demo import WrittenDataset
from lrstream.sidecar.lock import ProcessLock, lock_path
from tests.cli.program import run_process
from tests.support.datasets import copy_dataset

# The program, which says on stderr when it has come to wait for a lock.
WAITING = """
import sys
from lrstream.cli.app import main
from lrstream.sidecar.lock import ProcessLock

acquire = ProcessLock.acquire

def announced(self, *arguments, **options):
    sys.stderr.write("waiting\\n")
    sys.stderr.flush()
    return acquire(self, *arguments, **options)

ProcessLock.acquire = announced
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize(("as_json", "number"), [(False, signal.SIGINT), (True, signal.SIGTERM)])
def test_interrupting_a_waiting_build(
    as_json: bool, number: signal.Signals, standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    target = tmp_path / "x.npz"
    words = ["build", str(standard_dataset.root), "-o", str(target), *(["--json"] if as_json else [])]
    with ProcessLock(lock_path(target)) as lock:
        lock.acquire(1.0)
        with subprocess.Popen(
            [sys.executable, "-c", WAITING, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "waiting\n"
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    if as_json:
        assert '"code": "interrupted"' in out
    else:
        assert err.startswith("error [interrupted]: ")
        assert out == ""
    assert not target.exists()


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["build", "ROOT"], ["build", "ROOT", "--json"], ["build", "--help"]]
)
def test_a_reader_that_leaves_is_no_error(
    words: list[str], standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    words = [str(standard_dataset.root) if word == "ROOT" else word for word in words]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lrstream", *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["--show-completion", "zsh"]])
def test_a_full_disk_is_told(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lrstream", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 7
    assert done.stderr.startswith("error [disk-full]: ")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_names_that_the_terminal_cannot_show(standard_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "Würfel-机器人")
    poor = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "TERM": "dumb", "NO_COLOR": "1"}
    outcome = run_process("build", root, "-o", root / "x.npz", env=poor)
    assert outcome.code == 0
    assert outcome.err == ""
    assert outcome.out.isascii()
    assert "\x1b" not in outcome.out
    assert "W\\xfcrfel-\\u673a" in outcome.out
    document = run_process("build", root, "-o", root / "x.npz", "--json", env=poor).document()
    assert document["result"]["path"] == str(root / "x.npz")


def test_an_unforeseen_failure_is_one_line_without_secrets(tmp_path: Path) -> None:
    script = (
        "import sys\nimport lrstream.commands.build as build\n"
        "def fail(*a, **k):\n"
        "    secret = 'hf_SENTINEL'\n"
        "    raise RuntimeError('GET https://cdn.example/x?Signature=SENTINEL with ' + secret)\n"
        "build.open_dataset = fail\n"
        "from lrstream.cli.app import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, "HF_TOKEN": "hf_SENTINEL"}
    for extra in ([], ["--json"], ["--debug"]):
        done = subprocess.run(
            [sys.executable, "-c", script, "build", "x", *extra],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
        assert done.returncode == 1
        assert "SENTINEL" not in done.stdout
        assert ("Traceback" in done.stderr) == ("--debug" in extra)
        if extra != ["--debug"]:
            assert "SENTINEL" not in done.stderr
        if not extra:
            first, second = done.stderr.splitlines()
            assert first.startswith("error [internal]: Unexpected RuntimeError: ")
            assert "--debug" in second
