"""From LeRobot's configuration to a streaming dataset that its training can use."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lrstream.errors import LrstreamError, UsageError
from lrstream.integrations.lerobot.metadata import TrainingMeta
from lrstream.integrations.lerobot.options import LOADER_OPTIONS, storage_options
from lrstream.layout.info import load_info
from lrstream.layout.layout import load_layout
from lrstream.storage.home import lerobot_home
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from lrstream.streaming.dataset import StreamingLeRobotDataset

__all__ = [
    "LeRobotStreamingDataset",
    "delta_timestamps_of",
    "make_dataset",
    "make_train_eval_datasets",
    "recorded_here",
]

logger = logging.getLogger("lrstream.lerobot")


class LeRobotStreamingDataset(StreamingLeRobotDataset):
    """A `StreamingLeRobotDataset` whose metadata have all that LeRobot's training asks of them.

    Args:
        *args: As for `StreamingLeRobotDataset`.
        use_imagenet_stats: Whether ``meta.stats`` of pictures are ImageNet's mean and deviation.
        **options: As for `StreamingLeRobotDataset`.

    Attributes:
        meta: Also with ``tasks`` as a pandas table and ``has_language_columns``.
    """

    def __init__(self, *args: Any, use_imagenet_stats: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.meta: TrainingMeta = TrainingMeta(
            self._layout,
            repo_id=self.repo_id,
            revision=self.meta.revision,
            depth_unit=options.get("depth_output_unit", "mm"),
            use_imagenet_stats=use_imagenet_stats,
        )


def make_dataset(cfg: Any, **options: Any) -> LeRobotStreamingDataset:
    """The dataset that LeRobot's training configuration describes.

    Everything that `TrainPipelineConfig` and its `DatasetConfig` say is obeyed: ``repo_id``, ``repo_type``,
    ``root``, ``revision``, ``episodes``, ``exclude_episodes``, ``image_transforms``, ``use_imagenet_stats``,
    ``depth_output_unit`` and any ``streaming_*`` (those of them that the release has), the windows of the
    policy, ``tolerance_s`` and ``seed``. ``video_backend`` is ignored: lrstream decodes by itself.

    Args:
        cfg: `lerobot.configs.train.TrainPipelineConfig`, or anything with its attributes.
        **options: Arguments of `StreamingLeRobotDataset` that replace what the configuration says.

    Raises:
        UsageError: The configuration asks for what cannot be streamed.
        LrstreamError: As `StreamingLeRobotDataset`.
    """
    return LeRobotStreamingDataset(**_arguments(cfg, options))


def make_train_eval_datasets(
    cfg: Any, **options: Any
) -> tuple[LeRobotStreamingDataset, LeRobotStreamingDataset | None]:
    """The dataset to train with, and that of the episodes held out where ``dataset.eval_split`` is not 0.

    Of every task the last ``ceil(n x eval_split)`` of its n episodes are held out, as by LeRobot.

    Args:
        cfg: As for `make_dataset`.
        **options: As for `make_dataset`.

    Raises:
        UsageError: Nothing is left to train with, or ``max_eval_samples`` is set: episodes are read whole.
    """
    arguments = _arguments(cfg, options)
    whole = LeRobotStreamingDataset(**arguments)
    share = float(getattr(cfg.dataset, "eval_split", 0.0))
    if not share:
        return whole, None
    if getattr(cfg, "max_eval_samples", 0):
        raise UsageError(
            f"max_eval_samples is {cfg.max_eval_samples}, but held-out episodes are streamed whole.",
            hint="Leave it at 0 and choose dataset.eval_split instead.",
        )
    kept, held_out = _split(whole, share)
    if not kept:
        raise UsageError(
            f"dataset.eval_split={share} leaves no episode of {len(whole.episodes)} to train with."
        )
    logger.info("%d episodes to train with, %d held out (eval_split %s)", len(kept), len(held_out), share)
    own: dict[str, Any] = {"exclude_episodes": None}
    return (
        LeRobotStreamingDataset(**arguments | own | {"episodes": kept}),
        LeRobotStreamingDataset(**arguments | own | {"episodes": held_out, "image_transforms": None}),
    )


def _split(dataset: LeRobotStreamingDataset, share: float) -> tuple[list[int], list[int]]:
    """Episodes to train with, and those to hold out."""
    table = dataset._layout.episodes
    by_task: dict[str, list[int]] = {}
    for episode in dataset.episodes:
        tasks = table.tasks[table.position(episode)]
        by_task.setdefault(tasks[0] if tasks else "", []).append(episode)
    kept: list[int] = []
    held_out: list[int] = []
    for episodes in by_task.values():
        stop = len(episodes) - math.ceil(len(episodes) * share)
        kept += episodes[:stop]
        held_out += episodes[stop:]
    return kept, held_out


def delta_timestamps_of(policy: Any, features: Iterable[str], fps: float) -> dict[str, list[float]] | None:
    """The windows that a policy (or reward model) is trained with, in seconds.

    Args:
        policy: Its configuration, with ``observation_delta_indices``, ``action_delta_indices`` and
            ``reward_delta_indices`` in frames, each possibly None.
        features: Features of the dataset.
        fps: Frames per second.

    Returns:
        Seconds around the anchor by feature; None where no feature has a window.
    """
    windows: dict[str, list[float]] = {}
    for key in features:
        indices = None
        if key == "next.reward":
            indices = getattr(policy, "reward_delta_indices", None)
        elif key == "action":
            indices = getattr(policy, "action_delta_indices", None)
        elif key.startswith("observation."):
            indices = getattr(policy, "observation_delta_indices", None)
        if indices is not None:
            windows[key] = [index / fps for index in indices]
    return windows or None


def _arguments(cfg: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the dataset, those of `options` last."""
    data = cfg.dataset
    if not isinstance(data.repo_id, str):
        raise UsageError(f"dataset.repo_id is {data.repo_id!r}, expected the name of one dataset.")
    backend = getattr(data, "video_backend", None)
    if backend is not None:
        logger.debug("dataset.video_backend=%s is ignored: lrstream decodes by itself.", backend)
    arguments: dict[str, Any] = {
        "repo_id": data.repo_id,
        "root": data.root,
        "episodes": data.episodes,
        "revision": data.revision,
        "image_transforms": _image_transforms(data),
        "use_imagenet_stats": bool(getattr(data, "use_imagenet_stats", False)),
        "tolerance_s": getattr(cfg, "tolerance_s", 1e-4),
        "seed": getattr(cfg, "seed", None),
        # Releases that have this option convert uint8 to [0, 1] in the training loop.
        "return_uint8": hasattr(data, "return_uint8"),
        "storage_options": storage_options(),
    }
    for name in LOADER_OPTIONS:
        for there in (name, f"streaming_{name}"):
            value = getattr(data, there, None)
            if value is not None:
                arguments[name] = value
    arguments |= options
    if arguments["root"] is None:
        arguments["root"] = recorded_here(
            arguments["repo_id"], arguments["revision"], arguments.get("repo_type", "dataset")
        )
    if "delta_timestamps" not in options:
        arguments["delta_timestamps"] = _windows(cfg, arguments)
    return arguments


def _windows(cfg: Any, arguments: Mapping[str, Any]) -> dict[str, list[float]] | None:
    policy = getattr(cfg, "trainable_config", None) or cfg.policy
    source = arguments["repo_id"] if arguments["root"] is None else arguments["root"]
    location = parse_location(
        source, repo_type=arguments.get("repo_type", "dataset"), revision=arguments["revision"]
    )
    # Only info.json: the dataset itself reads the rest, once.
    info = load_info(open_store(location, storage_options=arguments["storage_options"]))
    delivered = arguments.get("features")
    keys = [key for key in info.features if delivered is None or key in delivered]
    return delta_timestamps_of(policy, keys, info.fps)


def recorded_here(repo_id: str, revision: str | None, repo_type: str) -> Path | None:
    """Where LeRobot keeps a dataset of this name, if it is complete there; None otherwise.

    LeRobot looks there before it asks the Hub, also for a dataset that was recorded here and never pushed.
    It also leaves the metadata, or some of the episodes, of datasets from the Hub there: these are streamed.
    """
    root = lerobot_home() / repo_id
    if revision is not None or repo_type != "dataset" or not (root / "meta" / "info.json").is_file():
        return None
    try:
        layout = load_layout(open_store(parse_location(root)))
    except LrstreamError as error:
        logger.info("%s cannot be used (%s); reading %s from the Hub.", root, error, repo_id)
        return None
    if not all((root / path).is_file() for path in (*layout.episodes.data_files, *layout.video_files())):
        logger.info("%s is not complete; reading %s from the Hub.", root, repo_id)
        return None
    logger.info("Reading %s from %s", repo_id, root)
    return root


def _image_transforms(data: Any) -> Callable[..., Any] | None:
    config = getattr(data, "image_transforms", None)
    if config is None or not getattr(config, "enable", False):
        return None
    # Its own modules differ in where they keep the class; this one has it in every release.
    transforms: Callable[..., Any] = importlib.import_module("lerobot.datasets.factory").ImageTransforms(
        config
    )
    return transforms
