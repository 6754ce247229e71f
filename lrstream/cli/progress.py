"""One line of progress on stderr, only where a person can watch it (CL-1)."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType

from lrstream.cli.redaction import redact
from lrstream.cli.screen import is_plain_terminal, printable

__all__ = ["ProgressLine"]

_INTERVAL_S = 0.1
_BAR_CHARS = 20


class ProgressLine:
    """A status line that is redrawn in place and removed at the end.

    Pure ASCII. Silent unless stderr is a terminal that understands carriage returns. Thread-safe.

    Args:
        enabled: False keeps it silent in any case (``--quiet``, ``--json``).
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty() and not is_plain_terminal()
        self._lock = threading.Lock()
        self._drawn_chars = 0
        self._next_draw_s = 0.0

    def __call__(self, done: int, total: int | None, what: str, /, *, num_bytes: int | None = None) -> None:
        """Show that `done` of `total` (None: unknown) parts of `what` are finished."""
        if not self._enabled:
            return
        now_s = time.monotonic()
        with self._lock:
            # The last step is always drawn: it is what stays in view while the next part begins.
            if now_s < self._next_draw_s and done != total:
                return
            self._next_draw_s = now_s + _INTERVAL_S
            self._draw(_text(done, total, what))

    def clear(self) -> None:
        """Remove the line."""
        with self._lock:
            if self._drawn_chars:
                sys.stderr.write("\r" + " " * self._drawn_chars + "\r")
                sys.stderr.flush()
                self._drawn_chars = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def _draw(self, text: str) -> None:
        # One column stays free: a full line would wrap on some terminals and could not be redrawn.
        columns = max(shutil.get_terminal_size().columns - 1, 1)
        text = redact(printable(text)).replace("\n", " ")[:columns]
        sys.stderr.write("\r" + text.ljust(self._drawn_chars))
        sys.stderr.flush()
        self._drawn_chars = len(text)


def _text(done: int, total: int | None, what: str) -> str:
    if not total:
        return f"{what}: {done}"
    filled = min(_BAR_CHARS * done // total, _BAR_CHARS)
    return f"[{'#' * filled}{'-' * (_BAR_CHARS - filled)}] {done}/{total} {what}"
