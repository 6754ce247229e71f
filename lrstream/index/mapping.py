"""The mapped index file in one process: its batches where they are mapped, the data of records by reading.

What is mapped counts as memory of a process by far more than it looks at: a system maps whole pieces of its
cache, up to 2 MiB, around a byte that is touched. Records that lie all over a file would so come to hundreds
of megabytes. Therefore only the short columns are looked at through the mapping, of a few batches at a time,
and the long ones, a range of some kilobytes for each record, are read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa

from lrstream.errors import NotFoundError, SidecarError
from lrstream.index.batch import BatchRows
from lrstream.index.records import RecordCache

__all__ = ["IndexMapping"]

# Batches whose pages stay mapped. Their short columns take 0.5 KB for each row, of up to 8,192.
_MOST_BATCHES = 24


class _File:
    """An index file, opened and mapped. Both end with it.

    Raises:
        OSError, ValueError: It cannot be opened; it is empty.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._memory = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        self.buffer = pa.py_buffer(self._memory)

    def read(self, part: pa.Buffer, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of a part of the buffer, without touching the mapping."""
        data = os.pread(self._descriptor, stop - start, part.address - self.buffer.address + start)
        if len(data) != stop - start:
            raise ValueError(
                f"the file ends within a cell of {stop - start} bytes, {len(data)} of them are left"
            )
        return data

    def give_back(self, first: int, last: int) -> None:
        """Unmap the pages of addresses ``[first, last)``; they stay in the cache that all processes share."""
        start = (first - self.buffer.address) // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # only a hint
            self._memory.madvise(mmap.MADV_DONTNEED, start, last - self.buffer.address - start)


class IndexMapping(RecordCache):
    """See the module. What is not said to be safe belongs to the holder of `lock`."""

    def __init__(self) -> None:
        super().__init__()
        self._file: _File | None = None
        self._reader: pa.ipc.RecordBatchFileReader | None = None
        self._batches: dict[int, BatchRows] = {}
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._first_paths: dict[int, bytes] = {}

    def open(self, path: Path) -> pa.ipc.RecordBatchFileReader:
        """Map the file, unless that was done.

        Raises:
            NotFoundError: There is none.
            SidecarError: It cannot be mapped, or is no Arrow file.
        """
        if self._reader is None:
            try:
                self._file = _File(path)
                self._reader = pa.ipc.open_file(self._file.buffer)
            except FileNotFoundError as error:
                raise NotFoundError(f"There is no mapped index at {path}.", path=str(path)) from error
            except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: there is nothing to map
                raise SidecarError(
                    f"The mapped index {path} cannot be opened: {error}.", path=str(path)
                ) from error
        return self._reader

    def batch(self, number: int) -> BatchRows:
        """A batch of the opened file; its pages count as this process's until others are asked for."""
        batch = self._batches.get(number)
        if batch is None:
            assert self._reader is not None
            assert self._file is not None
            batch = self._batches[number] = BatchRows(self._reader.get_batch(number), self._file.read)
        if number in self._recent:
            self._recent.move_to_end(number)
        else:
            self._recent[number] = None
            if len(self._recent) > _MOST_BATCHES:
                self._give_back(self._batches[self._recent.popitem(last=False)[0]])
        return batch

    def find(self, path: str) -> tuple[BatchRows, int] | None:
        """Batch and row of a path of the opened file, by binary search over batches and then rows."""
        assert self._reader is not None
        key = path.encode("utf-8", "surrogatepass")
        number = bisect_right(range(self._reader.num_record_batches), key, key=self._first_path) - 1
        if number < 0:
            return None
        batch = self.batch(number)
        place = batch.find(key)
        return None if place is None else (batch, place)

    def _first_path(self, number: int) -> bytes:
        path = self._first_paths.get(number)
        if path is None:
            path = self._first_paths[number] = self.batch(number).path_bytes(0)
        return path

    def _give_back(self, batch: BatchRows) -> None:
        if batch.extent is not None and self._file is not None:
            self._file.give_back(*batch.extent)
