"""The program, ready to be run."""

from __future__ import annotations

import pytest

from tests.cli.program import Program


@pytest.fixture
def lrstream(capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs the command line inside the test process: ``lrstream("build", path)``."""
    return Program(capsys)
