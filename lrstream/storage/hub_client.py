"""The Hub's own client library, called in one way from everywhere.

Endpoint and token are looked up at each call, in the process that calls: nothing of them is kept in an
object, so nothing of them travels in a pickle (LD-11, SC-12). Reads are repeated after failures that may
pass; whatever the library raises leaves here as an error of `lrstream.errors`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import huggingface_hub.constants
from huggingface_hub import HfApi
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, unlisted

from lrstream import __version__
from lrstream.errors import UsageError
from lrstream.storage.hub_failures import PROGRAMMING_ERRORS, HubPlace, hub_error, passing_failure
from lrstream.storage.retry import RetryCounters, RetryPolicy, RetrySchedule

__all__ = ["bucket_api", "endpoint", "hub_api", "hub_headers", "read_from_hub", "resolve_url"]

_FIRST_RELEASE_WITH_BUCKETS = "1.6"

T = TypeVar("T")


def endpoint() -> str:
    """Base URL of the Hub (`HF_ENDPOINT`), as the client library knows it."""
    return str(huggingface_hub.constants.ENDPOINT).rstrip("/")


def hub_api() -> HfApi:
    """The client. It finds the token itself at each call, in the environment or the token file."""
    return HfApi(endpoint=endpoint(), library_name="lrstream", library_version=__version__)


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
    headers = build_hf_headers(library_name="lrstream", library_version=__version__)
    return {str(name): str(value) for name, value in headers.items()}


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
            return call()
        except PROGRAMMING_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001  (the HTTP libraries below have no common base class)
            failure = passing_failure(error)
            refusal = None if failure is not None else hub_error(error, place, what, writing=writing)
        # Outside the handler, so that no foreign exception, with URLs in its text, is chained to ours.
        if refusal is not None:
            raise refusal
        assert failure is not None
        schedule.wait(failure.text, told_s=failure.told_s)
