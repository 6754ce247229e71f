"""What an unfinished pass over the payload has read already, so that it need not be read again.

``<companion>.journal`` is a text file of lines, each a CRC-32 in hex, a space, and JSON: a header that says
what the pass is for, then one line for each finished source file. Lines are appended whole and synced within
a second; reading stops at the first that is torn or damaged, and writing goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from lrstream.sidecar.checksum_file import FileChecksums, checksums_path, snapshot_key
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.install import storage_errors
from lrstream.sidecar.journal import JOURNAL_SUFFIX

__all__ = ["ChecksumJournal", "checksum_journal_path"]

_FORMAT = 1
_SYNC_EVERY_S = 1.0
_ARRAYS = {
    "from_s": np.float64,
    "to_s": np.float64,
    "start_byte": np.int64,
    "stop_byte": np.int64,
    "crc32": np.uint32,
}


def checksum_journal_path(archive: Path) -> Path:
    """Where the journal of a pass for a sidecar lies."""
    companion = checksums_path(archive)
    return companion.with_name(companion.name + JOURNAL_SUFFIX)


class ChecksumJournal:
    """The journal of one pass, continued where an earlier one stopped. Thread-safe.

    Used under the lock of the sidecar. Nothing is written before the first record.

    Args:
        archive: The sidecar.
        identity: Its identity: a journal of another snapshot has no records here.

    Attributes:
        found: Files that an earlier pass has finished.
        num_kept: Files finished since.
    """

    def __init__(self, archive: Path, identity: SidecarIdentity) -> None:
        self.path = checksum_journal_path(archive)
        self.found: dict[str, FileChecksums] = {}
        self.num_kept = 0
        self._header = {
            "format": _FORMAT,
            "data_root": identity.data_root,
            "sources": snapshot_key(identity),
        }
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._synced_at = time.monotonic()
        self._end = 0
        with storage_errors(self.path), contextlib.suppress(FileNotFoundError):
            self._scan()

    def keep(self, row: FileChecksums) -> None:
        """Append a file that has just been finished.

        Raises:
            DiskFullError: No space is left.
        """
        document = {"path": row.path, "file_size": row.file_size}
        document |= {name: getattr(row, name).tolist() for name in _ARRAYS}
        line = _line(document)
        with self._lock, storage_errors(self.path, needed_bytes=len(line)):
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
                self._descriptor = os.open(self.path, flags, 0o666)
                os.ftruncate(self._descriptor, self._end)
                if self._end == 0:
                    self._append(_line(self._header))
            self._append(line)
            self.num_kept += 1
            if time.monotonic() - self._synced_at >= _SYNC_EVERY_S:
                os.fsync(self._descriptor)
                self._synced_at = time.monotonic()

    def close(self) -> None:
        """Make what is in it durable, and release the file."""
        with self._lock:
            if self._descriptor is not None:
                # A disk that fails now has failed the pass as well; the next one reads what is there.
                with contextlib.suppress(OSError):
                    os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = None

    def discard(self) -> None:
        """Close and remove it: the companion is there."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None
        written = 0
        try:
            while written < len(line):
                written += os.pwrite(self._descriptor, line[written:], self._end + written)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(line)

    def _scan(self) -> None:
        with self.path.open("rb") as file:
            if _content(file.readline()) != self._header:
                return
            self._end = file.tell()
            for line in file:
                document = _content(line)
                if document is None:
                    return
                self._end += len(line)
                arrays = {name: np.array(document[name], dtype=kind) for name, kind in _ARRAYS.items()}
                row = FileChecksums(document["path"], document["file_size"], **arrays)
                self.found[row.path] = row


def _line(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _content(line: bytes) -> dict[str, Any] | None:
    """The document of a line, None if it is torn or damaged."""
    mark, _, text = line.partition(b" ")
    if not text.endswith(b"\n") or mark != b"%08x" % zlib.crc32(text[:-1]):
        return None
    document: dict[str, Any] = json.loads(text)
    return document
