"""One builder at a time: the lock beside a sidecar, and waiting for it with open eyes (SC-5, K25).

The lock is `filelock.FileLock` on ``<file>.lock``, which upstream uses on the same path, so either
tool waits for the other. Where the file system cannot `flock` (some network mounts answer ENOSYS
or ENOLCK) a lock of marker files takes its place; processes on one directory agree on which,
because the file system gives all of them the same answer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from filelock import FileLock, Timeout

from lrstream.errors import SidecarLockTimeoutError
from lrstream.sidecar.install import reclaim_leftovers, storage_errors
from lrstream.sidecar.lock_holder import HolderRecord, holder_path, read_holder
from lrstream.sidecar.marker_lock import MarkerLock

if sys.platform != "win32":  # Windows locks through filelock alone
    import fcntl

__all__ = ["LockStatus", "ProcessLock", "break_lock", "inspect_lock", "lock_path"]

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

LOG_EVERY_S = 30.0
HEARTBEAT_S = 10.0
# No sign of life for this long (sixty heartbeats) lets a person break a marker lock.
IDLE_S = 600.0

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_RECORD_EVERY_S = 0.5
_DIRECTORY_ATTEMPTS = 5
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


def lock_path(file: Path) -> Path:
    """The lock that guards `file`."""
    return file.with_name(file.name + ".lock")


@dataclass(frozen=True, slots=True)
class LockStatus:
    """What can be said about a lock from outside.

    Attributes:
        path: The lock file.
        held: Whether a process holds it now; asked of the lock itself.
        holder: The note beside it; where `held` is False, whoever held it last and did not clean up.
        holder_alive: Whether the process of that note still runs; None when it cannot be known.
    """

    path: Path
    held: bool
    holder: HolderRecord | None
    holder_alive: bool | None

    def describe(self) -> str:
        """One sentence part for messages."""
        if self.holder is None:
            return "held by a process that left no note" if self.held else "not held"
        if not self.held:
            return f"not held; last held by {self.holder.describe()}"
        if self.holder_alive is False:
            return f"held by a process that left no note (the last note is from {self.holder.describe()})"
        return f"held by {self.holder.describe()}"


class ProcessLock:
    """The lock of one file. Use as a context manager around `acquire`; leaving it releases.

    Not re-entrant, and not for use across a fork.

    Args:
        path: The lock file (`lock_path` of what it guards).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._native: FileLock | None = None
        self._marker: MarkerLock | None = None
        self._record: HolderRecord | None = None
        self._record_guard = threading.Lock()
        self._recorded_at = 0.0
        self._stop_heart = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._record is not None

    def acquire(self, timeout_s: float, *, ready: Callable[[], Value | None] | None = None) -> Value | None:
        """Take the lock, or the result that another holder was waiting to produce.

        Args:
            timeout_s: How long to wait.
            ready: Asked between attempts; something other than None ends the waiting without the lock.

        Returns:
            None when the lock is held now, else what `ready` gave.

        Raises:
            SidecarLockTimeoutError: It was held by another process all the time.
            AccessError: The lock file cannot be created.
        """
        self._prepare()
        start = time.monotonic()
        pause, next_log = _FIRST_PAUSE_S, start + LOG_EVERY_S
        while not self._try():
            value = ready() if ready is not None else None
            if value is not None:
                return value
            now = time.monotonic()
            if now - start >= timeout_s:
                raise self._timeout_error(timeout_s)
            if now >= next_log:
                next_log += LOG_EVERY_S
                status = inspect_lock(self.path).describe()
                logger.warning("Waiting for %s for %.0f s: %s.", self.path, now - start, status)
            # Do not sleep past the deadline, nor past a log line.
            time.sleep(max(0.0, min(pause, start + timeout_s - now, next_log - now)))
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        self._taken()
        return None

    def progress(self, done: int, total: int) -> None:
        """Record how far the holder has come; cheap enough to call for every source file."""
        with self._record_guard:
            if self._record is None:
                return
            self._record = self._record.updated_now(done, total)
            now = time.monotonic()
            if now - self._recorded_at >= _RECORD_EVERY_S or done == total:
                self._recorded_at = now
                self._note()

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""
        self._stop_heart.set()
        if self._heart is not None:
            self._heart.join()
            self._heart = None
        with self._record_guard:
            if self._record is not None:
                self._record = None
                with contextlib.suppress(OSError):
                    holder_path(self.path).unlink(missing_ok=True)
        if self._marker is not None:
            self._marker.release()
        if self._native is not None:
            self._native.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _prepare(self) -> None:
        """Make the directory, and find out which kind of lock works there."""
        with storage_errors(self.path):
            for attempt in range(_DIRECTORY_ATTEMPTS):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._choose_kind()
                    return
                except FileNotFoundError:
                    # Pruning removes directories that are empty, and this one was just now.
                    if attempt + 1 == _DIRECTORY_ATTEMPTS:
                        raise

    def _choose_kind(self) -> None:
        if _flock_works(self.path):
            self._native = FileLock(self.path, thread_local=False, mode=0o666)
        else:
            logger.info("%s is on a file system without flock; using marker files.", self.path)
            self._marker = MarkerLock(self.path)

    def _try(self) -> bool:
        if self._marker is not None:
            return self._marker.try_acquire()
        assert self._native is not None
        try:
            with storage_errors(self.path):
                self._native.acquire(timeout=0)
        except Timeout:
            return False
        except FileNotFoundError:
            self._prepare()
            return False
        return True

    def _taken(self) -> None:
        try:
            # A holder that was killed while writing its note has left a temporary file.
            reclaim_leftovers(holder_path(self.path))
            self._record = HolderRecord.current()
            self._note()
            self._stop_heart.clear()
            self._heart = threading.Thread(target=self._beat, name="lrstream-lock", daemon=True)
            self._heart.start()
        except BaseException:
            self.release()
            raise

    def _beat(self) -> None:
        while not self._stop_heart.wait(HEARTBEAT_S):
            with self._record_guard:
                if self._record is None:
                    return
                self._record = self._record.updated_now()
                self._note()
            if self._marker is not None:
                self._marker.touch()

    def _note(self) -> None:
        """Write the note. It informs people, so a full disk must not end a build for its sake."""
        assert self._record is not None
        try:
            self._record.write(self.path)
        except OSError as error:
            logger.debug("The holder's note of %s could not be written: %s", self.path, error)

    def _timeout_error(self, timeout_s: float) -> SidecarLockTimeoutError:
        status = inspect_lock(self.path)
        return SidecarLockTimeoutError(
            f"The lock {self.path} was not free within {timeout_s:g} s (sidecar_lock_timeout_s): "
            f"{status.describe()}. Another process may still be indexing this revision.",
            hint="Check that it is healthy before removing a stale lock, or wait longer.",
            path=str(self.path),
            timeout_s=timeout_s,
        )


def inspect_lock(path: Path) -> LockStatus:
    """Look at a lock without taking it and without writing anything."""
    holder = read_holder(path)
    alive = holder.process.is_alive() if holder is not None else None
    return LockStatus(path, _is_held(path), holder, alive)


def break_lock(path: Path, *, idle_s: float = IDLE_S) -> bool:
    """Free a lock whose holder is dead or gave no sign of life for `idle_s` seconds.

    A `flock` needs no breaking, since the kernel releases it with its holder; it is left alone.

    Returns:
        Whether a lock was freed.
    """
    return MarkerLock(path).break_idle(idle_s)


def _is_held(path: Path) -> bool:
    if MarkerLock(path).is_held():
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    os.close(descriptor)
    return not _shared_lock_granted(path)


def _shared_lock_granted(path: Path) -> bool:
    """Whether nobody holds `path` exclusively; a shared lock works on read-only mounts too."""
    if sys.platform == "win32":
        probe = FileLock(path, thread_local=False)
        try:
            probe.acquire(timeout=0)
        except Timeout:
            return False
        probe.release()
        return True
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _NO_FLOCK
    return True


def _flock_works(path: Path) -> bool:
    """Whether the file system of `path` implements `flock`; being refused the lock is a yes."""
    if sys.platform == "win32":
        return True
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_FLOCK
    finally:
        os.close(descriptor)
    return True
