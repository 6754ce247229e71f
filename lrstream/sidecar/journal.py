"""What an unfinished build has finished: records of single sources, so that it need not begin again (SC-13).

The journal ``<archive>.journal`` lies beside the archive that is being built and is removed when that is
installed. It is a sequence of zstandard frames, each with a checksum of its content and each behind a
skippable frame that tells its length, so that ``zstd -t`` can check the file as it is:

    header    JSON: format, data root
    record    JSON (fingerprint, lengths, the source's element of the manifest), then the six arrays
    ...

A frame is written by one `write` at the end of the file and synced within a second. Whatever ends the
process or the machine, the file is a run of good frames followed by at most a piece that is none: a torn
frame, or zeros. Reading stops there, and writing goes on from there.

A record is used again only where the content is known to be the same: the same path, size and fingerprint
under the same root, or a root that is pinned to a commit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from lrstream.errors import SidecarError
from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.sidecar.appended import AppendedFile
from lrstream.sidecar.finished import Record
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from lrstream.sidecar.install import storage_errors
from lrstream.sidecar.manifest import parse_entry, source_entry
from lrstream.sidecar.members import ARRAY_NAMES, MAX_SAMPLES, check_samples

__all__ = ["JOURNAL_SUFFIX", "BuildJournal", "JournalRecords", "journal_path", "pack_record"]

logger = logging.getLogger(__name__)

JOURNAL_SUFFIX = ".journal"

_FORMAT = 1
# Of sample tables this makes no more bytes than zstandard's default, 3, in two thirds of the time.
_LEVEL = 1
_PREFIX = struct.Struct("<III")
_SKIPPABLE_MAGIC = 0x184D2A5C  # one of the sixteen that every zstandard reader passes over
_LENGTHS = struct.Struct("<I")
# Sources beyond this size are parsed again rather than kept; it bounds what reading may allocate.
_MAX_RECORD_BYTES = 1 << 30


def journal_path(destination: Path) -> Path:
    """Where the journal of a build of `destination` lies."""
    return destination.with_name(destination.name + JOURNAL_SUFFIX)


class _Place(NamedTuple):
    """One record: where its frame lies, and what it is a record of."""

    start: int
    length: int
    size: int
    fingerprint: str | None


class JournalRecords:
    """The records of a journal, for reading. Thread-safe.

    Reads and checks the whole file on opening; a damaged or torn frame ends it.

    Args:
        path: The journal; need not exist.
        data_root: Root of the dataset that is wanted; a journal of another root has no records here.

    Attributes:
        good_bytes: Length of the part that can be read and belongs to this root.
    """

    def __init__(self, path: Path, data_root: str) -> None:
        self.path = path
        self.good_bytes = 0
        self._places: dict[str, _Place] = {}
        self._descriptor: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        if self._descriptor is not None:
            try:
                self._scan(data_root)
            except BaseException:
                self.close()
                raise

    def __len__(self) -> int:
        return len(self._places)

    def find(self, source: SourceFile, fingerprint: str | None, *, is_pinned: bool) -> Record | None:
        """How to read the record of a source; None if there is none, or its content may be another now."""
        place = self._places.get(source.path)
        if place is None or place.fingerprint != fingerprint or source.size not in (None, place.size):
            return None
        if fingerprint is None and not is_pinned:
            return None
        return functools.partial(self._read, source.path, place)

    def close(self) -> None:
        """Release the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self, path: str, place: _Place) -> TrackIndex | None:
        try:
            return _decode(self._frame(place.start, place.length), path)
        except (SidecarError, zstandard.ZstdError, ValueError, OSError) as error:
            logger.warning("The record of %s in %s is not used: %s", path, self.path, error)
            return None

    def _scan(self, data_root: str) -> None:
        frames = self._frames()
        header = next(frames, None)
        if header is None or _load(header[2]) != {"format": _FORMAT, "data_root": data_root}:
            return
        self.good_bytes = header[0] + header[1]
        for start, length, content in frames:
            head = _head(content)
            if head is None:
                return
            self.good_bytes = start + length
            self._places[head["path"]] = _Place(start, length, head["size"], head["fingerprint"])

    def _frames(self) -> Iterator[tuple[int, int, bytes]]:
        """Start and length of each frame with its prefix, and its content; ends at the first bad one."""
        assert self._descriptor is not None
        size, at = os.fstat(self._descriptor).st_size, 0
        while at + _PREFIX.size <= size:
            magic, four, length = _PREFIX.unpack(os.pread(self._descriptor, _PREFIX.size, at))
            if magic != _SKIPPABLE_MAGIC or four != 4 or at + _PREFIX.size + length > size:
                return
            try:
                content = self._frame(at, _PREFIX.size + length)
            except (zstandard.ZstdError, ValueError):
                return
            yield at, _PREFIX.size + length, content
            at += _PREFIX.size + length

    def _frame(self, start: int, length: int) -> bytes:
        assert self._descriptor is not None
        packed = os.pread(self._descriptor, length - _PREFIX.size, start + _PREFIX.size)
        parameters = zstandard.get_frame_parameters(packed)
        if parameters.content_size > _MAX_RECORD_BYTES or not parameters.has_checksum:
            raise ValueError("the frame is none of a journal")
        return zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)


class BuildJournal:
    """The journal of one build, continued where an earlier one stopped. Thread-safe.

    Used under the lock of the archive. Nothing is written before the first record.

    Args:
        destination: The archive that is being built.
        identity: What it is built for.

    Attributes:
        path: The journal.
        num_found: Records of an earlier build that can be read.
    """

    def __init__(self, destination: Path, identity: SidecarIdentity) -> None:
        self.path = journal_path(destination)
        self._identity = identity
        with storage_errors(self.path):
            self._records = JournalRecords(self.path, identity.data_root)
        self.num_found = len(self._records)
        self._lock = threading.Lock()
        header = {"format": _FORMAT, "data_root": identity.data_root}
        # A journal of anything else begins anew.
        self._file = AppendedFile(self.path, self._records.good_bytes, _pack(json.dumps(header).encode()))
        self._num_kept = 0

    @property
    def num_records(self) -> int:
        """Sources that a build after this one would not have to read."""
        return self.num_found + self._num_kept

    def find(self, source: SourceFile, fingerprint: str | None) -> Record | None:
        """How to read this source's record of the interrupted build, if its content is the same."""
        return self._records.find(source, fingerprint, is_pinned=self._identity.is_pinned)

    def keep(self, track: TrackIndex, fingerprint: str | None) -> None:
        """Append a record that has just been made.

        Raises:
            DiskFullError: No space is left.
        """
        if fingerprint is None and not self._identity.is_pinned:
            return  # nobody could ever tell whether it is still right
        frame = pack_record(track, fingerprint)
        if frame is not None:
            self.keep_packed(frame, fingerprint)

    def keep_packed(self, frame: bytes, fingerprint: str | None) -> None:
        """Append a record that `pack_record` has made, here or in another process of this release.

        Raises:
            DiskFullError: No space is left.
        """
        if fingerprint is None and not self._identity.is_pinned:
            return
        with self._lock, storage_errors(self.path, needed_bytes=len(frame)):
            self._file.append(frame)
            self._num_kept += 1
        # Others may append meanwhile: a disk can take longer for this than a build for many sources.
        with storage_errors(self.path):
            self._file.sync_if_due()

    def close(self) -> None:
        """Make what is in it durable, and release the file."""
        with self._lock:
            self._file.close()
            self._records.close()

    def discard(self) -> None:
        """Close and remove it: the archive is there, or nobody wants to continue."""
        self.close()
        self.path.unlink(missing_ok=True)


def pack_record(track: TrackIndex, fingerprint: str | None) -> bytes | None:
    """A record as `BuildJournal.keep_packed` takes it; None if it is too large to be kept."""
    content = _encode(track, fingerprint)
    return None if len(content) > _MAX_RECORD_BYTES else _pack(content)


def _pack(content: bytes) -> bytes:
    packed = zstandard.ZstdCompressor(_LEVEL, write_checksum=True, write_content_size=True).compress(content)
    return _PREFIX.pack(_SKIPPABLE_MAGIC, 4, len(packed)) + packed


def _encode(track: TrackIndex, fingerprint: str | None) -> bytes:
    samples = track.samples
    facts = json.dumps(
        {
            "path": track.file_path,
            "size": track.file_size,
            "fingerprint": fingerprint,
            "num_samples": samples.num_samples,
            "num_sync": len(samples.sync_samples),
        }
    ).encode()
    # The entry is JSON already.
    head = b'%b, "entry": %b}' % (facts[:-1], source_entry(track))
    parts: list[bytes | memoryview] = [_LENGTHS.pack(len(head)), head]
    for attribute, dtype in ARRAY_NAMES.values():
        parts.append(np.ascontiguousarray(getattr(samples, attribute), dtype=dtype).data)
    return b"".join(parts)


def _head(content: bytes) -> dict[str, Any] | None:
    """The JSON part of a record, None if this is no record."""
    if len(content) < _LENGTHS.size:
        return None
    (length,) = _LENGTHS.unpack_from(content)
    head = _load(content[_LENGTHS.size : _LENGTHS.size + length])
    kinds = {"path": str, "size": int, "num_samples": int, "num_sync": int}
    if not isinstance(head, dict) or any(type(head.get(name)) is not kind for name, kind in kinds.items()):
        return None
    if head.get("fingerprint") is not None and not isinstance(head["fingerprint"], str):
        return None
    count, num_sync = head["num_samples"], head["num_sync"]
    if not 1 <= num_sync <= count <= MAX_SAMPLES:
        return None
    if len(content) != _LENGTHS.size + length + 8 * (5 * count + num_sync):
        return None
    return head


def _decode(content: bytes, path: str) -> TrackIndex:
    """The track of a record, checked like one of an archive."""
    head = _head(content)
    if head is None or head["path"] != path:
        raise SidecarError(f"The journal's record of {path} contradicts itself.")
    at = _LENGTHS.size + _LENGTHS.unpack_from(content)[0]
    arrays = {}
    for name, (attribute, dtype) in ARRAY_NAMES.items():
        count = head["num_sync"] if name == "sync_samples" else head["num_samples"]
        array = np.frombuffer(content, dtype, count, at)
        arrays[attribute] = array.astype(np.dtype(dtype).newbyteorder("="))
        at += array.nbytes
    track = parse_entry(path, head.get("entry")).with_samples(SampleTable(**arrays))
    check_samples(track.samples, path, track.file_size)
    if track.file_size != head["size"]:
        raise SidecarError(f"The journal's record of {path} contradicts itself.")
    return track


def _load(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
