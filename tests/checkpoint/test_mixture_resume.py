"""Positions of mixtures: any sample, any batch, other numbers, and what is refused (LD-10, LD-15)."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lrstream import MixtureDataset
from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.errors import UsageError
from tests.support.loader import open_loader
from tests.support.mixtures import anchors, in_turn, mix

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:Worker", "ignore:Samples deviate")]

WEIGHTS = {"weights": [1, 3], "samples_per_epoch": 61}
CAMERA = DemoCamera("observation.images.front", 16, 96, kind="image")


@pytest.fixture(scope="module")
def pair(small_dataset: WrittenDataset, tmp_path_factory: pytest.TempPathFactory) -> list[WrittenDataset]:
    """49 frames in ten episodes, and 19 in four."""
    spec = DemoSpec((5, 3, 7, 4), (CAMERA,), fps=10)
    return [small_dataset, write_dataset(tmp_path_factory.mktemp("other") / "dataset", spec)]


@pytest.fixture(scope="module")
def short_pair(tmp_path_factory: pytest.TempPathFactory) -> list[WrittenDataset]:
    """15 frames in four episodes, and 9 in three."""
    base = tmp_path_factory.mktemp("short")
    return [
        write_dataset(base / str(number), DemoSpec(lengths, (CAMERA,), fps=10))
        for number, lengths in enumerate(((4, 2, 6, 3), (3, 5, 1)))
    ]


@pytest.mark.parametrize("options", [{}, WEIGHTS], ids=["every frame", "weights"])
def test_the_next_sample_is_the_next_one_at_every_sample(
    short_pair: list[WrittenDataset], options: dict[str, Any]
) -> None:
    options = options | ({"samples_per_epoch": 25} if options else {})
    dataset = mix(short_pair, **options)
    dataset.set_epoch(2)
    expected = anchors(dataset)
    states = []
    for _ in iter(dataset):
        states.append(json.loads(json.dumps(dataset.state_dict())))
    assert len(states) == len(expected) == len(dataset)
    other = mix(short_pair, **options)
    for number, state in enumerate(states, 1):
        other.load_state_dict(state)
        assert other.epoch == 2
        assert anchors(other) == expected[number:]
    # The epoch after a resumed one is whole.
    other.load_state_dict(states[5])
    anchors(other)
    other.set_epoch(3)
    dataset.set_epoch(3)
    assert anchors(other) == anchors(dataset)


@pytest.mark.parametrize("options", [{}, WEIGHTS], ids=["every frame", "weights"])
@pytest.mark.parametrize(("num_workers", "batch_size"), [(3, 3)])
def test_batches_of_an_epoch_from_many_positions(
    pair: list[WrittenDataset], options: dict[str, Any], num_workers: int, batch_size: int
) -> None:
    dataset = mix(pair, **options)
    dataset.set_epoch(1)
    expected = in_turn(dataset, num_workers, batch_size)
    assert sum(map(len, expected)) == len(dataset)
    assert len(expected) == dataset.partition_report(num_workers).batches_per_rank(
        batch_size, drop_last=False
    )
    for position in range(0, len(expected) + 1, 4):
        dataset.resume(batches=position, batch_size=batch_size, num_workers=num_workers)
        assert in_turn(dataset, num_workers, batch_size) == expected[position:]


@pytest.mark.timeout(120)
def test_follow_knows_what_training_got(pair: list[WrittenDataset]) -> None:
    def loader_of(dataset: MixtureDataset) -> DataLoader[Any]:
        return DataLoader(
            dataset, batch_size=4, num_workers=2, collate_fn=anchors, multiprocessing_context="fork"
        )

    dataset = mix(pair)
    expected = in_turn(mix(pair), 2, 4)
    batches = dataset.follow(loader_of(dataset))
    assert [next(batches) for _ in range(5)] == expected[:5]
    state = dataset.state_dict()
    assert (state["num_batches"], state["num_workers"]) == (5, 2)
    assert dataset.metrics()["batch_wait_s"]["count"] == 5
    other = mix(pair)
    other.load_state_dict(state)
    assert list(other.follow(loader_of(other))) == expected[5:]


@pytest.mark.parametrize("options", [{}, WEIGHTS], ids=["every frame", "weights"])
def test_repeating_iterations_continue_into_later_epochs(
    pair: list[WrittenDataset], options: dict[str, Any]
) -> None:
    expected = anchors(itertools.islice(mix(pair, repeat=True, **options), 160))
    dataset = mix(pair, repeat=True, **options)
    iterator = iter(dataset)
    anchors(itertools.islice(iterator, 125))
    other = mix(pair, repeat=True, **options)
    other.load_state_dict(dataset.state_dict())
    assert anchors(itertools.islice(other, 30)) == expected[125:155]


# -- StatefulDataLoader -----------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize(("num_workers", "options"), [(0, {}), (2, {}), (2, WEIGHTS)])
def test_a_stateful_data_loader_keeps_the_position(
    pair: list[WrittenDataset], num_workers: int, options: dict[str, Any]
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is an optional extra")
    fork: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}

    def opened() -> tuple[MixtureDataset, Any]:
        dataset = mix(pair, **options)
        return dataset, stateful.StatefulDataLoader(
            dataset, batch_size=4, num_workers=num_workers, collate_fn=anchors, **fork
        )

    expected = in_turn(mix(pair, **options), num_workers, 4)
    _, loader = opened()
    assert list(itertools.islice(loader, 7)) == expected[:7]
    state = json.loads(json.dumps(loader.state_dict()))
    dataset, resumed = opened()
    resumed.load_state_dict(state)
    assert list(resumed) == expected[7:]
    dataset.set_epoch(1)
    again = mix(pair, **options)
    again.set_epoch(1)
    assert list(resumed) == in_turn(again, num_workers, 4)


# -- other numbers ----------------------------------------------------------------------------------


def delivered(pair: list[WrittenDataset], world_size: int, num_workers: int, batches: int) -> Counter[Any]:
    """What all ranks got in so many batches of three."""
    found: Counter[Any] = Counter()
    for rank in range(world_size):
        dataset = mix(pair, rank=rank, world_size=world_size)
        for batch in in_turn(dataset, num_workers, 3)[:batches]:
            found.update(batch)
    return found


@pytest.mark.parametrize(("before", "after"), [((1, 0), (3, 1)), ((3, 2), (2, 3))])
def test_the_rest_of_an_epoch_with_other_numbers(
    pair: list[WrittenDataset], before: tuple[int, int], after: tuple[int, int]
) -> None:
    found = delivered(pair, *before, batches=3)
    state = mix(pair, rank=0, world_size=before[0]).state_dict(batches=3, batch_size=3, num_workers=before[1])
    whole = Counter((member, index) for member, one in enumerate(pair) for index in range(one.num_frames))
    second: dict[str, Any] | None = None
    partly = Counter(found)
    for rank in range(after[0]):
        dataset = mix(pair, rank=rank, world_size=after[0])
        with pytest.raises(UsageError, match="saved"):
            dataset.load_state_dict(state)
        dataset.load_state_dict(state, elastic=True)
        batches = in_turn(dataset, after[1], 3)
        found.update(itertools.chain(*batches))
        partly.update(itertools.chain(*batches[:2]))
        second = dataset.state_dict(batches=2, batch_size=3, num_workers=after[1])
    assert found == whole
    # Twice in one epoch.
    last = mix(pair)
    last.load_state_dict(second or {}, elastic=True)
    partly.update(anchors(last))
    assert partly == whole
    last.set_epoch(1)
    assert Counter(anchors(last)) == whole


def test_weights_refuse_other_numbers_with_the_reason(pair: list[WrittenDataset]) -> None:
    state = mix(pair, **WEIGHTS).state_dict(samples=5)
    with pytest.raises(UsageError, match="in the middle of passes of their own"):
        mix(pair, **WEIGHTS).load_state_dict(state, elastic=True)


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 7}, "seed: saved 42, now 7"),
        ({"weights": [1, 1]}, r"weights: saved None, now \[1.0, 1.0\]"),
        ({"byte_budget_gb": 1}, "byte_budget_bytes: saved 8589934592, now 1073741824"),
        ({"world_size": 2}, "world_size: saved 1, now 2"),
    ],
)
def test_every_difference_is_refused(
    pair: list[WrittenDataset], options: dict[str, Any], message: str
) -> None:
    state = mix(pair).state_dict(samples=5)
    with pytest.raises(UsageError, match=message):
        mix(pair, **options).load_state_dict(state)


def test_other_members_are_named(pair: list[WrittenDataset]) -> None:
    state = mix(pair).state_dict(samples=5)
    with pytest.raises(UsageError, match="mixture of 2 datasets, but this one has 3"):
        mix([*pair, pair[0]]).load_state_dict(state)
    with pytest.raises(UsageError, match=r"member 0 .*: .*data_root: saved"):
        mix(list(reversed(pair))).load_state_dict(state)
    for options, message in (
        ({"episodes": [0, 1]}, "selection_digest"),
        ({"sampling_strategy": "round_robin"}, "strategy: saved 'remaining', now 'round_robin'"),
        ({"episode_pool_size": 3}, "episode_pool_size: saved None, now 3"),
    ):
        members = [open_loader(pair[0]), open_loader(pair[1], **options)]
        with pytest.raises(UsageError, match=rf"member 1 .*: .*{message}"):
            MixtureDataset(members).load_state_dict(state)
    longer = mix(pair, **WEIGHTS).state_dict(samples=5)
    with pytest.raises(UsageError, match="samples_per_epoch: saved 61, now 70"):
        mix(pair, **WEIGHTS | {"samples_per_epoch": 70}).load_state_dict(longer)


def test_states_of_single_datasets_and_of_mixtures_are_told_apart(pair: list[WrittenDataset]) -> None:
    single = open_loader(pair[0])
    with pytest.raises(UsageError, match="of a single dataset, not of a mixture"):
        mix(pair).load_state_dict(single.state_dict())
    with pytest.raises(UsageError, match="of a mixture"):
        single.load_state_dict(mix(pair).state_dict())
    with pytest.raises(UsageError, match="no format version"):
        mix(pair).load_state_dict({})
    with pytest.raises(UsageError, match="expected what state_dict gave"):
        mix(pair).load_state_dict({**mix(pair).state_dict(), "mixture": 3})


def test_a_moved_member_must_be_asked_for(pair: list[WrittenDataset], tmp_path: Path) -> None:
    from tests.support.datasets import copy_dataset

    state = mix(pair).state_dict(samples=9)
    moved = MixtureDataset([open_loader(pair[0]), open_loader(copy_dataset(pair[1], tmp_path / "moved"))])
    with pytest.raises(UsageError, match=r"member 1 .*data_root: saved"):
        moved.load_state_dict(state)
    moved.load_state_dict(state, ignore=["data_root"])
    assert anchors(moved) == anchors(mix(pair))[9:]
