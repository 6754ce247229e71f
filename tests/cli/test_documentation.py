"""What README.md and docs/ say can be done as they say it.

Blocks marked ``bash`` and ``python`` are executed, one document after the other, beside a demonstration
dataset called ``./demo``; commands for the placeholder OWNER/NAME are not. Blocks marked ``sh``
(installation, shells' own files) are not executed either. The options of all commands are checked.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lrstream import MixtureDataset, StreamingLeRobotDataset
from lrstream.cli.app import PROGRAM, app
from lrstream.cli.describe import describe
from lrstream.commands.benchmark_checks import BENCHMARK_CODES
from lrstream.demo import WrittenDataset
from lrstream.sidecar.problems import PROBLEM_CODES
from tests.cli.program import Program
from tests.support.forked import run_script

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMANDS = {
    " ".join(command.words): command for command in describe(typer.main.get_command(app), PROGRAM).walk()
}


def blocks(document: Path, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of the blocks of a document."""
    found = BLOCK.findall(document.read_text(encoding="utf-8"))
    return [(language, text) for language, text in found if language in languages]


def command_lines(document: Path, *languages: str) -> list[list[str]]:
    """Words of every call of the program in a document."""
    lines = [line for _, text in blocks(document, *languages) for line in text.splitlines()]
    calls = [part.strip() for line in lines for part in re.split(r"&&|\|", line)]
    return [shlex.split(call, comments=True) for call in calls if call.startswith("lrstream ")]


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_to_files(document: Path) -> None:
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("#"):
            assert (document.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_commands_and_options_exist(document: Path) -> None:
    for words in command_lines(document, "bash", "sh"):
        known = max(
            (name for name in COMMANDS if words[: len(name.split())] == name.split()), key=len, default=None
        )
        assert known is not None, words
        flags = {flag for option in COMMANDS[known].options for flag in option.flags}
        for word in words:
            if word.startswith("-"):
                assert word.split("=")[0] in flags, f"{known} has no {word}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "document", [document for document in DOCUMENTS if blocks(document, "bash", "python")], ids=named
)
def test_blocks_run(
    document: Path,
    demo_dataset: WrittenDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lrstream: Program,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    found = blocks(document, "bash", "python")
    if not any("write_dataset('demo')" in text for _, text in found):
        shutil.copytree(demo_dataset.root, tmp_path / "demo")
    for language, text in found:
        if language == "python":
            run_block(text, tmp_path)
            continue
        for line in text.splitlines():
            if "OWNER/" in line:
                continue
            if line.startswith("lrstream "):
                words = shlex.split(line, comments=True)[1:]
                outcome = lrstream(*words)
                assert outcome.code == 0, f"{line}\n{outcome.out}\n{outcome.err}"
            elif line:
                subprocess.run(["bash", "-c", line], check=True, timeout=60, cwd=tmp_path)


# Blocks that `test_blocks_run` leaves out, by document, and what becomes of them.
NOT_RUN = {
    "README.md": "installs into a new environment: both commands are steps of .ci/run",
    "CONTRIBUTING.md": ".ci/run itself; .ci/smoke with PyTorch and .ci/lerobot are run by hand",
    "docs/explanation/performance.md": "measures for half an hour: tests/benchmarks",
    "docs/how-to/choose-a-decoder.md": "CUDA is not run, a processor plays it: "
    "tests/integration/test_guides.py; TorchCodec: tests/integration/test_torchcodec.py",
    "docs/how-to/find-what-limits.md": "compares two runs: tests/cli/test_benchmark.py",
    "docs/how-to/fit-a-byte-budget.md": "an error on purpose: tests/integration/test_guides.py",
    "docs/how-to/index-on-a-cluster.md": "Slurm, played by a shell: "
    "tests/integration/test_guides.py; a Dask cluster: tests/integration/test_cluster.py",
    "docs/how-to/publish-a-sidecar.md": "tests/integration/test_hub_documentation.py",
    "docs/how-to/resume-training.md": "installs an extra; what uses it is run",
    "docs/how-to/scripts.md": "writes shells' own files: tests/integration/test_guides.py; no PowerShell",
    "docs/how-to/train-from-bucket.md": "tests/integration/test_hub_documentation.py",
    "docs/how-to/train-from-hub.md": "tests/integration/test_hub_documentation.py",
    "docs/how-to/train-from-s3.md": "a bucket: tests/integration/test_s3_dataset.py",
    "docs/how-to/train-on-several-ranks.md": "tests/integration/test_ranks.py",
    "docs/how-to/train-with-lerobot.md": "LeRobot: tests/integration/test_lerobot_training.py",
    "docs/how-to/train-with-lightning.md": "tests/integration/test_lightning.py",
    "docs/how-to/watch-training.md": "services of others: tests/integration/test_metrics_export.py",
}


def test_it_is_known_why_a_block_does_not_run() -> None:
    """And where a test does the same in its place, that test exists."""
    left_out = {named(document) for document in DOCUMENTS if blocks(document, "sh", "py")}
    assert left_out == set(NOT_RUN)
    for reason in NOT_RUN.values():
        for path in re.findall(r"tests/[\w/]+\.py", reason):
            assert (ROOT / path).exists(), path


def run_block(text: str, directory: Path) -> None:
    """Run a Python block as the script that a reader would make of it."""
    done = run_script(text, cwd=directory)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("described", [StreamingLeRobotDataset, MixtureDataset])
def test_the_reference_lists_every_argument_with_its_default(described: type) -> None:
    text = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    section = re.split(r"\n\n(?=\| \| \|)|\n### ", text.split(f"## `{described.__name__}`")[1])[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\|", section, re.MULTILINE))
    parameters = inspect.signature(described).parameters
    expected = {
        name: "" if item.default is inspect.Parameter.empty else repr(item.default)
        for name, item in parameters.items()
    }
    assert documented == expected
    assert list(documented) == list(expected)


def test_the_readme_has_its_two_commands() -> None:
    found = [text for _, text in blocks(ROOT / "README.md", "sh")]
    assert len(found) == 2
    assert all("pip install torch==2.13.0 && pip install -e" in text for text in found)
    assert found[0].rstrip().endswith("lrstream benchmark loader --demo")
    assert found[1].rstrip().endswith("pytest -n 2")


def test_every_error_code_is_documented() -> None:
    from lrstream import errors

    text = (ROOT / "docs/reference/problems.md").read_text(encoding="utf-8")
    classes = [getattr(errors, name) for name in errors.__all__]
    for code in {cls.code for cls in classes} | set(PROBLEM_CODES) | set(BENCHMARK_CODES):
        assert f"| `{code}` |" in text, code


def test_exit_codes_are_those_of_the_errors() -> None:
    from lrstream import errors

    text = (ROOT / "docs/reference/problems.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `([\w-]+)` \| (\d+) \|", text, re.MULTILINE))
    for name in errors.__all__:
        error = getattr(errors, name)
        if error.code != "internal":
            assert documented[error.code] == str(error.exit_code)
