"""HTTP connections of one process, and what may be said about a URL or a response.

Redirects, retries and credentials are decided by the caller, request by request: this module only
carries requests over kept-alive connections, through the proxies that the environment names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3

from lrstream.storage.http_connection import HttpResponse, HttpServer
from lrstream.storage.per_process import PerProcess
from lrstream.storage.reachable import note_answer

__all__ = [
    "HttpPool",
    "Response",
    "describe_response",
    "host_of",
    "is_http",
    "redact",
    "same_origin",
    "server_message",
]

# Longest body of an error response that is read: enough for a message, not for a multi-gigabyte file.
_MAX_ERROR_BODY_BYTES = 2048
_MAX_SHOWN_CHARACTERS = 300

_TOKEN = re.compile(r"\bhf_[A-Za-z0-9_]{3,}|(?i:bearer)\s+[^\s'\"]+")
_QUERY = re.compile(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>)]+")
_ANY_QUERY = re.compile(r"\?[^\s'\"<>]+")
_SECRET_PARAMETER = re.compile(
    r"(?i)\b(signature|x-amz-[a-z-]+|policy|key-pair-id|sig|token|expires|awsaccesskeyid|x-goog-[a-z-]+)"
    r"\s*[=:]\s*[^\s&'\"<>,;]+"
)


_PORTS = {"http": 80, "https": 443}
# What a request line may hold as it is: printable characters but those that belong in no URL.
_TARGET = re.compile(r"[!#-;=?-\[\]_a-z~]*")
_SAFE = "!$%&'()*+,-./:;=?@[]_~"


def redact(text: str) -> str:
    """`text` without tokens, signatures and query strings of URLs."""
    text = _QUERY.sub(r"\1?...", text)
    text = _SECRET_PARAMETER.sub(r"\1=...", text)
    return _TOKEN.sub("...", text)


class _WithoutQueries(logging.Filter):
    """Takes query strings, which may be signatures, out of the URLs in another library's log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                argument
                if isinstance(argument, (int, float))
                else redact(_ANY_QUERY.sub("?...", str(argument)))
                for argument in record.args
            )
        return True


# These libraries log the whole URL of each request, and the URLs are ours: redirects to signed places.
# httpx (httpx2) carries the Hub client's requests, and does so at level INFO.
_WITHOUT_QUERIES = _WithoutQueries()
for _library in ("urllib3.connectionpool", "httpx", "httpx2"):
    logging.getLogger(_library).addFilter(_WITHOUT_QUERIES)


def host_of(url: str) -> str:
    """Host and port of a URL, as shown in messages."""
    parts = urlsplit(url)
    return parts.hostname + (f":{parts.port}" if parts.port else "") if parts.hostname else url


def same_origin(first: str, second: str) -> bool:
    """Whether two URLs have scheme, host and port in common (RFC 6454), so that a token may be sent.

    Raises:
        urllib3.exceptions.LocationParseError: One of them is no URL of HTTP.
    """
    one, other = _split(first)[0], _split(second)[0]
    return one == other or _address(one) == _address(other)


def is_http(url: str) -> bool:
    """Whether a URL names a server that can be asked over HTTP."""
    try:
        _address(_split(url)[0])
    except urllib3.exceptions.LocationParseError:
        return False
    return True


@lru_cache(maxsize=256)
def _address(origin: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL without a path.

    Raises:
        urllib3.exceptions.LocationParseError: It is none of HTTP.
    """
    try:
        parts = urlsplit(origin)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme not in _PORTS:
        raise urllib3.exceptions.LocationParseError(origin)
    return parts.scheme, host, port or _PORTS[parts.scheme]


def describe_response(response: Response, url: str) -> str:
    """Status, host and first words of an error response, without secrets. Reads part of the body."""
    message = server_message(response)
    return f"status {response.status} from {host_of(url)}" + (f" ({message})" if message else "")


def server_message(response: Response) -> str:
    """What an error response says: its header for that, or the first words of its body; no secrets."""
    message = response.headers.get("X-Error-Message")
    if message is None:
        # The status says enough where the reason for it did not arrive, or is encoded, unasked.
        body = b""
        if "Content-Encoding" not in response.headers:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                body = response.read(_MAX_ERROR_BODY_BYTES)
        message = re.sub(r"<[^>]*>", " ", body.decode("utf-8", "replace"))
    return redact(" ".join(message.split()))[:_MAX_SHOWN_CHARACTERS]


class Response(Protocol):
    """What is asked of a reply; `urllib3` has it for those that come through a proxy."""

    status: int

    @property
    def headers(self) -> Mapping[str, str]:
        """Header fields, names without regard to case."""
        ...

    def read(self, count: int, /) -> bytes:
        """The next `count` bytes of the body; fewer only at its end."""
        ...

    def readinto(self, view: memoryview, /) -> int:
        """Read some bytes of the body into a view; 0 at its end."""
        ...


_Send = Callable[[str, Mapping[str, str]], Response]


class _Servers:
    """How to send a request to each server, and what holds the connections."""

    def __init__(self) -> None:
        self.send_to: dict[str, _Send] = {}
        self.direct: dict[str, HttpServer] = {}
        self.proxies: dict[str, urllib3.ProxyManager] = {}


class HttpPool:
    """Kept-alive connections to a few hosts. Thread-safe; each process opens its own.

    Args:
        connections: Most connections to one host at a time; further requests wait for one.
        connect_timeout_s: Longest time to open a connection.
        read_timeout_s: Longest time without a byte.
    """

    def __init__(
        self, connections: int, *, connect_timeout_s: float = 10.0, read_timeout_s: float = 60.0
    ) -> None:
        self.connections = connections
        self._timeouts_s = connect_timeout_s, read_timeout_s
        self._servers = PerProcess(_Servers)

    def get(self, url: str, headers: Mapping[str, str]) -> Response:
        """Send one GET; the body is still to be read, then `release` must be called.

        Raises:
            urllib3.exceptions.HTTPError: No response arrived.
        """
        origin, target = _split(url)
        servers = self._servers.get()
        # The environment is looked at once for each server: that takes longer than sending a request.
        send = servers.send_to.get(origin)
        if send is not None:
            return send(target, headers)
        send = self._sender(servers, origin)
        response = send(target, headers)
        note_answer(url)
        servers.send_to[origin] = send
        return response

    def release(self, response: Response, *, reuse: bool) -> None:
        """Give a connection back (`reuse`, when the body was read to its end) or close it."""
        if isinstance(response, HttpResponse):
            response.release(reuse=reuse)
        elif isinstance(response, urllib3.BaseHTTPResponse):
            if not reuse:
                response.close()
            response.release_conn()

    @property
    def num_opened(self) -> int:
        """Connections that this process has opened since it began or closed them."""
        servers = self._servers.get()
        proxies = list(servers.proxies.values())
        pools = [manager.pools.get(key) for manager in proxies for key in list(manager.pools.keys())]
        return sum(server.num_opened for server in list(servers.direct.values())) + sum(
            pool.num_connections for pool in pools if pool is not None
        )

    def close(self) -> None:
        """Close this process's connections; a later request opens new ones."""
        servers = self._servers.drop()
        if servers is not None:
            for server in servers.direct.values():
                server.close()
            for manager in servers.proxies.values():
                manager.clear()

    def _sender(self, servers: _Servers, origin: str) -> _Send:
        scheme, host, port = _address(origin)
        proxy = getproxies().get(scheme, "")
        if proxy and not proxy_bypass(host):
            return self._through_proxy(servers, proxy, origin)
        connect_s, read_s = self._timeouts_s
        server = HttpServer(
            scheme,
            host,
            port,
            connections=self.connections,
            connect_timeout_s=connect_s,
            read_timeout_s=read_s,
        )
        return servers.direct.setdefault(origin, server).get

    def _through_proxy(self, servers: _Servers, proxy: str, origin: str) -> _Send:
        manager = servers.proxies.get(proxy)
        if manager is None:
            certificates = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
            options: dict[str, Any] = {"num_pools": 16, "maxsize": self.connections, "block": True}
            if certificates:
                options["ca_certs"] = certificates
            manager = servers.proxies.setdefault(proxy, urllib3.ProxyManager(proxy, **options))
        connect_s, read_s = self._timeouts_s
        options = {
            "redirect": False,
            "retries": urllib3.Retry(False, redirect=False),
            "preload_content": False,
            "decode_content": False,
            "timeout": urllib3.Timeout(connect=connect_s, read=read_s),
        }

        def send(target: str, headers: Mapping[str, str]) -> Response:
            return manager.urlopen("GET", origin + target, headers=dict(headers), **options)

        return send


def _split(url: str) -> tuple[str, str]:
    """Origin and target of a URL: ``https://host:1`` and ``/path?query``, printable ASCII."""
    begin = url.find("://") + 3
    # Most URLs have a path; without one a query may follow the host.
    end = url.find("/", begin)
    origin = url if end < 0 else url[:end]
    if "?" in origin or "#" in origin:
        end = min(at for at in (origin.find("?"), origin.find("#")) if at >= 0)
        origin = url[:end]
    target = url[len(origin) :].partition("#")[0]
    if not target.startswith("/"):
        target = f"/{target}"
    if not _TARGET.fullmatch(target):
        target = quote(target, safe=_SAFE)
    return origin, target
