"""Mixtures: what is in a sample, exact coverage, weights, what members must have in common, limits."""

from __future__ import annotations

import itertools
import pickle
import shutil
import socket
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import lrstream
from lrstream import MixtureDataset
from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.errors import ByteBudgetError, NotFoundError, UsageError
from tests.support.datasets import copy_dataset
from tests.support.loader import assert_same_sample, indices, open_loader, wait_for_no_threads
from tests.support.mixtures import anchors, in_turn, mix
from tests.support.reference import ReferenceDataset

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:Worker", "ignore:Samples deviate", "ignore:Samples of this mixture"),
]

FRONT, SIDE = "observation.images.front", "observation.images.side"
WRIST = "observation.images.wrist"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[WrittenDataset]:
    """48 frames at 10 per second with two cameras each, of which they share one."""
    base = tmp_path_factory.mktemp("pair")
    front = DemoCamera(FRONT, 32, 96, gop=4)
    first = DemoSpec((5, 7, 9, 4), (front, DemoCamera(SIDE, 32, 96)), fps=10)
    second = DemoSpec((12, 3, 8), (front, DemoCamera(WRIST, 48, 112)), fps=10)
    return [write_dataset(base / "first", first), write_dataset(base / "second", second)]


@pytest.fixture(scope="module")
def faster(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """The shared camera at 20 frames per second."""
    spec = DemoSpec((6, 5), (DemoCamera(FRONT, 32, 96),), fps=20)
    return write_dataset(tmp_path_factory.mktemp("faster") / "dataset", spec)


def whole(members: list[WrittenDataset]) -> Counter[tuple[int, int]]:
    return Counter((member, index) for member, one in enumerate(members) for index in range(one.num_frames))


# -- samples and coverage ---------------------------------------------------------------------------


def test_samples_are_those_of_the_members_without_what_only_one_has(pair: list[WrittenDataset]) -> None:
    deltas = {FRONT: [-0.1, 0.0], "action": [0.0, 0.1, 0.2]}
    references = [ReferenceDataset(one.root) for one in pair]
    dataset = MixtureDataset([open_loader(one, return_uint8=True, delta_timestamps=deltas) for one in pair])
    found = []
    for sample in dataset:
        member, index = int(sample.pop("dataset_index")), int(sample["index"])
        expected = references[member].sample(index, deltas, return_uint8=True)
        for key in (SIDE, WRIST):
            expected.pop(key, None)
        assert_same_sample(sample, expected, f"member {member} row {index}")
        found.append((member, index))
    assert Counter(found) == whole(pair)
    assert len({member for member, _ in found[:12]}) == 2, "interleaved from the start"


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 3), (2, 2), (3, 0), (2, 9)])
def test_every_frame_once_over_ranks_and_workers(
    pair: list[WrittenDataset], world_size: int, num_workers: int
) -> None:
    found: Counter[tuple[int, int]] = Counter()
    lengths = []
    for rank in range(world_size):
        dataset = mix(pair, rank=rank, world_size=world_size)
        dataset.set_epoch(num_workers)
        got = list(itertools.chain(*in_turn(dataset, num_workers, 2)))
        assert len(got) == len(dataset)
        lengths.append(len(got))
        found.update(got)
    assert found == whole(pair)
    assert lengths == dataset.partition_report().rank_frames.tolist()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("context", "num_workers"), [("fork", 2), ("forkserver", 1)])
def test_real_workers_deliver_the_same(pair: list[WrittenDataset], context: str, num_workers: int) -> None:
    expected = in_turn(mix(pair), num_workers, 4)
    dataset = mix(pair)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=4,
        num_workers=num_workers,
        collate_fn=anchors,
        multiprocessing_context=context,
        persistent_workers=True,
    )
    assert list(loader) == expected
    assert Counter(itertools.chain(*expected)) == whole(pair)
    dataset.set_epoch(1)
    following = mix(pair)
    following.set_epoch(1)
    assert list(loader) == in_turn(following, num_workers, 4) != expected


def test_the_default_collation_has_a_column_of_members(pair: list[WrittenDataset]) -> None:
    batches = list(DataLoader(mix(pair), batch_size=6))
    assert batches[0][FRONT].shape == (6, 3, 32, 96)
    members = torch.cat([batch["dataset_index"] for batch in batches])
    assert members.dtype == torch.int64
    assert members.bincount().tolist() == [25, 23]


def test_the_order_depends_on_seed_and_epoch_alone(pair: list[WrittenDataset]) -> None:
    orders = {}
    for seed, epoch in ((42, 0), (42, 1), (7, 0)):
        dataset = mix(pair, seed=seed)
        dataset.set_epoch(epoch)
        orders[seed, epoch] = anchors(dataset)
        assert anchors(dataset) == orders[seed, epoch]
        slow = mix(pair, seed=seed, decode_threads=1, decoded_queue_size=1)
        slow.set_epoch(epoch)
        assert anchors(slow) == orders[seed, epoch]
    assert len(set(map(tuple, orders.values()))) == 3
    assert anchors(mix(pair, seed=None)) == orders[42, 0]


# -- special mixtures -------------------------------------------------------------------------------


def test_a_mixture_of_one_is_the_dataset(pair: list[WrittenDataset]) -> None:
    for num_workers in (0, 2):
        found = [index for _, index in itertools.chain(*in_turn(mix(pair[:1]), num_workers, 3))]
        from tests.support.workers import batches_in_turn

        expected = list(itertools.chain(*batches_in_turn(open_loader(pair[0]), num_workers, 3)))
        assert found == expected


def test_the_same_dataset_twice_is_read_twice_in_different_orders(pair: list[WrittenDataset]) -> None:
    member = open_loader(pair[0])
    dataset = MixtureDataset([member, member])
    found = anchors(dataset)
    assert Counter(found) == whole([pair[0], pair[0]])
    orders = [[index for one, index in found if one == number] for number in (0, 1)]
    assert orders[0] != orders[1]
    # The member itself is as it was.
    assert sorted(indices(member)) == list(range(25))


def test_empty_members_give_nothing(pair: list[WrittenDataset]) -> None:
    empty = open_loader(pair[1], episodes=[])
    dataset = MixtureDataset([open_loader(pair[0]), empty])
    assert Counter(anchors(dataset)) == whole(pair[:1])
    assert anchors(MixtureDataset([empty, empty])) == []
    assert len(MixtureDataset([empty])) == 0
    with pytest.raises(UsageError, match=r"member 1 .* has no selected episode, but weight 1"):
        MixtureDataset([open_loader(pair[0]), empty], [1, 1])
    never = MixtureDataset([open_loader(pair[0]), empty], [1, 0])
    assert {member for member, _ in anchors(never)} == {0}


def test_ranks_without_episodes_of_one_member(pair: list[WrittenDataset]) -> None:
    """One episode of the second member, three ranks."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(3):
        members = [
            open_loader(pair[0], rank=0, world_size=1),
            open_loader(pair[1], episodes=[0], rank=0, world_size=1),
        ]
        dataset = MixtureDataset(members, rank=rank, world_size=3)
        got = anchors(dataset)
        assert len(got) == len(dataset) > 0
        found.update(got)
    assert found == whole(pair[:1]) + Counter((1, index) for index in range(12))
    with pytest.raises(UsageError, match=r"A rank has no data: rank \d of 9"):
        mix(pair, rank=0, world_size=9)


def test_members_of_different_places_are_refused(pair: list[WrittenDataset]) -> None:
    members = [open_loader(pair[0], rank=1, world_size=2), open_loader(pair[1], rank=0, world_size=2)]
    with pytest.raises(UsageError, match="opened for different places: rank 0 of 2, rank 1 of 2"):
        MixtureDataset(members)
    members = [open_loader(one, rank=1, world_size=2) for one in pair]
    dataset = MixtureDataset(members)
    assert (dataset.rank, dataset.world_size) == (1, 2)


# -- weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_weights_decide_and_passes_of_members_stay_exact(
    pair: list[WrittenDataset], num_workers: int
) -> None:
    dataset = mix(pair, [3, 1], samples_per_epoch=40)
    num_parts = max(1, num_workers)
    orders: list[list[tuple[int, int]]] = [[] for _ in range(num_parts)]
    for epoch in range(5):
        dataset.set_epoch(epoch)
        batches = in_turn(dataset, num_workers, 1)
        assert sum(map(len, batches)) == len(dataset) == 40
        # Batches of one come from the workers in turn.
        for worker, own in enumerate(orders):
            own += itertools.chain(*batches[worker::num_parts])
    for own in orders:
        assert abs(Counter(member for member, _ in own)[0] / len(own) - 0.75) < 0.08
        for member in (0, 1):
            order = [index for one, index in own if one == member]
            share = set(order)
            passes = [order[start : start + len(share)] for start in range(0, len(order), len(share))]
            assert all(set(part) == share for part in passes[:-1]), "every frame once in each pass"
            assert len(set(passes[-1])) == len(passes[-1])
            assert len(passes) < 3 or passes[0] != passes[1], "passes differ in order"
    assert {index for member, index in itertools.chain(*orders) if member == 0} == set(range(25))


def test_the_length_of_an_epoch(pair: list[WrittenDataset]) -> None:
    assert len(mix(pair, [1, 1])) == 48
    ranks = [mix(pair, [1, 1], samples_per_epoch=31, rank=rank, world_size=2) for rank in (0, 1)]
    assert [len(dataset) for dataset in ranks] == [16, 15]
    assert [len(anchors(dataset)) for dataset in ranks] == [16, 15]
    # Longer than all frames.
    assert len(anchors(mix(pair, [1, 1], samples_per_epoch=110))) == 110


def test_too_many_workers_for_a_member_are_worth_a_warning(pair: list[WrittenDataset]) -> None:
    def opened() -> MixtureDataset:
        return MixtureDataset(
            [open_loader(pair[0]), open_loader(pair[1], episodes=[0])], [1, 1], samples_per_epoch=40
        )

    assert opened().expected_shares() == [0.5, 0.5]
    assert opened().expected_shares(num_workers=2) == [0.75, 0.25]
    with pytest.warns(RuntimeWarning, match=r"member 1 .* 25\.0 % instead of 50\.0 %.*Use fewer workers"):
        found = list(itertools.chain(*in_turn(opened(), 2, 1)))
    assert abs(sum(member for member, _ in found) / len(found) - 0.25) < 0.15


# -- what members have in common --------------------------------------------------------------------


def test_what_only_some_have_is_named_once_and_not_read(pair: list[WrittenDataset]) -> None:
    with pytest.warns(RuntimeWarning) as caught:
        dataset = mix(pair)
    (warning,) = [one for one in caught if "mixture" in str(one.message)]
    assert f"{SIDE} of member 0" in str(warning.message)
    assert f"{WRIST} of member 1" in str(warning.message)
    assert warning.filename.endswith("mixtures.py"), "where the mixture was made"
    anchors(dataset)
    expected = []
    for one in pair:
        single = open_loader(one, features=[FRONT, "observation.state", "action"])
        indices(single)
        expected.append(single.metrics()["fetched_bytes"])
    counters = dataset.metrics()
    assert [member["fetched_bytes"] for member in counters["members"].values()] == expected
    assert counters["fetched_bytes"] == sum(expected)
    assert FRONT in dataset.features
    assert SIDE not in dataset.features
    assert [meta.video_keys for meta in dataset.metas] == [[FRONT], [FRONT]]
    assert all(meta.stats and SIDE not in meta.stats and WRIST not in meta.stats for meta in dataset.metas)


def test_members_without_a_camera_in_common_read_no_video(pair: list[WrittenDataset], tmp_path: Path) -> None:
    other = write_dataset(
        tmp_path / "other", DemoSpec((4,), (DemoCamera("observation.images.top", 32, 96),), fps=10)
    )
    dataset = mix([pair[0], other], byte_budget_gb=1e-9)
    assert len(anchors(dataset)) == 29
    assert dataset.metrics()["fetched_bytes"] == 0


def test_different_frame_rates_have_to_be_asked_for(
    pair: list[WrittenDataset], faster: WrittenDataset
) -> None:
    with pytest.raises(UsageError, match=r"different frame rates: member 0 .* 10, member 1 .* 20 frames"):
        mix([pair[0], faster])
    deltas = {"action": [-0.1, 0.0]}
    dataset = MixtureDataset(
        [open_loader(one, delta_timestamps=deltas) for one in (pair[0], faster)], allow_different_fps=True
    )
    references = [ReferenceDataset(pair[0].root), ReferenceDataset(faster.root)]
    found: Counter[tuple[int, int]] = Counter()
    for sample in dataset:
        member, index = int(sample["dataset_index"]), int(sample["index"])
        expected = references[member].sample(index, deltas)
        # 0.1 s are one frame of the first and two of the second.
        np.testing.assert_array_equal(sample["action"], expected["action"])
        np.testing.assert_array_equal(sample["action_is_pad"], expected["action_is_pad"])
        found[member, index] += 1
    assert found == whole([pair[0], faster])


def test_keys_that_mean_different_things_are_refused(pair: list[WrittenDataset], tmp_path: Path) -> None:
    larger = write_dataset(tmp_path / "larger", DemoSpec((4, 3), (DemoCamera(FRONT, 64, 96),), fps=10))

    def refused(message: str, **options: Any) -> None:
        first = options.pop("first", {})
        one, other = options.pop("members", (pair[0], pair[1]))
        with pytest.raises(UsageError, match=message):
            MixtureDataset([open_loader(one, **first), open_loader(other, **options)])

    refused(rf"differ in '{FRONT}'.*\(3, 32, 96\).*\(3, 64, 96\)", members=(pair[0], larger))
    refused(rf"differ in '{FRONT}'.*float32.*uint8", return_uint8=True)
    refused("differ in 'action'.*no window.*a window of 2", delta_timestamps={"action": [0.0, 0.1]})
    refused(
        "differ in 'action'.*a window of 3.*a window of 2",
        first={"delta_timestamps": {"action": [0.0, 0.1, 0.2]}},
        delta_timestamps={"action": [0.0, 0.1]},
    )
    refused("differ in 'timestamp'", delta_timestamps={"timestamp": [0.0, 0.1]})
    # Windows of what is left out do not matter.
    MixtureDataset([open_loader(pair[0], delta_timestamps={SIDE: [0.0, 0.1]}), open_loader(pair[1])])

    # Transforms may make pictures alike.
    def small(picture: torch.Tensor) -> torch.Tensor:
        return picture[..., :16, :16]

    cropped = [open_loader(one, image_transforms=small) for one in (pair[0], larger)]
    shapes = {sample[FRONT].shape for sample in MixtureDataset(cropped)}
    assert shapes == {(3, 16, 16)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"datasets": []}, "expected a list of at least one StreamingLeRobotDataset"),
        ({"datasets": ["a", "b"]}, "expected a list of at least one StreamingLeRobotDataset"),
        ({"weights": [1]}, "expected 2 numbers of 0 or more"),
        ({"weights": [1, -1]}, "expected 2 numbers of 0 or more"),
        ({"weights": [1, float("nan")]}, "expected 2 numbers of 0 or more"),
        ({"weights": "12"}, "expected 2 numbers of 0 or more"),
        ({"weights": [0, 0]}, "All weights are 0"),
        ({"samples_per_epoch": 5}, "without weights an epoch has every frame once"),
        ({"weights": [1, 1], "samples_per_epoch": 0}, "expected at least one for each of 1 ranks"),
        ({"weights": [1, 1], "samples_per_epoch": 2.5}, "expected an integer"),
        ({"seed": -1}, "seed is -1"),
        ({"byte_budget_gb": 0}, "byte_budget_gb is 0"),
        ({"decode_threads": 0}, "decode_threads is 0"),
        ({"rank": 1}, "give both of them"),
    ],
)
def test_arguments_that_cannot_work(pair: list[WrittenDataset], change: dict[str, Any], message: str) -> None:
    arguments = {"datasets": [open_loader(one, features=[]) for one in pair]} | change
    with pytest.raises(UsageError, match=message):
        MixtureDataset(**arguments)


def test_repeating_members_are_refused(pair: list[WrittenDataset]) -> None:
    with pytest.raises(UsageError, match="member of a mixture was opened with repeat=True"):
        MixtureDataset([open_loader(pair[0], repeat=True)])


# -- limits, counters and the end -------------------------------------------------------------------


def test_the_budget_is_one_for_all_members(pair: list[WrittenDataset]) -> None:
    singles = [open_loader(one, features=[FRONT, "observation.state", "action"]) for one in pair]
    largest = [int(single._sizes().max()) for single in singles]
    enough = mix(pair, byte_budget_gb=sum(largest) / 2**30)
    assert Counter(anchors(enough)) == whole(pair)
    counters = enough.metrics()
    assert 0 < counters["peak_reserved_bytes"] <= sum(largest)
    assert counters["peak_reserved_bytes"] == sum(
        one["peak_reserved_bytes"] for one in counters["members"].values()
    )
    for budget, message in (
        (sum(largest) - 1, "needs room for its largest episode"),
        (10, "episode . of member"),
    ):
        small = mix(pair, byte_budget_gb=budget / 2**30)
        with pytest.raises(ByteBudgetError, match=message):
            next(iter(small))
        assert small.metrics()["fetched_bytes"] == 0


def test_counters_are_of_each_and_of_all(pair: list[WrittenDataset]) -> None:
    dataset = mix(pair)
    anchors(dataset)
    counters = dataset.metrics()
    single = open_loader(pair[0]).metrics()
    assert counters.keys() == {*single, "members"}
    assert counters["samples"] == counters["wait_s"]["count"] == 48
    assert [member["samples"] for member in counters["members"].values()] == [25, 23]
    assert counters["stages"]["decode"]["count"] == 48
    assert counters["episodes_loaded"] == 7
    assert counters["fetched_bytes_per_sample"] == counters["fetched_bytes"] / 48
    rate = counters["stages"]["decode"]
    assert rate["per_s"] == pytest.approx(rate["count"] / rate["seconds"])


def test_decode_threads_are_shared_and_end(pair: list[WrittenDataset]) -> None:
    most = 0
    running: list[int] = []
    lock = threading.Lock()
    peak = [0]

    def slow(picture: torch.Tensor) -> torch.Tensor:
        with lock:
            running.append(1)
            peak[0] = max(peak[0], len(running))
        time.sleep(0.002)
        with lock:
            running.pop()
        return picture

    from tests.support.workers import as_worker

    members = [open_loader(one, image_transforms=slow) for one in (*pair, *pair)]
    dataset = MixtureDataset(members, decode_threads=2)
    with as_worker(dataset, 0, 1):  # where transforms run on decode threads
        iterator = iter(dataset)
    for count, _ in enumerate(iterator):
        names = [thread.name for thread in threading.enumerate()]
        most = max(most, sum(name.startswith("lrstream-decode") for name in names))
        if count == 60:
            break
    assert most == 2
    assert peak[0] == 2
    del iterator
    wait_for_no_threads()
    rest = iter(dataset)
    next(rest)
    dataset.close()
    wait_for_no_threads()
    with pytest.raises(StopIteration):
        next(rest)


def test_a_failing_member_ends_the_epoch(pair: list[WrittenDataset], tmp_path: Path) -> None:
    root = copy_dataset(pair[1], tmp_path / "broken")
    dataset = MixtureDataset([open_loader(pair[0]), open_loader(root)])
    shutil.rmtree(root / "videos" / FRONT)
    with pytest.raises(NotFoundError):
        anchors(dataset)
    wait_for_no_threads()


def test_a_mixture_is_lazy_and_can_be_pickled(pair: list[WrittenDataset]) -> None:
    assert lrstream.MixtureDataset is MixtureDataset
    dataset = mix(pair)
    expected = anchors(dataset)
    # As spawned workers get it; shared memory needs PyTorch's own pickler.
    assert len(pickle.dumps(dataset._members)) < 60_000
    assert repr(dataset).startswith("MixtureDataset(['test/dataset', 'test/dataset'], weights=None")
    assert dataset.num_frames == 48
    assert dataset.num_episodes == 7
    with dataset:
        assert anchors(dataset) == expected


def test_counters_of_a_mixture_are_served_and_not_those_of_its_members(
    pair: list[WrittenDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("LRSTREAM_PROMETHEUS_PORT", str(port))
    members = [open_loader(pair[0])]
    monkeypatch.delenv("LRSTREAM_PROMETHEUS_PORT")
    members.append(open_loader(pair[1]))
    monkeypatch.setenv("LRSTREAM_PROMETHEUS_PORT", str(port))
    with MixtureDataset(members) as dataset:
        anchors(dataset)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
    assert 'lrstream_samples_total{rank="0",worker="main"} 48\n' in text
    assert lrstream.flat_metrics(dataset.metrics())["lrstream/members/1/samples"] == 0, "closed"
