"""What importing costs: measured in new processes, since the test process has everything loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "typer", "rich", "pyarrow", "av", "numpy", "huggingface_hub", "fsspec", "PIL")


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sorted(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_no_library() -> None:
    assert not loaded_after("import lrstream; lrstream.__version__") & set(HEAVY)


def test_public_names_are_listed_without_being_loaded() -> None:
    assert not loaded_after("import lrstream; dir(lrstream)") & set(HEAVY)


def test_the_error_class_comes_alone() -> None:
    assert not loaded_after("from lrstream import LrstreamError") & set(HEAVY)


def test_the_command_line_starts_with_typer_alone() -> None:
    loaded = loaded_after("import lrstream.cli.app")
    assert "typer" in loaded
    assert not loaded & (set(HEAVY) - {"typer", "rich"})


def test_an_unknown_name_is_an_attribute_error() -> None:
    import lrstream

    with pytest.raises(AttributeError, match="no_such_name"):
        lrstream.no_such_name  # noqa: B018
