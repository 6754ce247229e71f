"""Running the loader in tests, and comparing what it gives with what is expected."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lrstream.demo import WrittenDataset
from lrstream.streaming.dataset import StreamingLeRobotDataset

__all__ = [
    "assert_same_sample",
    "indices",
    "loader_threads",
    "open_loader",
    "samples_of",
    "wait_for_no_threads",
]


def open_loader(dataset: WrittenDataset | Path, **options: Any) -> StreamingLeRobotDataset:
    """The loader of a local dataset."""
    root = dataset.root if isinstance(dataset, WrittenDataset) else dataset
    return StreamingLeRobotDataset("test/dataset", root=root, **options)


def samples_of(
    dataset: StreamingLeRobotDataset, num_workers: int = 0, context: str | None = None
) -> Iterator[dict[str, Any]]:
    """One iteration, sample by sample, through a DataLoader."""
    if num_workers == 0:
        return iter(DataLoader(dataset, batch_size=None))
    # As arrays in one pickle: torch would open a shared memory file for every tensor of every sample.
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=8,
        num_workers=num_workers,
        collate_fn=_as_arrays,
        multiprocessing_context=context or "fork",
    )
    return (_as_tensors(sample) for batch in loader for sample in batch)


def _as_arrays(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in sample.items()}
        for sample in samples
    ]


def _as_tensors(sample: dict[str, Any]) -> dict[str, Any]:
    # A scalar array comes out of a pickle as an array, so nothing is mistaken for a plain number.
    return {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for key, value in sample.items()
    }


def indices(samples: Iterable[dict[str, Any]]) -> list[int]:
    """Values of ``index``, in the order of delivery."""
    return [int(sample["index"]) for sample in samples]


def assert_same_sample(found: dict[str, Any], expected: dict[str, Any], where: str = "") -> None:
    """Equal keys; tensors equal in dtype, shape and every value; anything else equal."""
    assert found.keys() == expected.keys(), where
    for key, value in expected.items():
        here = f"{where} {key}"
        if not isinstance(value, torch.Tensor):
            assert found[key] == value, here
            continue
        tensor = found[key]
        assert isinstance(tensor, torch.Tensor), here
        assert tensor.dtype == value.dtype, f"{here}: {tensor.dtype}, expected {value.dtype}"
        assert tensor.shape == value.shape, f"{here}: {tensor.shape}, expected {value.shape}"
        if value.dtype == torch.float32 and "depth" in key:
            # Metres by another order of the same float32 operations.
            np.testing.assert_allclose(tensor.numpy(), value.numpy(), rtol=1e-5, atol=1e-6, err_msg=here)
        else:
            np.testing.assert_array_equal(tensor.numpy(), value.numpy(), err_msg=here)


def loader_threads() -> list[str]:
    """Names of the loader's threads in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lrstream-")]


def wait_for_no_threads(timeout_s: float = 5.0) -> None:
    """Fail if a thread of the loader does not end."""
    deadline = time.monotonic() + timeout_s
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader_threads() == []
