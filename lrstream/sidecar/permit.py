"""How many results of parsing a build holds at the same time, and who may parse (SC-1)."""

from __future__ import annotations

import threading
from typing import Self

__all__ = ["Permit", "Permits"]


class Permits:
    """What the threads of one build share.

    Parsing is a hundred short steps that the interpreter does one at a time, and gives its lock away in
    most of them: threads that parse at the same time take turns after each, which costs as much as the
    steps. So one parses while others compress, which zlib does beside the interpreter.

    Args:
        results: Most results of parsing at a time.
    """

    def __init__(self, results: int) -> None:
        self.results = threading.Semaphore(results)
        self.parsing = threading.Lock()


class Permit:
    """One thread's right to parse a source and to hold the result. Left, it is given back.

    Args:
        permits: Of the build.
    """

    def __init__(self, permits: Permits) -> None:
        self._permits = permits
        self._holds = self._parses = False

    def acquire(self) -> None:
        """Wait until this thread may parse."""
        if not self._holds:
            self._permits.results.acquire()
            self._holds = True
        if not self._parses:
            self._permits.parsing.acquire()
            self._parses = True

    def end_parsing(self) -> None:
        """Let another thread parse; what was parsed is still held."""
        if self._parses:
            self._parses = False
            self._permits.parsing.release()

    def release(self) -> None:
        """Hold nothing any more, nor parse."""
        self.end_parsing()
        if self._holds:
            self._holds = False
            self._permits.results.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
