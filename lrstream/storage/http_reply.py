"""Replies to range requests: believed only as far as they prove themselves (K20).

A reply must be 206 with the very range that was asked for, or 200 where the whole file was; its headers
must agree with each other and its body must be as long as they say. Of any other reply no more than the
first bytes are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import urllib3

from lrstream.errors import LrstreamError, TransferError
from lrstream.storage.http_pool import describe_response, host_of, redact
from lrstream.storage.reachable import has_answered, is_unresolved
from lrstream.storage.retry import RETRYABLE_STATUSES, told_wait_s

__all__ = ["Growth", "RangeReply", "RetryLater", "transport_failure", "verified_range"]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_UNSATISFIED = re.compile(r"bytes \*/(\d+)")
_PIECE_BYTES = 1 << 20
# As much as this of a reply is read and thrown away: that takes less time than a new connection.
_MAX_DRAINED_BYTES = 256 * 1024


class RangeReply(NamedTuple):
    """Verified bytes of a range, and the size of the whole file in bytes.

    Attributes:
        data: The bytes.
        size: Size of the file.
        num_read: Bytes of the body that were read, those thrown away included.
        is_complete: Whether that is all of it, so that the connection can be used again.
    """

    data: bytes
    size: int
    num_read: int = 0
    is_complete: bool = True


class Growth(NamedTuple):
    """How much of a reply to read.

    Attributes:
        first: Bytes to read at first.
        stop_of: Given these and the size of the file, how many to read in all.
    """

    first: int
    stop_of: Callable[[bytes, int], int]


class RetryLater(Exception):
    """An attempt failed in a way that may pass.

    Attributes:
        failure: What went wrong, without secrets.
        told_s: Seconds that the server asked to wait, None if it did not.
        unresolved: Whether the name of a host could not be resolved that has never answered.
    """

    def __init__(self, failure: str, told_s: float | None = None, unresolved: bool = False) -> None:
        super().__init__(failure)
        self.failure = failure
        self.told_s = told_s
        self.unresolved = unresolved


def transport_failure(error: urllib3.exceptions.HTTPError, what: str, url: str) -> Exception:
    """What to raise when no complete response arrived: `RetryLater`, or an error that will not pass."""
    text = f"{type(error).__name__} at {host_of(url)}: {redact(str(error))}"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return TransferError(
            f"{what}: {text}.",
            hint="The certificate of the server, or of a proxy in between, is not trusted on this machine "
            "(REQUESTS_CA_BUNDLE names the trusted ones).",
        )
    return RetryLater(text, unresolved=is_unresolved(error) and not has_answered(url))


def verified_range(
    response: urllib3.BaseHTTPResponse,
    url: str,
    what: str,
    start: int,
    stop: int,
    known_size: int | None,
    growth: Growth | None = None,
) -> RangeReply:
    """Read the body of a reply to a request for ``[start, stop)``.

    Args:
        response: The reply; its status is neither a redirect nor a refusal.
        url: What was asked, for messages.
        what: File and range, for messages.
        start: First byte.
        stop: End of the range, half-open; may lie behind the end of the file.
        known_size: Size of the file in bytes if known.
        growth: How much of it to read; all if None.

    Raises:
        RetryLater: The failure may pass.
        TransferError: The reply is not what was asked for.
    """
    status = response.status
    if status in RETRYABLE_STATUSES:
        raise RetryLater(describe_response(response, url), told_wait_s(response.headers))
    if status == 416:
        match = _UNSATISFIED.fullmatch(response.headers.get("Content-Range", "").strip())
        if match is not None and start >= int(match[1]):
            return RangeReply(b"", int(match[1]))
    if status == 200:
        return _whole_file(response, url, what, start, stop, known_size, growth)
    if status != 206:
        raise _refused(f"{what}: {describe_response(response, url)}, expected 206 Partial Content.")
    header = response.headers.get("Content-Range")
    match = _CONTENT_RANGE.fullmatch((header or "").strip())
    if match is None:
        raise _refused(
            f"{what}: {host_of(url)} sent part of the file without saying which (Content-Range: {header!r})."
        )
    first, last = int(match[1]), int(match[2])
    size = known_size if match[3] == "*" else int(match[3])
    if size is None:
        raise _refused(f"{what}: {host_of(url)} does not tell the size of the file.")
    if first != start or last + 1 != min(stop, size):
        raise _refused(
            f"{what}: {host_of(url)} sent bytes [{first}, {last + 1}) of {size} instead.",
            hint="A proxy or server in between answers ranges wrongly, or the file was replaced.",
        )
    return _body(response, url, what, last + 1 - first, size, growth)


def _whole_file(
    response: urllib3.BaseHTTPResponse,
    url: str,
    what: str,
    start: int,
    stop: int,
    known_size: int | None,
    growth: Growth | None,
) -> RangeReply:
    """A 200 is right only where the whole file was asked for; otherwise nothing is read of it."""
    length = response.headers.get("Content-Length")
    size = int(length) if length is not None and length.isdecimal() else known_size
    if start == 0 and size is not None and size <= stop:
        return _body(response, url, what, size, size, growth)
    raise _refused(
        f"{what}: {host_of(url)} ignored the range and answered with the whole file (status 200, expected "
        "206).",
        hint="The server, or a proxy in between, does not support ranges, and nothing can be streamed "
        "through it: use another one, or copy the dataset to a local directory.",
    )


def _body(
    response: urllib3.BaseHTTPResponse, url: str, what: str, length: int, size: int, growth: Growth | None
) -> RangeReply:
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _refused(
            f"{what}: {host_of(url)} sent the range encoded ({encoding}), which was not asked for."
        )
    declared = response.headers.get("Content-Length")
    if declared is not None and declared.isdecimal() and int(declared) != length:
        raise _refused(f"{what}: {host_of(url)} declares a body of {declared} bytes, expected {length}.")
    body = _Body(response, url, what, length)
    if growth is None:
        data = body.read(length)
    else:
        data = body.read(min(growth.first, length))
        if body.left:
            data += body.read(max(min(growth.stop_of(data, size), length) - len(data), 0))
    if body.left <= _MAX_DRAINED_BYTES:
        body.read(body.left)
        body.end()
    return RangeReply(data, size, length - body.left, body.left == 0)


class _Body:
    """The body of a reply, read in pieces; complete, or an error says what is missing."""

    def __init__(self, response: urllib3.BaseHTTPResponse, url: str, what: str, length: int) -> None:
        self._response = response
        self._url = url
        self._what = what
        self._length = length
        self.left = length

    def read(self, count: int) -> bytes:
        """The next `count` bytes."""
        pieces: list[bytes] = []
        missing = count
        while missing:
            piece = self._piece(min(_PIECE_BYTES, missing))
            if not piece:
                raise RetryLater(
                    f"the reply of {host_of(self._url)} ended after {self._length - self.left} of "
                    f"{self._length} bytes"
                )
            pieces.append(piece)
            missing -= len(piece)
            self.left -= len(piece)
        # Most replies come in one piece, which need not be copied.
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self) -> None:
        """Require that nothing follows."""
        # Closed is what ended where its headers said.
        if not self._response.closed and self._piece(1):
            raise _refused(
                f"{self._what}: {host_of(self._url)} sent more than the {self._length} bytes of the range."
            )

    def _piece(self, count: int) -> bytes:
        try:
            return self._response.read(count)
        except urllib3.exceptions.HTTPError as error:
            failure = transport_failure(error, self._what, self._url)
        raise failure


def _refused(message: str, hint: str | None = None) -> LrstreamError:
    return TransferError(message, hint=hint)
