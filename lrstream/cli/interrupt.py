"""Ctrl-C and SIGTERM: once ends a command in order, twice ends it at once (CL-4)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lrstream.cli.problems import EXIT_INTERRUPTED, EXIT_TERMINATED

__all__ = ["Interruption", "two_step_interrupt"]

_EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


class Interruption:
    """Which signal has ended a command, if one did.

    Attributes:
        exit_code: Exit status that belongs to it; None without one.
    """

    exit_code: int | None = None


@contextmanager
def two_step_interrupt() -> Iterator[Interruption]:
    """Within the block the first SIGINT or SIGTERM raises KeyboardInterrupt, the second leaves the process.

    Ending in order waits for threads that are in the middle of a transfer, which may take its time. Leaving
    at once is as safe as being killed: files appear complete or not at all, and what is left over is
    reclaimed by the next run.

    Does nothing outside of the main thread, and where a signal is ignored (``nohup``) or taken by a host.
    """
    received = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    ours: dict[signal.Signals, Any] = {}
    first = _first(received)
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is default or signal.getsignal(number) == default:
            ours[number] = default
            signal.signal(number, first)
    try:
        yield received
    finally:
        # After a first signal the second one stays in force: threads may be waited for until the very end.
        for number, default in ours.items():
            if signal.getsignal(number) is first:
                signal.signal(number, default)


def _first(received: Interruption) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        received.exit_code = _EXIT_CODES[signal.Signals(number)]
        for other in _EXIT_CODES:
            if signal.getsignal(other) is handle:
                signal.signal(other, _second)
        if sys.stderr.isatty():
            sys.stderr.write("\nstopping after what is being read; Ctrl-C again stops at once\n")
        raise KeyboardInterrupt

    return handle


def _second(number: int, frame: FrameType | None) -> None:
    # Not `sys.exit`: that would wait for the very threads that are not waited for any longer.
    os._exit(_EXIT_CODES[signal.Signals(number)])
