"""Batches that DataLoader workers have sent: their slabs, mapped once in the process that trains.

A worker's slabs stay mapped as long as its `multiprocessing.Process` object lives here, which is as long as
the DataLoader's iterator does. Mapping them anew for every batch would touch every page again.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lrstream.errors import LrstreamError
from lrstream.streaming.slabs import HEADER, HEADER_BYTES, BatchLayout, SlabName, SlabState

__all__ = ["receive_tensors"]


def receive_tensors(
    name: SlabName, layout: BatchLayout, num_rows: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """The tensors of a batch that a worker has sent.

    The worker uses the memory again once all of them, and everything that shares their memory, are gone. A
    fork ends that for the batches that exist at that moment: their memory is never used again, because the
    child may look at it.

    Args:
        name: From `Lease.send` in the worker.
        layout: Where what lies.
        num_rows: Rows of each tensor that is wanted.

    Raises:
        LrstreamError: The slab cannot be opened, or holds another batch.
    """
    mapping = _receiver.mapping(name)
    state, batch = HEADER.unpack_from(mapping)
    if (state, batch) != (SlabState.IN_USE, name.batch):
        raise LrstreamError(
            f"Worker process {name.pid} announced batch {name.batch}, but its memory holds batch {batch} "
            f"in state {state}."
        )
    memory: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8, offset=HEADER_BYTES)
    _receiver.watch(memory, _Loan(mapping, batch))
    arrays = layout.arrays(memory, num_rows)
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


class _Loan:
    """A batch of a worker that something here still refers to."""

    def __init__(self, mapping: mmap.mmap, batch: int) -> None:
        self._mapping, self._batch, self._pid = mapping, batch, os.getpid()

    def tell(self, state: SlabState) -> None:
        """Tell the worker, unless this is a forked child, which has only copies of our objects."""
        if os.getpid() == self._pid:
            HEADER.pack_into(self._mapping, 0, state, self._batch)


class _Receiver:
    """Mapped slabs and live batches of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: dict[tuple[int, int], dict[int, mmap.mmap]] = {}
        self._live: set[_Loan] = set()

    def mapping(self, name: SlabName) -> mmap.mmap:
        """The slab, header first."""
        worker = (name.pid, name.pool)
        size = HEADER_BYTES + name.num_bytes
        with self._lock:
            slabs = self._mappings.get(worker, {})
            known = slabs.get(name.descriptor)
            # A worker closes slabs that it needs no more, and may open others under their numbers.
            if known is not None and len(known) == size and _holds(known, name.batch):
                return known
            mapping = _map(name, size)
            if worker not in self._mappings:
                process = next((p for p in multiprocessing.active_children() if p.pid == name.pid), None)
                if process is None:
                    return mapping  # nobody would say when it ends
                self._mappings[worker] = slabs
                weakref.finalize(process, self._mappings.pop, worker, None).atexit = False
            slabs[name.descriptor] = mapping
            return mapping

    def watch(self, memory: NDArray[Any], loan: _Loan) -> None:
        """Give the batch back when this array and all views of it are gone."""
        self._live.add(loan)
        weakref.finalize(memory, self._release, loan).atexit = False

    def _release(self, loan: _Loan) -> None:
        # Finalizers run anywhere, also where the lock is held; one operation of a set needs none.
        if loan in self._live:
            self._live.discard(loan)
            loan.tell(SlabState.RETURNED)

    def before_fork(self) -> None:
        """Give up the memory of live batches: the child sees it, too."""
        for loan in list(self._live):
            self._live.discard(loan)
            loan.tell(SlabState.LOST)

    def after_fork_in_child(self) -> None:
        """Begin anew: the lock may have been held by a thread that does not exist here."""
        self._lock = threading.Lock()
        self._mappings = {}


def _holds(mapping: mmap.mmap, batch: int) -> bool:
    return int(HEADER.unpack_from(mapping)[1]) == batch


def _map(name: SlabName, size: int) -> mmap.mmap:
    path = f"/proc/{name.pid}/fd/{name.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LrstreamError(
            f"The memory of a batch of worker process {name.pid} cannot be opened "
            f"({path}: {error.strerror}).",
            hint="Set LRSTREAM_SHARED_BATCHES=0 to hand batches over in PyTorch's way.",
        ) from error
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


_receiver = _Receiver()
os.register_at_fork(before=_receiver.before_fork, after_in_child=_receiver.after_fork_in_child)
