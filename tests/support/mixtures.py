"""Mixtures in tests: small members, and their samples by (member, index)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from lrstream import MixtureDataset, StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from tests.support.loader import open_loader
from tests.support.workers import as_worker

__all__ = ["anchors", "in_turn", "mix", "samples_in_turn"]

Anchor = tuple[int, int]


def mix(written: Iterable[WrittenDataset], *args: Any, **options: Any) -> MixtureDataset:
    """A mixture of datasets, each opened as it is; with ``rank`` for all of them."""
    members: list[StreamingLeRobotDataset] = [open_loader(one, rank=0, world_size=1) for one in written]
    return MixtureDataset(members, *args, **({"rank": 0, "world_size": 1} | options))


def anchors(samples: Iterable[dict[str, Any]]) -> list[Anchor]:
    """(member, index) of samples, in the order of delivery."""
    return [(int(sample["dataset_index"]), int(sample["index"])) for sample in samples]


def samples_in_turn(
    dataset: MixtureDataset, num_workers: int, batch_size: int
) -> Iterator[list[dict[str, Any]]]:
    """Batches of samples as a DataLoader takes them from its workers, in one process."""
    readers: list[Iterator[dict[str, Any]]] = []
    for number in range(max(1, num_workers)):
        with as_worker(dataset, number, num_workers):
            readers.append(iter(dataset))
    while readers:
        for reader in list(readers):
            batch = list(itertools.islice(reader, batch_size))
            if batch:
                yield batch
            else:
                readers.remove(reader)


def in_turn(dataset: MixtureDataset, num_workers: int, batch_size: int) -> list[list[Anchor]]:
    """The same as (member, index)."""
    return [anchors(batch) for batch in samples_in_turn(dataset, num_workers, batch_size)]
