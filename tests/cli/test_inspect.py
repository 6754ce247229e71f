"""The `inspect` commands as programs: envelope, statuses, width, poor terminals (CL-1, CL-4, K32, K33)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from tests.cli.program import Program, run_process
from tests.support.shared import PROJECT

FRONT = "observation.images.front"


def commands(root: Path, sidecar: Path) -> dict[str, list[str]]:
    """A call of every command that succeeds."""
    return {
        "inspect.sidecar": ["inspect", "sidecar", str(sidecar)],
        "inspect.dataset": ["inspect", "dataset", str(root)],
        "inspect.episode": ["inspect", "episode", str(root), "1"],
        "inspect.budget": ["inspect", "budget", str(root), "--workers", "2"],
        "inspect.plan": ["inspect", "plan", str(root), "--world-size", "2", "--batch-size", "4"],
        "inspect.locks": ["inspect", "locks"],
        "inspect.cache": ["inspect", "cache"],
        "convert": ["convert", str(sidecar), "--dry-run"],
        "validate": ["validate", str(root), "--deep", "--sample", "1"],
    }


NAMES = list(commands(Path(), Path()))
# Without the cache's, whose last column is a path, and the locks, which have none.
TABLES = ["inspect.sidecar", "inspect.dataset", "inspect.episode", "inspect.budget", "inspect.plan"]


@pytest.fixture
def sidecar(standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program) -> Path:
    path = tmp_path / "set.npz"
    assert lrstream("build", standard_dataset.root, "-o", path).code == 0
    return path


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_one_document(
    name: str,
    standard_dataset: WrittenDataset,
    sidecar: Path,
    lrstream: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    outcome = lrstream(*commands(standard_dataset.root, sidecar)[name], "--json")
    assert outcome.code == 0
    assert outcome.err == ""
    document = outcome.document()
    assert document["schema"] == f"lrstream.{name}/1"
    assert document["result"]
    text = lrstream(*commands(standard_dataset.root, sidecar)[name])
    assert text.code == 0
    assert text.out.strip()


@pytest.mark.parametrize("name", NAMES)
def test_failures_are_one_document_too(
    name: str, sidecar: Path, lrstream: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    absent = tmp_path / ("x" * 200) / "absent"
    arguments = commands(absent, absent)[name]
    if name == "inspect.locks":
        arguments = [*arguments, str(absent)]
    unknown = lrstream(*arguments, "--no-such-option", "--json")
    assert (unknown.code, unknown.codes()) == (2, ["usage"])
    if name == "inspect.cache":
        return
    outcome = lrstream(*arguments, "--json").without_traceback()
    assert outcome.code == 4
    document = outcome.document()
    assert document["schema"] == f"lrstream.{name}/1"
    assert [problem["code"] for problem in document["problems"]] == ["not-found"]
    assert lrstream(*arguments).without_traceback().out == ""


@pytest.mark.parametrize(
    ("arguments", "code", "name"),
    [
        (["episode", "SET", "99"], 4, "not-found"),
        (["episode", "SET", "-1"], 2, "usage"),
        (["episode", "SET", "0", "--camera", "nope"], 4, "not-found"),
        (["episode", "SET", "0", "--mini-mp4", "x.mp4"], 2, "usage"),
        (["budget", "SET", "--byte-budget-gb", "0.000001"], 7, "byte-budget"),
        (["budget", "SET", "--byte-budget-gb", "nan"], 2, "usage"),
        (["budget", "SET", "--byte-budget-gb", "-1"], 2, "usage"),
        (["budget", "SET", "--world-size", "8"], 2, "usage"),
        (["plan", "SET", "--world-size", "8"], 2, "usage"),
        (["plan", "SET", "--batch-size", "0"], 2, "usage"),
        (["sidecar", "SET"], 6, "sidecar"),
        (["dataset", "SIDECAR"], 4, "not-found"),
    ],
)
def test_each_status_has_its_situation(
    arguments: list[str],
    code: int,
    name: str,
    standard_dataset: WrittenDataset,
    sidecar: Path,
    lrstream: Program,
) -> None:
    places = {"SET": str(standard_dataset.root), "SIDECAR": str(sidecar)}
    outcome = lrstream("inspect", *(places.get(word, word) for word in arguments), "--json")
    assert (outcome.code, outcome.codes()) == (code, [name])
    assert outcome.document()["problems"][0]["message"]


@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_eighty_columns(
    name: str, demo_dataset: WrittenDataset, tmp_path: Path, lrstream: Program
) -> None:
    sidecar = tmp_path / "set.npz"
    assert lrstream("build", demo_dataset.root, "-o", sidecar).code == 0
    lines = lrstream(*commands(demo_dataset.root, sidecar)[name]).out.splitlines()
    tables = [line for line in lines if line and "/" not in line and ": " not in line]
    assert max((len(line.rstrip()) for line in tables), default=0) <= 80


@pytest.fixture(scope="module")
def odd_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose names look like markup and are not ASCII."""
    spec = DemoSpec(
        (4, 6), (DemoCamera("observation.images.[bold]é", 16, 96),), tasks=("[red]größer[/red] :smile:",)
    )
    return write_dataset(tmp_path_factory.mktemp("odd") / "[link=x]ü", spec).root


def test_names_are_shown_as_they_are(odd_dataset: Path, lrstream: Program) -> None:
    text = lrstream("inspect", "episode", odd_dataset, "0").out
    assert "[red]größer[/red] :smile:" in text
    assert "[link=x]ü" in lrstream("inspect", "dataset", odd_dataset).out
    assert "observation.images.[bold]é" in lrstream("inspect", "dataset", odd_dataset).out


@pytest.mark.parametrize("name", ["inspect.dataset", "inspect.episode", "inspect.budget", "inspect.cache"])
def test_poor_terminals_are_served(name: str, odd_dataset: Path) -> None:
    poor = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "LANG": "C", "TERM": "dumb", "NO_COLOR": "1"}
    outcome = run_process(*commands(odd_dataset, odd_dataset)[name], env=poor)
    assert outcome.code == 0, outcome.err
    assert outcome.out.isascii()
    assert "\x1b" not in outcome.out
    assert outcome.err == ""


def test_a_reader_that_leaves_is_no_failure(standard_dataset: WrittenDataset) -> None:
    program = f"{sys.executable} -m lrstream inspect budget {standard_dataset.root}"
    done = subprocess.run(
        ["bash", "-c", f"{program} | head -1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=dict(os.environ),
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_written_files_are_named_in_the_answer(
    standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program
) -> None:
    video, sheet = tmp_path / "e.mp4", tmp_path / "e.png"
    outcome = lrstream(
        "inspect", "episode", standard_dataset.root, "2", "--camera", FRONT,
        "--mini-mp4", video, "--contact-sheet", sheet, "--pictures", "3", "--json",
    )  # fmt: skip
    result = outcome.document()["result"]
    assert (result["mini_mp4"], result["contact_sheet"]) == (str(video), str(sheet))
    assert video.stat().st_size == result["mini_mp4_bytes"]
    assert sheet.read_bytes().startswith(b"\x89PNG")


def test_the_report_of_a_budget_is_complete(standard_dataset: WrittenDataset, lrstream: Program) -> None:
    document = lrstream("inspect", "budget", standard_dataset.root, "--pool", "2", "--json").document()
    result = document["result"]
    assert result["episode_bytes"]["count"] == 7
    assert result["workers"][0]["reservation"]["largest_pool"] == 2
    assert json.dumps(result)
    text = lrstream("inspect", "budget", standard_dataset.root, "--pool", "2").out
    assert "####" in text
    assert "Keep byte_budget_gb" in text


def test_every_code_of_a_report_is_documented() -> None:
    text = (PROJECT / "docs/reference/problem-codes.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE))
    used: set[str] = set()
    for path in (PROJECT / "lrstream/commands").glob("inspect_*.py"):
        source = path.read_text(encoding="utf-8")
        used.update(re.findall(r"(?:finding|_told)\(\s*\"([\w-]+)\"", source))
    assert used
    # Codes of error classes and of `validate` are in the other table.
    assert documented - {"byte-budget", "pixels-differ", "circumstances-differ"} == used


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install '.[docs]')")
    build = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, "-m", *build],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=PROJECT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "how-to" / "fit-a-byte-budget.html").exists()
