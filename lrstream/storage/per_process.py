"""A value that belongs to the process that made it: handles, clients, locks.

A forked child inherits its parent's objects, but must not use an inherited client or wait for an
inherited lock, which another thread of the parent may have held at the moment of the fork. Code
that keeps such things keeps them in a `PerProcess`, whose value is made anew in each process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["PerProcess"]

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Lazily made value of the current process; never crosses a fork or a pickle.

    Thread-safe without a lock of its own (such a lock would be inherited in an unknown state). Two
    threads may both call ``create`` at first use and one result is dropped, so ``create`` must be
    cheap and own nothing yet: it makes an empty holder that opens things later under its own lock.

    Args:
        create: Makes the value; must be picklable where the owner is pickled.
        discard: Called in a child with the value inherited from its parent, to release copies of
            descriptors. Must not take locks.
    """

    def __init__(self, create: Callable[[], T], discard: Callable[[T], None] | None = None) -> None:
        self._create = create
        self._discard = discard
        self._values: dict[int, T] = {}

    def get(self) -> T:
        """The value of this process, made at the first call."""
        pid = os.getpid()
        value = self._values.get(pid)
        if value is not None:
            return value
        value = self._values.setdefault(pid, self._create())
        self._discard_inherited(pid)
        return value

    def drop(self) -> T | None:
        """Forget the value of this process and return it, for the caller to close."""
        pid = os.getpid()
        value = self._values.pop(pid, None)
        self._discard_inherited(pid)
        return value

    def _discard_inherited(self, pid: int) -> None:
        for other in [key for key in self._values if key != pid]:
            inherited = self._values.pop(other, None)
            if inherited is not None and self._discard is not None:
                self._discard(inherited)

    def __getstate__(self) -> dict[str, Any]:
        return {"_create": self._create, "_discard": self._discard, "_values": {}}
