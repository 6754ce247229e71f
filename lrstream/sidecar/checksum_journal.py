"""What an unfinished pass over the payload has read already, so that it need not be read again.

``<companion>.journal`` is a text file of lines, each a CRC-32 in hex, a space, and JSON: a header that says
what the pass is for, then one line for each finished source file. Lines are appended whole and synced within
a second; reading stops at the first that is torn or damaged, and writing goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from lrstream.sidecar.appended import AppendedFile
from lrstream.sidecar.checksum_file import FileChecksums, checksums_path, snapshot_key
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.install import storage_errors
from lrstream.sidecar.journal import JOURNAL_SUFFIX

__all__ = ["ChecksumJournal", "checksum_journal_path"]

_FORMAT = 1
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
        with storage_errors(self.path):
            self._file = AppendedFile(self.path, self._scan(), _line(self._header))

    def keep(self, row: FileChecksums) -> None:
        """Append a file that has just been finished.

        Raises:
            DiskFullError: No space is left.
        """
        document = {"path": row.path, "file_size": row.file_size}
        document |= {name: getattr(row, name).tolist() for name in _ARRAYS}
        line = _line(document)
        with self._lock, storage_errors(self.path, needed_bytes=len(line)):
            self._file.append(line)
            self.num_kept += 1
        with storage_errors(self.path):
            self._file.sync_if_due()

    def close(self) -> None:
        """Make what is in it durable, and release the file."""
        with self._lock:
            self._file.close()

    def discard(self) -> None:
        """Close and remove it: the companion is there."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _scan(self) -> int:
        """Take in what is there; returns the length of its good part."""
        end = 0
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            if _content(file.readline()) != self._header:
                return 0
            end = file.tell()
            for line in file:
                document = _content(line)
                if document is None:
                    break
                end += len(line)
                arrays = {name: np.array(document[name], dtype=kind) for name, kind in _ARRAYS.items()}
                row = FileChecksums(document["path"], document["file_size"], **arrays)
                self.found[row.path] = row
        return end


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
