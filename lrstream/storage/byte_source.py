"""Ranges of bytes of one stored object, whatever the storage is.

Ranges are half-open, ``[start, stop)``, and every read is verified: it returns exactly the bytes
that were asked for, or raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from lrstream.errors import UsageError
from lrstream.storage.per_process import PerProcess

__all__ = ["ByteSource", "GrowingByteSource", "TransferCounters", "check_range"]


@runtime_checkable
class ByteSource(Protocol):
    """One stored object that can be read by ranges. Thread-safe; usable after fork and pickling."""

    path: str
    """Path relative to the dataset root, with forward slashes."""

    def size(self) -> int:
        """Size of the object in bytes."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes of ``[start, stop)``.

        Raises:
            TransferError: If the object ends before ``stop``, or the transfer fails.
            NotFoundError: If the object does not exist.
            AccessError: If it may not be read.
        """
        ...

    def read_upto(self, start: int, stop: int) -> tuple[bytes, int]:
        """The bytes of ``[start, min(stop, size))`` and the size of the whole object in bytes."""
        ...

    def expect(self, fingerprint: str) -> None:
        """Refuse reads (TransferError) where the storage can tell that the content is not this one.

        Args:
            fingerprint: As in `FileInfo`, of the content that was indexed.
        """
        ...

    def close(self) -> None:
        """Release the handle of this process. A later read opens the object again."""
        ...


@runtime_checkable
class GrowingByteSource(ByteSource, Protocol):
    """A source whose requests need not be as long as what is read of their replies."""

    def read_growing(self, first: int, limit: int, stop_of: Callable[[bytes, int], int]) -> tuple[bytes, int]:
        """The beginning of the object, as far as its first bytes say, in one request.

        Args:
            first: Bytes to read at first; less where the object is shorter.
            limit: Bytes to ask for, at least `first`.
            stop_of: Given the first bytes and the size of the object, says where to stop. May be called
                again when a transfer is repeated.

        Returns:
            The bytes of ``[0, min(stop, limit, size))``, at least the first ones, and the size.
        """
        ...


class _Counts:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests = 0
        self.bytes_read = 0


class TransferCounters:
    """How many requests were made and bytes received, by this process.

    Shared by a store and all sources it opens. Thread-safe; starts at zero in a forked or spawned
    process.
    """

    def __init__(self) -> None:
        self._counts = PerProcess(_Counts)

    def add(self, *, requests: int = 1, bytes_read: int = 0) -> None:
        """Count ``requests`` requests that brought ``bytes_read`` bytes."""
        counts = self._counts.get()
        with counts.lock:
            counts.requests += requests
            counts.bytes_read += bytes_read

    @property
    def requests(self) -> int:
        """Requests (range reads, whole reads, listings, look-ups) made so far."""
        return self._counts.get().requests

    @property
    def bytes_read(self) -> int:
        """Bytes of content received so far."""
        return self._counts.get().bytes_read

    def __repr__(self) -> str:
        return f"TransferCounters(requests={self.requests}, bytes_read={self.bytes_read})"


def check_range(path: str, start: int, stop: int) -> None:
    """Refuse a range that is not ``0 <= start <= stop``."""
    if not 0 <= start <= stop:
        raise UsageError(
            f"{path}: bytes [{start}, {stop}) are no range: expected 0 <= start <= stop.", file_path=path
        )
