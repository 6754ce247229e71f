"""From an archive to a mapped index: several sources at once, a bounded number of them in memory (SC-9).

Threads unpack, check and encode sources (zlib and numpy release the interpreter's lock for most of that);
one writes their rows in order. What bounds memory is how far the threads may be ahead of the writer, in
sources and in bytes of unpacked arrays.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from lrstream.index.format import FORMAT_VERSION, SCHEMA, identity_checksum, track_to_row
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.install import PendingFile, storage_errors
from lrstream.sidecar.manifest import TrackScalars

__all__ = ["convert"]

# A record batch is closed when its arrays reach this size or it has this many rows.
_BATCH_BYTES = 32 << 20
_BATCH_ROWS = 8192

# Sources that are unpacked at one time take no more than this; a larger one is unpacked by itself.
_AHEAD_BYTES = 128 << 20
_AHEAD_PER_WORKER = 4
# The writer and the lock take their part: more threads than this wait for each other.
_MAX_WORKERS = 8

_SHARED_NAMES = ("codec", "ftyp", "stsd_body")


def convert(
    reader: ArchiveReader,
    destination: Path,
    *,
    key: str,
    progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
) -> None:
    """Write the mapped index of an archive atomically, checking every array on the way.

    Args:
        reader: The archive.
        destination: Path of the generation.
        key: Its content key, recorded in the file.
        progress: Called with (source files done, source files in all).
        workers: Sources unpacked at the same time; by default one for each processor, at most 8.

    Raises:
        SidecarError: An array of the archive is invalid; nothing is left behind.
        DiskFullError: No space is left; nothing is left behind.
    """
    dictionaries = _dictionaries(reader.scalars)
    total = len(reader.paths)
    with PendingFile(destination) as pending:
        with storage_errors(destination), pa.ipc.new_file(pending.file, _described(reader, key)) as writer:
            rows: list[dict[str, Any]] = []
            weight = 0
            for done, row in enumerate(_encoded(reader, workers or _usable_processors()), 1):
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


def _encoded(reader: ArchiveReader, workers: int) -> Iterator[dict[str, Any]]:
    """The rows of all sources in order, made by `workers` threads."""
    weights = reader.array_bytes().tolist()
    fingerprints = reader.identity.source_fingerprints

    def encode(number: int) -> dict[str, Any]:
        track = reader.track_at(number)
        return track_to_row(track, fingerprints.get(track.file_path))

    waiting: deque[tuple[int, Future[dict[str, Any]]]] = deque()
    ahead_bytes = 0
    pool = ThreadPoolExecutor(workers, thread_name_prefix="lrstream-convert")
    try:
        for number, weight in enumerate(weights):
            while waiting and (
                len(waiting) >= _AHEAD_PER_WORKER * workers or ahead_bytes + weight > _AHEAD_BYTES
            ):
                done_weight, future = waiting.popleft()
                yield future.result()
                ahead_bytes -= done_weight
            waiting.append((weight, pool.submit(encode, number)))
            ahead_bytes += weight
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def _usable_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    return min(os.cpu_count() or 1, _MAX_WORKERS)


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
