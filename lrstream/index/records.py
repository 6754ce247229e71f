"""Recently decoded records of source files, kept within a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lrstream.mp4.track import TrackIndex

__all__ = ["RecordCache"]

# Records kept by each process, by what their arrays take once all are made. Making them again costs about
# a millisecond for 100,000 pictures, so this only spares work when neighbouring episodes are planned one
# after the other.
_CACHE_BYTES = 32 << 20


class RecordCache:
    """Recently decoded records, bounded by the memory of their arrays."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._records: OrderedDict[str, TrackIndex] = OrderedDict()
        self._bytes = 0

    def get(self, path: str) -> TrackIndex | None:
        record = self._records.get(path)
        if record is not None:
            self._records.move_to_end(path)
        return record

    def put(self, path: str, record: TrackIndex) -> None:
        self._records[path] = record
        self._bytes += _memory(record)
        while self._bytes > _CACHE_BYTES and len(self._records) > 1:
            _, oldest = self._records.popitem(last=False)
            self._bytes -= _memory(oldest)


def _memory(record: TrackIndex) -> int:
    """Bytes of the arrays, made or not."""
    return 8 * 5 * record.samples.num_samples
