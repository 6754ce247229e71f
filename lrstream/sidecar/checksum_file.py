"""Checksums of payload: the optional companion of a sidecar, ``<sidecar>.checksums.arrow``.

A range of an MP4 file carries no checksum of its own, and a sidecar has no room for one. The companion
holds, for each episode and camera, the CRC-32 of the bytes that the loader fetches.

One Arrow IPC file, one row for each source file, sorted by path; lists have one element for each episode
interval in that file:

    path, file_size
    from_s, to_s              the interval of the episode metadata
    start_byte, stop_byte     the span that follows from it (MP-5)
    crc32                     of the bytes of the span (IEEE 802.3, as `zlib.crc32`)
    checksum                  CRC-32 of the other cells of the row

It says which sidecar it belongs to by the same facts that make a sidecar's identity, so that every sidecar
of the same snapshot shares it. Like the mapped index it is read by mapping, row by row.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lrstream.errors import LrstreamError, NotFoundError, SidecarError
from lrstream.sidecar.identity import SidecarIdentity, pinned_commit
from lrstream.sidecar.install import PendingFile, storage_errors
from lrstream.storage.failures import storage_error
from lrstream.storage.per_process import PerProcess

__all__ = [
    "CHECKSUMS_SUFFIX",
    "ChecksumFile",
    "FileChecksums",
    "checksums_path",
    "sidecar_of",
    "snapshot_key",
    "write_checksums",
]

logger = logging.getLogger(__name__)

CHECKSUMS_SUFFIX = ".checksums.arrow"

_FORMAT = 1
# Spans follow from intervals by the rule of `lrstream.mp4.span`. Should that ever change, checksums of the
# old spans say nothing about the new ones.
_SPAN_RULE = 1
_ALGORITHM = "crc-32"
_ARRAYS = {
    "from_s": pa.float64(),
    "to_s": pa.float64(),
    "start_byte": pa.int64(),
    "stop_byte": pa.int64(),
    "crc32": pa.uint32(),
}
_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("file_size", pa.int64(), nullable=False),
        *(pa.field(name, pa.list_(kind), nullable=False) for name, kind in _ARRAYS.items()),
        pa.field("checksum", pa.uint32(), nullable=False),
    ]
)
_PREFIX = "lrstream.checksums."
_FACTS = ("repo_id", "revision", "data_root", "sources")
_BATCH_ROWS = 4096
_BATCH_SPANS = 1 << 18
_KEPT_ROWS = 64

Result = TypeVar("Result")


def checksums_path(archive: Path) -> Path:
    """The companion of a sidecar archive; need not exist."""
    return archive.with_name(archive.name.removesuffix(".npz") + CHECKSUMS_SUFFIX)


def sidecar_of(companion: Path) -> Path:
    """The archive whose companion this is; need not exist."""
    return companion.with_name(companion.name.removesuffix(CHECKSUMS_SUFFIX) + ".npz")


@dataclass(frozen=True, slots=True, eq=False)
class FileChecksums:
    """Checksums of all intervals of one source file, in order of their spans.

    Attributes:
        path: The source file.
        file_size: Its size in bytes.
        from_s: float64[n], begin of each interval in the file's clock.
        to_s: float64[n], its end.
        start_byte: int64[n], ascending: first byte of its span.
        stop_byte: int64[n], end of the span, excluded.
        crc32: uint32[n], CRC-32 of the span's bytes.
    """

    path: str
    file_size: int
    from_s: NDArray[np.float64]
    to_s: NDArray[np.float64]
    start_byte: NDArray[np.int64]
    stop_byte: NDArray[np.int64]
    crc32: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.crc32)

    def find(self, start: int, stop: int) -> int | None:
        """CRC-32 of the span ``[start, stop)``, None if there is none of exactly these bytes."""
        at = int(np.searchsorted(self.start_byte, start))
        while at < len(self) and self.start_byte[at] == start:
            if self.stop_byte[at] == stop:
                return int(self.crc32[at])
            at += 1
        return None

    def covers(self, intervals: Iterable[tuple[float, float]]) -> bool:
        """Whether every one of the intervals, given bit for bit as in the metadata, has a checksum."""
        return set(intervals) <= set(zip(self.from_s.tolist(), self.to_s.tolist(), strict=True))

    def checksum(self) -> int:
        """CRC-32 of everything in this row."""
        crc = zlib.crc32(f"{self.path}\0{self.file_size}\0{len(self)}".encode("utf-8", "surrogatepass"))
        for name, kind in _ARRAYS.items():
            array = np.ascontiguousarray(getattr(self, name), dtype=kind.to_pandas_dtype())
            crc = zlib.crc32(array.data.cast("B") if len(array) else b"", crc)
        return crc


def snapshot_key(identity: SidecarIdentity) -> str:
    """SHA-256 of the source files with their sizes and fingerprints, in hex; sizes must be known."""
    parts = []
    for source in identity.source_files:
        parts += [source.path, str(source.size), identity.source_fingerprints.get(source.path, "")]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def write_checksums(destination: Path, identity: SidecarIdentity, files: Iterable[FileChecksums]) -> None:
    """Install a companion atomically.

    Args:
        destination: Its path.
        identity: Identity of the sidecar, with every size.
        files: Rows in any order.

    Raises:
        DiskFullError: No space is left; nothing is left behind.
    """
    rows = sorted(files, key=lambda row: row.path)
    facts = {
        "repo_id": identity.repo_id,
        "revision": identity.revision,
        "data_root": identity.data_root,
        "sources": snapshot_key(identity),
    }
    metadata = {
        "format": str(_FORMAT),
        "algorithm": _ALGORITHM,
        "span_rule": str(_SPAN_RULE),
        **facts,
        "sidecar_digest": identity.digest,
        "num_files": str(len(rows)),
        "num_spans": str(sum(map(len, rows))),
        "paths_checksum": _paths_checksum([row.path for row in rows]),
    }
    metadata["checksum"] = _metadata_checksum(metadata)
    schema = _SCHEMA.with_metadata({_PREFIX + name: value for name, value in metadata.items()})
    with PendingFile(destination) as pending:
        with storage_errors(destination), pa.ipc.new_file(pending.file, schema) as writer:
            part: list[FileChecksums] = []
            num_spans = 0
            for row in rows:
                part.append(row)
                num_spans += len(row)
                if len(part) >= _BATCH_ROWS or num_spans >= _BATCH_SPANS:
                    writer.write_batch(_batch(part, schema))
                    part, num_spans = [], 0
            if part:
                writer.write_batch(_batch(part, schema))
        pending.install()


def _batch(rows: list[FileChecksums], schema: pa.Schema) -> pa.RecordBatch:
    offsets = pa.array(np.concatenate([[0], np.cumsum([len(row) for row in rows])]), pa.int32())
    columns = [pa.array([row.path for row in rows]), pa.array([row.file_size for row in rows], pa.int64())]
    for name, kind in _ARRAYS.items():
        values = np.concatenate([getattr(row, name) for row in rows])
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(values, kind)))
    columns.append(pa.array([row.checksum() for row in rows], pa.uint32()))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _paths_checksum(paths: list[str]) -> str:
    return f"{zlib.crc32(chr(0).join(paths).encode('utf-8', 'surrogatepass')):08x}"


def _metadata_checksum(metadata: dict[str, str]) -> str:
    text = "\0".join(f"{name}={metadata[name]}" for name in sorted(metadata) if name != "checksum")
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


class _Mapping:
    """The mapped file in one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reader: pa.ipc.RecordBatchFileReader | None = None
        self.batches: dict[int, pa.RecordBatch] = {}
        self.rows: OrderedDict[str, FileChecksums | None] = OrderedDict()


class ChecksumFile:
    """A companion on this machine. Thread-safe, picklable (by path), independent in each process.

    Args:
        path: The file.
        remove_damaged: Whether a file that is found damaged is taken away; False for looking only.

    Raises:
        NotFoundError: There is no such file.
        SidecarError: It is no companion of this format, or is damaged.
        AccessError, TransferError: The system does not let it be read.
    """

    def __init__(self, path: Path, *, remove_damaged: bool = True) -> None:
        self.path = path
        self._remove_damaged = remove_damaged
        self._mapping: PerProcess[_Mapping] = PerProcess(_Mapping)
        mapping = self._mapping.get()
        with mapping.lock:
            self._open(mapping)
            schema = mapping.reader.schema if mapping.reader is not None else _SCHEMA
        found = {
            key.decode("utf-8", "replace").removeprefix(_PREFIX): value.decode("utf-8", "replace")
            for key, value in (schema.metadata or {}).items()
        }
        expected = {"format": str(_FORMAT), "algorithm": _ALGORITHM, "span_rule": str(_SPAN_RULE)}
        if not schema.equals(_SCHEMA) or any(found.get(name) != text for name, text in expected.items()):
            raise SidecarError(
                f"{path} holds no payload checksums of format {_FORMAT}.",
                hint="Make them again with `lrstream build --checksums`.",
                path=str(path),
            )
        if _metadata_checksum(found) != found.get("checksum"):
            raise self._damaged("what it belongs to does not match its checksum")
        self._metadata = found

    @property
    def num_spans(self) -> int:
        """Spans that it has checksums of."""
        return int(self._metadata["num_spans"])

    def __len__(self) -> int:
        """Number of source files."""
        return int(self._metadata["num_files"])

    @property
    def paths(self) -> tuple[str, ...]:
        """Source files, sorted; checked, so that a damaged path is not taken for an absent one."""
        mapping = self._mapping.get()
        with mapping.lock:
            return tuple(self._guarded(partial(self._read_paths, mapping)))

    def intervals(self) -> set[tuple[str, float, float]]:
        """(path, from_s, to_s) of every interval that has a checksum."""
        mapping = self._mapping.get()
        with mapping.lock:
            return self._guarded(partial(self._read_intervals, mapping))

    def mismatches(self, identity: SidecarIdentity) -> list[str]:
        """Why these are not the checksums for a sidecar, one sentence part each; empty if they are.

        Args:
            identity: Of the sidecar, with every size.
        """
        facts = self._metadata
        reasons = [
            f"{name} is {facts[name]!r}, expected {getattr(identity, name)!r}"
            for name in ("repo_id", "data_root")
            if facts[name] != getattr(identity, name)
        ]
        commit = pinned_commit(identity.data_root)
        same_commit = commit is not None and commit == pinned_commit(facts["data_root"])
        if facts["revision"] != identity.revision and not same_commit:
            reasons.append(f"revision is {facts['revision']!r}, expected {identity.revision!r}")
        if facts["sources"] != snapshot_key(identity):
            reasons.append("they were made for other source files, sizes or fingerprints")
        return reasons

    def file(self, path: str) -> FileChecksums | None:
        """Checksums of one source file, None if there are none; arrays are read-only.

        Raises:
            SidecarError: The file is damaged; it is removed.
        """
        mapping = self._mapping.get()
        with mapping.lock:
            if path in mapping.rows:
                mapping.rows.move_to_end(path)
                return mapping.rows[path]
            row = self._guarded(partial(self._read, mapping, path))
            mapping.rows[path] = row
            if len(mapping.rows) > _KEPT_ROWS:
                mapping.rows.popitem(last=False)
            return row

    def verify(self) -> int:
        """Read and check every row; returns the number of spans.

        Raises:
            SidecarError: The file is damaged; it is removed.
        """
        paths = self.paths
        num_spans = 0
        for path in paths:
            row = self.file(path)
            num_spans += 0 if row is None else len(row)
        if sorted(set(paths)) != list(paths) or (len(paths), num_spans) != (len(self), self.num_spans):
            raise self._damaged("its rows are not those that it counts")
        return num_spans

    def close(self) -> None:
        """Unmap the file in this process, as far as no array still refers to it."""
        self._mapping.drop()

    def __reduce__(self) -> tuple[Any, ...]:
        return ChecksumFile, (self.path,)

    def __repr__(self) -> str:
        return f"ChecksumFile({str(self.path)!r})"

    def _open(self, mapping: _Mapping) -> pa.ipc.RecordBatchFileReader:
        if mapping.reader is None:
            try:
                mapping.reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
            except FileNotFoundError as error:
                raise NotFoundError(
                    f"There are no payload checksums at {self.path}.", path=str(self.path)
                ) from error
            except (OSError, pa.ArrowException) as error:
                raise self._failure(error) from error
        return mapping.reader

    def _batch(self, mapping: _Mapping, number: int) -> pa.RecordBatch:
        batch = mapping.batches.get(number)
        if batch is None:
            batch = self._open(mapping).get_batch(number)
            batch.validate(full=True)
            mapping.batches[number] = batch
        return batch

    def _read_paths(self, mapping: _Mapping) -> list[str]:
        paths: list[str] = []
        for number in range(self._open(mapping).num_record_batches):
            paths += self._batch(mapping, number).column(0).to_pylist()
        if _paths_checksum(paths) != self._metadata["paths_checksum"]:
            raise ValueError("its paths do not match their checksum")
        return paths

    def _read_intervals(self, mapping: _Mapping) -> set[tuple[str, float, float]]:
        paths, at = self._read_paths(mapping), 0
        found: set[tuple[str, float, float]] = set()
        for number in range(self._open(mapping).num_record_batches):
            batch = self._batch(mapping, number)
            counts = np.diff(batch.column(2).offsets.to_numpy())
            names = np.repeat(np.array(paths[at : at + batch.num_rows], dtype=object), counts)
            times = [batch.column(place).flatten().to_numpy().tolist() for place in (2, 3)]
            found.update(zip(names.tolist(), *times, strict=True))
            at += batch.num_rows
        return found

    def _read(self, mapping: _Mapping, path: str) -> FileChecksums | None:
        low, high = 0, self._open(mapping).num_record_batches
        while high - low > 1:
            middle = (low + high) // 2
            if self._batch(mapping, middle).column(0)[0].as_py() <= path:
                low = middle
            else:
                high = middle
        if high == 0:
            return None
        batch = self._batch(mapping, low)
        low, high = 0, batch.num_rows
        while low < high:
            middle = (low + high) // 2
            if batch.column(0)[middle].as_py() < path:
                low = middle + 1
            else:
                high = middle
        if low == batch.num_rows or batch.column(0)[low].as_py() != path:
            return None
        arrays = {
            name: batch.column(number)[low].values.to_numpy(zero_copy_only=True)
            for number, name in enumerate(_ARRAYS, 2)
        }
        row = FileChecksums(path, batch.column(1)[low].as_py(), **arrays)
        if batch.column(len(_SCHEMA) - 1)[low].as_py() != row.checksum():
            raise ValueError(f"its row of {path} does not match its checksum")
        if len({len(array) for array in arrays.values()}) != 1:
            raise ValueError(f"its row of {path} has lists of unequal length")
        return row

    def _guarded(self, read: Callable[[], Result]) -> Result:
        try:
            return read()
        except LrstreamError:
            raise
        except (pa.ArrowException, OSError, ValueError, IndexError, OverflowError) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> LrstreamError:
        if getattr(error, "errno", None):
            # The system refused (too many open files, say): that is no damage, the file stays.
            return storage_error(error, str(self.path))
        return self._damaged(str(error))

    def _damaged(self, what: str) -> SidecarError:
        """The error for a damaged file, which is taken away so that it is not found damaged again."""
        hint = "Remove this file, and make them again with `lrstream build --checksums`."
        if self._remove_damaged:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
                hint = "They were removed: make them again with `lrstream build --checksums`."
        return SidecarError(
            f"The payload checksums {self.path} are damaged: {what}.", hint=hint, path=str(self.path)
        )
