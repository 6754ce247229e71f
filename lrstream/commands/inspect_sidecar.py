"""`lrstream inspect sidecar`: what an archive (or a mapped index) holds, and what it may be used for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lrstream.commands.inspect_figures import Distribution, TrackFigures
from lrstream.errors import AccessError, NotFoundError, SidecarError, TransferError
from lrstream.index.export import TrackCollection
from lrstream.index.open import MappedIndex
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.checksum_file import ChecksumFile, checksums_path
from lrstream.sidecar.identity import SCHEMA_VERSION, SidecarIdentity

__all__ = [
    "SidecarGroup",
    "SidecarReport",
    "SourceReport",
    "inspect_sidecar",
    "open_index_file",
    "refusals_to_publish",
]

_ARCHIVE_MAGIC, _INDEX_MAGIC = b"PK", b"ARROW1"
_BUCKET_ROOT = "hf://buckets/"


@dataclass(frozen=True, slots=True)
class SourceReport:
    """One source file; sizes in bytes, GOP lengths in pictures."""

    path: str
    size_bytes: int
    codec: str
    width: int
    height: int
    num_frames: int
    picture_bytes: int
    num_keyframes: int
    longest_gop: int
    has_bframes: bool
    moov_first: bool
    duration_s: float


@dataclass(frozen=True, slots=True)
class SidecarGroup:
    """All source files with one codec and picture size.

    Attributes:
        codec: Sample entry (``av01``, ``avc1``, ...).
        width: Pixels.
        height: Pixels.
        num_files: Files.
        num_frames: Coded pictures.
        size_bytes: Bytes of the files.
        bytes_per_frame: Mean size of a coded picture.
        gop: Lengths of GOPs, pictures.
        num_files_with_bframes: Files whose pictures are stored in another order than shown.
        num_files_moov_last: Files whose index stands behind the pictures.
    """

    codec: str
    width: int
    height: int
    num_files: int
    num_frames: int
    size_bytes: int
    bytes_per_frame: float
    gop: Distribution
    num_files_with_bframes: int
    num_files_moov_last: int


@dataclass(frozen=True, slots=True)
class ChecksumsInside:
    """Payload checksums beside an archive.

    Attributes:
        path: The file.
        size_bytes: Its size.
        num_files: Source files that it covers.
        num_spans: Spans of episodes that it covers.
        not_used_because: Why training does not use it; None if it does.
    """

    path: Path
    size_bytes: int
    num_files: int
    num_spans: int
    not_used_because: str | None


@dataclass(frozen=True, slots=True)
class SidecarReport:
    """A sidecar from inside.

    Attributes:
        path: The file.
        format: ``npz`` or ``index``.
        size_bytes: Its size.
        schema_version: Of the archive format.
        repo_id: Of the identity.
        revision: Of the identity.
        data_root: Of the identity.
        digest: 16 hex digits of the identity.
        is_pinned: Whether the data root names a commit.
        has_fingerprints: Whether the content of each source is fingerprinted.
        is_complete: Whether every array was read and is valid (else this report is not made).
        is_publishable: Whether nothing inside forbids publishing it.
        not_publishable_because: What does.
        num_sources: Source files.
        num_frames: Coded pictures in all.
        source_bytes: Bytes of all source files.
        bytes_per_frame_of_index: Size of this file for each coded picture.
        groups: Source files by codec and picture size.
        sources: Every source file.
        checksums: Payload checksums beside the archive; None if there are none.
    """

    path: Path
    format: str
    size_bytes: int
    schema_version: int
    repo_id: str
    revision: str
    data_root: str
    digest: str
    is_pinned: bool
    has_fingerprints: bool
    is_complete: bool
    is_publishable: bool
    not_publishable_because: tuple[str, ...]
    num_sources: int
    num_frames: int
    source_bytes: int
    bytes_per_frame_of_index: float
    groups: tuple[SidecarGroup, ...]
    sources: tuple[SourceReport, ...]
    checksums: ChecksumsInside | None = None


@contextmanager
def open_index_file(path: Path) -> Iterator[tuple[TrackCollection, str]]:
    """Open an archive or a mapped index, told apart by their first bytes.

    Yields:
        The open file, and ``npz`` or ``index``.

    Raises:
        NotFoundError: There is no such file.
        AccessError: It may not be read.
        SidecarError: It is neither, or is damaged, or of another schema version.
    """
    head = _head(path)
    if head.startswith(_INDEX_MAGIC):
        index = MappedIndex(path)
        try:
            yield index, "index"
        finally:
            index.close()
    elif head.startswith(_ARCHIVE_MAGIC):
        with ArchiveReader(path) as reader:
            yield reader, "npz"
    else:
        raise SidecarError(
            f"{path} is neither a sidecar archive (.npz) nor a mapped index (.arrow): "
            f"it begins with {head!r}.",
            hint="Sidecars are made by `lrstream build`.",
            path=str(path),
        )


def inspect_sidecar(path: Path) -> SidecarReport:
    """Read all of a sidecar and sum it up.

    Raises:
        NotFoundError: There is no such file.
        AccessError: It may not be read.
        SidecarError: It is not a sidecar, is damaged, or of another schema version.
    """
    with open_index_file(path) as (collection, kind):
        sources: list[SourceReport] = []
        figures: dict[tuple[str, int, int], list[tuple[SourceReport, TrackFigures]]] = {}
        for name in collection.paths:
            track = collection.track(name)
            track_figures = TrackFigures.of(track.samples)
            source = _source(track, track_figures)
            sources.append(source)
            figures.setdefault((source.codec, source.width, source.height), []).append(
                (source, track_figures)
            )
        identity = collection.identity
    size_bytes = path.stat().st_size
    num_frames = sum(source.num_frames for source in sources)
    reasons = refusals_to_publish(identity)
    return SidecarReport(
        path=path,
        format=kind,
        size_bytes=size_bytes,
        schema_version=SCHEMA_VERSION,
        repo_id=identity.repo_id,
        revision=identity.revision,
        data_root=identity.data_root,
        digest=identity.digest,
        is_pinned=identity.is_pinned,
        has_fingerprints=bool(identity.source_fingerprints),
        is_complete=True,
        is_publishable=not reasons,
        not_publishable_because=tuple(reasons),
        num_sources=len(sources),
        num_frames=num_frames,
        source_bytes=sum(source.size_bytes for source in sources),
        bytes_per_frame_of_index=size_bytes / num_frames if num_frames else 0.0,
        groups=tuple(_group(members) for _, members in sorted(figures.items())),
        sources=tuple(sources),
        checksums=_checksums(path, identity) if kind == "npz" else None,
    )


def refusals_to_publish(identity: SidecarIdentity) -> list[str]:
    """Why a sidecar with this identity can never be published, one sentence each; empty if it can (SC-11).

    Whether it covers the whole dataset can only be told with the dataset at hand.
    """
    if identity.data_root.startswith(_BUCKET_ROOT):
        if identity.source_fingerprints:
            return []
        return ["it was built from a bucket without fingerprints, so nobody can tell whether it still fits"]
    if identity.is_pinned:
        return []
    if identity.data_root.startswith("hf://datasets/"):
        return ["its data root is not pinned to a commit"]
    return [f"its data root {identity.data_root} is not on the Hub"]


def _checksums(archive: Path, identity: SidecarIdentity) -> ChecksumsInside | None:
    path = checksums_path(archive)
    num_files = num_spans = 0
    try:
        with closing(ChecksumFile(path, remove_damaged=False)) as checksums:
            num_files, num_spans = len(checksums), checksums.verify()
            reason = "; ".join(checksums.mismatches(identity)) or None
    except NotFoundError:
        return None
    except SidecarError as error:
        reason = error.message
    return ChecksumsInside(path, path.stat().st_size, num_files, num_spans, reason)


def _source(track: TrackIndex, figures: TrackFigures) -> SourceReport:
    return SourceReport(
        path=track.file_path,
        size_bytes=track.file_size,
        codec=track.codec,
        width=track.width,
        height=track.height,
        num_frames=figures.num_frames,
        picture_bytes=figures.picture_bytes,
        num_keyframes=len(figures.gops),
        longest_gop=int(figures.gops.max()),
        has_bframes=figures.is_reordered,
        moov_first=track.faststart,
        duration_s=track.duration_ticks / track.timescale,
    )


def _group(members: list[tuple[SourceReport, TrackFigures]]) -> SidecarGroup:
    reports = [report for report, _ in members]
    num_frames = sum(report.num_frames for report in reports)
    return SidecarGroup(
        codec=reports[0].codec,
        width=reports[0].width,
        height=reports[0].height,
        num_files=len(reports),
        num_frames=num_frames,
        size_bytes=sum(report.size_bytes for report in reports),
        bytes_per_frame=sum(report.picture_bytes for report in reports) / num_frames,
        gop=Distribution.of(np.concatenate([figures.gops for _, figures in members])),
        num_files_with_bframes=sum(report.has_bframes for report in reports),
        num_files_moov_last=sum(not report.moov_first for report in reports),
    )


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(8)
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no file {path}.", path=str(path)) from error
    except IsADirectoryError as error:
        raise SidecarError(
            f"{path} is a directory, expected a sidecar file.",
            hint="`lrstream inspect dataset` looks at a dataset, `lrstream inspect cache` at the caches.",
            path=str(path),
        ) from error
    except PermissionError as error:
        raise AccessError(f"{path} may not be read.", path=str(path)) from error
    except OSError as error:
        raise TransferError(f"{path} cannot be read: {error}.", path=str(path)) from error
