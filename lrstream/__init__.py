"""Stream LeRobotDataset v3 into training without downloading it.

Public names are resolved on first use: importing `lrstream` loads neither torch nor typer, so
that a tool may ask for the version, or for one helper, at no cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "CodedPictures",
    "LrstreamError",
    "MixtureDataset",
    "StreamingLeRobotDataset",
    "__version__",
    "flat_metrics",
]

if TYPE_CHECKING:
    from lrstream.errors import LrstreamError
    from lrstream.streaming.coded import CodedPictures
    from lrstream.streaming.dataset import StreamingLeRobotDataset
    from lrstream.streaming.flat_metrics import flat_metrics
    from lrstream.streaming.mixture import MixtureDataset

_HOMES = {
    "CodedPictures": "lrstream.streaming.coded",
    "LrstreamError": "lrstream.errors",
    "MixtureDataset": "lrstream.streaming.mixture",
    "StreamingLeRobotDataset": "lrstream.streaming.dataset",
    "flat_metrics": "lrstream.streaming.flat_metrics",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lrstream' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
