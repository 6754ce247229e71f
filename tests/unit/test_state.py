"""Loader states: round trip, refusals, offsets of workers, elastic resume (LD-10, LD-15, K18)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lrstream.errors import UsageError
from lrstream.streaming.planning import plan_stream
from lrstream.streaming.position import batches_of_samples, worker_offsets
from lrstream.streaming.state import (
    EpochStage,
    LoaderState,
    check_compatible,
    remaining_after,
    replan,
    resume_offsets,
    selection_digest,
)

LENGTHS = [9, 4, 7, 12, 3, 8, 5, 10]


def make_state(**changes: Any) -> LoaderState:
    usual: dict[str, Any] = {
        "data_root": "hf://datasets/someone/something@" + "a" * 40,
        "revision": "a" * 40,
        "selection_digest": selection_digest(range(8), LENGTHS),
        "seed": 42,
        "epoch": 0,
        "world_size": 2,
        "rank": 0,
        "num_workers": 2,
        "batch_size": 4,
        "strategy": "remaining",
    }
    return LoaderState(**(usual | changes))


# -- round trip -------------------------------------------------------------------------------------


def test_a_state_survives_json() -> None:
    stage = EpochStage(3, 1, 2, True, "round_robin", 4, 10**10, 5)
    state = make_state(seed=2**64 - 1, num_batches=7, episode_pool_size=5, earlier_stages=(stage,))
    values = json.loads(json.dumps(state.to_dict()))
    assert LoaderState.from_dict(values) == state
    assert values["format_version"] == 4
    chosen = make_state(features=("action",), content_digest="c" * 16)
    assert LoaderState.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen


def test_a_state_holds_plain_values_only() -> None:
    def check(value: object) -> None:
        assert type(value) in (int, str, bool, type(None), list, dict)
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(part)

    check(make_state(earlier_stages=(EpochStage(1, 0, 2, False, "remaining", None, None, 1),)).to_dict())


def test_a_state_of_another_loader_is_refused_with_advice() -> None:
    for foreign in ({}, {"epoch": 3, "samples": 100}, None, 17):
        with pytest.raises(UsageError, match=r"no format version.*Start the epoch anew"):
            LoaderState.from_dict(foreign)  # type: ignore[arg-type]


def test_a_state_of_a_newer_version_is_refused_with_both_versions() -> None:
    for version in (5, 0, "1", True):
        with pytest.raises(UsageError, match=r"format version .*, but this lrstream reads versions 1 to 4"):
            LoaderState.from_dict(make_state().to_dict() | {"format_version": version})


def test_a_state_of_version_1_is_of_all_features_and_unknown_content() -> None:
    values = make_state(num_batches=3).to_dict() | {"format_version": 1}
    del values["features"], values["content_digest"]
    state = LoaderState.from_dict(values)
    assert state == make_state(num_batches=3)
    check_compatible(state, make_state(content_digest="c" * 16))
    with pytest.raises(UsageError, match=r"features: saved None, now \('action',\)"):
        check_compatible(state, make_state(features=("action",)))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_state_of_another_order_is_refused(version: int) -> None:
    for strategy in ("remaining", "gop"):
        values = make_state(strategy=strategy).to_dict() | {"format_version": version}
        if version == 1:
            del values["features"], values["content_digest"]
        if strategy == "remaining":
            assert LoaderState.from_dict(values) == make_state()
            continue
        with pytest.raises(UsageError, match=r"'gop' draws in another order since version 4"):
            LoaderState.from_dict(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "42"}, "seed of the loader state is '42', expected int"),
        ({"epoch": True}, "epoch of the loader state is True, expected int"),
        ({"drop_last": 0}, "drop_last of the loader state is 0, expected bool"),
        ({"revision": None}, "revision of the loader state is None, expected str"),
        ({"seed": None}, "seed of the loader state is None, expected int"),
        ({"features": "action"}, "features of the loader state is 'action', expected tuple"),
        ({"features": [1]}, "features of the loader state is \\[1\\], expected tuple"),
        ({"content_digest": None}, "content_digest of the loader state is None, expected str"),
        ({"colour": 1}, "unknown fields: colour"),
        ({"earlier_stages": 3}, "earlier_stages of the loader state is 3"),
        ({"earlier_stages": [{}]}, "lacks or has unknown fields: batch_size"),
        ({"earlier_stages": ["x"]}, "A part of the loader state is 'x'"),
        ({"num_batches": -1}, "batch -1"),
        ({"batch_size": 0}, "batch size 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"strategy": "other"}, "no sampling strategy 'other'"),
    ],
)
def test_damaged_states_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LoaderState.from_dict(make_state().to_dict() | change)


def test_a_missing_field_is_named() -> None:
    values = make_state().to_dict()
    del values["num_workers"]
    with pytest.raises(UsageError, match="num_workers"):
        LoaderState.from_dict(values)


def test_the_digest_tells_selections_apart() -> None:
    digests = [
        selection_digest([0, 1], [5, 6]),
        selection_digest([1, 0], [5, 6]),
        selection_digest([0, 1], [6, 5]),
        selection_digest([0], [5]),
        selection_digest([], []),
        selection_digest([0, 1], [5, 6], [7, 8]),
        selection_digest([0, 1], [5, 6], [7, 9]),
    ]
    assert len(set(digests)) == len(digests)
    assert selection_digest(np.array([0, 1], dtype=np.int32), [5, 6]) == digests[0]
    # Each column as its count and its values, 64-bit little-endian; other digests would refuse saved states.
    packed = struct.pack("<7q", 2, 0, 1, 2, 5, 6, 0)
    assert digests[0] == hashlib.sha256(packed).hexdigest()[:16]


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("data_root", "/elsewhere"),
        ("revision", "b" * 40),
        ("selection_digest", "0" * 16),
        ("seed", 43),
        ("world_size", 3),
        ("num_workers", 0),
        ("batch_size", 8),
        ("drop_last", True),
        ("strategy", "round_robin"),
        ("episode_pool_size", 7),
        ("byte_budget_bytes", 10**9),
        ("features", ("action",)),
    ],
)
def test_any_difference_is_refused_with_both_values(field: str, other: object) -> None:
    saved = make_state(num_batches=3)
    with pytest.raises(UsageError) as caught:
        check_compatible(saved, make_state(**{field: other}))
    assert f"{field}: saved {getattr(saved, field)!r}, now {other!r}" in str(caught.value)


def test_all_differences_are_listed_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        check_compatible(make_state(), make_state(world_size=3, seed=1, batch_size=5))
    text = str(caught.value)
    assert "world_size: saved 2, now 3" in text
    assert "seed: saved 42, now 1" in text
    assert "batch_size: saved 4, now 5" in text


def test_position_and_rank_are_no_difference() -> None:
    check_compatible(make_state(num_batches=3, epoch=2, rank=1), make_state())


def test_other_numbers_must_be_asked_for() -> None:
    other = make_state(world_size=5, num_workers=0, batch_size=1, strategy="round_robin", episode_pool_size=2)
    check_compatible(make_state(), other, elastic=True)
    with pytest.raises(UsageError, match="elastic resume explicitly"):
        check_compatible(make_state(), other)
    with pytest.raises(UsageError, match="seed: saved 42, now 7"):
        check_compatible(make_state(), make_state(seed=7), elastic=True)
    with pytest.raises(UsageError, match="selection_digest"):
        replan(make_state(), make_state(selection_digest="0" * 16))


def test_a_moved_dataset_must_be_asked_for() -> None:
    check_compatible(make_state(), make_state(data_root="/moved"), ignore=("data_root",))
    with pytest.raises(UsageError, match="seed cannot be ignored"):
        check_compatible(make_state(), make_state(), ignore=("seed",))


def test_files_that_were_written_anew_are_worth_a_warning() -> None:
    saved, now = make_state(content_digest="a" * 16), make_state(content_digest="b" * 16)
    with pytest.warns(RuntimeWarning, match="written anew since the loader state was saved"):
        check_compatible(saved, now)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_compatible(saved, now, ignore=["content_digest"])
        check_compatible(saved, saved)
        check_compatible(saved, make_state(), ignore=[])
        moved = make_state(content_digest="b" * 16, data_root="/moved")
        check_compatible(saved, moved, ignore=["data_root"])


# -- offsets of workers -----------------------------------------------------------------------------


def batches_in_turn(frames: Sequence[int], batch_size: int, drop_last: bool) -> list[tuple[int, int]]:
    """(worker, samples) of every batch, by taking turns one batch at a time."""
    left = list(frames)
    ended = [False] * len(frames)
    given = []
    while not all(ended):
        for worker in range(len(frames)):
            if ended[worker]:
                continue
            size = min(batch_size, left[worker])
            if size == 0 or (drop_last and size < batch_size):
                ended[worker] = True
                continue
            left[worker] -= size
            given.append((worker, size))
    return given


CASES = [
    ([10, 10, 10], 4),
    ([1, 20, 7], 3),
    ([0, 5, 0, 9], 2),
    ([13], 5),
    ([3, 2, 1], 4),
    ([8, 8], 8),
]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("frames", "batch_size"), CASES)
def test_offsets_equal_taking_turns(frames: list[int], batch_size: int, drop_last: bool) -> None:
    turns = batches_in_turn(frames, batch_size, drop_last)
    for given in range(len(turns) + 1):
        offsets = worker_offsets(given, batch_size, frames, drop_last=drop_last)
        so_far = turns[:given]
        workers = range(len(frames))
        assert offsets.samples == tuple(sum(n for w, n in so_far if w == worker) for worker in workers)
        assert offsets.batches == tuple(sum(1 for w, _ in so_far if w == worker) for worker in workers)
        if given < len(turns):
            assert offsets.next_worker == turns[given][0]
        assert batches_of_samples(sum(offsets.samples), batch_size, frames, drop_last=drop_last) == given
    beyond = worker_offsets(len(turns) + 5, batch_size, frames, drop_last=drop_last)
    assert beyond == worker_offsets(len(turns), batch_size, frames, drop_last=drop_last)


class Counted(IterableDataset[int]):
    """Each worker gives its own number as often as it owns samples."""

    def __init__(self, frames: Sequence[int]) -> None:
        self.frames = frames

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        return iter([worker] * self.frames[worker])


@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create"
)  # more workers than small machines have cores
@pytest.mark.parametrize(
    ("frames", "batch_size", "drop_last"),
    [([3, 11, 6], 2, False), ([3, 11, 6], 4, True), ([0, 7, 1], 3, False), ([9], 4, False)],
)
def test_a_dataloader_takes_turns_like_that(frames: list[int], batch_size: int, drop_last: bool) -> None:
    num_workers = 0 if len(frames) == 1 else len(frames)
    loader = DataLoader(Counted(frames), batch_size=batch_size, num_workers=num_workers, drop_last=drop_last)
    batches = [batch.tolist() for batch in loader]
    delivered = Counter[int]()
    for number, batch in enumerate(batches):
        offsets = worker_offsets(number, batch_size, frames, drop_last=drop_last)
        assert offsets.samples == tuple(delivered[worker] for worker in range(len(frames)))
        assert set(batch) == {offsets.next_worker}
        delivered.update(batch)


def test_samples_inside_a_batch_are_refused() -> None:
    with pytest.raises(UsageError, match="6 samples are not a whole number of batches of 4"):
        batches_of_samples(6, 4, [10, 10])
    with pytest.raises(UsageError, match="100 samples are not"):
        batches_of_samples(100, 4, [10, 10])
    assert batches_of_samples(6, 1, [20]) == 6


# -- resume -----------------------------------------------------------------------------------------

Anchor = tuple[int, int]


def play(state: LoaderState, rank: int, frames: list[Any] | None = None) -> list[list[Anchor]]:
    """Batches that a DataLoader gives a rank after loading `state`, by taking turns naively."""
    offsets = resume_offsets(state, LENGTHS, rank=rank, frames=frames)
    parts = max(1, state.num_workers)
    rest: list[list[Anchor]] = []
    for loader_worker in range(parts):
        worker = (offsets.next_worker + loader_worker) % parts
        stream = plan_stream(LENGTHS, state.settings, rank=rank, worker=worker, frames=frames)
        rest.append(
            [
                (int(stream.positions[episode]), frame)
                for block in stream.plan.skip(offsets.samples[worker]).blocks
                for episode, frame in zip(block.episode.tolist(), block.frame.tolist(), strict=True)
            ]
        )
    batches = []
    for loader_worker, size in batches_in_turn([len(r) for r in rest], state.batch_size, state.drop_last):
        batches.append(rest[loader_worker][:size])
        rest[loader_worker] = rest[loader_worker][size:]
    return batches


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("strategy", ["remaining", "round_robin"])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 5])
def test_resume_at_every_batch_gives_the_rest(num_workers: int, strategy: str, drop_last: bool) -> None:
    start = make_state(num_workers=num_workers, strategy=strategy, drop_last=drop_last, episode_pool_size=2)
    for rank in range(2):
        whole = play(start, rank)
        for given in range(len(whole) + 1):
            # Saved by the other rank, and through JSON, as a checkpoint of the first rank would be.
            saved = dataclasses.replace(start.at_batch(given), rank=1 - rank)
            loaded = LoaderState.from_dict(json.loads(json.dumps(saved.to_dict())))
            check_compatible(loaded, start)
            assert play(loaded, rank) == whole[given:]


def test_a_second_resume_and_later_epochs_are_whole() -> None:
    start = make_state()
    whole = play(start, 0)
    first = start.at_batch(2)
    assert play(first, 0)[:3] == whole[2:5]
    assert play(first.at_batch(first.num_batches + 3), 0) == whole[5:]
    following = first.at_epoch(1)
    assert sorted(sum(play(following, 0), [])) == sorted(sum(whole, []))  # noqa: RUF017
    assert play(following, 0) != whole


def test_a_position_beyond_the_epoch_is_refused() -> None:
    longest = max(len(play(make_state(), rank)) for rank in range(2))
    assert play(make_state(num_batches=longest), 0) == []
    with pytest.raises(UsageError, match=f"at batch {longest + 1}, but the epoch has {longest} batches"):
        resume_offsets(make_state(num_batches=longest + 1), LENGTHS, rank=0)


# -- elastic resume ---------------------------------------------------------------------------------


def test_other_numbers_give_the_rest_of_the_epoch_once() -> None:
    numbers: list[dict[str, Any]] = [
        {"world_size": 2, "num_workers": 2, "batch_size": 3},
        {"world_size": 3, "num_workers": 0, "batch_size": 2, "strategy": "round_robin"},
        {"world_size": 1, "num_workers": 3, "batch_size": 4, "episode_pool_size": 2, "drop_last": True},
        {"world_size": 4, "num_workers": 1, "batch_size": 5},
    ]
    state = make_state(**numbers[0])
    seen: Counter[Anchor] = Counter()
    frames: list[Any] | None = None
    for stage, following in enumerate([*numbers[1:], None]):
        given = 2 if following is not None else 10**6
        for rank in range(state.world_size):
            seen.update(anchor for batch in play(state, rank, frames)[:given] for anchor in batch)
        if following is not None:
            state = replan(state.at_batch(2), make_state(**following, epoch=9))
            state = LoaderState.from_dict(json.loads(json.dumps(state.to_dict())))
            assert (state.epoch, state.num_batches, len(state.earlier_stages)) == (0, 0, stage + 1)
            frames = list(remaining_after(state.earlier_stages, LENGTHS, seed=42, epoch=0))
    assert seen == Counter((e, f) for e, length in enumerate(LENGTHS) for f in range(length))


def test_a_rank_may_have_nothing_left_to_do() -> None:
    start = make_state(world_size=1, num_workers=0, batch_size=10)
    state = replan(start.at_batch(5), make_state(world_size=8))
    frames = remaining_after(state.earlier_stages, LENGTHS, seed=42, epoch=0)
    rest = [anchor for rank in range(8) for batch in play(state, rank, frames) for anchor in batch]
    assert len(rest) == len(set(rest)) == sum(LENGTHS) - 50
    assert any(play(state, rank, frames) == [] for rank in range(8))


def test_a_state_at_the_start_adds_no_stage() -> None:
    assert replan(make_state(), make_state(world_size=3)).earlier_stages == ()


def test_remaining_frames_cannot_be_forgotten() -> None:
    state = replan(make_state(num_batches=1), make_state(world_size=1))
    with pytest.raises(UsageError, match="remaining frames are needed"):
        resume_offsets(state, LENGTHS, rank=0)


def test_nothing_delivered_leaves_everything() -> None:
    frames = remaining_after((), [3, 2], seed=1, epoch=0)
    assert [f.tolist() for f in frames] == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize("name", ["num_workers", "world_size"])
def test_numbers_of_no_real_job_are_refused_before_shares_are_made(name: str) -> None:
    values = make_state().to_dict() | {name: 10**9}
    with pytest.raises(UsageError, match=f"{name} is 1000000000, expected at most"):
        LoaderState.from_dict(values)
