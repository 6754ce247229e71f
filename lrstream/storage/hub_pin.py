"""From a revision, or none, to the commit that everything is read from (SC-7, DS-6)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from lrstream.errors import NotFoundError
from lrstream.storage.hub_client import hub_api, read_from_hub
from lrstream.storage.hub_failures import HubPlace
from lrstream.storage.location import Location
from lrstream.storage.retry import RetryCounters, RetryPolicy

__all__ = ["at_commit", "commit_of", "newest_compatible_tag", "pin_location"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION_TAG = re.compile(r"v?3\.(\d+)(?:\.(\d+))?")
_DEFAULT_BRANCH = "main"


def newest_compatible_tag(tags: Iterable[str]) -> str | None:
    """The highest of the tags ``v3.MINOR[.PATCH]``, which name versions of the dataset format."""
    versions = [
        (int(match[1]), int(match[2] or 0), tag) for tag in tags if (match := _VERSION_TAG.fullmatch(tag))
    ]
    return max(versions)[2] if versions else None


def pin_location(
    location: Location,
    *,
    policy: RetryPolicy | None = None,
    retry_counters: RetryCounters | None = None,
) -> Location:
    """Find the commit of a Hub dataset's revision.

    Args:
        location: Where the dataset is. Without a revision it is the newest compatible ``v3.x`` tag, or
            ``main`` if there is none.
        policy: Bounds of retries.
        retry_counters: Where retries are counted.

    Returns:
        The same place with the commit in `root` and with the revision that was asked for or chosen.
        Locations of other kinds, and those that name a commit, are returned as they are, without a
        request.

    Raises:
        NotFoundError: The repository or the revision does not exist, or is hidden.
        AccessError: It may not be read.
        TransferError: The Hub did not answer.
    """
    if location.kind != "hub" or commit_of(location) is not None:
        return location
    assert location.repo_id is not None
    repo_id = location.repo_id
    policy, retry_counters = policy or RetryPolicy(), retry_counters or RetryCounters()
    revision = location.revision
    if revision is None:
        references = read_from_hub(
            HubPlace("hub", repo_id),
            "list branches and tags",
            lambda: hub_api().list_repo_refs(repo_id, repo_type="dataset"),
            policy=policy,
            retry_counters=retry_counters,
        )
        revision = newest_compatible_tag(tag.name for tag in references.tags) or _DEFAULT_BRANCH
    place = HubPlace("hub", repo_id, revision)
    # `expand` leaves out the list of all files, which is long.
    info = read_from_hub(
        place,
        "look up the revision",
        lambda: hub_api().dataset_info(repo_id, revision=revision, expand=["sha"]),
        policy=policy,
        retry_counters=retry_counters,
    )
    commit = info.sha
    if commit is None or not _COMMIT.fullmatch(commit):
        raise NotFoundError(f"{place}: the Hub names no commit for it (got {commit!r}).")
    return at_commit(location, revision, commit)


def at_commit(location: Location, revision: str, commit: str) -> Location:
    """The location of a Hub dataset at a commit, known by the name of a revision."""
    root = f"hf://datasets/{location.repo_id}@{commit}"
    if location.path_in_repo:
        root = f"{root}/{location.path_in_repo}"
    return replace(location, root=root, revision=revision)


def commit_of(location: Location) -> str | None:
    """The commit in the root of a Hub dataset's location, None while it is not pinned."""
    top = f"hf://datasets/{location.repo_id}@"
    commit = location.root[len(top) :].partition("/")[0]
    return commit if location.root.startswith(top) and _COMMIT.fullmatch(commit) else None
