"""GET requests over kept-alive connections to one server (RFC 9110, RFC 9112).

A build asks two requests for each video, and a loader one for each span, from many threads of one
interpreter: there the general client libraries take several times as long as everything else that is done
about a request. So the few parts of HTTP/1.1 that a range needs are here: a request without a body; a head;
and a body whose length is told, that comes in chunks, or that ends with the connection.
"""

from __future__ import annotations

import collections
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import NoReturn

import urllib3
from urllib3.util.ssl_ import create_urllib3_context
from urllib3.util.wait import wait_for_read

__all__ = ["HttpConnectionError", "HttpResponse", "HttpServer", "ResponseHeaders"]

_MAX_HEAD_BYTES = 64 * 1024
_MAX_LINE_BYTES = 16 * 1024  # of a chunk's size, extensions included
# A head is a few hundred bytes, and what comes with it is copied once more.
_RECEIVE_BYTES = 16 * 1024
_MAX_INTERIM_REPLIES = 16
_WITHOUT_BODY = frozenset({204, 304})
_NOTHING = memoryview(b"")


class HttpConnectionError(urllib3.exceptions.HTTPError):
    """No reply arrived, not all of it, or none that is HTTP."""


class ResponseHeaders(Mapping[str, str]):
    """Header fields of a reply; names without regard to case, repeated fields joined by commas."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, str]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        return self._fields[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class HttpServer:
    """Connections to one server. Thread-safe.

    Args:
        scheme: ``http`` or ``https``.
        host: Name or address.
        port: Port.
        connections: Most of them at a time; further requests wait for one.
        connect_timeout_s: Longest time to open one.
        read_timeout_s: Longest time without a byte.

    Attributes:
        num_opened: Connections opened so far.
    """

    def __init__(
        self,
        scheme: str,
        host: str,
        port: int,
        *,
        connections: int,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        self.num_opened = 0
        self._address = host, port
        self._timeouts_s = connect_timeout_s, read_timeout_s
        self._context = _tls_context() if scheme == "https" else None
        name = host if host.isascii() else host.encode("idna").decode("ascii")
        name = f"[{name}]" if ":" in name else name
        name = name if port == (443 if scheme == "https" else 80) else f"{name}:{port}"
        self._head = f" HTTP/1.1\r\nHost: {name}\r\n"
        self._free = threading.Semaphore(connections)
        self._idle: collections.deque[_Connection] = collections.deque()
        self._closed = False

    def get(self, target: str, headers: Mapping[str, str]) -> HttpResponse:
        """Send a GET and read the head of the reply; `HttpResponse.release` must be called.

        Args:
            target: Path and query.
            headers: Header fields beside ``Host``.

        Raises:
            HttpConnectionError: No reply arrived.
        """
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if fields.count("\r") != len(headers) or fields.count("\n") != len(headers):
            raise ValueError("a header field contains the end of a line")
        request = f"GET {target}{self._head}{fields}\r\n".encode("latin-1")
        self._free.acquire()
        connection: _Connection | None = None
        try:
            connection = self._take()
            connection.send(request)
            return HttpResponse(self, connection)
        except BaseException:
            self.give_back(connection, reuse=False)
            raise

    def give_back(self, connection: _Connection | None, *, reuse: bool) -> None:
        """End the use of a connection."""
        if connection is not None:
            if reuse and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()
        self._free.release()

    def close(self) -> None:
        """Close the connections that nobody uses, and each other one when it is given back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> _Connection:
        """The connection that was used last, as long as the server keeps it open, or a new one."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if not connection.is_stale():
                return connection
            connection.close()
        self.num_opened += 1
        return _Connection(*self._address, self._timeouts_s, self._context)


class HttpResponse:
    """The reply to one request. Belongs to one thread.

    Attributes:
        status: Status code.
        headers: Header fields.
    """

    def __init__(self, server: HttpServer, connection: _Connection) -> None:
        self._server = server
        self._connection: _Connection | None = connection
        for _ in range(_MAX_INTERIM_REPLIES):
            version, self.status, fields = connection.head()
            if self.status >= 200:
                break
        else:
            raise HttpConnectionError(f"more than {_MAX_INTERIM_REPLIES} interim replies")
        self.headers = ResponseHeaders(fields)
        tokens = fields.get("connection", "").lower()
        self._keeps_open = "close" not in tokens and (version >= "HTTP/1.1" or "keep-alive" in tokens)
        coding, length = fields.get("transfer-encoding"), fields.get("content-length")
        # Bytes of the body, or of the chunk, that are still to come; None until the connection ends.
        self._left: int | None = None
        self._chunked = False
        self._ended = False
        if self.status in _WITHOUT_BODY:
            self._left = 0
        elif coding is not None:
            self._chunked = coding.lower().rpartition(",")[2].strip() == "chunked"
            if self._chunked:
                self._left = 0
        elif length is not None:
            self._left = _length_of(length)
        if self._left is None:
            self._keeps_open = False

    def read(self, count: int) -> bytes:
        """The next `count` bytes of the body; fewer only at its end.

        Raises:
            HttpConnectionError: The connection ends before the body does.
        """
        connection = self._connection
        if connection is None:
            return b""
        if self._left is not None and not self._chunked:
            count = min(count, self._left)
            data = connection.read(count)
            self._left -= len(data)
            if len(data) < count:
                self._cut_off()
            return data
        buffer = bytearray(count)
        view = memoryview(buffer)
        filled = 0
        while filled < count:
            num_bytes = self.readinto(view[filled:])
            if num_bytes == 0:
                break
            filled += num_bytes
        return bytes(view[:filled])

    def readinto(self, view: memoryview) -> int:
        """Read some bytes of the body into a writable view of bytes; 0 at its end.

        Raises:
            HttpConnectionError: The connection ends before the body does.
        """
        connection = self._connection
        if connection is None or self._ended or len(view) == 0:
            return 0
        if self._chunked and self._left == 0:
            self._left = connection.chunk()
            if self._left == 0:
                self._ended = True
                return 0
        if self._left is None:
            count = connection.readinto(view)
            self._ended = count == 0
            return count
        if self._left == 0:
            return 0
        count = connection.readinto(view[: self._left])
        if count == 0:
            self._cut_off()
        self._left -= count
        if self._chunked and self._left == 0:
            connection.end_of_chunk()
        return count

    def release(self, *, reuse: bool) -> None:
        """Give the connection back, for the next request if all of the body was read, or close it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            is_complete = self._ended if self._chunked else self._left == 0
            self._server.give_back(connection, reuse=reuse and is_complete and self._keeps_open)

    def _cut_off(self) -> NoReturn:
        raise HttpConnectionError(f"the reply ended {self._left} bytes too early")


class _Connection:
    """One connection, and what was received and not read yet."""

    def __init__(
        self, host: str, port: int, timeouts_s: tuple[float, float], context: ssl.SSLContext | None
    ) -> None:
        connect_s, read_s = timeouts_s
        self._received = _NOTHING
        try:
            opened = socket.create_connection((host, port), connect_s)
        except OSError as error:
            raise _failed("no connection", error) from error
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                opened = context.wrap_socket(opened, server_hostname=host)
            opened.settimeout(read_s)
        except BaseException as error:
            opened.close()
            if isinstance(error, OSError):
                raise _failed("no connection", error) from error
            raise
        self._socket = opened

    def is_stale(self) -> bool:
        """Whether the server has closed it, or sent what nobody asked for."""
        return bool(self._received) or wait_for_read(self._socket, timeout=0.0)

    def send(self, request: bytes) -> None:
        """Send a whole request."""
        try:
            self._socket.sendall(request)
        except OSError as error:
            raise _failed("the request could not be sent", error) from error

    def head(self) -> tuple[str, int, dict[str, str]]:
        """Version, status and header fields (names in lower case) of the next reply."""
        data = self._until(b"\r\n\r\n", b"\n\n", _MAX_HEAD_BYTES)
        lines = data.decode("latin-1").split("\n")
        version, _, rest = lines[0].rstrip("\r").partition(" ")
        status = rest[:3]
        if not version.startswith("HTTP/1.") or len(status) != 3 or not status.isdecimal():
            raise HttpConnectionError(f"the reply is not HTTP: it begins with {lines[0][:60]!r}")
        fields: dict[str, str] = {}
        name = ""
        for line in lines[1:]:
            if line[:1] in (" ", "\t"):  # a folded line, which continues the one before
                if name:
                    fields[name] = f"{fields[name]} {line.strip()}"
                continue
            name, colon, value = line.partition(":")
            if not colon:
                name = ""
                continue
            name, value = name.strip().lower(), value.strip()
            fields[name] = f"{fields[name]}, {value}" if name in fields else value
        return version, int(status), fields

    def chunk(self) -> int:
        """Size of the next chunk of a body; 0 behind the last one, when its trailer is read, too."""
        line = self._until(b"\n", b"\n", _MAX_LINE_BYTES)
        digits = line.partition(b";")[0].strip()
        try:
            if not digits.isalnum():
                raise ValueError
            size = int(digits, 16)
        except ValueError:
            raise HttpConnectionError(f"{bytes(line[:20])!r} is no size of a chunk") from None
        if size == 0:
            while self._until(b"\n", b"\n", _MAX_LINE_BYTES).strip():
                pass
        return size

    def end_of_chunk(self) -> None:
        """Step over the end of the line behind a chunk."""
        if self._until(b"\n", b"\n", _MAX_LINE_BYTES).strip():
            raise HttpConnectionError("a chunk is longer than it says")

    def read(self, count: int) -> bytes:
        """`count` bytes; fewer where the connection ends."""
        if count <= len(self._received):
            data = bytes(self._received[:count])
            self._received = self._received[count:]
            return data
        buffer = bytearray(count)
        view = memoryview(buffer)
        filled = 0
        while filled < count:
            num_bytes = self.readinto(view[filled:])
            if num_bytes == 0:
                break
            filled += num_bytes
        return bytes(view[:filled])

    def readinto(self, view: memoryview) -> int:
        """Some bytes; 0 where the connection ends."""
        if self._received:
            count = min(len(view), len(self._received))
            view[:count] = self._received[:count]
            self._received = self._received[count:]
            return count
        try:
            return self._socket.recv_into(view)
        except OSError as error:
            raise _failed("the reply broke off", error) from error

    def close(self) -> None:
        self._socket.close()

    def _until(self, mark: bytes, other: bytes, limit: int) -> bytes:
        """What comes before the first of two marks, which is stepped over."""
        data = bytes(self._received)
        while True:
            at, length = data.find(mark), len(mark)
            before = data.find(other, 0, None if at < 0 else at)
            if before >= 0:
                at, length = before, len(other)
            if at >= 0:
                self._received = memoryview(data)[at + length :]
                return data[:at]
            if len(data) > limit:
                raise HttpConnectionError(f"a head, or a line in it, of more than {limit} bytes")
            try:
                more = self._socket.recv(_RECEIVE_BYTES)
            except OSError as error:
                raise _failed("no reply", error) from error
            if not more:
                what = (
                    "the reply ended within its head" if data else "the connection was closed without a reply"
                )
                raise HttpConnectionError(what)
            data = data + more if data else more


def _length_of(text: str) -> int:
    """Value of ``Content-Length``, which may be repeated (RFC 9110, 8.6)."""
    values = {value.strip() for value in text.split(",")}
    value = values.pop()
    if values or not (value.isascii() and value.isdecimal()):
        raise HttpConnectionError(f"{text[:40]!r} is no length of a reply")
    return int(value)


def _failed(what: str, error: OSError) -> HttpConnectionError:
    return HttpConnectionError(f"{what}: {type(error).__name__}: {error}")


def _tls_context() -> ssl.SSLContext:
    """Certificates are checked against those of the system, or those that the environment names."""
    context = create_urllib3_context()
    context.check_hostname = True
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["http/1.1"])
    certificates = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    try:
        if not certificates:
            context.load_default_certs()
        elif os.path.isdir(certificates):
            context.load_verify_locations(capath=certificates)
        else:
            context.load_verify_locations(cafile=certificates)
    except OSError as error:
        raise _failed(f"the certificates of {certificates} cannot be read", error) from error
    return context
