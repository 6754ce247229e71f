"""Every selected frame once per epoch, over all ranks and workers, in an order that is only the seed's."""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lrstream.demo import WrittenDataset
from lrstream.errors import UsageError
from lrstream.streaming.dataset import StreamingLeRobotDataset
from tests.support.loader import indices, open_loader, samples_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def rank_epoch(
    dataset: WrittenDataset, rank: int, world_size: int, num_workers: int, **options: Any
) -> tuple[int, list[int]]:
    """Frames that one rank promises, and what it delivers."""
    loader = open_loader(dataset, rank=rank, world_size=world_size, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # idle workers say so, which is tested below
        found = indices(samples_of(loader, num_workers))
    loader.close()
    return len(loader), found


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_union_of_all_ranks_and_workers_is_every_frame_once(
    standard_dataset: WrittenDataset, world_size: int, num_workers: int
) -> None:
    """Seven unequal episodes in seven Parquet files (K15)."""
    delivered: Counter[int] = Counter()
    for rank in range(world_size):
        promised, found = rank_epoch(standard_dataset, rank, world_size, num_workers)
        assert len(found) == promised
        delivered.update(found)
    assert delivered == Counter(range(standard_dataset.num_frames))


def test_one_episode_and_five_workers_leave_four_idle(standard_dataset: WrittenDataset) -> None:
    promised, found = rank_epoch(standard_dataset, 0, 1, 5, episodes=[2])
    assert promised == 31
    assert sorted(found) == list(range(30, 61))


def test_an_idle_worker_says_so(image_dataset: WrittenDataset) -> None:
    loader = open_loader(image_dataset, episodes=[0])
    reader = loader._process.get()
    with pytest.warns(
        RuntimeWarning, match="Worker 1 of rank 0 has no data: the rank has 1 episodes for 2 workers"
    ):
        pipeline = reader.start_epoch(
            reader.loader(loader._store, loader._layout, loader._open_tracks, 1e-4),
            loader._builder,
            loader._settings,
            loader._lengths,
            loader._positions,
            loader._positions,
            epoch=0,
            worker=1,
            num_workers=2,
        )
    assert pipeline is None


def test_a_rank_without_an_episode_fails_at_construction(tiny_dataset: WrittenDataset) -> None:
    for rank in range(4):
        with pytest.raises(UsageError, match="fewer ranks"):
            open_loader(tiny_dataset, rank=rank, world_size=4)


# -- order ------------------------------------------------------------------------------------------


def order(dataset: WrittenDataset, epoch: int = 0, **options: Any) -> list[int]:
    loader = open_loader(dataset, **options)
    loader.set_epoch(epoch)
    found = indices(loader)
    loader.close()
    return found


def test_order_depends_on_seed_and_epoch_alone(image_dataset: WrittenDataset) -> None:
    first = order(image_dataset, seed=5)
    assert first == order(image_dataset, seed=5)
    assert first == order(image_dataset, seed=5, decode_threads=5, decoded_queue_size=1, prefetch_episodes=0)
    assert first == order(image_dataset, seed=5, max_num_shards=1, delta_timestamps={"action": [0.0]})
    assert first != order(image_dataset, seed=6)
    assert first != order(image_dataset, seed=5, epoch=1)
    assert first != sorted(first)
    assert order(image_dataset, seed=None) == order(image_dataset, seed=42) == order(image_dataset)


def test_both_strategies_cover_and_differ(standard_dataset: WrittenDataset) -> None:
    by_strategy = {
        strategy: order(standard_dataset, sampling_strategy=strategy, episode_pool_size=3)
        for strategy in ("remaining", "round_robin")
    }
    for found in by_strategy.values():
        assert sorted(found) == list(range(standard_dataset.num_frames))
    assert by_strategy["remaining"] != by_strategy["round_robin"]


def test_round_robin_takes_one_of_each_episode_in_turn(standard_dataset: WrittenDataset) -> None:
    starts = np.cumsum([0, *standard_dataset.episode_lengths])
    found = order(standard_dataset, sampling_strategy="round_robin", episode_pool_size=7)
    episodes = np.searchsorted(starts, found, side="right") - 1
    for round_start in range(0, 7 * 5, 7):
        assert sorted(episodes[round_start : round_start + 7].tolist()) == list(range(7))


def test_the_order_of_the_selection_does_not_matter(tiny_dataset: WrittenDataset) -> None:
    assert order(tiny_dataset, episodes=[2, 0]) == order(tiny_dataset, episodes=[0, 2])


# -- epochs -----------------------------------------------------------------------------------------


def test_the_epoch_stays_as_it_is_set(image_dataset: WrittenDataset) -> None:
    loader = open_loader(image_dataset)
    assert loader.epoch == 0
    first, again = indices(loader), indices(loader)
    loader.set_epoch(3)
    third = indices(loader)
    assert first == again == order(image_dataset)
    assert third == order(image_dataset, epoch=3) != first
    for bad in (-1, 2**64):
        with pytest.raises(UsageError, match="epoch"):
            loader.set_epoch(bad)


@pytest.mark.parametrize("persistent", [True, False])
def test_set_epoch_reaches_the_workers(image_dataset: WrittenDataset, persistent: bool) -> None:
    dataset = open_loader(image_dataset)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=4, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    orders = []
    for epoch in (0, 1, 1, 0):
        dataset.set_epoch(epoch)
        orders.append([int(index) for batch in loader for index in batch["index"]])
    assert orders[0] == orders[3] != orders[1] == orders[2]
    for found in orders:
        assert sorted(found) == list(range(image_dataset.num_frames))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_repeat_goes_through_epoch_after_epoch(image_dataset: WrittenDataset, num_workers: int) -> None:
    loader = open_loader(image_dataset, repeat=True)
    loader.set_epoch(2)
    number = image_dataset.num_frames
    samples = samples_of(loader, num_workers)
    found = [int(next(samples)["index"]) for _ in range(2 * number)]
    del samples
    assert found[:number] == order(image_dataset, epoch=2)
    assert found[number:] == order(image_dataset, epoch=3)
    assert len(loader) == number


# -- DataLoader -------------------------------------------------------------------------------------


def test_default_batches_have_the_shapes_of_training(tiny_dataset: WrittenDataset) -> None:
    dataset = open_loader(tiny_dataset, delta_timestamps={"action": [0.0, 0.1]})
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    batches = list(loader)
    assert len(batches) == len(loader) == 6
    assert batches[0]["observation.images.front"].shape == (4, 3, 64, 96)
    assert batches[0]["action"].shape[:2] == (4, 2)
    assert batches[0]["index"].dtype == torch.int64
    assert len(batches[0]["task"]) == 4


def test_rank_and_world_size_come_from_the_surroundings(
    tiny_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (open_loader(tiny_dataset).rank, open_loader(tiny_dataset).world_size) == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    from_environment = open_loader(tiny_dataset)
    assert (from_environment.rank, from_environment.world_size) == (1, 2)
    given = open_loader(tiny_dataset, rank=0, world_size=3)
    assert (given.rank, given.world_size) == (0, 3)
    assert indices(from_environment) == indices(open_loader(tiny_dataset, rank=1, world_size=2))
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UsageError, match="give both"):
        open_loader(tiny_dataset)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="WORLD_SIZE is 'two'"):
        open_loader(tiny_dataset)


def _rank_of_gloo(rank: int, root: str, address: str, queue: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        with StreamingLeRobotDataset("test/dataset", root=root) as loader:
            queue.put((rank, loader.rank, loader.world_size, indices(loader)))
    finally:
        torch.distributed.destroy_process_group()


def test_two_gloo_ranks_share_the_frames(image_dataset: WrittenDataset, tmp_path: Any) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    address = f"file://{tmp_path / 'rendezvous'}"
    ranks = [
        context.Process(target=_rank_of_gloo, args=(rank, str(image_dataset.root), address, queue))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    results = [queue.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(30)
    assert {(rank, found, world) for rank, found, world, _ in results} == {(0, 0, 2), (1, 1, 2)}
    assert sorted(index for *_, found in results for index in found) == list(range(image_dataset.num_frames))
