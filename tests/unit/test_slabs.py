"""Memory of batches: used again when it may be, never while somebody can still look at it."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lrstream.errors import LrstreamError
from lrstream.streaming import batches
from lrstream.streaming.batches import BatchMemory, Placer, Sample
from lrstream.streaming.received import receive_tensors
from lrstream.streaming.row_plan import pack_rows, row_plan
from lrstream.streaming.slabs import BatchLayout, SlabPool

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="shared batches are for Linux")


def sample_of(number: int, memory: BatchMemory | None = None, place: Any = None) -> Sample:
    sample = Sample(memory, place)
    values: dict[str, Any] = {
        "picture": torch.full((3, 4, 6), number, dtype=torch.uint8),
        "state": torch.tensor([number, number + 0.5], dtype=torch.float32),
        "index": torch.tensor(number),
        "is_pad": torch.tensor([number % 2 == 0]),
        "task": f"task {number}",
    }
    for key, value in values.items():
        if place is not None and isinstance(value, torch.Tensor):
            row = place.lease.rows_of(key)[place.row]
            row.copy_(value)
            sample[key] = row
        else:
            sample[key] = value
    return sample


ROWS = pack_rows(
    {
        "state": np.arange(60, dtype=np.float32).reshape(20, 3),
        "index": np.arange(20),
        "is_last": np.arange(20) == 19,
        "nothing": np.empty((20, 0), dtype=np.float32),
    }
)
NO_WINDOWS: frozenset[str] = frozenset()


def with_rows(number: int, memory: BatchMemory | None = None, place: Any = None) -> Sample:
    """A sample as the loader makes it: a picture in its row of the batch, features that wait if they may."""
    sample = Sample(memory, place)
    if place is None:
        sample["picture"] = torch.full((3, 4, 6), number, dtype=torch.uint8)
    else:
        place.lease.arrays["picture"][place.row] = number
        sample.filled.append("picture")
    sample.put_row(row_plan(ROWS.dtype, NO_WINDOWS), ROWS, number)
    sample["task"] = f"task {number}"
    return sample


def eager(number: int) -> dict[str, Any]:
    """The same, made in the plainest way."""
    return {
        "picture": torch.full((3, 4, 6), number, dtype=torch.uint8),
        "state": torch.tensor([3.0 * number, 3.0 * number + 1, 3.0 * number + 2]),
        "index": torch.tensor(number),
        "is_last": torch.tensor(number == 19),
        "nothing": torch.empty(0),
        "task": f"task {number}",
    }


def same(one: Any, other: Any) -> bool:
    """Whether two samples or batches have equal entries, in any order."""
    return set(one) == set(other) and equal({key: one[key] for key in other}, dict(other))


def equal(batch: dict[str, Any], other: dict[str, Any]) -> bool:
    if list(batch) != list(other):
        return False
    return all(
        torch.equal(value, other[key]) and value.dtype == other[key].dtype
        if isinstance(value, torch.Tensor)
        else value == other[key]
        for key, value in batch.items()
    )


def plain(samples: list[Sample]) -> dict[str, Any]:
    result: dict[str, Any] = default_collate([dict(sample) for sample in samples])
    return result


def batches_of(memory: BatchMemory, sizes: list[int], placer: Placer) -> Iterator[tuple[Any, list[Sample]]]:
    number = 0
    for size in sizes:
        samples = [sample_of(number + i, memory, placer.next()) for i in range(size)]
        number += size
        yield default_collate(samples), samples


def test_batches_equal_those_of_pytorch_and_need_no_copy_once_their_size_is_known() -> None:
    memory = BatchMemory()
    for number, (batch, samples) in enumerate(batches_of(memory, [4, 4, 4, 3], Placer(memory))):
        assert type(batch) is dict
        assert equal(batch, plain(samples))
        is_same = [
            sample["picture"].data_ptr() == batch["picture"][i].data_ptr() for i, sample in enumerate(samples)
        ]
        assert all(is_same) == (number > 0)


def test_another_size_in_the_middle_is_still_right() -> None:
    memory = BatchMemory()
    sizes = [4, 3, 5, 5, 5, 1, 2, 4, 4, 4]
    for batch, samples in batches_of(memory, sizes, Placer(memory)):
        assert equal(batch, plain(samples))


def test_values_that_were_replaced_are_in_the_batch() -> None:
    memory = BatchMemory()
    placer = Placer(memory)
    default_collate([sample_of(i, memory, placer.next()) for i in range(2)])
    samples = [sample_of(i, memory, placer.next()) for i in range(2)]
    samples[1]["state"] = torch.tensor([7.0, 8.0])
    samples[0]["index"] = samples[1]["index"] = torch.tensor([1, 2])  # another shape
    for sample in samples:
        sample["more"] = torch.tensor(3.0)
        del sample["is_pad"]
    assert equal(default_collate(samples), plain(samples))


def test_tensors_of_several_shapes_are_refused_as_by_pytorch() -> None:
    memory = BatchMemory()
    samples = [sample_of(i, memory) for i in range(2)]
    samples[1]["state"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        default_collate(samples)


def test_memory_is_used_again_only_when_nothing_refers_to_it() -> None:
    pool = SlabPool(is_shared=False)
    layout = BatchLayout.of(2, {"x": torch.zeros(3)})
    lease = pool.take(layout)
    address = lease.tensors["x"].data_ptr()
    row = lease.tensors["x"][1]
    row.fill_(5)
    del lease
    gc.collect()
    other = pool.take(layout)
    assert other.tensors["x"].data_ptr() != address  # the row is still there
    assert row.tolist() == [5, 5, 5]
    del row, other
    gc.collect()
    assert pool.num_slabs == 2
    assert {pool.take(layout).tensors["x"].data_ptr() for _ in range(3)} == {address} or pool.num_slabs == 2


def test_copies_and_pickles_of_samples_are_plain_dictionaries() -> None:
    memory = BatchMemory()
    copied = pickle.loads(pickle.dumps(sample_of(3, memory)))
    assert type(copied) is dict
    assert equal(copied, dict(sample_of(3)))


def waiting(memory: BatchMemory, *, size: int = 4) -> list[Sample]:
    """Samples whose features wait, of a memory that knows batches of this size."""
    default_collate([with_rows(number, memory) for number in range(size)])
    placer = Placer(memory)
    samples = [with_rows(number, memory, placer.next()) for number in range(10, 10 + size)]
    assert all(sample.is_waiting for sample in samples)
    return samples


def test_features_that_wait_are_stacked_at_once() -> None:
    memory = BatchMemory()
    placer, number = Placer(memory), 0
    for index, size in enumerate([4, 4, 4, 3, 2, 2]):
        samples = [with_rows(number + i, memory, placer.next()) for i in range(size)]
        batch = default_collate(samples)
        if index < 4:  # nobody had to look into them
            assert all(sample.is_waiting for sample in samples) == (index > 0)
        assert same(batch, default_collate([eager(number + i) for i in range(size)]))
        assert all(value.is_contiguous() for value in batch.values() if isinstance(value, torch.Tensor))
        number += size


LOOKS: dict[str, Callable[[Any], Any]] = {
    "[]": lambda sample: sample["state"].tolist(),
    "in": lambda sample: "state" in sample,
    "==": lambda sample: set(sample) == {*eager(0)},
    "len": len,
    "iter": lambda sample: sorted(sample),
    "reversed": lambda sample: [*reversed(sample)].count("state"),
    "keys": lambda sample: sorted(sample.keys()),
    "values": lambda sample: len(list(sample.values())),
    "items": lambda sample: sorted(key for key, _ in sample.items()),
    "get": lambda sample: sample.get("index").item(),
    "pop": lambda sample: sample.pop("index").item(),
    "setdefault": lambda sample: sample.setdefault("index", None).item(),
    "copy": lambda sample: sorted(sample.copy()),
    "dict": lambda sample: sorted(dict(sample)),
    "**": lambda sample: sorted({**sample}),
    "call": lambda sample: sorted((lambda **entries: entries)(**sample)),
    "|": lambda sample: sorted(sample | {"more": 1}),
    "or": lambda sample: sorted({"more": 1} | sample),
    "pickle": lambda sample: sorted(pickle.loads(pickle.dumps(sample))),
    "json": lambda sample: sorted(json.loads(json.dumps(sample, default=str))),
    "copy.copy": lambda sample: sorted(copy.copy(sample)),
    "pytree": lambda sample: len(torch.utils._pytree.tree_leaves(dict(sample))),
    "repr": lambda sample: "'state': tensor(" in repr(sample),
    "update": lambda sample: ({}.update(sample), sorted(sample))[1],
    "del": lambda sample: (sample.__delitem__("state"), sorted(sample))[1],
    "absent": lambda sample: sample.get("absent"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_into_a_sample_finds_all_of_it(name: str) -> None:
    samples = waiting(BatchMemory())
    expected = [eager(10), eager(11)]
    assert LOOKS[name](samples[1]) == LOOKS[name](dict(expected[1]))
    with pytest.raises(KeyError, match="absent"):
        samples[1]["absent"]
    if name not in ("pop", "del"):
        assert same(samples[1], expected[1])
    assert samples[0].is_waiting


def test_no_method_of_dictionaries_is_forgotten() -> None:
    # Those that look at nothing, or only at entries that are given to them.
    harmless = {
        "__class_getitem__",
        "__getitem__",
        "__setitem__",
        "fromkeys",
        "update",
        "__init__",
        "__new__",
    }
    harmless |= {"__getattribute__", "__sizeof__", "__hash__", "__doc__"}
    of_dict = {name for name in vars(dict) if name not in harmless}
    assert of_dict <= vars(Sample).keys()


def test_samples_that_were_looked_into_or_changed_are_stacked_as_they_are() -> None:
    for change in range(5):
        memory = BatchMemory()
        samples = waiting(memory)
        expected = [eager(number) for number in range(10, 14)]
        if change == 0:
            assert samples[2]["state"].tolist() == [36, 37, 38]
        elif change == 1:
            samples[2]["state"] = expected[2]["state"] = torch.tensor([7.0, 8.0, 9.0])
        elif change == 2:
            for sample, other in zip(samples, expected, strict=True):
                sample["state"] = other["state"] = torch.zeros(5)
        elif change == 3:
            for sample, other in zip(samples, expected, strict=True):
                sample["more"] = other["more"] = torch.ones(2)
        else:
            for sample, other in zip(samples, expected, strict=True):
                del sample["index"], other["index"]
        assert same(default_collate(samples), default_collate(expected))
        shuffled = list(reversed(waiting(memory)))
        assert same(default_collate(shuffled), default_collate([eager(13 - i) for i in range(4)]))


def test_what_a_sample_gives_is_not_the_memory_of_its_batch() -> None:
    samples = waiting(BatchMemory())
    batch = default_collate(samples)
    state = samples[0]["state"]
    batch["state"].zero_()
    assert state.tolist() == [30, 31, 32]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> BatchMemory:
    """The memory of a DataLoader worker, in this very process."""
    monkeypatch.setattr(batches, "get_worker_info", object)
    return BatchMemory()


def sent(batch: Any) -> dict[str, Any]:
    """What arrives of a batch that goes through the queue of a DataLoader."""
    received: dict[str, Any] = pickle.loads(bytes(ForkingPickler.dumps(batch)))
    return received


@needs_linux
def test_a_worker_uses_memory_again_when_the_receiver_has_dropped_it(worker: BatchMemory) -> None:
    placer = Placer(worker)
    addresses = []
    for number, (batch, samples) in enumerate(batches_of(worker, [2] * 12, placer)):
        expected = plain(samples)
        addresses.append(batch["picture"].data_ptr())
        received = sent(batch)
        assert type(received) is dict
        del batch, samples
        gc.collect()
        assert equal(received, expected), number
        del received
    assert len(set(addresses)) < 5


@needs_linux
def test_what_is_kept_is_never_overwritten(worker: BatchMemory) -> None:
    placer = Placer(worker)
    kept = []
    for batch, samples in batches_of(worker, [2] * 10, placer):
        kept.append((sent(batch)["picture"][1], plain(samples)["picture"][1]))
    del batch, samples
    gc.collect()
    for received, expected in kept:
        assert torch.equal(received, expected)


@needs_linux
def test_after_a_fork_the_memory_of_live_batches_is_not_used_again(worker: BatchMemory) -> None:
    placer = Placer(worker)
    source = batches_of(worker, [2] * 8, placer)
    batch, samples = next(source)
    expected, received = plain(samples), sent(batch)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read_end, 1)
        os._exit(0 if equal(received, expected) else 1)
    del batch, samples, received
    gc.collect()
    for batch, _ in source:
        sent(batch)
    os.write(write_end, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(read_end)
    os.close(write_end)


@needs_linux
def test_changes_after_stacking_arrive(worker: BatchMemory) -> None:
    placer = Placer(worker)
    batch, samples = next(batches_of(worker, [3], placer))
    expected = plain(samples)
    batch["state"] = batch["state"] * 2
    batch["picture"] = batch["picture"][:2]
    batch["more"] = "text"
    del batch["index"]
    received = sent(batch)
    assert list(received) == ["picture", "state", "is_pad", "task", "more"]
    assert torch.equal(received["state"], expected["state"] * 2)
    assert torch.equal(received["picture"], expected["picture"][:2])
    assert received["more"] == "text"


@needs_linux
def test_a_second_receiver_gets_a_copy(worker: BatchMemory) -> None:
    batch, samples = next(batches_of(worker, [3], Placer(worker)))
    first, second = sent(batch), sent(batch)
    assert first["picture"].data_ptr() != second["picture"].data_ptr()
    assert equal(first, plain(samples))
    assert equal(second, plain(samples))


@needs_linux
def test_a_batch_that_is_no_longer_there_is_an_error(worker: BatchMemory) -> None:
    batch, _ = next(batches_of(worker, [3], Placer(worker)))
    lease = batch.lease
    name = lease.send()
    with pytest.raises(LrstreamError, match="its memory holds batch 1"):
        receive_tensors(name._replace(batch=9), lease.layout, {"state": 3})
    with pytest.raises(LrstreamError, match="cannot be opened"):
        receive_tensors(name._replace(descriptor=99_999), lease.layout, {"state": 3})
