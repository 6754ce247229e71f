"""How commands tell how far they are."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "no_progress"]


class Progress(Protocol):
    """Gets told about progress; may be called from several threads."""

    def __call__(self, done: int, total: int | None, what: str, /, *, num_bytes: int | None = None) -> None:
        """`done` of `total` (None: unknown) parts of `what` are finished; `num_bytes` read for them."""


def no_progress(done: int, total: int | None, what: str, /, *, num_bytes: int | None = None) -> None:
    """Tells nobody."""
