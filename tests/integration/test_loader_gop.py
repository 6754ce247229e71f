"""Strategy `gop` end to end: the samples of the other strategies, each picture decoded once (LD-14)."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.errors import ByteBudgetError, UsageError
from lrstream.streaming import decode
from lrstream.streaming.dataset import StreamingLeRobotDataset
from tests.support.datasets import DatasetCache
from tests.support.loader import indices, open_loader, wait_for_no_threads

FRONT = "observation.images.front"
SIDE = "observation.images.side"
GIB = 2**30


def video_keys(dataset: WrittenDataset) -> list[str]:
    return [camera.key for camera in dataset.spec.cameras if camera.kind == "video"]


def least_reservoir_gb(dataset: WrittenDataset, **options: Any) -> float:
    """The smallest reservoir that is not refused; the refusal says which."""
    with pytest.raises(ByteBudgetError, match="The reservoir of decoded pictures is too small") as caught:
        next(iter(open_loader(dataset, sampling_strategy="gop", reservoir_gb=1e-9, **options)))
    return float(caught.value.fields["size_bytes"]) / GIB


def open_gop(dataset: WrittenDataset, **options: Any) -> StreamingLeRobotDataset:
    return open_loader(dataset, sampling_strategy="gop", **options)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int, int]]:
    """How often each coded picture is fed to a decoder: by camera, episode and sample."""
    counts: Counter[tuple[str, int, int]] = Counter()
    feed = decode._feed

    def counting(clip: Any, first: int, stop: int, *arguments: Any) -> None:
        counts.update((clip.camera, clip.episode_index, sample) for sample in range(first, stop))
        feed(clip, first, stop, *arguments)

    monkeypatch.setattr(decode, "_feed", counting)
    return counts


@pytest.mark.parametrize("deltas", [None, [-3, -2, -1, 0], [-1, 2]])
@pytest.mark.parametrize(
    "name", ["rich", "tiny", "standard", "long", "depth", "images", "av1", "h264_open", "hevc_open", "vp9"]
)
def test_samples_are_those_of_another_strategy(
    dataset_cache: DatasetCache, name: str, deltas: list[int] | None
) -> None:
    dataset = dataset_cache.get(name)
    options: dict[str, Any] = {"return_uint8": name != "tiny"}
    if name == "long":
        options["episodes"] = [1]
    if deltas is not None:
        keys = [*video_keys(dataset)[:1], "action"]
        options["delta_timestamps"] = {key: [delta / dataset.spec.fps for delta in deltas] for key in keys}
    expected = {int(sample["index"]): sample for sample in open_loader(dataset, **options)}
    least_gb = least_reservoir_gb(dataset, **options) if video_keys(dataset) else 0.1
    loader = open_gop(dataset, reservoir_gb=least_gb, **options)
    for sample in loader:
        other = expected.pop(int(sample["index"]))
        assert sample.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                assert sample[key].dtype == value.dtype
                assert torch.equal(sample[key], value), key
            else:
                assert sample[key] == value, key
        assert loader.metrics()["reservoir_bytes"] <= least_gb * GIB
    assert not expected
    metrics = loader.metrics()
    num_frames = len(loader)
    if deltas is None:
        assert metrics["reservoir_pictures"] == num_frames * len(video_keys(dataset))
    else:
        # The first and the last rows of an episode may be in no window but the one of a camera without any.
        assert metrics["reservoir_pictures"] <= num_frames * len(video_keys(dataset))
    assert (metrics["peak_reservoir_bytes"] > 0) == bool(video_keys(dataset))
    assert metrics["reservoir_bytes"] == 0
    loader.close()


@pytest.mark.parametrize("deltas", [None, [-3, -2, -1, 0], [0, 5]])
@pytest.mark.parametrize("reservoir_gb", ["least", 2.0])
def test_each_coded_picture_is_fed_once(
    long_dataset: WrittenDataset,
    fed: Counter[tuple[str, int, int]],
    deltas: list[int] | None,
    reservoir_gb: float | str,
) -> None:
    # Closed GOPs of 30 that begin with their episode, so that no unit needs anything of another one.
    windows = None if deltas is None else {FRONT: [delta / 30 for delta in deltas]}
    options: dict[str, Any] = {"delta_timestamps": windows, "return_uint8": True}
    if reservoir_gb == "least":
        reservoir_gb = least_reservoir_gb(long_dataset, **options)
    loader = open_gop(long_dataset, reservoir_gb=reservoir_gb, **options)
    assert sorted(indices(loader)) == list(range(600))
    assert len(fed) == 600
    assert set(fed.values()) == {1}
    assert loader.metrics()["reservoir_pictures"] == 600


def test_a_gop_that_is_cut_is_fed_for_both_sides(tmp_path: Path, fed: Counter[tuple[str, int, int]]) -> None:
    # Units follow the longer GOPs and begin at 9 and 18, of which 9 is inside a GOP of 2.
    cameras = (DemoCamera(SIDE, 48, 112, gop=2), DemoCamera(FRONT, 64, 96, gop=9))
    dataset = write_dataset(tmp_path / "dataset", DemoSpec((27, 27), cameras))
    assert sorted(indices(open_gop(dataset, return_uint8=True))) == list(range(54))
    assert {key[0] for key, count in fed.items() if count > 1} == {SIDE}
    twice = [sample for (_, _, sample), count in fed.items() if count == 2]
    # Samples are counted from the start of the span, which holds three more before the second episode.
    assert twice == [8, 3 + 8]
    assert set(fed.values()) == {1, 2}
    assert len(fed) == 2 * 54


def joined_recording(tmp_path: Path) -> WrittenDataset:
    """Two episodes of one continuous recording, so that the second one begins inside a GOP."""
    camera = DemoCamera(FRONT, 64, 96, gop=12, bframes=2)
    dataset = write_dataset(tmp_path / "dataset", DemoSpec((31, 29), (camera,)))
    one = write_dataset(tmp_path / "one", DemoSpec((60,), (camera,)))
    (path,), (source,) = dataset.video_files[FRONT], one.video_files[FRONT]
    shutil.copyfile(one.root / source, dataset.root / path)
    return dataset


@pytest.mark.parametrize("deltas", [[0], [-3, 0, 2]])
def test_an_episode_that_begins_inside_a_gop(tmp_path: Path, deltas: list[int]) -> None:
    dataset = joined_recording(tmp_path)
    options: dict[str, Any] = {
        "return_uint8": True,
        "delta_timestamps": {FRONT: [delta / 30 for delta in deltas]},
    }
    expected = {int(sample["index"]): sample for sample in open_loader(dataset, **options)}
    for sample in open_gop(dataset, **options):
        assert torch.equal(sample[FRONT], expected.pop(int(sample["index"]))[FRONT])
    assert not expected


@pytest.mark.parametrize("deltas", [None, [-2, 0]])
def test_the_order_does_not_depend_on_timing(
    standard_dataset: WrittenDataset, deltas: list[int] | None
) -> None:
    windows = None if deltas is None else {FRONT: [delta / 30 for delta in deltas]}
    options: dict[str, Any] = {"delta_timestamps": windows, "return_uint8": True, "episode_pool_size": 3}
    options["reservoir_gb"] = least_reservoir_gb(standard_dataset, **options)
    orders = {
        tuple(
            indices(
                open_gop(
                    standard_dataset,
                    **options,
                    decode_threads=threads,
                    decoded_queue_size=queue,
                    prefetch_episodes=prefetch,
                    max_num_shards=1 + prefetch,
                )
            )
        )
        for threads, queue, prefetch in [(1, 1, 0), (4, 16, 8), (2, 3, 1)]
    }
    assert len(orders) == 1
    assert sorted(next(iter(orders))) == list(range(standard_dataset.num_frames))
    assert next(iter(orders)) != tuple(range(standard_dataset.num_frames))


@pytest.mark.parametrize("deltas", [None, [-2, 0]])
def test_every_position_continues_with_the_next_sample(
    standard_dataset: WrittenDataset, deltas: list[int] | None
) -> None:
    windows = None if deltas is None else {FRONT: [delta / 30 for delta in deltas]}
    options: dict[str, Any] = {"delta_timestamps": windows, "return_uint8": True, "episode_pool_size": 2}
    options["reservoir_gb"] = least_reservoir_gb(standard_dataset, **options)
    # Bytes for hardly more than the largest episode, so that restoring has to wait for its own decodes.
    with pytest.raises(ByteBudgetError) as caught:
        next(iter(open_gop(standard_dataset, byte_budget_gb=1e-9, **options)))
    options["byte_budget_gb"] = 1.05 * caught.value.fields["size_bytes"] / GIB
    writer = open_gop(standard_dataset, **options)
    expected = indices(writer)
    for position in range(0, len(expected) + 1, 11):
        iterator = itertools.islice(iter(writer), position)
        assert indices(iterator) == expected[:position]
        reader = open_gop(standard_dataset, **options)
        reader.load_state_dict(json.loads(json.dumps(writer.state_dict())))
        assert indices(reader) == expected[position:]
        assert reader.metrics()["peak_reservoir_bytes"] <= options["reservoir_gb"] * GIB
    wait_for_no_threads()


def test_workers_share_the_reservoir(demo_dataset: WrittenDataset) -> None:
    dataset = open_gop(demo_dataset, return_uint8=True, reservoir_gb=0.03)
    found: list[int] = []
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": 16}
    for batch in dataset.follow(DataLoader(dataset, collate_fn=indices, **options)):
        found += batch
        if len(found) == 20 * 16:
            state = json.loads(json.dumps(dataset.state_dict()))
            break
    again = open_gop(demo_dataset, return_uint8=True, reservoir_gb=0.03)
    again.load_state_dict(state)
    for batch in again.follow(DataLoader(again, collate_fn=indices, **options)):
        found += batch
    assert sorted(found) == list(range(600))

    # The rest may also be read by one process, with another strategy and without a reservoir.
    other = open_loader(demo_dataset, return_uint8=True)
    other.load_state_dict(state, elastic=True)
    assert sorted(found[: 20 * 16] + indices(other)) == list(range(600))
    third = open_gop(demo_dataset, return_uint8=True, reservoir_gb=0.02)
    third.load_state_dict(state, elastic=True)
    iterator = iter(third)
    begun = indices(itertools.islice(iterator, 50))
    fourth = open_loader(demo_dataset, return_uint8=True, sampling_strategy="round_robin")
    fourth.load_state_dict(third.state_dict(), elastic=True)
    assert sorted(found[: 20 * 16] + begun + indices(fourth)) == list(range(600))


def test_what_the_order_depends_on_is_refused_to_differ(tiny_dataset: WrittenDataset) -> None:
    dataset = open_gop(tiny_dataset, return_uint8=True, reservoir_gb=0.25)
    next(iter(dataset))
    state = dataset.state_dict()
    with pytest.raises(UsageError, match="reservoir_bytes: saved 268435456, now 134217728"):
        open_gop(tiny_dataset, reservoir_gb=0.125).load_state_dict(state)
    with pytest.raises(UsageError, match="strategy: saved 'gop', now 'remaining'"):
        open_loader(tiny_dataset, reservoir_gb=0.25).load_state_dict(state)
    with pytest.raises(UsageError, match=r"picture_windows: saved .*front:0.*, now .*front:-1,0"):
        open_gop(tiny_dataset, reservoir_gb=0.25, delta_timestamps={FRONT: [-0.1, 0]}).load_state_dict(state)
    # Windows over numbers do not matter, and neither do reservoirs that are not used.
    open_gop(tiny_dataset, reservoir_gb=0.25, delta_timestamps={"action": [0, 0.1]}).load_state_dict(state)
    plain = open_loader(tiny_dataset, reservoir_gb=0.25, delta_timestamps={FRONT: [-0.1, 0]})
    open_loader(tiny_dataset, reservoir_gb=0.5).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "2", True])
def test_a_reservoir_without_room_is_refused(tiny_dataset: WrittenDataset, value: Any) -> None:
    with pytest.raises(UsageError, match="reservoir_gb is"):
        open_gop(tiny_dataset, reservoir_gb=value)
