"""What dataset repositories and buckets have in common: ranges over pooled HTTP, counters, paths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from lrstream.errors import UsageError
from lrstream.storage.byte_source import ByteSource, TransferCounters
from lrstream.storage.http_pool import HttpPool
from lrstream.storage.http_source import HttpByteSource
from lrstream.storage.hub_client import hub_headers, read_from_hub, resolve_url
from lrstream.storage.hub_failures import HubPlace, refusal_error
from lrstream.storage.location import Location
from lrstream.storage.relative_path import check_relative_path
from lrstream.storage.retry import RetryCounters, RetryPolicy

__all__ = ["DEFAULT_CONNECTIONS", "HubStoreBase"]

# As many as a loader of default settings reads at once: 16 episodes of a camera or two.
DEFAULT_CONNECTIONS = 32

T = TypeVar("T")


class HubStoreBase:
    """Base of `HubStore` and `BucketStore`. Thread-safe; picklable, without credentials.

    Args:
        location: Where the dataset is.
        place: The repository or bucket.
        connections: Most HTTP connections of a process to one host, None for a default.
        subranges: Parallel parts of one range read.
        policy: Bounds of retries.
    """

    # A request to the Hub takes about as long as moving this much.
    range_gap_bytes = 256 * 1024

    def __init__(
        self,
        location: Location,
        place: HubPlace,
        *,
        connections: int | None = None,
        subranges: int = 1,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.location = location
        self.place = place
        self.counters = TransferCounters()
        self.retry_counters = RetryCounters()
        self._policy = policy or RetryPolicy()
        self._subranges = subranges
        self._pool = HttpPool(connections or DEFAULT_CONNECTIONS)

    def close(self) -> None:
        """Close this process's connections; later reads open new ones."""
        self._pool.close()

    @property
    def connections_opened(self) -> int:
        """HTTP connections for ranges that this process has opened."""
        return self._pool.num_opened

    def source_at(
        self,
        place: HubPlace,
        path_in_repo: str,
        *,
        size: int | None = None,
        content_hash: str | None = None,
        name: str | None = None,
    ) -> HttpByteSource:
        """Ranges of any file of the Hub, over this store's connections.

        Args:
            place: Repository (at a revision) or bucket.
            path_in_repo: Path from its top.
            size: Size in bytes if known.
            content_hash: Xet hash that the Hub must announce, if known.
            name: What to call the file in messages; its path if None.
        """
        return HttpByteSource(
            name or path_in_repo,
            resolve_url(place, path_in_repo),
            self._pool,
            headers=hub_headers,
            counters=self.counters,
            retry_counters=self.retry_counters,
            policy=self._policy,
            size=size,
            content_hash=content_hash,
            subranges=self._subranges,
            refusal=partial(refusal_error, place, f"read {name or path_in_repo}"),
        )

    def call(self, what: str, call: Callable[[], T], *, place: HubPlace | None = None) -> T:
        """A reading call of the client library, with retries and errors of ours; counts as one request."""
        self.counters.add()
        return read_from_hub(
            place or self.place, what, call, policy=self._policy, retry_counters=self.retry_counters
        )

    def in_repo(self, path: str) -> str:
        """Path from the top of the repository or bucket for a path relative to the dataset's root."""
        path = check_relative_path(path)
        return f"{self.location.path_in_repo}/{path}" if self.location.path_in_repo else path

    def top_in_repo(self, prefix: str) -> str:
        """Like `in_repo` for a directory; "" is the dataset's root."""
        prefix = prefix.strip("/")
        return self.in_repo(prefix) if prefix else self.location.path_in_repo

    def relative(self, path_in_repo: str) -> str:
        """The inverse of `in_repo`."""
        inner = self.location.path_in_repo
        return path_in_repo[len(inner) + 1 :] if inner else path_in_repo

    @staticmethod
    def read_whole(source: ByteSource) -> bytes:
        """Content of a small file."""
        # Most metadata come with the first request, which tells the size as well.
        data, size = source.read_upto(0, 1 << 20)
        return data if len(data) == size else data + source.read(len(data), size)

    def not_local(self, path: str) -> UsageError:
        """The error of `local_path` for what is read by ranges."""
        return UsageError(
            f"{self.location}/{path} is not a file on this machine.", hint="Read it through open()."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location.root!r})"
