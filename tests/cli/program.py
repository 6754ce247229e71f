"""Run the program as its users do: inside the test process, or as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lrstream.cli.app import main

__all__ = ["Outcome", "Program", "run_process"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run left behind.

    Attributes:
        code: Exit status.
        out: stdout.
        err: stderr.
    """

    code: int
    out: str
    err: str

    def document(self) -> dict[str, Any]:
        """stdout as the one JSON document of ``--json``, with its envelope checked."""
        document = json.loads(self.out)
        assert list(document) == ["schema", "version", "ok", "result", "problems"]
        assert document["schema"].startswith("lrstream.")
        assert document["schema"].endswith("/1")
        assert document["ok"] == (self.code == 0)
        for problem in document["problems"]:
            assert list(problem) == ["code", "severity", "source", "episode_index", "message", "hint"]
            assert problem["severity"] in ("error", "warning")
            assert problem["message"]
        return dict(document)

    def codes(self) -> list[str]:
        """Codes of the problems in the JSON document."""
        return [problem["code"] for problem in self.document()["problems"]]

    def without_traceback(self) -> Outcome:
        """Itself, after a look for what a user should never see."""
        assert "Traceback" not in self.err + self.out
        return self


class Program:
    """Runs `main` in this process with captured streams."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | os.PathLike[str]) -> Outcome:
        self._capsys.readouterr()
        code = main([os.fspath(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        return Outcome(code, out, err)


def run_process(
    *arguments: str | os.PathLike[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Outcome:
    """Run the program in a process of its own, with stdout and stderr as pipes."""
    command: Sequence[str] = [sys.executable, "-m", "lrstream", *(os.fspath(word) for word in arguments)]
    done = subprocess.run(
        command, capture_output=True, timeout=100, env={**os.environ, **(env or {})}, cwd=cwd, check=False
    )
    return Outcome(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))
