"""Publishing a sidecar beside its dataset (SC-8, SC-11).

Everything that can be refused is refused before anything is written: the archive is validated, compared
with the dataset, and write access is asked for. Then: look at what is published; if it is not what is to
be there, upload; look again. That loop is bounded, and since it begins with looking, a reply that was lost
or another process that publishes at the same time does no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, cast

from lrstream.errors import CheckFailedError, NotFoundError, SidecarError, TransferError, UsageError
from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.build import request_identity
from lrstream.sidecar.checksum_file import ChecksumFile, checksums_path
from lrstream.sidecar.checksum_find import local_checksums
from lrstream.sidecar.checksum_wanted import coverage_of
from lrstream.sidecar.identity import SidecarIdentity, pinned_commit
from lrstream.sidecar.publication import (
    PUBLICATION_BRANCH,
    PublishedFile,
    PublishingStore,
    list_published,
    publication_path,
    published_name,
)
from lrstream.storage.bucket_store import BucketStore
from lrstream.storage.hub_store import HubStore
from lrstream.storage.hub_write import (
    add_to_bucket,
    branch_head,
    commit_files,
    create_branch,
    require_write_access,
)
from lrstream.storage.retry import RetryCounters, RetryPolicy, RetrySchedule

__all__ = [
    "Action",
    "PublishReport",
    "PublishedChecksums",
    "check_publishable",
    "publish_sidecar",
    "require_publishing_store",
]

logger = logging.getLogger(__name__)

Action = Literal["published", "replaced", "unchanged", "equivalent"]

# Uploads may be large, so few of them; waits are for other publishers, who need seconds.
_POLICY = RetryPolicy(max_attempts=5, first_wait_s=0.5, longest_wait_s=10.0, deadline_s=600.0)
_REBUILD = "Build it again with `lrstream build`."


@dataclass(frozen=True, slots=True)
class PublishedChecksums:
    """What was done with the companion of the sidecar, in the same commit; fields as in `PublishReport`."""

    path: str
    size: int
    sha256: str
    action: Action


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What publishing did, or would do.

    Attributes:
        repo_id: Repository or bucket.
        branch: Branch of a repository; None for a bucket.
        path: Path of the published file from the top of the repository or bucket.
        size: Size of the archive in bytes.
        sha256: Its SHA-256 in hex.
        num_sources: Source files that it covers.
        action: ``published``: uploaded; ``replaced``: another file under this name was; ``unchanged``:
            these very bytes were there; ``equivalent``: a valid sidecar of the same snapshot was there and
            was left alone.
        dry_run: Whether `action` is only what would be done.
        branch_created: Whether the branch was (or would be) created.
        commit: The new commit, None where there is none.
        checksums: The same of the payload checksums beside it; None if there are none.
        checksums_refused: Why those beside the archive were not published, None if they were.
    """

    repo_id: str
    branch: str | None
    path: str
    size: int
    sha256: str
    num_sources: int
    action: Action
    dry_run: bool
    branch_created: bool
    commit: str | None
    checksums: PublishedChecksums | None = None
    checksums_refused: str | None = None


def require_publishing_store(store: object) -> PublishingStore:
    """The store if sidecars can be published beside its dataset.

    Raises:
        UsageError: The dataset is neither in a Hub repository nor in a bucket.
    """
    if isinstance(store, (HubStore, BucketStore)):
        return store
    raise UsageError(
        f"{store} is neither a Hub dataset repository nor a bucket, and a sidecar can only be published "
        "beside one of these.",
        hint="Share the local cache, or upload the dataset first.",
    )


def publish_sidecar(
    archive: Path,
    store: PublishingStore,
    layout: DatasetLayout,
    *,
    force: bool = False,
    dry_run: bool = False,
    policy: RetryPolicy = _POLICY,
) -> PublishReport:
    """Validate a sidecar and publish it beside its dataset.

    Args:
        archive: The sidecar.
        store: The dataset, pinned to the sidecar's commit if it is in a repository.
        layout: Its metadata.
        force: Replace a valid sidecar of the same snapshot that has other bytes.
        dry_run: Check everything, write nothing.
        policy: Bounds of the attempts.

    Raises:
        SidecarError: The archive is invalid, or of an older schema.
        CheckFailedError: It is not a sidecar of the complete dataset as it is now.
        AccessError: This process may not write there.
        TransferError: It could not be published within the attempts; the same call may succeed later.
    """
    identity = check_publishable(archive, store, layout)
    companion, refused = _usable_companion(archive, identity, layout)
    require_write_access(store.place, policy)
    publisher = _Publisher(archive, companion, identity, store, policy)
    report = publisher.dry_run(force) if dry_run else publisher.run(force)
    return replace(report, checksums_refused=refused)


def check_publishable(archive: Path, store: PublishingStore, layout: DatasetLayout) -> SidecarIdentity:
    """Whether an archive is a valid sidecar of the complete dataset as it is now; its identity.

    Raises:
        SidecarError, CheckFailedError: As `publish_sidecar`.
    """
    with ArchiveReader(archive) as reader:
        identity = reader.identity
        reader.verify()
    _require_complete(archive, identity, layout)
    if isinstance(store, HubStore) and pinned_commit(identity.data_root) is None:
        raise CheckFailedError(
            f"{archive} describes {identity.data_root}, which is not pinned to a commit of {store.location}.",
            hint="Build the sidecar from the Hub repository itself: lrstream build OWNER/NAME.",
        )
    if isinstance(store, BucketStore) and not identity.source_fingerprints:
        raise CheckFailedError(
            f"{archive} records no fingerprints of its source files, so nobody could tell whether it still "
            "fits the bucket.",
            hint=_REBUILD,
        )
    # One fresh listing: sizes for both kinds of storage, and the hashes of a bucket.
    sizes = {path: info.size for path, info in store.file_info(identity.paths).items()}
    request = request_identity(store, layout, revision=identity.revision)
    request = request.with_sizes({path: size for path, size in sizes.items() if size is not None})
    reasons = identity.mismatches(request)
    if reasons:
        raise CheckFailedError(
            f"{archive} is not the sidecar of {store.location} as it is now: {'; '.join(reasons)}.",
            hint=_REBUILD,
        )
    return identity


def _usable_companion(
    archive: Path, identity: SidecarIdentity, layout: DatasetLayout
) -> tuple[Path | None, str | None]:
    """The payload checksums beside an archive if they can be published with it, else why not."""
    found = local_checksums(archive, identity)
    if found.checksums is None:
        return None, found.reasons[0] if found.reasons else None
    with contextlib.closing(found.checksums) as checksums:
        try:
            checksums.verify()
            coverage = coverage_of(checksums, layout)
        except SidecarError as error:
            reason = str(error)
        else:
            if coverage.is_complete:
                return checksums.path, None
            reason = (
                f"{checksums.path} lacks {coverage.num_missing} of {coverage.num_spans} spans; "
                "`lrstream build --checksums` completes it."
            )
    logger.warning("Payload checksums are not published: %s", reason)
    return None, reason


def _require_complete(archive: Path, identity: SidecarIdentity, layout: DatasetLayout) -> None:
    wanted, covered = set(layout.video_files()), set(identity.paths)
    missing, surplus = sorted(wanted - covered), sorted(covered - wanted)
    if missing:
        raise CheckFailedError(
            f"{archive} covers {len(wanted & covered)} of the dataset's {len(wanted)} video files; "
            f"{missing[0]} is not among them. Only complete sidecars can be published.",
            hint="Build it without --episodes.",
            missing=tuple(missing),
        )
    if surplus:
        raise CheckFailedError(
            f"{archive} covers {len(surplus)} files that the dataset does not use, such as {surplus[0]}.",
            hint=_REBUILD,
            surplus=tuple(surplus),
        )
    if not covered:
        raise CheckFailedError(f"{archive} covers no file; a dataset without video needs no sidecar.")


State = Literal["absent", "identical", "equivalent", "unusable"]


@dataclass(frozen=True, slots=True)
class _Found:
    """What is published under our names at one moment.

    `head` is the tip of the branch, None without a branch; `states` compares each file with ours.
    """

    head: str | None
    states: tuple[State, ...]


class _Item:
    """One local file on its way to its place."""

    def __init__(self, file: Path, path: str, judge: Callable[[Path], list[str]]) -> None:
        self.file = file
        self.path = path
        self.size = file.stat().st_size
        self.sha256 = _sha256_of(file)
        self.action: Action | None = None
        self._judge = judge

    def compare(self, file: PublishedFile | None) -> State:
        """What is published under this name, compared with this file."""
        if file is None:
            return "absent"
        if file.size == self.size and file.sha256 == self.sha256:
            return "identical"
        suffix = Path(self.path).suffix
        with tempfile.NamedTemporaryFile(prefix="lrstream-published-", suffix=suffix) as copy:
            sha256 = file.write_to(cast(BinaryIO, copy))
            copy.flush()
            if sha256 == self.sha256:
                return "identical"
            reasons = self._judge(Path(copy.name))
        if reasons:
            logger.warning(
                "%s is published already but cannot be used (%s); it is replaced.", self.path, reasons[0]
            )
            return "unusable"
        return "equivalent"

    def settled(self, state: State, force: bool) -> Action | None:
        """The result if it need not be uploaded."""
        if state == "identical":
            return self.action or "unchanged"
        if state == "equivalent" and not force:
            return "equivalent"
        return None


class _Publisher:
    """An archive, and its companion if it has one, on their way to their place."""

    def __init__(
        self,
        archive: Path,
        companion: Path | None,
        identity: SidecarIdentity,
        store: PublishingStore,
        policy: RetryPolicy,
    ) -> None:
        self._identity = identity
        self._store = store
        self._policy = policy
        self._name = published_name(identity)
        place = publication_path(store, self._name)
        self._items = [_Item(archive, place, self._judge_archive)]
        if companion is not None:
            place = checksums_path(Path(place)).as_posix()
            self._items.append(_Item(companion, place, self._judge_companion))
        self._branch_created = False
        self._commit: str | None = None

    def dry_run(self, force: bool) -> PublishReport:
        """What `run` would do now."""
        found = self._look()
        self._branch_created = isinstance(self._store, HubStore) and found.head is None
        actions = [
            item.settled(state, force) or _upload_action(state)
            for item, state in zip(self._items, found.states, strict=True)
        ]
        return self._report(actions, dry_run=True)

    def run(self, force: bool) -> PublishReport:
        """Look, upload if need be, look again."""
        schedule = RetrySchedule(self._policy, f"{self._store.place}: publish {self._name}", RetryCounters())
        uploaded = False
        while True:
            try:
                found = self._look()
                both = list(zip(self._items, found.states, strict=True))
                waiting = [(item, state) for item, state in both if item.settled(state, force) is None]
                if not waiting:
                    return self._report([cast(Action, item.settled(state, force)) for item, state in both])
                if not uploaded:
                    for item, state in waiting:
                        item.action = item.action or _upload_action(state)
                    self._upload(found.head, [item for item, _ in waiting])
                    uploaded = True
                    continue
                failure = "the listing does not show what was uploaded"
            except TransferError as error:
                failure = error.message
            uploaded = False
            schedule.wait(failure)

    def _look(self) -> _Found:
        if isinstance(self._store, BucketStore):
            return _Found(None, self._compare(list_published(self._store, suffix="")))
        head = branch_head(self._store.place, PUBLICATION_BRANCH)
        listed = {} if head is None else list_published(self._store, head, suffix="")
        return _Found(head, self._compare(listed))

    def _compare(self, listed: dict[str, PublishedFile]) -> tuple[State, ...]:
        return tuple(item.compare(listed.get(item.path.rpartition("/")[2])) for item in self._items)

    def _judge_archive(self, copy: Path) -> list[str]:
        """What is wrong with another sidecar."""
        try:
            with ArchiveReader(copy) as reader:
                reasons = reader.identity.mismatches(self._identity)
                reader.verify()
        except SidecarError as error:
            reasons = [error.message]
        return reasons

    def _judge_companion(self, copy: Path) -> list[str]:
        """What is wrong with other checksums; the same ones may be stored in other bytes."""
        try:
            with (
                contextlib.closing(ChecksumFile(copy, remove_damaged=False)) as theirs,
                contextlib.closing(ChecksumFile(self._items[1].file)) as ours,
            ):
                reasons = theirs.mismatches(self._identity)
                theirs.verify()
                for path in ours.paths:
                    mine, other = ours.file(path), theirs.file(path)
                    if mine is None or other is None or mine.checksum() != other.checksum():
                        reasons.append(f"it has other checksums of {path}")
        except (SidecarError, NotFoundError) as error:
            reasons = [error.message]
        return reasons

    def _upload(self, head: str | None, items: list[_Item]) -> None:
        for item in items:
            if _sha256_of(item.file) != item.sha256:
                raise CheckFailedError(
                    f"{item.file} was changed while it was being published.", hint="Publish it again."
                )
        files = {item.path: item.file for item in items}
        if isinstance(self._store, BucketStore):
            add_to_bucket(self._store.place, files)
            return
        if head is None:
            commit = self._store.commit
            self._unless_conflict(lambda: create_branch(self._store.place, PUBLICATION_BRANCH, commit), 409)
            self._branch_created = True
            head = commit
        self._commit = commit_files(
            self._store.place,
            PUBLICATION_BRANCH,
            files,
            parent=head,
            message=f"Publish the MP4 sidecar of commit {self._store.commit}",
        )

    @staticmethod
    def _unless_conflict(write: Callable[[], None], status: int) -> None:
        """Do it, unless somebody else just did."""
        try:
            write()
        except TransferError as error:
            if error.fields.get("status") != status:
                raise

    def _report(self, actions: list[Action], *, dry_run: bool = False) -> PublishReport:
        first, *others = [
            PublishedChecksums(item.path, item.size, item.sha256, action)
            for item, action in zip(self._items, actions, strict=True)
        ]
        return PublishReport(
            repo_id=self._store.place.repo_id,
            branch=PUBLICATION_BRANCH if isinstance(self._store, HubStore) else None,
            path=first.path,
            size=first.size,
            sha256=first.sha256,
            num_sources=len(self._identity.paths),
            action=first.action,
            dry_run=dry_run,
            branch_created=self._branch_created,
            commit=self._commit,
            checksums=others[0] if others else None,
        )


def _upload_action(state: State) -> Action:
    return "published" if state == "absent" else "replaced"


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
