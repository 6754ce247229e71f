"""The loader's options, checked once, and the process's place in the training job."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from lrstream.errors import UsageError
from lrstream.streaming.pictures import check_depth_unit
from lrstream.streaming.planning import PlanSettings
from lrstream.streaming.samples import ReturnUint8
from lrstream.streaming.strategies import SamplingStrategy, check_strategy

__all__ = ["LoaderSettings", "VideoDecoderName", "distributed_place"]

_GIB = 2**30

VideoDecoderName = Literal["pyav", "torchcodec"]


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Options of the loader; the meaning of each is in `StreamingLeRobotDataset`. Picklable.

    Raises:
        UsageError: A value cannot work.
    """

    seed: int | None
    sampling_strategy: SamplingStrategy
    episode_pool_size: int | None
    prefetch_episodes: int
    byte_budget_gb: float
    reservoir_gb: float
    decode_threads: int
    decoded_queue_size: int
    video_decoder_cache_size: int | None
    max_num_shards: int
    return_uint8: ReturnUint8
    depth_output_unit: str
    tolerance_s: float
    repeat: bool
    rank: int
    world_size: int
    picture_windows: str = ""
    decoder: VideoDecoderName = "pyav"

    def __post_init__(self) -> None:
        for name, least in (
            ("prefetch_episodes", 0),
            ("decode_threads", 1),
            ("decoded_queue_size", 1),
            ("max_num_shards", 1),
            ("episode_pool_size", 1),
            ("video_decoder_cache_size", 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("episode_pool_size", "video_decoder_cache_size"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name} is {value!r}, expected an integer of at least {least}.")
        for name in ("byte_budget_gb", "reservoir_gb", "tolerance_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise UsageError(f"{name} is {value!r}, expected a number.")
        for name in ("byte_budget_gb", "reservoir_gb"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}, expected more than 0.")
        if self.tolerance_s < 0:
            raise UsageError(f"tolerance_s is {self.tolerance_s}, expected 0 or more.")
        if self.return_uint8 not in (True, False, "all"):
            raise UsageError(f"return_uint8 is {self.return_uint8!r}, expected True, False or 'all'.")
        if self.decoder not in get_args(VideoDecoderName):
            raise UsageError(f"decoder is {self.decoder!r}, expected 'pyav' or 'torchcodec'.")
        check_strategy(self.sampling_strategy)
        check_depth_unit(self.depth_output_unit)
        self.plan_settings(epoch=0, num_workers=0)

    @property
    def byte_budget_bytes(self) -> int:
        """Byte budget of the rank; one GB of the option is 2**30 bytes."""
        return max(1, int(self.byte_budget_gb * _GIB))

    @property
    def reservoir_bytes(self) -> int:
        """Decoded pictures that the rank keeps; one GB of the option is 2**30 bytes."""
        return max(1, int(self.reservoir_gb * _GIB))

    def plan_settings(self, *, epoch: int, num_workers: int, stage: int = 0) -> PlanSettings:
        """What decides the order of an epoch, or of a later stage of one (LD-15)."""
        return PlanSettings(
            seed=self.seed,
            epoch=epoch,
            world_size=self.world_size,
            num_workers=num_workers,
            strategy=self.sampling_strategy,
            episode_pool_size=self.episode_pool_size,
            byte_budget_bytes=self.byte_budget_bytes,
            stage=stage,
            reservoir_bytes=self.reservoir_bytes,
            picture_windows=self.picture_windows,
        )

    def plan_fields(self) -> dict[str, Any]:
        """What of these a loader state records, by its names there."""
        plan = self.plan_settings(epoch=0, num_workers=0)
        names = (
            "seed",
            "epoch",
            "world_size",
            "strategy",
            "episode_pool_size",
            "byte_budget_bytes",
            "reservoir_bytes",
            "picture_windows",
        )
        return {name: getattr(plan, name) for name in names}

    def num_decoders(self, *, pool_size: int, num_cameras: int, num_streams: int) -> int:
        """Most open decoders of each busy worker: one for every camera of its pool, or its part of what
        was asked for."""
        if self.video_decoder_cache_size is None:
            return max(1, pool_size * num_cameras)
        return max(1, self.video_decoder_cache_size // num_streams)


def distributed_place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, else of torch.distributed, else of the environment, else 0 of 1.

    Raises:
        UsageError: Only one of them is given, or they contradict each other.
    """
    if rank is None and world_size is None:
        rank, world_size = _surroundings()
    if rank is None or world_size is None:
        raise UsageError(
            f"rank is {rank} and world_size is {world_size}: give both of them, or neither "
            "(then torch.distributed or the variables RANK and WORLD_SIZE say it)."
        )
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise UsageError(f"{name} is {value!r}, expected an integer.")
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"Rank {rank} is outside of a world of {world_size} ranks.")
    return int(rank), int(world_size)


def _surroundings() -> tuple[int | None, int | None]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    values = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if all(value is None for value in values.values()):
        return 0, 1
    numbers: list[int | None] = []
    for name, value in values.items():
        if value is None:
            numbers.append(None)
            continue
        try:
            numbers.append(int(value))
        except ValueError as error:
            raise UsageError(f"The environment variable {name} is {value!r}, expected an integer.") from error
    return numbers[0], numbers[1]


def check_timeout(name: str, seconds: object) -> None:
    """Refuse a number of seconds that nobody can wait."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise UsageError(f"{name} is {seconds!r}, expected seconds, 0 or more.")


def check_transforms(transforms: Callable[..., Any] | None) -> None:
    """Refuse image transforms that cannot be called."""
    if transforms is not None and not callable(transforms):
        raise UsageError(f"image_transforms is {transforms!r}, expected a callable or None.")


def check_mapping(name: str, value: object) -> None:
    """Refuse an argument that is neither a mapping nor None."""
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{name} is {value!r}, expected a mapping or None.")
