"""A dataset as if it had only some of its features, so that nothing else is read of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lrstream.errors import UsageError
from lrstream.layout.layout import DatasetLayout
from lrstream.layout.rows import ROW_KEYS

__all__ = ["ALWAYS_DELIVERED", "narrow_layout"]

ALWAYS_DELIVERED = (*ROW_KEYS, "task")
"""What every sample has, whatever was asked for."""


def narrow_layout(layout: DatasetLayout, features: Iterable[str] | None) -> DatasetLayout:
    """The layout with only these features, besides `ALWAYS_DELIVERED`.

    Cameras that are left out are gone from the episode table too, hence their MP4 files from
    `DatasetLayout.video_files`: whoever works with the result plans, sizes, fetches and decodes the
    chosen ones only.

    Args:
        layout: The dataset.
        features: Keys, in any order; None for all. The order in samples stays that of the dataset.

    Returns:
        `layout` itself where nothing is left out.

    Raises:
        UsageError: A key is unknown, given twice, or no string.
    """
    if features is None:
        return layout
    if isinstance(features, (str, bytes)) or not isinstance(features, Iterable):
        raise UsageError(f"features is {features!r}, expected a list of feature names.")
    wanted: set[str] = set()
    known = layout.info.features
    for key in features:
        if not isinstance(key, str):
            raise UsageError(f"features contains {key!r}, expected names.")
        if key in wanted:
            raise UsageError(f"features contains {key!r} more than once.")
        if key not in known and key not in ALWAYS_DELIVERED:
            raise UsageError(
                f"features names {key!r}, which is no feature of the dataset.",
                hint=f"Its features are {', '.join(known)}.",
            )
        wanted.add(key)
    left_out = frozenset(key for key in known if key not in wanted and key not in ALWAYS_DELIVERED)
    if not left_out:
        return layout
    info, episodes = layout.info, layout.episodes
    declared = {key: value for key, value in info.raw["features"].items() if key not in left_out}
    return replace(
        layout,
        info=replace(
            info,
            features={key: feature for key, feature in known.items() if key not in left_out},
            raw={**info.raw, "features": declared},
        ),
        episodes=replace(
            episodes,
            cameras={key: camera for key, camera in episodes.cameras.items() if key not in left_out},
        ),
        left_out=layout.left_out | left_out,
    )
