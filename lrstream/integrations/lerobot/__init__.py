"""lrstream as the dataset of `lerobot-train`, without a change to LeRobot.

On the command line, with LeRobot's own options::

    lrstream-lerobot-train --dataset.repo_id=OWNER/NAME --policy.type=act ...
    python -m lrstream.integrations.lerobot train --dataset.repo_id=OWNER/NAME --policy.type=act ...

In a training script of one's own: `make_dataset` takes LeRobot's configuration and gives the dataset.
LeRobot is no dependency: it is imported where its parts are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "LeRobotStreamingDataset",
    "main",
    "make_dataset",
    "make_train_eval_datasets",
    "streaming_training",
]

if TYPE_CHECKING:
    from lrstream.integrations.lerobot.factory import (
        LeRobotStreamingDataset,
        make_dataset,
        make_train_eval_datasets,
    )
    from lrstream.integrations.lerobot.launcher import main
    from lrstream.integrations.lerobot.seam import streaming_training

_HOMES = {
    "LeRobotStreamingDataset": "factory",
    "make_dataset": "factory",
    "make_train_eval_datasets": "factory",
    "main": "launcher",
    "streaming_training": "seam",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
