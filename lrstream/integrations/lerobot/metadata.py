"""`dataset.meta` with what LeRobot's training, policies and model cards ask of it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from lrstream.errors import DatasetFormatError
from lrstream.layout.layout import STATS_PATH, DatasetLayout
from lrstream.streaming.meta import DatasetMeta

__all__ = ["TrainingMeta"]

# Mean and standard deviation of ImageNet's pictures in [0, 1], channel by channel, as (3, 1, 1).
_IMAGENET = {
    "mean": [[[0.485]], [[0.456]], [[0.406]]],
    "std": [[[0.229]], [[0.224]], [[0.225]]],
}


class TrainingMeta(DatasetMeta):
    """Metadata under the names and in the forms that LeRobot's own metadata have.

    Args:
        layout: The dataset.
        repo_id: Its name.
        revision: Its revision, None where the storage has none.
        depth_unit: Unit in which depth is delivered.
        use_imagenet_stats: Whether pictures are to be normalised with ImageNet's mean and deviation.
    """

    def __init__(
        self,
        layout: DatasetLayout,
        *,
        repo_id: str,
        revision: str | None,
        depth_unit: str,
        use_imagenet_stats: bool,
    ) -> None:
        super().__init__(layout, repo_id=repo_id, revision=revision, depth_unit=depth_unit)
        self._use_imagenet_stats = use_imagenet_stats

    @cached_property
    def stats(self) -> Any:
        """Statistics by feature: arrays, and tensors where ImageNet's replace those of pictures.

        Raises:
            DatasetFormatError: There are none; LeRobot cannot normalise without.
        """
        recorded = super().stats
        if recorded is None:
            raise DatasetFormatError(
                f"{self.root} has no {STATS_PATH}, which LeRobot normalises with.",
                hint="Compute the statistics with LeRobot's tools.",
                file_path=STATS_PATH,
            )
        stats: dict[str, dict[str, Any]] = {key: dict(values) for key, values in recorded.items()}
        if self._use_imagenet_stats:
            for key in self.camera_keys:
                if key not in self.depth_keys:
                    replaced = {name: torch.tensor(value) for name, value in _IMAGENET.items()}
                    stats[key] = stats.get(key, {}) | replaced
        return stats

    @property
    def tasks(self) -> Any:
        """A pandas table: the task strings as its index, ``task_index`` as its column."""
        import pandas

        numbers = super().tasks
        index = pandas.Index(list(numbers.values()), name="task")
        return pandas.DataFrame({"task_index": list(numbers)}, index=index)

    @property
    def has_language_columns(self) -> bool:
        """Whether a feature is a language column, which cannot be stacked into a tensor."""
        return any(feature.kind == "language" for feature in self._layout.info.features.values())
