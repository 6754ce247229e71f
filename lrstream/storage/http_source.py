"""Verified byte ranges of one file behind HTTP redirects to signed URLs (LD-12, K20, K22, K30).

The Hub answers a file's stable URL (*resolve* URL) with a redirect to a signed, expiring URL on another
origin. The signed URL is kept and used by all later reads of the file; when it stops working it is
resolved again, once for all threads. Credentials go to the stable URL's own origin and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

import urllib3

from lrstream.errors import AccessError, LrstreamError, NotFoundError, TransferError
from lrstream.storage.byte_source import TransferCounters, check_range
from lrstream.storage.http_pool import (
    HttpPool,
    describe_response,
    host_of,
    redact,
    same_origin,
    server_message,
)
from lrstream.storage.http_reply import Growth, RangeReply, RetryLater, transport_failure, verified_range
from lrstream.storage.per_process import PerProcess
from lrstream.storage.retry import RetryCounters, RetryPolicy, RetrySchedule

__all__ = ["HttpByteSource"]

_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECT_BODY_BYTES = 64 * 1024
# Below this a part of a range is not worth a request of its own.
_MIN_SUBRANGE_BYTES = 256 * 1024

T = TypeVar("T")
Refusal = Callable[[int, str, str], LrstreamError | None]


class _Target(NamedTuple):
    """Where the bytes are now: a signed URL, and which resolution gave it."""

    url: str
    generation: int


class _Resolution:
    """The signed URL of one file in one process.

    `lock` is held while the stable URL is asked, so that threads that need its answer wait for one
    request instead of making their own.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.target: _Target | None = None
        self.generation = 0
        self.last_good = 0
        self.served_directly = False
        self.size: int | None = None


class _SignatureRefused(Exception):
    """A redirected URL answered 401 or 403: expired, or never good."""

    def __init__(self, failure: str, target: _Target) -> None:
        super().__init__(failure)
        self.failure = failure
        self.target = target


class HttpByteSource:
    """A file behind an HTTP URL. Thread-safe; connections belong to the process that uses them.

    Args:
        path: Path of the file relative to the dataset root, for messages.
        url: The stable URL.
        pool: Connections.
        headers: Gives the headers for the stable URL's origin (authorization); never sent elsewhere.
        counters: Where requests and bytes are counted.
        retry_counters: Where retries are counted.
        policy: Bounds of retries.
        size: Size of the file in bytes if known; a reply that says otherwise is refused.
        content_hash: Content hash that the stable URL's replies must carry in `X-Xet-Hash`, if known.
        subranges: Parallel parts of one range read.
        refusal: Makes the error for a refusal by the stable URL from status, `X-Error-Code` and message;
            None from it, or None instead of it, for a general one.
    """

    def __init__(
        self,
        path: str,
        url: str,
        pool: HttpPool,
        *,
        headers: Callable[[], dict[str, str]],
        counters: TransferCounters,
        retry_counters: RetryCounters,
        policy: RetryPolicy,
        size: int | None = None,
        content_hash: str | None = None,
        subranges: int = 1,
        refusal: Refusal | None = None,
    ) -> None:
        self.path = path
        self._url = url
        self._pool = pool
        self._headers = headers
        self._counters = counters
        self._retry_counters = retry_counters
        self._policy = policy
        self._known_size = size
        self._content_hash = content_hash
        self._subranges = subranges
        self._refusal = refusal
        self._resolution = PerProcess(_Resolution)

    def size(self) -> int:
        """Size in bytes; the redirect that the first read needs anyway tells it, where there is one."""
        size = self._size()
        if size is None:
            self._with_retries(f"{self.path}, its size", lambda: self._ask_size(self._resolution.get()))
            size = self._size()
        return self.read_upto(0, 1)[1] if size is None else size

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes of ``[start, stop)``, in up to `subranges` parallel requests."""
        check_range(self.path, start, stop)
        if start == stop:
            return b""
        parts = min(self._subranges, max(1, (stop - start) // _MIN_SUBRANGE_BYTES))
        if parts == 1:
            return self._read_exactly(start, stop)
        bounds = [start + (stop - start) * part // parts for part in range(parts + 1)]
        with ThreadPoolExecutor(parts, thread_name_prefix="lrstream-subrange") as threads:
            return b"".join(threads.map(self._read_exactly, bounds[:-1], bounds[1:]))

    def read_upto(self, start: int, stop: int) -> tuple[bytes, int]:
        """The bytes of ``[start, min(stop, size))`` and the size of the file."""
        check_range(self.path, start, stop)
        size = self._size()
        if size is None and start == stop:
            size = self.size()
        if size is not None:
            stop = min(stop, size)
            if start >= stop:
                return b"", size
        reply = self._read(start, stop)
        return reply.data, reply.size

    def read_growing(self, first: int, limit: int, stop_of: Callable[[bytes, int], int]) -> tuple[bytes, int]:
        """The beginning of the file as far as its first bytes say, in one request (`GrowingByteSource`).

        A reply of which much is left is cut off, at the price of its connection.
        """
        check_range(self.path, first, limit)
        size = self._size()
        if size == 0 or limit == 0:
            return self.read_upto(0, limit)
        reply = self._read(0, limit if size is None else min(limit, size), Growth(first, stop_of))
        return reply.data, reply.size

    def expect(self, fingerprint: str) -> None:
        """Compare the content hash with this one whenever the stable URL is asked (buckets).

        On a Hub dataset the commit pins the content and there is no fingerprint to expect.
        """
        self._content_hash = fingerprint

    def close(self) -> None:
        """Forget the signed URL; the connections belong to the store."""
        self._resolution.drop()

    def __repr__(self) -> str:
        return f"HttpByteSource({self.path!r})"

    # -- one verified range, with retries -------------------------------------------------------

    def _size(self) -> int | None:
        return self._known_size if self._known_size is not None else self._resolution.get().size

    def _read_exactly(self, start: int, stop: int) -> bytes:
        data, size, *_ = self._read(start, stop)
        if len(data) != stop - start:
            raise TransferError(
                f"{self._what(start, stop)} were wanted, but the file ends at {size}.",
                hint="It was replaced since it was indexed.",
                file_path=self.path,
            )
        return data

    def _what(self, start: int, stop: int) -> str:
        return f"{self.path}, bytes [{start}, {stop})"

    def _read(self, start: int, stop: int, growth: Growth | None = None) -> RangeReply:
        return self._with_retries(self._what(start, stop), lambda: self._attempt(start, stop, growth))

    def _with_retries(self, what: str, attempt: Callable[[], T]) -> T:
        schedule = RetrySchedule(self._policy, what, self._retry_counters)
        renewals = 0
        while True:
            try:
                return attempt()
            except _SignatureRefused as caught:
                refused, failed = caught, None
            except RetryLater as caught_failure:
                refused, failed = None, caught_failure
            # Outside the handlers, so that what is raised here has no foreign exception chained to it.
            if failed is not None:
                schedule.wait(failed.failure, told_s=failed.told_s, unresolved=failed.unresolved)
            elif refused is not None:
                self._renew(refused, what, renewals)
                renewals += 1

    def _renew(self, refused: _SignatureRefused, what: str, renewals: int) -> None:
        """Forget a refused signed URL; after a fresh one was refused as well, give up (K22)."""
        resolution = self._resolution.get()
        with resolution.lock:
            has_worked = resolution.last_good >= refused.target.generation
            if renewals > 0 and (not has_worked or renewals >= self._policy.max_attempts):
                raise AccessError(
                    f"{what}: a freshly signed URL was refused: {refused.failure}.",
                    hint="The storage behind the Hub rejects its own signature; this does not heal by "
                    "trying again. Check the clock of this machine and proxies in between.",
                    file_path=self.path,
                )
            # Another thread may have replaced it already.
            if resolution.target is not None and resolution.target.generation == refused.target.generation:
                resolution.target = None

    def _attempt(self, start: int, stop: int, growth: Growth | None) -> RangeReply:
        resolution = self._resolution.get()
        found: _Target | RangeReply | None = resolution.target
        if found is None and resolution.served_directly:
            found = self._resolve(resolution, start, stop, growth)
        elif found is None:
            # The first read follows the redirect itself; other threads wait for what it finds.
            with resolution.lock:
                found = resolution.target or self._resolve(resolution, start, stop, growth)
        if isinstance(found, RangeReply):
            return found
        reply = self._request_range(found, start, stop, growth)
        resolution.last_good = max(resolution.last_good, found.generation)
        return reply

    def _ask_size(self, resolution: _Resolution) -> None:
        with resolution.lock:
            if resolution.target is None and resolution.size is None:
                self._resolve(resolution, 0, 1)

    def _resolve(
        self, resolution: _Resolution, start: int, stop: int, growth: Growth | None = None
    ) -> _Target | RangeReply:
        """Ask the stable URL: a signed URL to read from, or at once the bytes of a file served directly."""
        what, url, headers = self._what(start, stop), self._url, self._headers()
        for _ in range(_MAX_REDIRECTS):
            response = self._send(url, start, stop, headers)
            reuse = False
            try:
                if response.status not in _REDIRECTS:
                    self._raise_refusal(response, url)
                    self._check_hash(response)
                    reply = self._verified(response, url, start, stop, growth)
                    resolution.served_directly = True
                    reuse = reply.is_complete
                    return reply
                self._check_hash(response)
                self._learn_linked_size(response)
                following = self._following(response, url, what)
                reuse = self._drain(response)
            finally:
                self._pool.release(response, reuse=reuse)
            if not same_origin(url, following):
                resolution.generation += 1
                resolution.target = _Target(following, resolution.generation)
                return resolution.target
            url = following  # same origin: the token may go along
        raise TransferError(f"{what}: more than {_MAX_REDIRECTS} redirects from {host_of(self._url)}.")

    def _request_range(self, target: _Target, start: int, stop: int, growth: Growth | None) -> RangeReply:
        what, url = self._what(start, stop), target.url
        for _ in range(_MAX_REDIRECTS):
            response = self._send(url, start, stop, {})
            reuse = False
            try:
                if response.status in (401, 403):
                    raise _SignatureRefused(describe_response(response, url), target)
                if response.status not in _REDIRECTS:
                    reply = self._verified(response, url, start, stop, growth)
                    reuse = reply.is_complete
                    return reply
                following = self._following(response, url, what)
                reuse = self._drain(response)
            finally:
                self._pool.release(response, reuse=reuse)
            url = following
        raise TransferError(f"{what}: more than {_MAX_REDIRECTS} redirects from {host_of(target.url)}.")

    def _send(self, url: str, start: int, stop: int, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        self._counters.add(requests=1)
        wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        try:
            return self._pool.get(url, {**headers, **wanted})
        except urllib3.exceptions.HTTPError as error:
            failure = transport_failure(error, self._what(start, stop), url)
        raise failure

    @staticmethod
    def _drain(response: urllib3.BaseHTTPResponse) -> bool:
        """Read the short body of a redirect; returns whether its connection can be used again."""
        try:
            response.read(_MAX_REDIRECT_BODY_BYTES)
            # Closed is what was read to its end.
            return response.closed or not response.read(1)
        except urllib3.exceptions.HTTPError:
            return False

    @staticmethod
    def _following(response: urllib3.BaseHTTPResponse, url: str, what: str) -> str:
        location = response.headers.get("Location")
        if not location:
            raise TransferError(f"{what}: {describe_response(response, url)}, a redirect to nowhere.")
        parts = urlsplit(location)
        # A whole URL, the rule, is the target itself; joining takes as long as parsing a header.
        following = location if parts.scheme and parts.netloc else urljoin(url, location)
        if urlsplit(following).scheme not in ("http", "https"):
            raise TransferError(f"{what}: redirected to {redact(following)}, which is not HTTP.")
        return following

    # -- checks ---------------------------------------------------------------------------------

    def _verified(
        self, response: urllib3.BaseHTTPResponse, url: str, start: int, stop: int, growth: Growth | None
    ) -> RangeReply:
        what = self._what(start, stop)
        reply = verified_range(response, url, what, start, stop, self._size(), growth)
        self._counters.add(requests=0, bytes_read=reply.num_read)
        self._remember_size(reply.size)
        return reply

    def _check_hash(self, response: urllib3.BaseHTTPResponse) -> None:
        found = response.headers.get("X-Xet-Hash")
        if self._content_hash is not None and found is not None and found != self._content_hash:
            raise TransferError(
                f"{self.path}: the content was replaced: hash {found}, expected {self._content_hash} "
                "as listed when the dataset was opened.",
                hint="Open the dataset again, so that its sidecar is rebuilt for the new content.",
                file_path=self.path,
            )

    def _learn_linked_size(self, response: urllib3.BaseHTTPResponse) -> None:
        size = response.headers.get("X-Linked-Size", "")
        if size.isdecimal():
            self._remember_size(int(size))

    def _remember_size(self, size: int) -> None:
        known = self._size()
        if known is not None and known != size:
            raise TransferError(
                f"{self.path}: the file has {size} bytes now, expected {known}.",
                hint="It was replaced since the dataset was opened; open the dataset again.",
                file_path=self.path,
            )
        self._resolution.get().size = size

    def _raise_refusal(self, response: urllib3.BaseHTTPResponse, url: str) -> None:
        """Errors of the stable URL: the Hub itself says that this may not be read, or is not there."""
        status = response.status
        if status not in (401, 403, 404, 410):
            return
        code, message = response.headers.get("X-Error-Code", ""), server_message(response)
        if self._refusal is not None and (refusal := self._refusal(status, code, message)) is not None:
            refusal.fields["file_path"] = self.path
            raise refusal
        failure = f"status {status} from {host_of(url)}{f' ({message})' if message else ''}"
        if status in (404, 410):
            raise NotFoundError(f"{self.path} does not exist: {failure}.", file_path=self.path)
        raise AccessError(f"{self.path} may not be read: {failure}.", file_path=self.path)
