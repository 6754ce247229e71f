"""A small simulation of things that happen at certain times: a clock, processes, and a shared link.

A process is a generator. It yields a time to be continued at, or a `Signal` to be continued by. Everything
runs in one thread and in the order of time; equal times in the order in which they were asked for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator

__all__ = ["Clock", "Fetches", "Link", "Process", "Signal"]

Process = Generator["float | Signal", None, None]


class Signal:
    """Something that processes wait for; once set it stays set."""

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Process] = []


class Clock:
    """Time, and what happens next.

    Attributes:
        now_s: Time, seconds.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something at a time, now at the earliest."""
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num_events, action))
        self._num_events += 1

    def start(self, process: Process) -> None:
        """Begin a process now."""
        self.at(self.now_s, lambda: self._continue(process))

    def set(self, signal: Signal) -> None:
        """Set a signal and continue all who wait for it."""
        signal.is_set = True
        for process in signal.waiting:
            self.start(process)
        signal.waiting.clear()

    def run(self) -> None:
        """Let everything happen."""
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def _continue(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, Signal):
                if wanted.is_set:
                    continue
                wanted.waiting.append(process)
            else:
                self.at(wanted, lambda: self._continue(process))
            return


class Link:
    """A connection whose bandwidth all transfers under way share evenly.

    Args:
        clock: Time.
        bytes_per_s: Its bandwidth; None = without limit.
    """

    def __init__(self, clock: Clock, bytes_per_s: float | None) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        # What each transfer that is under way all the time would have got so far, bytes: a transfer of n
        # bytes that begins now has ended when this has grown by n, whoever comes and goes meanwhile.
        self._level = 0.0
        self._since_s = 0.0
        self._transfers: list[tuple[float, int, Signal]] = []
        self._num_begun = 0
        self._num_changes = 0

    def transfer(self, num_bytes: int) -> Signal:
        """Begin a transfer; the signal is set at its end."""
        done = Signal()
        if self._bytes_per_s is None:
            self._clock.set(done)
            return done
        self._advance()
        heapq.heappush(self._transfers, (self._level + num_bytes, self._num_begun, done))
        self._num_begun += 1
        self._schedule()
        return done

    def _advance(self) -> None:
        if self._transfers and self._bytes_per_s is not None:
            seconds = self._clock.now_s - self._since_s
            self._level += seconds * self._bytes_per_s / len(self._transfers)
        self._since_s = self._clock.now_s

    def _schedule(self) -> None:
        self._num_changes += 1
        if not self._transfers or self._bytes_per_s is None:
            return
        change = self._num_changes
        left = max(0.0, self._transfers[0][0] - self._level)
        end_s = self._clock.now_s + left * len(self._transfers) / self._bytes_per_s

        def end() -> None:
            if change == self._num_changes:  # nobody has come meanwhile
                self._advance()
                self._level, _, done = heapq.heappop(self._transfers)
                self._clock.set(done)
                self._schedule()

        self._clock.at(end_s, end)


class Fetches:
    """Fetches of one process: first in first out, so many at once, each a latency and then its bytes.

    Args:
        clock: Time.
        link: What all processes share.
        latency_s: From a request to its first byte.
        limit: Fetches at once.
    """

    def __init__(self, clock: Clock, link: Link, *, latency_s: float, limit: int) -> None:
        self._clock, self._link = clock, link
        self._latency_s, self._limit = latency_s, limit
        self._queue: deque[tuple[int, Signal]] = deque()
        self._num_active = 0

    def begin(self, num_bytes: int) -> Signal:
        """Queue a fetch; the signal is set when it has arrived."""
        arrived = Signal()
        self._queue.append((num_bytes, arrived))
        self._start_next()
        return arrived

    def _start_next(self) -> None:
        while self._queue and self._num_active < self._limit:
            self._num_active += 1
            self._clock.start(self._fetch(*self._queue.popleft()))

    def _fetch(self, num_bytes: int, arrived: Signal) -> Process:
        yield self._clock.now_s + self._latency_s
        yield self._link.transfer(num_bytes)
        self._num_active -= 1
        self._clock.set(arrived)
        self._start_next()
