"""Print requirements of pyproject.toml for an environment of the version matrix, one on a line.

    requirements.py floors [EXTRA ...]   each at its lower bound: numpy>=2.0 becomes numpy==2.0
    requirements.py ranges [EXTRA ...]   as they stand there

`--without NAME` leaves a package out, for environments that get it in another way. There is no second list of
versions that could grow old: what is printed is what pyproject.toml says.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(\[[^\]]*\])?\s*>=\s*([0-9][0-9.]*)")


def requirements(kind: str, extras: list[str], without: list[str]) -> list[str]:
    """Lines for pip; ValueError names a requirement without a lower bound."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    texts = [*project["dependencies"]]
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    lines = []
    for text in texts:
        found = _REQUIREMENT.match(text)
        if found is None:
            raise ValueError(f"pyproject.toml: {text!r} has no lower bound")
        name, its_extras, floor = found.groups()
        if name not in without:
            lines.append(f"{name}{its_extras or ''}=={floor}" if kind == "floors" else text)
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=["floors", "ranges"])
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--without", action="append", default=[])
    options = parser.parse_args()
    print("\n".join(requirements(options.kind, options.extras, options.without)))  # noqa: T201
