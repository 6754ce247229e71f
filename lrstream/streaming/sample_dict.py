"""The samples that a DataLoader gets: dictionaries that know their place in a batch (LD-7).

What a sample with a place is made of waits in a row of its batch, where stacking finds it: pictures in the
tensors themselves, numeric features side by side. Whoever looks into the sample itself before that finds all
in it: looking makes their tensors.
"""

from __future__ import annotations

from collections.abc import KeysView
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lrstream.streaming.row_plan import PackedRows, RowPlan
from lrstream.streaming.slabs import Lease

if TYPE_CHECKING:
    from lrstream.streaming.batches import BatchMemory

__all__ = ["Place", "Sample"]


class Place(NamedTuple):
    """A row of a slab that a sample is made in."""

    lease: Lease
    row: int


class Sample(dict[str, Any]):
    """One training sample: a dictionary that also knows where its tensors were put. Used by one thread.

    Copies and pickles of it are plain dictionaries.

    Attributes:
        memory: What stacks it; None = PyTorch.
        place: Where its tensors are, as far as they fit; None where somebody has looked at them.
        plan: Of its numeric features that are not in windows; None = there are none.
        has_row: Whether these wait in `Lease.packed` of its place, and are no entries of the dictionary.
        filled: Keys whose tensors were written into the batch's row, and are no entries either.
    """

    __slots__ = ("filled", "has_row", "memory", "place", "plan")

    memory: BatchMemory | None
    place: Place | None
    plan: RowPlan | None
    has_row: bool
    filled: list[str]

    def __init__(self, memory: BatchMemory | None = None, place: Place | None = None) -> None:
        super().__init__()
        self.memory = memory
        self.place = place
        self.plan = None
        self.has_row = False
        self.filled = []

    @property
    def is_waiting(self) -> bool:
        """Whether anything is in the batch that is no entry of the dictionary yet."""
        return self.has_row or bool(self.filled)

    def put_row(self, plan: RowPlan, rows: PackedRows, frame: int) -> None:
        """Add the numeric features of a row: all at once where the batch has room for them."""
        self.plan = plan
        place = self.place
        if place is not None and place.lease.plan is plan and place.lease.packed is not None:
            place.lease.packed[place.row] = rows[frame]
            self.has_row = True
        else:
            self._add(rows, frame)

    def complete(self) -> None:
        """Make tensors of what waits. Entries that somebody has added since stay as they are.

        The sample has no place afterwards: whoever looks may keep a row, which is not written again.
        A row that is in a batch already is copied.
        """
        place = self.place
        if place is None:
            return
        self.place = None
        is_copied = place.lease.is_passing or place.row < place.lease.num_stacked
        filled, self.filled = self.filled, []
        for key in filled:
            if not dict.__contains__(self, key):
                row = place.lease.part(key, place.row)
                self[key] = row.clone() if is_copied else row
        if self.has_row:
            self.has_row = False
            assert place.lease.packed is not None
            self._add(place.lease.packed, place.row)

    def _add(self, rows: PackedRows, number: int) -> None:
        assert self.plan is not None
        for key in self.plan.keys:
            if not dict.__contains__(self, key):
                column: NDArray[Any] = rows[key]
                # A copy: a sample must not keep its whole episode in memory.
                self[key] = torch.from_numpy(np.array(column[number]))

    def own_keys(self) -> KeysView[str]:
        """Keys of entries that are in the dictionary already."""
        return dict.keys(self)

    def __missing__(self, key: str) -> Any:
        if not self.is_waiting:
            raise KeyError(key)
        self.complete()
        return self[key]

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _completing(name: str) -> Any:
    """The method of `dict`, for a sample of which nothing waits any more."""
    method = getattr(dict, name)

    def call(self: Sample, *args: Any, **named: Any) -> Any:
        self.complete()
        return method(self, *args, **named)

    call.__name__, call.__qualname__, call.__doc__ = name, f"Sample.{name}", method.__doc__
    return call


# All that look at entries or take one away, but for `__getitem__`, which asks `__missing__`.
_LOOKING = (
    "__contains__ __delitem__ __eq__ __ge__ __gt__ __iter__ __ior__ __le__ __len__ __lt__ __ne__ __or__ "
    "__repr__ __reversed__ __ror__ clear copy get items keys pop popitem setdefault values"
)
for _name in _LOOKING.split():
    setattr(Sample, _name, _completing(_name))
