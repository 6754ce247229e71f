"""A dataset that is quick to read, for tests that read it again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from tests.support.workers import SHORT, SMALL

_CAMERA = DemoCamera("observation.images.front", 16, 96, kind="image")


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """Ten unequal episodes, 49 frames, images in tables."""
    return write_dataset(tmp_path_factory.mktemp("small") / "dataset", SMALL)


@pytest.fixture(scope="session")
def short_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten unequal episodes, 25 frames: every position of it can be tried."""
    return write_dataset(tmp_path_factory.mktemp("short") / "dataset", SHORT).root


@pytest.fixture(scope="session")
def dataset_128(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """128 frames in episodes of 16."""
    spec = DemoSpec((16,) * 8, (_CAMERA,), fps=10, episodes_per_data_file=4)
    return write_dataset(tmp_path_factory.mktemp("of128") / "dataset", spec)


@pytest.fixture
def root(small_dataset: WrittenDataset) -> Path:
    """Directory of `small_dataset`."""
    return small_dataset.root
