"""What other tests rely on: the reference reader, the faults, the isolation of tests."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lrstream.demo import WrittenDataset, depth_codes, read_identities, read_identity
from tests.support.datasets import DatasetCache, copy_dataset
from tests.support.faults import FAULTS, replace_mp4
from tests.support.reference import ReferenceDataset
from tests.support.shared import DATASETS, hash_picture, oracle, requires_shared, shared_dataset


@requires_shared
@pytest.mark.parametrize(("mode", "step"), [("plain", 2), ("windows", 5)])
@pytest.mark.parametrize("name", DATASETS)
def test_reference_equals_the_map_style_reader(
    name: str, mode: Literal["plain", "windows"], step: int
) -> None:
    reference, expected = ReferenceDataset(shared_dataset(name)), oracle(name, mode)
    assert len(reference) == expected.num_frames
    ends = {0, expected.num_frames - 1}
    for index in sorted({*range(0, expected.num_frames, step), *ends}):
        sample = reference.sample(index, expected.delta_timestamps)
        assert sample.keys() == {*expected.columns, *expected.strings, *expected.hashes}
        for key, column in expected.columns.items():
            assert sample[key].numpy().dtype == column.dtype
            np.testing.assert_array_equal(sample[key].numpy(), column[index])
        for key, strings in expected.strings.items():
            assert sample[key] == strings[index]
        for key, hashes in expected.hashes.items():
            assert hash_picture(sample[key]) == hashes[index], (index, key)
    for (index, key), picture in expected.pictures.items():
        ours = reference.sample(index, expected.delta_timestamps)[key].numpy()
        assert ours.dtype == picture.dtype
        np.testing.assert_array_equal(ours, picture)


def test_reference_finds_each_rows_own_picture(k04_dataset: WrittenDataset) -> None:
    reference = ReferenceDataset(k04_dataset.root)
    key = "observation.images.front"
    for index, (episode, frame) in enumerate(k04_dataset.frames()):
        assert read_identity(reference.sample(index)[key]) == (0, episode, frame)
        window = reference.sample(index, {key: [-0.1, 0.0, 0.1]})
        near = [frame - 1, frame, frame + 1]
        expected = [(0, episode, min(max(one, 0), 9)) for one in near]
        np.testing.assert_array_equal(read_identities(window[key]), expected)
        assert window[f"{key}_is_pad"].tolist() == [not 0 <= one < 10 for one in near]


def test_reference_returns_every_kind_of_feature(rich_dataset: WrittenDataset) -> None:
    sample = ReferenceDataset(rich_dataset.root).sample(7, return_uint8=False)
    kinds = {
        key: (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value)
        for key, value in sample.items()
    }
    assert kinds == {
        "observation.state": (torch.float32, (6,)),
        "action": (torch.float32, (6,)),
        "next.reward": (torch.float32, ()),
        "next.done": (torch.bool, ()),
        "observation.note": str,
        "observation.gripper_open": (torch.bool, ()),
        "observation.counter": (torch.int64, ()),
        "observation.grid": (torch.float32, (2, 3)),
        "language_persistent": list,
        "language_events": list,
        "observation.images.front": (torch.float32, (3, 48, 96)),
        "observation.images.depth": (torch.float32, (1, 32, 50)),
        "observation.images.still": (torch.float32, (3, 32, 96)),
        "observation.images.range": (torch.float32, (1, 16, 20)),
        "timestamp": (torch.float32, ()),
        "frame_index": (torch.int64, ()),
        "episode_index": (torch.int64, ()),
        "index": (torch.int64, ()),
        "task_index": (torch.int64, ()),
        "task": str,
    }
    still = (sample["observation.images.still"] * 255).round().to(torch.uint8)
    assert read_identity(still) == (2, 1, 1)
    np.testing.assert_array_equal(sample["observation.images.range"][0], depth_codes(3, 1, 1, 16, 20))


def test_reference_refuses_a_picture_that_is_too_far(
    standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "d")
    FAULTS["drifting_clock"](root)
    reference = ReferenceDataset(root)
    assert read_identity(reference.sample(0)["observation.images.front"]) == (0, 0, 0)
    with pytest.raises(LookupError, match="no picture within"):
        reference.sample(23)


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5)])
def test_float_pictures_hash_like_the_bytes_they_were_made_from(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape)
    assert hash_picture(pixels.astype(np.float32) / np.float32(255)) == hash_picture(pixels.astype(np.int64))
    assert hash_picture(torch.from_numpy(pixels).float() * 100) == hash_picture(pixels * 100)


# Faults ---------------------------------------------------------------------------------------------


def _snapshot(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("dataset", ["standard", "demo"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_one_file(
    fault: str, dataset: str, dataset_cache: DatasetCache, tmp_path: Path
) -> None:
    written = dataset_cache.get(dataset)
    root = copy_dataset(written, tmp_path / "d")
    broken = FAULTS[fault](root)
    before, after = _snapshot(written.root), _snapshot(root)
    assert after.keys() <= before.keys()
    assert [path for path in before if after.get(path) != before[path]] == [broken.path]


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("lfs_pointer_mp4", av.error.InvalidDataError),
        ("empty_mp4", av.error.InvalidDataError),
        ("not_mp4", av.error.InvalidDataError),
        ("truncated_before_moov", av.error.InvalidDataError),
        ("missing_mp4", FileNotFoundError),
        ("truncated_payload", None),
        ("fragmented_mp4", None),
        ("replaced_mp4", None),
    ],
)
def test_ffmpegs_view_of_broken_videos(
    fault: str, outcome: type[Exception] | None, standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    broken = FAULTS[fault](copy_dataset(standard_dataset, tmp_path / "d"))
    path = broken.root / broken.path
    if outcome is not None:
        with pytest.raises(outcome):
            av.open(str(path))
        return
    packets = _num_packets(path)
    intact = _num_packets(standard_dataset.root / broken.path)
    assert packets < intact if fault == "truncated_payload" else packets == intact
    assert (b"moof" in path.read_bytes()) == (fault == "fragmented_mp4")


def _num_packets(path: Path) -> int:
    with av.open(str(path)) as container:
        try:
            return sum(1 for packet in container.demux(video=0) if packet.size)
        except av.error.InvalidDataError:
            return 0


@pytest.mark.parametrize("fault", ["lfs_pointer_parquet", "empty_parquet", "parquet_without_footer"])
def test_broken_parquet_files_do_not_open(
    fault: str, standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    broken = FAULTS[fault](copy_dataset(standard_dataset, tmp_path / "d"))
    with pytest.raises(pa.ArrowInvalid):
        pq.read_table(broken.root / broken.path)


def test_a_replaced_video_has_the_size_and_length_of_the_old(
    standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "d")
    path = root / standard_dataset.video_files["observation.images.front"][0]
    before = path.stat()
    replace_mp4(path, keep_mtime=True)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    sample = ReferenceDataset(root).sample(30)
    assert read_identity(sample["observation.images.front"]) == (15, 255, 0)


def test_a_copy_may_be_changed(standard_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "d")
    assert all(path.stat().st_mode & stat.S_IWUSR for path in root.rglob("*"))
    assert _snapshot(root) == _snapshot(standard_dataset.root)


# Isolation ------------------------------------------------------------------------------------------


def test_caches_are_the_tests_own(isolated_home: Path) -> None:
    for name in ("HOME", "HF_HOME", "HF_LEROBOT_HOME", "XDG_CACHE_HOME"):
        assert Path(os.environ[name]).is_relative_to(isolated_home)
    assert Path.home() == isolated_home
    assert not {"HF_TOKEN", "RANK", "WORLD_SIZE"} & os.environ.keys()


def test_the_hub_client_never_saw_the_users_home() -> None:
    from huggingface_hub import constants

    home = Path(constants.HF_HOME)
    assert home.parent.name.startswith("lrstream-tests-")
    assert constants.HF_TOKEN_PATH is not None
    assert Path(constants.HF_TOKEN_PATH).is_relative_to(home)
