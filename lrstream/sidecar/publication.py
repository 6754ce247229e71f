"""Where published sidecars are, and what is there now (formats, section 3).

    dataset repository   branch ``lerobot-sidecars``, [path in repo/]meta/mp4-sidecars/NAME
    bucket               <root>/meta/mp4-sidecars/NAME

NAME is the file name of the sidecar's identity; in a repository with the commit as its revision, so that
every branch and tag of a commit finds the same file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO

from lrstream.errors import TransferError
from lrstream.sidecar.identity import SidecarIdentity, pinned_commit
from lrstream.storage.bucket_store import BucketStore
from lrstream.storage.byte_source import ByteSource
from lrstream.storage.hub_failures import HubPlace
from lrstream.storage.hub_store import HubStore

__all__ = [
    "PUBLICATION_BRANCH",
    "PUBLICATION_DIRECTORY",
    "PublishedFile",
    "PublishingStore",
    "list_published",
    "publication_path",
    "published_name",
]

PUBLICATION_BRANCH = "lerobot-sidecars"
PUBLICATION_DIRECTORY = "meta/mp4-sidecars"

_PIECE_BYTES = 8 << 20

PublishingStore = HubStore | BucketStore


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file that is published beside a dataset.

    Attributes:
        name: File name.
        size: Size in bytes.
        sha256: SHA-256 of the content in hex, where the listing has it (LFS files).
        git_oid: Git blob id of the content in hex, for files that are not LFS.
        modified_s: When it was written, in seconds since the epoch; 0 where the listing does not tell.
        open: Source of its bytes.
    """

    name: str
    size: int
    sha256: str | None
    git_oid: str | None
    modified_s: float
    open: Callable[[], ByteSource]

    def write_to(self, file: BinaryIO) -> str:
        """Download it; returns the SHA-256 of what was written, in hex.

        Raises:
            TransferError: The content is not what the listing says.
        """
        sha256 = hashlib.sha256()
        git = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        source = self.open()
        try:
            for start in range(0, self.size, _PIECE_BYTES):
                piece = source.read(start, min(start + _PIECE_BYTES, self.size))
                sha256.update(piece)
                git.update(piece)
                file.write(piece)
        finally:
            source.close()
        if self.sha256 not in (None, sha256.hexdigest()) or self.git_oid not in (None, git.hexdigest()):
            raise TransferError(
                f"The published file {self.name} does not have the content that its listing names.",
                hint="It was damaged on the way, or replaced meanwhile; try again.",
            )
        return sha256.hexdigest()


def published_name(identity: SidecarIdentity) -> str:
    """File name under which a sidecar with this identity is published."""
    commit = pinned_commit(identity.data_root)
    return identity.file_name if commit is None else replace(identity, revision=commit).file_name


def publication_path(store: PublishingStore, name: str) -> str:
    """Path of a published file from the top of the repository or bucket."""
    return store.in_repo(f"{PUBLICATION_DIRECTORY}/{name}")


def list_published(
    store: PublishingStore, revision: str = PUBLICATION_BRANCH, *, suffix: str = ".npz"
) -> dict[str, PublishedFile]:
    """What is published now, by file name. Always a fresh listing (K24).

    Args:
        store: The dataset.
        revision: Branch or commit of a repository to look at.
        suffix: End of the names that are meant; sidecars by default, "" for all.

    Raises:
        AccessError, TransferError: The listing could not be had.
    """
    if isinstance(store, BucketStore):
        return _in_bucket(store, suffix)
    place = HubPlace("hub", store.place.repo_id, revision)
    top = store.in_repo(PUBLICATION_DIRECTORY)
    found = {}
    for item in store.tree(top, revision) or []:
        name = item.path[len(top) + 1 :]
        if _is_meant(name, suffix):
            path, size = item.path, item.size
            found[name] = PublishedFile(
                name,
                size,
                sha256=item.lfs.sha256 if item.lfs is not None else None,
                git_oid=item.blob_id if item.lfs is None else None,
                modified_s=0.0,
                open=lambda path=path, size=size: store.source_at(place, path, size=size),  # type: ignore[misc]
            )
    return found


def _in_bucket(store: BucketStore, suffix: str) -> dict[str, PublishedFile]:
    found = {}
    for item in store.tree(store.in_repo(PUBLICATION_DIRECTORY)):
        name = item.path.rpartition("/")[2]
        if _is_meant(name, suffix) and item.path == publication_path(store, name):
            path, size, xet_hash = item.path, item.size, item.xet_hash
            found[name] = PublishedFile(
                name,
                size,
                sha256=None,
                git_oid=None,
                modified_s=item.mtime.timestamp() if item.mtime is not None else 0.0,
                open=lambda path=path, size=size, xet_hash=xet_hash: store.source_at(  # type: ignore[misc]
                    store.place, path, size=size, content_hash=xet_hash
                ),
            )
    return found


def _is_meant(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and "/" not in name
