"""`--progress json`: lines that programs read, on stderr alone."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from lrstream.cli.progress_json import ProgressLines
from lrstream.demo import WrittenDataset
from tests.cli.program import Program

FIELDS = [
    "schema",
    "command",
    "what",
    "done",
    "total",
    "bytes",
    "rate",
    "bytes_per_s",
    "seconds_left",
    "elapsed_s",
]


def test_a_build_tells_how_far_it_is(demo_dataset: WrittenDataset, tmp_path: Path, lrstream: Program) -> None:
    outcome = lrstream(
        "build", demo_dataset.root, "-o", tmp_path / "x.npz", "--progress", "json", "--json", "--quiet"
    )
    result = outcome.document()["result"]
    lines = [json.loads(line) for line in outcome.err.splitlines()]
    assert all(list(line) == FIELDS for line in lines)
    assert {(line["schema"], line["command"]) for line in lines} == {("lrstream.progress/1", "build")}
    assert (lines[0]["done"], lines[0]["bytes"], lines[0]["seconds_left"]) == (0, 0, None)
    last = lines[-1]
    assert (last["done"], last["total"], last["seconds_left"]) == (result["files"], result["files"], 0.0)
    assert last["bytes"] == result["bytes_read"]
    for name in ("done", "bytes", "elapsed_s"):
        assert all(one[name] <= other[name] for one, other in itertools.pairwise(lines))


def test_only_on_request(demo_dataset: WrittenDataset, tmp_path: Path, lrstream: Program) -> None:
    for option in ([], ["--progress", "auto"]):
        outcome = lrstream("build", demo_dataset.root, "-o", tmp_path / "x.npz", *option)
        assert (outcome.code, outcome.err) == (0, "")
    assert lrstream("build", demo_dataset.root, "--progress", "xml", "--json").code == 2


@pytest.mark.parametrize("command", ["validate", "convert"])
def test_other_commands(
    demo_dataset: WrittenDataset, tmp_path: Path, lrstream: Program, command: str
) -> None:
    assert lrstream("build", demo_dataset.root, "-o", tmp_path / "x.npz").code == 0
    outcome = lrstream(command, tmp_path / "x.npz", "--progress", "json")
    lines = [json.loads(line) for line in outcome.err.splitlines()]
    assert lines[-1]["done"] == lines[-1]["total"] == 6
    assert "schema" not in outcome.out


def test_rates_and_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = ProgressLines("build")
    lines(0, 100, "video files", num_bytes=0)
    lines(1, 100, "video files", num_bytes=10)  # too soon for another line
    now[0] += 2.0
    lines(20, 100, "video files", num_bytes=5000)
    now[0] += 100.0  # what was longer than half a minute ago does not count any more
    lines(70, 100, "video files", num_bytes=6000)
    lines(100, 100, "video files", num_bytes=7000)
    lines(1, None, "pictures")
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["done"] for line in found] == [0, 20, 70, 100, 1]
    assert (found[1]["rate"], found[1]["bytes_per_s"], found[1]["seconds_left"]) == (10.0, 2500.0, 8.0)
    assert (found[2]["rate"], found[2]["seconds_left"], found[2]["elapsed_s"]) == (0.5, 60.0, 102.0)
    assert (found[3]["seconds_left"], found[3]["bytes"]) == (0.0, 7000)
    assert (found[4]["what"], found[4]["total"], found[4]["bytes"], found[4]["rate"]) == (
        "pictures",
        None,
        None,
        None,
    )
