"""Memory for whole batches, used again and again, and handed from a worker to training without a copy.

Fresh memory is what moving pictures costs: the system clears every page at first touch, ten times the time
that writing the pixels takes where the memory is shared between processes. A slab is therefore kept when
its batch is gone. In the training process that is a matter of reference counts. From a DataLoader worker a
slab travels as a name: training maps it once, and writes into its first page when the last tensor of a
batch has been dropped, which is where the worker looks before it takes new memory.

```
worker:    take ─► decode into it ─► send ─► (abroad) ───────────────► take again
training:                             └► map ─► tensors ─► dropped ─┘
```
A slab has no name in the file system (``memfd_create``): it ends with the processes that have it open.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lrstream.errors import LrstreamError
from lrstream.streaming.row_plan import PackedRows, RowPlan

__all__ = [
    "HEADER",
    "HEADER_BYTES",
    "NUMPY_DTYPES",
    "BatchLayout",
    "Field",
    "Lease",
    "SlabName",
    "SlabPool",
    "SlabState",
    "may_share",
]

_ALIGNMENT_BYTES = 64
# The first page of a shared slab: its state, and the number of the batch in it.
HEADER_BYTES = mmap.PAGESIZE
HEADER = struct.Struct("=QQ")
# Idle slabs kept for the next batches; more were needed for a moment only.
_MOST_IDLE = 3


NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


class SlabState(IntEnum):
    """Who may do what with a shared slab."""

    IN_USE = 1
    """It holds a batch that somebody may look at."""
    RETURNED = 2
    """The receiver has dropped the batch."""
    LOST = 3
    """The receiver can no longer know whether somebody looks at it."""


class Field(NamedTuple):
    """One tensor of a batch.

    Attributes:
        key: Its key.
        dtype: Its type.
        shape: Shape of one sample's part.
        offset: Where it begins in the slab, in bytes.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the tensors of a batch lie in a slab.

    Attributes:
        num_rows: Samples that there is room for.
        fields: The tensors.
        num_bytes: Bytes of all of them.
    """

    num_rows: int
    fields: tuple[Field, ...]
    num_bytes: int

    @classmethod
    def of(cls, num_rows: int, sample: Mapping[str, torch.Tensor]) -> BatchLayout:
        """The layout of batches of samples like this one."""
        fields = []
        offset = 0
        for key, value in sample.items():
            fields.append(Field(key, value.dtype, tuple(value.shape), offset))
            size = num_rows * value.numel() * value.dtype.itemsize
            offset += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(num_rows, tuple(fields), max(offset, _ALIGNMENT_BYTES))

    @staticmethod
    def may_hold(value: torch.Tensor) -> bool:
        """Whether a tensor is of a kind that slabs have."""
        return (
            value.dtype in NUMPY_DTYPES
            and value.layout is torch.strided
            and value.device.type == "cpu"
            and not value.requires_grad
        )

    def fits(self, sample: Mapping[str, torch.Tensor]) -> bool:
        """Whether the tensors of a sample are those of this layout, in any order."""
        if len(sample) != len(self.fields):
            return False
        for key, dtype, shape, _ in self.fields:
            value = sample.get(key)
            if value is None or value.shape != shape or value.dtype != dtype:
                return False
        return True

    def arrays(self, memory: NDArray[np.uint8], num_rows: Mapping[str, int]) -> dict[str, NDArray[Any]]:
        """The first rows of the tensors named, as views of a slab."""
        arrays = {}
        for key, dtype, shape, offset in self.fields:
            if (rows := num_rows.get(key)) is not None:
                arrays[key] = np.ndarray((rows, *shape), NUMPY_DTYPES[dtype], memory.data, offset)
        return arrays


class SlabName(NamedTuple):
    """How another process of the same machine finds a slab and the batch in it."""

    pid: int
    pool: int
    descriptor: int
    num_bytes: int
    batch: int


class _Slab:
    """A block of memory; shared with other processes where it has a descriptor."""

    def __init__(self, num_bytes: int, *, is_shared: bool) -> None:
        self.num_bytes = num_bytes
        self.descriptor: int | None = None
        self._mapping: mmap.mmap | None = None
        if is_shared:
            # A real descriptor is needed, of whatever process: nothing in the file system.
            self.descriptor = os.memfd_create("lrstream-batch", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.descriptor)
            os.ftruncate(self.descriptor, HEADER_BYTES + num_bytes)
            self._mapping = mmap.mmap(self.descriptor, HEADER_BYTES + num_bytes)
        else:
            self._private = np.empty(num_bytes, dtype=np.uint8)

    def free(self) -> None:
        """Give private memory back to the system as soon as no array of it is left."""
        del self._private

    def view(self) -> NDArray[np.uint8]:
        """A new array over the whole block; its end is the end of all that was made from it."""
        if self._mapping is None:
            return np.frombuffer(self._private.data, dtype=np.uint8)
        return np.frombuffer(self._mapping, dtype=np.uint8, offset=HEADER_BYTES)

    @property
    def state(self) -> int:
        """Of a shared slab that was sent: whether the receiver has dropped it."""
        assert self._mapping is not None
        return int(HEADER.unpack_from(self._mapping)[0])

    def begin(self, batch: int) -> None:
        """Mark a shared slab as holding a batch."""
        if self._mapping is not None:
            HEADER.pack_into(self._mapping, 0, SlabState.IN_USE, batch)


@dataclass(slots=True)
class _Loan:
    """What is known of a slab in use when the last reference to its memory has gone."""

    slab: _Slab
    is_passing: bool
    is_sent: bool = False


class Lease:
    """A slab in use as one batch. Its memory is used again once all arrays and tensors of it are gone.

    Rows may be written by several threads, each its own. Of one process.

    Attributes:
        layout: Where what lies.
        plan: Of the fields that are gathered in `packed` first; None = nothing is.
        arrays: ``(num_rows, *shape)`` by key.
        tensors: The same memory as tensors.
        packed: Rows of the samples, by `plan`; memory of its own.
        is_passing: Whether samples that nobody stacks must not keep it: what is taken from it is copied. Its
            memory is private and not used again.
        num_stacked: Of its first rows, which may be in batches that somebody has: not written again.
    """

    def __init__(
        self,
        pool: SlabPool,
        slab: _Slab,
        layout: BatchLayout,
        batch: int,
        plan: RowPlan | None,
        is_passing: bool,
    ) -> None:
        self.layout = layout
        self.is_passing = is_passing
        self.num_stacked = 0
        self.plan = plan
        self.packed: PackedRows | None = None if plan is None else np.empty(layout.num_rows, plan.dtype)
        self._pool = pool
        self._batch = batch
        memory = slab.view()
        self._loan = _Loan(slab, is_passing)
        weakref.finalize(memory, pool._give_back, self._loan).atexit = False
        all_rows = dict.fromkeys((field.key for field in layout.fields), layout.num_rows)
        self.arrays = layout.arrays(memory, all_rows)
        self.tensors = {key: torch.from_numpy(array) for key, array in self.arrays.items()}
        self._gathered = () if plan is None else plan.keys
        self._rows: dict[str, tuple[torch.Tensor, ...]] = {}

    def has_rows(self, key: str) -> bool:
        """Whether samples write a field themselves, each into its row."""
        return key in self.tensors and key not in self._gathered

    def rows_of(self, key: str) -> tuple[torch.Tensor, ...]:
        """A field's memory as one tensor for each sample, always the same objects; made when asked for."""
        rows = self._rows.get(key)
        return self._rows.setdefault(key, self.tensors[key].unbind(0)) if rows is None else rows

    def part(self, key: str, rows: int | slice) -> torch.Tensor:
        """Rows of a field, or one of them, as a tensor that may be given away.

        Its storage is that of these rows alone: whoever saves, pickles or shares a tensor does so with all of
        its storage, and sharing puts another memory in its place, where no decoder would write.
        """
        part: NDArray[Any] = self.arrays[key][rows, ...]
        return torch.from_numpy(part)

    @property
    def is_sent(self) -> bool:
        """Whether another process has been told of it."""
        return self._loan.is_sent

    def send(self) -> SlabName:
        """Name of the slab for the process that takes the batch over; it gives the memory back."""
        slab = self._loan.slab
        if slab.descriptor is None:
            raise LrstreamError("A batch in private memory cannot be handed to another process.")
        self._loan.is_sent = True
        return SlabName(os.getpid(), self._pool.token, slab.descriptor, slab.num_bytes, self._batch)


class SlabPool:
    """Slabs of one process. Thread-safe; after a fork it belongs to nobody and must not be used.

    Args:
        is_shared: Whether other processes are to see them.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self.token = secrets.randbits(63)
        self._is_shared = is_shared
        self._lock = threading.Lock()
        # Filled by finalizers, which may run anywhere, also while this thread holds the lock.
        self._dropped: deque[_Loan] = deque()
        self._idle: list[_Slab] = []
        self._abroad: list[_Slab] = []
        self._num_batches = 0
        self._num_slabs = 0
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs, idle or not."""
        return self._num_bytes

    @property
    def num_slabs(self) -> int:
        """Slabs, idle or not."""
        return self._num_slabs

    def take(self, layout: BatchLayout, plan: RowPlan | None = None, *, is_passing: bool = False) -> Lease:
        """Memory for a batch; its content is undefined.

        Args:
            layout: Where what lies.
            plan: Of fields of the layout that samples leave in `Lease.packed`.
            is_passing: As in `Lease`.
        """
        with self._lock:
            self._collect()
            fitting = [slab for slab in self._idle if slab.num_bytes == layout.num_bytes]
            if fitting:
                slab = fitting[-1]
                self._idle.remove(slab)
            else:
                for other in self._idle:  # of another batch size, or of another dataset before
                    self._forget(other)
                self._idle.clear()
                slab = _Slab(layout.num_bytes, is_shared=self._is_shared)
                self._num_slabs += 1
                self._num_bytes += slab.num_bytes
            self._num_batches += 1
            slab.begin(self._num_batches)
            return Lease(self, slab, layout, self._num_batches, plan, is_passing)

    def _give_back(self, loan: _Loan) -> None:
        if loan.is_passing:
            loan.slab.free()  # it is larger than those of batches, of which there may be no need any more
        self._dropped.append(loan)

    def _collect(self) -> None:
        while self._dropped:
            loan = self._dropped.popleft()
            if loan.is_passing:
                self._forget(loan.slab)
            else:
                (self._abroad if loan.is_sent else self._idle).append(loan.slab)
        abroad, self._abroad = self._abroad, []
        for slab in abroad:
            state = slab.state
            if state == SlabState.RETURNED:
                self._idle.append(slab)
            elif state == SlabState.LOST:
                self._forget(slab)
            else:
                self._abroad.append(slab)
        while len(self._idle) > _MOST_IDLE:
            self._forget(self._idle.pop(0))

    def _forget(self, slab: _Slab) -> None:
        self._num_slabs -= 1
        self._num_bytes -= slab.num_bytes


def may_share() -> bool:
    """Whether slabs can be handed to another process here: on Linux, unless told not to.

    The receiver opens the worker's descriptor, which the system allows to processes of one user as long
    as they may be looked at by debuggers. ``LRSTREAM_SHARED_BATCHES=0`` goes back to PyTorch's transport.
    """
    if sys.platform != "linux" or os.environ.get("LRSTREAM_SHARED_BATCHES") == "0":
        return False
    try:
        return os.stat("/proc/self/fd").st_uid == os.geteuid()
    except OSError:
        return False
