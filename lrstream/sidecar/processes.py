"""Indexing in several processes of this machine; this one hands out sources and writes the archive.

The threads of one process take turns at everything but reading and compressing, so that more than a few
reads at once bring nothing. Here each process has a part of the reads, this one included, which begins while
the others start. Sources go to each one by one, a few ahead of what it reads, and results come back as they
are finished, compressed and in the form that the journal takes: little is left to be done for each of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from typing import IO, cast

from lrstream.errors import TransferError, UsageError
from lrstream.sidecar.elsewhere import IndexedElsewhere, Work
from lrstream.sidecar.index_threads import IndexThreads
from lrstream.sidecar.process_child import (
    ChildJob,
    Indexed,
    Logged,
    Raised,
    packed_message,
    read_message,
)
from lrstream.storage.location import Location
from lrstream.storage.portable import PortableStore
from lrstream.storage.store import DatasetStore

__all__ = ["IndexProcessError", "ProcessIndexer", "automatic_processes"]

logger = logging.getLogger(__name__)

# Starting a process takes half a second, which fewer than these do not bring back.
_LEAST_VIDEOS = 1024
_LEAST_WORKERS = 4
_MOST_DEATHS = 2
_END_TIMEOUT_S = 2.0
# Nothing that is printed, by whatever is imported, gets between the answers. The path is that of this
# process, and no other: `-m` would look into the current directory first.
_PROGRAM = (
    "import json, os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "answers = os.dup(1); os.dup2(2, 1); sys.path[:] = json.loads(sys.argv[1]); "
    "from lrstream.sidecar.process_child import main; main(answers)"
)


class IndexProcessError(TransferError):
    """Processes that were indexing ended again and again; the same call may succeed later."""

    code = "index-process"


def automatic_processes(workers: int, num_videos: int, location: Location) -> int:
    """How many processes index so many videos best, on this machine; 1 = threads of the one that asks.

    Args:
        workers: Videos read at the same time.
        num_videos: Videos.
        location: Where they are.
    """
    # Of other storage some cannot be seen by another process at all (memory:), or by its own login only.
    if num_videos < _LEAST_VIDEOS or location.kind not in ("local", "hub") or not sys.executable:
        return 1
    has_affinity = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(processors, workers // _LEAST_WORKERS))


class ProcessIndexer:
    """A `lrstream.sidecar.elsewhere.SourceIndexer` that uses processes of this machine.

    They are started when there is something to index, and have ended when the generator is closed. They
    also end when this process does, however that happens.

    Args:
        processes: Processes, this one included; no more than `workers` are used.
        workers: Sources that all of them together read at the same time.
        packs_records: Whether a journal is kept.

    Raises:
        UsageError: One of the numbers is below 1.
    """

    def __init__(self, processes: int, workers: int, *, packs_records: bool = True) -> None:
        if processes < 1 or workers < 1:
            raise UsageError(f"processes is {processes} and workers is {workers}, expected at least 1.")
        self._processes = min(processes, workers)
        self._workers = workers
        self._packs_records = packs_records

    def index(self, store: DatasetStore, sources: Sequence[Work]) -> Generator[IndexedElsewhere]:
        """Index all sources; the order is that in which they are finished.

        Raises:
            IndexProcessError: Process after process ended at the same sources.
        """
        run = _Run(store, sources, self._packs_records)
        try:
            count = min(self._processes, len(sources))
            shares = [self._workers // count + (i < self._workers % count) for i in range(count)]
            for workers in shares[:-1]:
                run.start(workers)
            # Last, as the smallest share: it has the archive to write, too.
            run.start_here(shares[-1])
            yield from run.results()
        finally:
            run.end()


class _Member:
    """One process of those that index."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.held: dict[int, Work] = {}

    @property
    def room(self) -> int:
        """How many more sources it may be given."""
        return 2 * self.workers + 2 - len(self.held)

    def give(self, works: Sequence[Work]) -> None:
        """Let it index these."""
        self.held.update((work.number, work) for work in works)
        self._send(tuple(works))

    def _send(self, works: tuple[Work, ...]) -> None:
        raise NotImplementedError


_Answers = queue.SimpleQueue[tuple[_Member, object]]


class _Here(_Member):
    """This process."""

    def __init__(self, store: DatasetStore, workers: int, packs_records: bool, answers: _Answers) -> None:
        super().__init__(workers)
        self.threads = IndexThreads(
            store,
            workers,
            packs_records=packs_records,
            # Its requests are counted where they are made.
            put=lambda result: answers.put((self, Indexed(result, 0, 0))),
            fail=lambda error: answers.put((self, Raised(error))),
        )

    def _send(self, works: tuple[Work, ...]) -> None:
        self.threads.add(works)


class _Child(_Member):
    """Another process, and the thread that takes its answers."""

    def __init__(self, job: ChildJob, answers: _Answers) -> None:
        super().__init__(job.workers)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps([p for p in sys.path if isinstance(p, str)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Signals of the terminal are for the process that builds alone.
            start_new_session=True,
        )
        self._answers = answers
        self._thread = threading.Thread(target=self._receive, name="lrstream-processes", daemon=True)
        self._thread.start()
        self._send(job)

    def close_input(self) -> None:
        """Let it end."""
        with contextlib.suppress(OSError):
            cast(IO[bytes], self.process.stdin).close()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, and end it after so long."""
        try:
            self.process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._thread.join()
        cast(IO[bytes], self.process.stdout).close()

    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code >= 0:
            return f"status {code}"
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"

    def _send(self, message: object) -> None:
        # One that has died is noticed by the end of its answers.
        with contextlib.suppress(BrokenPipeError):
            pipe = cast(IO[bytes], self.process.stdin)
            pipe.write(packed_message(message))
            pipe.flush()

    def _receive(self) -> None:
        try:
            while True:
                message = read_message(cast(IO[bytes], self.process.stdout))  # type: ignore[arg-type]
                self._answers.put((self, message))
                if message is None:
                    return
        except Exception as error:  # noqa: BLE001  (raised where the answers are used)
            self._answers.put((self, Raised(error)))


class _Run:
    """Handing out the sources of one build and collecting what comes back."""

    def __init__(self, store: DatasetStore, sources: Sequence[Work], packs_records: bool) -> None:
        self._store = store
        self._portable = PortableStore(store)
        self._packs_records = packs_records
        self._waiting = deque(sources)
        self._num_sources = self._num_left = len(sources)
        self._here: _Here | None = None
        self._children: list[_Child] = []
        self._answers: _Answers = queue.SimpleQueue()
        self._deaths: Counter[int] = Counter()

    def start(self, workers: int) -> None:
        """Start one more process."""
        level = logging.getLogger("lrstream").getEffectiveLevel()
        job = ChildJob(self._portable, workers, self._packs_records, level)
        try:
            self._children.append(_Child(job, self._answers))
        except OSError as error:
            raise IndexProcessError(
                f"A process that indexes videos cannot be started: {error}.",
                hint="Run the same command again with --processes 1.",
            ) from error

    def start_here(self, workers: int) -> None:
        """Let this process have a share."""
        self._here = _Here(self._store, workers, self._packs_records, self._answers)

    def results(self) -> Iterator[IndexedElsewhere]:
        while self._num_left:
            self._hand_out()
            member, message = self._answers.get()
            if isinstance(message, Indexed):
                result = message.result
                self._store.counters.add(requests=message.requests, bytes_read=message.bytes_read)
                del member.held[result.number]
                self._num_left -= 1
                yield IndexedElsewhere(
                    result.number, encoded=result.encoded, error=result.error, packed=result.packed
                )
            elif isinstance(message, Logged):
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
            elif isinstance(message, Raised):
                raise message.error
            elif isinstance(member, _Child):
                self._replace(member)

    def end(self) -> None:
        """No process is left afterwards."""
        try:
            if self._here is not None:
                self._here.threads.stop()
            for child in self._children:
                child.close_input()
            limit = time.monotonic() + _END_TIMEOUT_S
            for child in self._children:
                child.wait(limit - time.monotonic())
            if self._here is not None:
                self._here.threads.join()
        finally:
            # Also where waiting was interrupted.
            for child in self._children:
                if child.process.poll() is None:
                    child.process.kill()

    def _hand_out(self) -> None:
        members: list[_Member] = [*self._children]
        if self._here is not None:
            members.append(self._here)
        rooms = [member.room for member in members]
        gifts: list[list[Work]] = [[] for _ in members]
        # One after the other, so that a few sources are shared by all.
        while self._waiting and (room := max(rooms)) > 0:
            number = rooms.index(room)
            rooms[number] -= 1
            gifts[number].append(self._waiting.popleft())
        for member, works in zip(members, gifts, strict=True):
            if works:
                member.give(works)

    def _replace(self, child: _Child) -> None:
        """Another process takes over what one that has died was doing."""
        child.close_input()
        child.wait(_END_TIMEOUT_S)
        self._children.remove(child)
        lost = list(child.held.values())
        self._deaths.update(work.number for work in lost)
        again = [work for work in lost if self._deaths[work.number] >= _MOST_DEATHS]
        if again:
            paths = tuple(work.source.path for work in again)
            done = self._num_sources - self._num_left
            raise IndexProcessError(
                f"{_MOST_DEATHS} processes ended one after the other ({child.how_it_ended()}) while they "
                f"indexed {paths[0]} and {len(paths) - 1} other video files; {done} of "
                f"{self._num_sources} video files had been indexed.",
                hint="Look for what ends them (memory?), then run the same command again, with --processes 1 "
                "or fewer --workers if need be; what is indexed is kept.",
                paths=paths,
            )
        logger.warning(
            "A process that was indexing videos ended (%s); another one takes over what it had begun.",
            child.how_it_ended(),
        )
        self._waiting.extendleft(reversed(lost))
        self.start(child.workers)
