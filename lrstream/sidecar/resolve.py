"""Finding the sidecar of a dataset: local cache, then published, then built (SC-4).

Whatever is found is checked before it is used: identity, source files, sizes, fingerprints, and
every array. The mapped index is made on the way, since converting reads and checks every array
anyway; where it exists already for the same archive, it is the proof that the arrays are good.

A dataset has one sidecar for all its episodes. A selection of episodes uses the complete sidecar,
so that no selection can put a partial one in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, TypeVar, cast

from lrstream.errors import AccessError, NotFoundError, SidecarError, TransferError
from lrstream.index.open import find_index, open_index
from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.build import (
    DEFAULT_WORKERS,
    BuildProgress,
    BuildReport,
    SourcesChangedError,
    request_identity,
)
from lrstream.sidecar.identity import SidecarIdentity, cache_path
from lrstream.sidecar.install import PendingFile, reclaim_leftovers, storage_errors
from lrstream.sidecar.lock import ProcessLock, lock_path
from lrstream.sidecar.resumable import BuildOptions, build_resumable
from lrstream.sidecar.reuse import SidecarRecords
from lrstream.storage.home import lerobot_home
from lrstream.storage.store import DatasetStore

if TYPE_CHECKING:
    from lrstream.storage.bucket_store import BucketStore
    from lrstream.storage.hub_store import HubStore

__all__ = [
    "DEFAULT_LOCK_TIMEOUT_S",
    "Origin",
    "PublishedCandidate",
    "PublishedLookup",
    "ResolvedSidecar",
    "build_locked",
    "build_under_lock",
    "resolve_sidecar",
    "twice_if_sources_change",
]

logger = logging.getLogger(__name__)

DEFAULT_LOCK_TIMEOUT_S = 1800.0

Origin = Literal["cache", "published", "built"]


@dataclass(frozen=True, slots=True)
class ResolvedSidecar:
    """A validated sidecar on this machine.

    Attributes:
        path: The archive.
        origin: Where it came from this time.
        identity: Its identity as recorded, with every size.
        complete: Whether it covers all videos of the dataset, as publishing requires.
        report: What the build did; None unless `origin` is ``built`` and this process built it.
    """

    path: Path
    origin: Origin
    identity: SidecarIdentity
    complete: bool = True
    report: BuildReport | None = None


class PublishedCandidate(Protocol):
    """A published file that may be the sidecar that is wanted."""

    @property
    def name(self) -> str:
        """Its file name."""
        ...

    def write_to(self, file: BinaryIO) -> object:
        """Download it into `file`."""
        ...


class PublishedLookup(Protocol):
    """How a kind of storage looks for a published sidecar (formats, section 3)."""

    def __call__(self, identity: SidecarIdentity) -> Iterable[PublishedCandidate]:
        """Candidates for `identity`, the likeliest first; what they hold is validated by the caller.

        Must look past cached listings (K24).
        """
        ...


def resolve_sidecar(
    store: DatasetStore,
    layout: DatasetLayout,
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    workers: int = DEFAULT_WORKERS,
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    progress: Callable[[BuildProgress], None] | None = None,
    published: PublishedLookup | None = None,
    options: BuildOptions | None = None,
    home: Path | None = None,
    rebuild: bool = False,
) -> ResolvedSidecar:
    """The sidecar of a dataset, found or built.

    A valid sidecar in the cache is used without writing anything, also from a read-only mount.

    Args:
        store: Where the dataset is.
        layout: Its metadata.
        repo_id: Repository id in the identity; by default the location's.
        revision: Revision in the identity; by default the location's.
        workers: Sources parsed at the same time, if it has to be built.
        lock_timeout_s: How long to wait for another process that builds the same sidecar.
        progress: Called while building.
        published: How to look for a published sidecar; as the storage has it when None.
        options: What a build may use of earlier ones.
        home: LeRobot's home directory; from the environment when None.
        rebuild: Build even if a valid one exists, and read every source for it.

    Raises:
        SidecarLockTimeoutError: Another process held the lock all the time.
        InputError: Videos cannot be indexed; the error names all of them.
        NotFoundError, AccessError, TransferError, DiskFullError: As `build_sidecar`.
    """
    home = home or lerobot_home()
    if published is None:
        published = _lookup_of(store)

    def attempt() -> ResolvedSidecar:
        identity = request_identity(store, layout, repo_id=repo_id, revision=revision)
        resolver = _Resolver(cache_path(identity, home), identity, home)
        if not rebuild and (found := resolver.cached()) is not None:
            return found
        with ProcessLock(lock_path(resolver.path)) as lock:
            ready = None if rebuild else resolver.appeared
            found = lock.acquire(lock_timeout_s, ready=ready)
            # Whoever held the lock before has most likely just built what is wanted.
            if found is None and not rebuild:
                found = resolver.cached()
            if found is None and published is not None and not rebuild:
                found = resolver.fetch(published)
            if found is not None:
                return found
            chosen = options or BuildOptions()
            if rebuild:
                chosen = replace(chosen, reuse=False)
            report = build_under_lock(
                store, layout, resolver.path, identity, workers, progress, chosen, lock, home
            )
        resolver.prepare_index()
        return ResolvedSidecar(resolver.path, "built", report.identity, True, report)

    return twice_if_sources_change(attempt)


def build_locked(
    store: DatasetStore,
    layout: DatasetLayout,
    *,
    destination: Path,
    repo_id: str | None = None,
    revision: str | None = None,
    workers: int = DEFAULT_WORKERS,
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    progress: Callable[[BuildProgress], None] | None = None,
    options: BuildOptions | None = None,
    paths: Collection[str] | None = None,
    home: Path | None = None,
) -> BuildReport:
    """Build a sidecar at a path of the user's choice, under that path's lock.

    Args:
        paths: The sources to cover; all of the dataset when None.

    Other args and errors as `resolve_sidecar`.
    """
    home = home or lerobot_home()

    def attempt() -> BuildReport:
        identity = request_identity(store, layout, repo_id=repo_id, revision=revision)
        if paths is not None:
            identity = identity.narrowed(paths)
        with ProcessLock(lock_path(destination)) as lock:
            lock.acquire(lock_timeout_s)
            return build_under_lock(
                store, layout, destination, identity, workers, progress, options or BuildOptions(), lock, home
            )

    return twice_if_sources_change(attempt)


class _Resolver:
    """One cache entry and what it has to match."""

    def __init__(self, path: Path, request: SidecarIdentity, home: Path) -> None:
        self.path = path
        self._request = request
        self._home = home
        self._refused: tuple[int, int, int] | None = None

    def cached(self) -> ResolvedSidecar | None:
        """The cached sidecar if it is there and valid."""
        identity = self._accept(self.path)
        return None if identity is None else ResolvedSidecar(self.path, "cache", identity)

    def appeared(self) -> ResolvedSidecar | None:
        """The same, for a process that waits: a file that was refused is not read again and again."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if state == self._refused:
            return None
        found = self.cached()
        self._refused = None if found is not None else state
        return found

    def fetch(self, published: PublishedLookup) -> ResolvedSidecar | None:
        """Download, validate and install a published sidecar. The lock must be held."""
        reclaim_leftovers(self.path)
        try:
            for candidate in published(self._request):
                identity = self._install(candidate)
                if identity is not None:
                    logger.info("Using the published sidecar %s.", candidate.name)
                    self.prepare_index()
                    return ResolvedSidecar(self.path, "published", identity)
        except (AccessError, TransferError) as error:
            logger.warning("No published sidecar can be had, so one is built here: %s", error)
        return None

    def _install(self, candidate: PublishedCandidate) -> SidecarIdentity | None:
        """Put a candidate into the cache if it is what is wanted."""
        with PendingFile(self.path) as pending:
            try:
                with storage_errors(self.path):
                    candidate.write_to(pending.file)
                    pending.file.flush()
                identity = _validated(pending.temporary, self._request)
            except (SidecarError, NotFoundError) as error:
                logger.warning("The published sidecar %s is not used: %s", candidate.name, error)
                return None
            pending.install()
        return identity

    def prepare_index(self) -> None:
        """Make the mapped index, which the first open would have to make otherwise."""
        open_index(self.path, home=self._home).close()

    def _accept(self, path: Path) -> SidecarIdentity | None:
        try:
            index = find_index(path, home=self._home)
            identity = _checked(index.identity, self._request) if index is not None else None
            if identity is None:
                with ArchiveReader(path) as reader:
                    identity = _checked(reader.identity, self._request)
                # Converting checks every array; so does the archive's reader where it cannot be done.
                index_or_archive = open_index(path, home=self._home)
                if index_or_archive.path == path:
                    _validated(path, self._request)
                index_or_archive.close()
        except NotFoundError:
            return None
        except SidecarError as error:
            logger.warning("The cached sidecar is not used and will be replaced: %s", error)
            return None
        return identity


def _lookup_of(store: DatasetStore) -> PublishedLookup | None:
    """How to look for what is published beside a dataset, None where nothing can be."""
    if store.location.kind not in ("hub", "bucket"):
        return None
    # Imported here: nothing of the Hub is needed for other storage.
    from lrstream.sidecar.published import PublishedSidecars

    return PublishedSidecars(cast("HubStore | BucketStore", store))


def build_under_lock(
    store: DatasetStore,
    layout: DatasetLayout,
    destination: Path,
    identity: SidecarIdentity,
    workers: int,
    progress: Callable[[BuildProgress], None] | None,
    options: BuildOptions,
    lock: ProcessLock,
    home: Path,
) -> BuildReport:
    """Build under a held lock, whose note tells waiting processes how far it is."""

    def report(state: BuildProgress) -> None:
        lock.progress(state.done, state.total)
        if progress is not None:
            progress(state)

    def earlier() -> Iterator[SidecarRecords]:
        if store.location.kind in ("hub", "bucket"):
            from lrstream.sidecar.reuse_published import earlier_published

            yield from earlier_published(cast("HubStore | BucketStore", store), identity, destination)

    return build_resumable(
        store,
        layout,
        destination=destination,
        identity=identity,
        workers=workers,
        home=home,
        progress=report,
        options=options,
        published=earlier,
    )


def _validated(path: Path, request: SidecarIdentity) -> SidecarIdentity:
    """Identity of an archive that matches `request` and whose every array is valid."""
    with ArchiveReader(path) as reader:
        identity = _checked(reader.identity, request)
        reader.verify()
        return identity


def _checked(identity: SidecarIdentity, request: SidecarIdentity) -> SidecarIdentity:
    reasons = identity.mismatches(request)
    if reasons:
        raise SidecarError(
            "The sidecar belongs to another state of the dataset: " + "; ".join(reasons) + ".",
            hint="Rebuild it with `lrstream build`.",
        )
    return identity


Result = TypeVar("Result")


def twice_if_sources_change(attempt: Callable[[], Result]) -> Result:
    """Run `attempt`, and once more if videos were replaced under it."""
    try:
        return attempt()
    except SourcesChangedError as error:
        logger.warning("%s Building once more.", error.message)
        return attempt()
