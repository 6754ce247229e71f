"""Progress for programs: one JSON object on each line of stderr (``--progress json``).

Fields of schema ``lrstream.progress/1``, always all of them:

    schema, command   what this is, and of which command
    what              what is counted, such as "video files"
    done, total       finished parts, and parts in all (null: unknown)
    bytes             bytes read so far (null: not counted)
    rate              parts per second over the last half minute (null: not known yet)
    bytes_per_s       the same in bytes
    seconds_left      at that rate (null: not known yet)
    elapsed_s         since the command began
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import NamedTuple

from lrstream.cli.progress import ProgressLine
from lrstream.cli.redaction import redact

__all__ = ["SCHEMA", "ProgressLines"]

SCHEMA = "lrstream.progress/1"

_INTERVAL_S = 0.5
_WINDOW_S = 30.0
_SHORTEST_WINDOW_S = 0.2


class _Moment(NamedTuple):
    time_s: float
    done: int
    num_bytes: int | None


class ProgressLines(ProgressLine):
    """Writes a line at the first call, at the last one of each part, and twice a second between. Thread-safe.

    Args:
        command: Name of the command, as in the schema of its answer.
    """

    def __init__(self, command: str) -> None:
        super().__init__(enabled=False)
        self._command = command
        self._begun_s = time.monotonic()
        self._next_s = 0.0
        self._what = ""
        self._moments: deque[_Moment] = deque()

    def __call__(self, done: int, total: int | None, what: str, /, *, num_bytes: int | None = None) -> None:
        """Tell that `done` of `total` (None: unknown) parts of `what` are finished."""
        now_s = time.monotonic()
        with self._lock:
            if what != self._what:
                self._what, self._next_s = what, 0.0
                self._moments.clear()
            if now_s < self._next_s and done != total:
                return
            self._next_s = now_s + _INTERVAL_S
            self._moments.append(_Moment(now_s, done, num_bytes))
            while len(self._moments) > 2 and now_s - self._moments[0].time_s > _WINDOW_S:
                self._moments.popleft()
            sys.stderr.write(self._line(self._moments[-1], total) + "\n")
            sys.stderr.flush()

    def _line(self, now: _Moment, total: int | None) -> str:
        first = self._moments[0]
        seconds = now.time_s - first.time_s
        rate = byte_rate = left_s = None
        if seconds >= _SHORTEST_WINDOW_S:
            rate = (now.done - first.done) / seconds
            if now.num_bytes is not None and first.num_bytes is not None:
                byte_rate = (now.num_bytes - first.num_bytes) / seconds
        if total is not None and now.done >= total:
            left_s = 0.0
        elif total is not None and rate:
            left_s = (total - now.done) / rate
        return json.dumps(
            {
                "schema": SCHEMA,
                "command": self._command,
                "what": redact(self._what),
                "done": now.done,
                "total": total,
                "bytes": now.num_bytes,
                "rate": rate,
                "bytes_per_s": byte_rate,
                "seconds_left": left_s,
                "elapsed_s": now.time_s - self._begun_s,
            }
        )
