"""The client library's failures in our terms, whatever HTTP library is below it."""

from __future__ import annotations

import errno

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from lrstream.errors import (
    AccessError,
    DiskFullError,
    LrstreamError,
    NotFoundError,
    TransferError,
    UsageError,
)
from lrstream.storage.hub_client import read_from_hub
from lrstream.storage.hub_failures import HubPlace, hub_error, passing_failure, refusal_error
from lrstream.storage.location import parse_location
from lrstream.storage.retry import RetryCounters, RetryPolicy
from lrstream.storage.store import open_store

PLACE = HubPlace("hub", "robots/pick", "main")


@pytest.mark.parametrize(
    ("status", "code", "message", "writing", "kind", "said"),
    [
        (401, "", "Invalid credentials in Authorization header", False, AccessError, "does not accept"),
        (401, "RepoNotFound", "Repository not found", False, NotFoundError, "no token was found"),
        (404, "RepoNotFound", "Repository not found", False, NotFoundError, "no token was found"),
        (403, "GatedRepo", "not in the list", False, AccessError, "is gated"),
        (401, "", "", False, AccessError, "(status 401); no token was found"),
        (403, "", "", False, AccessError, "not allowed to do it"),
        (403, "", "", True, AccessError, "cannot write there"),
        (404, "RevisionNotFound", "", False, NotFoundError, "there is no such revision"),
        (404, "EntryNotFound", "", False, NotFoundError, "no such file or directory"),
        (404, "", "", False, NotFoundError, "not found"),
        (410, "", "", False, NotFoundError, "not found"),
    ],
)
def test_refusals(
    status: int, code: str, message: str, writing: bool, kind: type[LrstreamError], said: str
) -> None:
    error = refusal_error(PLACE, "do it", status, code, message, writing=writing)
    assert type(error) is kind
    assert said in str(error)
    assert "dataset repository robots/pick at main" in str(error)


@pytest.mark.parametrize("status", [200, 400, 409, 412, 416, 429, 500, 503])
def test_other_answers_are_no_refusals(status: int) -> None:
    assert refusal_error(PLACE, "do it", status, "", "") is None


def test_a_failed_connection_behind_a_missing_cache_entry() -> None:
    """The client says that a file is not in the cache when it could not even ask for it."""
    error = LocalEntryNotFoundError("not in the cache")
    error.__cause__ = ConnectionError("refused")
    failure = passing_failure(error)
    assert failure is not None
    assert "ConnectionError: refused" in failure.text
    assert isinstance(hub_error(error, PLACE, "do it"), TransferError)


def test_other_failures() -> None:
    assert passing_failure(OfflineModeIsEnabled("offline")) is None
    assert "HF_HUB_OFFLINE" in str(hub_error(OfflineModeIsEnabled("offline"), PLACE, "do it"))
    full = OSError(errno.ENOSPC, "No space left on device")
    assert passing_failure(full) is None
    assert isinstance(hub_error(full, PLACE, "do it"), DiskFullError)
    assert isinstance(hub_error(HFValidationError("bad name"), PLACE, "do it"), UsageError)
    assert passing_failure(TimeoutError("timed out")) is not None
    assert passing_failure(ValueError("garbage")) is None
    secret = ConnectionError("GET https://cdn.example/a?Signature=SENTINEL")
    assert "SENTINEL" not in str(hub_error(secret, PLACE, "do it"))


def test_no_foreign_exception_is_chained() -> None:
    """A chained one would bring its text, with URLs, into every traceback."""

    def fail() -> None:
        raise ConnectionError("GET https://cdn.example/a?Signature=SENTINEL")

    with pytest.raises(TransferError) as caught:
        read_from_hub(
            PLACE,
            "do it",
            fail,
            policy=RetryPolicy(max_attempts=2, first_wait_s=0.0),
            retry_counters=RetryCounters(),
        )
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_mistakes_are_not_retried() -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise TypeError("a wrong argument")

    with pytest.raises(TypeError):
        read_from_hub(PLACE, "do it", fail, policy=RetryPolicy(), retry_counters=RetryCounters())
    assert len(calls) == 1


def test_a_client_without_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(HfApi, "list_bucket_tree", raising=False)
    with pytest.raises(
        UsageError, match=r"Buckets need huggingface_hub 1\.6 or newer; .* is installed"
    ) as caught:
        open_store(parse_location("hf://buckets/robots/store"))
    assert caught.value.hint is not None
    assert "pip install" in caught.value.hint
