"""Recently decoded records of source files, kept within a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from lrstream.mp4.track import TrackIndex

__all__ = ["RecordCache"]

# Decoded records kept by each process. Decoding one again costs about a millisecond for 100,000
# pictures, so this only spares work when neighbouring episodes are planned one after the other.
_CACHE_BYTES = 64 << 20


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
    """Bytes of the arrays that were widened; a broadcast constant takes none."""
    samples = record.samples
    arrays = (getattr(samples, name) for name in samples.__slots__)
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray) and any(array.strides))
