"""Building with what earlier builds have left: the journal of an interrupted one, sidecars of earlier states.

`build_sidecar` indexes sources; here it is decided which of them need not be indexed (SC-13).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lrstream.errors import SidecarLockTimeoutError
from lrstream.layout.layout import DatasetLayout
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.build import BuildProgress, BuildReport, build_sidecar
from lrstream.sidecar.elsewhere import SourceIndexer
from lrstream.sidecar.finished import Record
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from lrstream.sidecar.journal import JOURNAL_SUFFIX, BuildJournal, JournalRecords, journal_path
from lrstream.sidecar.lock import ProcessLock, lock_path
from lrstream.sidecar.reuse import SidecarRecords, earlier_sidecars, open_base, sibling_journals
from lrstream.storage.store import DatasetStore

__all__ = ["BuildInterrupt", "BuildOptions", "build_resumable"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a build may use of earlier ones.

    Attributes:
        resume: Continue an interrupted build, and keep a journal so that this one can be continued.
        reuse: Take over sources that have not changed from earlier sidecars of the dataset.
        base: A sidecar to take unchanged sources from, besides those that are found.
        indexer: Indexes the rest in other processes; threads of this one do when None.
        comment: Comment of the archive.
    """

    resume: bool = True
    reuse: bool = True
    base: Path | None = None
    indexer: SourceIndexer | None = None
    comment: bytes = b""


class BuildInterrupt(KeyboardInterrupt):
    """Ctrl-C during a build that can be continued.

    Attributes:
        hint: How.
    """

    def __init__(self, hint: str) -> None:
        super().__init__()
        self.hint = hint


def build_resumable(
    store: DatasetStore,
    layout: DatasetLayout,
    *,
    destination: Path,
    identity: SidecarIdentity,
    workers: int,
    home: Path,
    progress: Callable[[BuildProgress], None] | None = None,
    options: BuildOptions | None = None,
    published: Callable[[], Iterator[SidecarRecords]] | None = None,
) -> BuildReport:
    """Build an archive, reading only what no earlier build has read already. The lock must be held.

    Args:
        store: Where the dataset is.
        layout: Its metadata.
        destination: Path of the archive.
        identity: Its identity.
        workers: Sources parsed at the same time.
        home: LeRobot's home directory, whose cache is searched for earlier sidecars.
        progress: As for `build_sidecar`.
        options: What may be used.
        published: Finds records of published sidecars; asked if the cache has none.

    Raises:
        BuildInterrupt: Ctrl-C; says how to continue.
        SidecarError, NotFoundError: The base is no valid sidecar.
        LrstreamError: As `build_sidecar`.
    """
    options = options or BuildOptions()
    with contextlib.ExitStack() as stack:
        journal = None
        if options.resume:
            journal = stack.enter_context(contextlib.closing(BuildJournal(destination, identity)))
        else:
            journal_path(destination).unlink(missing_ok=True)
        siblings = sibling_journals(identity, destination) if options.resume else []
        sidecars = list(_sidecars(store, identity, destination, home, options, published))
        for close in [*(opened.close for opened in siblings), *(opened.close for opened in sidecars)]:
            stack.callback(close)
        finished = _Finished(identity, journal, siblings, sidecars)
        finished.announce(len(identity.source_files))
        try:
            report = build_sidecar(
                store,
                layout,
                destination=destination,
                workers=workers,
                identity=identity,
                progress=progress,
                finished=finished,
                indexer=options.indexer,
                comment=options.comment,
            )
        except KeyboardInterrupt:
            raise BuildInterrupt(_how_to_continue(journal, len(identity.source_files))) from None
        if journal is not None:
            journal.discard()
        _discard_superseded(siblings)
        return report


class _Finished:
    """All records of earlier builds, as `build_sidecar` asks for them; new ones go to the journal."""

    def __init__(
        self,
        identity: SidecarIdentity,
        journal: BuildJournal | None,
        siblings: list[JournalRecords],
        sidecars: list[SidecarRecords],
    ) -> None:
        self._journal = journal
        self._sidecars = sidecars
        self._finders: list[Callable[[SourceFile, str | None], Record | None]] = []
        if journal is not None:
            self._finders.append(journal.find)
        self._finders += [functools.partial(found.find, is_pinned=identity.is_pinned) for found in siblings]
        self._finders += [_without_fingerprint(found) for found in sidecars]

    def announce(self, total: int) -> None:
        if self._journal is not None and self._journal.num_found:
            logger.info(
                "Continuing an interrupted build: %d of %d video files are indexed already.",
                self._journal.num_found,
                total,
            )
        for records in self._sidecars:
            logger.info("%d of %d video files are unchanged since %s.", len(records), total, records.path)

    def records(self, source: SourceFile, fingerprint: str | None) -> Iterator[Record]:
        for find in self._finders:
            read = find(source, fingerprint)
            if read is not None:
                yield read

    def keep(self, track: TrackIndex, fingerprint: str | None) -> None:
        if self._journal is not None:
            self._journal.keep(track, fingerprint)

    def keep_packed(self, packed: bytes, fingerprint: str | None) -> None:
        if self._journal is not None:
            self._journal.keep_packed(packed, fingerprint)


def _without_fingerprint(records: SidecarRecords) -> Callable[[SourceFile, str | None], Record | None]:
    """Which sources of a sidecar are unchanged has been found out for all at once."""
    return lambda source, fingerprint: records.find(source)


def _sidecars(
    store: DatasetStore,
    identity: SidecarIdentity,
    destination: Path,
    home: Path,
    options: BuildOptions,
    published: Callable[[], Iterator[SidecarRecords]] | None,
) -> Iterator[SidecarRecords]:
    """Earlier sidecars that have something to give, until half of the sources are covered."""
    covered: set[str] = set()
    total = len(identity.source_files)
    if options.base is not None:
        records = open_base(store, identity, options.base)
        covered |= records.unchanged
        yield records
    if not options.reuse:
        return
    groups: list[Callable[[], Iterable[SidecarRecords]]] = [
        lambda: earlier_sidecars(store, identity, destination=destination, home=home)
    ]
    if published is not None:
        groups.append(published)
    for group in groups:
        if 2 * len(covered) >= total:
            return
        for records in group():
            covered |= records.unchanged
            yield records
            if 2 * len(covered) >= total:
                return


def _how_to_continue(journal: BuildJournal | None, total: int) -> str:
    if journal is None or journal.num_records == 0:
        return "Nothing of it was kept; the same command begins again."
    return (
        f"Run the same command again: {min(journal.num_records, total)} of {total} video files are indexed "
        "and will not be read again."
    )


def _discard_superseded(siblings: list[JournalRecords]) -> None:
    """Remove journals of earlier states, unless somebody is building one of them just now."""
    for records in siblings:
        destination = records.path.with_name(records.path.name.removesuffix(JOURNAL_SUFFIX))
        with (
            contextlib.suppress(OSError, SidecarLockTimeoutError),
            ProcessLock(lock_path(destination)) as lock,
        ):
            lock.acquire(0)
            records.path.unlink(missing_ok=True)
