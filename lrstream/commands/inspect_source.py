"""A dataset opened for inspection: metadata, sidecar, index and spans, as training would have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lrstream.commands.opened import open_dataset as open_plainly
from lrstream.commands.progress import Progress, no_progress
from lrstream.errors import DatasetFormatError, UsageError
from lrstream.index.open import open_index
from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.build import BuildProgress
from lrstream.sidecar.resolve import DEFAULT_LOCK_TIMEOUT_S, resolve_sidecar
from lrstream.storage.location import RepoType
from lrstream.storage.store import DatasetStore
from lrstream.streaming.sources import EpisodeSpans, TrackSource, VideoFiles

__all__ = ["InspectedDataset", "SourceOptions", "open_indexed", "open_metadata", "parse_sample", "use_index"]

_MAX_OPEN_FILES = 16


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Which dataset is meant; arguments as of `lrstream.storage.location.parse_location`.

    Attributes:
        source: Directory, OWNER/NAME or URL.
        repo_id: Name in the sidecar's identity; None derives it from the source.
        repo_type: What OWNER/NAME means on the Hub.
        revision: Branch, tag or commit.
    """

    source: str
    repo_id: str | None = None
    repo_type: RepoType = "dataset"
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class InspectedDataset:
    """Everything that reports are made from.

    Attributes:
        store: Where the dataset is.
        layout: Its metadata.
        tracks: Sample tables of its videos; None for a dataset without video.
        files: Its videos, opened on demand.
        spans: Spans and exact sizes of its episodes.
        sidecar: The sidecar in use; None for a dataset without video.
        origin: Where that came from (``cache``, ``published``, ``built``).
    """

    store: DatasetStore
    layout: DatasetLayout
    tracks: TrackSource | None
    files: VideoFiles
    spans: EpisodeSpans
    sidecar: Path | None
    origin: str | None


def open_metadata(
    options: SourceOptions, *, contradictions: list[DatasetFormatError] | None = None
) -> DatasetLayout:
    """Metadata alone; neither looks for a sidecar nor touches a video.

    Args:
        options: The dataset.
        contradictions: As in `load_layout`.

    Raises:
        UsageError, NotFoundError, AccessError, DatasetFormatError, TransferError: As `load_layout`.
    """
    return open_plainly(
        options.source,
        repo_type=options.repo_type,
        revision=options.revision,
        contradictions=contradictions,
    ).layout


@contextmanager
def open_indexed(options: SourceOptions, *, progress: Progress = no_progress) -> Iterator[InspectedDataset]:
    """Open a dataset; its sidecar is found or built as training would do it (SC-4).

    Raises:
        LrstreamError: As `load_layout` and `resolve_sidecar`.
    """
    layout = open_metadata(options)
    if not layout.video_files():
        with use_index(layout, None, None, None) as opened:
            yield opened
        return

    def tell(state: BuildProgress) -> None:
        progress(state.done, state.total, "files indexed", num_bytes=state.bytes_read)

    resolved = resolve_sidecar(
        layout.store,
        layout,
        repo_id=options.repo_id,
        revision=options.revision,
        lock_timeout_s=DEFAULT_LOCK_TIMEOUT_S,
        progress=tell,
    )
    with use_index(layout, open_index(resolved), resolved.path, resolved.origin) as opened:
        yield opened


@contextmanager
def use_index(
    layout: DatasetLayout, tracks: TrackSource | None, sidecar: Path | None, origin: str | None
) -> Iterator[InspectedDataset]:
    """A dataset with sample tables from anywhere; they are closed at the end."""
    files = VideoFiles(layout.store, tracks, _MAX_OPEN_FILES)
    try:
        spans = EpisodeSpans(layout.episodes, files)
        yield InspectedDataset(layout.store, layout, tracks, files, spans, sidecar, origin)
    finally:
        files.close()
        if tracks is not None:
            tracks.close()


def parse_sample(text: str) -> int | None:
    """Number of episodes to compare, None for all.

    Raises:
        UsageError: Neither a positive number nor ``all``.
    """
    if text == "all":
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"--sample is {text!r}, expected a number of episodes, at least 1, or 'all'.")
    return int(text)
