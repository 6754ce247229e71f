"""The one shape in which anything wrong reaches the user, as text and in ``--json``."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lrstream.errors import LrstreamError

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_TERMINATED",
    "EXIT_UNEXPECTED",
    "EXIT_USAGE",
    "CliProblem",
    "Failure",
    "ProblemLike",
]

EXIT_UNEXPECTED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_EXIT_LIMIT = 7


class ProblemLike(Protocol):
    """What `lrstream.sidecar.validate.Problem` and `CliProblem` have in common."""

    @property
    def code(self) -> str:
        """Stable short name, listed in ``docs/reference/problems.md``."""

    @property
    def severity(self) -> str:
        """``error`` or ``warning``."""

    @property
    def source(self) -> str | None:
        """File or dataset concerned."""

    @property
    def episode_index(self) -> int | None:
        """Episode concerned."""

    @property
    def message(self) -> str:
        """What is wrong, with what was expected and found."""

    @property
    def hint(self) -> str | None:
        """What to do about it."""


@dataclass(frozen=True, slots=True)
class CliProblem:
    """One problem found by the command line itself; fields as in `ProblemLike`."""

    code: str
    message: str
    hint: str | None = None
    severity: str = "error"
    source: str | None = None
    episode_index: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a command ended early.

    Attributes:
        exit_code: Exit status (CL-4).
        problems: What went wrong, at least one.
    """

    exit_code: int
    problems: Sequence[ProblemLike]

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What to tell about an exception that ended a command."""
        if isinstance(error, KeyboardInterrupt):
            message = "Interrupted; what was complete before is kept, unfinished files are not."
            # What can be continued says how (`lrstream.sidecar.resumable.BuildInterrupt`).
            hint = getattr(error, "hint", None)
            return cls(EXIT_INTERRUPTED, [CliProblem("interrupted", message, hint=hint)])
        if isinstance(error, LrstreamError):
            return cls(error.exit_code, _problems_of(error))
        if isinstance(error, MemoryError):
            problem = CliProblem(
                "out-of-memory",
                "The process ran out of memory.",
                hint="Use fewer workers or a smaller pool; run again with --debug to see where it happened.",
            )
            return cls(EXIT_UNEXPECTED, [problem])
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = CliProblem(
                "disk-full", f"There is no space left: {error}.", hint="Free some, or choose another place."
            )
            return cls(_EXIT_LIMIT, [problem])
        text = " ".join(str(error).split())
        problem = CliProblem(
            "internal",
            f"Unexpected {type(error).__name__}{': ' + text if text else ''}.",
            hint="This is a fault of lrstream; run the command again with --debug and report what it prints.",
        )
        return cls(EXIT_UNEXPECTED, [problem])

    @classmethod
    def usage(cls, message: str, hint: str | None) -> Failure:
        """Arguments that cannot be understood."""
        return cls(EXIT_USAGE, [CliProblem("usage", message, hint=hint)])


def _problems_of(error: LrstreamError) -> Sequence[ProblemLike]:
    # An error that sums up several files carries one `SourceFailure` for each; each is told by itself.
    failures = error.fields.get("failures")
    if isinstance(failures, (list, tuple)) and len(failures) > 1:
        return [
            CliProblem(failure.code, failure.message, hint=failure.hint, source=failure.path)
            for failure in failures
        ]
    episode = error.fields.get("episode_index")
    return [
        CliProblem(
            error.code,
            error.message or type(error).__name__,
            hint=error.hint,
            source=_source_of(error),
            episode_index=int(episode) if episode is not None else None,
        )
    ]


def _source_of(error: LrstreamError) -> str | None:
    for name in ("file_path", "source", "path", "where"):
        value = error.fields.get(name)
        if value is not None:
            return str(value)
    return None
