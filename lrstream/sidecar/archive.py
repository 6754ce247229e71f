"""The sidecar archive, schema 3: reading with every claim checked, writing source by source.

Upstream's tools and `numpy.load` read what is written here, and the reverse (SC-2; formats.md,
section 1 is the specification).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import AccessError, NotFoundError, SidecarError
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.manifest import REBUILD_HINT, TrackScalars, parse_manifest
from lrstream.sidecar.members import (
    ARRAY_NAMES,
    MANIFEST_MEMBER,
    MANIFEST_SLOT,
    read_header,
    read_samples,
    slot_name,
    slot_of,
    source_slots,
)
from lrstream.sidecar.writer import ArchiveWriter, encode_source
from lrstream.sidecar.zip_directory import BadDirectoryError, Member, ZipMembers

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

    Memory follows the number of sources: about a kilobyte for each, and once more while the manifest is
    parsed.

    Thread-safe: any number of threads read at once. Not for use across a fork: open it in the process
    that reads.

    Args:
        path: The ``.npz`` file.

    Raises:
        NotFoundError: There is no such file.
        AccessError: It may not be read.
        SidecarError: It is no valid schema 3 archive.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._members = self._open()
        try:
            with self._located():
                self._manifest = parse_manifest(self._manifest_text())
                self._rows = self._checked_rows()
        except BaseException:
            self._members.close()
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
        return self._members.directory.comment

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

    def track_at(self, number: int) -> TrackIndex:
        """The record of the source file at a place of `paths`.

        Raises:
            SidecarError: Its arrays are invalid.
        """
        return self._read(number)

    def tracks(self) -> Iterator[TrackIndex]:
        """The records of all source files in the order of `paths`, one in memory at a time."""
        for number in range(len(self.paths)):
            yield self._read(number)

    def array_bytes(self) -> NDArray[np.int64]:
        """Bytes that the arrays of each source take in memory, int64[n], known without reading them."""
        sizes = self._members.directory.sizes[self._rows[1:]]
        weights: NDArray[np.int64] = sizes.reshape(-1, len(ARRAY_NAMES)).sum(axis=1)
        return weights

    def verify(self) -> int:
        """Read and check every array; returns the number of samples in all files.

        Raises:
            SidecarError: Some array is invalid.
        """
        return sum(track.samples.num_samples for track in self.tracks())

    def content_digest(self) -> str:
        """SHA-256 over name, sizes, place and CRC-32 of every member, in hex digits.

        Equal for two archives of equal content.
        """
        return self._members.digest(slot_name)

    def directory_listing(self) -> bytes:
        """What `content_digest` is made from, one line for each member."""
        return b"".join(self._members.listing(slot_name))

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        self._members.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> ZipMembers:
        try:
            return ZipMembers(self.path, slot_of)
        except FileNotFoundError as error:
            raise NotFoundError(f"There is no sidecar at {self.path}.", path=str(self.path)) from error
        except PermissionError as error:
            raise AccessError(f"The sidecar {self.path} may not be read.", path=str(self.path)) from error
        except (BadDirectoryError, OSError) as error:
            reason = error.message if isinstance(error, BadDirectoryError) else str(error)
            raise SidecarError(
                f"The sidecar {self.path} is not a complete ZIP archive: {reason}.",
                hint=REBUILD_HINT,
                path=str(self.path),
            ) from error

    def _manifest_text(self) -> str:
        rows = np.flatnonzero(self._members.directory.slots == MANIFEST_SLOT)
        if len(rows) == 0:
            raise SidecarError(f"The sidecar has no member {MANIFEST_MEMBER!r}.", hint=REBUILD_HINT)
        member = self._members.directory.member(int(rows[0]), MANIFEST_MEMBER)
        header = read_header(self._members, member)
        if header.shape != () or header.dtype.kind != "S":
            raise SidecarError(
                f"manifest_json is {header.dtype} with shape {header.shape}, "
                "expected a zero-dimensional bytes array.",
                hint=REBUILD_HINT,
            )
        data = memoryview(self._members.read(member))[header.data_start :]
        try:
            # numpy pads fixed-width bytes with NUL, which JSON text never ends with.
            return str(data, "utf-8").rstrip("\0")
        except ValueError as error:
            raise SidecarError(
                f"The manifest of the sidecar is not valid JSON: {error}.", hint=REBUILD_HINT
            ) from error

    def _read(self, number: int) -> TrackIndex:
        scalars = self._manifest.tracks[number]
        with self._located():
            samples = read_samples(self._members, self._member, number, scalars.file_path, scalars.file_size)
        return scalars.with_samples(samples)

    def _member(self, slot: int) -> Member:
        return self._members.directory.member(int(self._rows[slot]), slot_name(slot))

    def _checked_rows(self) -> NDArray[np.int64]:
        """Place in the directory of each member, after checking that each of the format is there once."""
        slots = self._members.directory.slots
        expected = len(self.paths) * len(ARRAY_NAMES) + 1
        known = np.unique(slots[slots >= 0])
        if len(slots) != expected or len(known) + int((slots < 0).sum()) != expected:
            raise SidecarError(
                f"{len(self.paths)} source files need {expected} members, but it has {len(slots)} "
                f"({len(known)} different ones that are known).",
                hint=REBUILD_HINT,
            )
        wanted = np.arange(expected)
        if not np.array_equal(known, wanted):
            slot = int(np.setdiff1d(wanted, known)[0])
            number, name = (slot - 1) // len(ARRAY_NAMES), slot_name(slot)
            assert slot in source_slots(number)
            raise SidecarError(f"The array {name} of {self.paths[number]} is missing.", hint=REBUILD_HINT)
        return np.argsort(slots, kind="stable")

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
