"""A benchmark against an earlier one: what has changed, and what makes the two incomparable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrstream.errors import AccessError, InputError, NotFoundError, UsageError
from lrstream.sidecar.problems import Problem

__all__ = ["Change", "Comparison", "Earlier", "read_earlier"]

_CIRCUMSTANCES = ("settings", "machine", "dataset")
# Beside those, what is no figure of the run itself.
_NO_FIGURES = frozenset({*_CIRCUMSTANCES, "comparison"})
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both runs.

    Attributes:
        name: Its place in the result, such as ``stages.decode.samples_per_s``.
        before: Earlier value.
        now: Value of this run.
        ratio: `now` over `before`; None where that is 0.
    """

    name: str
    before: float
    now: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """This run beside an earlier one.

    Attributes:
        path: File of the earlier one.
        version: lrstream's version then.
        circumstances: What differs in settings, machine or place of the dataset.
        figures: All numbers that both runs have.
    """

    path: str
    version: str
    circumstances: tuple[Problem, ...]
    figures: tuple[Change, ...]

    def figure(self, name: str) -> Change | None:
        """One figure by its name; None if one of the runs does not have it."""
        return next((change for change in self.figures if change.name == name), None)


@dataclass(frozen=True, slots=True)
class Earlier:
    """The result of an earlier run.

    Attributes:
        path: Its file.
        version: lrstream's version then.
        result: The result.
    """

    path: Path
    version: str
    result: Mapping[str, Any]

    def require_dataset(self, digest: str) -> None:
        """Refuse another dataset, or other episodes of the same one, before any long work.

        Raises:
            UsageError: It is one.
        """
        dataset = self.result["dataset"]
        if dataset.get("digest") != digest:
            where = dataset.get("location") or "a demonstration"
            raise UsageError(
                f"{self.path} is about {dataset.get('num_episodes')} episodes with "
                f"{dataset.get('num_frames')} frames of {where}, not about what was chosen now.",
                hint="Figures of different data cannot be compared: measure the same episodes of the same "
                "dataset, or leave --compare out.",
            )

    def compare(self, result: Mapping[str, Any]) -> Comparison:
        """Put a new result beside it."""
        before = dict(_numbers(self.result))
        figures = tuple(
            Change(name, before[name], now, now / before[name] if before[name] else None)
            for name, now in _numbers(result)
            if name in before
        )
        return Comparison(str(self.path), self.version, tuple(self._circumstances(result)), figures)

    def _circumstances(self, result: Mapping[str, Any]) -> Iterator[Problem]:
        for group in _CIRCUMSTANCES:
            before, now = dict(_leaves(self.result[group])), dict(_leaves(result[group]))
            for name in dict.fromkeys([*before, *now]):
                one, other = before.get(name), now.get(name)
                if one != other:
                    message = f"{group} {name} was {_shown(one)}, now it is {_shown(other)}."
                    yield Problem("circumstances-differ", "warning", str(self.path), None, message, None)


def read_earlier(path: Path, command: str) -> Earlier:
    """Read the JSON document of an earlier run.

    Args:
        path: Its file.
        command: Name of the command in its schema, such as ``benchmark.loader``.

    Raises:
        NotFoundError: There is no such file.
        AccessError: It may not be read.
        InputError: It is no JSON document of this program.
        UsageError: It is the document of another command, or of a run that failed.
    """
    remedy = f"Write one with 'lrstream {command.replace('.', ' ')} ... --json > {path.name}'."
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"There is no file {path} to compare with.", hint=remedy) from error
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a directory, expected a JSON document.", hint=remedy) from error
    except OSError as error:
        raise AccessError(f"{path} cannot be read: {error.strerror}.", path=str(path)) from error
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON document: {error}.", hint=remedy, path=str(path)) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith("lrstream."):
        raise InputError(f"{path} is no document of lrstream: it has no schema.", hint=remedy, path=str(path))
    if schema != f"lrstream.{command}/1":
        raise UsageError(
            f"{path} is the result of {schema.removeprefix('lrstream.')}, not of {command}/1.", hint=remedy
        )
    result = document.get("result")
    # A run that found problems (exit status 3) has figures all the same.
    groups = [result.get(name) for name in _CIRCUMSTANCES] if isinstance(result, dict) else [None]
    if not isinstance(result, dict) or not all(isinstance(group, dict) for group in groups):
        raise UsageError(
            f"{path} holds no figures: that run failed, or another version wrote it.", hint=remedy
        )
    return Earlier(path, str(document.get("version")), result)


def _numbers(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    figures = {key: value for key, value in result.items() if key not in _NO_FIGURES}
    for name, value in _leaves(figures):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            yield name, value


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted name; lists are left out, since their places mean nothing."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif not isinstance(value, (list, tuple)):
        yield prefix, value


def _shown(value: Any) -> str:
    return "not given" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
