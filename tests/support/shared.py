"""The folder of real datasets and of what LeRobot's own reader returns for them, where it is present.

It lies beside the project as ``../shared``. Everything here is for tests that get stronger with it;
without it `SHARED` is None and those tests are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

__all__ = [
    "DATASETS",
    "PROJECT",
    "SHARED",
    "Oracle",
    "hash_picture",
    "import_path",
    "oracle",
    "requires_shared",
    "shared_dataset",
]

PROJECT = Path(__file__).resolve().parents[2]
"""Root of the project."""


def import_path() -> str:
    """PYTHONPATH for a script that stands elsewhere: the project, then what this process has there."""
    return os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))


_BESIDE = PROJECT.parent / "shared"
SHARED: Path | None = _BESIDE if (_BESIDE / "datasets").is_dir() and (_BESIDE / "oracle").is_dir() else None
"""The shared folder, or None."""

DATASETS = ("av1_two_cameras", "h264_bframes_gop30", "hevc_gop12", "images_only", "video_and_depth")
"""Names of the real datasets."""

requires_shared = pytest.mark.skipif(SHARED is None, reason="the folder of real datasets is not present")
"""Marks a test that needs the shared folder."""


@dataclass(frozen=True)
class Oracle:
    """What the map-style reader returned for every row of one dataset, in order of ``index``.

    Attributes:
        num_frames: Rows.
        delta_timestamps: Windows that were asked for, or None.
        columns: Numeric columns and ``{key}_is_pad``, stacked, shape ``(num_frames, ...)``.
        strings: String columns, ``task`` among them.
        hashes: `hash_picture` of each row's picture or window, by camera key.
        pictures: Some of them in full, by (index, camera key).
    """

    num_frames: int
    delta_timestamps: dict[str, list[float]] | None
    columns: dict[str, NDArray[Any]]
    strings: dict[str, list[str]]
    hashes: dict[str, list[str]]
    pictures: dict[tuple[int, str], NDArray[Any]]


def shared_dataset(name: str) -> Path:
    """Root of a real dataset; skips the test when the shared folder is absent."""
    if SHARED is None:
        pytest.skip("the folder of real datasets is not present")
    return SHARED / "datasets" / name


def oracle(name: str, mode: Literal["plain", "windows"] = "plain") -> Oracle:
    """Load what belongs to one dataset; skips the test when the shared folder is absent."""
    if SHARED is None:
        pytest.skip("the folder of real datasets is not present")
    stem = SHARED / "oracle" / f"{name}.{mode}"
    document = json.loads(stem.with_name(stem.name + ".json").read_text(encoding="utf-8"))
    columns: dict[str, NDArray[Any]] = {}
    pictures: dict[tuple[int, str], NDArray[Any]] = {}
    with np.load(stem.with_name(stem.name + ".npz"), allow_pickle=False) as archive:
        for member in archive.files:
            if member.startswith("picture/"):
                _, index, key = member.split("/", 2)
                pictures[int(index), key] = archive[member]
            else:
                columns[member] = archive[member]
    return Oracle(
        document["num_frames"],
        document["delta_timestamps"],
        columns,
        document["strings"],
        document["image_sha256"],
        pictures,
    )


def hash_picture(picture: Any) -> str:
    """SHA-256 of a picture or window of pictures, as the oracle counts it.

    Args:
        picture: uint8 of any shape, hashed as it is; or float, hashed as int64 after rounding, and
            after a multiplication by 255 where nothing exceeds 1.
    """
    array = np.asarray(picture)
    if np.issubdtype(array.dtype, np.floating):
        array = np.rint(array * 255 if array.max() <= 1 else array).astype(np.int64)
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
