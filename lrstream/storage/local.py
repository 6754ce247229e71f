"""A dataset in a local directory: `os.pread`, `os.stat`, `os.scandir`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lrstream.errors import NotFoundError, TransferError
from lrstream.storage.byte_source import TransferCounters, check_range
from lrstream.storage.failures import storage_error
from lrstream.storage.location import Location
from lrstream.storage.per_process import PerProcess
from lrstream.storage.relative_path import check_relative_path
from lrstream.storage.store import FileInfo, require_files

__all__ = ["LocalByteSource", "LocalStore"]


class _Descriptor:
    """An open file descriptor with a count of the reads under way.

    A descriptor number is reused by the next file that is opened, so closing one that another
    thread is about to read from would silently give it another file's bytes. It is closed when the
    last read has ended.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = -1
        self.reads = 0
        self.close_when_idle = False

    def acquire(self, file: str) -> int:
        with self.lock:
            if self.number < 0:
                self.number = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self.reads += 1
            self.close_when_idle = False
            return self.number

    def release(self) -> None:
        with self.lock:
            self.reads -= 1
            if self.close_when_idle and self.reads == 0:
                self._close()

    def close(self) -> None:
        with self.lock:
            self.close_when_idle = self.reads > 0
            if not self.close_when_idle:
                self._close()

    def close_inherited(self) -> None:
        # In a child after fork: no other thread exists that could be reading, and the lock may
        # have been held by one that does not exist here.
        self._close()

    def _close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


class LocalByteSource:
    """Ranges of one local file. Thread-safe; reopened in each process.

    Args:
        path: Path relative to the dataset root.
        file: Absolute path of the file.
        counters: Counters of the store.
    """

    def __init__(self, path: str, file: str, counters: TransferCounters) -> None:
        self.path = path
        self._file = file
        self._counters = counters
        self._expected: str | None = None
        self._descriptor = PerProcess(_Descriptor, _Descriptor.close_inherited)

    def expect(self, fingerprint: str) -> None:
        """Refuse reads once the file is not the one with this fingerprint; looked at in every read."""
        self._expected = fingerprint

    def size(self) -> int:
        """Size of the file now, in bytes."""
        with self._open() as number:
            return os.fstat(number).st_size

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes of ``[start, stop)``; TransferError if the file is shorter."""
        check_range(self.path, start, stop)
        with self._open() as number:
            size = self._checked_size(number)
            # Asked before the read, so that an absurd range allocates nothing.
            if stop > size:
                raise self._too_short(start, stop, size)
            return self._read_exactly(number, start, stop)

    def read_upto(self, start: int, stop: int) -> tuple[bytes, int]:
        """The bytes of ``[start, min(stop, size))`` and the size of the file."""
        check_range(self.path, start, stop)
        with self._open() as number:
            size = self._checked_size(number)
            return self._read_exactly(number, min(start, size), min(stop, size)), size

    def close(self) -> None:
        """Close the descriptor of this process once no read is under way."""
        descriptor = self._descriptor.drop()
        if descriptor is not None:
            descriptor.close()

    @contextmanager
    def _open(self) -> Iterator[int]:
        descriptor = self._descriptor.get()
        try:
            number = descriptor.acquire(self._file)
            try:
                yield number
            finally:
                descriptor.release()
        except OSError as error:
            raise storage_error(error, self._file) from error

    def _read_exactly(self, number: int, start: int, stop: int) -> bytes:
        # One call reads at most about 2 GiB, and network file systems may return less than asked.
        parts: list[bytes] = []
        position = start
        while position < stop:
            part = os.pread(number, stop - position, position)
            if not part:
                raise self._too_short(start, stop, position)
            parts.append(part)
            position += len(part)
        self._counters.add(bytes_read=stop - start)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _checked_size(self, number: int) -> int:
        status = os.fstat(number)
        found = fingerprint_of(status)
        if self._expected is not None and found != self._expected:
            raise TransferError(
                f"{self._file} was changed after it was indexed: its times are {found}, expected "
                f"{self._expected} (modification and status change, ns).",
                hint="Open the dataset again, so that it is indexed as it is now.",
                file_path=self.path,
            )
        return status.st_size

    def _too_short(self, start: int, stop: int, size: int) -> TransferError:
        return TransferError(
            f"{self._file}: bytes [{start}, {stop}) were wanted, but the file ends at {size}.",
            hint="It is being written or was replaced since it was indexed.",
            file_path=self.path,
        )

    def __del__(self) -> None:
        if "_descriptor" in self.__dict__:
            self.close()

    def __repr__(self) -> str:
        return f"LocalByteSource({self._file!r})"


class LocalStore:
    """A dataset under a local directory.

    The fingerprint of a file is ``"<mtime_ns>:<ctime_ns>"``: a replacement of equal size, even one
    with a restored modification time, changes the second part.

    Args:
        location: A location of kind ``local``.

    Raises:
        NotFoundError: If the directory does not exist.
    """

    fingerprints_required = True
    # A system call costs about as much as copying a page or two.
    range_gap_bytes = 4096

    def __init__(self, location: Location) -> None:
        self.location = location
        self.counters = TransferCounters()
        # Absolute, so that a later change of directory does not move the dataset.
        self._root = os.path.abspath(location.root)
        if not os.path.isdir(self._root):
            raise NotFoundError(f"The local dataset directory {self._root!r} does not exist.")

    def read_bytes(self, path: str) -> bytes:
        """Whole content of a file."""
        source = self._source(path)
        try:
            return source.read_upto(0, source.size())[0]
        finally:
            source.close()

    def exists(self, path: str) -> bool:
        """Whether ``path`` is a file (or a link to one)."""
        return os.path.isfile(self._absolute(path))

    def list_files(self, prefix: str = "") -> dict[str, FileInfo]:
        """All files under ``prefix``, links followed, sorted by path."""
        top = self._absolute(prefix) if prefix.rstrip("/") else self._root
        found: dict[str, FileInfo] = {}
        # Directories that are links are followed (videos often live on another disk). A directory
        # that is its own ancestor is a loop; one reached by two paths is listed under both.
        waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
        while waiting:
            directory, ancestors = waiting.pop()
            try:
                status = os.stat(directory)
                identity = (status.st_dev, status.st_ino)
                if identity in ancestors:
                    continue
                inside = ancestors | {identity}
                with os.scandir(directory) as entries:
                    for entry in entries:
                        if entry.is_dir():
                            waiting.append((entry.path, inside))
                        elif entry.is_file():
                            found[os.path.relpath(entry.path, self._root).replace(os.sep, "/")] = _info(
                                entry.stat()
                            )
            except (FileNotFoundError, NotADirectoryError):
                # The prefix itself is absent, or an entry vanished while we listed.
                continue
            except OSError as error:
                raise storage_error(error, directory) from error
        return dict(sorted(found.items()))

    def file_info(self, paths: Iterable[str]) -> dict[str, FileInfo]:
        """Size and fingerprint of each path, in the order given."""
        wanted = list(paths)
        found: dict[str, FileInfo] = {}
        for path in wanted:
            file = self._absolute(path)
            try:
                status = os.stat(file)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise storage_error(error, file) from error
            found[path] = _info(status)
        return require_files(wanted, found, self._root)

    def open(self, path: str, size: int | None = None) -> LocalByteSource:
        """Source of ranges of one file. The size is looked up at each read, not taken from the caller."""
        return self._source(path)

    def local_path(self, path: str) -> Path:
        """Absolute path of the file."""
        return Path(self._absolute(path))

    def _source(self, path: str) -> LocalByteSource:
        return LocalByteSource(path, self._absolute(path), self.counters)

    def _absolute(self, path: str) -> str:
        return os.path.join(self._root, check_relative_path(path.rstrip("/")))

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"


def fingerprint_of(status: os.stat_result) -> str:
    """Modification and status change time in ns: a replaced file differs in the second at least."""
    return f"{status.st_mtime_ns}:{status.st_ctime_ns}"


def _info(status: os.stat_result) -> FileInfo:
    return FileInfo(status.st_size, fingerprint_of(status))
