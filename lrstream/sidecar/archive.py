"""The sidecar archive, schema 3: reading with every claim checked, writing source by source.

Upstream's tools and `numpy.load` read what is written here, and the reverse (SC-2; formats.md,
section 1 is the specification).
"""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from lrstream.errors import AccessError, NotFoundError, SidecarError
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.manifest import REBUILD_HINT, TrackScalars, parse_manifest
from lrstream.sidecar.members import (
    ARRAY_NAMES,
    MANIFEST_MEMBER,
    READ_ERRORS,
    member_name,
    read_header,
    read_member,
    read_samples,
)
from lrstream.sidecar.writer import ArchiveWriter, encode_source

__all__ = ["ArchiveReader", "ArchiveWriter", "write_archive"]


def write_archive(path: Path, identity: SidecarIdentity, tracks: Iterable[TrackIndex]) -> SidecarIdentity:
    """Write a whole archive atomically, from tracks in any order.

    Args:
        path: Where to install it.
        identity: Its identity; sizes may be unknown and are filled in from the tracks.
        tracks: One for each source file of `identity`.

    Returns:
        The identity as recorded, with every size.
    """
    numbers = {name: number for number, name in enumerate(identity.paths)}
    with ArchiveWriter(path, identity) as writer:
        for track in tracks:
            if track.file_path not in numbers:
                raise SidecarError(f"{track.file_path} is not a source file of this sidecar.")
            writer.add(encode_source(numbers[track.file_path], track))
        return writer.install()


class ArchiveReader:
    """An open sidecar archive, checked on opening; arrays are read and checked on demand.

    Opening checks the ZIP directory, the manifest, the identity and that exactly the members of
    the format are there. `track` and `tracks` check the arrays they read; `verify` reads them all.

    Thread-safe. Not for use across a fork: open it in the process that reads.

    Args:
        path: The ``.npz`` file.

    Raises:
        NotFoundError: There is no such file.
        AccessError: It may not be read.
        SidecarError: It is no valid schema 3 archive.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._zip = self._open()
        try:
            with self._located():
                header = read_header(self._zip, MANIFEST_MEMBER)
                if header.shape != () or header.dtype.kind != "S":
                    raise SidecarError(
                        f"manifest_json is {header.dtype} with shape {header.shape}, "
                        "expected a zero-dimensional bytes array.",
                        hint=REBUILD_HINT,
                    )
                # numpy pads fixed-width bytes with NUL, which JSON text never ends with.
                text = read_member(self._zip, MANIFEST_MEMBER)[header.data_start :].rstrip(b"\0")
                self._manifest = parse_manifest(text)
                self._check_members()
        except BaseException:
            self._zip.close()
            raise
        self._numbers = {name: number for number, name in enumerate(self.paths)}

    @property
    def identity(self) -> SidecarIdentity:
        """What the archive was built from."""
        return self._manifest.identity

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the source files, sorted."""
        return self._manifest.identity.paths

    @property
    def scalars(self) -> tuple[TrackScalars, ...]:
        """What is known of each track without reading an array, in the order of `paths`."""
        return self._manifest.tracks

    @property
    def comment(self) -> bytes:
        """Comment of the ZIP file; shards tell here what they are a part of (`lrstream.sidecar.shards`)."""
        return self._zip.comment

    def track(self, file_path: str) -> TrackIndex:
        """The record of one source file.

        Raises:
            NotFoundError: The archive does not cover this file.
            SidecarError: Its arrays are invalid.
        """
        number = self._numbers.get(file_path)
        if number is None:
            raise NotFoundError(
                f"{file_path} is not in the sidecar {self.path} ({len(self.paths)} source files).",
                file_path=file_path,
            )
        return self._read(number)

    def tracks(self) -> Iterator[TrackIndex]:
        """The records of all source files in the order of `paths`, one in memory at a time."""
        for number in range(len(self.paths)):
            yield self._read(number)

    def verify(self) -> int:
        """Read and check every array; returns the number of samples in all files.

        Raises:
            SidecarError: Some array is invalid.
        """
        return sum(track.samples.num_samples for track in self.tracks())

    def directory_listing(self) -> bytes:
        """Name, sizes, place and CRC-32 of every member: equal for two archives of equal content."""
        return "".join(
            f"{info.filename} {info.CRC} {info.file_size} {info.compress_size} {info.header_offset}\n"
            for info in self._zip.infolist()
        ).encode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        self._zip.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except FileNotFoundError as error:
            raise NotFoundError(f"There is no sidecar at {self.path}.", path=str(self.path)) from error
        except PermissionError as error:
            raise AccessError(f"The sidecar {self.path} may not be read.", path=str(self.path)) from error
        except READ_ERRORS as error:
            raise SidecarError(
                f"The sidecar {self.path} is not a complete ZIP archive: {error}.",
                hint=REBUILD_HINT,
                path=str(self.path),
            ) from error

    def _read(self, number: int) -> TrackIndex:
        scalars = self._manifest.tracks[number]
        # One handle, one position: readers take turns.
        with self._lock, self._located():
            samples = read_samples(self._zip, number, scalars.file_path, scalars.file_size)
        return scalars.with_samples(samples)

    def _check_members(self) -> None:
        """Exactly the members of the format, each once."""
        found = [info.filename for info in self._zip.infolist()]
        expected = len(self.paths) * len(ARRAY_NAMES) + 1
        if len(found) != expected or len(set(found)) != expected:
            raise SidecarError(
                f"{len(self.paths)} source files need {expected} members, but it has {len(found)} "
                f"({len(set(found))} different ones).",
                hint=REBUILD_HINT,
            )
        names = set(found)
        for number, path in enumerate(self.paths):
            for name in ARRAY_NAMES:
                if member_name(number, name) not in names:
                    raise SidecarError(f"The array {name} of {path} is missing.", hint=REBUILD_HINT)

    def _located(self) -> _Located:
        return _Located(self.path)


class _Located:
    """Adds the archive's path, and the remedy, to errors raised while reading it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, SidecarError) and "path" not in value.fields:
            raise SidecarError(
                f"Sidecar {self._path}: {value.message}",
                hint=value.hint or REBUILD_HINT,
                **{**value.fields, "path": str(self._path)},
            ) from value
