"""From an archive to a mapped index, one source file in memory at a time (SC-9)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from lrstream.index.format import FORMAT_VERSION, SCHEMA, identity_checksum, track_to_row
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.install import PendingFile, storage_errors
from lrstream.sidecar.manifest import TrackScalars

__all__ = ["convert"]

# A record batch is closed when its arrays reach this size or it has this many rows.
_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 8192

_SHARED_NAMES = ("codec", "ftyp", "stsd_body")


def convert(
    reader: ArchiveReader,
    destination: Path,
    *,
    key: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the mapped index of an archive atomically, checking every array on the way.

    Args:
        reader: The archive.
        destination: Path of the generation.
        key: Its content key, recorded in the file.
        progress: Called with (source files done, source files in all).

    Raises:
        SidecarError: An array of the archive is invalid; nothing is left behind.
        DiskFullError: No space is left; nothing is left behind.
    """
    dictionaries = _dictionaries(reader.scalars)
    fingerprints = reader.identity.source_fingerprints
    total = len(reader.paths)
    with PendingFile(destination) as pending:
        with storage_errors(destination), pa.ipc.new_file(pending.file, _described(reader, key)) as writer:
            rows: list[dict[str, Any]] = []
            weight = 0
            for done, track in enumerate(reader.tracks(), 1):
                row = track_to_row(track, fingerprints.get(track.file_path))
                rows.append(row)
                weight += sum(len(value) for name, value in row.items() if name.endswith("_data"))
                if weight >= _BATCH_BYTES or len(rows) >= _BATCH_ROWS:
                    writer.write_batch(_batch(rows, dictionaries))
                    rows, weight = [], 0
                if progress is not None:
                    progress(done, total)
            if rows:
                writer.write_batch(_batch(rows, dictionaries))
        pending.install()


def _described(reader: ArchiveReader, key: str) -> pa.Schema:
    """The schema with what identifies the index; the rest of the identity is in the rows."""
    identity = reader.identity
    return SCHEMA.with_metadata(
        {
            "lrstream.format": str(FORMAT_VERSION),
            "lrstream.key": key,
            "lrstream.num_files": str(len(reader.paths)),
            "lrstream.repo_id": identity.repo_id,
            "lrstream.revision": identity.revision,
            "lrstream.data_root": identity.data_root,
            "lrstream.identity_checksum": identity_checksum(identity),
        }
    )


def _dictionaries(scalars: Iterable[TrackScalars]) -> dict[str, tuple[pa.Array, dict[Any, int]]]:
    """All values of the shared columns beforehand: the IPC file format has one dictionary per column."""
    found: dict[str, dict[Any, int]] = {name: {} for name in _SHARED_NAMES}
    for track in scalars:
        for name, places in found.items():
            places.setdefault(getattr(track, name), len(places))
    return {
        name: (pa.array(list(places), SCHEMA.field(name).type.value_type), places)
        for name, places in found.items()
    }


def _batch(
    rows: list[dict[str, Any]], dictionaries: dict[str, tuple[pa.Array, dict[Any, int]]]
) -> pa.RecordBatch:
    columns = []
    for field in SCHEMA:
        if field.name in dictionaries:
            values, places = dictionaries[field.name]
            numbers = pa.array([places[row[field.name]] for row in rows], pa.int32())
            columns.append(pa.DictionaryArray.from_arrays(numbers, values))
        else:
            columns.append(pa.array([row[field.name] for row in rows], field.type))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
