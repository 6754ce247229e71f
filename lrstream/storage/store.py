"""One dataset root and everything stored under it.

A store belongs to one dataset at one snapshot: metadata, tables and videos are all read through
it (DS-6).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lrstream.errors import NotFoundError, UsageError
from lrstream.storage.byte_source import ByteSource, TransferCounters
from lrstream.storage.location import Location

logger = logging.getLogger(__name__)

__all__ = ["DatasetStore", "FileInfo", "open_store", "require_files"]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What a store knows about a file without reading it.

    Attributes:
        size: Size in bytes, None where the store cannot tell.
        fingerprint: Text that changes when the content does (SC-6), None where nothing is needed
            because the location is pinned to a commit.
    """

    size: int | None
    fingerprint: str | None


@runtime_checkable
class DatasetStore(Protocol):
    """Reads of one dataset. Thread-safe, picklable; handles and clients belong to one process."""

    location: Location
    counters: TransferCounters
    fingerprints_required: bool
    """Whether content can change under the same path, so that an identity needs fingerprints."""
    range_gap_bytes: int
    """Two wanted ranges of a file that are closer than this are better read as one."""

    def read_bytes(self, path: str) -> bytes:
        """Whole content of a small file. Raises NotFoundError, AccessError, TransferError."""
        ...

    def exists(self, path: str) -> bool:
        """Whether a file is there now (nothing is remembered from earlier listings)."""
        ...

    def list_files(self, prefix: str = "") -> dict[str, FileInfo]:
        """All files at any depth under the directory ``prefix``, keyed by path relative to the root.

        Sorted by path; empty when there is no such directory. Always a fresh listing.
        """
        ...

    def file_info(self, paths: Iterable[str]) -> dict[str, FileInfo]:
        """Sizes and fingerprints of ``paths``, in their order, from one listing where there is one.

        Raises:
            NotFoundError: If some are missing; the message and ``fields["paths"]`` name them.
        """
        ...

    def open(self, path: str, size: int | None = None) -> ByteSource:
        """Source of ranges of one file; nothing is opened before the first read.

        Args:
            path: Path relative to the root.
            size: Size in bytes if known, which saves remote stores a request.
        """
        ...

    def local_path(self, path: str) -> Path:
        """Path of the file on this machine. Raises UsageError where the store has no local files."""
        ...


def require_files(wanted: Iterable[str], found: Mapping[str, FileInfo], root: str) -> dict[str, FileInfo]:
    """The entries of ``found`` for all of ``wanted``, or one error that names everything missing."""
    paths = list(wanted)
    missing = [path for path in paths if path not in found]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise NotFoundError(
            f"{len(missing)} of {len(paths)} files do not exist under {root}: {shown}.",
            hint="The dataset is incomplete, or its metadata name files that were moved.",
            paths=tuple(missing),
        )
    return {path: found[path] for path in paths}


def open_store(
    location: Location,
    *,
    storage_options: Mapping[str, Any] | None = None,
    connections: int | None = None,
    subranges: int = 1,
) -> DatasetStore:
    """The store of a location.

    A Hub dataset that names no commit is pinned to one first, which asks the Hub; `store.location` has
    the commit in its root and the revision that was asked for or chosen.

    Args:
        location: From `parse_location`.
        storage_options: Arguments of the fsspec file system (credentials, endpoint); they travel
            with the store to workers and appear nowhere else.
        connections: Most HTTP connections of each process to one host, None for a default; Hub only.
        subranges: Parallel parts of one range read; Hub only.

    Raises:
        UsageError: If the client of this kind of storage is not installed, or too old.
        NotFoundError: If a local root, Hub repository or revision does not exist, or is hidden.
        AccessError: If a Hub repository may not be read.
        TransferError: If the Hub does not answer.
    """
    if connections is not None and connections < 1:
        raise UsageError(f"native_http_connections is {connections}, expected at least 1.")
    if subranges < 1:
        raise UsageError(f"native_http_subranges is {subranges}, expected at least 1.")
    _tell_what_has_no_effect(location, storage_options)
    # Imported here: a local dataset needs neither fsspec's file systems nor an HTTP client.
    if location.kind == "local":
        from lrstream.storage.local import LocalStore

        return LocalStore(location)
    if location.kind == "fsspec":
        from lrstream.storage.fsspec_store import FsspecStore

        return FsspecStore(location, storage_options=storage_options)
    if location.kind == "bucket":
        from lrstream.storage.bucket_store import BucketStore

        return BucketStore(location, connections=connections, subranges=subranges)
    from lrstream.storage.hub_pin import pin_location
    from lrstream.storage.hub_store import HubStore

    return HubStore(pin_location(location), connections=connections, subranges=subranges)


def _tell_what_has_no_effect(location: Location, storage_options: Mapping[str, Any] | None) -> None:
    """Arguments that another kind of storage would heed are no mistake, but must not be silent either."""
    if storage_options and location.kind != "fsspec":
        where = (
            "a local directory" if location.kind == "local" else "on the Hub, which takes a token (HF_TOKEN)"
        )
        logger.warning(
            "storage_options (%s) have no effect: %s is %s.", ", ".join(storage_options), location, where
        )
    if location.revision is not None and location.kind in ("local", "fsspec"):
        logger.warning(
            "revision=%r is a mere name here: %s has no revisions, its files are read as they are.",
            location.revision,
            location,
        )
