"""A dataset in a Hub repository, at one commit.

Metadata go through the Hub client's own cache, so that every process of a machine, and every other
program that shares it, downloads them once. Tables of rows and videos are read by ranges and never
downloaded whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import huggingface_hub.constants
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.hf_api import RepoFile

from lrstream import __version__
from lrstream.errors import NotFoundError, UsageError
from lrstream.storage.byte_source import ByteSource, TransferCounters
from lrstream.storage.home import lerobot_home
from lrstream.storage.hub_base import HubStoreBase
from lrstream.storage.hub_client import endpoint, hub_api
from lrstream.storage.hub_failures import HubPlace
from lrstream.storage.hub_pin import commit_of
from lrstream.storage.local import LocalByteSource
from lrstream.storage.location import Location
from lrstream.storage.per_process import PerProcess
from lrstream.storage.reachable import require_name
from lrstream.storage.relative_path import check_relative_path, common_directory
from lrstream.storage.retry import RetryPolicy
from lrstream.storage.store import FileInfo, require_files

__all__ = ["METADATA_DIRECTORY", "HubStore"]

METADATA_DIRECTORY = "meta"


class HubStore(HubStoreBase):
    """A dataset repository at a commit.

    Args:
        location: A location of kind ``hub`` that `pin_location` has pinned.
        connections: Most HTTP connections of a process to one host, None for a default.
        subranges: Parallel parts of one range read.
        policy: Bounds of retries.

    Raises:
        UsageError: The location is not pinned to a commit.
    """

    # The commit pins the content, so that no fingerprints are needed.
    fingerprints_required = False

    def __init__(
        self,
        location: Location,
        *,
        connections: int | None = None,
        subranges: int = 1,
        policy: RetryPolicy | None = None,
    ) -> None:
        commit = commit_of(location)
        if commit is None or location.repo_id is None:
            raise UsageError(
                f"{location} is not pinned to a commit.", hint="Pin it first, with pin_location()."
            )
        super().__init__(
            location,
            HubPlace("hub", location.repo_id, commit),
            connections=connections,
            subranges=subranges,
            policy=policy,
        )
        self.commit = commit

    def read_bytes(self, path: str) -> bytes:
        """Whole content of a small file."""
        source = self.open(path)
        try:
            return self.read_whole(source)
        finally:
            source.close()

    def exists(self, path: str) -> bool:
        """Whether the commit has such a file."""
        inner = self.in_repo(path)
        found = self.call(
            f"look for {path}",
            lambda: hub_api().get_paths_info(
                self.place.repo_id, [inner], revision=self.commit, repo_type="dataset"
            ),
        )
        return any(isinstance(item, RepoFile) and item.path == inner for item in found)

    def list_files(self, prefix: str = "") -> dict[str, FileInfo]:
        """All files under ``prefix``, with sizes, from one (paginated) listing; sorted by path."""
        items = self.tree(self.top_in_repo(prefix), self.commit) or []
        return {
            self.relative(item.path): FileInfo(item.size, None)
            for item in sorted(items, key=lambda item: item.path)
        }

    def tree(self, top: str, revision: str) -> list[RepoFile] | None:
        """All files under a directory of the repository at any revision, never from a cache.

        Args:
            top: Path from the top of the repository, "" for all of it.
            revision: Branch, tag or commit.

        Returns:
            Files with sizes and ids; None if the directory or the revision does not exist.
        """
        place = HubPlace("hub", self.place.repo_id, revision)
        try:
            items = self.call(
                f"list {top or 'all files'}",
                lambda: list(
                    hub_api().list_repo_tree(
                        place.repo_id, top or None, recursive=True, revision=revision, repo_type="dataset"
                    )
                ),
                place=place,
            )
        except NotFoundError as error:
            if error.fields.get("error_code") == "RepoNotFound" or (
                error.fields.get("error_code") == "RevisionNotFound" and revision == self.commit
            ):
                raise
            return None
        return [item for item in items if isinstance(item, RepoFile)]

    def file_info(self, paths: Iterable[str]) -> dict[str, FileInfo]:
        """Sizes of ``paths`` from one listing of the directory that holds them all."""
        wanted = [check_relative_path(path) for path in paths]
        if not wanted:
            return {}
        return require_files(wanted, self.list_files(common_directory(wanted)), self.location.root)

    def open(self, path: str, size: int | None = None) -> ByteSource:
        """Source of ranges: of the cached file for metadata, over HTTP for everything else."""
        path = check_relative_path(path)
        if _is_metadata(path):
            return _CachedFileSource(self, path)
        return self.source_at(self.place, self.in_repo(path), size=size, name=path)

    def local_path(self, path: str) -> Path:
        """The file in the Hub client's cache, downloaded if needed; metadata only.

        Raises:
            UsageError: The file is no metadata, and is not to be downloaded whole.
        """
        if not _is_metadata(check_relative_path(path)):
            raise self.not_local(path)
        return Path(self.call(f"download {path}", lambda: self._download(path)))

    def _download(self, path: str) -> str:
        cache, inner = lerobot_home() / "hub", self.in_repo(path)
        cached = try_to_load_from_cache(
            self.place.repo_id, inner, cache_dir=cache, revision=self.commit, repo_type="dataset"
        )
        if isinstance(cached, str):
            return cached
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            require_name(endpoint())
        return hf_hub_download(
            self.place.repo_id,
            inner,
            repo_type="dataset",
            revision=self.commit,
            cache_dir=cache,
            endpoint=endpoint(),
            library_name="lrstream",
            library_version=__version__,
        )


class _Opened:
    """The local file of one process, once it is there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.source: LocalByteSource | None = None


class _CachedFileSource:
    """Ranges of a file in the Hub client's cache, downloaded at the first read. Thread-safe, picklable."""

    def __init__(self, store: HubStore, path: str) -> None:
        self.path = path
        self._store = store
        self._opened = PerProcess(_Opened)

    def size(self) -> int:
        """Size in bytes."""
        return self._source().size()

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes of ``[start, stop)``."""
        return self._source().read(start, stop)

    def read_upto(self, start: int, stop: int) -> tuple[bytes, int]:
        """The bytes of ``[start, min(stop, size))`` and the size."""
        return self._source().read_upto(start, stop)

    def expect(self, fingerprint: str) -> None:
        """Nothing to compare: the commit pins the content."""

    def close(self) -> None:
        """Close the file; it stays in the cache."""
        opened = self._opened.drop()
        if opened is not None and opened.source is not None:
            opened.source.close()

    def _source(self) -> LocalByteSource:
        opened = self._opened.get()
        with opened.lock:
            if opened.source is None:
                # Local reads are no transfers: what they read is counted apart.
                file = str(self._store.local_path(self.path))
                opened.source = LocalByteSource(self.path, file, TransferCounters())
            return opened.source


def _is_metadata(path: str) -> bool:
    return path.startswith(f"{METADATA_DIRECTORY}/")
