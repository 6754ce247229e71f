"""The loader against what LeRobot's own reader returned for real datasets, frame by frame."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

from lrstream.streaming.dataset import StreamingLeRobotDataset
from tests.support.loader import samples_of
from tests.support.shared import DATASETS, Oracle, hash_picture, oracle, requires_shared, shared_dataset

pytestmark = requires_shared

Mode = Literal["plain", "windows"]


def check(sample: dict[str, Any], expected: Oracle) -> int:
    """Compare one sample with its row; returns the row."""
    row = int(sample["index"])
    assert sample.keys() == {*expected.columns, *expected.strings, *expected.hashes}
    for key, column in expected.columns.items():
        value = sample[key]
        assert isinstance(value, torch.Tensor), key
        assert value.numpy().dtype == column.dtype, key
        assert value.shape == column.shape[1:], key
        np.testing.assert_array_equal(value.numpy(), column[row], err_msg=f"{key} of row {row}")
    for key, strings in expected.strings.items():
        assert sample[key] == strings[row]
    for key, hashes in expected.hashes.items():
        assert hash_picture(sample[key].numpy()) == hashes[row], f"{key} of row {row}"
        picture = expected.pictures.get((row, key))
        if picture is not None:
            assert sample[key].numpy().dtype == picture.dtype
            assert sample[key].shape == picture.shape
            np.testing.assert_array_equal(sample[key].numpy(), picture)
    return row


def compare(name: str, mode: Mode, num_workers: int, context: str | None = None) -> None:
    expected = oracle(name, mode)
    with StreamingLeRobotDataset(
        name,
        root=shared_dataset(name),
        delta_timestamps=expected.delta_timestamps,
        return_uint8=True,
    ) as dataset:
        rows = [check(sample, expected) for sample in samples_of(dataset, num_workers, context)]
    assert sorted(rows) == list(range(expected.num_frames))


@pytest.mark.parametrize("mode", ["plain", "windows"])
@pytest.mark.parametrize("name", DATASETS)
def test_every_frame_in_the_training_process(name: str, mode: Mode) -> None:
    compare(name, mode, num_workers=0)


@pytest.mark.parametrize("mode", ["plain", "windows"])
@pytest.mark.parametrize("name", DATASETS)
def test_every_frame_through_two_forked_workers(name: str, mode: Mode) -> None:
    compare(name, mode, num_workers=2)


@pytest.mark.parametrize(
    ("name", "mode", "num_workers"), [("images_only", "windows", 1), ("hevc_gop12", "plain", 3)]
)
def test_every_frame_through_other_numbers_of_workers(name: str, mode: Mode, num_workers: int) -> None:
    compare(name, mode, num_workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "num_workers"),
    [
        ("video_and_depth", "windows", 2),
        ("av1_two_cameras", "plain", 2),
        ("h264_bframes_gop30", "windows", 1),
    ],
)
def test_every_frame_through_workers_that_inherit_nothing(name: str, mode: Mode, num_workers: int) -> None:
    compare(name, mode, num_workers, context="forkserver")
