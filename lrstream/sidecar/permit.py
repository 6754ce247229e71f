"""How many results of parsing a build holds at the same time (SC-1)."""

from __future__ import annotations

import threading
from typing import Self

__all__ = ["Permit"]


class Permit:
    """The right to hold what was parsed of one source. Belongs to one thread; left, it is given back."""

    def __init__(self, semaphore: threading.Semaphore) -> None:
        self._semaphore = semaphore
        self._held = False

    def acquire(self) -> None:
        """Wait for it."""
        if not self._held:
            self._semaphore.acquire()
            self._held = True

    def release(self) -> None:
        """Give it back, if it is held."""
        if self._held:
            self._held = False
            self._semaphore.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
