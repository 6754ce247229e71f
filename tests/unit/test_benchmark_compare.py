"""A benchmark beside an earlier one: refusals before the run, and the arithmetic of differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lrstream.commands.benchmark_compare import read_earlier
from lrstream.errors import AccessError, InputError, LrstreamError, NotFoundError, UsageError

COMMAND = "benchmark.loader"


def result(**figures: Any) -> dict[str, Any]:
    return {
        "dataset": {"digest": "d", "location": "/a", "num_episodes": 3, "num_frames": 9},
        "settings": {"workers": 2, "budget_gb": 8.0},
        "machine": {"num_cpus": 2, "libraries": {"av": "15"}},
        **figures,
    }


def document(result: Any, schema: str = f"lrstream.{COMMAND}/1") -> str:
    return json.dumps({"schema": schema, "version": "0.0", "ok": True, "result": result, "problems": []})


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ("{", InputError, "no JSON"),
        ("", InputError, "no JSON"),
        ("\xff", InputError, "no JSON"),
        ("[" * 100_000, InputError, "no JSON"),
        ("[1, 2]", InputError, "no schema"),
        ('{"a": 1}', InputError, "no schema"),
        ('{"schema": 7}', InputError, "no schema"),
        (document({}, "lrstream.build/1"), UsageError, "build/1"),
        (document({}, "lrstream.benchmark.loader/2"), UsageError, "loader/2"),
        (document({}), UsageError, "no figures"),
        (document([]), UsageError, "no figures"),
        (document({"dataset": {}, "settings": [], "machine": {}}), UsageError, "no figures"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    content: str, error: type[LrstreamError], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "before.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(error, match=words) as caught:
        read_earlier(path, COMMAND)
    assert "before.json" in str(caught.value)
    assert "lrstream benchmark loader" in (caught.value.hint or "") or "failed" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no file"):
        read_earlier(tmp_path / "absent.json", COMMAND)
    with pytest.raises(UsageError, match="directory"):
        read_earlier(tmp_path, COMMAND)
    path = tmp_path / "a\0b"
    with pytest.raises((AccessError, NotFoundError, UsageError, ValueError)):
        read_earlier(path, COMMAND)


def test_other_data_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    path.write_text(document(result()))
    earlier = read_earlier(path, COMMAND)
    earlier.require_dataset("d")
    with pytest.raises(UsageError, match="3 episodes with 9 frames of /a"):
        earlier.require_dataset("e")


def test_figures_are_compared_by_name(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    before = result(samples=10, stages={"decode": 4.0, "fetch": None}, gone=1, lists=[1], ok=True, zero=0)
    path.write_text(document(before))
    now = result(samples=5, stages={"decode": 6.0, "fetch": 2.0}, new=1, lists=[2], ok=False, zero=3)
    now["settings"] = {"workers": 4, "budget_gb": 8.0}
    now["machine"] = {"num_cpus": 2, "libraries": {"av": "16"}}
    comparison = read_earlier(path, COMMAND).compare(now)
    assert [(item.name, item.before, item.now, item.ratio) for item in comparison.figures] == [
        ("samples", 10, 5, 0.5),
        ("stages.decode", 4.0, 6.0, 1.5),
        ("zero", 0, 3, None),
    ]
    assert [item.message for item in comparison.circumstances] == [
        "settings workers was 2, now it is 4.",
        "machine libraries.av was 15, now it is 16.",
    ]
    assert {item.severity for item in comparison.circumstances} == {"warning"}
