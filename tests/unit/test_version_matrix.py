"""The environments of the version matrix have what pyproject.toml says, and their tests exist."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.shared import PROJECT

SCRIPT = PROJECT / ".ci" / "requirements.py"
PROJECT_TABLE = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT_TABLE["optional-dependencies"]


def printed(*arguments: str) -> list[Requirement]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True
    )
    return [Requirement(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("extras", [[], *([name] for name in EXTRAS)], ids=str)
def test_floors_are_the_lower_bounds(extras: list[str]) -> None:
    texts = [*PROJECT_TABLE["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    expected = {}
    for text in texts:
        requirement = Requirement(text)
        (bound,) = [item.version for item in requirement.specifier if item.operator == ">="]
        assert Version(bound) in requirement.specifier, text
        expected[requirement.name] = (f"=={bound}", requirement.extras)
    assert {item.name: (str(item.specifier), item.extras) for item in printed("floors", *extras)} == expected


def test_ranges_are_as_they_stand() -> None:
    found = printed("ranges", "--without", "torch")
    assert {str(item) for item in found} == {
        str(Requirement(text)) for text in PROJECT_TABLE["dependencies"] if not text.startswith("torch>")
    }


def test_its_tests_exist() -> None:
    lines = [
        line.partition("#")[0].split()
        for line in (PROJECT / ".ci" / "smoke-tests.txt").read_text(encoding="utf-8").splitlines()
    ]
    listed = [words for words in lines if words]
    assert len(listed) > 20
    for path, needs, *only in listed:
        file, _, test = path.partition("::")
        assert needs in ("any", "torch")
        assert only in ([], ["floors"])
        assert (PROJECT / file).exists(), path
        assert not test or f"def {test}(" in (PROJECT / file).read_text(encoding="utf-8"), path
