"""`lrstream convert`: sidecar archive to mapped index and back without loss, or to Parquet (SC-9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lrstream.commands.inspect_outputs import check_output
from lrstream.commands.inspect_sidecar import open_index_file
from lrstream.errors import SidecarError, UsageError
from lrstream.index.convert import convert as convert_to_index
from lrstream.index.export import TrackCollection, export_archive, export_parquet
from lrstream.index.generation import content_key
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.identity import SidecarIdentity

__all__ = ["TARGETS", "ConvertReport", "Target", "convert_sidecar"]

Target = Literal["index", "npz", "parquet"]
TARGETS: tuple[Target, ...] = get_args(Target)

_SUFFIXES: dict[Target, str] = {"index": ".arrow", "npz": ".npz", "parquet": ".parquet"}


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was converted, or would be.

    Attributes:
        source: The input.
        source_format: ``npz`` or ``index``.
        source_bytes: Its size.
        output: The output.
        output_format: ``index``, ``npz`` or ``parquet``.
        output_bytes: Its size; None for a dry run.
        num_sources: Video files described.
        num_frames: Coded pictures described.
        is_dry_run: Whether nothing was written.
    """

    source: Path
    source_format: str
    source_bytes: int
    output: Path
    output_format: Target
    output_bytes: int | None
    num_sources: int
    num_frames: int
    is_dry_run: bool


def convert_sidecar(
    source: Path,
    output: Path | None = None,
    *,
    to: Target | None = None,
    dry_run: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Convert one file. All arguments are checked first; the output appears complete or not at all.

    Args:
        source: Archive or mapped index.
        output: Where to; None puts it beside the source under the suffix of its format.
        to: Format; None is the other one of archive and mapped index.
        dry_run: Read and check everything, write nothing.
        force: Replace an existing output.
        progress: Called with (source files done, source files in all).

    Raises:
        UsageError: The output exists, or the formats are the same.
        SidecarError: The source is damaged or of another schema version, or a bucket's without fingerprints
            (SC-8).
        NotFoundError: There is no such file.
        DiskFullError: No space is left; nothing is left behind.
    """
    source = source.expanduser()
    with open_index_file(source) as (collection, kind):
        target: Target = to or ("npz" if kind == "index" else "index")
        if target == kind:
            raise UsageError(
                f"{source} is in the format {kind} already.",
                hint=f"Convert it to one of {', '.join(name for name in TARGETS if name != kind)}.",
            )
        _refuse_outdated(collection.identity, source)
        destination = check_output(
            output or source.with_suffix(_SUFFIXES[target]), force=force, inputs=[source]
        )
        if dry_run:
            num_frames = _count(collection, progress)
        else:
            num_frames = _write(collection, destination, target, progress)
        num_sources = len(collection.paths)
    return ConvertReport(
        source=source,
        source_format=kind,
        source_bytes=source.stat().st_size,
        output=destination,
        output_format=target,
        output_bytes=None if dry_run else destination.stat().st_size,
        num_sources=num_sources,
        num_frames=num_frames,
        is_dry_run=dry_run,
    )


def _write(
    collection: TrackCollection,
    destination: Path,
    target: Target,
    progress: Callable[[int, int], None] | None,
) -> int:
    if target == "parquet":
        return export_parquet(collection, destination, progress=progress)
    if target == "npz":
        return export_archive(collection, destination, progress=progress)
    assert isinstance(collection, ArchiveReader)  # a mapped index is in the format index already
    convert_to_index(collection, destination, key=content_key(collection), progress=progress)
    return _count(collection, None)


def _count(collection: TrackCollection, progress: Callable[[int, int], None] | None) -> int:
    """Read every record, which checks it; the number of coded pictures."""
    total, num_frames = len(collection.paths), 0
    for done, path in enumerate(collection.paths, 1):
        num_frames += collection.track(path).samples.num_samples
        if progress is not None:
            progress(done, total)
    return num_frames


def _refuse_outdated(identity: SidecarIdentity, source: Path) -> None:
    if identity.data_root.startswith("hf://buckets/") and not identity.source_fingerprints:
        raise SidecarError(
            f"The sidecar {source} describes a bucket without fingerprints of its files, so nobody can tell "
            "whether it still fits them.",
            hint="Rebuild it with `lrstream build`.",
            path=str(source),
        )
