"""`follow(loader, ahead=N)`: the same batches in the same order, and a position that counts none too many."""

from __future__ import annotations

import gc
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lrstream.demo import WrittenDataset
from lrstream.errors import UsageError
from lrstream.streaming.ahead import BatchesAhead
from tests.support.loader import open_loader

THREAD = "lrstream-ahead"


def loader_of(dataset: Any, num_workers: int, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    fork: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    return DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, **fork, **options)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("strategy", ["remaining", "gop"])
@pytest.mark.parametrize("ahead", [1, 3])
def test_whole_batches_are_the_same(root: Path, num_workers: int, strategy: str, ahead: int) -> None:
    options: dict[str, Any] = {"sampling_strategy": strategy, "return_uint8": True}
    with open_loader(root, **options) as plain, open_loader(root, **options) as dataset:
        for epoch in range(2):
            plain.set_epoch(epoch)
            dataset.set_epoch(epoch)
            expected = list(loader_of(plain, num_workers))
            # Kept, so that a batch whose memory is used again too early is seen.
            found = list(dataset.follow(loader_of(dataset, num_workers), ahead=ahead))
            assert len(found) == len(expected) > 5
            assert all(itertools.starmap(equal, zip(found, expected, strict=True)))
            assert threads() == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_position_counts_what_training_got_whatever_is_ahead(root: Path, num_workers: int) -> None:
    with open_loader(root) as plain:
        expected = [batch["index"].tolist() for batch in loader_of(plain, num_workers)]
    for count in range(len(expected) + 1):
        with open_loader(root) as dataset, open_loader(root) as other:
            batches = dataset.follow(loader_of(dataset, num_workers), ahead=3)
            got = [batch["index"].tolist() for batch in itertools.islice(batches, count)]
            if count:  # before that nothing has begun, as without `ahead`
                time.sleep(0.02)  # for batches to be taken ahead
                state = json.loads(json.dumps(dataset.state_dict()))
                assert state["num_batches"] == count
                other.load_state_dict(state)
            batches.close()
            got += [batch["index"].tolist() for batch in other.follow(loader_of(other, num_workers), ahead=2)]
            assert got == expected


def test_persistent_workers_begin_every_epoch_whole_after_one_was_broken_off(root: Path) -> None:
    with open_loader(root) as plain, open_loader(root) as dataset:
        loader = loader_of(dataset, 2, persistent_workers=True)
        for epoch in range(4):
            plain.set_epoch(epoch)
            dataset.set_epoch(epoch)
            expected = [batch["index"].tolist() for batch in loader_of(plain, 2)]
            batches = dataset.follow(loader, ahead=2)
            if epoch % 2:
                assert [batch["index"].tolist() for batch in batches] == expected
            else:
                assert next(batches)["index"].tolist() == expected[0]
                batches.close()
            assert threads() == []


def test_waiting_is_counted_where_training_waits(root: Path) -> None:
    with open_loader(root) as dataset:
        loader = loader_of(dataset, 0, collate_fn=_slowly)
        for batch in dataset.follow(loader, ahead=1):
            time.sleep(0.1)
            assert batch
        waits = dataset.metrics()["batch_wait_s"]
    # Without `ahead` each wait would be the 50 ms of stacking; only the first one is.
    assert waits["p50"] < 0.05 <= waits["max"]


def _slowly(samples: list[Any]) -> list[int]:
    time.sleep(0.05)
    return [int(sample["index"]) for sample in samples]


def test_an_error_comes_behind_the_batches_before_it_and_once(root: Path) -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)
        raise KeyError("broken")

    found: list[int] = []
    batches = BatchesAhead(numbers(), 2)
    with pytest.raises(KeyError, match="broken"):
        found.extend(batches)
    # `extend` keeps what came before the error.
    assert found == [0, 1, 2]
    assert threads() == []
    assert list(batches) == []


def test_an_error_of_a_worker_reaches_training(root: Path) -> None:
    with open_loader(root) as dataset:
        batches = dataset.follow(loader_of(dataset, 2, collate_fn=_fail), ahead=2)
        with pytest.raises(ZeroDivisionError):
            next(batches)
    assert threads() == []


def _fail(samples: list[Any]) -> float:
    return 1 / 0


@settings(deadline=None, max_examples=60)
@given(length=st.integers(0, 30), count=st.integers(1, 5), taken=st.integers(0, 31))
def test_no_more_than_so_many_are_taken_ahead(length: int, count: int, taken: int) -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(length):
            made.append(number)
            yield number

    batches = BatchesAhead(numbers(), count)
    got = list(itertools.islice(batches, taken))
    assert got == list(range(min(taken, length)))
    time.sleep(0.005)
    assert len(made) <= len(got) + count
    batches.close()
    assert threads() == []
    assert list(batches) == []


def test_what_is_let_go_of_ends_its_thread_and_its_batches(root: Path) -> None:
    class Item:
        pass

    alive: list[weakref.ref[Item]] = []

    def items() -> Iterator[Item]:
        while True:
            item = Item()
            alive.append(weakref.ref(item))
            yield item
            del item

    batches = BatchesAhead(items(), 3)
    next(batches)
    del batches
    gc.collect()
    assert threads() == []
    assert [item() for item in alive] == [None] * len(alive)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_belongs_to_training_alone(root: Path, ahead: int) -> None:
    """Its memory is free when training lets go of it, and not only when the next one has come."""
    with open_loader(root) as dataset:
        batches = dataset.follow(loader_of(dataset, 0), ahead=ahead)
        batch = next(batches)
        alive = weakref.ref(batch["index"])
        assert alive() is not None
        del batch
        gc.collect()
        assert alive() is None
        batches.close()


@pytest.mark.parametrize("ahead", [-1, True, 1.5, "2"])
def test_what_is_no_number_of_batches_is_refused(root: Path, ahead: Any) -> None:
    with open_loader(root) as dataset, pytest.raises(UsageError, match="expected a number of batches"):
        dataset.follow(loader_of(dataset, 0), ahead=ahead)


def test_a_loader_that_counts_for_itself_is_refused(root: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is an optional extra")
    with open_loader(root) as dataset:
        loader = stateful.StatefulDataLoader(dataset, batch_size=4)
        with pytest.raises(UsageError, match="counts batches when they are taken"):
            dataset.follow(loader, ahead=1)


def test_a_position_that_would_skip_is_refused(root: Path) -> None:
    with open_loader(root, repeat=True) as dataset:
        with pytest.raises(UsageError, match="counts its samples when they are made"):
            dataset.follow(loader_of(dataset, 0), ahead=1)
        batches = dataset.follow(loader_of(dataset, 2), ahead=1)
        assert len(list(itertools.islice(batches, 30))) == 30, "workers go on with the next epoch"


PROGRAM = """
import sys, time
from torch.utils.data import DataLoader
from lrstream import StreamingLeRobotDataset

dataset = StreamingLeRobotDataset("test/dataset", root=sys.argv[1], repeat=False)
options = {"multiprocessing_context": "fork"} if int(sys.argv[2]) else {}
loader = DataLoader(dataset, batch_size=2, num_workers=int(sys.argv[2]), **options)
batches = dataset.follow(loader, ahead=2)
next(batches)
print("begun", flush=True)
while sys.argv[3] == "wait":
    time.sleep(0.05)  # short, since a signal that comes just before it does not end it
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_program_may_end_without_closing_anything(root: Path, num_workers: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), str(num_workers), "end"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr
    assert "Error" not in done.stderr


def test_ctrl_c_ends_it(root: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), "0", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == b"begun\n"
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=30)
    assert program.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in errors


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pictures_are_of_their_frame(av1_dataset: WrittenDataset, num_workers: int) -> None:
    """Batches that are let go of at once, so that their memory is used again while others are made."""
    root = av1_dataset.root
    with open_loader(root, return_uint8=True) as dataset:
        # From an iteration that keeps all of its samples, so that nothing is used again.
        expected = {int(sample["index"]): sample for sample in open_loader(root, return_uint8=True)}
        assert any(value.ndim == 3 for value in expected[0].values() if isinstance(value, torch.Tensor))
        for epoch in range(5):
            dataset.set_epoch(epoch)
            seen = 0
            for batch in dataset.follow(loader_of(dataset, num_workers, batch_size=3), ahead=1):
                for place, index in enumerate(batch["index"].tolist()):
                    seen += 1
                    for key, value in expected[index].items():
                        if isinstance(value, torch.Tensor):
                            assert torch.equal(batch[key][place], value), key
            assert seen == len(expected)
