"""Whether what a loader delivered is right: every frame once, with its own picture."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lrstream.demo import read_identities
from lrstream.sidecar.problems import Problem

__all__ = ["BENCHMARK_CODES", "coverage_problems", "identity_problems"]

BENCHMARK_CODES = ("frame-missing", "frame-repeated", "frame-unknown", "wrong-picture")
"""Codes of the problems that are found here."""

_MAX_SHOWN = 5


def coverage_problems(
    delivered: NDArray[np.int64], expected: NDArray[np.int64], source: str, *, is_complete: bool = True
) -> Iterator[Problem]:
    """Frames that did not arrive exactly once.

    Args:
        delivered: ``index`` of every sample that arrived, int64, shape ``(n,)``.
        expected: ``index`` of every frame that should, int64, shape ``(m,)``, without duplicates.
        source: Name for the messages.
        is_complete: Whether all of them should have arrived.
    """
    found, counts = np.unique(delivered, return_counts=True)
    groups = (
        (
            "frame-missing",
            "did not arrive",
            np.setdiff1d(expected, found) if is_complete else np.empty(0, np.int64),
        ),
        ("frame-repeated", "arrived more than once", found[counts > 1]),
        ("frame-unknown", "arrived but are not in the dataset", np.setdiff1d(found, expected)),
    )
    for code, what, indices in groups:
        if len(indices):
            message = f"{len(indices)} of {len(expected)} frames {what}: index {_shown(indices)}."
            yield Problem(code, "error", source, None, message, None)


def identity_problems(
    camera: int, key: str, pictures: NDArray[np.uint8], episodes: NDArray[np.int64], frames: NDArray[np.int64]
) -> Iterator[Problem]:
    """Pictures that are not the ones of their rows.

    Args:
        camera: Number of the camera.
        key: Its feature key.
        pictures: uint8, shape ``(n, 3, h, w)``, the corner that holds the painted blocks.
        episodes: ``episode_index`` of each sample, int64, shape ``(n,)``.
        frames: ``frame_index`` of each sample, int64, shape ``(n,)``.
    """
    expected = np.stack([np.full_like(episodes, camera), episodes, frames], axis=-1)
    wrong = (read_identities(pictures) != expected).any(axis=-1)
    for episode in np.unique(episodes[wrong]):
        rows = np.sort(frames[wrong & (episodes == episode)])
        message = f"{len(rows)} pictures of {key} are not those of their rows: frames {_shown(rows)}."
        yield Problem("wrong-picture", "error", key, int(episode), message, None)


def _shown(values: NDArray[np.int64]) -> str:
    text = ", ".join(str(value) for value in values[:_MAX_SHOWN])
    return f"{text}, ..." if len(values) > _MAX_SHOWN else text
