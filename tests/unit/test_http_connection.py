"""Plain HTTP/1.1 on kept-alive connections; the standard library's client says what each reply means."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lrstream.storage.http_connection import HttpConnectionError, HttpResponse, HttpServer

pytestmark = pytest.mark.timeout(60)

# A key of nobody, and its certificate for localhost, valid from 2020 to 2120.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgSHHf5MUrFt+EFSxV
b5xMj54iSKrcCvuqewkEsw+noWqhRANCAATK2Y2WBpnf7YX9D54QuNVHT1VEbn0y
Us0x0GZNWggOftrYwiOifmpxBO7Y/WUrHqpJsN7OjDjGYZceWV0/vcN9
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBoDCCAUagAwIBAgIBATAKBggqhkjOPQQDAjAYMRYwFAYDVQQDDA1scnN0cmVh
bSB0ZXN0MCAXDTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAxMDAwMDAwWjAYMRYwFAYD
VQQDDA1scnN0cmVhbSB0ZXN0MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEytmN
lgaZ3+2F/Q+eELjVR09VRG59MlLNMdBmTVoIDn7a2MIjon5qcQTu2P1lKx6qSbDe
zow4xmGXHlldP73DfaN/MH0wGgYDVR0RBBMwEYIJbG9jYWxob3N0hwR/AAABMA8G
A1UdEwEB/wQFMAMBAf8wDgYDVR0PAQH/BAQDAgKEMB0GA1UdDgQWBBRoESH9CcFj
nh3vJfPhimPa1BBOLTAfBgNVHSMEGDAWgBRoESH9CcFjnh3vJfPhimPa1BBOLTAK
BggqhkjOPQQDAgNIADBFAiBhuO6xpT9SaaKJQaq4Em2ZdbLpWEQXb3sVlTP1l2vZ
agIhAOOTW0sX/eCDxwbH+4gakyT0gbdAnfTkzLhlZvczVbY7
-----END CERTIFICATE-----
"""

Script = Callable[[int, int], tuple[bytes, bool]]
"""Given the number of a connection and of a request on it: what to send, and whether to keep it open."""


class Scripted:
    """A server that sends what it is told, piece by piece, and notes what it is asked."""

    def __init__(
        self, script: Script, *, piece: int = 1 << 20, context: ssl.SSLContext | None = None
    ) -> None:
        self.script, self.piece, self.context = script, piece, context
        self.asked: list[tuple[int, bytes]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        # Closing a listener does not wake who waits for it.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        for number in range(1000):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(number, connection))
            self._threads.append(thread)
            thread.start()

    def _serve(self, number: int, connection: socket.socket) -> None:
        # A client that trusts nobody, or goes away, ends it.
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.context is not None:
                connection = stack.enter_context(self.context.wrap_socket(connection, server_side=True))
            received = b""
            for request in range(1000):
                while b"\r\n\r\n" not in received:
                    more = connection.recv(65536)
                    if not more:
                        return
                    received += more
                head, _, received = received.partition(b"\r\n\r\n")
                self.asked.append((number, head))
                reply, stays_open = self.script(number, request)
                for at in range(0, len(reply), self.piece):
                    connection.sendall(reply[at : at + self.piece])
                if not stays_open:
                    return


@pytest.fixture
def scripted() -> Iterator[Callable[..., tuple[HttpServer, Scripted]]]:
    """Starts servers, and closes what is left of them."""
    with contextlib.ExitStack() as stack:

        def start(script: Script, **options: Any) -> tuple[HttpServer, Scripted]:
            server = Scripted(
                script, **{key: options.pop(key) for key in ("piece", "context") if key in options}
            )
            stack.callback(server.stop)
            scheme = "https" if server.context is not None else "http"
            arguments = {"connections": 4, "connect_timeout_s": 5.0, "read_timeout_s": 5.0, **options}
            client = HttpServer(scheme, arguments.pop("host", "127.0.0.1"), server.port, **arguments)
            stack.callback(client.close)
            return client, server

        yield start


Start = Callable[..., tuple[HttpServer, Scripted]]


def read_all(response: HttpResponse, count: int = 7) -> bytes:
    """The body in short reads of both kinds, in turn."""
    parts: list[bytes] = []
    while True:
        buffer = bytearray(count)
        part = (
            response.read(count) if len(parts) % 2 else bytes(buffer[: response.readinto(memoryview(buffer))])
        )
        parts.append(part)
        if not part:
            return b"".join(parts)


def use(client: HttpServer, *, count: int = 1 << 20, reuse: bool = True) -> bytes:
    """One request, of whose reply so much is read; 0 stands for all, in short reads."""
    response = client.get("/", {})
    try:
        return response.read(count) if count else read_all(response)
    finally:
        response.release(reuse=reuse)


class _Wire:
    """What `http.client.HTTPResponse` wants of a socket."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.data)


BODY = bytes(range(256)) * 3
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
REPLIES = {
    "length": b"HTTP/1.1 206 Partial Content\r\nContent-Length: 768\r\nA-B: bytes 0-767/9\r\n\r\n" + BODY,
    "no bytes": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "no content": b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
    "to the end": b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n\r\n" + BODY,
    "1.0": b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
    "without a reason": b"HTTP/1.1 404\r\nContent-Length: 2\r\n\r\nno",
    "lines of one byte": b"HTTP/1.1 200 OK\nContent-Length: 4\nA: b\n\n\r\n\r\n",
    "names": b"HTTP/1.1 200 OK\r\ncontent-LENGTH:   3  \r\nX-Y:\tz\t\r\nEmpty:\r\n\r\nabc",
    "repeated": b"HTTP/1.1 200 OK\r\nA: 1\r\nContent-Length: 1\r\na: 2\r\n\r\nx",
    "latin-1": "HTTP/1.1 200 OK\r\nA: \xe9\r\nContent-Length: 1\r\n\r\nx".encode("latin-1"),
    "continued": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
    "chunks": CHUNKED + b"3\r\nabc\r\n00a\r\n" + BODY[:10] + b"\r\n0\r\n\r\n",
    "chunks with extras": CHUNKED + b"3;a=b\r\nabc\r\n1 \r\nx\r\n0\r\nTrailer: 1\r\nOther: 2\r\n\r\n",
    "no chunks": CHUNKED + b"0\r\n\r\n",
    "a large chunk": CHUNKED + b"10000\r\n" + bytes(65536) + b"\r\n0\r\n\r\n",
    "both": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n" + CHUNKED[17:] + b"1\r\nx\r\n0\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize("name", REPLIES)
def test_replies_mean_what_they_mean_to_the_standard_library(scripted: Start, name: str, piece: int) -> None:
    reply = REPLIES[name]
    if piece == 1 and len(reply) > 2000:
        piece = 1000
    expected = http.client.HTTPResponse(_Wire(reply), method="GET")  # type: ignore[arg-type]
    expected.begin()
    client, _ = scripted(lambda *_: (reply, False), piece=piece)
    response = client.get("/a?b=c", {"A": "b"})
    assert response.status == expected.status
    for field in expected.headers:
        values = expected.headers.get_all(field) or []
        # White space around a value is no part of it (RFC 9110, 5.5), whatever that client does.
        assert response.headers[field.upper()] == ", ".join(value.strip() for value in values)
    assert {key.lower() for key in expected.headers} == set(response.headers)
    assert response.headers.get("Absent") is None
    assert read_all(response) == expected.read()
    assert response.read(1) == b""
    response.release(reuse=True)
    assert response.read(1) == b""


BROKEN = {
    "cut": (REPLIES["length"][:-3], "ended 3 bytes too early"),
    "cut in its head": (b"HTTP/1.1 200 OK\r\nContent-", "within its head"),
    "nothing": (b"", "without a reply"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP: it begins with 'SSH-2.0-OpenSSH"),
    "no status": (b"HTTP/1.1 OK\r\n\r\n", "not HTTP"),
    "a long head": (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000, "more than 65536 bytes"),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", "no length of"),
    "a negative length": (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\na", "no length of a reply"),
    "interim replies": (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 30, "interim replies"),
    "no chunk": (CHUNKED + b"xyz\r\n", "no size of a chunk"),
    "a negative chunk": (CHUNKED + b"-1\r\n", "no size of a chunk"),
    "a cut chunk": (CHUNKED + b"9\r\nabc", "ended 6 bytes too early"),
    "a long chunk": (CHUNKED + b"1\r\nabc\r\n0\r\n\r\n", "longer than it says"),
    "no last chunk": (CHUNKED + b"1\r\na\r\n", "without a reply"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_whole_reply_is_an_error(scripted: Start, name: str) -> None:
    reply, message = BROKEN[name]
    client, server = scripted(lambda number, _: (reply, False) if number == 0 else (REPLIES["length"], True))
    with pytest.raises(HttpConnectionError, match=message):
        use(client, count=0)
    again = client.get("/", {})
    assert read_all(again) == BODY
    again.release(reuse=True)
    assert [number for number, _ in server.asked] == [0, 1], "a broken connection was used again"


def test_early_hints_are_stepped_over(scripted: Start) -> None:
    client, _ = scripted(lambda *_: (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + REPLIES["names"], True))
    response = client.get("/", {})
    assert (response.status, read_all(response), response.headers.get("Link")) == (200, b"abc", None)
    response.release(reuse=True)


def test_what_is_sent(scripted: Start) -> None:
    client, server = scripted(lambda *_: (REPLIES["no bytes"], True), host="localhost")
    client.get("/a%20b?c=d", {"Range": "bytes=0-9", "Accept-Encoding": "identity"}).release(reuse=True)
    assert server.asked[0][1].decode("ascii").split("\r\n") == [
        "GET /a%20b?c=d HTTP/1.1",
        f"Host: localhost:{server.port}",
        "Range: bytes=0-9",
        "Accept-Encoding: identity",
    ]
    for value in ("a\r\nHost: b", "a\nb", "a\r"):
        with pytest.raises(ValueError, match="end of a line"):
            client.get("/", {"A": value})
    for _ in range(8):  # none of these holds a connection
        client.get("/", {}).release(reuse=True)


CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"
KEEPING = b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\nx"


@pytest.mark.parametrize(
    ("reply", "options", "numbers"),
    [
        (REPLIES["length"], {}, [0, 0, 0]),
        (REPLIES["chunks"], {}, [0, 0, 0]),
        (REPLIES["no content"], {}, [0, 0, 0]),
        (KEEPING, {}, [0, 0, 0]),
        (REPLIES["length"], {"count": 767}, [0, 1, 2]),
        (REPLIES["chunks"], {"count": 13}, [0, 1, 2]),
        (REPLIES["length"], {"reuse": False}, [0, 1, 2]),
        (CLOSING, {}, [0, 1, 2]),
    ],
)
def test_a_connection_is_used_again_where_it_may_be(
    scripted: Start, reply: bytes, options: dict[str, Any], numbers: list[int]
) -> None:
    client, server = scripted(lambda *_: (reply, True))
    for _ in numbers:
        use(client, **options)
    assert [number for number, _ in server.asked] == numbers
    assert client.num_opened == numbers[-1] + 1


def test_a_connection_that_the_server_closed_is_replaced(scripted: Start) -> None:
    client, server = scripted(lambda number, request: (REPLIES["length"], request == 0))
    assert use(client) == use(client) == BODY
    server._threads[1].join()  # the second reply was its last
    assert use(client) == BODY
    assert [number for number, _ in server.asked] == [0, 0, 1]


def test_bytes_that_nobody_asked_for_end_a_connection(scripted: Start) -> None:
    client, server = scripted(lambda *_: (REPLIES["no bytes"] + b"HTTP/1.1 200 OK\r\n", True))
    use(client)
    use(client)
    assert [number for number, _ in server.asked] == [0, 1]


def test_no_more_connections_than_allowed(scripted: Start) -> None:
    client, server = scripted(lambda *_: (REPLIES["length"], True), connections=2)
    held = [client.get("/", {}) for _ in range(2)]
    third = threading.Thread(target=use, args=(client,))
    third.start()
    third.join(0.1)
    assert third.is_alive()
    assert len(server.asked) == 2
    assert read_all(held[0]) == BODY
    held[0].release(reuse=True)
    held[0].release(reuse=True)  # once is enough
    third.join(10)
    assert not third.is_alive()
    held[1].release(reuse=False)
    assert client.num_opened == 2


def test_closing(scripted: Start) -> None:
    client, server = scripted(lambda *_: (REPLIES["length"], True))
    held = client.get("/", {})
    use(client)
    client.close()
    assert read_all(held) == BODY, "a reply in hand is read to its end"
    held.release(reuse=True)
    for thread in server._threads[1:]:
        thread.join(10)
        assert not thread.is_alive(), "a connection stayed open"


def test_a_server_that_says_nothing(scripted: Start) -> None:
    client, _ = scripted(lambda *_: (REPLIES["length"][:-1], True), read_timeout_s=0.05)
    response = client.get("/", {})
    with pytest.raises(HttpConnectionError, match="broke off: TimeoutError"):
        read_all(response)
    response.release(reuse=False)
    silent = HttpServer("http", "127.0.0.1", 9, connections=1, connect_timeout_s=1.0, read_timeout_s=1.0)
    with pytest.raises(HttpConnectionError, match="no connection: ConnectionRefusedError"):
        silent.get("/", {})


def test_tls_is_checked(scripted: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(CERTIFICATE, encoding="ascii")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    options = {"context": context, "host": "localhost", "piece": 5}
    stranger, _ = scripted(lambda *_: (REPLIES["chunks"], True), **options)
    with pytest.raises(HttpConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.get("/", {})
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", os.fspath(trusted))
    client, server = scripted(lambda *_: (REPLIES["chunks"], True), **options)
    assert use(client) == use(client) == b"abc" + BODY[:10]
    assert [number for number, _ in server.asked] == [0, 0]
    # The name counts, too.
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: resolve("127.0.0.1", *rest, **more)
    )
    limits = {"connect_timeout_s": 5.0, "read_timeout_s": 5.0}
    with pytest.raises(HttpConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        HttpServer("https", "other.example", server.port, connections=1, **limits).get("/", {})
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", os.fspath(tmp_path / "absent.pem"))
    with pytest.raises(HttpConnectionError, match=r"absent\.pem cannot be read"):
        HttpServer("https", "localhost", 1, connections=1, **limits)
