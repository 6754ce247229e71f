"""Figures in parts, each with a directory and caches of its own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tests.conftest

# isort: split
import pytest

__all__ = ["Part", "run_parts"]

Part = Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]
"""Measures in a directory, with changes of the environment that end with it; its figures come back."""


def run_parts(parts: Mapping[str, Part], names: Iterable[str] = ()) -> int:
    """Run the named parts, all without any name, and print a line of JSON for each.

    Each line has what the part returned, how long it took and the load of the machine when it began.

    Returns:
        0, or 1 if a part failed an assertion; its line says which.
    """
    failed = 0
    top = Path(tempfile.mkdtemp(prefix="lrstream-figures-"))
    try:
        for name in list(names) or parts:
            directory = top / name
            directory.mkdir()
            begun, load = time.monotonic(), os.getloadavg()[0]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HF_HOME", str(directory / "home"))
                patch.setenv("HF_LEROBOT_HOME", str(directory / "home" / "lerobot"))
                try:
                    result = parts[name](directory, patch)
                except AssertionError as error:
                    failed, result = 1, {"failed": str(error)[:2000]}
            seconds = round(time.monotonic() - begun, 1)
            line = {"part": name, **result, "seconds": seconds, "load": round(load, 1)}
            print(json.dumps(line), flush=True)
    finally:
        shutil.rmtree(top, ignore_errors=True)
        tests.conftest.pytest_unconfigure()
    return failed
