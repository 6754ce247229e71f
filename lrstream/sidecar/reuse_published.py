"""Unchanged sources from what is published for an earlier state of the dataset (SC-13).

A new revision has no published sidecar yet, but most of its videos are those of the revision before. To
download that sidecar is one transfer; to read the headers of all videos again would be one for each.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from lrstream.errors import AccessError, LrstreamError, NotFoundError, SidecarError, TransferError
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.identity import SCHEMA_VERSION, SidecarIdentity, revision_slug
from lrstream.sidecar.install import PendingFile, storage_errors
from lrstream.sidecar.publication import PublishedFile, PublishingStore, list_published
from lrstream.sidecar.reuse import SidecarRecords, compared
from lrstream.storage.bucket_store import BucketStore
from lrstream.storage.hub_client import hub_api
from lrstream.storage.hub_store import HubStore

__all__ = ["earlier_published"]

logger = logging.getLogger(__name__)

_NAME = re.compile(rf"mp4-v{SCHEMA_VERSION}-(?P<slug>.+)-[0-9a-f]{{16}}\.npz")


def earlier_published(
    store: PublishingStore, identity: SidecarIdentity, destination: Path
) -> Iterator[SidecarRecords]:
    """Records of the newest published sidecar of an earlier state, if there is one.

    Args:
        store: The dataset as it is now.
        identity: What is to be built.
        destination: Where; the download lies beside it while it is used.
    """
    try:
        file = _newest(store, identity)
        records = None if file is None else _downloaded(store, identity, file, destination)
    except (NotFoundError, AccessError, TransferError, SidecarError) as error:
        logger.info("No published sidecar of an earlier state can be used: %s", error)
        return
    if records is not None:
        yield records


def _newest(store: PublishingStore, identity: SidecarIdentity) -> PublishedFile | None:
    files = {
        match["slug"]: file
        for name, file in list_published(store).items()
        if (match := _NAME.fullmatch(name))
    }
    if isinstance(store, BucketStore):
        others = [file for file in files.values() if file.name != identity.file_name]
        return max(others, key=lambda file: file.modified_s, default=None)
    return _nearest_ancestor(store, files)


def _nearest_ancestor(store: HubStore, files: dict[str, PublishedFile]) -> PublishedFile | None:
    """The sidecar of the last commit before this one that has one."""
    files = {slug: file for slug, file in files.items() if slug != revision_slug(store.commit)}
    if not files:
        return None
    history = store.call(
        "list earlier commits",
        lambda: hub_api().list_repo_commits(store.place.repo_id, repo_type="dataset", revision=store.commit),
    )
    slugs = (revision_slug(commit.commit_id) for commit in history)
    return next((files[slug] for slug in slugs if slug in files), None)


def _downloaded(
    store: PublishingStore, identity: SidecarIdentity, file: PublishedFile, destination: Path
) -> SidecarRecords | None:
    pending = PendingFile(destination)
    try:
        with storage_errors(destination, needed_bytes=file.size):
            file.write_to(pending.file)
            pending.file.flush()
        return compared(store, identity, ArchiveReader(pending.temporary), pending.discard)
    except LrstreamError:
        pending.discard()
        raise
