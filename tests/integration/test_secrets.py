"""Tokens and signed URLs are planted where they can come from, and looked for where they could go (SC-12).

Other tests look at single errors; here whole commands run, well and badly, and everything they leave is read:
both streams, every file below the caches, the process list, log records of every library.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from lrstream.demo import WrittenDataset
from lrstream.errors import LrstreamError
from lrstream.layout.layout import load_layout
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.support.hub import LoopbackHub
from tests.support.remote import epoch, hurry_retries

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(120)

REPO, BUCKET = "robots/secret", "robots/bucket"
# What there is to read from; older clients know no buckets.
KNOWS_BUCKETS = hasattr(huggingface_hub.HfApi, "list_bucket_tree")
SOURCES = (REPO, f"hf://buckets/{BUCKET}") if KNOWS_BUCKETS else (REPO,)
# What no output may hold: the tokens, and what makes a URL of the CDN a key.
MARKS = ("SENTINEL", "Signature=", "X-Amz-", "Expires=")


@pytest.fixture
def hub(
    loopback_hub: LoopbackHub, tiny_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> LoopbackHub:
    loopback_hub.create_dataset(REPO, tiny_dataset.root, private=True)
    loopback_hub.create_bucket(BUCKET, tiny_dataset.root, private=True)
    loopback_hub.settings.xet = False
    hurry_retries(monkeypatch)
    return loopback_hub


def assert_clean(text: str, where: object = "") -> None:
    text = re.sub(r"=(\.\.\.|\*\*\*)", "", text)  # a name whose value has been taken out
    for mark in MARKS:
        at = text.find(mark)
        assert at < 0, f"{mark} in {where}: ...{text[max(0, at - 200) : at + 100]}"


def assert_clean_files(home: Path) -> None:
    for path in home.rglob("*"):
        assert_clean(str(path))
        # The Hub's client keeps the token where `hf auth login` puts it; that is its business.
        if path.is_file() and path.name not in ("token", "stored_tokens"):
            assert_clean(path.read_bytes().decode("latin-1"), path)


def assert_clean_log(caplog: pytest.LogCaptureFixture) -> None:
    """All records of all libraries; httpcore alone dumps whole headers at level DEBUG, as it is made for."""
    for record in caplog.records:
        if record.levelno > logging.DEBUG or not record.name.startswith("httpcore"):
            assert_clean(record.getMessage(), f"log of {record.name}")


class ProcessList:
    """Reads the command lines of a process and its children until it ends."""

    def __init__(self, pid: int) -> None:
        self.seen: set[str] = set()
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> ProcessList:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            for pid in (str(self._pid), *self._children()):
                try:
                    command = Path("/proc", pid, "cmdline").read_bytes()
                except OSError:
                    continue
                self.seen.add(command.replace(b"\0", b" ").decode("utf-8", "replace"))

    def _children(self) -> list[str]:
        try:
            return Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        except OSError:
            return []


def run(
    hub: LoopbackHub, home: Path, *arguments: str, token: str | None = None, is_typed: bool = False
) -> tuple[int, str]:
    """Run the program in a process of its own; exit status and both streams, all looked through."""
    child = subprocess.Popen(
        [sys.executable, "-m", "lrstream", *arguments],
        env=hub.env(token or hub.write_token, home=home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ProcessList(child.pid) as processes:
        out, err = child.communicate(timeout=100)
    assert_clean(out, f"stdout of {arguments}")
    assert_clean(err, f"stderr of {arguments}")
    if not is_typed:  # what a user types on a command line is in the process list already
        assert processes.seen
        assert_clean("\n".join(processes.seen), "the process list")
    assert_clean_files(home)
    return child.returncode, out + err


def test_commands_that_succeed(hub: LoopbackHub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    output = str(tmp_path / "x.npz")
    for arguments in (
        ("build", REPO, "--debug", "--json"),
        ("build", SOURCES[-1], "--debug", "--verbose"),
        ("build", REPO, "-o", output, "--push", "--debug", "--json"),
        ("inspect", "sidecar", output, "--json"),
        ("validate", output, "--source", REPO, "--debug"),
        ("inspect", "cache", "--json"),
        ("inspect", "locks", "--debug"),
    ):
        code, text = run(hub, home, *arguments)
        assert code == 0, text
    assert_clean_files(tmp_path)


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("forbidden", {}),
    ("expired-url", {}),
    ("truncate", {}),
    ("wrong-content-range", {}),
    ("status", {"status": 500, "body": "Signature=abcSENTINEL hf_0123456789SENTINEL0123456789 Expires=1"}),
]


@pytest.mark.parametrize(("kind", "arguments"), FAULTS)
def test_failures_in_the_library(
    hub: LoopbackHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
    arguments: dict[str, Any],
) -> None:
    """Messages, fields, causes and pickles of errors; records of all loggers, at every level."""
    hub.connect_process(monkeypatch, hub.read_token)
    hub.faults.add(r"side/.*file-000\.mp4$", kind, server="cdn", **arguments)
    with caplog.at_level(logging.DEBUG):
        for source in SOURCES:
            store = open_store(parse_location(source))
            with pytest.raises(LrstreamError) as caught:
                resolve_sidecar(store, load_layout(store), home=tmp_path)
            error: BaseException | None = caught.value
            assert_clean(json.dumps(caught.value.fields, default=repr), "fields")
            assert_clean(pickle.dumps(caught.value).decode("latin-1"), "pickle")
            assert_clean(pickle.dumps(store).decode("latin-1") + repr(store), "store")
            while error is not None:
                # Causes of other libraries may quote URLs; what they say reaches nobody but a debugger,
                # unless it is an error of lrstream.
                if isinstance(error, LrstreamError):
                    assert_clean(str(error) + repr(error), "error")
                error = error.__cause__
    assert caplog.records
    assert_clean_log(caplog)
    assert_clean_files(tmp_path)


@pytest.mark.parametrize("debug", ["--json", "--debug"])
def test_failures_of_the_program(hub: LoopbackHub, tmp_path: Path, debug: str) -> None:
    hub.faults.add(r"side/.*file-000\.mp4$", "forbidden", server="cdn")
    code, _ = run(hub, tmp_path / "a", "build", REPO, debug)
    assert code == 4
    code, _ = run(hub, tmp_path / "b", "build", REPO, debug, token="hf_WrongTokenSENTINEL0123456789abcdef")
    assert code == 4
    hub.faults.clear()
    code, _ = run(
        hub, tmp_path / "c", "build", f"{hub.endpoint}/x?Signature=abcSENTINELdef", debug, is_typed=True
    )
    assert code != 0


def test_training_leaves_nothing(
    hub: LoopbackHub, isolated_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.connect_process(monkeypatch, hub.read_token)
    with caplog.at_level(logging.DEBUG):
        assert len(epoch(REPO)) == 21
    assert_clean_log(caplog)
    assert_clean_files(isolated_home)


def test_a_token_in_a_file(hub: LoopbackHub, tmp_path: Path) -> None:
    """The token is found where `hf auth login` keeps it, and stays there."""
    other_homes = tmp_path / "homes"
    other_homes.mkdir()
    (other_homes / "token").write_text(hub.read_token)
    environment = hub.env(None, home=other_homes)
    assert "HF_TOKEN" not in environment
    done = subprocess.run(
        [sys.executable, "-m", "lrstream", "build", REPO, "--debug"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_clean(done.stdout + done.stderr)
    assert_clean_files(other_homes)
    assert os.listdir(other_homes)
