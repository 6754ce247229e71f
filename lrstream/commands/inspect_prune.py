"""Removing what `inspect_cache` has shown to be of no use to anybody (K34).

Only inside the two directories of the caches, never through a link, and only what has neither changed nor
been locked since it was shown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lrstream.commands.inspect_cache import CacheEntry, CacheReport, lock_of
from lrstream.commands.inspect_locks import CACHE_DIRECTORIES
from lrstream.errors import AccessError
from lrstream.sidecar.lock import inspect_lock

__all__ = ["Pruned", "prune_cache"]

_BOOKKEEPING = ("current.json", ".lock", ".lock.holder")


@dataclass(frozen=True, slots=True)
class Pruned:
    """What prune did.

    Attributes:
        removed: Files that are gone.
        freed_bytes: Their bytes.
        kept: Files that were left after all, with the reason.
    """

    removed: tuple[Path, ...]
    freed_bytes: int
    kept: tuple[tuple[Path, str], ...]


def prune_cache(report: CacheReport, *, removing: Callable[[CacheEntry], None] | None = None) -> Pruned:
    """Remove what `report` calls removable, unless it has changed or is in use meanwhile.

    Args:
        report: What the user was shown.
        removing: Told before each removal.

    Raises:
        AccessError: A file may not be removed; those before it are gone.
    """
    removed: list[Path] = []
    kept: list[tuple[Path, str]] = []
    freed_bytes = 0
    for entry in report.removable:
        reason = _why_not(entry, report)
        if reason is not None:
            kept.append((entry.path, reason))
            continue
        if removing is not None:
            removing(entry)
        try:
            entry.path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise AccessError(
                f"{entry.path} cannot be removed: {error.strerror}.",
                hint="Run it as the user who owns the cache.",
                path=str(entry.path),
            ) from error
        removed.append(entry.path)
        freed_bytes += entry.size_bytes
        if entry.kind == "index":
            _remove_empty_index(entry.path.parent)
    return Pruned(tuple(removed), freed_bytes, tuple(kept))


def _why_not(entry: CacheEntry, report: CacheReport) -> str | None:
    """Why an entry that was removable when it was shown must stay after all; None if it may go."""
    parent = Path(os.path.realpath(entry.path.parent))
    home = Path(os.path.realpath(report.home))
    if not any(parent.is_relative_to(home / name) for name in CACHE_DIRECTORIES):
        return "it lies outside of the caches"
    try:
        status = entry.path.lstat()
    except FileNotFoundError:
        return "it is gone already"
    if entry.path.is_symlink():
        return "it is a link"
    if status.st_size != entry.size_bytes or max(status.st_mtime, status.st_ctime) > report.now:
        return "it has changed meanwhile"
    # Temporary files carry the name of their writer, who has ended; everything else has a lock.
    if not entry.path.name.endswith(".tmp") and inspect_lock(lock_of(entry.path)).held:
        return "it is being made just now"
    return None


def _remove_empty_index(directory: Path) -> None:
    """Remove an index directory without generations; it is made again when needed."""
    if any(directory.glob("*.arrow")) or inspect_lock(directory / ".lock").held:
        return
    for name in _BOOKKEEPING:
        (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else lies there
        directory.rmdir()
