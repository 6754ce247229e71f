"""`lrstream inspect cache`: what lies in the local caches, and what of it nobody needs (K26, K34).

Only what bears a name that lrstream gives counts as removable; `inspect_prune` removes it. Everything here
can be made again from the dataset.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lrstream.commands.inspect_figures import finding
from lrstream.commands.inspect_locks import CACHE_DIRECTORIES
from lrstream.errors import LrstreamError, SidecarError
from lrstream.index.format import FORMAT_VERSION
from lrstream.index.generation import list_generations
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.checksum_file import CHECKSUMS_SUFFIX, ChecksumFile, sidecar_of
from lrstream.sidecar.identity import SCHEMA_VERSION, SidecarIdentity
from lrstream.sidecar.install import leftovers
from lrstream.sidecar.journal import JOURNAL_SUFFIX
from lrstream.sidecar.lock import inspect_lock, lock_path
from lrstream.sidecar.problems import Problem
from lrstream.storage.home import lerobot_home

__all__ = [
    "DEFAULT_IDLE_S",
    "CacheEntry",
    "CacheReport",
    "EntryKind",
    "inspect_cache",
    "lock_of",
]

DEFAULT_IDLE_S = 7 * 86400.0
"""Superseded files stay this long: workers that were started before may still open them."""

EntryKind = Literal["sidecar", "checksums", "index", "unfinished", "other"]

_SIDECARS, _INDEXES = CACHE_DIRECTORIES
_FAMILY = f"lrstream-arrow-{FORMAT_VERSION}"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One file, or what other programs keep in one place.

    Attributes:
        path: The file; a directory where it is not lrstream's.
        kind: ``sidecar``, ``checksums`` (of the payload, beside their sidecar), ``index`` (one generation of
            a mapped index), ``unfinished`` (a file or journal of a build under way, or left by one that ended
            early), or ``other``.
        size_bytes: Its size.
        last_used: Last read or write that the file system noted, seconds since the epoch; of a sidecar,
            those of its indexes, through which it is used.
        state: ``current``, ``superseded``, ``orphan``, ``damaged``, ``abandoned``, ``resumable``,
            ``in progress`` or ``foreign``.
        reason: Why it is in this state.
        is_removable: Whether prune removes it.
        repo_id: Dataset of a sidecar.
        revision: Revision of a sidecar.
        data_root: Where that dataset is.
        archive: Sidecar of a mapped index or of checksums.
    """

    path: Path
    kind: EntryKind
    size_bytes: int
    last_used: float
    state: str
    reason: str
    is_removable: bool = False
    repo_id: str | None = None
    revision: str | None = None
    data_root: str | None = None
    archive: Path | None = None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The local caches.

    Attributes:
        home: LeRobot's home directory.
        now: When, seconds since the epoch.
        entries: What is there, sorted by path.
        findings: What deserves attention.
    """

    home: Path
    now: float
    entries: tuple[CacheEntry, ...]
    findings: tuple[Problem, ...]

    @property
    def removable(self) -> tuple[CacheEntry, ...]:
        """What prune removes."""
        return tuple(entry for entry in self.entries if entry.is_removable)

    @property
    def size_bytes(self) -> int:
        """Bytes of everything."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def removable_bytes(self) -> int:
        """Bytes that prune frees."""
        return sum(entry.size_bytes for entry in self.removable)


def inspect_cache(*, idle_s: float = DEFAULT_IDLE_S, home: Path | None = None) -> CacheReport:
    """Look at the caches; changes nothing.

    Args:
        idle_s: Superseded and orphaned files count as removable when unused for this long.
        home: LeRobot's home directory; from the environment when None.
    """
    home = home or lerobot_home()
    now = time.time()
    linked = [home / name for name in CACHE_DIRECTORIES if (home / name).is_symlink()]
    indexes = _indexes(home, now, idle_s)
    sidecars = _sidecars(home, now, idle_s, indexes)
    found = [*sidecars, *_checksums(home, now, idle_s, sidecars), *indexes]
    for name in CACHE_DIRECTORIES:
        found += _unfinished(home / name)
    found += _journals(home, now, idle_s)
    entries = [
        entry
        if not any(entry.path.is_relative_to(link) for link in linked)
        else _kept(entry, "its directory is a link; prune does not follow links")
        for entry in found
    ]
    findings = [
        finding(
            "cache-link",
            f"{link} is a link to {os.path.realpath(link)}; nothing behind it is ever removed.",
            "Move the whole cache with HF_LEROBOT_HOME or --cache-dir instead of linking a part of it.",
            source=str(link),
        )
        for link in linked
    ]
    findings += [
        finding(
            "cache-damaged",
            f"{entry.path}: {entry.reason}",
            "It is never used, and replaced when its dataset is opened next; --prune removes it.",
            source=str(entry.path),
        )
        for entry in entries
        if entry.state == "damaged"
    ]
    return CacheReport(home, now, tuple(sorted(entries, key=lambda entry: entry.path)), tuple(findings))


def lock_of(path: Path) -> Path:
    """The lock that is held while a file of the caches is made."""
    guarded = path.with_name(path.name.removesuffix(JOURNAL_SUFFIX))
    if guarded.name.endswith(CHECKSUMS_SUFFIX):
        return lock_path(sidecar_of(guarded))
    if path.suffix == ".arrow":
        return path.parent / ".lock"
    return lock_path(guarded)


def _files(top: Path) -> Iterator[Path]:
    """Files below a directory; links to directories are not followed."""
    for directory, _, names in os.walk(top, followlinks=False):
        for name in sorted(names):
            yield Path(directory) / name


def _sidecars(home: Path, now: float, idle_s: float, indexes: list[CacheEntry]) -> list[CacheEntry]:
    # A sidecar is used through its index. Its own time of access says little: looking at it here is one.
    used: dict[Path, float] = {}
    for index in indexes:
        if index.archive is not None:
            used[index.archive] = max(used.get(index.archive, 0.0), index.last_used)
    entries: list[CacheEntry] = []
    newest: dict[tuple[str, str, str], float] = {}
    read: list[tuple[Path, SidecarIdentity | str]] = []
    for path in _files(home / _SIDECARS):
        with _unless_gone():
            if path.name.startswith(f"mp4-v{SCHEMA_VERSION}-") and path.suffix == ".npz":
                identity = _identity(path)
                if not isinstance(identity, str):
                    key = (identity.repo_id, identity.revision, identity.data_root)
                    newest[key] = max(newest.get(key, 0.0), path.stat().st_mtime)
                read.append((path, identity))
            elif path.suffix == ".npz":
                entries.append(
                    _entry(path, "other", "foreign", "another version of the format; never touched")
                )
    for path, identity in read:
        with _unless_gone():
            if isinstance(identity, str):
                entries.append(_entry(path, "sidecar", "damaged", identity, is_removable=True))
                continue
            state, reason = "current", ""
            mtime = path.stat().st_mtime
            if mtime < newest[identity.repo_id, identity.revision, identity.data_root]:
                state, reason = "superseded", "a newer sidecar of the same dataset exists"
            last_used = max(mtime, used.get(Path(os.path.realpath(path)), 0.0))
            entries.append(
                _entry(
                    path,
                    "sidecar",
                    state,
                    reason,
                    is_removable=state == "superseded" and now - last_used >= idle_s,
                    identity=identity,
                    last_used=last_used,
                )
            )
    return entries


def _checksums(home: Path, now: float, idle_s: float, sidecars: list[CacheEntry]) -> list[CacheEntry]:
    """Payload checksums: worth as much as the sidecars that they belong to."""
    known = {entry.path: entry for entry in sidecars}
    entries: list[CacheEntry] = []
    for path in _files(home / _SIDECARS):
        if not path.name.endswith(CHECKSUMS_SUFFIX):
            continue
        with _unless_gone():
            sidecar = known.get(sidecar_of(path))
            try:
                ChecksumFile(path, remove_damaged=False).close()
            except SidecarError as error:
                entries.append(_entry(path, "checksums", "damaged", error.message, is_removable=True))
                continue
            except LrstreamError as error:
                entries.append(_entry(path, "checksums", "current", error.message))
                continue
            # Their own time of access says little: looking at them here is one.
            last_used = path.stat().st_mtime if sidecar is None else sidecar.last_used
            state, reason, is_removable = "current", "", False
            if sidecar is None:
                state, reason = "orphan", "the sidecar that they belong to is gone"
                is_removable = now - last_used >= idle_s
            elif sidecar.state == "superseded":
                state, reason = "superseded", "their sidecar is superseded"
                is_removable = sidecar.is_removable
            entry = _entry(path, "checksums", state, reason, is_removable=is_removable, last_used=last_used)
            if sidecar is not None:
                facts = {name: getattr(sidecar, name) for name in ("repo_id", "revision", "data_root")}
                entry = replace(entry, archive=sidecar.path, **facts)
            entries.append(entry)
    return entries


def _identity(path: Path) -> SidecarIdentity | str:
    """Identity of a sidecar, or what is wrong with it."""
    try:
        with ArchiveReader(path) as reader:
            return reader.identity
    except LrstreamError as error:
        return error.message


def _indexes(home: Path, now: float, idle_s: float) -> list[CacheEntry]:
    top = home / _INDEXES
    known = {generation.path: generation for generation in list_generations(home)}
    entries: list[CacheEntry] = []
    for path in _files(top / _FAMILY):
        with _unless_gone():
            if path.suffix != ".arrow":
                continue
            generation = known.get(path)
            archive = None if generation is None else generation.archive
            if generation is not None and generation.current:
                entries.append(_entry(path, "index", "current", "", archive=archive))
                continue
            if generation is None:
                state, reason = "orphan", "nothing says which sidecar it was made from"
            elif not generation.archive.exists():
                state, reason = "orphan", "its sidecar is gone"
            else:
                state, reason = "superseded", "its sidecar has been replaced"
            entry = _entry(path, "index", state, reason, archive=archive)
            is_idle = now - entry.last_used >= idle_s
            entries.append(_entry(path, "index", state, reason, archive=archive, is_removable=is_idle))
    if top.is_dir():
        for other in sorted(top.iterdir()):
            with _unless_gone():
                if other.name != _FAMILY:
                    entries.append(_foreign(other))
    return entries


def _unfinished(top: Path) -> list[CacheEntry]:
    """Temporary files, told apart by whether their writers still run."""
    entries: list[CacheEntry] = []
    for directory in sorted({path.parent for path in _files(top)}):
        abandoned = set(leftovers(directory))
        for path in sorted(directory.glob(".*.tmp")):
            state, reason = "in progress", "being written now"
            if path in abandoned:
                state, reason = "abandoned", "the process that wrote it has ended"
            with _unless_gone():
                entries.append(_entry(path, "unfinished", state, reason, is_removable=path in abandoned))
    return entries


def _journals(home: Path, now: float, idle_s: float) -> list[CacheEntry]:
    """Journals of interrupted builds: worth keeping, since the next build goes on from there."""
    entries: list[CacheEntry] = []
    for path in _files(home / _SIDECARS):
        if not path.name.endswith(JOURNAL_SUFFIX):
            continue
        with _unless_gone():
            last_used = path.stat().st_mtime
            state, reason = "resumable", "an interrupted build; the next one of this dataset continues it"
            if inspect_lock(lock_of(path)).held:
                state, reason = "in progress", "a build is under way"
            elif path.with_name(path.name.removesuffix(JOURNAL_SUFFIX)).exists():
                # Killed after the sidecar was installed and before the journal was removed.
                state, reason = "abandoned", "its sidecar is complete"
            is_removable = state == "abandoned" or (state == "resumable" and now - last_used >= idle_s)
            entries.append(
                _entry(path, "unfinished", state, reason, is_removable=is_removable, last_used=last_used)
            )
    return entries


def _unless_gone() -> contextlib.AbstractContextManager[bool | None]:
    """Passes over a file that another process has removed since it was listed."""
    return contextlib.suppress(FileNotFoundError)


def _entry(
    path: Path,
    kind: EntryKind,
    state: str,
    reason: str,
    *,
    is_removable: bool = False,
    identity: SidecarIdentity | None = None,
    archive: Path | None = None,
    last_used: float | None = None,
) -> CacheEntry:
    status = path.lstat()
    return CacheEntry(
        path=path,
        kind=kind,
        size_bytes=status.st_size,
        last_used=max(status.st_atime, status.st_mtime) if last_used is None else last_used,
        state=state,
        reason=reason,
        is_removable=is_removable,
        repo_id=None if identity is None else identity.repo_id,
        revision=None if identity is None else identity.revision,
        data_root=None if identity is None else identity.data_root,
        archive=archive,
    )


def _foreign(path: Path) -> CacheEntry:
    files = list(_files(path)) if path.is_dir() and not path.is_symlink() else [path]
    statuses = [file.lstat() for file in files]
    return CacheEntry(
        path=path,
        kind="other",
        size_bytes=sum(status.st_size for status in statuses),
        last_used=max((max(status.st_atime, status.st_mtime) for status in statuses), default=0.0),
        state="foreign",
        reason="of another program or format; never touched",
    )


def _kept(entry: CacheEntry, reason: str) -> CacheEntry:
    return CacheEntry(
        **{name: getattr(entry, name) for name in entry.__slots__ if name not in ("is_removable", "reason")},
        reason=entry.reason or reason,
    )
