"""Named demonstration datasets for tests, each written once per test session.

`SPECS` says what is in them; `DatasetCache` writes them on first use. The fixtures of `tests/conftest.py`
hand them out. They are shared by all tests of a session, so nobody changes them: `copy_dataset` first.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from tests.support.shared import import_path

__all__ = ["SPECS", "DatasetCache", "copy_dataset", "write_dataset_in_child"]

_FRONT = "observation.images.front"
_SIDE = "observation.images.side"
_DEPTH = "observation.images.depth"

SPECS: dict[str, DemoSpec] = {
    # The default: 12 episodes, 600 frames, 2 cameras of different size with 3 files each.
    "demo": DemoSpec(),
    # The smallest with unequal episodes.
    "tiny": DemoSpec(
        (5, 7, 9),
        (DemoCamera(_FRONT, 64, 96, episodes_per_file=2), DemoCamera(_SIDE, 48, 112, episodes_per_file=3)),
        fps=10,
    ),
    # Every episode in a Parquet file of its own; cameras that roll over at different episodes.
    "standard": DemoSpec(
        (23, 7, 31, 12, 18, 5, 27),
        (
            DemoCamera(_FRONT, 64, 96, gop=5, episodes_per_file=3),
            DemoCamera(_SIDE, 48, 112, gop=2, episodes_per_file=2),
        ),
        episodes_per_data_file=1,
    ),
    # Four episodes of one second, two in each MP4, so that the clock restarts in the middle.
    "k04": DemoSpec((10, 10, 10, 10), (DemoCamera(_FRONT, 64, 96, episodes_per_file=2),), fps=10),
    # Windows longer than any buffer.
    "long": DemoSpec((300, 300), (DemoCamera(_FRONT, 64, 96, gop=30, bframes=2, episodes_per_file=1),)),
    "images": DemoSpec(
        (6, 9, 4), (DemoCamera(_FRONT, 32, 96, kind="image"),), fps=10, episodes_per_data_file=2
    ),
    "depth": DemoSpec(
        (11, 6, 8),
        (
            DemoCamera(_FRONT, 64, 96, episodes_per_file=2),
            DemoCamera(_DEPTH, 32, 50, codec="depth", gop=4, episodes_per_file=3),
        ),
    ),
    # Every kind of feature; several row groups, chunks and metadata files.
    "rich": DemoSpec(
        (6, 3, 8, 5, 4),
        (
            DemoCamera(_FRONT, 48, 96, episodes_per_file=2),
            DemoCamera(_DEPTH, 32, 50, codec="depth", episodes_per_file=3),
            DemoCamera("observation.images.still", 32, 96, kind="image"),
            DemoCamera("observation.images.range", 16, 20, codec="depth", kind="image"),
        ),
        fps=10,
        episodes_per_data_file=3,
        episodes_per_row_group=2,
        episodes_per_metadata_file=2,
        chunks_size=2,
        extras=("string", "bool", "int64", "float2d", "language"),
    ),
    "h264": DemoSpec((25, 1, 40, 2, 13), (DemoCamera(_FRONT, 64, 96, gop=12, bframes=3),), faststart=False),
    "h264_open": DemoSpec(
        (25, 1, 40, 2, 13), (DemoCamera(_FRONT, 64, 96, gop=12, bframes=3, open_gop=True),)
    ),
    "hevc": DemoSpec((25, 1, 40, 2, 13), (DemoCamera(_FRONT, 64, 96, "hevc", gop=12, bframes=2),)),
    "hevc_open": DemoSpec(
        (25, 1, 40, 2, 13), (DemoCamera(_FRONT, 64, 96, "hevc", gop=12, bframes=3, open_gop=True),)
    ),
    "vp9": DemoSpec((25, 1, 40, 2, 13), (DemoCamera(_FRONT, 64, 96, "vp9", gop=6),)),
    "av1": DemoSpec((25, 1, 40, 2, 13), (DemoCamera(_FRONT, 64, 96, "av1"),)),
    "av1_gop8": DemoSpec((25, 1, 40, 2, 13), (DemoCamera(_FRONT, 64, 96, "av1", gop=8),)),
}
"""What the named datasets hold."""


class DatasetCache:
    """Writes named datasets into one directory, each on first use.

    Args:
        directory: Where they go; kept by the caller.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[str, WrittenDataset] = {}

    def get(self, name: str) -> WrittenDataset:
        """The dataset of this name in `SPECS`. Not to be changed."""
        if name not in self._written:
            spec, root = SPECS[name], self._directory / name
            if any(camera.codec == "av1" for camera in spec.cameras):
                self._written[name] = write_dataset_in_child(spec, root)
            else:
                self._written[name] = write_dataset(root, spec)
        return self._written[name]


_CHILD = """
import pickle, sys
from lrstream.demo import write_dataset
spec, root, result = pickle.load(sys.stdin.buffer)
written = write_dataset(root, spec)
with open(result, "wb") as file:
    pickle.dump(written, file)
"""


def write_dataset_in_child(spec: DemoSpec, root: Path, timeout_s: float = 40.0) -> WrittenDataset:
    """Write a dataset in a process that can be ended: SVT-AV1 may wait for its own threads for ever.

    Args:
        spec: What to write.
        root: Directory to create.
        timeout_s: For one attempt; there are two.

    Raises:
        TimeoutError: Both attempts took too long.
        RuntimeError: The child failed; its output is in the message.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    result = root.parent / f".{root.name}.pickle"
    path = import_path()
    environment = os.environ | {"SVT_LOG": "1", "PYTHONPATH": path}
    for _ in range(2):
        try:
            child = subprocess.run(
                [sys.executable, "-c", _CHILD],
                input=pickle.dumps((spec, root, result)),
                capture_output=True,
                timeout=timeout_s,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            for unfinished in root.parent.glob(f".{root.name}-*"):
                shutil.rmtree(unfinished)
            continue
        if child.returncode != 0:
            raise RuntimeError(f"Writing {root} failed:\n{child.stderr.decode(errors='replace')}")
        written: WrittenDataset = pickle.loads(result.read_bytes())
        result.unlink()
        return written
    raise TimeoutError(f"Writing {root} took longer than {timeout_s} s, twice.")


def copy_dataset(source: WrittenDataset | Path, destination: Path) -> Path:
    """Copy a dataset to a place where it may be changed; returns the new root."""
    root = source.root if isinstance(source, WrittenDataset) else source
    # Without file modes and times: the copy of a read-only dataset is writable.
    return Path(shutil.copytree(root, destination, copy_function=shutil.copyfile))
