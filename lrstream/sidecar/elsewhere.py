"""How a build hands sources to other processes, whatever runs them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lrstream.errors import LrstreamError
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.identity import SourceFile
from lrstream.sidecar.writer import EncodedSource
from lrstream.storage.store import DatasetStore

__all__ = ["IndexedElsewhere", "SourceIndexer", "Work"]


class Work(NamedTuple):
    """One source to index.

    Attributes:
        number: Its place among all sources.
        source: The source.
        fingerprint: Its fingerprint, where the storage has them.
        num_frames: Pictures in it; 0 if that is not known.
    """

    number: int
    source: SourceFile
    fingerprint: str | None
    num_frames: int = 0


@dataclass(frozen=True, slots=True)
class IndexedElsewhere:
    """What became of one source that another process has indexed.

    Attributes:
        number: Its place among the sources.
        track: The record; None if it failed, or is there as `encoded` alone.
        encoded: The same as it goes into the archive; None to have it encoded here.
        error: Why it cannot be indexed.
        packed: The record as it goes into a journal, where there is no `track`; None to keep nothing.
    """

    number: int
    track: TrackIndex | None = None
    encoded: EncodedSource | None = None
    error: LrstreamError | None = None
    packed: bytes | None = None


class SourceIndexer(Protocol):
    """Indexes sources in other processes (`lrstream.sidecar.cluster`, `lrstream.sidecar.processes`)."""

    def index(self, store: DatasetStore, sources: Sequence[Work]) -> Generator[IndexedElsewhere]:
        """Index all `sources`, giving each as it is finished, in any order.

        Closing the generator stops what is still running. Requests and bytes are counted in `store`.
        """
        ...
