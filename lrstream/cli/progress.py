"""One line of progress on stderr, only where a person can watch it (CL-1)."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from types import TracebackType

from lrstream.cli.redaction import redact
from lrstream.cli.screen import is_plain_terminal, printable

__all__ = ["ProgressLine"]

_INTERVAL_S = 0.1
_BAR_CHARS = 20
# Before this a rate would say more about the start than about what is to come; it covers the last minute.
_RATE_AFTER_S = 2.0
_RATE_WINDOW_S = 60.0


class ProgressLine:
    """A status line that is redrawn in place and removed at the end: so much done, how fast, how long yet.

    Pure ASCII. Silent unless stderr is a terminal that understands carriage returns. Thread-safe.

    Args:
        enabled: False keeps it silent in any case (``--quiet``, ``--json``).
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty() and not is_plain_terminal()
        self._lock = threading.Lock()
        self._drawn_chars = 0
        self._next_draw_s = 0.0
        self._pace = Pace()

    def __call__(self, done: int, total: int | None, what: str) -> None:
        """Show that `done` of `total` (None: unknown) parts of `what` are finished."""
        if not self._enabled:
            return
        now_s = time.monotonic()
        with self._lock:
            # The last step is always drawn: it is what stays in view while the next part begins.
            if now_s < self._next_draw_s and done != total:
                return
            self._next_draw_s = now_s + _INTERVAL_S
            self._pace.note(now_s, done, what)
            self._draw(_text(done, total, what) + self._pace.text(done, total))

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


class Pace:
    """How fast something gets on, and when it will be done."""

    def __init__(self) -> None:
        self._what = ""
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now_s: float, done: int, what: str) -> None:
        """So much is done now; something else, or less than before, is a new beginning."""
        if what != self._what or (self._seen and done < self._seen[-1][1]):
            self._what = what
            self._seen.clear()
        # Ends of a minute are enough: two points a second, whatever the number of steps.
        if len(self._seen) < 2 or now_s - self._seen[-2][0] >= 0.5:
            self._seen.append((now_s, done))
        else:
            self._seen[-1] = (now_s, done)
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _RATE_WINDOW_S:
            self._seen.popleft()

    def text(self, done: int, total: int | None) -> str:
        """Rate and time left, to stand behind the rest; empty while nothing can be said."""
        if len(self._seen) < 2:
            return ""
        (start_s, first), (now_s, last) = self._seen[0], self._seen[-1]
        if now_s - start_s < _RATE_AFTER_S or last == first:
            return ""
        rate = (last - first) / (now_s - start_s)
        shown = f", {rate:,.0f}/s" if rate >= 10 else f", {rate:.1f}/s"
        return f"{shown}, {_duration((total - done) / rate)} left" if total and total > done else shown


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, as `2:05:09` or `5:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
