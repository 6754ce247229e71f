"""Finding the payload checksums that belong to a sidecar: beside it, then published.

They are optional, so nothing here ends an opening: what cannot be used is left aside, and the reasons are
returned for whoever needs them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lrstream.errors import (
    AccessError,
    NotFoundError,
    SidecarError,
    SidecarLockTimeoutError,
    TransferError,
)
from lrstream.sidecar.checksum_file import CHECKSUMS_SUFFIX, ChecksumFile, checksums_path
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.install import PendingFile, storage_errors
from lrstream.sidecar.lock import ProcessLock, lock_path
from lrstream.storage.store import DatasetStore

if TYPE_CHECKING:  # nothing of the Hub's client is needed for other storage
    from lrstream.sidecar.publication import PublishedFile
    from lrstream.storage.bucket_store import BucketStore
    from lrstream.storage.hub_store import HubStore

__all__ = ["FoundChecksums", "find_checksums", "local_checksums"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundChecksums:
    """What was found.

    Attributes:
        checksums: The companion; None if there is none that can be used.
        reasons: Why those that were seen cannot be used, one sentence each.
    """

    checksums: ChecksumFile | None
    reasons: tuple[str, ...] = ()


def local_checksums(archive: Path, identity: SidecarIdentity) -> FoundChecksums:
    """The companion beside an archive, if it belongs to it. A damaged one is removed."""
    path = checksums_path(archive)
    try:
        checksums = ChecksumFile(path)
        checksums.paths  # noqa: B018 - read and checked here
    except NotFoundError:
        return FoundChecksums(None)
    except (AccessError, SidecarError, TransferError) as error:
        logger.warning("%s", error)
        return FoundChecksums(None, (str(error),))
    mismatches = checksums.mismatches(identity)
    if mismatches:
        checksums.close()
        reason = f"{path} belongs to another sidecar: {'; '.join(mismatches)}."
        logger.warning("Payload checksums are not used: %s", reason)
        return FoundChecksums(None, (reason,))
    return FoundChecksums(checksums)


def find_checksums(store: DatasetStore, archive: Path, identity: SidecarIdentity) -> FoundChecksums:
    """The companion of a sidecar: the local one, else a published one, which is installed beside it.

    Args:
        store: The dataset.
        archive: The sidecar.
        identity: Its recorded identity, with every size.
    """
    found = local_checksums(archive, identity)
    if found.checksums is not None or store.location.kind not in ("hub", "bucket"):
        return found
    reasons = list(found.reasons)
    try:
        candidates = _published(cast("HubStore | BucketStore", store), identity)
        for candidate in candidates:
            reason = _install(candidate, archive, identity)
            if reason is None:
                logger.info("Using the published payload checksums %s.", candidate.name)
                return local_checksums(archive, identity)
            logger.warning("Payload checksums are not used: %s", reason)
            reasons.append(reason)
    except (AccessError, NotFoundError, TransferError, SidecarLockTimeoutError) as error:
        reasons.append(f"Published payload checksums cannot be had: {error}")
        logger.warning("%s", reasons[-1])
    return FoundChecksums(None, tuple(reasons))


def _published(store: HubStore | BucketStore, identity: SidecarIdentity) -> Iterable[PublishedFile]:
    # Imported here: nothing of the Hub is needed for other storage.
    from lrstream.sidecar.publication import list_published
    from lrstream.sidecar.published import candidates_for

    listed = list_published(store, suffix=CHECKSUMS_SUFFIX)
    # They are named after their sidecars, so the same rules say which are the likeliest.
    stems = {name.removesuffix(CHECKSUMS_SUFFIX) + ".npz": file for name, file in listed.items()}
    named = [replace(file, name=name) for name, file in stems.items()]
    return [stems[candidate.name] for candidate in candidates_for(identity, named)]


def _install(candidate: PublishedFile, archive: Path, identity: SidecarIdentity) -> str | None:
    """Put a candidate beside the sidecar if it belongs there; else the reason."""
    destination = checksums_path(archive)
    with ProcessLock(lock_path(archive)) as lock:
        # Whoever holds the lock may do so for hours, reading payload. Installing is atomic without it.
        with contextlib.suppress(SidecarLockTimeoutError):
            lock.acquire(0)
        with PendingFile(destination) as pending:
            with storage_errors(destination):
                candidate.write_to(pending.file)
                pending.file.flush()
            try:
                with contextlib.closing(ChecksumFile(pending.temporary)) as checksums:
                    mismatches = checksums.mismatches(identity)
                    if mismatches:
                        return f"The published {candidate.name} belongs to another sidecar: {mismatches[0]}."
                    checksums.verify()
            except (SidecarError, NotFoundError) as error:
                return f"The published {candidate.name} cannot be used: {error.message}"
            pending.install()
    return None
