"""The loader against the naive reference reader: every kind of feature, windows, selections, options."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrstream.demo import WrittenDataset, read_identity
from lrstream.errors import NotFoundError, UsageError
from lrstream.streaming.episode import EpisodeRecord
from lrstream.streaming.samples import SampleBuilder
from tests.support.datasets import DatasetCache
from tests.support.loader import assert_same_sample, indices, open_loader, samples_of
from tests.support.reference import ReferenceDataset

FRONT = "observation.images.front"
SIDE = "observation.images.side"
DEPTH = "observation.images.depth"


@functools.lru_cache(maxsize=4)
def reference(root: Path, depth_unit: str = "mm") -> ReferenceDataset:
    return ReferenceDataset(root, depth_unit=depth_unit)


def compare(
    dataset: WrittenDataset,
    deltas: dict[str, list[float]] | None = None,
    *,
    depth_unit: str = "mm",
    return_uint8: bool = True,
    num_workers: int = 0,
    **options: Any,
) -> None:
    expected = reference(dataset.root, depth_unit)
    loader = open_loader(
        dataset,
        delta_timestamps=deltas,
        depth_output_unit=depth_unit,
        return_uint8=return_uint8,
        **options,
    )
    found = []
    for sample in samples_of(loader, num_workers):
        index = int(sample["index"])
        assert_same_sample(sample, expected.sample(index, deltas, return_uint8=return_uint8), f"row {index}")
        found.append(index)
    assert sorted(found) == list(range(dataset.num_frames))
    loader.close()


@pytest.mark.parametrize(
    "name", ["rich", "tiny", "standard", "depth", "images", "h264_open", "hevc_open", "vp9"]
)
def test_every_frame_equals_the_reference(dataset_cache: DatasetCache, name: str) -> None:
    compare(dataset_cache.get(name))


@pytest.mark.parametrize("return_uint8", [True, False])
def test_windows_of_every_kind_of_feature(rich_dataset: WrittenDataset, return_uint8: bool) -> None:
    keys = [
        FRONT,
        DEPTH,
        "observation.images.still",
        "observation.images.range",
        "observation.state",
        "action",
    ]
    compare(
        rich_dataset,
        {key: [-0.2, -0.1, 0.0, 0.3] for key in keys} | {"timestamp": [0.0], "action": [0.1]},
        return_uint8=return_uint8,
    )


def test_the_window_of_one_frame_loses_its_axis_for_videos_alone(rich_dataset: WrittenDataset) -> None:
    deltas = {FRONT: [0.0], "observation.images.still": [0.0], "action": [0.0]}
    compare(rich_dataset, deltas)
    sample = next(iter(open_loader(rich_dataset, delta_timestamps=deltas)))
    assert sample[FRONT].ndim == 3
    assert sample["observation.images.still"].ndim == 4
    assert sample["action"].ndim == 2


def test_floats_are_bytes_divided_by_255(tiny_dataset: WrittenDataset) -> None:
    compare(tiny_dataset, return_uint8=False)
    sample = next(iter(open_loader(tiny_dataset)))
    assert sample[FRONT].dtype == torch.float32
    assert 0 <= sample[FRONT].min() <= sample[FRONT].max() <= 1


@pytest.mark.parametrize("unit", ["mm", "m"])
def test_depth_in_both_units(rich_dataset: WrittenDataset, depth_dataset: WrittenDataset, unit: str) -> None:
    """Never RGB, and the unit that was asked for (K14)."""
    compare(rich_dataset, depth_unit=unit)
    compare(depth_dataset, {DEPTH: [-1 / 30, 0.0]}, depth_unit=unit)
    sample = next(iter(open_loader(depth_dataset, depth_output_unit=unit)))
    assert sample[DEPTH].shape == (1, 32, 50)
    assert sample[DEPTH].dtype == torch.float32
    assert (sample[DEPTH].max() > 100) == (unit == "mm")


def test_stored_images_stay_float_unless_all_are_wanted_as_bytes(rich_dataset: WrittenDataset) -> None:
    still = "observation.images.still"
    by_option: dict[Any, Any] = {
        option: {int(s["index"]): s for s in open_loader(rich_dataset, return_uint8=option)}
        for option in (True, "all")
    }
    for index, sample in by_option[True].items():
        as_bytes = by_option["all"][index]
        assert sample[still].dtype == torch.float32
        assert as_bytes[still].dtype == torch.uint8
        torch.testing.assert_close(sample[still], as_bytes[still] / 255, rtol=0, atol=0)
        assert as_bytes["observation.images.range"].dtype == torch.float32


# -- clocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deltas", [None, [0.0], [-0.1, 0.0, 0.1]])
def test_a_clock_that_restarts_in_the_second_file(
    k04_dataset: WrittenDataset, deltas: list[float] | None
) -> None:
    """Row 20 is frame 0 of episode 2, the first picture of the second file (K04)."""
    windows = None if deltas is None else {FRONT: deltas}
    compare(k04_dataset, windows)
    seen = {}
    for sample in open_loader(k04_dataset, delta_timestamps=windows, return_uint8=True):
        picture = sample[FRONT] if sample[FRONT].ndim == 3 else sample[FRONT][len(deltas or []) // 2]
        seen[int(sample["index"])] = read_identity(picture.numpy())
    identities = k04_dataset.identities(FRONT)
    assert seen == {row: tuple(identities[row].tolist()) for row in range(40)}


@pytest.mark.parametrize("name", ["demo", "standard"])
def test_every_camera_shows_its_own_episode_and_frame(dataset_cache: DatasetCache, name: str) -> None:
    dataset = dataset_cache.get(name)
    identities = {key: dataset.identities(key) for key in dataset.camera_keys}
    for sample in open_loader(dataset, return_uint8=True):
        for key, expected in identities.items():
            assert read_identity(sample[key].numpy()) == tuple(expected[int(sample["index"])].tolist())


# -- windows ----------------------------------------------------------------------------------------


def test_windows_longer_than_any_buffer(long_dataset: WrittenDataset) -> None:
    """300-frame episodes and deltas beyond both ends, for numbers and pictures alike (K07)."""
    frames = [-105, -1, 0, 1, 105, 400]
    deltas = [frame / 30 for frame in frames]
    loader = open_loader(
        long_dataset,
        delta_timestamps={"action": deltas, FRONT: deltas},
        return_uint8=True,
        episode_pool_size=1,
        prefetch_episodes=0,
        byte_budget_gb=0.01,
    )
    rows = reference(long_dataset.root).rows
    actions = np.array([row["action"] for row in rows], dtype=np.float32)
    for sample in itertools.islice(loader, 200):
        episode, frame, index = (int(sample[key]) for key in ("episode_index", "frame_index", "index"))
        wanted = [frame + delta for delta in frames]
        is_pad = [not 0 <= number < 300 for number in wanted]
        clamped = [min(max(number, 0), 299) for number in wanted]
        assert sample["action_is_pad"].tolist() == is_pad
        assert sample[f"{FRONT}_is_pad"].tolist() == is_pad
        np.testing.assert_array_equal(sample["action"].numpy(), actions[[episode * 300 + c for c in clamped]])
        if index % 37 == 0:
            found = [read_identity(picture.numpy()) for picture in sample[FRONT]]
            assert found == [(0, episode, number) for number in clamped]
    loader.close()


# -- selection --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("episodes", "exclude", "expected"),
    [
        ([1], None, [1]),
        ([2, 0], None, [0, 2]),
        (None, [1], [0, 2]),
        ([0, 1], [0], [1]),
        (None, [], [0, 1, 2]),
    ],
)
def test_a_selection_gives_its_frames_with_unchanged_windows(
    tiny_dataset: WrittenDataset, episodes: Any, exclude: Any, expected: list[int]
) -> None:
    """Episodes of 5, 7 and 9 frames (K06)."""
    deltas = {"action": [-0.1, 0.0, 0.1], FRONT: [-0.1, 0.0, 0.1]}
    loader = open_loader(
        tiny_dataset, episodes=episodes, exclude_episodes=exclude, delta_timestamps=deltas, return_uint8=True
    )
    lengths, starts = [5, 7, 9], [0, 5, 12]
    rows = [row for e in expected for row in range(starts[e], starts[e] + lengths[e])]
    assert loader.num_frames == len(loader) == len(rows)
    assert loader.num_episodes == len(expected)
    assert loader.episodes == expected
    found = []
    for sample in loader:
        index = int(sample["index"])
        found.append(index)
        assert_same_sample(sample, reference(tiny_dataset.root).sample(index, deltas), f"row {index}")
    assert sorted(found) == rows


def test_an_empty_selection_is_an_empty_epoch(tiny_dataset: WrittenDataset) -> None:
    for repeat in (False, True):
        loader = open_loader(tiny_dataset, episodes=[], repeat=repeat)
        assert (loader.num_frames, loader.num_episodes, len(loader)) == (0, 0, 0)
        assert indices(loader) == []


@pytest.mark.parametrize(
    ("episodes", "error"),
    [([1, 1], UsageError), ([3], NotFoundError), ([-1], UsageError), ([0.5], UsageError), ("01", UsageError)],
)
def test_a_selection_that_cannot_be_is_refused(
    tiny_dataset: WrittenDataset, episodes: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        open_loader(tiny_dataset, episodes=episodes)


# -- transforms -------------------------------------------------------------------------------------


def test_transforms_touch_every_rgb_camera_and_no_depth(rich_dataset: WrittenDataset) -> None:
    plain = {int(s["index"]): s for s in open_loader(rich_dataset, return_uint8=True)}
    for sample in open_loader(
        rich_dataset, return_uint8=True, image_transforms=lambda picture: picture * 0 + 7
    ):
        before = plain[int(sample["index"])]
        for key in (FRONT, "observation.images.still"):
            assert (sample[key] == 7).all()
        for key in (DEPTH, "observation.images.range", "action"):
            assert torch.equal(sample[key], before[key])


def test_without_workers_one_seed_gives_the_same_transforms(tiny_dataset: WrittenDataset) -> None:
    def noisy(picture: torch.Tensor) -> torch.Tensor:
        return picture + torch.rand(())

    def run() -> list[float]:
        torch.manual_seed(3)
        loader = open_loader(tiny_dataset, image_transforms=noisy, decode_threads=4)
        return [float(sample[FRONT].mean()) for sample in loader]

    first = run()
    assert first == run()
    assert len(set(first)) > 10


# -- what training scripts ask ----------------------------------------------------------------------


def test_metadata_under_lerobots_names(rich_dataset: WrittenDataset) -> None:
    loader = open_loader(rich_dataset, episodes=[1, 2])
    meta = loader.meta
    assert (meta.total_episodes, meta.total_frames, meta.fps) == (5, 26, 10)
    assert (loader.num_episodes, loader.num_frames, loader.fps) == (2, 11, 10)
    assert meta.video_keys == [FRONT, DEPTH]
    assert meta.image_keys == ["observation.images.still", "observation.images.range"]
    assert meta.camera_keys == [*meta.video_keys, *meta.image_keys]
    assert meta.depth_keys == [DEPTH, "observation.images.range"]
    assert loader.features == meta.features
    declared = reference(rich_dataset.root).features
    assert {key: list(feature["shape"]) for key, feature in meta.features.items()} == {
        key: list(feature["shape"]) for key, feature in declared.items()
    }
    assert meta.tasks == reference(rich_dataset.root).tasks
    assert meta.stats is not None
    assert meta.stats["action"]["mean"].shape == meta.features["action"]["shape"]
    episode = meta.episodes[3]
    assert episode["length"] == 5
    assert meta.episodes["dataset_from_index"] == [0, 6, 9, 17, 22]
    assert [row["episode_index"] for row in meta.episodes] == [0, 1, 2, 3, 4]
    assert "tasks" in meta.episodes.column_names
    assert (loader.repo_id, loader.root) == ("test/dataset", str(rich_dataset.root))
    assert "num_frames=11" in repr(loader)


def test_the_root_alone_is_enough(tiny_dataset: WrittenDataset) -> None:
    from lrstream import StreamingLeRobotDataset

    for source in (str(tiny_dataset.root), tiny_dataset.root, tiny_dataset.root.as_uri()):
        with StreamingLeRobotDataset(source, episodes=[0]) as loader:
            assert sorted(indices(loader)) == [0, 1, 2, 3, 4]


def test_samples_do_not_keep_their_episode_in_memory(tiny_dataset: WrittenDataset) -> None:
    sample = next(iter(open_loader(tiny_dataset, delta_timestamps={"action": [0.0, 0.1]})))
    for key, value in sample.items():
        if isinstance(value, torch.Tensor):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), key


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny", {}),
        ("tiny", {"return_uint8": True, "delta_timestamps": {"action": [0.0, 0.1, 0.2]}}),
        ("standard", {"return_uint8": True}),
        ("depth", {}),
        ("depth", {"delta_timestamps": {DEPTH: [-1 / 30, 0.0]}}),
        ("h264_open", {"return_uint8": True}),
    ],
)
def test_samples_are_what_is_expected_of_them(
    dataset_cache: DatasetCache, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    tensors_like = SampleBuilder.tensors_like

    def noting(builder: SampleBuilder, episode: EpisodeRecord) -> dict[str, torch.Tensor]:
        found.append(tensors_like(builder, episode))
        return found[-1]

    monkeypatch.setattr(SampleBuilder, "tensors_like", noting)
    sample = next(iter(open_loader(dataset_cache.get(name), **options)))
    assert len(found) == 1
    tensors = {key: value for key, value in sample.items() if isinstance(value, torch.Tensor)}
    assert set(found[0]) == set(tensors)
    for key, value in tensors.items():
        assert (found[0][key].shape, found[0][key].dtype) == (value.shape, value.dtype), key


def test_nothing_is_expected_of_stored_images(image_dataset: WrittenDataset) -> None:
    from torch.utils.data import DataLoader

    memory_of_samples = [sample.place for sample in open_loader(image_dataset)]
    assert set(memory_of_samples) == {None}
    batches = list(DataLoader(open_loader(image_dataset), batch_size=4))
    assert sum(len(batch["index"]) for batch in batches) == len(memory_of_samples)
