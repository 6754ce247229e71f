"""Help and usage errors of every command: plain, fast, and as documents under --json (CL-1, K32, K33)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer

from lrstream import __version__
from lrstream.cli.app import PROGRAM, app
from lrstream.cli.describe import Command, describe
from tests.cli.program import Program, run_process

ALL = list(describe(typer.main.get_command(app), PROGRAM).walk())
LEAVES = [command for command in ALL if not command.commands]
POOR_TERMINAL = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "TERM": "dumb", "NO_COLOR": "1"}


def spoken(command: Command) -> str:
    return " ".join(command.words)


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", ALL, ids=spoken)
def test_help_is_complete_and_plain(command: Command, flag: str, lrstream: Program) -> None:
    outcome = lrstream(*command.words[1:], flag)
    assert outcome.code == 0
    assert outcome.err == ""
    assert outcome.out.isascii()
    assert "\x1b" not in outcome.out
    filled, _, _ = outcome.out.partition("Examples:")  # command lines are not broken
    assert max(map(len, filled.splitlines())) <= 80
    for option in command.options:
        assert option.flags[0] in outcome.out
    for child in command.commands:
        assert child.name in outcome.out
        assert child.summary in " ".join(outcome.out.split()), "a long summary is filled"


@pytest.mark.parametrize("command", LEAVES, ids=spoken)
def test_commands_have_a_summary_examples_and_the_common_options(command: Command, lrstream: Program) -> None:
    assert 10 < len(command.summary) <= 60
    assert command.summary.endswith(".")
    assert len(command.examples) >= 2
    flags = {flag for option in command.options for flag in option.flags}
    assert flags >= {"--json", "--quiet", "--verbose", "--debug", "--cache-dir", "--help"}
    assert all(option.help.endswith((".", ").")) for option in command.options), "sentences"
    shown = lrstream(*command.words[1:], "--help").out
    for example in command.examples:
        assert example in shown, "examples are not filled"


@pytest.mark.slow
@pytest.mark.parametrize("command", ALL, ids=spoken)
def test_help_works_on_poor_terminals(command: Command) -> None:
    outcome = run_process(*command.words[1:], "--help", env=POOR_TERMINAL)
    assert outcome.code == 0
    assert outcome.err == ""
    assert outcome.out.isascii()


def test_without_a_command_help_comes_as_a_usage_error(lrstream: Program) -> None:
    for command in ALL:
        if command.commands:
            outcome = lrstream(*command.words[1:])
            assert outcome.code == 2
            assert outcome.out == ""
            assert "Commands:" in outcome.err


def test_version(lrstream: Program) -> None:
    outcome = lrstream("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"lrstream {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "schema"),
    [
        (["no-such-command", "--json"], "cli"),
        (["--json"], "cli"),
        (["build", "--json"], "build"),
        (["build", "x", "--json", "--workers", "none"], "build"),
        (["build", "x", "--workers", "0", "--json"], "build"),
        (["build", "x", "--repo-type", "model", "--json"], "build"),
        (["build", "x", "y", "--json"], "build"),
        (["build", "--no-such-option", "--json"], "build"),
    ],
)
def test_refused_arguments_are_documents_too(words: list[str], schema: str, lrstream: Program) -> None:
    outcome = lrstream(*words).without_traceback()
    assert outcome.code == 2
    assert outcome.err == ""
    assert outcome.document()["schema"] == f"lrstream.{schema}/1"
    assert outcome.codes() == ["usage"]

    if words == ["--json"]:
        return  # without it nothing is left to refuse
    told = lrstream(*(word for word in words if word != "--json"))
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("error [usage]: ")
    assert "--help" in told.err


def test_after_two_dashes_json_is_a_file_name(lrstream: Program) -> None:
    outcome = lrstream("build", "--", "a", "--json")
    assert outcome.code == 2
    assert outcome.out == ""


def test_starting_is_fast_and_loads_little() -> None:
    code = (
        "import sys\nfrom lrstream.cli.app import main\nassert main(['--help']) == 0\n"
        "sys.stderr.write(' '.join(sys.modules))"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "pyarrow", "av", "numpy", "huggingface_hub", "fsspec", "PIL", "rich.table"}


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="needs the processor time of a child")
def test_help_takes_no_more_than_four_tenths_of_a_second() -> None:
    # Of processor time, so that what else the machine does has no say; the first run may compile.
    assert min(processor_time_s("--help") for _ in range(3)) <= 0.4


def processor_time_s(*words: str) -> float:
    """User and system time of one run of the program, seconds."""
    command = [sys.executable, "-m", "lrstream", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_json_can_be_piped_with_narrow_columns() -> None:
    outcome = run_process("build", "/no/" + "x" * 250 + "/such", "--json", env={"COLUMNS": "20"})
    assert outcome.code == 4
    assert outcome.err == ""
    assert "x" * 250 in json.loads(outcome.out)["problems"][0]["message"]


@pytest.mark.parametrize("option", ["--json", "--quiet", "-q", "--verbose", "--debug"])
@pytest.mark.parametrize("group", [[], ["inspect"], ["benchmark"]])
def test_options_before_the_command_are_explained(lrstream: Program, group: list[str], option: str) -> None:
    outcome = lrstream(*group, option)
    assert outcome.code == 2
    text = outcome.out + outcome.err
    assert f"{option} stands behind a command" in text
    assert "--help' lists the commands" in text


def test_absurd_numbers_of_workers_are_refused(lrstream: Program) -> None:
    outcome = lrstream("build", "./demo", "--workers", "100000", "--json")
    (problem,) = outcome.document()["problems"]
    assert (outcome.code, problem["code"]) == (2, "usage")
    assert "--workers" in problem["message"]
    assert "1024" in problem["message"]
