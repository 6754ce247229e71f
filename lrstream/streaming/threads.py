"""A few threads that take jobs from a queue, and end when they are told to.

`concurrent.futures` would do but for its end: it joins its threads when the interpreter exits, and a
thread that waits for a slow server then holds up the exit of a training job. These are daemon threads,
started as jobs arrive, and `close` drops what has not begun.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

__all__ = ["CallersThread", "JobThreads", "ThreadShare"]

Job = Callable[[], None]


class JobThreads:
    """Runs jobs on at most `limit` threads, in the order in which they were submitted.

    A job must not raise: it hands its outcome, good or bad, to whoever waits for it.

    Args:
        name: Prefix of the threads' names.
        limit: Most threads.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = max(1, limit)
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_unfinished = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called; long jobs may look at it to end early."""
        return self._is_closed

    def submit(self, job: Job) -> None:
        """Queue a job; after `close` it is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._num_unfinished += 1
            if len(self._threads) < min(self._limit, self._num_unfinished):
                thread = threading.Thread(
                    target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._is_closed:
                job()
            # A thread that waits for the next job must not keep the last one's data alive.
            del job
            with self._lock:
                self._num_unfinished -= 1

    def close(self, timeout_s: float) -> bool:
        """Drop jobs that have not begun and wait for those that have.

        Args:
            timeout_s: Longest wait; a thread that is still in a read then ends by itself later.

        Returns:
            Whether all threads have ended.
        """
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class ThreadShare:
    """Use of threads that others use, too: like `JobThreads`, but closing ends its own jobs only.

    Args:
        threads: Whose threads these are; closed by their owner.
    """

    def __init__(self, threads: JobThreads) -> None:
        self._threads = threads
        self._changed = threading.Condition()
        self._running: set[int] = set()  # threads that are in one of these jobs
        self._is_closed = False

    def submit(self, job: Job) -> None:
        """Queue a job; after `close` it is dropped."""
        if not self._is_closed:
            self._threads.submit(partial(self._run, job))

    def _run(self, job: Job) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._is_closed:
                return
            self._running.add(me)
        try:
            job()
        finally:
            with self._changed:
                self._running.discard(me)
                self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Drop jobs that have not begun and wait for those that have; whether all have ended."""
        me = threading.get_ident()
        with self._changed:
            self._is_closed = True
            return self._changed.wait_for(lambda: not self._running - {me}, timeout_s)


class CallersThread:
    """Like `JobThreads` without threads: a job is done when `submit` returns. Belongs to one thread.

    For jobs that take less time than waking another thread.
    """

    def __init__(self) -> None:
        self._is_closed = False

    def submit(self, job: Job) -> None:
        """Do a job; after `close` it is dropped."""
        if not self._is_closed:
            job()

    def close(self, timeout_s: float) -> bool:
        """Drop later jobs; True, since none is under way."""
        self._is_closed = True
        return True
