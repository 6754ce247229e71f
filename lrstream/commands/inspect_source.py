"""A dataset opened for inspection: metadata, sidecar, index and spans, as training would have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lrstream.commands.opened import open_dataset as open_plainly
from lrstream.commands.progress import Progress, no_progress
from lrstream.index.open import open_index
from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.build import BuildProgress
from lrstream.sidecar.resolve import DEFAULT_LOCK_TIMEOUT_S, resolve_sidecar
from lrstream.storage.location import RepoType
from lrstream.storage.store import DatasetStore
from lrstream.streaming.sources import EpisodeSpans, TrackSource, VideoFiles

__all__ = ["InspectedDataset", "SourceOptions", "open_indexed", "open_metadata"]

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


def open_metadata(options: SourceOptions) -> DatasetLayout:
    """Metadata alone; neither looks for a sidecar nor touches a video.

    Raises:
        UsageError, NotFoundError, AccessError, DatasetFormatError, TransferError: As `load_layout`.
    """
    return open_plainly(options.source, repo_type=options.repo_type, revision=options.revision).layout


@contextmanager
def open_indexed(options: SourceOptions, *, progress: Progress = no_progress) -> Iterator[InspectedDataset]:
    """Open a dataset; its sidecar is found or built as training would do it (SC-4).

    Raises:
        LrstreamError: As `load_layout` and `resolve_sidecar`.
    """
    layout = open_metadata(options)
    sidecar: Path | None = None
    origin: str | None = None
    with ExitStack() as stack:
        tracks: TrackSource | None = None
        if layout.video_files():

            def tell(state: BuildProgress) -> None:
                progress(state.done, state.total, "files indexed")

            resolved = resolve_sidecar(
                layout.store,
                layout,
                repo_id=options.repo_id,
                revision=options.revision,
                lock_timeout_s=DEFAULT_LOCK_TIMEOUT_S,
                progress=tell,
            )
            sidecar, origin = resolved.path, resolved.origin
            tracks = open_index(resolved)
            stack.callback(tracks.close)
        files = VideoFiles(layout.store, tracks, _MAX_OPEN_FILES)
        stack.callback(files.close)
        spans = EpisodeSpans(layout.episodes, files)
        yield InspectedDataset(layout.store, layout, tracks, files, spans, sidecar, origin)
