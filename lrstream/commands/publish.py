"""Publish a sidecar beside its dataset."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lrstream.errors import CheckFailedError, UsageError
from lrstream.layout.layout import load_layout
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.identity import pinned_commit
from lrstream.sidecar.publish import PublishReport, publish_sidecar, require_publishing_store
from lrstream.storage.location import Location, RepoType, parse_location
from lrstream.storage.store import open_store

__all__ = ["PublishResult", "publish_archive", "publish_built", "require_push_target"]


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What was published where; fields as in `PublishReport`, and the duration in seconds."""

    report: PublishReport
    elapsed_s: float

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return {**asdict(self.report), "elapsed_s": self.elapsed_s}


def publish_archive(
    archive: Path,
    source: str,
    *,
    repo_type: RepoType = "dataset",
    revision: str | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> PublishResult:
    """Publish the sidecar `archive` of the dataset `source`.

    Args:
        archive: The sidecar.
        source: A Hub dataset repository or a bucket. Without a revision it is the repository at the
            commit that the sidecar was built from.
        repo_type: What ``OWNER/NAME`` means.
        revision: Branch, tag or commit; it must be the sidecar's.
        force: Replace a valid sidecar of the same snapshot that has other bytes.
        dry_run: Check everything, write nothing.

    Raises:
        LrstreamError: As `publish_sidecar`; UsageError for storage beside which nothing can be published.
    """
    started_s = time.monotonic()
    location = parse_location(source, repo_type=repo_type, revision=revision)
    with ArchiveReader(archive) as reader:
        data_root = reader.identity.data_root
    store = require_publishing_store(open_store(_at_commit_of(data_root, location, archive)))
    report = publish_sidecar(archive, store, load_layout(store), force=force, dry_run=dry_run)
    return PublishResult(report, time.monotonic() - started_s)


def publish_built(archive: Path) -> PublishResult:
    """Publish a sidecar that has just been built, beside the very snapshot that it describes."""
    with ArchiveReader(archive) as reader:
        data_root = reader.identity.data_root
    return publish_archive(archive, data_root)


def require_push_target(
    source: str,
    *,
    repo_type: RepoType,
    revision: str | None,
    repo_id: str | None = None,
    episodes: str | None = None,
) -> None:
    """Refuse a build that is to be published but cannot be, before the build begins (K28).

    Raises:
        UsageError: Nothing can be published beside this kind of storage, or not such a sidecar.
        AccessError, NotFoundError, TransferError: As `require_write_access`.
    """
    if episodes is not None:
        raise UsageError(
            "A sidecar of some episodes cannot be published.", hint="Leave out --episodes or --push."
        )
    location = _publishable(parse_location(source, repo_type=repo_type, revision=revision))
    if repo_id is not None and repo_id != location.repo_id:
        raise UsageError(
            f"A sidecar published beside {location.repo_id} must have that name in its identity, not "
            f"{repo_id}.",
            hint="Leave out --repo-id.",
        )
    from lrstream.storage.hub_failures import HubPlace
    from lrstream.storage.hub_write import require_write_access

    assert location.repo_id is not None
    require_write_access(HubPlace("bucket" if location.kind == "bucket" else "hub", location.repo_id))


def _publishable(location: Location) -> Location:
    if location.kind not in ("hub", "bucket"):
        raise UsageError(
            f"{location} is neither a Hub dataset repository nor a bucket, and a sidecar can only be "
            "published beside one of these.",
            hint="Share the local cache, or upload the dataset first.",
        )
    return location


def _at_commit_of(data_root: str, location: Location, archive: Path) -> Location:
    """The location at the commit that the sidecar was built from."""
    _publishable(location)
    if location.kind == "bucket":
        return location
    from lrstream.storage.hub_pin import at_commit, pin_location

    commit = pinned_commit(data_root)
    if location.revision is None and commit is not None:
        return at_commit(location, commit, commit)
    location = pin_location(location)
    if pinned_commit(location.root) != commit:
        raise CheckFailedError(
            f"{archive} was built from {data_root}, but {location.revision} is {location.root}.",
            hint="Leave out the revision to publish it for its own commit, or build it for this one.",
        )
    return location
