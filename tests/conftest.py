"""Every test has caches of its own and no credentials; datasets are written once per session."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

# huggingface_hub reads its settings when it is imported, before any fixture runs. So the session has a
# home of its own first, and each test another one.
_SESSION_HOME = tempfile.mkdtemp(prefix="lrstream-tests-")
# Port 9 (discard) of this machine: a test that asks for the real Hub by mistake is refused at once.
_NOWHERE = "http://127.0.0.1:9"
_UNSET = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_TOKEN_PATH",
    "HF_HUB_OFFLINE",
    "HF_HUB_CACHE",
    "HF_XET_CACHE",
    "HF_DATASETS_CACHE",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _homes(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "USERPROFILE": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "HF_HOME": str(home / "huggingface"),
        "HF_LEROBOT_HOME": str(home / "lerobot"),
    }


# Hundreds of processes are started: without bytecode each would compile lrstream anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.update(_homes(Path(_SESSION_HOME)))
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
for _name in _UNSET:
    os.environ.pop(_name, None)
os.environ["HF_ENDPOINT"] = _NOWHERE

# ruff: noqa: E402
import huggingface_hub.constants  # noqa: F401  (reads the environment now, in every session alike)
import hypothesis

from lrstream.demo import WrittenDataset
from tests.support.datasets import DatasetCache
from tests.support.forked import preload_libraries

preload_libraries()
# A machine at work elsewhere is no fault of an example; what hangs meets the time limit of its test.
hypothesis.settings.register_profile("lrstream", deadline=None)
hypothesis.settings.load_profile("lrstream")


# What a script starts in the background ignores interrupts, and so would every process of a test.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: no process of xdist is left with one when the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_unconfigure() -> None:
    shutil.rmtree(_SESSION_HOME, ignore_errors=True)


@pytest.fixture(autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory for one test, which holds all its caches; no token and no rank in sight."""
    home = tmp_path_factory.mktemp("home")
    for name, value in _homes(home).items():
        monkeypatch.setenv(name, value)
    for name in _UNSET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", _NOWHERE)
    return home


@pytest.fixture(autouse=True)
def no_workers_left() -> Iterator[None]:
    """End the workers of DataLoader iterators that an error's traceback keeps.

    The garbage collector would take the iterator apart in an order in which DataLoader waits for five seconds
    for each worker, in whichever test runs then; and that test would find processes that it has not started.
    """
    yield
    if "torch.utils.data" in sys.modules and multiprocessing.active_children():
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

        for found in gc.get_objects():
            # By its type alone: other objects may answer `isinstance` with a warning of their own.
            if issubclass(type(found), _MultiProcessingDataLoaderIter):
                found._shutdown_workers()


@pytest.fixture(scope="session")
def dataset_cache(tmp_path_factory: pytest.TempPathFactory) -> DatasetCache:
    """Named datasets (`tests.support.datasets.SPECS`); not to be changed, see `copy_dataset`."""
    return DatasetCache(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="session")
def demo_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """The default demonstration: 12 episodes, 600 frames, two cameras with three files each."""
    return dataset_cache.get("demo")


@pytest.fixture(scope="session")
def tiny_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """Three episodes of 5, 7 and 9 frames at 10 fps, two cameras."""
    return dataset_cache.get("tiny")


@pytest.fixture(scope="session")
def standard_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """Seven unequal episodes, each in a Parquet file of its own; two cameras that roll over differently."""
    return dataset_cache.get("standard")


@pytest.fixture(scope="session")
def k04_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """Four one-second episodes at 10 fps, two in each MP4 file."""
    return dataset_cache.get("k04")


@pytest.fixture(scope="session")
def long_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """Two episodes of 300 frames, H.264 with B-frames and GOP 30."""
    return dataset_cache.get("long")


@pytest.fixture(scope="session")
def image_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """Images inside the tables, no video."""
    return dataset_cache.get("images")


@pytest.fixture(scope="session")
def depth_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """An RGB video and a lossless 12-bit depth video."""
    return dataset_cache.get("depth")


@pytest.fixture(scope="session")
def rich_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """Every kind of feature, in several chunks, row groups and metadata files."""
    return dataset_cache.get("rich")


@pytest.fixture(scope="session")
def av1_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """AV1 with GOP 2, LeRobot's default."""
    return dataset_cache.get("av1")


@pytest.fixture(scope="session")
def hevc_open_dataset(dataset_cache: DatasetCache) -> WrittenDataset:
    """HEVC with open GOPs and B-frames."""
    return dataset_cache.get("hevc_open")
