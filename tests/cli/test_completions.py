"""Completion scripts: complete, current, and accepted by the shells that are installed (CL-5)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lrstream.cli.app import PROGRAM, app
from lrstream.cli.completions import SHELLS, completion_script
from lrstream.cli.describe import Command, describe
from tests.cli.program import Program

ROOT = Path(__file__).parents[2]
PROGRAM_TREE = describe(typer.main.get_command(app), PROGRAM)


def bash_completes(*words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    script = completion_script("bash", PROGRAM_TREE)
    typed = " ".join(f'"{word}"' for word in words)
    code = (
        f"{script}\nCOMP_WORDS=({typed})\nCOMP_CWORD={len(words) - 1}\n"
        '_lrstream\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_long_option_is_in_the_script(shell: str) -> None:
    script = completion_script(shell, PROGRAM_TREE)
    for command in PROGRAM_TREE.walk():
        assert command.name in script
        for option in command.options:
            assert option.flags[0][2:] in script
    assert script.isascii()
    assert script.endswith("\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_program_prints_the_committed_file(shell: str, lrstream: Program) -> None:
    files = {
        "bash": "lrstream.bash",
        "zsh": "_lrstream",
        "fish": "lrstream.fish",
        "powershell": "lrstream.ps1",
    }
    outcome = lrstream("--show-completion", shell)
    assert outcome.code == 0
    assert outcome.out == (ROOT / "completions" / files[shell]).read_text(encoding="utf-8")


def test_generated_files_are_current() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("shell", "program"), [("bash", "bash"), ("zsh", "zsh"), ("fish", "fish")])
def test_the_shell_accepts_the_script(shell: str, program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    script = tmp_path / "script"
    script.write_text(completion_script(shell, PROGRAM_TREE), encoding="utf-8")
    done = subprocess.run(
        [program, "-n", str(script)], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_powershell_brackets_and_quotes_are_balanced() -> None:
    script = completion_script("powershell", PROGRAM_TREE)
    for line in script.splitlines():
        assert line.lstrip().startswith("#") or line.count("'") % 2 == 0, line
    for opening, closing in ("()", "{}", "[]"):
        assert script.count(opening) == script.count(closing)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
class TestBash:
    def test_commands(self) -> None:
        assert set(bash_completes("lrstream", "")) >= {child.name for child in PROGRAM_TREE.commands}

    @pytest.mark.parametrize("command", list(PROGRAM_TREE.walk()), ids=lambda command: command.name)
    def test_options(self, command: Command) -> None:
        offered = bash_completes(*command.words, "--")
        assert offered == [flag for option in command.options for flag in option.flags if flag[:2] == "--"]

    @pytest.mark.parametrize("command", list(PROGRAM_TREE.walk()), ids=lambda command: command.name)
    def test_values(self, command: Command) -> None:
        for option in command.options:
            if option.choices:
                assert bash_completes(*command.words, option.flags[0], "") == list(option.choices)
            elif option.metavar:
                assert bash_completes(*command.words, option.flags[0], "") == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_words(tmp_path: Path) -> None:
    script = tmp_path / "lrstream.fish"
    script.write_text(completion_script("fish", PROGRAM_TREE), encoding="utf-8")
    for command in PROGRAM_TREE.walk():
        typed = " ".join(command.words)
        code = f"source {script}; complete -C '{typed} --'"
        done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, timeout=20, check=True)
        offered = {line.split("\t")[0] for line in done.stdout.splitlines()}
        assert offered == {flag for option in command.options for flag in option.flags if flag[:2] == "--"}


def test_an_unknown_shell_is_a_usage_error(lrstream: Program) -> None:
    outcome = lrstream("--show-completion", "tcsh").without_traceback()
    assert outcome.code == 2
    assert "bash, zsh, fish, powershell" in outcome.err
