"""The process that indexes sources for a build on the same machine (`lrstream.sidecar.processes`).

What it is to do arrives at its standard input, what it has done leaves at what was its standard output:
pickled messages behind their length, between two processes of one release that one user has started. It ends
when its input does, also where whoever started it was killed.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from lrstream.sidecar.index_threads import IndexThreads
from lrstream.sidecar.index_work import SourceResult, StoreCounts, expect_listed
from lrstream.storage.portable import PortableStore

__all__ = ["ChildJob", "Indexed", "Logged", "Raised", "main", "packed_message", "read_message"]

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ChildJob:
    """What a process has to know before its first source. Its text shows nothing of the store.

    Attributes:
        store: The dataset.
        workers: Sources read at the same time.
        packs_records: Whether each record is wanted as a journal keeps it, too.
        log_level: Messages below it are of no interest.
    """

    store: PortableStore = field(repr=False)
    workers: int
    packs_records: bool
    log_level: int


class Indexed(NamedTuple):
    """What became of a source, with the requests and bytes counted since the last one."""

    result: SourceResult
    requests: int
    bytes_read: int


class Logged(NamedTuple):
    """Something for the log."""

    logger: str
    level: int
    text: str


class Raised(NamedTuple):
    """An error that is none of a source: the build cannot go on."""

    error: Exception


def packed_message(message: object) -> bytes:
    """A message as it goes through a pipe."""
    data = pickle.dumps(message, 5)
    return _LENGTH.pack(len(data)) + data


def read_message(file: BinaryIO) -> Any:
    """The next message; None at the end, also at one in the middle of a message."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = file.read(length)
    # Of the process that started this one, or that this one has started.
    return pickle.loads(data) if len(data) == length else None


def main(descriptor: int) -> None:
    """Index what arrives at standard input, until nothing does any more. Does not return.

    Args:
        descriptor: Where the answers go.
    """
    answers = _Answers(descriptor)
    status = 0
    try:
        _serve(os.fdopen(0, "rb", closefd=False), answers)
    except Exception as error:  # noqa: BLE001  (raised again by the process that builds)
        answers.send_error(error)
        status = 1
    # Not by the end of the program: nobody waits for the reads that are under way.
    os._exit(status)


class _Answers:
    """The way back. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        data = memoryview(packed_message(message))
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except BrokenPipeError:
                os._exit(1)  # nobody is there any more

    def send_error(self, error: Exception) -> None:
        error.add_note("".join(traceback.format_exception(error)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001  (it is told in words instead)
            error = RuntimeError("".join(traceback.format_exception(error)))
        self.send(Raised(error))


class _LogHandler(logging.Handler):
    def __init__(self, answers: _Answers) -> None:
        super().__init__()
        self._answers = answers

    def emit(self, record: logging.LogRecord) -> None:
        self._answers.send(Logged(record.name, record.levelno, record.getMessage()))


def _serve(questions: BinaryIO, answers: _Answers) -> None:
    job: ChildJob | None = read_message(questions)
    if job is None:
        return
    logger = logging.getLogger("lrstream")
    logger.setLevel(job.log_level)
    logger.addHandler(_LogHandler(answers))
    logger.propagate = False
    store = job.store.open()
    counts = StoreCounts(store)
    threads = IndexThreads(
        store,
        job.workers,
        packs_records=job.packs_records,
        put=lambda result: answers.send(Indexed(result, *counts.take())),
        fail=answers.send_error,
        access=job.store.access,
    )
    while (works := read_message(questions)) is not None:
        expect_listed(store, works)
        threads.add(works)
