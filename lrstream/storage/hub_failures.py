"""What went wrong at the Hub, in the terms of the one error tree.

Releases of huggingface_hub differ in the HTTP library below (`requests`, `httpx`, `httpx2`), so its
exceptions are told by status, by the `X-Error-Code` header and by the library's own classes, never by
those of the HTTP library. Messages carry no token and no query of a URL.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from huggingface_hub import errors as hub_errors
from huggingface_hub import get_token

from lrstream.errors import AccessError, LrstreamError, NotFoundError, TransferError, UsageError
from lrstream.storage.failures import storage_error
from lrstream.storage.http_pool import redact
from lrstream.storage.reachable import is_unresolved
from lrstream.storage.retry import RETRYABLE_STATUSES, told_wait_s

__all__ = [
    "PROGRAMMING_ERRORS",
    "HubPlace",
    "PassingFailure",
    "hub_error",
    "passing_failure",
    "refusal_error",
    "repository_hidden",
    "status_of",
]

PROGRAMMING_ERRORS: tuple[type[Exception], ...] = (
    TypeError,
    AttributeError,
    NameError,
    AssertionError,
    NotImplementedError,
    LookupError,
    LrstreamError,
)
"""Mistakes in a call or in a library, and errors that are ours already: passed on as they are."""

_HTTP_LIBRARIES = ("requests", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "hf_xet")
_TOKEN_HINT = "Log in with `hf auth login`, or set HF_TOKEN, in the environment of every worker."
_SHOWN_CHARACTERS = 300
# Subclasses first: a gated repository is reported as a special kind of one that is not found.
_CODES: tuple[tuple[str, type[Exception]], ...] = (
    ("GatedRepo", hub_errors.GatedRepoError),
    ("RevisionNotFound", hub_errors.RevisionNotFoundError),
    ("EntryNotFound", hub_errors.EntryNotFoundError),
    ("RepoNotFound", hub_errors.RepositoryNotFoundError),
)
_LOCAL_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
)


class HubPlace(NamedTuple):
    """A repository or bucket, as far as messages and URLs need it.

    Attributes:
        kind: ``hub`` for a dataset repository, or ``bucket``.
        repo_id: ``OWNER/NAME``.
        revision: Branch, tag or commit; None for a bucket or the default branch.
    """

    kind: Literal["hub", "bucket"]
    repo_id: str
    revision: str | None = None

    def __str__(self) -> str:
        kind = "bucket" if self.kind == "bucket" else "dataset repository"
        return f"{kind} {self.repo_id}{f' at {self.revision}' if self.revision else ''}"


class PassingFailure(NamedTuple):
    """A failure that may pass by itself.

    Attributes:
        text: What happened, without secrets.
        told_s: Seconds that the server asks to wait.
        unresolved: Whether the name of a host could not be resolved.
    """

    text: str
    told_s: float | None = None
    unresolved: bool = False


def status_of(error: BaseException) -> int | None:
    """HTTP status of an exception of the client library, None if no response came."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def passing_failure(error: Exception) -> PassingFailure | None:
    """The failure if trying again may help, None if the answer is final."""
    error = _decisive(error)
    status = status_of(error)
    if status is not None:
        if status not in RETRYABLE_STATUSES:
            return None
        headers = getattr(getattr(error, "response", None), "headers", {})
        return PassingFailure(
            f"status {status}{_in_parentheses(_server_message(error))}", told_wait_s(headers)
        )
    unresolved = is_unresolved(error)
    if not (unresolved or _is_transport_failure(error)):
        return None
    return PassingFailure(_text(error), unresolved=unresolved)


def hub_error(error: Exception, place: HubPlace, what: str, *, writing: bool = False) -> LrstreamError:
    """The error to raise for a final failure of the client library.

    Args:
        error: What it raised.
        place: What the call was about.
        what: What it was to do.
        writing: Whether it needed write access.

    Returns:
        NotFoundError, AccessError, UsageError, or TransferError for everything else; ``fields`` has the
        ``status`` if there was one.
    """
    error = _decisive(error)
    status, code = status_of(error), _code_of(error)
    fields: dict[str, Any] = {"status": status, "error_code": code, "repo_id": place.repo_id}
    if status is None and _is_local(error):
        return storage_error(error, f"{place}: could not {what}: the local cache")
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return TransferError(
            f"{place}: could not {what}: the client is in offline mode.",
            hint="Unset HF_HUB_OFFLINE.",
            **fields,
        )
    if isinstance(error, hub_errors.LocalTokenNotFoundError):
        return AccessError(f"{place}: no token was found, needed to {what}.", hint=_TOKEN_HINT, **fields)
    if isinstance(error, hub_errors.HFValidationError):
        return UsageError(f"{place}: {_text(error)}", **fields)
    message = _server_message(error)
    refusal = refusal_error(place, what, status or 0, code, message, writing=writing)
    if refusal is not None:
        return refusal
    shown = f"status {status}{_in_parentheses(message)}" if status is not None else _text(error)
    return TransferError(f"{place}: could not {what}: {shown}.", **fields)


def refusal_error(
    place: HubPlace, what: str, status: int, code: str, message: str, *, writing: bool = False
) -> LrstreamError | None:
    """The error for an answer by which the Hub refuses, None for any other answer.

    Args:
        place: What the request was about.
        what: What it was to do.
        status: HTTP status, 0 if only the code is known.
        code: Value of `X-Error-Code`, or "".
        message: What the server says, without secrets.
        writing: Whether it needed write access.
    """
    fields: dict[str, Any] = {"status": status, "error_code": code, "repo_id": place.repo_id}
    said = _in_parentheses(message)
    if code == "GatedRepo":
        return AccessError(
            f"{place} is gated, and access was not granted{said}.",
            hint="Ask for access on its page on the Hub, and use a token of the account that has it.",
            **fields,
        )
    if code == "RevisionNotFound":
        return NotFoundError(
            f"{place}: there is no such revision.",
            hint="Give an existing branch, tag or full commit id.",
            **fields,
        )
    if code == "EntryNotFound":
        return NotFoundError(f"{place}: could not {what}: there is no such file or directory.", **fields)
    if status in (401, 403) and "credentials" in message.lower():
        return AccessError(
            f"{place}: the Hub does not accept the token of this process{said}.",
            hint="It was revoked or mistyped. " + _TOKEN_HINT,
            **fields,
        )
    if code == "RepoNotFound":
        return repository_hidden(place, **fields)
    if status == 403 and writing:
        return AccessError(
            f"{place}: the token of this process cannot write there{said}.",
            hint="Use a token with write access to it (hf auth login, or HF_TOKEN).",
            **fields,
        )
    if status in (401, 403):
        return AccessError(
            f"{place}: not allowed to {what} (status {status}{': ' if message else ''}{message})"
            f"{'' if get_token() else '; no token was found'}.",
            hint=_TOKEN_HINT,
            **fields,
        )
    if status in (404, 410):
        return NotFoundError(f"{place}: could not {what}: not found{said}.", **fields)
    return None


def repository_hidden(place: HubPlace, **fields: Any) -> NotFoundError:
    """The error for a repository that is not there or not shown, which the Hub does not tell apart."""
    if get_token() is None:
        return NotFoundError(
            f"{place} does not exist, or it is private: no token was found to ask with.",
            hint="Check the name. If it is private: " + _TOKEN_HINT,
            **fields,
        )
    return NotFoundError(
        f"{place} does not exist, or the token of this process may not see it.",
        hint="Check the name, and that the token belongs to an account with access (hf auth whoami).",
        **fields,
    )


def _code_of(error: Exception) -> str:
    """`X-Error-Code`, or what it would be, by the class that the client library chose."""
    code = getattr(getattr(error, "response", None), "headers", {}).get("X-Error-Code")
    if code:
        return str(code)
    for name, kind in _CODES:
        if isinstance(error, kind):
            return name
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _decisive(error: Exception) -> Exception:
    """What really happened: a failed look-up of a cached file hides the network's failure as its cause."""
    if isinstance(error, hub_errors.LocalEntryNotFoundError):
        for cause in _causes(error):
            if cause is error or not isinstance(cause, Exception):
                continue
            if status_of(cause) is not None or _is_transport_failure(cause):
                return cause
    return error


def _is_transport_failure(error: BaseException) -> bool:
    """Whether no usable response arrived: connection refused, reset, timed out, cut off."""
    if isinstance(error, (hub_errors.OfflineModeIsEnabled, ssl.SSLCertVerificationError)) or _is_local(error):
        return False
    if isinstance(error, (ConnectionError, TimeoutError, hub_errors.FileMetadataError)):
        return True
    return any(cls.__module__.partition(".")[0] in _HTTP_LIBRARIES for cls in type(error).__mro__) or (
        # hf_xet's runtime raises RuntimeError for a download or upload that failed.
        type(error) in (RuntimeError, OSError, hub_errors.LocalEntryNotFoundError)
    )


def _is_local(error: BaseException) -> bool:
    """Whether this machine's disk refused, rather than the network."""
    return isinstance(error, OSError) and error.errno in _LOCAL_ERRORS


def _server_message(error: BaseException) -> str:
    """What the server says, or nothing."""
    response = getattr(error, "response", None)
    message = getattr(response, "headers", {}).get("X-Error-Message") or getattr(
        error, "server_message", None
    )
    return " ".join(redact(str(message or "")).split())[:_SHOWN_CHARACTERS]


def _in_parentheses(text: str) -> str:
    return f" ({text})" if text else ""


def _text(error: BaseException) -> str:
    text = " ".join(redact(str(error)).split())[:_SHOWN_CHARACTERS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
