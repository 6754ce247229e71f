"""Building one shard of a sidecar (`lrstream.sidecar.shards`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.build import DEFAULT_WORKERS, BuildProgress, BuildReport, request_identity
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.lock import ProcessLock, lock_path
from lrstream.sidecar.resolve import DEFAULT_LOCK_TIMEOUT_S, build_under_lock, twice_if_sources_change
from lrstream.sidecar.resumable import BuildOptions
from lrstream.sidecar.shards import Shard, shard_note, shard_path, shard_sources
from lrstream.storage.home import lerobot_home
from lrstream.storage.store import DatasetStore

__all__ = ["ShardReport", "build_shard"]


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A shard that has been built.

    Attributes:
        shard: Which part.
        num_sources: Sources of the complete sidecar.
        build: What was done.
    """

    shard: Shard
    num_sources: int
    build: BuildReport


def build_shard(
    store: DatasetStore,
    layout: DatasetLayout,
    shard: Shard,
    *,
    destination: Path | None = None,
    repo_id: str | None = None,
    revision: str | None = None,
    workers: int = DEFAULT_WORKERS,
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    progress: Callable[[BuildProgress], None] | None = None,
    options: BuildOptions | None = None,
    home: Path | None = None,
) -> ShardReport:
    """Index the sources of one shard into an archive, under the lock of that archive.

    Args:
        shard: Which part.
        destination: Where to write it; by default `shard_path` in the local cache.

    Other args and errors as `lrstream.sidecar.resolve.resolve_sidecar`.
    """
    home = home or lerobot_home()

    def attempt() -> ShardReport:
        identity = request_identity(store, layout, repo_id=repo_id, revision=revision)
        path = destination or shard_path(identity, shard, home)
        note = shard_note(identity, shard, _arguments(identity, repo_id, revision))
        mine = identity.narrowed(shard_sources(identity.source_files, shard))
        chosen = replace(options or BuildOptions(), comment=note.encode())
        with ProcessLock(lock_path(path)) as lock:
            lock.acquire(lock_timeout_s)
            report = build_under_lock(store, layout, path, mine, workers, progress, chosen, lock, home)
        return ShardReport(shard, len(identity.source_files), report)

    return twice_if_sources_change(attempt)


def _arguments(identity: SidecarIdentity, repo_id: str | None, revision: str | None) -> list[str]:
    """How to ask for the same snapshot again, from another process and later.

    A Hub dataset is named by its commit, since the branch may have moved by then.
    """
    arguments = [identity.data_root]
    if repo_id is not None:
        arguments += ["--repo-id", repo_id]
    if revision is not None and not identity.is_pinned:
        arguments += ["--revision", revision]
    return arguments
