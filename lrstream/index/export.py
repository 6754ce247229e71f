"""From a mapped index, or an archive, to files for exchange and for analysis.

The archive is the form that other tools read and that is published; Parquet is for questions about a
dataset's videos ("which files have the longest GOPs?") in any table tool, and is read by nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.archive import write_archive
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.install import PendingFile, storage_errors

__all__ = ["SAMPLE_SCHEMA", "TrackCollection", "export_archive", "export_parquet"]

# Rows of several files share a row group until it has this many.
_ROW_GROUP_ROWS = 1 << 20

SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("file_path", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("codec", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("timescale", pa.int64(), nullable=False),
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("pts_s", pa.float64(), nullable=False),
        pa.field("duration_ticks", pa.int64(), nullable=False),
        pa.field("composition_offset_ticks", pa.int64(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("offset_bytes", pa.int64(), nullable=False),
        pa.field("is_sync", pa.bool_(), nullable=False),
    ]
)
"""Columns of `export_parquet`: one row for each coded picture, in decode order within each file."""

Progress = Callable[[int, int], None]


class TrackCollection(Protocol):
    """Anything that holds the sample tables of a sidecar: an archive or a mapped index."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all source files, sorted."""
        ...

    @property
    def identity(self) -> SidecarIdentity:
        """What it was built from."""
        ...

    def track(self, file_path: str) -> TrackIndex:
        """The record of one source file."""
        ...


def export_archive(source: TrackCollection, destination: Path, *, progress: Progress | None = None) -> int:
    """Write a schema 3 archive with the same identity and equal arrays, atomically.

    Args:
        source: What to write.
        destination: Path of the archive.
        progress: Called with (source files done, source files in all).

    Returns:
        Number of samples written.

    Raises:
        SidecarError: A record is damaged; nothing is left behind.
        DiskFullError: No space is left; nothing is left behind.
    """
    count = _Counter(source, progress)
    write_archive(destination, source.identity, count.tracks())
    return count.num_samples


def export_parquet(source: TrackCollection, destination: Path, *, progress: Progress | None = None) -> int:
    """Write one row for each sample (`SAMPLE_SCHEMA`), atomically; arguments as `export_archive`.

    The identity is in the file's metadata under ``lrstream.sidecar``, as JSON.

    Returns:
        Number of samples written.
    """
    count = _Counter(source, progress)
    notes = {"lrstream.sidecar": json.dumps(source.identity.to_json(), separators=(",", ":"))}
    schema = SAMPLE_SCHEMA.with_metadata(notes)
    with PendingFile(destination) as pending:
        with (
            storage_errors(destination),
            pq.ParquetWriter(pending.file, schema, compression="zstd") as writer,
        ):
            tables: list[pa.Table] = []
            waiting = 0
            for track in count.tracks():
                tables.append(_samples_table(track, schema))
                waiting += track.samples.num_samples
                if waiting >= _ROW_GROUP_ROWS:
                    writer.write_table(_joined(tables))
                    tables, waiting = [], 0
            if tables:
                writer.write_table(_joined(tables))
        pending.install()
    return count.num_samples


class _Counter:
    """Hands tracks out one by one and counts them."""

    def __init__(self, source: TrackCollection, progress: Progress | None) -> None:
        self._source = source
        self._progress = progress
        self.num_samples = 0

    def tracks(self) -> Iterable[TrackIndex]:
        total = len(self._source.paths)
        for done, path in enumerate(self._source.paths, 1):
            track = self._source.track(path)
            self.num_samples += track.samples.num_samples
            yield track
            if self._progress is not None:
                self._progress(done, total)


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).unify_dictionaries()


def _samples_table(track: TrackIndex, schema: pa.Schema) -> pa.Table:
    samples = track.samples
    count = samples.num_samples
    is_sync = np.zeros(count, dtype=bool)
    is_sync[samples.sync_samples] = True
    columns = [
        _repeated(track.file_path, count),
        _repeated(track.codec, count),
        pa.array(np.full(count, track.timescale, dtype=np.int64)),
        pa.array(np.arange(count, dtype=np.int64)),
        pa.array(np.ascontiguousarray(samples.pts_s, dtype=np.float64)),
        pa.array(np.ascontiguousarray(samples.durations_ticks, dtype=np.int64)),
        pa.array(np.ascontiguousarray(samples.composition_offsets_ticks, dtype=np.int64)),
        pa.array(np.ascontiguousarray(samples.sizes_bytes, dtype=np.int64)),
        pa.array(np.ascontiguousarray(samples.offsets_bytes, dtype=np.int64)),
        pa.array(is_sync),
    ]
    return pa.table(columns, schema=schema)


def _repeated(text: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, dtype=np.int32)), pa.array([text]))
