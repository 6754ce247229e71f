"""A dataset in a Hub storage bucket.

Buckets have no commits: a file may be replaced at any time. Its xet hash, from a fresh listing, is what
tells (SC-6), and every redirect to content is held against the hash of the last listing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lrstream.storage.http_source import HttpByteSource
from lrstream.storage.hub_base import HubStoreBase
from lrstream.storage.hub_client import bucket_api
from lrstream.storage.hub_failures import HubPlace
from lrstream.storage.location import Location
from lrstream.storage.relative_path import check_relative_path, common_directory
from lrstream.storage.retry import RetryPolicy
from lrstream.storage.store import FileInfo, require_files

__all__ = ["BucketStore"]


class BucketStore(HubStoreBase):
    """A bucket, or a directory in one.

    Args:
        location: A location of kind ``bucket``.
        connections: Most HTTP connections of a process to one host, None for a default.
        subranges: Parallel parts of one range read.
        policy: Bounds of retries.

    Raises:
        UsageError: The installed huggingface_hub knows no buckets.
    """

    fingerprints_required = True

    def __init__(
        self,
        location: Location,
        *,
        connections: int | None = None,
        subranges: int = 1,
        policy: RetryPolicy | None = None,
    ) -> None:
        bucket_api()
        assert location.repo_id is not None
        super().__init__(
            location,
            HubPlace("bucket", location.repo_id),
            connections=connections,
            subranges=subranges,
            policy=policy,
        )
        self._listed: dict[str, FileInfo] = {}

    def read_bytes(self, path: str) -> bytes:
        """Whole content of a small file."""
        return self.read_whole(self.open(path))

    def exists(self, path: str) -> bool:
        """Whether the file is there now."""
        inner = self.in_repo(path)
        found = self.call(
            f"look for {path}",
            lambda: list(bucket_api().get_bucket_paths_info(self.place.repo_id, [inner])),
        )
        return any(item.type == "file" and item.path == inner for item in found)

    def list_files(self, prefix: str = "") -> dict[str, FileInfo]:
        """All files under ``prefix``, with sizes and xet hashes, from one fresh listing; sorted by path."""
        top = self.top_in_repo(prefix)
        found = {self.relative(item.path): FileInfo(item.size, item.xet_hash) for item in self.tree(top)}
        return dict(sorted(found.items()))

    def tree(self, top: str) -> list[Any]:
        """All files under a directory of the bucket, "" for all, as the client describes them."""
        items = self.call(
            f"list {top or 'all files'}",
            lambda: list(bucket_api().list_bucket_tree(self.place.repo_id, top or None, recursive=True)),
        )
        # The Hub compares prefixes as text, so that "videos" finds "videos_old/..." as well.
        inside = f"{top}/" if top else ""
        return [item for item in items if item.type == "file" and item.path.startswith(inside)]

    def file_info(self, paths: Iterable[str]) -> dict[str, FileInfo]:
        """Sizes and xet hashes of ``paths`` from one fresh listing of the directory that holds them all.

        Sources of these files that are opened from now on refuse any other content.
        """
        wanted = [check_relative_path(path) for path in paths]
        if not wanted:
            return {}
        found = require_files(wanted, self.list_files(common_directory(wanted)), self.location.root)
        self.expect_listed(found)
        return found

    def expect_listed(self, found: Mapping[str, FileInfo]) -> None:
        """Take over what a listing said: sources of these files refuse any other content from now on."""
        self._listed.update(found)

    def without_listing(self) -> BucketStore:
        """The same bucket, with nothing expected of any file."""
        return BucketStore(
            self.location, connections=self._pool.connections, subranges=self._subranges, policy=self._policy
        )

    def open(self, path: str, size: int | None = None) -> HttpByteSource:
        """Source of ranges of one file."""
        listed = self._listed.get(path)
        return self.source_at(
            self.place,
            self.in_repo(path),
            size=size,
            content_hash=listed.fingerprint if listed else None,
            name=path,
        )

    def local_path(self, path: str) -> Path:
        """Refused: nothing of a bucket is on this machine."""
        raise self.not_local(path)
