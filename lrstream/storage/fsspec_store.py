"""A dataset on any file system that fsspec opens (``s3://``, ``gs://``, ``memory://``, ...).

fsspec's own reads are not trusted: the length of every reply is compared with what was asked for,
and nothing is answered from a listing that was made earlier.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import fsspec.asyn
from fsspec.core import url_to_fs

from lrstream.errors import NotFoundError, TransferError, UsageError
from lrstream.storage.byte_source import TransferCounters, check_range
from lrstream.storage.failures import describe, storage_error
from lrstream.storage.http_pool import HttpPool
from lrstream.storage.http_source import HttpByteSource
from lrstream.storage.location import Location
from lrstream.storage.per_process import PerProcess
from lrstream.storage.relative_path import check_relative_path, common_directory
from lrstream.storage.retry import RetryCounters, RetryPolicy
from lrstream.storage.store import FileInfo, require_files

__all__ = ["FsspecByteSource", "FsspecStore"]

# What file systems call the version of an object, in the order in which it is looked for.
_IDENTITY_KEYS = ("ETag", "etag", "version_id", "mtime", "LastModified")
_HTTP = ("http", "https")
_HTTP_CONNECTIONS = 32
# A mistake in our call, or in the file system's code; a second attempt would not help.
_PROGRAMMING_ERRORS = (TypeError, AttributeError, NameError, AssertionError, NotImplementedError)

if not hasattr(fsspec.asyn, "reset_after_fork") and hasattr(os, "register_at_fork"):
    # Older releases (2025.3 is one) leave a forked process with the event loop of its parent, without the
    # thread that runs it: whatever waits for the loop waits for ever.
    os.register_at_fork(after_in_child=fsspec.asyn.reset_lock)


class _Client:
    """The file system object of one process, made at first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.filesystem: Any = None
        self.root = ""


class FsspecStore:
    """A dataset under a URL that fsspec understands.

    Each process makes its own file system object (asynchronous ones hang when used after a fork),
    apart from fsspec's instance cache, whose listings may be stale.

    Args:
        location: A location of kind ``fsspec``.
        storage_options: Arguments of the file system. They are pickled with the store, so that
            workers can authenticate, and appear in no message.

    Raises:
        UsageError: If the client library of the protocol is not installed.
    """

    fingerprints_required = True
    # A request to an object store takes about as long as moving this much.
    range_gap_bytes = 256 * 1024

    def __init__(self, location: Location, *, storage_options: Mapping[str, Any] | None = None) -> None:
        self.location = location
        self.counters = TransferCounters()
        self.retry_counters = RetryCounters()
        self._options = dict(storage_options or {})
        self._client = PerProcess(_Client)
        self._protocol = location.root.partition("://")[0].partition("::")[0].lower()
        self._pool: HttpPool | None = None
        if self._protocol in _HTTP and not self._options:
            # fsspec would take whatever a server answers, and all of it. Options are for fsspec's client.
            self._pool = HttpPool(_HTTP_CONNECTIONS)
        try:
            fsspec.get_filesystem_class(self._protocol)
        except ImportError as error:
            extra = "lrstream[s3]" if self._protocol in ("s3", "s3a") else "the package it names"
            raise UsageError(
                f"{location.root}: the client of {self._protocol}:// is not installed ({error}).",
                hint=f"Install {extra}.",
            ) from error
        except ValueError as error:
            raise UsageError(f"{location.root}: {error}") from error

    def with_defaults(self, options: Mapping[str, Any]) -> FsspecStore:
        """The same dataset with `options` for whatever this store was not given."""
        return FsspecStore(self.location, storage_options={**options, **self._options})

    def read_bytes(self, path: str) -> bytes:
        """Whole content of a file."""
        full = self._full(path)
        with self._calls(path) as filesystem:
            data = bytes(filesystem.cat_file(full))
        self.counters.add(bytes_read=len(data))
        return data

    def exists(self, path: str) -> bool:
        """Whether the file is there now."""
        try:
            self._info_of(path)
        except NotFoundError:
            return False
        return True

    def list_files(self, prefix: str = "") -> dict[str, FileInfo]:
        """All files under ``prefix``, from one fresh recursive listing, sorted by path."""
        prefix = prefix.rstrip("/")
        filesystem, root = self._open()
        top = self._full(prefix) if prefix else root
        try:
            with self._calls(prefix) as filesystem:
                # Listings are remembered per file system object; what was written since is not in them.
                filesystem.invalidate_cache()
                listing: dict[str, dict[str, Any]] = filesystem.find(top, detail=True)
        except NotFoundError:
            return {}
        self.counters.add()
        found = {}
        for name, info in listing.items():
            path = self._relative(name, filesystem, root)
            if path is not None and info.get("type") != "directory":
                found[path] = _file_info(info)
        return dict(sorted(found.items()))

    def file_info(self, paths: Iterable[str]) -> dict[str, FileInfo]:
        """Sizes and fingerprints, from one listing of the directory that holds all ``paths``.

        Servers without listings (http, https) are asked for each file.
        """
        wanted = [check_relative_path(path) for path in paths]
        if not wanted:
            return {}
        if self._protocol not in _HTTP:
            return require_files(wanted, self.list_files(common_directory(wanted)), self.location.root)
        found = {}
        for path in wanted:
            try:
                found[path] = _file_info(self._info_of(path))
            except NotFoundError:
                continue
        return require_files(wanted, found, self.location.root)

    def open(self, path: str, size: int | None = None) -> FsspecByteSource:
        """Source of ranges of one file; ``size`` in bytes saves a request when known."""
        path = check_relative_path(path)
        return FsspecByteSource(self, path, size, self._over_http(path))

    def local_path(self, path: str) -> Path:
        """Refused: nothing of this store is on this machine."""
        raise UsageError(
            f"{self.location.root}/{path} is not a file on this machine.", hint="Read it through open()."
        )

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """The bytes that the file system returns for ``[start, stop)``, which may be too few."""
        full = self._full(path)
        with self._calls(path) as filesystem:
            data = bytes(filesystem.cat_file(full, start=start, end=stop))
        self.counters.add(bytes_read=len(data))
        return data

    def _over_http(self, path: str) -> HttpByteSource | None:
        """Verified ranges of a file of a plain HTTP server."""
        if self._pool is None:
            return None
        return HttpByteSource(
            path,
            f"{self.location.root}/{quote(path)}",
            self._pool,
            headers=dict,
            counters=self.counters,
            retry_counters=self.retry_counters,
            policy=RetryPolicy(),
        )

    def size_of(self, path: str) -> int:
        """Size of a file in bytes, asked for now."""
        size = self._info_of(path).get("size")
        if size is None:
            raise TransferError(
                f"{self.location.root}/{path}: the server does not tell the size of this file.",
                hint="It needs to answer with Content-Length and to support ranges.",
                file_path=path,
            )
        return int(size)

    def identity_of(self, path: str) -> str | None:
        """What the storage itself says of a file's content, asked for now; None where it says nothing."""
        return _identity(self._info_of(path))

    def _info_of(self, path: str) -> dict[str, Any]:
        full = self._full(path)
        with self._calls(path) as filesystem:
            filesystem.invalidate_cache()
            info: dict[str, Any] = filesystem.info(full)
        self.counters.add()
        if info.get("type") == "directory":
            raise NotFoundError(f"{self.location.root}/{path} is a directory, expected a file.")
        return info

    def _open(self) -> tuple[Any, str]:
        client = self._client.get()
        with client.lock:
            if client.filesystem is None:
                with self._failures(self.location.root):
                    client.filesystem, root = url_to_fs(
                        self.location.root, skip_instance_cache=True, **self._options
                    )
                    client.root = root.rstrip("/")
            return client.filesystem, client.root

    def _full(self, path: str) -> str:
        return f"{self._open()[1]}/{check_relative_path(path)}"

    @staticmethod
    def _relative(name: str, filesystem: Any, root: str) -> str | None:
        stripped = filesystem._strip_protocol(name)
        return stripped[len(root) + 1 :] if stripped.startswith(f"{root}/") else None

    @contextmanager
    def _calls(self, path: str) -> Iterator[Any]:
        filesystem, _ = self._open()
        with self._failures(f"{self.location.root}/{path}" if path else self.location.root):
            yield filesystem

    @contextmanager
    def _failures(self, where: str) -> Iterator[None]:
        try:
            yield
        except _PROGRAMMING_ERRORS:
            raise
        except ImportError as error:
            raise UsageError(f"{where}: a client library is missing ({describe(error)}).") from error
        except Exception as error:
            # File systems raise errors of their client libraries, which have no common base.
            raise storage_error(error, where) from error

    def __repr__(self) -> str:
        return f"FsspecStore({self.location.root!r})"


class FsspecByteSource:
    """Ranges of one object of an fsspec file system. Thread-safe and picklable; holds no handle."""

    def __init__(
        self, store: FsspecStore, path: str, size: int | None, http: HttpByteSource | None = None
    ) -> None:
        self.path = path
        self._http = http
        self._store = store
        self._size = size
        self._unchecked: str | None = None

    def expect(self, fingerprint: str) -> None:
        """Compare the object's identity with this one before the first read; one request.

        Later replacements show in a wrong length or in the decoder, if at all: these clients cannot make
        a range read depend on the identity.
        """
        self._unchecked = fingerprint

    def _check_identity(self) -> None:
        expected = self._unchecked  # another thread may be done with it at any moment
        if expected is None:
            return
        found = self._store.identity_of(self.path)
        # Without any identity there is nothing to compare: the index was made for this opening alone.
        if found is not None and found != expected:
            raise TransferError(
                f"{self._store.location.root}/{self.path} was changed after it was indexed: its identity is "
                f"{found}, expected {expected}.",
                hint="Open the dataset again, so that it is indexed as it is now.",
                file_path=self.path,
            )
        self._unchecked = None

    def size(self) -> int:
        """Size in bytes, asked for once unless it was given."""
        if self._size is None:
            self._size = self._store.size_of(self.path)
        return self._size

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes of ``[start, stop)``; TransferError for a shorter or longer reply."""
        check_range(self.path, start, stop)
        if start == stop:
            return b""
        self._check_identity()
        if self._http is not None:
            return self._http.read(start, stop)
        data = self._store.read_range(self.path, start, stop)
        if len(data) != stop - start:
            raise TransferError(
                f"{self._store.location.root}/{self.path}: {stop - start} bytes were wanted, "
                f"[{start}, {stop}), but {len(data)} came.",
                hint="The file is shorter than expected, was replaced, or the server ignores ranges.",
                file_path=self.path,
            )
        return data

    def read_upto(self, start: int, stop: int) -> tuple[bytes, int]:
        """The bytes of ``[start, min(stop, size))`` and the size of the object."""
        check_range(self.path, start, stop)
        size = self.size()
        return self.read(min(start, size), min(stop, size)), size

    def close(self) -> None:
        """Nothing to release: the connection pool belongs to the store."""

    def __repr__(self) -> str:
        return f"FsspecByteSource({self.path!r})"


def _identity(info: Mapping[str, Any]) -> str | None:
    identity = next((info[key] for key in _IDENTITY_KEYS if info.get(key) is not None), None)
    return None if identity is None else str(identity)


def _file_info(info: Mapping[str, Any]) -> FileInfo:
    size = info.get("size")
    # Without any identity the value is new each time, so that nothing derived from it is reused.
    fingerprint = _identity(info) or uuid.uuid4().hex
    return FileInfo(None if size is None else int(size), fingerprint)
