"""Records of sources that have not changed, from sidecars and journals of earlier states (SC-13).

Whether a source is the same is told by its content's identity, never by its name and size alone:

    bucket           its xet hash, which both sidecars record
    local, fsspec    its fingerprint under the same root, which both sidecars record
    Hub dataset      its SHA-256 (or Git blob id) in the listings of both commits; sidecars of pinned
                     datasets record no fingerprints, but the old commit can still be asked

Where that cannot be told, the source is read.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lrstream.errors import AccessError, LrstreamError, NotFoundError, SidecarError, TransferError
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.finished import Record
from lrstream.sidecar.identity import SidecarIdentity, SourceFile, cache_path, pinned_commit
from lrstream.sidecar.journal import JOURNAL_SUFFIX, JournalRecords
from lrstream.storage.relative_path import common_directory
from lrstream.storage.store import DatasetStore

if TYPE_CHECKING:  # nothing of the Hub's client is needed for other storage
    from lrstream.storage.hub_store import HubStore

__all__ = [
    "SidecarRecords",
    "compared",
    "earlier_sidecars",
    "hub_contents",
    "open_base",
    "sibling_journals",
    "unchanged_sources",
]

logger = logging.getLogger(__name__)

# Each candidate costs an opening, and on the Hub a listing.
_MAX_CANDIDATES = 3
_BUCKETS = "hf://buckets/"
_COMMIT = re.compile(r"(?<=@)[0-9a-f]{40}")


class SidecarRecords:
    """The records of an earlier sidecar whose sources are unchanged. Thread-safe.

    Args:
        reader: The earlier sidecar; closed with this object.
        unchanged: Paths of the sources that have the same content now.
        on_close: What to do when it is not needed any more.
    """

    def __init__(
        self, reader: ArchiveReader, unchanged: frozenset[str], on_close: Callable[[], None] | None = None
    ) -> None:
        self.path = reader.path
        self.unchanged = unchanged
        self._reader = reader
        self._on_close = on_close

    def __len__(self) -> int:
        return len(self.unchanged)

    def find(self, source: SourceFile) -> Record | None:
        """How to read the record of a source, None if it has changed."""
        return functools.partial(self._read, source) if source.path in self.unchanged else None

    def _read(self, source: SourceFile) -> TrackIndex | None:
        try:
            track = self._reader.track(source.path)
        except SidecarError as error:
            logger.warning("%s is read again: %s", source.path, error)
            return None
        return track if source.size in (None, track.file_size) else None

    def close(self) -> None:
        """Close the sidecar."""
        self._reader.close()
        if self._on_close is not None:
            self._on_close()


def open_base(store: DatasetStore, identity: SidecarIdentity, base: Path) -> SidecarRecords:
    """The records of the sidecar that the user named.

    Raises:
        NotFoundError: There is none.
        SidecarError: It is invalid, or of another dataset.
        AccessError, TransferError: The old commit cannot be listed.
    """
    reader = ArchiveReader(base)
    try:
        unchanged = unchanged_sources(store, reader.identity, identity)
    except BaseException:
        reader.close()
        raise
    if not unchanged:
        logger.warning(
            "Nothing of %s can be used: it was built from %s, this is %s, and no source is known to be the "
            "same.",
            base,
            reader.identity.data_root,
            identity.data_root,
        )
    return SidecarRecords(reader, unchanged)


def earlier_sidecars(
    store: DatasetStore, identity: SidecarIdentity, *, destination: Path, home: Path
) -> Iterator[SidecarRecords]:
    """Records of earlier sidecars of the same dataset in the local cache, the newest first.

    Invalid ones are passed over, and those that cannot be compared: this only spares work.

    Args:
        store: The dataset as it is now.
        identity: What is to be built.
        destination: Where; what lies there now is the first candidate.
        home: LeRobot's home directory.
    """
    cached = cache_path(identity, home).parent
    candidates = [destination, *sorted(cached.glob("*.npz"), key=_age)]
    opened = 0
    for path in dict.fromkeys(candidates):
        if opened == _MAX_CANDIDATES:
            return
        try:
            reader = ArchiveReader(path)
        except LrstreamError:
            continue
        if _family(reader.identity.data_root) != _family(identity.data_root):
            reader.close()
            continue
        opened += 1
        records = compared(store, identity, reader)
        if records is not None:
            yield records


def compared(
    store: DatasetStore,
    identity: SidecarIdentity,
    reader: ArchiveReader,
    on_close: Callable[[], None] | None = None,
) -> SidecarRecords | None:
    """What an opened sidecar can give; if that is nothing, it is closed."""
    try:
        unchanged = unchanged_sources(store, reader.identity, identity)
    except (NotFoundError, AccessError, TransferError) as error:
        logger.info("The earlier sidecar %s cannot be compared: %s", reader.path, error)
        unchanged = frozenset()
    records = SidecarRecords(reader, unchanged, on_close)
    if not unchanged:
        records.close()
        return None
    return records


def unchanged_sources(store: DatasetStore, old: SidecarIdentity, new: SidecarIdentity) -> frozenset[str]:
    """Sources of `new` whose content is known to be that of the same path in `old`.

    Raises:
        NotFoundError, AccessError, TransferError: A commit cannot be listed.
    """
    common = set(old.paths) & set(new.paths)
    if not common:
        return frozenset()
    if old.is_pinned and new.is_pinned:
        return _unchanged_on_hub(cast("HubStore", store), old, new, common)
    comparable = old.data_root == new.data_root or (
        # A hash of the content means the same everywhere.
        old.data_root.startswith(_BUCKETS) and new.data_root.startswith(_BUCKETS)
    )
    if not comparable:
        return frozenset()
    sizes = {source.path: source.size for source in old.source_files}
    before, after = old.source_fingerprints, new.source_fingerprints
    return frozenset(
        source.path
        for source in new.source_files
        if source.path in common
        and after.get(source.path) is not None
        and after[source.path] == before.get(source.path)
        and source.size in (None, sizes[source.path])
    )


def sibling_journals(identity: SidecarIdentity, destination: Path) -> list[JournalRecords]:
    """Journals of unfinished builds of other states of the dataset, beside `destination`.

    The name of a cached sidecar changes with every fingerprint, so a build that stopped at a damaged file
    has its journal under another name than the build after the repair.
    """
    found = []
    names = [path for path in destination.parent.glob(f"*{JOURNAL_SUFFIX}") if path.name.startswith("mp4-v")]
    for path in sorted(names, key=_age)[:_MAX_CANDIDATES]:
        if path.name != destination.name + JOURNAL_SUFFIX:
            records = JournalRecords(path, identity.data_root)
            if len(records):
                found.append(records)
            else:
                records.close()
    return found


def _unchanged_on_hub(
    store: HubStore, old: SidecarIdentity, new: SidecarIdentity, common: set[str]
) -> frozenset[str]:
    if _family(old.data_root) != _family(new.data_root):
        return frozenset()
    commits = [cast(str, pinned_commit(identity.data_root)) for identity in (old, new)]
    if commits[0] == commits[1]:
        return frozenset(common)
    before, after = (hub_contents(store, commit, common) for commit in commits)
    return frozenset(path for path in common if path in after and after[path] == before.get(path))


def hub_contents(store: HubStore, commit: str, paths: set[str]) -> dict[str, tuple[str, int]]:
    """Content identity and size of each file at a commit, from one listing."""
    top = store.top_in_repo(common_directory(sorted(paths)))
    items = store.tree(top, commit) or []
    return {
        store.relative(item.path): (
            f"sha256:{item.lfs.sha256}" if item.lfs is not None else f"blob:{item.blob_id}",
            item.size,
        )
        for item in items
    }


def _family(data_root: str) -> str:
    """The data root without its commit: equal for all revisions of a dataset."""
    return _COMMIT.sub("", data_root)


def _age(path: Path) -> float:
    """Sorts the newest first; what has just been removed comes last."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0
