"""Dataset repositories (immutable commits, branches, tags) and buckets (mutable files)."""

import hashlib
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.support.hub.blobs import Blob, BlobStore, blob_of_bytes, blob_of_file

LFS_SUFFIXES = (".mp4", ".parquet", ".npz", ".bin", ".arrow")
LFS_MIN_BYTES = 10 * 2**20


def isoformat(seconds: float) -> str:
    """UTC time stamp as the Hub writes it, milliseconds and a Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class FileEntry:
    """A file in a commit."""

    blob: Blob
    is_lfs: bool

    @property
    def git_oid(self) -> str:
        """Hex id of what git stores: the content, or the LFS pointer."""
        return blob_of_bytes(self.lfs_pointer).git_oid if self.is_lfs else self.blob.git_oid

    @property
    def lfs_pointer(self) -> bytes:
        """The pointer file git keeps instead of an LFS file's content."""
        spec = "https://git-lfs.github.com/spec/v1"
        return f"version {spec}\noid sha256:{self.blob.sha256}\nsize {self.blob.size}\n".encode()


@dataclass(frozen=True)
class Commit:
    """Immutable snapshot."""

    oid: str
    parent: "Commit | None"
    title: str
    message: str
    created: float
    files: Mapping[str, FileEntry]

    def directories(self) -> dict[str, str]:
        """Every directory's path with its id (hex; any change below changes it)."""
        content: dict[str, list[str]] = {}
        for path, entry in self.files.items():
            parts = path.split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                content.setdefault("/".join(parts[:depth]), []).append(f"{path} {entry.git_oid}")
        return {
            path: hashlib.sha1("\n".join(sorted(lines)).encode(), usedforsecurity=False).hexdigest()
            for path, lines in content.items()
        }

    def last_change_of(self, path: str) -> "Commit":
        """The commit that gave the file its present content."""
        commit = self
        while commit.parent is not None and commit.parent.files.get(path) == self.files.get(path):
            commit = commit.parent
        return commit


@dataclass
class DatasetRepository:
    """A dataset repository.

    Attributes:
        repo_id: ``OWNER/NAME``.
        private: Hidden from all but members.
        gated: Listed for all, contents for those let through the gate.
        lfs_mode: ``auto`` decides by suffix and size; ``lfs`` or ``regular`` for all files.
    """

    repo_id: str
    private: bool = False
    gated: bool = False
    lfs_mode: str = "auto"
    created: float = field(default_factory=time.time)
    branches: dict[str, Commit] = field(default_factory=dict)
    tags: dict[str, Commit] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        if not self.branches:
            self.commit("main", {}, title="initial commit")

    def wants_lfs(self, path: str, size: int) -> bool:
        """Whether the Hub keeps such a file in LFS. An empty file never is."""
        if size == 0:
            return False
        if self.lfs_mode != "auto":
            return self.lfs_mode == "lfs"
        return path.endswith(LFS_SUFFIXES) or size > LFS_MIN_BYTES

    def resolve(self, revision: str) -> Commit | None:
        """Commit of a branch, tag or full commit id."""
        revision = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        with self.lock:
            return self.branches.get(revision) or self.tags.get(revision) or self.commits.get(revision)

    def commit(
        self,
        branch: str,
        add: Mapping[str, FileEntry],
        delete: Iterable[str] = (),
        *,
        title: str = "commit",
        message: str = "",
    ) -> Commit:
        """Puts a new commit on a branch; `delete` holds files, or folders with a trailing slash."""
        with self.lock:
            parent = self.branches.get(branch)
            files = dict(parent.files) if parent else {}
            for path in delete:
                is_folder = path.endswith("/")
                for gone in [name for name in files if name == path or (is_folder and name.startswith(path))]:
                    del files[gone]
            files.update(add)
            tree = "\n".join(f"{path} {files[path].git_oid}" for path in sorted(files))
            # The count keeps the ids of equal trees with equal parents apart, as git's time stamps do.
            text = f"{self.repo_id} {parent.oid if parent else ''} {len(self.commits)} {title}\n{tree}"
            oid = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            commit = Commit(oid, parent, title, message, time.time(), dict(sorted(files.items())))
            self.commits[oid] = commit
            self.branches[branch] = commit
            return commit

    def entries_of(self, contents: Mapping[str, Blob]) -> dict[str, FileEntry]:
        """Entries for contents, LFS or not as the repository decides."""
        return {path: FileEntry(blob, self.wants_lfs(path, blob.size)) for path, blob in contents.items()}


@dataclass(frozen=True)
class BucketEntry:
    """A file in a bucket."""

    blob: Blob
    xet_hash: str
    mtime: float
    uploaded: float


@dataclass
class Bucket:
    """A storage bucket: files without history."""

    bucket_id: str
    private: bool = False
    created: float = field(default_factory=time.time)
    files: dict[str, BucketEntry] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def put(self, path: str, blob: Blob, xet_hash: str, mtime: float | None = None) -> None:
        """Writes or replaces a file; `mtime` in seconds since the epoch, None for now."""
        now = time.time()
        with self.lock:
            self.files[path] = BucketEntry(blob, xet_hash, now if mtime is None else mtime, now)

    def delete(self, path: str) -> bool:
        """Removes a file; False if there is none."""
        with self.lock:
            return self.files.pop(path, None) is not None

    def listing(self) -> dict[str, BucketEntry]:
        """All files sorted by path."""
        with self.lock:
            return dict(sorted(self.files.items()))


def folder_contents(folder: Path, store: BlobStore) -> dict[str, Blob]:
    """Contents of every file under `folder` by relative path, put into the store."""
    return {
        file.relative_to(folder).as_posix(): store.add(blob_of_file(file))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
