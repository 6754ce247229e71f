"""HTTP connections of one process, and what may be said about a URL or a response.

Redirects, retries and credentials are decided by the caller, request by request: this module only
carries requests over kept-alive connections, through the proxies that the environment names.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3

from lrstream.storage.per_process import PerProcess
from lrstream.storage.reachable import note_answer

__all__ = ["HttpPool", "describe_response", "host_of", "redact", "same_origin", "server_message"]

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
    """Whether two URLs have scheme, host and port in common (RFC 6454), so that a token may be sent."""
    one, other = urlsplit(first), urlsplit(second)
    ports = {"http": 80, "https": 443}
    return (
        one.scheme == other.scheme
        and (one.hostname or "").lower() == (other.hostname or "").lower()
        and (one.port or ports.get(one.scheme)) == (other.port or ports.get(other.scheme))
    )


def describe_response(response: urllib3.BaseHTTPResponse, url: str) -> str:
    """Status, host and first words of an error response, without secrets. Reads part of the body."""
    message = server_message(response)
    return f"status {response.status} from {host_of(url)}" + (f" ({message})" if message else "")


def server_message(response: urllib3.BaseHTTPResponse) -> str:
    """What an error response says: its header for that, or the first words of its body; no secrets."""
    message = response.headers.get("X-Error-Message")
    if message is None:
        try:
            body = response.read(_MAX_ERROR_BODY_BYTES, decode_content=True)
        except urllib3.exceptions.HTTPError:
            body = b""  # the status says enough; the reason for it did not arrive
        message = re.sub(r"<[^>]*>", " ", body.decode("utf-8", "replace"))
    return redact(" ".join(message.split()))[:_MAX_SHOWN_CHARACTERS]


# What comes before the path: cheaper than taking the whole URL apart for each request.
_SERVER = re.compile(r"[^/?#]*//[^/?#]*")
_Send = Callable[..., urllib3.BaseHTTPResponse]


class _Managers:
    """Connection pools by proxy URL ("" is the direct one), and how to send a request to each server."""

    def __init__(self) -> None:
        self.by_proxy: dict[str, urllib3.PoolManager] = {}
        self.by_server: dict[str, _Send] = {}


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
        # Made once: each of these takes as long as a part of the request itself.
        self._options: dict[str, Any] = {
            "redirect": False,
            "retries": urllib3.Retry(False, redirect=False),
            "preload_content": False,
            "decode_content": False,
            "timeout": urllib3.Timeout(connect=connect_timeout_s, read=read_timeout_s),
        }
        self._managers = PerProcess(_Managers)

    def get(self, url: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """Send one GET; the body is still to be read, then `release` must be called.

        Raises:
            urllib3.exceptions.HTTPError: No response arrived.
        """
        known = self._managers.get().by_server
        match = _SERVER.match(url)
        server = match[0] if match is not None else url
        send = known.get(server) or self._sender(url)
        response = send("GET", url, headers=dict(headers), **self._options)
        if server not in known:
            # Once for each server that answers: the environment is looked at for a sender, and that takes
            # longer than sending a request.
            note_answer(url)
            known[server] = send
        return response

    def release(self, response: urllib3.BaseHTTPResponse, *, reuse: bool) -> None:
        """Give a connection back (`reuse`, when the body was read to its end) or close it."""
        if not reuse:
            response.close()
        response.release_conn()

    @property
    def num_opened(self) -> int:
        """Connections that this process has opened since it began or closed them."""
        managers = self._managers.get().by_proxy.values()
        pools = [manager.pools.get(key) for manager in managers for key in list(manager.pools.keys())]
        return sum(pool.num_connections for pool in pools if pool is not None)

    def close(self) -> None:
        """Close this process's connections; a later request opens new ones."""
        managers = self._managers.drop()
        if managers is not None:
            for manager in managers.by_proxy.values():
                manager.clear()

    def _sender(self, url: str) -> _Send:
        parts = urlsplit(url)
        manager = self._manager_for(parts)
        if isinstance(manager, urllib3.ProxyManager):
            return manager.urlopen
        # The manager would look for the server's pool anew for each request.
        pool = manager.connection_from_url(url)
        prefix = len(f"{parts.scheme}://{parts.netloc}")

        def send(method: str, url: str, **options: Any) -> urllib3.BaseHTTPResponse:
            target = url[prefix:].partition("#")[0]
            target = target if target.startswith("/") else f"/{target}"
            return pool.urlopen(method, target, assert_same_host=False, **options)

        return send

    def _manager_for(self, parts: SplitResult) -> urllib3.PoolManager:
        proxy = getproxies().get(parts.scheme, "") if parts.hostname else ""
        if proxy and proxy_bypass(parts.hostname or ""):
            proxy = ""
        managers = self._managers.get().by_proxy
        manager = managers.get(proxy)
        if manager is None:
            certificates = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
            options: dict[str, Any] = {"num_pools": 16, "maxsize": self.connections, "block": True}
            if certificates:
                options["ca_certs"] = certificates
            created = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
            manager = managers.setdefault(proxy, created)
        return manager
