"""The arguments of a mixture, checked once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from lrstream.errors import UsageError
from lrstream.streaming.dataset import StreamingLeRobotDataset
from lrstream.streaming.settings import distributed_place

__all__ = ["checked_length", "checked_members", "checked_weights", "place_of"]


def checked_members(datasets: object) -> list[StreamingLeRobotDataset]:
    """The members as a list, or a refusal."""
    members = list(datasets) if isinstance(datasets, Iterable) else []
    if not members or not all(isinstance(dataset, StreamingLeRobotDataset) for dataset in members):
        raise UsageError(
            f"datasets is {datasets!r}, expected a list of at least one StreamingLeRobotDataset.",
            hint="Open each dataset first, with its own windows, transforms and selection.",
        )
    if any(dataset._settings.repeat for dataset in members):
        raise UsageError(
            "A member of a mixture was opened with repeat=True.",
            hint="Give repeat=True to the mixture instead; with weights members repeat in any case.",
        )
    return members


def place_of(
    members: Sequence[StreamingLeRobotDataset], rank: int | None, world_size: int | None
) -> tuple[int, int]:
    """Rank and world size: as given, else those that all members were opened for."""
    if rank is None and world_size is None:
        places = sorted({(dataset.rank, dataset.world_size) for dataset in members})
        if len(places) > 1:
            listing = ", ".join(f"rank {one} of {world}" for one, world in places)
            raise UsageError(
                f"The members of a mixture were opened for different places: {listing}.",
                hint="Give rank and world_size to the mixture; it shares all members out by itself. A member "
                "with fewer episodes than ranks is opened with rank=0, world_size=1.",
            )
        return places[0]
    return distributed_place(rank, world_size)


def checked_weights(
    weights: Iterable[float] | None, members: Sequence[StreamingLeRobotDataset], names: Sequence[str]
) -> tuple[float, ...] | None:
    """Weights as numbers, one for each member, or a refusal."""
    if weights is None:
        return None
    listed = list(weights) if isinstance(weights, Iterable) and not isinstance(weights, (str, bytes)) else []
    try:
        numbers = tuple(float(weight) for weight in listed)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != len(members) or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise UsageError(f"weights is {weights!r}, expected {len(members)} numbers of 0 or more.")
    if not any(numbers):
        raise UsageError("All weights are 0, so that nothing would be drawn.")
    for number, dataset, name in zip(numbers, members, names, strict=True):
        if number and not dataset.num_frames:
            raise UsageError(
                f"{name} has no selected episode, but weight {number}.", hint="Give it weight 0."
            )
    return numbers


def checked_length(
    samples_per_epoch: int | None, has_weights: bool, num_frames: int, world_size: int
) -> int | None:
    """Samples of an epoch of all ranks; None where every frame is delivered once."""
    if not has_weights:
        if samples_per_epoch is not None:
            raise UsageError(
                f"samples_per_epoch is {samples_per_epoch}, but without weights an epoch has every frame "
                "once.",
                hint="Give weights as well.",
            )
        return None
    if samples_per_epoch is None:
        return num_frames
    if isinstance(samples_per_epoch, bool) or not isinstance(samples_per_epoch, (int, np.integer)):
        raise UsageError(f"samples_per_epoch is {samples_per_epoch!r}, expected an integer.")
    if samples_per_epoch < world_size:
        raise UsageError(
            f"samples_per_epoch is {samples_per_epoch}, expected at least one for each of {world_size} ranks."
        )
    return int(samples_per_epoch)
