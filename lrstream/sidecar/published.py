"""Looking for a published sidecar when a dataset is opened (SC-4, SC-7)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lrstream.sidecar.identity import SidecarIdentity, pinned_commit, revision_slug
from lrstream.sidecar.publication import PublishedFile, PublishingStore, list_published, published_name

__all__ = ["PublishedSidecars", "candidates_for"]

_REGULAR_NAME = re.compile(r"mp4-v\d+-(?P<slug>.+)-(?P<digest>[0-9a-f]{16})\.npz")
_COMMIT_SLUG = re.compile(r"[0-9a-f]{32}")
# Files under other names are tried by content; each try is a download.
_MAX_OTHER_CANDIDATES = 3


class PublishedSidecars:
    """Candidates for a dataset's sidecar among what is published beside it.

    Args:
        store: The dataset.
    """

    def __init__(self, store: PublishingStore) -> None:
        self._store = store

    def __call__(self, identity: SidecarIdentity) -> Iterator[PublishedFile]:
        """Published files that may answer `identity`, the likeliest first.

        Whether one does is for its content to tell.

        Raises:
            AccessError, TransferError: They could not be listed.
        """
        yield from candidates_for(identity, list(list_published(self._store).values()))


def candidates_for(identity: SidecarIdentity, files: list[PublishedFile]) -> list[PublishedFile]:
    """The files with the right names, then those that may match under another name.

    A name of the regular form tells revision and digest, so most files are left out unseen: a repository
    may have a sidecar for each of its revisions. Tried by content are names of any other form, and, for
    pinned datasets, names with a branch or tag where the commit is expected.
    """
    names = (published_name(identity), identity.file_name)
    exact = [file for name in dict.fromkeys(names) for file in files if file.name == name]
    commit = pinned_commit(identity.data_root)
    known_slugs = {revision_slug(identity.revision), revision_slug(commit or identity.revision)}
    others = []
    for file in files:
        match = _REGULAR_NAME.fullmatch(file.name)
        if file in exact:
            continue
        if match is not None:
            slug = match["slug"]
            if commit is None or slug in known_slugs or _COMMIT_SLUG.fullmatch(slug):
                continue
        others.append(file)
    others.sort(key=lambda file: (-file.modified_s, file.name))
    return exact + others[:_MAX_OTHER_CANDIDATES]
