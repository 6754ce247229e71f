"""The few writes that publishing needs. Nothing else in lrstream imports this module (SC-12).

Every write makes one attempt: whether it may be repeated depends on what the Hub has done already,
which the caller looks up first (a reply that was lost says nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd
from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

from lrstream.errors import NotFoundError
from lrstream.storage.hub_client import bucket_api, endpoint, hub_api, hub_headers, read_from_hub
from lrstream.storage.hub_failures import PROGRAMMING_ERRORS, HubPlace, hub_error
from lrstream.storage.retry import RetryCounters, RetryPolicy

__all__ = [
    "add_to_bucket",
    "branch_head",
    "commit_files",
    "create_branch",
    "require_write_access",
]

T = TypeVar("T")


def require_write_access(place: HubPlace, policy: RetryPolicy | None = None) -> None:
    """Ask the Hub whether this process may write there, before any long work (K28).

    Raises:
        AccessError: It may not; or no token, or one that the Hub does not accept.
        NotFoundError: There is no such repository or bucket, or it is hidden.
        TransferError: The Hub did not answer.
    """
    if place.kind == "bucket":
        path = f"buckets/{place.repo_id}/xet-write-token"
    else:
        path = f"datasets/{place.repo_id}/auth-check/write"

    def ask() -> None:
        # The client's own `auth_check` knows no question about writing before 1.x.
        hf_raise_for_status(get_session().get(f"{endpoint()}/api/{path}", headers=hub_headers()))

    bounds = policy or RetryPolicy()
    counters = RetryCounters()
    try:
        read_from_hub(place, "check write access", ask, policy=bounds, retry_counters=counters, writing=True)
    except NotFoundError as error:
        if error.fields.get("error_code") == "RepoNotFound" or place.kind == "bucket":
            raise
        # A Hub without this question: the first write will tell.
        read_from_hub(
            place,
            "look it up",
            lambda: hub_api().dataset_info(place.repo_id, expand=["sha"]),
            policy=bounds,
            retry_counters=counters,
        )


def branch_head(place: HubPlace, branch: str) -> str | None:
    """The commit at the tip of a branch, None if there is no such branch."""
    references = _write(
        place, "list branches", lambda: hub_api().list_repo_refs(place.repo_id, repo_type="dataset")
    )
    return next((found.target_commit for found in references.branches if found.name == branch), None)


def create_branch(place: HubPlace, branch: str, commit: str) -> None:
    """Create a branch that starts at a commit.

    Raises:
        TransferError: ``fields["status"]`` is 409 if it exists by now.
    """
    _write(
        place,
        f"create branch {branch}",
        lambda: hub_api().create_branch(place.repo_id, branch=branch, revision=commit, repo_type="dataset"),
    )


def commit_files(
    place: HubPlace, branch: str, files: Mapping[str, Path], *, parent: str, message: str
) -> str:
    """Add or replace files on a branch in one commit, if its tip is still `parent`; returns the new commit.

    Args:
        place: The repository.
        branch: The branch.
        files: Local files by path in the repository.
        parent: The commit that the branch must be at.
        message: What the commit says.

    Raises:
        TransferError: ``fields["status"]`` is 412 if the branch has moved on.
    """
    operations = [
        CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(file)) for path, file in files.items()
    ]
    done = _write(
        place,
        f"commit {', '.join(files)} to {branch}",
        lambda: hub_api().create_commit(
            place.repo_id,
            operations=operations,
            commit_message=message,
            repo_type="dataset",
            revision=branch,
            parent_commit=parent,
        ),
    )
    return str(done.oid)


def add_to_bucket(place: HubPlace, files: Mapping[str, Path]) -> None:
    """Add or replace files of a bucket, in one batch.

    Args:
        place: The bucket.
        files: Local files by path in the bucket.
    """
    _write(
        place,
        f"upload {', '.join(files)}",
        lambda: bucket_api().batch_bucket_files(
            place.repo_id, add=[(str(file), path) for path, file in files.items()]
        ),
    )


def _write(place: HubPlace, what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except PROGRAMMING_ERRORS:
        raise
    except Exception as error:  # noqa: BLE001  (the HTTP libraries below have no common base class)
        failure = hub_error(error, place, what, writing=True)
    raise failure
