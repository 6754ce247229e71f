"""Atomic installation of a file: write beside it, flush to disk, rename (SC-3).

Readers see the previous file or the complete new one. What a killed writer leaves behind has a
name no reader looks for, and that name says which process wrote it, so that the next writer can
tell rubbish from work in progress.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, BinaryIO, Self

from lrstream.errors import AccessError, DiskFullError
from lrstream.sidecar.process import ProcessName

__all__ = [
    "PendingFile",
    "leftovers",
    "reclaim_leftovers",
    "scratch_file",
    "storage_errors",
    "write_atomically",
]

logger = logging.getLogger(__name__)

# A temporary file whose writer cannot be judged from here (another host, an earlier boot) counts
# as abandoned after this long without a write.
ABANDONED_AFTER_S = 3600.0

# Threads wait for each other's writes, and most are far shorter than this.
_BUFFER_BYTES = 256 * 1024

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<host>[\w-]+)\.(?P<scope>[\w-]+)\.(?P<pid>\d+)\.(?P<started>\d+)\.[0-9a-f]+\.tmp"
)


@contextlib.contextmanager
def storage_errors(path: Path, *, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn the operating system's "no space" and "not permitted" into errors that say what to do.

    Args:
        path: The file being written.
        needed_bytes: How much the write needs at least, when that is known.

    Raises:
        DiskFullError: No space is left, a quota is exhausted, or files may not be that large.
        AccessError: The directory may not be written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, (DiskFullError, AccessError)):
            raise
        if error.errno in _FULL:
            free = _free_bytes(path)
            needed = "" if needed_bytes is None else f" at least {needed_bytes} bytes are needed,"
            raise DiskFullError(
                f"No space is left to write {path}:{needed} {free} bytes are free ({error.strerror}).",
                hint="Free some space there, or point HF_LEROBOT_HOME at a larger disk.",
                path=str(path),
                needed_bytes=needed_bytes,
                free_bytes=free,
            ) from error
        if error.errno == errno.EFBIG:
            raise DiskFullError(
                f"{path} would become larger than files may be here ({error.strerror}).",
                hint="Raise the limit (`ulimit -f`), or choose a place on another file system.",
                path=str(path),
                needed_bytes=needed_bytes,
                free_bytes=_free_bytes(path),
            ) from error
        if error.errno in _FORBIDDEN:
            raise AccessError(
                f"{path} cannot be written: {error.strerror}.",
                hint="Point HF_LEROBOT_HOME (or the output option) at a directory you may write.",
                path=str(path),
            ) from error
        raise


@contextlib.contextmanager
def scratch_file(directory: Path) -> Iterator[IO[bytes]]:
    """An unnamed temporary file in `directory`: it vanishes with the process, however it ends."""
    file = TemporaryFile(dir=directory)  # noqa: SIM115 - closed below, in its own way
    try:
        yield file
    finally:
        # Closing flushes what is buffered, which fails on a full disk; nobody reads it any more.
        with contextlib.suppress(OSError):
            file.close()


class PendingFile:
    """A file that appears under its name only when it is complete.

    Use as a context manager; leaving it without `install` removes the temporary file, whatever
    the reason (an error, Ctrl-C).

    Attributes:
        destination: Final path.
        temporary: Path of the file being written, in the same directory.
        file: Open binary handle of the temporary file, readable and writable.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        with storage_errors(destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
            self.temporary = destination.parent / _temporary_name(destination)
            # Not tempfile: it would create the file unreadable for others who share the cache.
            descriptor = os.open(
                self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666
            )
        self.file: BinaryIO = os.fdopen(descriptor, "w+b", _BUFFER_BYTES)
        self._installed = False

    def install(self, *, durable: bool = True) -> None:
        """Rename over `destination`.

        Args:
            durable: Flush file and directory to the disk first, so that the name survives a power
                failure with its content; not needed for notes that may be lost.
        """
        with storage_errors(self.destination, needed_bytes=self.file.tell()):
            self.file.flush()
            if durable:
                os.fsync(self.file.fileno())
            self.file.close()
            os.replace(self.temporary, self.destination)
            self._installed = True
            if durable:
                _sync_directory(self.destination.parent)

    def discard(self) -> None:
        """Close and remove the temporary file; does nothing after `install`."""
        if self._installed:
            return
        # Closing flushes what is buffered, which fails again on a full disk.
        with contextlib.suppress(OSError):
            self.file.close()
        self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def write_atomically(destination: Path, data: bytes, *, durable: bool = True) -> None:
    """Install a small file in one call; `durable` as in `PendingFile.install`."""
    with PendingFile(destination) as pending:
        with storage_errors(destination, needed_bytes=len(data)):
            pending.file.write(data)
        pending.install(durable=durable)


def leftovers(directory: Path, name: str | None = None) -> list[Path]:
    """Temporary files in `directory` whose writers have ended.

    Args:
        directory: Where to look; need not exist.
        name: Only those that were to become this file; all when None.
    """
    found = []
    try:
        candidates = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    for path in candidates:
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or (name is not None and match["name"] != name[:_NAME_LIMIT]):
            continue
        writer = ProcessName(match["host"], match["scope"], int(match["pid"]), int(match["started"]))
        alive = writer.is_alive()
        if alive is False or (alive is None and _idle_s(path) > ABANDONED_AFTER_S):
            found.append(path)
    return found


def reclaim_leftovers(destination: Path) -> int:
    """Remove what ended writers of `destination` left behind; returns the number of bytes freed.

    Call it while holding the lock of `destination`.
    """
    freed = 0
    for path in leftovers(destination.parent, destination.name):
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            freed += size
            logger.info("Removed %s (%d bytes), left by a process that has ended.", path, size)
    return freed


_NAME_LIMIT = 100  # keeps the temporary name below the 255 bytes that file systems allow


def _temporary_name(destination: Path) -> str:
    me = ProcessName.current()
    return (
        f".{destination.name[:_NAME_LIMIT]}.{me.host[:40]}.{me.scope}.{me.pid}.{me.started}"
        f".{secrets.token_hex(4)}.tmp"
    )


def _idle_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return 0


def _sync_directory(directory: Path) -> None:
    """Make a rename durable; file systems that cannot sync a directory are left to their own means."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
