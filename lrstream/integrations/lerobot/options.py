"""Options that LeRobot has no name for: ``--lrstream.NAME=VALUE`` beside LeRobot's own.

They are taken out of the arguments before LeRobot's parser sees them. A value is JSON (``4``, ``null``,
``[0, 3]``), or else a string.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lrstream.errors import UsageError
from lrstream.streaming.dataset import StreamingLeRobotDataset

__all__ = ["LOADER_OPTIONS", "PREFIX", "STORAGE_OPTIONS_VARIABLE", "TrainingOptions", "take_options"]

PREFIX = "--lrstream."
STORAGE_OPTIONS_VARIABLE = "LRSTREAM_STORAGE_OPTIONS"

ResumeMode = Literal["exact", "next-epoch"]

# What LeRobot's configuration, the job or the training loop decides.
_DECIDED_ELSEWHERE = frozenset({
    "repo_id", "root", "episodes", "image_transforms", "delta_timestamps", "tolerance_s", "revision", "seed",
    "return_uint8", "repeat", "rank", "world_size", "storage_options",
})  # fmt: skip

LOADER_OPTIONS: tuple[str, ...] = tuple(
    name
    for name in inspect.signature(StreamingLeRobotDataset.__init__).parameters
    if name != "self" and name not in _DECIDED_ELSEWHERE
)
"""Arguments of `StreamingLeRobotDataset` that ``--lrstream.*`` sets."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What ``--lrstream.*`` said.

    Attributes:
        loader: Arguments of `StreamingLeRobotDataset`, only those that were given.
        resume: "exact": a resumed run goes on with the very next sample, or is refused; "next-epoch": it
            begins a new epoch, whatever has changed since the checkpoint.
        ignore: Of "data_root" and "revision", those that may differ in an exact resume.
        allow_untested: Whether to try a LeRobot release that this lrstream was not tested with.
    """

    loader: Mapping[str, Any] = field(default_factory=dict)
    resume: ResumeMode = "exact"
    ignore: tuple[str, ...] = ()
    allow_untested: bool = False


def take_options(arguments: Sequence[str]) -> tuple[TrainingOptions, list[str]]:
    """Separate lrstream's options from LeRobot's.

    Args:
        arguments: As given to the program, ``--lrstream.name=value`` or ``--lrstream.name value``.

    Returns:
        The options, and the other arguments in their order.

    Raises:
        UsageError: An option does not exist, is given twice, or has no value or a wrong one.
    """
    given: dict[str, Any] = {}
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith(PREFIX):
            others.append(argument)
            continue
        name, separator, text = argument.removeprefix(PREFIX).partition("=")
        _check_name(name)
        if not separator:
            text = next(rest, "--")
            if text.startswith("--"):
                raise UsageError(f"{PREFIX}{name} has no value.", hint=f"Write {PREFIX}{name}=VALUE.")
        if name in given:
            raise UsageError(f"{PREFIX}{name} is given more than once.")
        given[name] = _value(text)
    return _checked(given), others


def storage_options() -> dict[str, Any] | None:
    """Arguments of the fsspec file system, from the environment: they may hold credentials, which do not
    belong into a command line or a checkpoint.

    Raises:
        UsageError: The variable holds no JSON object.
    """
    text = os.environ.get(STORAGE_OPTIONS_VARIABLE)
    if not text:
        return None
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        # Without its text: it may hold credentials.
        raise UsageError(f"The environment variable {STORAGE_OPTIONS_VARIABLE} is no JSON object.")
    return options


_OWN = ("resume", "ignore", "allow_untested")


def _check_name(name: str) -> None:
    known = (*LOADER_OPTIONS, *_OWN)
    if name in known:
        return
    if name in _DECIDED_ELSEWHERE:
        raise UsageError(
            f"{PREFIX}{name} is not an option: LeRobot's own options or the job decide it.",
            hint="The table of options says which: docs/reference/lerobot.md.",
        )
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {PREFIX}{close[0]}?" if close else f"There are: {', '.join(sorted(known))}."
    raise UsageError(f"{PREFIX}{name} is not an option.", hint=hint)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _checked(given: dict[str, Any]) -> TrainingOptions:
    mode = given.pop("resume", "exact")
    if mode not in get_args(ResumeMode):
        raise UsageError(f"{PREFIX}resume is {mode!r}, expected 'exact' or 'next-epoch'.")
    ignore = given.pop("ignore", ())
    names = [ignore] if isinstance(ignore, str) else ignore
    if not isinstance(names, (list, tuple)) or not set(names) <= {"data_root", "revision"}:
        raise UsageError(f"{PREFIX}ignore is {ignore!r}, expected data_root or revision, or a list of them.")
    allow_untested = given.pop("allow_untested", False)
    if not isinstance(allow_untested, bool):
        raise UsageError(f"{PREFIX}allow_untested is {allow_untested!r}, expected true or false.")
    return TrainingOptions(given, mode, tuple(names), allow_untested)
