"""Only some features: equal samples without the others, and nothing read for what nobody asked for."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from lrstream import StreamingLeRobotDataset
from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.errors import ByteBudgetError, UsageError
from lrstream.layout.rows import ROW_KEYS
from tests.support.datasets import DatasetCache, copy_dataset
from tests.support.hub import LoopbackHub
from tests.support.loader import assert_same_sample, indices, open_loader, samples_of
from tests.support.reference import ReferenceDataset
from tests.support.remote import ranges_by_file

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(60)

FRONT = "observation.images.front"
STATE = ["observation.state", "action"]
THREE = [f"observation.images.{name}" for name in ("left", "middle", "right")]
ALWAYS = {*ROW_KEYS, "task"}


@pytest.fixture(scope="module")
def three_cameras(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """Three cameras of one size and cadence, so that their files are of nearly equal sizes."""
    spec = DemoSpec((12, 9, 15), tuple(DemoCamera(key, 64, 96, gop=5) for key in THREE), fps=10)
    return write_dataset(tmp_path_factory.mktemp("three") / "dataset", spec)


def test_any_subset_equals_the_reference_without_the_rest(rich_dataset: WrittenDataset) -> None:
    reference = ReferenceDataset(rich_dataset.root)
    chance = random.Random(5)
    declared = [key for key in reference.features if key not in ALWAYS]
    subsets = [[], ["task", "index"], [FRONT], ["note"] if "note" in declared else declared[-1:]]
    subsets += [chance.sample(declared, chance.randint(1, len(declared))) for _ in range(2)]
    for chosen in subsets:
        deltas = {key: [-0.1, 0.0] for key in chosen if key == FRONT or key in STATE}
        dataset = open_loader(rich_dataset, features=chosen, delta_timestamps=deltas, return_uint8=True)
        found = []
        for sample in samples_of(dataset):
            index = int(sample["index"])
            whole = reference.sample(index, deltas, return_uint8=True)
            wanted = {*chosen, *ALWAYS, *(f"{key}_is_pad" for key in deltas)}
            expected = {key: value for key, value in whole.items() if key in wanted}
            assert_same_sample(sample, expected, f"{chosen} row {index}")
            found.append(index)
        assert sorted(found) == list(range(rich_dataset.num_frames))
        dataset.close()


def test_what_is_delivered_is_what_is_said(rich_dataset: WrittenDataset) -> None:
    whole = open_loader(rich_dataset)
    dataset = open_loader(rich_dataset, features=[FRONT, "action"])
    assert set(dataset.features) == {FRONT, "action", *ROW_KEYS}
    assert list(dataset.features) == [key for key in whole.features if key in dataset.features]
    assert dataset.features["action"] == whole.features["action"]
    assert dataset.meta.info["features"].keys() == dataset.features.keys()
    assert dataset.meta.video_keys == dataset.meta.camera_keys == [FRONT]
    assert dataset.meta.depth_keys == dataset.meta.image_keys == []
    assert dataset.meta.shapes.keys() == dataset.meta.names.keys() == dataset.features.keys()
    assert whole.meta.stats is not None
    assert dataset.meta.stats is not None
    assert dataset.meta.stats.keys() == {key for key in whole.meta.stats if key in dataset.features}
    assert "videos/observation.images.depth/from_timestamp" not in dataset.meta.episodes.column_names
    assert dataset.meta.total_frames == whole.meta.total_frames
    every = open_loader(rich_dataset, features=list(reversed(list(whole.features))))
    assert every.features == whole.features
    assert every.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            ["observation.images.rear"],
            "'observation.images.rear', which is no feature.*observation.images.front",
        ),
        (["action", "action"], "'action' more than once"),
        ("action", "is 'action', expected a list of feature names"),
        (3, "is 3, expected a list of feature names"),
        ([3], "contains 3, expected names"),
    ],
)
def test_what_is_no_list_of_features_is_refused(
    tiny_dataset: WrittenDataset, features: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_loader(tiny_dataset, features=features)


def test_a_window_of_what_is_left_out_is_refused(tiny_dataset: WrittenDataset) -> None:
    with pytest.raises(UsageError, match=r"action'.*is not among the features asked for"):
        open_loader(tiny_dataset, features=[FRONT], delta_timestamps={"action": [0.0]})


def test_without_cameras_there_is_no_sidecar_and_no_video_is_needed(
    demo_dataset: WrittenDataset, tmp_path: Path, isolated_home: Path
) -> None:
    root = copy_dataset(demo_dataset, tmp_path / "dataset")
    shutil.rmtree(root / "videos")
    # A budget that holds not one byte of video.
    dataset = open_loader(root, features=STATE, byte_budget_gb=1e-9)
    samples = list(samples_of(dataset))
    assert sorted(indices(samples)) == list(range(demo_dataset.num_frames))
    counters = dataset.metrics()
    assert counters["fetched_bytes"] == counters["peak_reserved_bytes"] == counters["decoders_opened"] == 0
    assert not list(isolated_home.rglob("*.npz"))
    column = pq.read_table(sorted((root / "data").rglob("*.parquet"))).sort_by("index")["action"].to_pylist()
    for sample in samples:
        np.testing.assert_array_equal(sample["action"].numpy(), np.float32(column[int(sample["index"])]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_only_asks_the_hub_for_no_video(
    loopback_hub: LoopbackHub,
    standard_dataset: WrittenDataset,
    monkeypatch: pytest.MonkeyPatch,
    num_workers: int,
) -> None:
    loopback_hub.create_dataset("robots/pick", standard_dataset.root)
    loopback_hub.connect_process(monkeypatch)
    loopback_hub.log.clear()
    with StreamingLeRobotDataset("robots/pick", features=STATE) as dataset:
        assert sorted(indices(samples_of(dataset, num_workers))) == list(range(standard_dataset.num_frames))
    assert loopback_hub.log.count(r"/data/.*\.parquet")
    assert loopback_hub.log.count(r"\.mp4") == loopback_hub.log.count("sidecar") == 0


def test_one_of_three_cameras_is_a_third_of_the_bytes(
    loopback_hub: LoopbackHub, three_cameras: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback_hub.create_dataset("robots/three", three_cameras.root)
    loopback_hub.connect_process(monkeypatch)
    fetched = {}
    for keys in (THREE, THREE[1:2]):
        with StreamingLeRobotDataset("robots/three", features=[*keys, "action"]) as dataset:
            loopback_hub.log.clear()
            for sample in samples_of(dataset):
                assert {key for key in sample if "images" in key} == set(keys)
        records = loopback_hub.log.records(r"\.mp4$", server="cdn")
        for path in ranges_by_file(records):
            assert any(key in path for key in keys)
        fetched[len(keys)] = sum(record.bytes_sent for record in records)
    assert 0.30 < fetched[1] / fetched[3] < 0.36


def test_budget_and_decoders_are_those_of_the_chosen_cameras(three_cameras: WrittenDataset) -> None:
    whole, one = open_loader(three_cameras), open_loader(three_cameras, features=THREE[:1])
    rest = open_loader(three_cameras, features=THREE[1:])
    np.testing.assert_array_equal(whole._sizes(), one._sizes() + rest._sizes())
    largest = int(one._sizes().max())
    list(samples_of(one))
    assert one.metrics()["fetched_bytes"] < int(one._sizes().sum()) < int(whole._sizes().sum()) / 2
    assert one.metrics()["decoders_opened"] <= len(one.episodes)
    budget_gb = largest / 2**30
    enough = open_loader(three_cameras, features=THREE[:1], byte_budget_gb=budget_gb)
    assert len(list(samples_of(enough))) == three_cameras.num_frames
    assert enough.metrics()["peak_reserved_bytes"] == largest
    with pytest.raises(ByteBudgetError):
        list(samples_of(open_loader(three_cameras, byte_budget_gb=budget_gb)))


def test_another_selection_of_features_is_refused_on_resume(tiny_dataset: WrittenDataset) -> None:
    chosen = open_loader(tiny_dataset, features=[FRONT])
    expected = indices(chosen)
    state = chosen.state_dict(samples=5)
    assert FRONT in state["features"]
    again = open_loader(tiny_dataset, features=[FRONT])
    again.load_state_dict(state)
    assert indices(again) == expected[5:]
    for other in (None, [FRONT, "action"]):
        with pytest.raises(UsageError, match=r"features: saved .*front.*, now"):
            open_loader(tiny_dataset, features=other).load_state_dict(state)


def test_a_position_in_data_that_was_written_anew_is_worth_a_warning(
    tiny_dataset: WrittenDataset, tmp_path: Path
) -> None:
    root = copy_dataset(tiny_dataset, tmp_path / "dataset")
    state = open_loader(root, features=STATE).state_dict(samples=4)
    assert open_loader(root, features=STATE).state_dict(samples=4) == state
    path = next((root / "data").rglob("*.parquet"))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    dataset = open_loader(root, features=STATE)
    with pytest.warns(RuntimeWarning, match="written anew"):
        dataset.load_state_dict(state)
    assert indices(dataset) == indices(open_loader(root, features=STATE))[4:]
    # The position saved from now on is one of the new files.
    dataset.load_state_dict(dataset.state_dict(samples=6))


def test_transforms_run_on_the_cameras_that_are_left(dataset_cache: DatasetCache) -> None:
    seen: list[tuple[int, ...]] = []

    def note(picture: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(picture.shape))
        return picture

    dataset = open_loader(dataset_cache.get("tiny"), features=[FRONT], image_transforms=note)
    list(DataLoader(dataset, batch_size=None))
    assert seen == [(3, 64, 96)] * dataset.num_frames


@pytest.mark.parametrize("kind", ["torch", "numpy", "uint8", "range"])
def test_episodes_may_be_given_as_arrays(tiny_dataset: WrittenDataset, kind: str) -> None:
    given: Any = {
        "torch": torch.tensor([2, 0]),
        "numpy": np.array([2, 0]),
        "uint8": np.array([2, 0], dtype=np.uint8),
        "range": range(2, -1, -2),
    }[kind]
    assert open_loader(tiny_dataset, episodes=given, features=[]).episodes == [0, 2]
    assert open_loader(tiny_dataset, exclude_episodes=given, features=[]).episodes == [1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.tensor([0.0]), "contains 0.0, expected integers"),
        (np.array([True, False, True]), "contains True, expected integers"),
        (torch.tensor(1), "is a single number"),
        (np.array([[0], [1]]), r"contains \[0\], expected integers"),
        (torch.tensor([1, 1]), "episode 1 more than once"),
    ],
)
def test_arrays_that_name_no_episodes_are_refused(
    tiny_dataset: WrittenDataset, given: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_loader(tiny_dataset, episodes=given, features=[])
