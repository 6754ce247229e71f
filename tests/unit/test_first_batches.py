"""Samples that are made before anybody knows how many of them are stacked, and whether they ever are."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lrstream.streaming import batches
from lrstream.streaming.batches import BatchMemory, Place, Placer, Sample

FIRST_ROWS = batches._FIRST_ROWS


def expected() -> dict[str, torch.Tensor]:
    """What a loader knows of samples beforehand."""
    return {
        "picture": torch.empty((3, 4, 6), dtype=torch.uint8, device="meta"),
        "state": torch.empty(3),
        "index": torch.tensor(0),
    }


def values_of(number: int) -> dict[str, Any]:
    return {
        "picture": torch.full((3, 4, 6), number % 251, dtype=torch.uint8),
        "state": torch.tensor([number, number + 0.5, -number], dtype=torch.float32),
        "index": torch.tensor(number),
        "task": f"task {number}",
    }


def make(number: int, memory: BatchMemory, placer: Placer) -> Sample:
    """A sample as the loader makes it: the picture in its row of the batch if there is one."""
    return made_at(placer.next(expected), number, memory)


def made_at(place: Place | None, number: int, memory: BatchMemory) -> Sample:
    sample = Sample(memory, place)
    for key, value in values_of(number).items():
        if key == "picture" and place is not None:
            place.lease.arrays[key][place.row] = value.numpy()
            sample.filled.append(key)
        else:
            sample[key] = value
    return sample


def run(memory: BatchMemory, placer: Placer, sizes: list[int], ahead: int) -> Iterator[tuple[Any, list[int]]]:
    """Batches of these sizes of a loader that makes so many samples ahead."""
    made: list[Sample] = []
    first = 0
    for size in sizes:
        while len(made) < first + size + ahead:
            made.append(make(len(made), memory, placer))
        numbers = list(range(first, first + size))
        yield default_collate([made[number] for number in numbers]), numbers
        first += size


def assert_equal(batch: Any, numbers: list[int]) -> None:
    plain = default_collate([values_of(number) for number in numbers])
    assert set(batch) == set(plain)
    for key, value in plain.items():
        if isinstance(value, torch.Tensor):
            assert batch[key].dtype == value.dtype
            assert torch.equal(batch[key], value), key
            assert batch[key].is_contiguous()
        else:
            assert batch[key] == value


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> BatchMemory:
    """The memory of a DataLoader worker, in this very process."""
    monkeypatch.setattr(batches, "get_worker_info", object)
    return BatchMemory()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.one_of(
        st.builds(lambda size, count: [size] * count, st.integers(1, 130), st.integers(1, 5)),
        st.lists(st.integers(1, 60), min_size=1, max_size=6),
    ),
    ahead=st.integers(0, 80),
)
def test_every_batch_is_that_of_pytorch(sizes: list[int], ahead: int) -> None:
    memory = BatchMemory()
    kept = []
    for batch, numbers in run(memory, Placer(memory), sizes, ahead):
        assert_equal(batch, numbers)
        kept.append((batch, numbers))
    # Nor are they written over by later ones.
    for batch, numbers in kept:
        assert_equal(batch, numbers)


@pytest.mark.skipif(sys.platform != "linux", reason="shared batches are for Linux")
@pytest.mark.parametrize(("size", "ahead"), [(8, 0), (8, 8), (32, 8), (40, 64), (100, 8)])
def test_every_batch_of_a_worker_arrives(worker: BatchMemory, size: int, ahead: int) -> None:
    kept = []
    for batch, numbers in run(worker, Placer(worker), [size] * 6, ahead):
        received = pickle.loads(bytes(ForkingPickler.dumps(batch)))
        del batch
        assert_equal(received, numbers)
        if numbers[0] % 3 == 0:
            kept.append((received, numbers))
        del received
        gc.collect()
    for received, numbers in kept:
        assert_equal(received, numbers)


def test_first_batches_are_stacked_where_they_were_made() -> None:
    memory = BatchMemory()
    addresses = []
    row = 3 * 4 * 6
    for batch, numbers in run(memory, Placer(memory), [32, 32, 32], ahead=40):
        assert_equal(batch, numbers)
        addresses.append(batch["picture"].data_ptr())
        # What is saved, or sent to another process, is a storage as a whole.
        assert batch["picture"].untyped_storage().nbytes() == 32 * row
    assert addresses[1] == addresses[0] + 32 * row
    assert addresses[2] == addresses[0] + 64 * row


def test_samples_that_nobody_stacks_own_their_memory() -> None:
    memory = BatchMemory()
    placer = Placer(memory)
    samples = [make(number, memory, placer) for number in range(FIRST_ROWS + 3)]
    for number, sample in enumerate(samples):
        for key, value in values_of(number).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(sample[key], value)
                assert sample[key].untyped_storage().nbytes() == value.nbytes
    assert all(sample.place is None for sample in samples)
    assert_equal(default_collate(samples), list(range(len(samples))))


def test_samples_are_stacked_as_somebody_has_left_them() -> None:
    memory = BatchMemory()
    placer = Placer(memory)
    samples = [make(number, memory, placer) for number in range(4)]
    samples[1]["picture"][0] = 250  # looked at, and changed
    samples[2]["picture"] = torch.full((3, 4, 6), 249, dtype=torch.uint8)  # not looked at
    batch = default_collate(samples)
    assert batch["picture"][1, 0].eq(250).all()
    assert batch["picture"][1, 1].eq(1).all()
    assert batch["picture"][2].eq(249).all()
    assert batch["picture"][3].eq(3).all()


def test_where_samples_are_not_what_was_expected_they_are_copied() -> None:
    memory = BatchMemory()
    placer = Placer(memory)

    def other(number: int) -> Sample:
        sample = Sample(memory, placer.next(expected))
        sample["picture"] = torch.full((3, 8, 6), number, dtype=torch.uint8)
        return sample

    for first in (0, 5, 10):
        samples = [other(number) for number in range(first, first + 5)]
        batch = default_collate(samples)
        assert batch["picture"][:, 0, 0, 0].tolist() == list(range(first, first + 5))
        assert batch["picture"].shape == (5, 3, 8, 6)
    assert memory.layout is not None
    assert memory.layout.fields[0].shape == (3, 8, 6)


def test_nothing_is_expected_of_samples_that_are_not_known_beforehand() -> None:
    memory = BatchMemory()
    placer = Placer(memory)
    assert all(placer.next(dict) is None for _ in range(10))
    assert placer.next() is None


# -- samples that are kept, and stacked more than once ----------------------------------------------


def other_picture(number: int) -> torch.Tensor:
    return torch.full((3, 4, 6), 250 - number % 200, dtype=torch.uint8)


@pytest.fixture(params=["first batches", "later batches", "worker"])
def maker(request: pytest.FixtureRequest) -> Any:
    """Makes the samples of one batch after the other."""
    if request.param == "worker":
        request.getfixturevalue("worker")
    memory = BatchMemory()
    placer = Placer(memory)
    numbers = iter(range(1000))

    def samples() -> tuple[list[Sample], list[int]]:
        chosen = [next(numbers) for _ in range(4)]
        return [make(number, memory, placer) for number in chosen], chosen

    if request.param != "first batches":
        for _ in range(3):
            default_collate(samples()[0])
    return samples


def test_a_batch_keeps_its_values_when_its_samples_are_changed_and_stacked_again(maker: Any) -> None:
    """As by a function that makes two views of its samples."""
    for _ in range(3):
        samples, numbers = maker()
        plain = default_collate(samples)
        for sample, number in zip(samples, numbers, strict=True):
            sample["picture"] = other_picture(number)  # without a look at what it was
        changed = default_collate(samples)
        assert_equal(plain, numbers)
        assert torch.equal(changed["picture"], torch.stack([other_picture(number) for number in numbers]))
        assert changed["index"].tolist() == numbers


def test_a_batch_keeps_its_values_when_pictures_of_its_samples_are_changed_in_place(maker: Any) -> None:
    for _ in range(3):
        samples, numbers = maker()
        plain = default_collate(samples)
        for sample in samples:
            sample["picture"].fill_(9)
        changed = default_collate(samples)
        assert_equal(plain, numbers)
        assert changed["picture"].eq(9).all()


def test_batches_of_the_same_samples_do_not_share_memory(maker: Any) -> None:
    for _ in range(3):
        samples, numbers = maker()
        batches_of_them = [default_collate(samples), default_collate(samples), default_collate(samples[1:3])]
        for position, batch in enumerate(batches_of_them):
            batch["picture"].fill_(position)
        for position, batch in enumerate(batches_of_them):
            assert batch["picture"].eq(position).all()
            assert batch["index"].tolist() == (numbers[1:3] if position == 2 else numbers)


def test_pictures_that_somebody_has_taken_are_not_written_over(maker: Any) -> None:
    """A function that keeps the pictures, puts others in their place, and stacks."""
    for _ in range(3):
        samples, numbers = maker()
        originals = [sample["picture"] for sample in samples]
        for sample, number in zip(samples, numbers, strict=True):
            sample["picture"] = other_picture(number)
        batch = default_collate(samples)
        originals[0][0, 0] = 3
        assert torch.equal(batch["picture"], torch.stack([other_picture(number) for number in numbers]))
        for number, original in zip(numbers, originals, strict=True):
            assert original[1].eq(number).all()


@pytest.mark.parametrize("known", [False, True], ids=["first batches", "later batches"])
@pytest.mark.parametrize("is_stacked", [False, True], ids=["samples", "batches"])
def test_what_is_shared_with_another_process_takes_no_other_rows_along(known: bool, is_stacked: bool) -> None:
    """Sharing moves a storage, while the decoders write into the rows behind."""
    memory = BatchMemory()
    placer = Placer(memory)
    first = 100  # memory that was used before may hold small numbers
    if known:
        for numbers in (range(4), range(4, 8)):
            default_collate([make(number, memory, placer) for number in numbers])
    samples = [make(number, memory, placer) for number in range(first, first + 3)]
    place = placer.next(expected)
    assert place is not None
    for kept in [default_collate(samples)] if is_stacked else samples:
        kept["picture"].share_memory_()
    late = made_at(place, first + 3, memory)
    assert_equal(default_collate([late]), [first + 3])
    late = make(first + 4, memory, placer)
    assert late["picture"].eq(first + 4).all()
    assert_equal(default_collate(samples), list(range(first, first + 3)))


# -- memory -----------------------------------------------------------------------------------------


def slab_of(sample: Sample) -> weakref.ref[Any]:
    """The memory that a sample was made in."""
    assert sample.place is not None
    return weakref.ref(sample.place.lease._loan.slab._private)


def test_memory_of_first_samples_ends_with_the_last_batch_in_it() -> None:
    memory = BatchMemory()
    placer = Placer(memory)
    numbers = iter(range(1000))

    def batch() -> Any:
        return default_collate([make(next(numbers), memory, placer) for _ in range(4)])

    kept = batch()
    before = [batch() for _ in range(2)]  # idle ones are enough for all that follow
    first_bytes = FIRST_ROWS * 3 * 4 * 6
    assert memory.num_bytes > first_bytes
    assert_equal(kept, [0, 1, 2, 3])
    del kept, before
    for _ in range(5):
        batch()
    assert memory.num_bytes < first_bytes


def test_memory_of_first_samples_ends_when_all_of_them_were_looked_at() -> None:
    memory = BatchMemory()
    placer = Placer(memory)
    samples = [make(number, memory, placer) for number in range(5)]
    slab = slab_of(samples[0])
    del placer
    for number, sample in enumerate(samples):
        assert slab() is not None
        assert sample["picture"].eq(number).all()
    assert slab() is None
