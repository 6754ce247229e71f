"""The Hub's own client library, called in one way from everywhere.

Endpoint and token are looked up at each call, in the process that calls: nothing of them is kept in an
object, so nothing of them travels in a pickle (LD-11, SC-12). Where another machine has to read on behalf of
this one, a `HubAccess` is sent on purpose, and holds for a block of code only (`using_access`).

Reads are repeated after failures that may pass; whatever the library raises leaves here as an error of
`lrstream.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

import huggingface_hub.constants
from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented or used there, unlisted
    build_hf_headers,
    get_token_to_send,
)

from lrstream import __version__
from lrstream.errors import UsageError
from lrstream.storage.hub_failures import PROGRAMMING_ERRORS, HubPlace, hub_error, passing_failure
from lrstream.storage.reachable import has_answered, note_answer
from lrstream.storage.retry import RetryCounters, RetryPolicy, RetrySchedule

__all__ = [
    "HubAccess",
    "bucket_api",
    "current_access",
    "endpoint",
    "hub_api",
    "hub_headers",
    "read_from_hub",
    "resolve_url",
    "using_access",
]

_FIRST_RELEASE_WITH_BUCKETS = "1.6"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Where the Hub is and who asks, for another process. Its text does not show the token.

    Attributes:
        endpoint: Base URL.
        token: The token; None lets the other process look for its own.
    """

    endpoint: str
    token: str | None = field(repr=False)


_access: ContextVar[HubAccess | None] = ContextVar("hub_access", default=None)


def current_access() -> HubAccess:
    """What this process would use now."""
    return _access.get() or HubAccess(endpoint(), get_token())


@contextmanager
def using_access(access: HubAccess | None) -> Iterator[None]:
    """Let calls of this thread within the block use `access`; None changes nothing."""
    before = _access.set(access) if access is not None else None
    try:
        yield
    finally:
        if before is not None:
            _access.reset(before)


def endpoint() -> str:
    """Base URL of the Hub (`HF_ENDPOINT`), as the client library knows it."""
    access = _access.get()
    if access is not None:
        return access.endpoint
    return str(huggingface_hub.constants.ENDPOINT).rstrip("/")


def hub_api() -> HfApi:
    """The client. It finds the token itself at each call, in the environment or the token file."""
    return HfApi(endpoint=endpoint(), token=_token(), library_name="lrstream", library_version=__version__)


def bucket_api() -> Any:
    """The client, for calls about buckets.

    Raises:
        UsageError: The installed release knows no buckets.
    """
    api = hub_api()
    if not hasattr(api, "list_bucket_tree"):
        raise UsageError(
            f"Buckets need huggingface_hub {_FIRST_RELEASE_WITH_BUCKETS} or newer; "
            f"{huggingface_hub.__version__} is installed.",
            hint=f'Install it: pip install "huggingface_hub>={_FIRST_RELEASE_WITH_BUCKETS}".',
        )
    return api


def hub_headers() -> dict[str, str]:
    """Headers for requests to the Hub's own origin, authorization included. Never for another host."""
    return _headers_with(get_token_to_send(_token())).copy()


@lru_cache(maxsize=4)
def _headers_with(token: str | None) -> dict[str, str]:
    """The headers for a token, which are asked for with each file and take as long as parsing a few boxes."""
    headers = build_hf_headers(token=token or False, library_name="lrstream", library_version=__version__)
    return {str(name): str(value) for name, value in headers.items()}


def _token() -> str | None:
    """The token that was sent here; None lets the library look for one."""
    access = _access.get()
    return access.token if access is not None else None


def resolve_url(place: HubPlace, path: str) -> str:
    """Stable URL of a file's content; `path` is relative to the top of the repository or bucket."""
    if place.kind == "bucket":
        return f"{endpoint()}/buckets/{place.repo_id}/resolve/{quote(path)}"
    revision = quote(place.revision or "main", safe="")
    return f"{endpoint()}/datasets/{place.repo_id}/resolve/{revision}/{quote(path)}"


def read_from_hub(
    place: HubPlace,
    what: str,
    call: Callable[[], T],
    *,
    policy: RetryPolicy,
    retry_counters: RetryCounters,
    writing: bool = False,
) -> T:
    """Run a call of the client library that changes nothing, again after failures that may pass.

    Args:
        place: What it is about, for messages.
        what: What it does, for messages: ``list meta/episodes``.
        call: The call.
        policy: Bounds of retries.
        retry_counters: Where retries are counted.
        writing: Whether it asks for write access, for messages.

    Raises:
        NotFoundError, AccessError, TransferError: As `hub_error` decides.
    """
    schedule = RetrySchedule(policy, f"{place}: {what}", retry_counters)
    while True:
        try:
            result = call()
        except PROGRAMMING_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001  (the HTTP libraries below have no common base class)
            failure = passing_failure(error)
            refusal = None if failure is not None else hub_error(error, place, what, writing=writing)
        else:
            note_answer(endpoint())
            return result
        # Outside the handler, so that no foreign exception, with URLs in its text, is chained to ours.
        if refusal is not None:
            raise refusal
        assert failure is not None
        unresolved = failure.unresolved and not has_answered(endpoint())
        schedule.wait(failure.text, told_s=failure.told_s, unresolved=unresolved)
