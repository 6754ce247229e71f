"""Memory of batches: used again when it may be, never while somebody can still look at it."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from lrstream.errors import LrstreamError
from lrstream.streaming import batches
from lrstream.streaming.batches import BatchMemory, Placer, Sample
from lrstream.streaming.received import receive_tensors
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
            row = place.lease.rows[key][place.row]
            row.copy_(value)
            sample[key] = row
        else:
            sample[key] = value
    return sample


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
