"""Opening the index of a sidecar: mapped where possible, and records only for the files asked for.

Opening maps a file and reads its footer, whatever the number of source files. A record is looked
up by binary search and decoded when asked for (SC-10); all processes of a machine share the mapped
pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from lrstream.errors import AccessError, LrstreamError, NotFoundError, SidecarError
from lrstream.index.convert import convert
from lrstream.index.format import FORMAT_VERSION, SCHEMA, identity_checksum, track_from_row
from lrstream.index.from_archive import ArchiveIndex
from lrstream.index.generation import IndexDirectory, content_key
from lrstream.index.mapping import IndexMapping
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from lrstream.sidecar.install import reclaim_leftovers
from lrstream.sidecar.lock import ProcessLock
from lrstream.storage.home import lerobot_home
from lrstream.storage.per_process import PerProcess

__all__ = ["ArchiveIndex", "MappedIndex", "SampleIndex", "find_index", "open_index"]

logger = logging.getLogger(__name__)

_METADATA = frozenset(
    f"lrstream.{name}"
    for name in ("format", "key", "num_files", "repo_id", "revision", "data_root", "identity_checksum")
)

_REMOVED = "It was removed: open the dataset again, and it is made again from the sidecar."
_REMAKE = "Remove this file; it will be made again from the sidecar."

Result = TypeVar("Result")


class SampleIndex(Protocol):
    """Sample tables by source file. Thread-safe and picklable; opened anew in each process."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all source files, sorted."""
        ...

    @property
    def identity(self) -> SidecarIdentity:
        """What the index was built from."""
        ...

    def track(self, file_path: str) -> TrackIndex:
        """The record of one source file, arrays read-only.

        Cheap to ask for again; keep spans rather than records. Raises NotFoundError and SidecarError.
        """
        ...

    def fingerprint(self, file_path: str) -> str | None:
        """Fingerprint of one source file when it was indexed; None where the storage needs none."""
        ...

    def close(self) -> None:
        """Release this process's handle; a later call opens it again."""
        ...


class HasPath(Protocol):
    """Anything that says where an archive is, such as a resolved sidecar."""

    @property
    def path(self) -> Path: ...


class MappedIndex:
    """A mapped index file. Thread-safe, picklable (by path), independent in each process.

    Args:
        path: The Arrow file of one generation.

    Raises:
        NotFoundError: There is no such file.
        SidecarError: It is no mapped index of this format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping: PerProcess[IndexMapping] = PerProcess(IndexMapping)
        mapping = self._mapping.get()
        with mapping.lock:
            schema = mapping.open(path).schema
        metadata = {
            key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for key, value in (schema.metadata or {}).items()
        }
        if (
            metadata.get("lrstream.format") != str(FORMAT_VERSION)
            or not schema.equals(SCHEMA)
            or not metadata.keys() >= _METADATA
            or not metadata["lrstream.num_files"].isdecimal()
        ):
            raise SidecarError(f"{path} is not a mapped index of format {FORMAT_VERSION}.", path=str(path))
        self._metadata = metadata

    @property
    def key(self) -> str:
        """Content key of the archive that this index was made from."""
        return str(self._metadata["lrstream.key"])

    def __len__(self) -> int:
        """Number of source files."""
        return int(self._metadata["lrstream.num_files"])

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all source files, sorted (reads the path column)."""
        return tuple(self._column("path"))

    @property
    def identity(self) -> SidecarIdentity:
        """Identity of the sidecar that this index was made from (reads three columns)."""
        paths, fingerprints = self._column("path"), self._column("fingerprint")
        files = map(SourceFile, paths, self._column("file_size"))
        identity = SidecarIdentity(
            self._metadata["lrstream.repo_id"],
            self._metadata["lrstream.revision"],
            self._metadata["lrstream.data_root"],
            tuple(files),
            {path: text for path, text in zip(paths, fingerprints, strict=True) if text is not None},
        )
        if identity_checksum(identity) != self._metadata["lrstream.identity_checksum"]:
            raise self._damaged("its identity does not match its checksum.")
        return identity

    def fingerprint(self, file_path: str) -> str | None:
        """Fingerprint of one source file when it was indexed; None where the storage needs none."""
        mapping = self._mapping.get()
        with mapping.lock:
            return self._guarded(partial(self._read_fingerprint, mapping, file_path))

    def track(self, file_path: str) -> TrackIndex:
        """The record of one source file; arrays are int64 and float64, read-only.

        Raises:
            NotFoundError: The index does not cover this file.
            SidecarError: The index is damaged.
        """
        mapping = self._mapping.get()
        with mapping.lock:
            record = mapping.get(file_path)
            if record is not None:
                return record
            record = self._guarded(partial(self._read, mapping, file_path))
            if record is not None:
                mapping.put(file_path, record)
                return record
        self.identity  # noqa: B018 - a damaged path is not found either, and must not look like a mistake
        raise NotFoundError(
            f"{file_path} is not in the index {self.path} ({len(self)} source files).",
            hint="The sidecar belongs to another selection or revision of the dataset.",
            file_path=file_path,
        )

    def close(self) -> None:
        """Unmap the file in this process, as far as no array still refers to it."""
        self._mapping.drop()

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedIndex, (self.path,)

    def __repr__(self) -> str:
        return f"MappedIndex({str(self.path)!r}, {len(self)} files)"

    def _read(self, mapping: IndexMapping, file_path: str) -> TrackIndex | None:
        mapping.open(self.path)
        found = mapping.find(file_path)
        if found is None:
            return None
        batch, place = found
        return track_from_row(batch.row(place))

    def _read_fingerprint(self, mapping: IndexMapping, file_path: str) -> str | None:
        mapping.open(self.path)
        found = mapping.find(file_path)
        if found is None:
            return None
        batch, place = found
        return batch.fingerprint(place)

    def _column(self, name: str) -> list[Any]:
        mapping = self._mapping.get()
        with mapping.lock:
            reader = mapping.open(self.path)

            def read() -> list[Any]:
                values: list[Any] = []
                for batch in range(reader.num_record_batches):
                    values += mapping.batch(batch).column(name)
                return values

            return self._guarded(read)

    def _guarded(self, read: Callable[[], Result]) -> Result:
        try:
            return read()
        except (pa.ArrowException, OSError, ValueError, IndexError, OverflowError) as error:
            if isinstance(error, LrstreamError) and error.hint is not None:
                raise  # says by itself what to do; not about damage
            if getattr(error, "errno", None) or getattr(error.__cause__, "errno", None):
                # The system refused (too many open files, say): that is no damage, the file stays.
                # Arrow raises OSError for damaged content, too, but without a number.
                raise SidecarError(
                    f"The mapped index {self.path} cannot be read: {error}", path=str(self.path)
                ) from error
            raise self._damaged(str(error)) from error

    def _damaged(self, what: str) -> SidecarError:
        """The error for a damaged file, which is taken away so that it is not found damaged again."""
        try:
            self.path.unlink(missing_ok=True)
            hint = _REMOVED
        except OSError:
            hint = _REMAKE
        return SidecarError(
            f"The mapped index {self.path} is damaged: {what}", hint=hint, path=str(self.path)
        )


def find_index(archive: Path, *, home: Path | None = None) -> MappedIndex | None:
    """The mapped index of an archive as it is now, if one exists already; writes nothing."""
    generation = IndexDirectory(archive, home or lerobot_home()).current()
    return None if generation is None else _open_if_valid(generation)


def open_index(
    archive: Path | HasPath, *, home: Path | None = None, lock_timeout_s: float = 1800.0
) -> MappedIndex | ArchiveIndex:
    """The index of a sidecar archive, converted first where that has not been done (SC-9).

    Args:
        archive: The archive, or a resolved sidecar.
        home: LeRobot's home directory; from the environment when None.
        lock_timeout_s: How long to wait for another process that is converting the same archive.

    Returns:
        The mapped index; the archive itself behind the same interface where no index can be written.

    Raises:
        NotFoundError: There is no such archive.
        SidecarError: The archive is invalid.
        SidecarLockTimeoutError: Another process held the lock all the time.
        DiskFullError: No space is left for the index.
    """
    path = archive if isinstance(archive, Path) else archive.path
    directory = IndexDirectory(path, home or lerobot_home())
    found = _current(directory)
    if found is not None:
        return found
    with ArchiveReader(path) as reader:
        key = content_key(reader)
        destination = directory.generation(key)
        # Taken before conversion: if the archive is replaced meanwhile, the note matches nothing.
        state = directory.archive_state()
        try:
            with ProcessLock(directory.lock_path) as lock:
                index = lock.acquire(lock_timeout_s, ready=lambda: _current(directory))
                if index is not None:
                    return index
                index = _open_if_valid(destination)
                if index is None:
                    reclaim_leftovers(destination)
                    convert(reader, destination, key=key, progress=lock.progress)
                    index = MappedIndex(destination)
                directory.note_current(key, state)
                return index
        except AccessError as error:
            index = _open_if_valid(destination)
            if index is not None:
                return index
            logger.warning("Reading the sidecar %s without a mapped index: %s", path, error)
            return ArchiveIndex(path)


def _current(directory: IndexDirectory) -> MappedIndex | None:
    generation = directory.current()
    return None if generation is None else _open_if_valid(generation)


def _open_if_valid(generation: Path) -> MappedIndex | None:
    """The index, or None where it is absent or damaged (and will be made again)."""
    try:
        return MappedIndex(generation)
    except NotFoundError:
        return None
    except SidecarError as error:
        logger.warning("%s It will be made again.", error)
        return None
