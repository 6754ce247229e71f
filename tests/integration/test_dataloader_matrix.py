"""DataLoader's own options: start method, persistence, and pinning of batches in the loader's memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from tests.support.loader import assert_same_sample, open_loader

CAMERA = "observation.images.front"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    camera = DemoCamera(CAMERA, 16, 96, codec="h264", gop=4)
    return write_dataset(
        tmp_path_factory.mktemp("small") / "dataset", DemoSpec((13, 9, 11), (camera,), fps=10)
    )


def epochs(dataset: WrittenDataset, count: int, **options: Any) -> list[list[dict[str, Any]]]:
    """Batches of some epochs through one DataLoader, all of them kept."""
    stream = open_loader(dataset, return_uint8=True)
    loader: DataLoader[Any] = DataLoader(stream, batch_size=4, **options)
    found = []
    with warnings.catch_warnings():
        # Without an accelerator PyTorch says that it does not pin.
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        for epoch in range(count):
            stream.set_epoch(epoch)
            found.append(list(loader))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"pin_memory": True},
        {"num_workers": 2, "multiprocessing_context": "fork", "pin_memory": True},
        {"num_workers": 2, "multiprocessing_context": "fork", "pin_memory": True, "persistent_workers": True},
        pytest.param(
            {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no workers pinned", "fork pinned", "fork pinned persistent", "spawn persistent"],
)
def test_options_do_not_change_batches(small: WrittenDataset, options: dict[str, Any]) -> None:
    found = epochs(small, 2, **options)
    plain = {"num_workers": options.get("num_workers", 0)}
    if plain["num_workers"]:
        plain["multiprocessing_context"] = "fork"
    for batches, expected in zip(found, epochs(small, 2, **plain), strict=True):
        for batch, other in zip(batches, expected, strict=True):
            assert_same_sample(batch, other)
        rows = [index for batch in batches for index in batch["index"].tolist()]
        assert sorted(rows) == list(range(small.num_frames))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_pinning_does_to_a_batch_keeps_its_values(
    small: WrittenDataset, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's pinning thread copies each tensor and lets go of the batch; here without an accelerator."""
    context = "fork" if num_workers else None
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor.clone())
    stream = open_loader(small, return_uint8=True)
    loader: DataLoader[Any] = DataLoader(
        stream, batch_size=4, num_workers=num_workers, multiprocessing_context=context
    )
    # One by one, so that memory which was let go is used again while the copies are alive.
    pinned = [pin_memory(batch) for batch in loader]  # type: ignore[no-untyped-call]
    options = {"num_workers": num_workers, "multiprocessing_context": context}
    for batch, expected in zip(pinned, epochs(small, 1, **options)[0], strict=True):
        assert_same_sample(batch, expected)
