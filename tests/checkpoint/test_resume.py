"""A saved position continues with exactly the next sample, and later epochs are whole (LD-10, K18)."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lrstream.demo import WrittenDataset
from lrstream.errors import UsageError
from lrstream.streaming.dataset import StreamingLeRobotDataset
from tests.support.loader import indices, open_loader
from tests.support.workers import SHORT, as_worker, batches_in_turn

NUM_FRAMES = 49


def loader_of(dataset: StreamingLeRobotDataset, num_workers: int, **options: Any) -> DataLoader[Any]:
    fork: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    return DataLoader(dataset, num_workers=num_workers, collate_fn=indices, **fork, **options)


def whole(root: Path, epoch: int, num_workers: int, batch_size: int, **options: Any) -> list[list[int]]:
    dataset = open_loader(root, **options)
    dataset.set_epoch(epoch)
    return list(batches_in_turn(dataset, num_workers, batch_size))


# -- in the training process ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["remaining", "round_robin", "gop"])
def test_every_sample_of_an_epoch_twice_in_a_row(short_root: Path, strategy: str) -> None:
    root, num_frames = short_root, sum(SHORT.episode_lengths)
    jumps = random.Random(1)
    writer = open_loader(root, sampling_strategy=strategy, episode_pool_size=3)
    writer.set_epoch(3)
    expected = indices(writer)
    reader = open_loader(root, sampling_strategy=strategy, episode_pool_size=3)
    iterator = iter(writer)
    for position in range(num_frames + 1):
        reader.load_state_dict(json.loads(json.dumps(writer.state_dict())))
        assert reader.epoch == 3
        assert reader.state_dict() == writer.state_dict(), "a position that was loaded is the position"
        rest = iter(reader)
        further = jumps.randrange(num_frames - position + 1)
        found = indices(itertools.islice(rest, further))
        again = open_loader(root, sampling_strategy=strategy, episode_pool_size=3)
        again.load_state_dict(reader.state_dict())
        assert found + indices(again) == expected[position:]
        assert indices(rest) == expected[position + further :]
        assert indices(reader) == expected, "an iteration that follows in the same epoch is whole"
        assert next(iterator, None) is not None or position == num_frames


def test_an_epoch_boundary_in_the_training_process(root: Path) -> None:
    dataset = open_loader(root)
    orders = {}
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders[epoch] = indices(dataset)
    assert orders[0] != orders[1]
    dataset.set_epoch(1)
    end = iter(dataset)
    assert indices(end) == orders[1]
    at_end = dataset.state_dict()
    dataset.set_epoch(2)
    before_next = dataset.state_dict()
    resumed = open_loader(root)
    resumed.load_state_dict(at_end)
    assert indices(resumed) == []
    resumed.set_epoch(2)
    assert indices(resumed) == orders[2]
    resumed.load_state_dict(before_next)
    assert (resumed.epoch, indices(resumed)) == (2, orders[2])


def test_choosing_another_epoch_forgets_the_position(root: Path) -> None:
    dataset = open_loader(root)
    dataset.resume(samples=20)
    dataset.set_epoch(5)
    assert sorted(indices(dataset)) == list(range(NUM_FRAMES))
    dataset.set_epoch(0)
    assert sorted(indices(dataset)) == list(range(NUM_FRAMES))


@pytest.mark.parametrize("position", [0, 30, 49, 70])
def test_repeating_iterations_continue_into_later_epochs(root: Path, position: int) -> None:
    dataset = open_loader(root, repeat=True)
    iterator = iter(dataset)
    expected = indices(itertools.islice(iterator, 150))
    other = open_loader(root, repeat=True)
    started = iter(other)
    indices(itertools.islice(started, position))
    state = other.state_dict()
    assert state["epoch"] == (1 if position > NUM_FRAMES else 0)
    resumed = open_loader(root, repeat=True)
    resumed.load_state_dict(state)
    assert indices(itertools.islice(resumed, 80)) == expected[position : position + 80]


# -- several workers --------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_workers", "batch_size"), [(1, 4), (2, 1), (2, 3), (3, 4), (12, 2)])
@pytest.mark.filterwarnings("ignore:Worker")
def test_every_batch_of_an_epoch(short_root: Path, num_workers: int, batch_size: int) -> None:
    root = short_root
    expected = whole(root, 1, num_workers, batch_size)
    assert sorted(itertools.chain(*expected)) == list(range(sum(SHORT.episode_lengths)))
    dataset = open_loader(root)
    dataset.set_epoch(1)
    for position in range(len(expected) + 1):
        dataset.resume(batches=position, batch_size=batch_size, num_workers=num_workers)
        assert list(batches_in_turn(dataset, num_workers, batch_size)) == expected[position:]
        if position % 4 == 0:
            assert list(batches_in_turn(dataset, num_workers, batch_size)) == expected
        samples = sum(map(len, expected[:position]))
        dataset.resume(samples=samples, batch_size=batch_size, num_workers=num_workers)
        assert next(batches_in_turn(dataset, num_workers, batch_size), []) == [
            *itertools.chain(*expected[position : position + 1])
        ]


def test_dropped_batches_count_as_training_counts_them(root: Path) -> None:
    dataset = open_loader(root)
    expected = list(batches_in_turn(dataset, 2, 4, drop_last=True))
    for position in range(len(expected) + 1):
        dataset.resume(batches=position, batch_size=4, num_workers=2, drop_last=True)
        assert list(batches_in_turn(dataset, 2, 4, drop_last=True)) == expected[position:]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_persistent", [True, False])
def test_128_anchors_stopped_at_124_and_at_60_of_the_next_epoch(
    dataset_128: WrittenDataset, is_persistent: bool
) -> None:
    root = dataset_128.root
    expected = [whole(root, epoch, 2, 4) for epoch in range(4)]

    def run(dataset: StreamingLeRobotDataset, first: int) -> Iterator[tuple[int, list[int]]]:
        loader = loader_of(dataset, 2, batch_size=4, persistent_workers=is_persistent)
        for epoch in range(first, 4):
            dataset.set_epoch(epoch)
            for batch in dataset.follow(loader):
                yield epoch, batch

    found: list[list[list[int]]] = [[], [], [], []]
    state: dict[str, Any] | None = None
    for stop in ((0, 31), (1, 15), None):
        dataset = open_loader(root)
        if state is not None:
            dataset.load_state_dict(state)
        for epoch, batch in run(dataset, dataset.epoch):
            found[epoch].append(batch)
            state = dataset.state_dict()
            assert (state["epoch"], state["num_batches"]) == (epoch, len(found[epoch]))
            if (epoch, len(found[epoch])) == stop:
                break
    assert found == expected
    assert state is not None
    three_ranks = open_loader(root, rank=0, world_size=3)
    with pytest.raises(UsageError, match="world_size: saved 1, now 3"):
        three_ranks.load_state_dict(state)


@pytest.mark.timeout(120)
def test_a_resumed_epoch_without_set_epoch_is_followed_by_whole_ones(root: Path) -> None:
    """Workers that are started anew would all find the loaded position again."""
    dataset = open_loader(root)
    dataset.resume(batches=9, batch_size=4, num_workers=2)
    loader = loader_of(dataset, 2, batch_size=4)
    expected = whole(root, 0, 2, 4)
    assert list(loader) == expected[9:]
    assert list(loader) == expected
    assert dataset.epoch == 0


@pytest.mark.timeout(120)
def test_workers_that_inherit_nothing_know_the_position(root: Path) -> None:
    dataset = open_loader(root)
    dataset.resume(batches=5, batch_size=4, num_workers=1)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=4, num_workers=1, collate_fn=indices, multiprocessing_context="forkserver"
    )
    expected = whole(root, 0, 1, 4)
    assert list(loader) == expected[5:]
    assert list(loader) == expected


# -- follow -----------------------------------------------------------------------------------------


def test_a_position_is_what_training_got_and_not_what_workers_made(root: Path) -> None:
    dataset = open_loader(root)
    loader = loader_of(dataset, 2, batch_size=4)
    batches = dataset.follow(loader)
    taken = [next(batches) for _ in range(3)]
    state = dataset.state_dict()
    assert {name: state[name] for name in ("num_batches", "batch_size", "num_workers", "drop_last")} == {
        "num_batches": 3,
        "batch_size": 4,
        "num_workers": 2,
        "drop_last": False,
    }
    assert taken == whole(root, 0, 2, 4)[:3]
    assert state == dataset.state_dict(batches=3, batch_size=4, num_workers=2)
    assert state == dataset.state_dict(samples=12, batch_size=4)
    waits = dataset.metrics()["batch_wait_s"]
    assert waits["count"] == 3
    assert 0 < waits["p50"] <= waits["p95"] <= waits["p99"] <= waits["max"]


def test_without_workers_another_batch_size_may_follow(root: Path) -> None:
    dataset = open_loader(root)
    iterator = iter(dataset)
    indices(itertools.islice(iterator, 12))
    state = dataset.state_dict()
    expected = whole(root, 0, 0, 1)
    resumed = open_loader(root)
    resumed.load_state_dict(state)
    batches = resumed.follow(loader_of(resumed, 0, batch_size=4))
    assert next(batches) == list(itertools.chain(*expected[12:16]))
    assert resumed.state_dict()["num_batches"] == 4
    resumed.load_state_dict(state)
    with pytest.raises(UsageError, match="batch_size: saved 1, now 5"):
        resumed.follow(loader_of(resumed, 0, batch_size=5))


def test_other_loaders_are_not_followed(root: Path) -> None:
    dataset, other = open_loader(root), open_loader(root)
    with pytest.raises(UsageError, match="not those of a DataLoader of this dataset"):
        dataset.follow(loader_of(other, 0, batch_size=4))


# -- refusals ---------------------------------------------------------------------------------------


def test_the_position_of_workers_is_not_guessed(root: Path) -> None:
    dataset = open_loader(root)
    with as_worker(dataset, 0, 2):
        next(iter(dataset))
    with pytest.raises(UsageError, match=r"dataset\.follow\(loader\)"):
        dataset.state_dict()
    assert dataset.state_dict(batches=1, batch_size=4)["num_workers"] == 2
    dataset.set_epoch(1)
    assert dataset.state_dict()["num_batches"] == 0, "the start of an epoch is no guess"


def test_a_state_without_format_version_is_refused_with_advice(root: Path) -> None:
    dataset = open_loader(root)
    for state in ({"epoch": 3, "offset": 12}, {}):
        with pytest.raises(UsageError, match=r"no format version.*Start the epoch anew"):
            dataset.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 7}, "seed: saved 42, now 7"),
        ({"sampling_strategy": "round_robin"}, "strategy: saved 'remaining', now 'round_robin'"),
        ({"episode_pool_size": 2}, "episode_pool_size: saved None, now 2"),
        ({"episodes": [0, 1, 2, 3]}, "selection_digest: saved"),
        ({"rank": 1, "world_size": 2}, "world_size: saved 1, now 2"),
        ({"byte_budget_gb": 1}, "byte_budget_bytes: saved 8589934592, now 1073741824"),
    ],
)
def test_every_difference_is_refused_with_both_values(
    root: Path, options: dict[str, Any], message: str
) -> None:
    state = open_loader(root).state_dict(batches=2, batch_size=4, num_workers=2)
    with pytest.raises(UsageError) as caught:
        open_loader(root, **options).load_state_dict(state)
    assert message in str(caught.value)


def test_numbers_of_the_data_loader_are_compared(root: Path) -> None:
    dataset = open_loader(root)
    state = dataset.state_dict(batches=2, batch_size=4, num_workers=2)
    with pytest.raises(UsageError, match="batch_size: saved 4, now 8"):
        dataset.load_state_dict(state, batch_size=8)
    dataset.load_state_dict(state)
    with pytest.raises(UsageError, match="batch_size: saved 4, now 8"):
        dataset.follow(loader_of(dataset, 2, batch_size=8))
    with pytest.raises(UsageError, match="num_workers: saved 2, now 3"):
        next(batches_in_turn(dataset, 3, 4))
    with pytest.raises(UsageError, match="num_workers: saved 2, now 0"):
        iter(dataset)


def test_a_moved_dataset_must_be_asked_for(small_dataset: WrittenDataset, tmp_path: Path) -> None:
    from tests.support.datasets import copy_dataset

    state = open_loader(small_dataset).state_dict(samples=9)
    moved = open_loader(copy_dataset(small_dataset, tmp_path / "moved"))
    with pytest.raises(UsageError, match="data_root: saved"):
        moved.load_state_dict(state)
    moved.load_state_dict(state, ignore=["data_root"])
    assert indices(moved) == indices(open_loader(small_dataset))[9:]
    assert moved.state_dict()["data_root"] == moved.root


@pytest.mark.timeout(60)
def test_workers_that_run_already_say_that_they_missed_the_state(root: Path) -> None:
    dataset = open_loader(root)
    loader = loader_of(dataset, 1, batch_size=8, persistent_workers=True)
    list(loader)
    dataset.resume(batches=1, batch_size=8, num_workers=1)
    with pytest.raises(UsageError, match="loaded after this DataLoader worker had been started"):
        list(loader)


def test_positions_that_cannot_be_are_refused(root: Path) -> None:
    dataset = open_loader(root)
    with pytest.raises(UsageError, match="the epoch has 49 batches"):
        dataset.resume(samples=50)
    with pytest.raises(UsageError, match="not a whole number of batches"):
        dataset.resume(samples=6, batch_size=4, num_workers=2)
    with pytest.raises(UsageError, match="either in batches or in samples"):
        dataset.resume()
    repeating = open_loader(root, repeat=True)
    with pytest.raises(UsageError, match="repeat=True"):
        repeating.resume(batches=2, batch_size=4)


def test_an_empty_selection_has_a_position_too(root: Path) -> None:
    dataset = open_loader(root, episodes=[])
    dataset.load_state_dict(dataset.state_dict())
    assert indices(dataset) == []


def test_states_go_through_torch_save(root: Path, tmp_path: Path) -> None:
    state = open_loader(root).state_dict(samples=9)
    torch.save({"loader": state}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert loaded["loader"] == state
