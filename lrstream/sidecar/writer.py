"""Writing a sidecar archive while its sources finish in any order (SC-1, SC-3).

A finished source is compressed by the thread that parsed it (`encode_source`) and handed over
(`ArchiveWriter.add`). In the archive sources stand in sorted order, so that equal content gives
equal bytes; those that finish early wait until their turn, a few of them in memory and all others on disk.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from lrstream.errors import LimitError, SidecarError
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.install import PendingFile, scratch_file, storage_errors
from lrstream.sidecar.manifest import manifest_chunks, parse_entry, source_entry
from lrstream.sidecar.members import (
    MANIFEST_MEMBER,
    bytes_scalar_header,
    check_samples,
    deflate_source,
    inflate_source,
)
from lrstream.sidecar.zip_stream import DeflatedMember, ZipStream

__all__ = ["ArchiveWriter", "EncodedSource", "decode_source", "encode_source"]

# As much as this of what finishes early waits in memory: sources that overtake each other by a few are the
# rule, and writing them twice takes longer than all else that is done with them here.
_MOST_HELD_BYTES = 4 << 20
_OBJECT_BYTES = 2048  # of a source, beside its content
_MAX_MANIFEST_BYTES = 2**31 - 1  # width of numpy's fixed-size bytes type


@dataclass(frozen=True, slots=True)
class EncodedSource:
    """A finished source in the form it takes in the archive.

    Attributes:
        number: Its place among the sorted sources.
        file_path: Its path, for messages.
        file_size: Its size in bytes.
        num_samples: Coded pictures in it.
        entry: Its element of the manifest, UTF-8 JSON.
        members: Its compressed arrays.
    """

    number: int
    file_path: str
    file_size: int
    num_samples: int
    entry: bytes
    members: tuple[DeflatedMember, ...]


def encode_source(number: int, track: TrackIndex) -> EncodedSource:
    """Check and compress one source; this is the expensive part, and runs in any thread.

    Raises:
        SidecarError: The record could not be read back (a fault of whoever made it).
    """
    check_samples(track.samples, track.file_path, track.file_size)
    return EncodedSource(
        number,
        track.file_path,
        track.file_size,
        track.samples.num_samples,
        source_entry(track),
        tuple(deflate_source(number, track.samples)),
    )


def decode_source(source: EncodedSource) -> TrackIndex:
    """The inverse of `encode_source`, with the same checks.

    Raises:
        SidecarError: It is not what `encode_source` makes.
    """
    scalars = parse_entry(source.file_path, json.loads(source.entry))
    samples = inflate_source(source.number, source.members, source.file_path, source.file_size)
    return scalars.with_samples(samples)


class ArchiveWriter:
    """Builds an archive beside `destination` and installs it when complete.

    Use as a context manager: leaving it without `install` removes every trace. `add` may be called
    from several threads.

    Args:
        destination: Path of the finished archive.
        identity: Identity of the archive; its source files fix the order. Sizes that are not known
            yet are taken from the sources.
        comment: Comment of the ZIP file, which no reader of the format looks at.
    """

    def __init__(self, destination: Path, identity: SidecarIdentity, *, comment: bytes = b"") -> None:
        self._identity = identity
        self._comment = comment
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._next = 0
        # By number, sources whose turn has not come: themselves, or where they lie in the spool.
        self._early: dict[int, EncodedSource | tuple[int, int]] = {}
        self._held_bytes = 0
        self._num_spooled = 0
        self._complete = True
        self._entry_lengths: list[int] = []
        with contextlib.ExitStack() as stack, storage_errors(destination):
            self._pending = stack.enter_context(PendingFile(destination))
            directory = destination.parent
            self._spool = stack.enter_context(scratch_file(directory))
            self._entries = stack.enter_context(scratch_file(directory))
            self._zip = ZipStream(self._pending.file, stack.enter_context(scratch_file(directory)))
            self._resources = stack.pop_all()

    @property
    def destination(self) -> Path:
        """Path of the finished archive."""
        return self._pending.destination

    def add(self, source: EncodedSource) -> None:
        """Write one finished source to disk.

        Raises:
            DiskFullError: No space is left.
            SidecarError: The source does not belong to this archive, or was added before.
        """
        size = sum(len(member.data) for member in source.members)
        with self._lock, storage_errors(self.destination, needed_bytes=size):
            self._admit(source)
            # Until this source is wholly written the archive must not be installed.
            self._complete = False
            if source.number != self._next:
                self._set_aside(source)
            else:
                self._append(source)
                while self._next in self._early:
                    self._append(self._take_back(self._next))
            self._complete = True

    def install(self) -> SidecarIdentity:
        """Complete the archive and install it under its name.

        Returns:
            The identity as recorded, with every size.

        Raises:
            SidecarError: Sources are missing.
            DiskFullError: No space is left.
        """
        self._require_complete()
        missing = [path for path in self._identity.paths if path not in self._sizes]
        if missing:
            raise SidecarError(
                f"{len(missing)} of {len(self._identity.paths)} source files were not added, "
                f"for example {missing[0]}."
            )
        identity = self._identity.with_sizes(self._sizes)
        with self._lock, storage_errors(self.destination, needed_bytes=self._entries.tell()):
            self._write_manifest(identity)
            self._zip.finish(self._comment)
        self._pending.install()
        return identity

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._complete = False
            self._resources.close()

    def _admit(self, source: EncodedSource) -> None:
        self._require_complete()
        files = self._identity.source_files
        if not 0 <= source.number < len(files) or files[source.number].path != source.file_path:
            raise SidecarError(f"{source.file_path} is not source {source.number} of this sidecar.")
        expected = files[source.number].size
        if expected is not None and expected != source.file_size:
            raise SidecarError(
                f"{source.file_path} has {source.file_size} bytes, but {expected} when the build began.",
                hint="Stop whatever writes the dataset, then build again.",
                file_path=source.file_path,
            )
        if source.file_path in self._sizes:
            raise SidecarError(f"{source.file_path} was added twice.")
        self._sizes[source.file_path] = source.file_size

    def _require_complete(self) -> None:
        if not self._complete:
            raise SidecarError(f"Writing {self.destination} has failed before; it cannot be continued.")

    def _append(self, source: EncodedSource) -> None:
        self._zip.append(source.members)
        self._entries.write(source.entry)
        self._entry_lengths.append(len(source.entry))
        self._next += 1

    def _set_aside(self, source: EncodedSource) -> None:
        size = _held_bytes(source)
        if self._held_bytes + size <= _MOST_HELD_BYTES:
            self._held_bytes += size
            self._early[source.number] = source
            return
        if not self._num_spooled:
            self._spool.seek(0)
            self._spool.truncate()
        start = self._spool.seek(0, 2)
        # Our own unnamed file, which nobody else can have written: unpickling it is safe.
        self._spool.write(pickle.dumps(source, pickle.HIGHEST_PROTOCOL))
        self._num_spooled += 1
        self._early[source.number] = (start, self._spool.tell() - start)

    def _take_back(self, number: int) -> EncodedSource:
        place = self._early.pop(number)
        if isinstance(place, EncodedSource):
            self._held_bytes -= _held_bytes(place)
            return place
        start, length = place
        self._spool.seek(start)
        source = pickle.loads(self._spool.read(length))
        assert isinstance(source, EncodedSource)
        self._num_spooled -= 1
        return source

    def _write_manifest(self, identity: SidecarIdentity) -> None:
        total = sum(len(chunk) for chunk in manifest_chunks(identity, self._stored_entries()))
        if total > _MAX_MANIFEST_BYTES:
            raise LimitError(
                f"The manifest of {len(identity.paths)} source files takes {total} bytes, "
                f"more than the format can hold ({_MAX_MANIFEST_BYTES}).",
                hint="Pack the dataset's episodes into fewer video files.",
            )
        chunks = manifest_chunks(identity, self._stored_entries())
        self._zip.append_streamed(MANIFEST_MEMBER, _prefixed(bytes_scalar_header(total), chunks))

    def _stored_entries(self) -> Iterator[bytes]:
        self._entries.seek(0)
        for length in self._entry_lengths:
            yield self._entries.read(length)


def _held_bytes(source: EncodedSource) -> int:
    return sum(len(member.data) for member in source.members) + len(source.entry) + _OBJECT_BYTES


def _prefixed(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
