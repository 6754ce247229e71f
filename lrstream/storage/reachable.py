"""Names of hosts that cannot be resolved: no network, or a mistyped address.

A name that was never resolved is most likely one that never will be, so the attempts of a first contact end
within a few seconds. A host that has answered before is only out of reach for the moment, and is asked again
for as long as after any other failure.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

__all__ = ["has_answered", "is_unresolved", "note_answer", "require_name"]

# A fact about the network rather than a handle: children that are forked may know it.
_answered: set[str] = set()


def note_answer(url: str) -> None:
    """Remember that the host of a URL has answered, whatever it said."""
    host = urlsplit(url).hostname
    if host is not None and host not in _answered:
        _answered.add(host)


def has_answered(url: str) -> bool:
    """Whether the host of a URL has answered this process, or the one that it was forked from."""
    return urlsplit(url).hostname in _answered


def require_name(url: str) -> None:
    """Resolve the host of a URL before a client library tries to, many times over.

    Does nothing for hosts that have answered before, and where a proxy resolves names.

    Raises:
        socket.gaierror: The name cannot be resolved.
    """
    parts = urlsplit(url)
    if parts.hostname is None or has_answered(url):
        return
    if getproxies().get(parts.scheme) and not proxy_bypass(parts.hostname):
        return
    socket.getaddrinfo(parts.hostname, parts.port or parts.scheme)


def is_unresolved(error: BaseException) -> bool:
    """Whether a failure is, at its root, that a name could not be resolved."""
    return any(
        isinstance(cause, socket.gaierror) or type(cause).__name__ == "NameResolutionError"
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what led to it; HTTP libraries hand on the reason in `reason` and arguments, too."""
    waiting: list[object] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__, getattr(current, "reason", None), *current.args]
