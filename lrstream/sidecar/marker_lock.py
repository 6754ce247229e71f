"""A lock made of files alone, for file systems that cannot `flock` (K25).

The kernel releases a `flock` when its holder dies; a file stays. Breaking a dead holder's lock by
deleting its file is a race: of two processes that saw the same dead holder, the slower one deletes
the file that the faster one has just created. So nothing is ever taken away here. Marker files are
numbered; the highest number is the lock. A free or dead marker *n* is succeeded by creating
*n + 1*, which the file system grants to exactly one; releasing rewrites the own marker as free.
Only lower numbers are deleted, never the highest. A process that was so slow that its number had
been used and deleted sees the higher one when it looks again, and steps back.

A dead holder is succeeded without being asked only where its death is certain: same machine, same
boot, same pid namespace, and no such process. Everything else needs `MarkerLock.break_idle`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import time
from dataclasses import asdict
from pathlib import Path

from lrstream.sidecar.install import storage_errors, write_atomically
from lrstream.sidecar.process import ProcessName

__all__ = ["MarkerLock"]

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES)


class MarkerLock:
    """One lock as numbered marker files ``<path>.marker.<n>``.

    Args:
        path: Path of the lock that the markers stand for.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pattern = re.compile(re.escape(path.name) + r"\.marker\.(\d+)")
        self._mine: Path | None = None

    def exists(self) -> bool:
        """Whether this lock has ever been used on this path."""
        return bool(self._numbers())

    def try_acquire(self) -> bool:
        """Take the lock if it is free or its holder is certainly dead; never waits."""
        top = max(self._numbers(), default=0)
        if top and not self._is_free(top):
            return False
        return self._succeed(top)

    def is_held(self) -> bool:
        """Whether some process holds it that is not certainly dead."""
        top = max(self._numbers(), default=0)
        return bool(top) and not self._is_free(top)

    def touch(self) -> None:
        """Give a sign of life, so that other machines do not take the holder for dead."""
        if self._mine is not None:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._mine)

    def release(self) -> None:
        """Mark the lock as free; does nothing if it is not held by this object."""
        if self._mine is not None:
            mine, self._mine = self._mine, None
            write_atomically(mine, b'{"free": true}')

    def break_idle(self, idle_s: float) -> bool:
        """Free a lock whose holder gave no sign of life for `idle_s` seconds; True if it was freed."""
        top = max(self._numbers(), default=0)
        if not top or self._is_free(top):
            return False
        if time.time() - self._marker(top).stat().st_mtime < idle_s or not self._succeed(top):
            return False
        self.release()
        return True

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self._path.parent)
        except FileNotFoundError:
            return []
        return [int(match[1]) for name in names if (match := self._pattern.fullmatch(name))]

    def _marker(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.marker.{number}")

    def _is_free(self, number: int) -> bool:
        try:
            document = json.loads(self._marker(number).read_text("utf-8"))
            if document.get("free") is True:
                return True
            holder = ProcessName(**document["process"])
        except FileNotFoundError:
            return False  # succeeded meanwhile; the next attempt sees by whom
        except (ValueError, KeyError, TypeError, AttributeError):
            return False  # being written just now
        return holder.is_alive() is False

    def _succeed(self, number: int) -> bool:
        marker = self._marker(number + 1)
        if not _create(marker, json.dumps({"process": asdict(ProcessName.current())}).encode()):
            return False
        numbers = self._numbers()
        if max(numbers, default=0) > number + 1:
            marker.unlink(missing_ok=True)
            return False
        for lower in numbers:
            if lower <= number:
                self._marker(lower).unlink(missing_ok=True)
        self._mine = marker
        return True


def _create(path: Path, data: bytes) -> bool:
    """Create a file with its content in one step; False if it exists already."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with storage_errors(path):
        try:
            temporary.write_bytes(data)
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create_without_links(path, data)
        finally:
            temporary.unlink(missing_ok=True)
    return True


def _create_without_links(path: Path, data: bytes) -> bool:
    """The same in two steps; a reader between them finds an empty marker and takes it for held."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return True
