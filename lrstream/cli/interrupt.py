"""Ctrl-C: once ends a command in order, twice ends it at once (CL-4)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lrstream.cli.problems import EXIT_INTERRUPTED

__all__ = ["two_step_interrupt"]


@contextmanager
def two_step_interrupt() -> Iterator[None]:
    """Within the block the first SIGINT raises KeyboardInterrupt and the second leaves the process.

    Ending in order waits for threads that are in the middle of a transfer, which may take its time. Leaving
    at once is as safe as being killed: files appear complete or not at all, and what is left over is
    reclaimed by the next run.

    Does nothing outside of the main thread, and where SIGINT is ignored (``nohup``) or taken by a host.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _first)
    try:
        yield
    finally:
        # After a first Ctrl-C the second one stays in force: threads may be waited for until the very end.
        if signal.getsignal(signal.SIGINT) is _first:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _first(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _second)
    if sys.stderr.isatty():
        sys.stderr.write("\nstopping after what is being read; Ctrl-C again stops at once\n")
    raise KeyboardInterrupt


def _second(number: int, frame: FrameType | None) -> None:
    # Not `sys.exit`: that would wait for the very threads that are not waited for any longer.
    os._exit(EXIT_INTERRUPTED)
