"""Samples that know their place in a batch, so that the batch needs no copy of them (LD-7).

`torch.utils.data.DataLoader` asks for one sample after the other and stacks them afterwards, by default
into new shared memory. Here every sample is decoded into its row of a slab, and stacking finds it there.
What samples look like is known from the first episode, how many of them make a batch from the first call to
stack; until then they fill the rows of a slab one after the other. Whatever is not in its row (transformed
pictures, values that somebody replaced, a batch of another size) is copied there, so the result is the same
as that of `torch.utils.data.default_collate` in every case.

PyTorch calls `collate` for our samples by itself: collating looks the type of the samples up in
``default_collate_fn_map``. A ``collate_fn`` of the user's own gets samples that are dictionaries, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lrstream.streaming.received import receive_tensors
from lrstream.streaming.row_plan import RowPlan
from lrstream.streaming.sample_dict import Place, Sample
from lrstream.streaming.slabs import NUMPY_DTYPES, BatchLayout, Lease, SlabName, SlabPool, may_share

__all__ = ["BatchMemory", "Place", "Placer", "Sample"]

# Rows of the slab that is filled before anybody knows how many samples make a batch, if they ever make one.
# Those that are not filled take no memory.
_FIRST_ROWS = 96

CollateMap = dict[type | tuple[type, ...], Callable[..., Any]]
_Join = Callable[[list[Any]], Any]


class BatchMemory:
    """Slabs of one process, and what its last batches looked like. One consuming thread at a time.

    Has to be made in the process that uses it.
    """

    def __init__(self) -> None:
        self._is_worker = get_worker_info() is not None
        self._pool = SlabPool(is_shared=self._is_worker and may_share())
        self._may_place = not self._is_worker or may_share()
        self._layout: BatchLayout | None = None
        self._expected: BatchLayout | None = None
        self._plan: RowPlan | None = None
        self._keys: list[str] = []
        self._last_size = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._pool.num_bytes

    @property
    def layout(self) -> BatchLayout | None:
        """What the next batch will probably look like; None = unknown."""
        return self._layout

    def expect(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> BatchLayout | None:
        """Where samples may lie before the first batch is stacked; None = nothing is known.

        Not in workers: a slab is handed over as a whole, so only the first batch in it would not be copied.

        Args:
            tensors: Gives tensors like those of a sample; their values do not matter. Empty = unknown.
        """
        if self._expected is None and not self._is_worker:
            self._expected = BatchLayout.of(_FIRST_ROWS, tensors())
        return self._expected if self._expected is not None and self._expected.fields else None

    def take(self, layout: BatchLayout) -> Lease:
        """Memory for a batch like the last ones, or for the first samples; `layout` is theirs."""
        return self._pool.take(layout, self._plan, is_passing=layout is self._expected)

    def collate(
        self,
        samples: Sequence[Sample],
        collate_map: CollateMap | None = None,
        *,
        others: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, Any]:
        """Stack samples: tensors in one slab, everything else as PyTorch does.

        Args:
            samples: At least one, with equal keys.
            collate_map: As `torch.utils.data.default_collate` knows it.
            others: Joins values that are no tensors; None = as PyTorch does, which walks into lists.
        """
        lease, first_row = _common_rows(samples)
        if lease is not None and (first_row < lease.num_stacked or (first_row and self._is_worker)):
            lease = None  # stacked before, or of a slab that is handed over as a whole
        join = partial(_join, collate_map=collate_map, others=others)
        batch = None
        if lease is not None and lease.plan is None:
            batch = self._stack_in_rows(samples, lease, first_row, join)
        elif lease is not None and first_row == 0:
            batch = self._gather(samples, lease, join)
        if batch is None:
            for sample in samples:
                sample.complete()
            stackable = {key: value for key, value in samples[0].items() if _can_stack(samples, key)}
            if not self._may_place or not stackable:
                return _collate_plainly(samples, join)
            self._learn(samples, stackable, list(samples[0]))
            # Never in the rows where they were made: whoever has looked at samples may still have these.
            num_rows = max(len(samples), 0 if self._layout is None else self._layout.num_rows)
            lease, first_row = self._pool.take(BatchLayout.of(num_rows, stackable)), 0
            batch = _stacked(samples, list(samples[0]), stackable, lease, first_row, join)
        assert lease is not None
        lease.num_stacked = first_row + len(samples)
        return _Outgoing(batch, lease) if self._is_worker else batch

    def _gather(self, samples: Sequence[Sample], lease: Lease, join: _Join) -> dict[str, Any] | None:
        """Stack samples whose features wait in the batch; None where anything differs from earlier ones."""
        plan, packed = lease.plan, lease.packed
        if plan is None or packed is None or plan is not self._plan:
            return None
        size, first, filled = len(samples), samples[0].own_keys(), samples[0].filled
        if size != lease.layout.num_rows and size == self._last_size:
            return None  # batches have become smaller
        if len(first) + len(filled) + len(plan.keys) != len(self._keys):
            return None
        for sample in samples:
            if not sample.has_row or sample.filled != filled or sample.own_keys() != first:
                return None
        batch: dict[str, Any] = {}
        for key in self._keys:
            if key in first:
                values = [sample[key] for sample in samples]
                if not lease.has_rows(key):
                    batch[key] = join(values)
                elif _fit(values, lease, key):
                    batch[key] = _stack(values, lease, key)
                else:
                    return None
            elif key in plan.keys:
                lease.arrays[key][:size] = packed[key][:size]
                batch[key] = lease.part(key, slice(size))
            elif key in filled:
                batch[key] = lease.part(key, slice(size))
            else:
                return None
        self._last_size = size
        return batch

    def _stack_in_rows(
        self, samples: Sequence[Sample], lease: Lease, first_row: int, join: _Join
    ) -> dict[str, Any] | None:
        """Stack samples whose tensors wait in rows of the batch; None where any of them differ."""
        first, filled = samples[0].own_keys(), samples[0].filled
        for sample in samples:
            if sample.filled != filled or sample.own_keys() != first:
                return None
        stackable = {key: lease.tensors[key][first_row] for key in filled if key not in first}
        stackable |= {key: samples[0][key] for key in first if _can_stack(samples, key)}
        if not lease.layout.fits(stackable):
            return None
        keys = [*stackable, *(key for key in first if key not in stackable)]
        self._learn(samples, stackable, keys)
        return _stacked(samples, keys, stackable, lease, first_row, join)

    def _learn(
        self, samples: Sequence[Sample], stackable: Mapping[str, torch.Tensor], keys: list[str]
    ) -> None:
        """Take note of a batch; the one of another size at the end of an epoch says nothing."""
        known, size = self._layout, len(samples)
        if known is None or (
            size == self._last_size and not (known.num_rows == size and known.fits(stackable))
        ):
            known = self._layout = BatchLayout.of(size, stackable)
            self._keys, self._plan = keys, samples[0].plan
        if self._plan is not None and not all(_follows(sample, self._plan, stackable) for sample in samples):
            self._plan = None  # for good: who replaces features will do so in every batch
        self._last_size = size


class Placer:
    """Gives the samples of one iteration their places, in the order in which they will be delivered.

    Args:
        memory: Where the places are.
    """

    def __init__(self, memory: BatchMemory) -> None:
        self.memory = memory
        self._num_placed = 0
        self._lease: Lease | None = None
        self._row = 0

    def next(self, tensors: Callable[[], Mapping[str, torch.Tensor]] = dict) -> Place | None:
        """The place of the next sample; None where nothing is known yet, or within a batch that has begun.

        Args:
            tensors: As `BatchMemory.expect` wants it; asked for once, if ever.
        """
        number, self._num_placed = self._num_placed, self._num_placed + 1
        layout = self.memory.layout
        if layout is None and number == 0:
            layout = self.memory.expect(tensors)
        may_begin = layout is not None and number % layout.num_rows == 0
        if layout is not None and may_begin and (self._lease is None or self._lease.is_passing):
            self._lease, self._row = self.memory.take(layout), 0
        if self._lease is None:
            return None
        place = Place(self._lease, self._row)
        self._row += 1
        if self._row == self._lease.layout.num_rows:
            self._lease = None
        return place


class _Outgoing(dict[str, Any]):
    """A batch on its way from a worker to the process that trains, where it arrives as a dictionary."""

    __slots__ = ("lease",)

    def __init__(self, batch: dict[str, Any], lease: Lease) -> None:
        super().__init__(batch)
        self.lease = lease

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _reduce_outgoing(batch: _Outgoing) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
    """How a batch is put into the queue between processes; to every other pickler it is a dictionary."""
    lease = batch.lease
    if lease.is_sent:  # two receivers could not agree on when the memory is free
        return dict, (dict(batch),)
    num_rows = {key: len(value) for key, value in batch.items() if _is_in(lease, key, value)}
    others = {key: value for key, value in batch.items() if key not in num_rows}
    return _receive, (lease.send(), lease.layout, tuple(batch), num_rows, others)


def _receive(
    name: SlabName,
    layout: BatchLayout,
    keys: tuple[str, ...],
    num_rows: dict[str, int],
    others: dict[str, Any],
) -> dict[str, Any]:
    tensors = receive_tensors(name, layout, num_rows)
    return {key: tensors[key] if key in tensors else others[key] for key in keys}


def _is_in(lease: Lease, key: str, value: Any) -> bool:
    """Whether a value is still the first rows of the slab's tensor, not what somebody put in its place."""
    tensor = lease.tensors.get(key)
    return (
        tensor is not None
        and type(value) is torch.Tensor
        and value.dtype == tensor.dtype
        and value.dim() == tensor.dim()
        and value.shape[1:] == tensor.shape[1:]
        and value.stride() == tensor.stride()
        and value.data_ptr() == tensor.data_ptr()
        and 0 < len(value) <= len(tensor)
    )


def _stacked(
    samples: Sequence[Sample],
    keys: Sequence[str],
    stackable: Mapping[str, torch.Tensor],
    lease: Lease,
    first_row: int,
    join: _Join,
) -> dict[str, Any]:
    """A batch in rows of a slab; what is no entry of the samples is there already."""
    first, batch = samples[0].own_keys(), {}
    for key in keys:
        if key not in first:
            batch[key] = lease.part(key, slice(first_row, first_row + len(samples)))
            continue
        values = [sample[key] for sample in samples]
        batch[key] = _stack(values, lease, key, first_row) if key in stackable else join(values)
    return batch


def _stack(values: Sequence[torch.Tensor], lease: Lease, key: str, first_row: int = 0) -> torch.Tensor:
    """Tensors of one shape and type in rows of a field; those that are there already stay."""
    for row, value in zip(lease.rows_of(key)[first_row:], values, strict=False):
        if value is not row:
            row.copy_(value)
    return lease.part(key, slice(first_row, first_row + len(values)))


def _fit(values: Sequence[Any], lease: Lease, key: str) -> bool:
    """Whether all are the rows of a field, or may be copied there."""
    return all(
        value is row or (_is_plain(value) and value.shape == row.shape and value.dtype == row.dtype)
        for row, value in zip(lease.rows_of(key), values, strict=False)
    )


def _follows(sample: Sample, plan: RowPlan, stackable: Mapping[str, torch.Tensor]) -> bool:
    """Whether the features of a plan are in a sample as their rows have them."""
    if sample.plan is not plan:
        return False
    for key in plan.keys:
        dtype, value = plan.dtype[key], stackable.get(key)
        if value is None or value.shape != dtype.shape or dtype.base != NUMPY_DTYPES[value.dtype]:
            return False
    return True


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and BatchLayout.may_hold(value)


def _can_stack(samples: Sequence[Sample], key: str) -> bool:
    """Whether a key holds plain tensors of one shape and type."""
    value = samples[0][key]
    if not _is_plain(value):
        return False
    shape, dtype = value.shape, value.dtype
    for sample in samples:
        other = sample[key]
        if type(other) is not torch.Tensor or other.shape != shape or other.dtype != dtype:
            return False
    return True


def _common_rows(samples: Sequence[Sample]) -> tuple[Lease | None, int]:
    """The slab in which the samples fill rows one after the other, in their order, and the first of these."""
    first = samples[0].place
    if first is None:
        return None, 0
    for row, sample in enumerate(samples, first.row):
        place = sample.place
        if place is None or place.lease is not first.lease or place.row != row:
            return None, 0
    return first.lease, first.row


def _collate_plainly(samples: Sequence[Sample], join: _Join) -> dict[str, Any]:
    return {key: join([sample[key] for sample in samples]) for key in samples[0]}


def _join(
    values: list[Any],
    collate_map: CollateMap | None = None,
    others: Callable[[list[Any]], Any] | None = None,
) -> Any:
    if others is not None and not isinstance(values[0], torch.Tensor):
        return others(values)
    return torch_collate(
        values, collate_fn_map=default_collate_fn_map if collate_map is None else collate_map
    )


def _collate_samples(
    samples: Sequence[Sample], *, collate_fn_map: CollateMap | None = None
) -> dict[str, Any]:
    memory = samples[0].memory
    if memory is None:
        return _collate_plainly(samples, partial(_join, collate_map=collate_fn_map))
    return memory.collate(samples, collate_fn_map)


default_collate_fn_map[Sample] = _collate_samples
ForkingPickler.register(_Outgoing, _reduce_outgoing)
