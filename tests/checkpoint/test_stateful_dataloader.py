"""torchdata's StatefulDataLoader keeps the position of every worker by itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from lrstream.errors import UsageError
from tests.support.loader import indices, open_loader
from tests.support.workers import batches_in_turn

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is an optional extra")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def opened(root: Path, num_workers: int, batch_size: int = 4, **options: Any) -> tuple[Any, Any]:
    """A dataset, and a StatefulDataLoader of it."""
    is_persistent = options.pop("persistent_workers", False)
    dataset = open_loader(root, **options)
    fork: dict[str, Any] = (
        {"multiprocessing_context": "fork", "persistent_workers": is_persistent} if num_workers else {}
    )
    loader = stateful.StatefulDataLoader(
        dataset, batch_size=batch_size, num_workers=num_workers, collate_fn=indices, **fork
    )
    return dataset, loader


def whole(root: Path, epoch: int, num_workers: int) -> list[list[int]]:
    dataset = open_loader(root)
    dataset.set_epoch(epoch)
    return list(batches_in_turn(dataset, num_workers, 4))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("position", [0, 1, 6, 13])
def test_the_next_batch_is_the_next_one(root: Path, num_workers: int, position: int) -> None:
    expected = whole(root, 2, num_workers)
    dataset, loader = opened(root, num_workers)
    dataset.set_epoch(2)
    assert list(itertools.islice(loader, position)) == expected[:position]
    state = json.loads(json.dumps(loader.state_dict()))
    other, resumed = opened(root, num_workers)
    resumed.load_state_dict(state)
    assert list(resumed) == expected[position:]
    assert other.epoch == 2, "the state says which epoch it is of"
    other.set_epoch(3)
    assert list(resumed) == whole(root, 3, num_workers)


@pytest.mark.parametrize("is_persistent", [True, False])
def test_twice_in_a_row_and_into_the_next_epoch(root: Path, is_persistent: bool) -> None:
    expected = whole(root, 0, 2)
    _, loader = opened(root, 2, persistent_workers=is_persistent)
    found = list(itertools.islice(loader, 4))
    for further in (3, 2):
        state = loader.state_dict()
        dataset, loader = opened(root, 2, persistent_workers=is_persistent)
        loader.load_state_dict(state)
        found += list(itertools.islice(loader, further))
    state = loader.state_dict()
    dataset, loader = opened(root, 2, persistent_workers=is_persistent)
    loader.load_state_dict(state)
    assert found + list(loader) == expected
    for epoch in (1, 2):
        dataset.set_epoch(epoch)
        assert list(loader) == whole(root, epoch, 2)


def test_repeating_workers_continue_each_in_its_own_epoch(root: Path) -> None:
    """The workers' shares differ in length, so they are in different epochs."""
    _, loader = opened(root, 2, repeat=True)
    expected = list(itertools.islice(loader, 40))
    _, other = opened(root, 2, repeat=True)
    list(itertools.islice(other, 13))
    state = other.state_dict()
    _, resumed = opened(root, 2, repeat=True)
    resumed.load_state_dict(state)
    assert list(itertools.islice(resumed, 27)) == expected[13:]


def test_other_settings_are_refused(root: Path) -> None:
    _, loader = opened(root, 1)
    list(itertools.islice(loader, 2))
    state = loader.state_dict()
    _, other = opened(root, 1, seed=5)
    other.load_state_dict(state)
    with pytest.raises(UsageError, match="seed: saved 42, now 5"):
        list(other)


def test_the_state_of_one_worker_is_for_that_worker_alone(root: Path) -> None:
    _, loader = opened(root, 1)
    list(itertools.islice(loader, 2))
    workers = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    state = next(iter(workers.values()))["dataset_state"]
    assert (state["worker"], state["samples"]) == (0, 8)
    with pytest.raises(UsageError, match="state of one DataLoader worker"):
        open_loader(root).load_state_dict(state)


def test_it_continues_after_an_elastic_resume(root: Path) -> None:
    before = open_loader(root)
    given = indices(itertools.islice(before, 10))
    dataset, loader = opened(root, 2)
    dataset.load_state_dict(before.state_dict(), elastic=True)
    given += itertools.chain(*itertools.islice(loader, 5))
    state = loader.state_dict()
    _, resumed = opened(root, 2)
    resumed.load_state_dict(state)
    given += itertools.chain(*resumed)
    assert sorted(given) == list(range(49))
