"""Verified byte ranges of one file behind HTTP redirects to signed URLs (LD-12, K20, K22, K30).

The Hub answers a file's stable URL (*resolve* URL) with a redirect to a signed, expiring URL on another
origin. The signed URL is kept and used by all later reads of the file; when it stops working it is
resolved again, once for all threads. Nothing that a server sends is believed unchecked: a reply must be
206 with the very range that was asked for (or 200 for a whole file), and as long as it says.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

import urllib3

from lrstream.errors import AccessError, NotFoundError, TransferError
from lrstream.storage.byte_source import TransferCounters, check_range
from lrstream.storage.http_pool import HttpPool, describe_response, host_of, redact, same_origin
from lrstream.storage.per_process import PerProcess
from lrstream.storage.retry import RETRYABLE_STATUSES, RetryCounters, RetryPolicy, RetrySchedule, told_wait_s

__all__ = ["HttpByteSource"]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Below this a part of a range is not worth a request of its own.
_MIN_SUBRANGE_BYTES = 256 * 1024
_PIECE_BYTES = 1 << 20


class _Target(NamedTuple):
    """Where the bytes are now: a signed URL, and which resolution gave it."""

    url: str
    generation: int


class _Part(NamedTuple):
    """Verified bytes of a range, and the size of the file."""

    data: bytes
    size: int


class _Resolution:
    """The signed URL of one file in one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.target: _Target | None = None
        self.generation = 0
        self.served_directly = False
        self.size: int | None = None


class _RetryLater(Exception):
    """An attempt failed in a way that may pass; carries what to tell the schedule."""

    def __init__(self, failure: str, told_s: float | None = None) -> None:
        super().__init__(failure)
        self.failure = failure
        self.told_s = told_s


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
        self._resolution = PerProcess(_Resolution)

    def size(self) -> int:
        """Size in bytes; costs a request of one byte where it is not known yet."""
        size = self._size()
        return self.read_upto(0, 1)[1] if size is None else size

    def _size(self) -> int | None:
        return self._known_size if self._known_size is not None else self._resolution.get().size

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

    def _read_exactly(self, start: int, stop: int) -> bytes:
        data, size = self._read(start, stop)
        if len(data) != stop - start:
            raise TransferError(
                f"{self.path}: bytes [{start}, {stop}) were wanted, but the file ends at {size}.",
                hint="It was replaced since it was indexed.",
                file_path=self.path,
                start=start,
                stop=stop,
            )
        return data

    def read_upto(self, start: int, stop: int) -> tuple[bytes, int]:
        """The bytes of ``[start, min(stop, size))`` and the size of the file."""
        check_range(self.path, start, stop)
        size = self._size()
        if size is not None:
            stop = min(stop, size)
            if start >= stop:
                return b"", size
        elif start == stop:
            return b"", self.size()
        return self._read(start, stop)

    def close(self) -> None:
        """Forget the signed URL; the connections belong to the store."""
        self._resolution.drop()

    # -- one verified range, with retries -------------------------------------------------------

    def _read(self, start: int, stop: int) -> _Part:
        what = f"{self.path}, bytes [{start}, {stop})"
        schedule = RetrySchedule(self._policy, what, self._retry_counters)
        renewed = False
        while True:
            try:
                return self._attempt(start, stop)
            except _SignatureRefused as refused:
                # Once more with a fresh signature: after that it is no expiry but a refusal.
                if renewed:
                    raise AccessError(
                        f"{what}: a freshly signed URL was refused: {refused.failure}.",
                        hint="The storage behind the Hub rejects its own signature; this does not heal by "
                        "trying again. Check the clock of this machine and proxies in between.",
                        file_path=self.path,
                    ) from None
                renewed = True
                self._forget(refused.target)
            except _RetryLater as failed:
                schedule.wait(failed.failure, told_s=failed.told_s)
            except urllib3.exceptions.HTTPError as error:
                schedule.wait(f"{type(error).__name__} at {host_of(self._url)}: {redact(str(error))}")

    def _attempt(self, start: int, stop: int) -> _Part:
        resolution = self._resolution.get()
        target = resolution.target
        if target is None:
            if resolution.served_directly:
                found = self._resolve(resolution, start, stop)
            else:
                # The first read follows the redirect itself; other threads wait for what it finds.
                with resolution.lock:
                    found = resolution.target or self._resolve(resolution, start, stop)
            if isinstance(found, _Part):
                return found
            target = found
        return self._request_range(target, start, stop)

    def _forget(self, target: _Target) -> None:
        """Drop a refused signed URL, unless another thread has replaced it already."""
        resolution = self._resolution.get()
        with resolution.lock:
            if resolution.target is not None and resolution.target.generation == target.generation:
                resolution.target = None

    def _resolve(self, resolution: _Resolution, start: int, stop: int) -> _Target | _Part:
        """Ask the stable URL: a signed URL to read from, or at once the bytes of a file served directly."""
        url, headers = self._url, self._headers()
        for _ in range(_MAX_REDIRECTS):
            response = self._send(url, start, stop, headers)
            reuse = False
            try:
                if response.status not in _REDIRECTS:
                    result = self._checked_body(response, url, start, stop, signed=False)
                    resolution.served_directly = True
                    reuse = True
                    return result
                self._check_hash(response)
                location = response.headers.get("Location")
                if not location:
                    raise TransferError(
                        f"{self.path}: {describe_response(response, url)}, without a Location."
                    )
                response.read(_PIECE_BYTES)
                reuse = True
            finally:
                self._pool.release(response, reuse=reuse)
            following = urljoin(url, location)
            if urlsplit(following).scheme not in ("http", "https"):
                raise TransferError(f"{self.path}: redirected to {redact(following)}, which is not HTTP.")
            if not same_origin(url, following):
                resolution.generation += 1
                resolution.target = _Target(following, resolution.generation)
                return resolution.target
            url = following  # same origin: the token may go along
        raise TransferError(f"{self.path}: more than {_MAX_REDIRECTS} redirects from {host_of(self._url)}.")

    def _request_range(self, target: _Target, start: int, stop: int) -> _Part:
        url = target.url
        for _ in range(_MAX_REDIRECTS):
            response = self._send(url, start, stop, {})
            reuse = False
            try:
                if response.status in (401, 403):
                    raise _SignatureRefused(describe_response(response, url), target)
                if response.status not in _REDIRECTS:
                    result = self._checked_body(response, url, start, stop, signed=True)
                    reuse = True
                    return result
                location = response.headers.get("Location")
            finally:
                self._pool.release(response, reuse=reuse)
            if not location:
                raise TransferError(f"{self.path}: a redirect from {host_of(url)} without a Location.")
            url = urljoin(url, location)
        raise TransferError(f"{self.path}: more than {_MAX_REDIRECTS} redirects from {host_of(target.url)}.")

    def _send(self, url: str, start: int, stop: int, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        self._counters.add(requests=1)
        wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        return self._pool.get(url, {**headers, **wanted})

    # -- checks ---------------------------------------------------------------------------------

    def _check_hash(self, response: urllib3.BaseHTTPResponse) -> None:
        found = response.headers.get("X-Xet-Hash")
        if self._content_hash is not None and found is not None and found != self._content_hash:
            raise TransferError(
                f"{self.path}: the content was replaced: hash {found}, expected {self._content_hash} "
                "as listed when the dataset was opened.",
                hint="Open the dataset again, so that its sidecar is rebuilt for the new content.",
                file_path=self.path,
            )

    def _checked_body(
        self, response: urllib3.BaseHTTPResponse, url: str, start: int, stop: int, *, signed: bool
    ) -> _Part:
        what = f"{self.path}, bytes [{start}, {stop})"
        status = response.status
        if status in RETRYABLE_STATUSES:
            told_s = told_wait_s(response.headers)
            raise _RetryLater(describe_response(response, url), told_s)
        if status == 416:
            size = self._size_of_unsatisfied(response)
            if size is not None and start >= size:
                self._remember_size(size)
                return _Part(b"", size)
        if not signed:
            self._raise_refusal(response, url)
            self._check_hash(response)
        if status == 200:
            return self._whole_file(response, url, start, stop)
        if status != 206:
            raise TransferError(
                f"{what}: {describe_response(response, url)}, expected 206 Partial Content.",
                file_path=self.path,
            )
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        if match is None:
            raise TransferError(
                f"{what}: {host_of(url)} sent part of the file without saying which "
                f"(Content-Range: {response.headers.get('Content-Range')!r}).",
                file_path=self.path,
            )
        first, last = int(match.group(1)), int(match.group(2))
        size = self._size() if match.group(3) == "*" else int(match.group(3))
        if size is None:
            raise TransferError(f"{what}: {host_of(url)} does not tell the size of the file.")
        self._remember_size(size)
        if first != start or last + 1 != min(stop, size):
            raise TransferError(
                f"{what}: {host_of(url)} sent bytes [{first}, {last + 1}) of {size} instead.",
                hint="A proxy or server in between answers ranges wrongly.",
                file_path=self.path,
            )
        return _Part(self._body(response, url, last + 1 - first), size)

    def _whole_file(self, response: urllib3.BaseHTTPResponse, url: str, start: int, stop: int) -> _Part:
        """A 200 is right only where the whole file was asked for; otherwise nothing is read of it."""
        length = response.headers.get("Content-Length")
        size = int(length) if length is not None and length.isdecimal() else self._size()
        if start == 0 and size is not None and size <= stop:
            self._remember_size(size)
            return _Part(self._body(response, url, size), size)
        raise TransferError(
            f"{self.path}, bytes [{start}, {stop}): {host_of(url)} ignored the Range and answered with the "
            "whole file (status 200, expected 206).",
            hint="The server, or a proxy in between, does not support ranges; the dataset cannot be streamed "
            "through it.",
            file_path=self.path,
        )

    def _body(self, response: urllib3.BaseHTTPResponse, url: str, length: int) -> bytes:
        declared = response.headers.get("Content-Length")
        if declared is not None and declared.isdecimal() and int(declared) != length:
            raise TransferError(
                f"{self.path}: {host_of(url)} declares a body of {declared} bytes for a range of {length}.",
                file_path=self.path,
            )
        buffer = bytearray(length)
        view = memoryview(buffer)
        filled = 0
        while filled < length:
            piece = response.read(min(_PIECE_BYTES, length - filled))
            if not piece:
                raise _RetryLater(f"the reply of {host_of(url)} ended after {filled} of {length} bytes")
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
        self._counters.add(requests=0, bytes_read=length)
        if response.read(1):
            raise TransferError(
                f"{self.path}: {host_of(url)} sent more than the {length} bytes of the range.",
                file_path=self.path,
            )
        return bytes(buffer)

    def _remember_size(self, size: int) -> None:
        known = self._size()
        if known is not None and known != size:
            raise TransferError(
                f"{self.path}: the file has {size} bytes now, expected {known}.",
                hint="It was replaced since the dataset was opened; open the dataset again.",
                file_path=self.path,
            )
        self._resolution.get().size = size

    @staticmethod
    def _size_of_unsatisfied(response: urllib3.BaseHTTPResponse) -> int | None:
        match = re.fullmatch(r"bytes \*/(\d+)", response.headers.get("Content-Range", "").strip())
        return int(match.group(1)) if match else None

    def _raise_refusal(self, response: urllib3.BaseHTTPResponse, url: str) -> None:
        """Errors of the stable URL: the Hub itself says that this may not be read, or is not there."""
        status = response.status
        if status not in (401, 403, 404, 410):
            return
        code = response.headers.get("X-Error-Code", "")
        failure = describe_response(response, url)
        if status in (404, 410) and code != "RepoNotFound":
            raise NotFoundError(
                f"{self.path} does not exist: {failure}.", file_path=self.path, error_code=code
            )
        raise AccessError(
            f"{self.path}: {failure}{f', {code}' if code else ''}.",
            hint="Make a token with access to it available to every worker (hf auth login, or HF_TOKEN).",
            file_path=self.path,
            error_code=code,
        )
