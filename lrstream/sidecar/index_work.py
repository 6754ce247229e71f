"""What processes that index sources for a build do with each of them, whoever started them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

from lrstream.errors import AccessError, InputError, LrstreamError, NotFoundError, TransferError
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.elsewhere import Work
from lrstream.sidecar.index_source import MoovSizes, index_source
from lrstream.sidecar.writer import EncodedSource, encode_source
from lrstream.storage.store import DatasetStore, FileInfo

__all__ = ["SourceResult", "StoreCounts", "expect_listed", "index_work"]


@dataclass(frozen=True, slots=True)
class SourceResult:
    """What became of one source: the record as it goes into the archive, or why there is none.

    Attributes:
        number: Its place among all sources.
        encoded: The record.
        error: Why it cannot be indexed.
        packed: The record as it goes into a journal, where that is wanted.
    """

    number: int
    encoded: EncodedSource | None
    error: LrstreamError | None
    packed: bytes | None = None


class StoreCounts:
    """What a store has counted since it was last asked. Thread-safe.

    Args:
        store: The store.
    """

    def __init__(self, store: DatasetStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._counted = (0, 0)

    def take(self) -> tuple[int, int]:
        """Requests and bytes since the last call."""
        with self._lock:
            now = (self._store.counters.requests, self._store.counters.bytes_read)
            before, self._counted = self._counted, now
        return now[0] - before[0], now[1] - before[1]


def expect_listed(store: DatasetStore, works: Iterable[Work]) -> None:
    """Tell a store that lists its files what the build has found there; nothing for other stores."""
    if store.location.kind == "bucket":
        cast(Any, store).expect_listed(
            {work.source.path: FileInfo(work.source.size, work.fingerprint) for work in works}
        )


def index_work(
    store: DatasetStore,
    work: Work,
    *,
    reading: Callable[[], AbstractContextManager[None]],
    sizes: MoovSizes,
    parsed: Callable[[], None] = lambda: None,
    pack: Callable[[TrackIndex, str | None], bytes | None] = lambda track, fingerprint: None,
) -> SourceResult:
    """Index one source; one that cannot be indexed is a result like any other.

    Args:
        store: Where it is.
        work: The source.
        reading: As for `index_source`.
        sizes: As for `index_source`.
        parsed: Called before the record is compressed.
        pack: Makes the form of a record that a journal keeps.
    """
    try:
        track = index_source(store, work.source, reading=reading, sizes=sizes, num_frames=work.num_frames)
        parsed()
        return SourceResult(
            work.number, encode_source(work.number, track), None, pack(track, work.fingerprint)
        )
    except (InputError, NotFoundError, AccessError, TransferError) as error:
        return SourceResult(work.number, None, error)
