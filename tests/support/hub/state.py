"""What the routes of the loopback Hub share: contents, repositories, accounts and settings."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from tests.support.hub.accounts import Accounts, repository_not_found
from tests.support.hub.blobs import BlobStore
from tests.support.hub.repositories import Bucket, Commit, DatasetRepository
from tests.support.hub.signing import UrlSigner
from tests.support.hub.wire import HubError, Reply, Request, json_reply

OWNER_NAME = r"(?P<owner>[^/]+)/(?P<name>[^/]+)"


@dataclass
class HubState:
    """State and settings; the attributes after `lock` may be changed at any time by a test.

    Attributes:
        endpoint: Base URL of the Hub server.
        cas_url: Base URL of the content store.
        store: All contents.
        signer: Makes and checks the CDN's URLs.
        accounts: Tokens.
        page_size: Entries of a listing per page; None for the Hub's own 1000 (50 with ``expand``).
        xet: Whether dataset files have xet hashes and uploads may go through the content store; buckets
            always do.
        regular_redirect: Whether a regular file's resolve URL answers 307 to a path on the same host.
    """

    endpoint: str
    cas_url: str
    store: BlobStore
    signer: UrlSigner
    accounts: Accounts = field(default_factory=Accounts)
    datasets: dict[str, DatasetRepository] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    page_size: int | None = None
    xet: bool = True
    regular_redirect: bool = False

    def readable_dataset(
        self, request: Request, owner: str, name: str, *, contents: bool
    ) -> DatasetRepository:
        """Dataset the requester may see; `contents` says whether a gate applies."""
        with self.lock:
            repository = self.datasets.get(f"{owner}/{name}")
        if repository is None:
            self.accounts.identify(request)
            raise repository_not_found(request)
        self.accounts.require_read(request, private=repository.private, gated=contents and repository.gated)
        return repository

    def writable_dataset(self, request: Request, owner: str, name: str) -> DatasetRepository:
        """Dataset the requester may change."""
        repository = self.readable_dataset(request, owner, name, contents=False)
        self.accounts.require_write(request, private=repository.private)
        return repository

    def readable_bucket(self, request: Request, owner: str, name: str) -> Bucket:
        """Bucket the requester may see."""
        with self.lock:
            bucket = self.buckets.get(f"{owner}/{name}")
        if bucket is None:
            self.accounts.identify(request)
            raise repository_not_found(request)
        self.accounts.require_read(request, private=bucket.private)
        return bucket

    def writable_bucket(self, request: Request, owner: str, name: str) -> Bucket:
        """Bucket the requester may change."""
        bucket = self.readable_bucket(request, owner, name)
        self.accounts.require_write(request, private=bucket.private)
        return bucket

    def page(self, request: Request, items: Sequence[Any], default_size: int = 1000) -> Reply:
        """One page of a listing, with a Link header while there is more; the cursor counts items."""
        size = int(request.parameter("limit") or self.page_size or default_size)
        start = int(request.parameter("cursor") or 0)
        reply = json_reply(list(items[start : start + size]))
        if start + size < len(items):
            kept = {
                name: value
                for name in ("recursive", "expand", "limit", "search")
                if (value := request.parameter(name)) is not None
            }
            query = urlencode({**kept, "cursor": start + size})
            reply.headers["Link"] = f'<{self.endpoint}{request.path}?{query}>; rel="next"'
        return reply


def require_revision(repository: DatasetRepository, revision: str) -> Commit:
    """Commit of a revision.

    Raises:
        HubError: 404 RevisionNotFound.
    """
    commit = repository.resolve(revision)
    if commit is None:
        raise HubError(404, f"Invalid rev id: {revision}", code="RevisionNotFound")
    return commit
