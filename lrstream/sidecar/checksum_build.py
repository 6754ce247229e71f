"""Making the companion of a sidecar: what of it is known already, and reading the rest.

Known are the files of an unfinished pass, of a companion that lacks some, and those that have not changed
since an earlier state of the dataset (SC-13).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrstream.errors import NotFoundError, SidecarError
from lrstream.index.open import open_index
from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.build import DEFAULT_WORKERS
from lrstream.sidecar.checksum_file import ChecksumFile, FileChecksums, checksums_path, write_checksums
from lrstream.sidecar.checksum_journal import ChecksumJournal, checksum_journal_path
from lrstream.sidecar.checksum_pass import PayloadPass
from lrstream.sidecar.checksum_wanted import Intervals, wanted_intervals
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.install import reclaim_leftovers
from lrstream.sidecar.lock import ProcessLock, lock_path
from lrstream.sidecar.resumable import BuildInterrupt
from lrstream.sidecar.reuse import earlier_sidecars
from lrstream.storage.home import lerobot_home
from lrstream.storage.store import DatasetStore

__all__ = ["ChecksumReport", "build_checksums"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChecksumReport:
    """What a pass over the payload did.

    Attributes:
        path: The companion.
        num_files: Source files that it covers.
        num_spans: Spans of which it has checksums.
        num_reused: Files that were not read, because their checksums were known.
        num_verified: Files that were read and held against the storage's hash of the whole file.
        num_without_span: Episodes and cameras left out, because the metadata do not fit the video.
        bytes_read: Bytes fetched.
        elapsed_s: Duration.
    """

    path: Path
    num_files: int
    num_spans: int
    num_reused: int
    num_verified: int
    num_without_span: int
    bytes_read: int
    elapsed_s: float


def build_checksums(
    store: DatasetStore,
    layout: DatasetLayout,
    archive: Path,
    *,
    positions: Any = None,
    workers: int = DEFAULT_WORKERS,
    lock_timeout_s: float = 1800.0,
    progress: Callable[[int, int], None] | None = None,
    force: bool = False,
    resume: bool = True,
    home: Path | None = None,
) -> ChecksumReport:
    """Make the companion of a sidecar, unless it is there and complete.

    Args:
        store: Where the dataset is.
        layout: Its metadata.
        archive: The sidecar; valid for the dataset as it is now.
        positions: Positions of the episodes to cover, int64; all when None.
        workers: Reads at the same time.
        lock_timeout_s: How long to wait for another process that holds the sidecar's lock.
        progress: Called with (bytes done, bytes in all).
        force: Read every file, whatever is known already.
        resume: Continue an interrupted pass, and keep what is needed to continue this one.
        home: LeRobot's home directory.

    Raises:
        BuildInterrupt: Ctrl-C; says how to continue.
        SidecarLockTimeoutError: Another process held the lock all the time.
        LrstreamError: Files cannot be read; the error names them. What was read is kept.
    """
    home = home or lerobot_home()
    started_s, read_before = time.monotonic(), store.counters.bytes_read
    destination = checksums_path(archive)
    wanted = wanted_intervals(layout, positions)
    with contextlib.closing(open_index(archive, home=home)) as index:
        identity = index.identity
        known = {} if force else _known(destination, identity, wanted)
        if len(known) == len(wanted):
            return _report(destination, known, len(known), started_s)
        with ProcessLock(lock_path(archive)) as lock, contextlib.ExitStack() as stack:
            lock.acquire(lock_timeout_s)
            reclaim_leftovers(destination)
            journal = None
            if resume:
                journal = stack.enter_context(contextlib.closing(ChecksumJournal(archive, identity)))
            else:
                checksum_journal_path(archive).unlink(missing_ok=True)
            if not force:
                # Whoever held the lock before may just have made them.
                known = _known(destination, identity, wanted)
                known |= _unchanged(store, identity, archive, wanted, known, home)
            if journal is not None:
                found = {path: row for path, row in journal.found.items() if path in wanted}
                known |= {path: row for path, row in found.items() if row.covers(wanted[path])}
                if found:
                    logger.info("Continuing: %d of %d video files are read already.", len(found), len(wanted))
            work = {path: wanted[path] for path in sorted(wanted.keys() - known.keys())}
            task = PayloadPass(store, identity, index, work, workers, journal)
            try:
                task.run(_both(progress, lock.progress, len(known), len(wanted)))
            except KeyboardInterrupt:
                raise BuildInterrupt(_how_to_continue(journal, len(known), len(wanted))) from None
            task.raise_failures()
            rows = known | task.done
            write_checksums(destination, identity, rows.values())
            if journal is not None:
                journal.discard()
    read = store.counters.bytes_read - read_before
    return _report(destination, rows, len(known), started_s, task.num_verified, task.num_without_span, read)


def _report(
    path: Path,
    rows: dict[str, FileChecksums],
    num_reused: int,
    started_s: float,
    num_verified: int = 0,
    num_without_span: int = 0,
    bytes_read: int = 0,
) -> ChecksumReport:
    num_spans = sum(map(len, rows.values()))
    elapsed_s = time.monotonic() - started_s
    return ChecksumReport(
        path, len(rows), num_spans, num_reused, num_verified, num_without_span, bytes_read, elapsed_s
    )


def _both(
    progress: Callable[[int, int], None] | None,
    note: Callable[[int, int], None],
    num_known: int,
    num_files: int,
) -> Callable[[int, int, int], None]:
    def tell(done_bytes: int, total_bytes: int, done_files: int) -> None:
        note(num_known + done_files, num_files)
        if progress is not None:
            progress(done_bytes, total_bytes)

    return tell


def _known(companion: Path, identity: SidecarIdentity, wanted: Intervals) -> dict[str, FileChecksums]:
    """Rows of the companion that is there, as far as they answer what is wanted."""
    try:
        with contextlib.closing(ChecksumFile(companion)) as checksums:
            if checksums.mismatches(identity):
                return {}
            checksums.verify()
            return _rows(checksums, wanted)
    except NotFoundError:
        return {}
    except SidecarError as error:
        logger.warning("%s", error)
        return {}


def _rows(checksums: ChecksumFile, wanted: Intervals) -> dict[str, FileChecksums]:
    found = {}
    for path in checksums.paths:
        row = checksums.file(path) if path in wanted else None
        if row is not None and row.covers(wanted[path]):
            found[path] = row
    return found


def _unchanged(
    store: DatasetStore,
    identity: SidecarIdentity,
    archive: Path,
    wanted: Intervals,
    known: dict[str, FileChecksums],
    home: Path,
) -> dict[str, FileChecksums]:
    """Rows of files that have not changed since an earlier state of the dataset (as SC-13 has it)."""
    found: dict[str, FileChecksums] = {}
    missing = wanted.keys() - known.keys()
    if not any(path != archive and checksums_path(path).exists() for path in archive.parent.glob("*.npz")):
        return found
    for records in earlier_sidecars(store, identity, destination=archive, home=home):
        with contextlib.closing(records):
            if records.path == archive or not missing:
                continue
            with (
                contextlib.suppress(NotFoundError, SidecarError),
                contextlib.closing(ChecksumFile(checksums_path(records.path))) as checksums,
            ):
                rows = _rows(checksums, {path: wanted[path] for path in missing & records.unchanged})
                found |= rows
                missing -= rows.keys()
    return found


def _how_to_continue(journal: ChecksumJournal | None, num_known: int, total: int) -> str:
    if journal is None or num_known + journal.num_kept == 0:
        return "Nothing of it was kept; the same command begins again."
    return (
        f"Run the same command again: {num_known + journal.num_kept} of {total} video files are read and "
        "will not be read again."
    )
