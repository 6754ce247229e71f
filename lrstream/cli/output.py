"""The answer of a command on stdout: one JSON document or text, never both.

Envelope of ``--json``, for success and failure alike (design.md, CLI conventions)::

    {"schema": "lrstream.<command>/1", "version": "...", "ok": true, "result": {...}, "problems": [...]}
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrstream import __version__
from lrstream.cli.problems import Failure, ProblemLike
from lrstream.cli.redaction import redact
from lrstream.cli.screen import Screen
from lrstream.errors import DiskFullError, TransferError

__all__ = ["Answer", "envelope", "give_answer", "give_failure", "jsonable", "write_stdout"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found out.

    Attributes:
        result: Facts for programs: snake_case names, bytes and seconds as numbers.
        show: Writes the same for people.
        problems: Findings; they do not by themselves make the answer a failure.
        exit_code: 0, or 3 when a check said no.
    """

    result: Mapping[str, Any]
    show: Callable[[Screen], None]
    problems: Sequence[ProblemLike] = field(default=())
    exit_code: int = 0


def jsonable(value: Any) -> Any:
    """`value` in JSON's own types: dataclasses as objects, paths as text, no NaN and no infinity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: jsonable(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    # numpy scalars and arrays, without importing numpy for them
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form.")


def envelope(command: str, *, ok: bool, result: Mapping[str, Any], problems: Sequence[ProblemLike]) -> str:
    """The one JSON document of a command, ending in a line end.

    Pure ASCII, so that it is the same under every encoding and undecodable file names survive.
    """
    document = {
        "schema": f"lrstream.{command}/{SCHEMA_VERSION}",
        "version": __version__,
        "ok": ok,
        "result": jsonable(result),
        "problems": [
            {
                "code": problem.code,
                "severity": problem.severity,
                "source": jsonable(problem.source),
                "episode_index": problem.episode_index,
                "message": redact(problem.message),
                "hint": jsonable(problem.hint),
            }
            for problem in problems
        ],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def write_stdout(write: Callable[[], None]) -> None:
    """Run `write` and flush; a reader that has left (``| head``) is no error.

    Raises:
        DiskFullError: stdout is a file and its disk is full.
        TransferError: stdout cannot be written for another reason.
    """
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        _discard_stdout()
        message = f"Standard output cannot be written: {os.strerror(error.errno or 0)}."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "Free some space, or send the output elsewhere."
            raise DiskFullError(message, hint=hint, stream="stdout") from error
        raise TransferError(message, stream="stdout") from error


def give_answer(command: str, answer: Answer, *, as_json: bool) -> None:
    """Write the answer to stdout."""
    if as_json:
        document = envelope(command, ok=answer.exit_code == 0, result=answer.result, problems=answer.problems)
        write_stdout(lambda: _write_text(document))
    else:
        write_stdout(lambda: answer.show(Screen(sys.stdout)))


def give_failure(command: str, failure: Failure, *, as_json: bool) -> None:
    """Tell why the command ended: to stderr for people, as the document of stdout for ``--json``."""
    if as_json:
        document = envelope(command, ok=False, result={}, problems=failure.problems)
        write_stdout(lambda: _write_text(document))
        return
    screen = Screen(sys.stderr)
    for problem in failure.problems:
        screen.problem(problem)


def _write_text(text: str) -> None:
    sys.stdout.write(text)


def _discard_stdout() -> None:
    # The interpreter flushes stdout once more at exit and would complain about the same pipe again.
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)
