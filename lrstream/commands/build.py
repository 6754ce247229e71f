"""Make the sidecar of a dataset, in the cache or as a file."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.episode_spec import EpisodeSpec, parse_episode_spec
from lrstream.commands.opened import OpenedDataset, open_dataset
from lrstream.commands.progress import Progress, no_progress
from lrstream.errors import NotFoundError, UsageError
from lrstream.layout.episodes import EpisodeTable
from lrstream.layout.layout import resolve_selection
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.build import DEFAULT_WORKERS, BuildProgress, BuildReport
from lrstream.sidecar.checksum_build import ChecksumReport, build_checksums
from lrstream.sidecar.elsewhere import SourceIndexer
from lrstream.sidecar.processes import ProcessIndexer, automatic_processes
from lrstream.sidecar.resolve import DEFAULT_LOCK_TIMEOUT_S, Origin, build_locked, resolve_sidecar
from lrstream.sidecar.resumable import BuildOptions
from lrstream.sidecar.shard_build import build_shard
from lrstream.sidecar.shards import Shard
from lrstream.storage.location import RepoType

__all__ = ["BuildResult", "build_dataset"]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A sidecar that is there now.

    Attributes:
        path: The archive; None for a dataset without video, which needs none.
        origin: Whether it was found in the cache, published, or built now; None without a path.
        complete: Whether it covers every video of the dataset.
        files: Source files that it covers.
        frames: Frames of the episodes that were asked for.
        episodes: Episodes that were asked for.
        requests: Range requests made to index files; 0 if it was found.
        bytes_read: Bytes fetched by them.
        reused: Files taken from an interrupted build or an earlier sidecar instead of being read.
        elapsed_s: Duration of the whole command.
        shard: Which part of the dataset it is, ``I/N``; None if it was not built as a shard.
        checksums: What was done for payload checksums; None if they were not asked for.
    """

    path: Path | None
    origin: Origin | None
    complete: bool
    files: int
    frames: int
    episodes: int
    requests: int
    bytes_read: int
    reused: int
    elapsed_s: float
    shard: str | None = None
    checksums: ChecksumReport | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def build_dataset(
    source: str,
    *,
    repo_id: str | None = None,
    repo_type: RepoType = "dataset",
    revision: str | None = None,
    episodes: str | None = None,
    shard: Shard | None = None,
    output: Path | None = None,
    workers: int = DEFAULT_WORKERS,
    force: bool = False,
    resume: bool = True,
    base: Path | None = None,
    scheduler: str | None = None,
    processes: int | None = None,
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    checksums: bool = False,
    progress: Progress = no_progress,
) -> BuildResult:
    """Find or build the sidecar of a dataset.

    Args:
        source: The dataset.
        repo_id: Its name in the identity; derived from the source when None.
        repo_type: What ``OWNER/NAME`` means.
        revision: Branch, tag or commit.
        episodes: Episodes whose files are covered, as `parse_episode_spec` takes them; None for all.
        shard: Index only this part of the files, into a shard that `merge_sidecar` takes.
        output: Write the archive there instead of into the cache.
        workers: Files indexed at once.
        force: Build even if a valid sidecar is there, and read every file for it.
        resume: Continue an interrupted build, and keep what is needed to continue this one.
        base: A sidecar of another state of the dataset, from which unchanged files are taken.
        scheduler: Dask scheduler whose processes do the indexing; `lrstream.sidecar.cluster.LOCAL` starts
            some here. Then `workers` is per process of the cluster.
        processes: Processes of this machine that do the indexing, with `workers` files at once all together;
            1 = threads of this process, None = as many as the number of files and processors suggests.
        lock_timeout_s: How long to wait for another process that builds the same sidecar.
        checksums: Make payload checksums too, which reads every video.
        progress: Told about finished files.

    Raises:
        UsageError: The episodes cannot be understood, or a part was asked for without `output`, or
            `output` is a directory, or several processes were asked for besides a scheduler. Nothing has
            been done.
        IndexProcessError: Processes that were indexing ended again and again.
        ClusterError: The scheduler cannot be reached, or was lost.
        LrstreamError: As `resolve_sidecar`.
    """
    started_s = time.monotonic()
    spec = None if episodes is None else parse_episode_spec(episodes)
    if shard is not None and spec is not None:
        raise UsageError("A shard is a part of the complete dataset; episodes cannot be chosen as well.")
    if shard is not None and checksums:
        raise UsageError(
            "Checksums are made for a whole sidecar, not for a shard.",
            hint="Merge all shards first, then build with --checksums.",
        )
    if scheduler is not None and processes not in (None, 1):
        raise UsageError(
            f"{processes} processes of this machine cannot index together with a Dask scheduler.",
            hint="Leave --processes or --scheduler out.",
        )
    _check_output(output, spec)
    if base is not None:
        ArchiveReader(base).close()
    dataset = open_dataset(source, repo_type=repo_type, revision=revision)
    table = dataset.layout.episodes
    positions = _positions(dataset, spec)
    files = {camera.files[number] for camera in table.cameras.values() for number in camera.file[positions]}
    all_files = dataset.layout.video_files()

    def tell(state: BuildProgress) -> None:
        progress(state.done, state.total, "video files", num_bytes=state.bytes_read)

    report: BuildReport | None = None
    origin: Origin | None = "built"
    path: Path | None = output
    if processes is None:
        count = len(files) if shard is None else len(all_files) // shard.count
        processes = automatic_processes(workers, count, dataset.store.location)
    with _indexer(scheduler, processes, workers, resume=resume) as indexer:
        options = BuildOptions(resume=resume, base=base, indexer=indexer)
        forced = replace(options, reuse=False) if force else options
        if not files and shard is None:
            origin, path = None, None
        elif shard is not None:
            built = build_shard(
                dataset.store,
                dataset.layout,
                shard,
                destination=output,
                repo_id=repo_id,
                revision=revision,
                workers=workers,
                lock_timeout_s=lock_timeout_s,
                progress=tell,
                options=forced,
            )
            report, path = built.build, built.build.path
            files = set(report.identity.paths)
            positions = _positions_of(table, files)
        elif output is None:
            found = resolve_sidecar(
                dataset.store,
                dataset.layout,
                repo_id=repo_id,
                revision=revision,
                workers=workers,
                lock_timeout_s=lock_timeout_s,
                progress=tell,
                options=options,
                rebuild=force,
            )
            report, origin, path = found.report, found.origin, found.path
        else:
            report = build_locked(
                dataset.store,
                dataset.layout,
                destination=output,
                repo_id=repo_id,
                revision=revision,
                workers=workers,
                lock_timeout_s=lock_timeout_s,
                progress=tell,
                options=forced,
                paths=None if len(files) == len(all_files) else files,
            )
    made = None
    if checksums and path is not None:

        def tell_read(done: int, total: int) -> None:
            progress(done >> 20, total >> 20, "MiB read for checksums")

        made = build_checksums(
            dataset.store,
            dataset.layout,
            path,
            positions=positions,
            workers=workers,
            lock_timeout_s=lock_timeout_s,
            progress=tell_read,
            force=force,
            resume=resume,
        )
    return BuildResult(
        path=path,
        origin=origin,
        complete=len(files) == len(all_files),
        files=len(files),
        frames=int(table.length[positions].sum()),
        episodes=len(positions),
        requests=report.requests if report is not None else 0,
        bytes_read=report.bytes_read if report is not None else 0,
        reused=report.num_reused if report is not None else 0,
        elapsed_s=time.monotonic() - started_s,
        shard=None if shard is None else str(shard),
        checksums=made,
    )


def _indexer(
    scheduler: str | None, processes: int, workers: int, *, resume: bool
) -> AbstractContextManager[SourceIndexer | None]:
    """What indexes the files; None for threads of this process."""
    if scheduler is None:
        return nullcontext(
            None if processes == 1 else ProcessIndexer(processes, workers, packs_records=resume)
        )
    # Imported here: nobody else needs it.
    from lrstream.sidecar.cluster import ClusterIndexer

    return ClusterIndexer(scheduler, workers=workers)


def _positions_of(table: EpisodeTable, files: set[str]) -> NDArray[np.int64]:
    """Episodes of which some camera's pictures are in one of `files`."""
    touched = np.zeros(len(table), dtype=bool)
    for camera in table.cameras.values():
        covered = np.array([name in files for name in camera.files], dtype=bool)
        touched |= covered[camera.file]
    return np.flatnonzero(touched)


def _check_output(output: Path | None, spec: EpisodeSpec | None) -> None:
    if output is None:
        if spec is not None:
            raise UsageError(
                "A sidecar of some episodes cannot be installed in the cache, where training expects "
                "complete ones.",
                hint="Write it to a file with --output FILE, or leave --episodes out.",
            )
        return
    if output.is_dir():
        raise UsageError(f"{output} is a directory, expected the path of a file.")
    if not output.absolute().parent.is_dir():
        raise NotFoundError(f"The directory {output.absolute().parent} does not exist.", path=str(output))


def _positions(dataset: OpenedDataset, spec: EpisodeSpec | None) -> NDArray[np.int64]:
    if spec is None:
        return resolve_selection(dataset.layout)
    return resolve_selection(dataset.layout, spec.select(dataset.layout.episodes.episode_index.tolist()))
