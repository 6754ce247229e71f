"""Why sources cannot be indexed: each with its reason, all of them in one error (K11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lrstream.errors import AccessError, InputError, LrstreamError, NotFoundError, TransferError

__all__ = ["SourceFailure", "joint_error"]

_LISTED_FAILURES = 20


@dataclass(frozen=True, slots=True)
class SourceFailure:
    """Why one source cannot be indexed.

    Attributes:
        path: Path of the source.
        code: Code of the error's class.
        message: What is wrong.
        hint: What to do about it, if something is known.
    """

    path: str
    code: str
    message: str
    hint: str | None


def joint_error(
    failed: Sequence[tuple[str, LrstreamError]],
    total: int,
    outcome: str = "cannot be indexed; no sidecar was written",
) -> LrstreamError:
    """One error for all sources that failed.

    Args:
        failed: Path and error of each, at least one.
        total: Sources in all.
        outcome: What that means for them, and for the whole.

    Returns:
        The error itself if there is one only; else one of the class they share, which names them. Either has
        all as `SourceFailure` in ``fields["failures"]``.
    """
    ordered = sorted(failed, key=lambda failure: failure[0])
    failures = tuple(
        SourceFailure(path, error.code, error.message or str(error), error.hint) for path, error in ordered
    )
    if len(ordered) == 1:
        error = ordered[0][1]
        error.fields["failures"] = failures
        return error
    kind = _common_kind({type(error) for _, error in ordered})
    lines = [f"  {failure.path}: {failure.message}" for failure in failures[:_LISTED_FAILURES]]
    if len(failures) > _LISTED_FAILURES:
        lines.append(f"  and {len(failures) - _LISTED_FAILURES} more")
    hints = list(dict.fromkeys(failure.hint for failure in failures if failure.hint))
    return kind(
        f"{len(failures)} of {total} video files {outcome}:\n" + "\n".join(lines),
        hint=" ".join(hints[:3]) or None,
        failures=failures,
    )


def _common_kind(kinds: set[type[LrstreamError]]) -> type[LrstreamError]:
    """Class of the joint error: the one all share; malformed input outweighs what may be repeated."""
    if len(kinds) == 1:
        return kinds.pop()
    shared: list[Any] = [
        base for base in next(iter(kinds)).__mro__ if all(issubclass(kind, base) for kind in kinds)
    ]
    if issubclass(shared[0], LrstreamError) and shared[0] is not LrstreamError:
        return shared[0]  # type: ignore[no-any-return]
    return next(
        kind
        for kind in (InputError, NotFoundError, AccessError, TransferError)
        if any(issubclass(found, kind) for found in kinds)
    )
