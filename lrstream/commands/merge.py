"""`lrstream convert --merge`: the shards of a sidecar become the sidecar, in the cache or as a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lrstream.commands.inspect_outputs import check_output
from lrstream.errors import LrstreamError, NotFoundError, UsageError
from lrstream.index.open import open_index
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.identity import SidecarIdentity, cache_path
from lrstream.sidecar.lock import ProcessLock, lock_path
from lrstream.sidecar.merge import ShardSet, merge_shards
from lrstream.sidecar.resolve import DEFAULT_LOCK_TIMEOUT_S
from lrstream.storage.home import lerobot_home

__all__ = ["MergeReport", "merge_sidecar"]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What was merged, or would be.

    Attributes:
        shards: The shards, in the order of their numbers.
        output: The archive.
        installed: Whether `output` is the entry of the local cache where training looks.
        unchanged: Whether a valid sidecar of the same identity was there already and was left alone.
        output_bytes: Its size; None for a dry run.
        num_sources: Video files described.
        num_frames: Coded pictures described.
        is_dry_run: Whether nothing was written.
        elapsed_s: Duration.
    """

    shards: tuple[Path, ...]
    output: Path
    installed: bool
    unchanged: bool
    output_bytes: int | None
    num_sources: int
    num_frames: int
    is_dry_run: bool
    elapsed_s: float


def merge_sidecar(
    sources: Iterable[Path],
    output: Path | None = None,
    *,
    dry_run: bool = False,
    force: bool = False,
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    progress: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Merge all shards of one sidecar. All is checked first; the output appears complete or not at all.

    Args:
        sources: Shards, and directories whose ``*.npz`` files are shards.
        output: Where to write the sidecar; None installs it in the local cache as a build does.
        dry_run: Read and check everything, write nothing.
        force: Replace an existing output.
        lock_timeout_s: How long to wait for another process that writes the same sidecar.
        progress: Called with (source files done, source files in all).

    Raises:
        UsageError: The output exists, or there is nothing to merge.
        SidecarError: A file is no shard or damaged, or they do not belong together.
        ShardsMissingError: Some are not there; the error says how to build them.
        NotFoundError: There is no such file.
        SidecarLockTimeoutError: Another process held the lock all the time.
        DiskFullError: No space is left; nothing is left behind.
    """
    started_s = time.monotonic()
    paths = _shard_files(sources)
    home = lerobot_home()
    with ShardSet(paths) as shards:
        identity = shards.identity
        if output is not None:
            destination = check_output(output, force=force, inputs=paths)
        else:
            destination = cache_path(identity, home)
        unchanged = output is None and not force and _is_valid(destination, identity)
        if dry_run or unchanged:
            num_frames = merge_shards(shards, None, progress=progress)
        else:
            with ProcessLock(lock_path(destination)) as lock:
                lock.acquire(lock_timeout_s)
                num_frames = merge_shards(shards, destination, progress=progress)
        if output is None and not dry_run:
            # Training would have to make it otherwise.
            open_index(destination, home=home).close()
        return MergeReport(
            shards=shards.paths,
            output=destination,
            installed=output is None,
            unchanged=unchanged,
            output_bytes=None if dry_run else destination.stat().st_size,
            num_sources=len(identity.source_files),
            num_frames=num_frames,
            is_dry_run=dry_run,
            elapsed_s=time.monotonic() - started_s,
        )


def _shard_files(sources: Iterable[Path]) -> list[Path]:
    """The files that were named, and those in directories that were named."""
    files: list[Path] = []
    for source in sources:
        source = source.expanduser()
        if not source.is_dir():
            files.append(source)
            continue
        found = sorted(source.glob("*.npz"))
        if not found:
            raise NotFoundError(
                f"The directory {source} has no shards (*.npz).",
                hint="Build them with `lrstream build SOURCE --shard I/N`; it says where they are.",
                path=str(source),
            )
        files += found
    if not files:
        raise UsageError("There is nothing to merge.", hint="Name the shards, or the directory they are in.")
    return list(dict.fromkeys(files))


def _is_valid(path: Path, identity: SidecarIdentity) -> bool:
    """Whether the cache has this sidecar already."""
    try:
        with ArchiveReader(path) as reader:
            if reader.identity != identity:
                return False
            reader.verify()
    except LrstreamError:
        return False
    return True
