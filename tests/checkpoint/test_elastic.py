"""Other ranks, workers and batches for the rest of an epoch: every frame once over all parts (LD-15)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lrstream.errors import UsageError
from lrstream.streaming.dataset import StreamingLeRobotDataset
from tests.support.loader import indices, open_loader
from tests.support.workers import batches_in_turn

NUM_FRAMES = 49
ALL = Counter(range(NUM_FRAMES))


class Job:
    """A training job of several ranks that all take the same number of batches."""

    def __init__(
        self, root: Path, world_size: int, num_workers: int, batch_size: int, **options: Any
    ) -> None:
        self.world_size, self.num_workers, self.batch_size = world_size, num_workers, batch_size
        self.ranks = [
            open_loader(root, rank=rank, world_size=world_size, **options) for rank in range(world_size)
        ]

    def load(self, state: dict[str, Any], **options: Any) -> None:
        for rank in self.ranks:
            rank.load_state_dict(state, **options)

    def take(self, num_batches: int | None) -> Counter[int]:
        """Frames that all ranks were given together; None = the rest."""
        given: Counter[int] = Counter()
        for rank in self.ranks:
            batches = batches_in_turn(rank, self.num_workers, self.batch_size)
            given.update(itertools.chain(*itertools.islice(batches, num_batches)))
        return given

    def state(self, num_batches: int, rank: int) -> dict[str, Any]:
        return self.ranks[rank].state_dict(
            batches=num_batches, batch_size=self.batch_size, num_workers=self.num_workers
        )


@pytest.mark.parametrize("strategy", ["remaining", "round_robin"])
@pytest.mark.parametrize("numbers", [(3, 1, 2), (1, 0, 4), (4, 2, 1), (2, 2, 3)])
def test_two_by_two_to_other_numbers(root: Path, numbers: tuple[int, int, int], strategy: str) -> None:
    places = random.Random(repr((numbers, strategy)))
    for stop in sorted(places.sample(range(10), 3)):
        before = Job(root, 2, 2, 3, sampling_strategy=strategy)
        for rank in before.ranks:
            rank.set_epoch(1)
        given = before.take(stop)
        state = before.state(stop, rank=places.randrange(2))
        after = Job(root, *numbers, sampling_strategy=strategy)
        after.load(state, elastic=True)
        rest = after.take(None)
        assert given + rest == ALL
        assert after.take(None) == ALL, "what follows is whole"
        for rank in after.ranks:
            rank.set_epoch(2)
        assert after.take(None) == ALL


def test_an_epoch_in_four_stages_with_a_plain_resume_between(root: Path) -> None:
    first = Job(root, 2, 2, 3)
    given = first.take(3)
    second = Job(root, 3, 1, 2)
    second.load(first.state(3, 0), elastic=True)
    given += second.take(2)
    state = second.state(2, 1)
    assert (state["num_batches"], len(state["earlier_stages"])) == (2, 1)

    again = Job(root, 3, 1, 2)
    again.load(state)
    middle = again.take(1)
    continued = Job(root, 3, 1, 2)
    continued.load(again.state(3, 2))
    third = Job(root, 1, 0, 1, episode_pool_size=2, byte_budget_gb=1)
    third.load(again.state(3, 2), elastic=True)
    assert continued.take(None) == ALL - given - middle
    samples = third.take(4)
    own = third.ranks[0].state_dict()
    assert (own["num_batches"], len(own["earlier_stages"])) == (4, 2)
    fourth = Job(root, 2, 1, 2)
    fourth.load(own, elastic=True)
    assert given + middle + samples + fourth.take(None) == ALL


def test_a_rank_may_get_nothing_of_the_rest(root: Path) -> None:
    one = Job(root, 1, 0, 1)
    one.take(48)
    nine = Job(root, 9, 1, 4)
    nine.load(one.state(48, 0), elastic=True)
    shares = [list(batches_in_turn(rank, 1, 4)) for rank in nine.ranks]
    assert sorted(map(len, shares)) == [0] * 8 + [1]


def test_the_end_of_an_epoch_leaves_nothing(root: Path) -> None:
    one = Job(root, 1, 2, 4)
    num_batches = len(list(batches_in_turn(one.ranks[0], 2, 4)))
    two = Job(root, 2, 0, 1)
    two.load(one.state(num_batches, 0), elastic=True)
    assert two.take(None) == Counter()
    with pytest.raises(UsageError, match=f"the epoch has {num_batches} batches"):
        two.load(one.state(num_batches + 1, 0), elastic=True)


def test_the_order_of_the_rest_is_a_pure_function(root: Path) -> None:
    state = Job(root, 2, 2, 3).state(4, 0)
    orders = []
    for _ in range(2):
        dataset = open_loader(root)
        dataset.load_state_dict(state, elastic=True)
        orders.append(indices(dataset))
    assert orders[0] == orders[1] != sorted(orders[0])


def test_the_state_without_elastic_is_refused(root: Path) -> None:
    state = Job(root, 2, 2, 3).state(4, 0)
    with pytest.raises(UsageError, match=r"world_size: saved 2, now 3.*elastic"):
        Job(root, 3, 1, 2).load(state)
    with pytest.raises(UsageError, match="seed: saved 42, now 1"):
        open_loader(root, seed=1).load_state_dict(state, elastic=True)


@pytest.mark.timeout(120)
def test_with_processes(root: Path) -> None:
    """What the simulated workers above cannot show: copies of the dataset in two workers."""
    before = open_loader(root)
    options: dict[str, Any] = {"collate_fn": indices, "multiprocessing_context": "fork"}
    loader: DataLoader[Any] = DataLoader(before, batch_size=4, num_workers=2, **options)
    given = list(itertools.islice(before.follow(loader), 5))
    state = before.state_dict()
    after = open_loader(root)
    after.load_state_dict(state, elastic=True)
    other: DataLoader[Any] = DataLoader(after, batch_size=3, num_workers=1, **options)
    rest = []
    for batch in after.follow(other):
        rest.append(batch)
        last = after.state_dict()
    assert Counter(itertools.chain(*given, *rest)) == ALL
    assert (last["num_batches"], len(last["earlier_stages"])) == (len(rest), 1)
    assert Counter(itertools.chain(*other)) == ALL


def test_videos_and_a_byte_budget(dataset_cache: Any) -> None:
    """Exact sizes take part in the plans that are run again."""
    tiny = dataset_cache.get("tiny")

    def opened(**options: Any) -> StreamingLeRobotDataset:
        return open_loader(tiny, return_uint8=True, **options)

    probe = opened()
    sizes = probe._sizes()
    budget = (int(sizes.max()) + 1) / 2**30
    before = opened(byte_budget_gb=budget, rank=0, world_size=1)
    given = indices(itertools.islice(before, 8))
    after = [opened(byte_budget_gb=2 * budget, rank=rank, world_size=2) for rank in range(2)]
    rest = []
    for rank in after:
        rank.load_state_dict(before.state_dict(), elastic=True)
        rest += indices(rank)
    assert sorted(given + rest) == list(range(tiny.num_frames))
    for dataset in (probe, before, *after):
        dataset.close()
