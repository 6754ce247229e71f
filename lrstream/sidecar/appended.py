"""A file that grows by whole records, and is durable within a second."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

__all__ = ["AppendedFile"]

_SYNC_EVERY_S = 1.0


class AppendedFile:
    """A file that is written from its last good record on. For one thread at a time.

    Nothing is opened before the first record.

    Args:
        path: The file.
        end: Length of the part that is kept; what lies behind it is cut off.
        header: What the file begins with, where nothing is kept.
    """

    def __init__(self, path: Path, end: int, header: bytes) -> None:
        self._path = path
        self._end = end
        self._header = header
        self._descriptor: int | None = None
        self._synced_at = time.monotonic()
        self._syncing = threading.Lock()

    def append(self, record: bytes) -> None:
        """Write a record whole, or not at all.

        Raises:
            OSError: It cannot be written.
        """
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(self._path, flags, 0o666)
            os.ftruncate(self._descriptor, self._end)
            if self._end == 0:
                self._write(self._descriptor, self._header)
        self._write(self._descriptor, record)

    def sync_if_due(self) -> None:
        """Make all records durable if the last time was a second ago, and no other thread is at it.

        May be called while another thread appends.
        """
        if self._descriptor is None or time.monotonic() - self._synced_at < _SYNC_EVERY_S:
            return
        if self._syncing.acquire(blocking=False):
            try:
                os.fsync(self._descriptor)
                self._synced_at = time.monotonic()
            finally:
                self._syncing.release()

    def close(self) -> None:
        """Make all records durable, and release the file."""
        if self._descriptor is not None:
            # A disk that fails now has failed the work as well; who reads the file sees what is there.
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, descriptor: int, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], self._end + written)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._end)
            raise
        self._end += len(data)
