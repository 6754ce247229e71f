"""The index of a sidecar straight from its archive, where no mapped index can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lrstream.index.records import RecordCache
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.storage.per_process import PerProcess

__all__ = ["ArchiveIndex"]


class _OpenArchive(RecordCache):
    """The archive in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.reader: ArchiveReader | None = None


class ArchiveIndex:
    """The same interface over the archive itself, for caches where nothing can be written.

    Costs memory in each process for the manifest of all source files. Thread-safe, picklable.

    Args:
        path: The sidecar archive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive: PerProcess[_OpenArchive] = PerProcess(_OpenArchive)
        self.paths  # noqa: B018 - opens and checks it now rather than at the first sample

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all source files, sorted."""
        return self.identity.paths

    @property
    def identity(self) -> SidecarIdentity:
        """What the archive was built from."""
        archive = self._archive.get()
        with archive.lock:
            return self._reader(archive).identity

    def track(self, file_path: str) -> TrackIndex:
        """The record of one source file, arrays read-only."""
        archive = self._archive.get()
        with archive.lock:
            record = archive.get(file_path)
            if record is None:
                record = self._reader(archive).track(file_path)
                archive.put(file_path, record)
            return record

    def fingerprint(self, file_path: str) -> str | None:
        """Fingerprint of one source file when it was indexed; None where the storage needs none."""
        return self.identity.source_fingerprints.get(file_path)

    def close(self) -> None:
        """Close the archive in this process."""
        archive = self._archive.drop()
        if archive is not None and archive.reader is not None:
            archive.reader.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return ArchiveIndex, (self.path,)

    def _reader(self, archive: _OpenArchive) -> ArchiveReader:
        if archive.reader is None:
            archive.reader = ArchiveReader(self.path)
        return archive.reader
