"""File contents of the loopback Hub, addressed by SHA-256 and by xet hash."""

import hashlib
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

# Larger files stay on disk and are read on demand; they must not change while the Hub serves them.
IN_MEMORY_LIMIT = 32 * 2**20


@dataclass(frozen=True)
class Blob:
    """Immutable content.

    Attributes:
        size: Bytes.
        sha256: Hex digest of the content.
        git_oid: Hex object id git gives the content (for LFS files that of the content, not of the pointer).
        data: The content, or None when it is in `path`.
        path: File that holds it, or None.
    """

    size: int
    sha256: str
    git_oid: str
    data: bytes | None = None
    path: Path | None = None

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of the half-open range [start, stop), clipped at the end."""
        stop = self.size if stop is None else min(stop, self.size)
        if self.data is not None:
            return self.data[start:stop]
        assert self.path is not None
        with open(self.path, "rb") as file:
            return os.pread(file.fileno(), max(0, stop - start), start)


def blob_of_bytes(data: bytes) -> Blob:
    """Blob of content in memory."""
    git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return Blob(len(data), hashlib.sha256(data).hexdigest(), git.hexdigest(), data=data)


def blob_of_file(path: Path) -> Blob:
    """Blob of a file, kept on disk if large."""
    size = path.stat().st_size
    if size <= IN_MEMORY_LIMIT:
        return blob_of_bytes(path.read_bytes())
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(2**20):
            sha256.update(block)
            git.update(block)
    return Blob(size, sha256.hexdigest(), git.hexdigest(), path=path)


class BlobStore:
    """All contents the Hub has, whoever brought them."""

    def __init__(self) -> None:
        self._by_sha256: dict[str, Blob] = {}
        self._xet_of_sha256: dict[str, str] = {}
        self._sha256_of_xet: dict[str, str] = {}
        self._lock = threading.RLock()

    def add(self, blob: Blob, xet_hash: str | None = None) -> Blob:
        """Keeps a content, with its xet hash when that is known."""
        with self._lock:
            blob = self._by_sha256.setdefault(blob.sha256, blob)
            if xet_hash is not None:
                self._xet_of_sha256[blob.sha256] = xet_hash
                self._sha256_of_xet[xet_hash] = blob.sha256
            return blob

    def by_sha256(self, sha256: str) -> Blob | None:
        """Content with this digest, if there is one."""
        with self._lock:
            return self._by_sha256.get(sha256)

    def by_xet_hash(self, xet_hash: str) -> Blob | None:
        """Content with this xet hash, if its hash was ever asked for or given."""
        with self._lock:
            sha256 = self._sha256_of_xet.get(xet_hash)
            return None if sha256 is None else self._by_sha256[sha256]

    def xet_hash(self, blob: Blob) -> str:
        """The hash hf_xet gives this content (64 hex digits), as an upload of the same bytes would."""
        with self._lock:
            known = self._xet_of_sha256.get(blob.sha256)
            if known is None:
                known = _xet_hash_of(blob)
                self.add(blob, known)
            return known


def _xet_hash_of(blob: Blob) -> str:
    import hf_xet  # type: ignore[import-untyped]

    if blob.path is not None:
        return str(hf_xet.hash_files([str(blob.path)])[0].hash)
    with tempfile.NamedTemporaryFile() as file:
        file.write(blob.read())
        file.flush()
        return str(hf_xet.hash_files([file.name])[0].hash)
