"""Order, errors, limits and ends of the pipeline, with episodes that arrive and decode when told to."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from lrstream.errors import ByteBudgetError, DecodeError, TransferError
from lrstream.streaming.metrics import LoaderMetrics, WaitHistogram
from lrstream.streaming.pipeline import EpochPipeline, PipelineOptions
from lrstream.streaming.pool import AnchorPlan
from lrstream.streaming.threads import JobThreads

Anchor = tuple[int, int]


class FakeLoader:
    """Episodes of two parts; the position of episode e is 100 + e."""

    num_parts = 2

    def __init__(self, read: Callable[[int, str], None] = lambda position, part: None) -> None:
        self.read = read
        self.log: list[int] = []
        self.lock = threading.Lock()
        self.now = self.most = 0

    def parts(self, position: int) -> dict[str, Callable[[], Any]]:
        return {part: partial(self._read, position, part) for part in ("", "top")}

    def _read(self, position: int, part: str) -> str:
        with self.lock:
            if part == "":
                self.log.append(position)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            self.read(position, part)
        finally:
            with self.lock:
                self.now -= 1
        return part

    def assemble(self, position: int, parts: dict[str, Any]) -> int:
        assert parts == {"": "", "top": "top"}
        return position


class FakeBuilder:
    """A sample is (position, frame), and says on which thread it was transformed."""

    has_pictures = True
    image_transforms: Any = staticmethod(lambda picture: picture)

    def __init__(self, build: Callable[[int, int], None] = lambda position, frame: None) -> None:
        self._build = build

    def gop_of(self, episode: int, frame: int) -> int:
        return frame // 3 if frame < 6 else -1

    def build(
        self, episode: int, frames: list[int], decoders: object, *, memory: None, places: list[None]
    ) -> list[dict[str, Any]]:
        assert len(frames) == len(places) == 1 or len({frame // 3 for frame in frames}) == 1
        for frame in frames:
            self._build(episode, frame)
        return [{"anchor": (episode - 100, frame)} for frame in frames]

    def transform(self, sample: dict[str, Any]) -> dict[str, Any]:
        sample["transformed_by"] = threading.current_thread().name
        return sample


def plan_of(lengths: list[int], **options: Any) -> AnchorPlan:
    return AnchorPlan(lengths, **{"pool_size": 3, "strategy": "remaining", "seed_key": (1, 2), **options})


def anchors_of(plan: AnchorPlan) -> list[Anchor]:
    return [
        (episode, frame)
        for block in plan
        for episode, frame in zip(block.episode.tolist(), block.frame.tolist(), strict=True)
    ]


def start(
    plan: AnchorPlan,
    lengths: list[int],
    *,
    loader: FakeLoader | None = None,
    builder: FakeBuilder | None = None,
    sizes: list[int] | None = None,
    budget: int | None = None,
    metrics: LoaderMetrics | None = None,
    skip: int = 0,
    **options: Any,
) -> EpochPipeline:
    fields = {
        "prefetch_episodes": 2,
        "max_in_flight": 4,
        "decode_threads": 3,
        "decoded_queue_size": 5,
        "transform_in_threads": True,
    }
    return EpochPipeline(
        plan,
        np.arange(len(lengths)) + 100,
        np.array(sizes or [1] * len(lengths)),
        budget_bytes=budget,
        loader=loader or FakeLoader(),  # type: ignore[arg-type]
        builder=builder or FakeBuilder(),  # type: ignore[arg-type]
        decoders=None,  # type: ignore[arg-type]
        options=PipelineOptions(**{**fields, **options}),
        metrics=metrics or LoaderMetrics(),
        skip_anchors=skip,
    )


def delivered(pipeline: EpochPipeline) -> list[Anchor]:
    return [sample["anchor"] for sample in pipeline]


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lrstream-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while own_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert own_threads() == []


LENGTHS = [5, 1, 9, 3, 7, 2, 4, 6]


@pytest.mark.parametrize("strategy", ["remaining", "round_robin"])
def test_anchors_leave_in_planned_order_whatever_the_timing(strategy: str) -> None:
    jitter = random.Random(5)
    loader = FakeLoader(lambda position, part: time.sleep(jitter.random() * 0.003))
    builder = FakeBuilder(lambda position, frame: time.sleep(jitter.random() * 0.003))
    plan = plan_of(LENGTHS, strategy=strategy)
    assert delivered(start(plan, LENGTHS, loader=loader, builder=builder)) == anchors_of(plan)


@pytest.mark.parametrize("queue_size", [1, 2, 64])
@pytest.mark.parametrize("threads", [1, 4])
def test_any_limits_give_the_same_order(queue_size: int, threads: int) -> None:
    plan = plan_of(LENGTHS)
    pipeline = start(
        plan,
        LENGTHS,
        decoded_queue_size=queue_size,
        decode_threads=threads,
        prefetch_episodes=0,
        max_in_flight=1,
    )
    assert delivered(pipeline) == anchors_of(plan)


@pytest.mark.parametrize("skip", [0, 1, 17, 36, 37])
def test_an_epoch_continues_at_any_anchor(skip: int) -> None:
    plan = plan_of(LENGTHS)
    loader = FakeLoader()
    assert delivered(start(plan, LENGTHS, skip=skip, loader=loader)) == anchors_of(plan)[skip:]
    needed = {episode for episode, _ in anchors_of(plan)[skip:]}
    assert set(loader.log) == {100 + episode for episode in needed}, "an exhausted episode was fetched"


def test_every_episode_is_fetched_once_in_admission_order() -> None:
    loader = FakeLoader()
    plan = plan_of(LENGTHS)
    delivered(start(plan, LENGTHS, loader=loader, max_in_flight=1))
    assert loader.log == [100 + episode for episode in plan.admission_order().tolist()]


def test_no_more_episodes_are_fetched_at_once_than_allowed() -> None:
    loader = FakeLoader(lambda position, part: time.sleep(0.002))
    delivered(start(plan_of(LENGTHS), LENGTHS, loader=loader, max_in_flight=2, prefetch_episodes=8))
    assert 2 <= loader.most <= 2 * loader.num_parts


def test_no_more_samples_are_decoded_ahead_than_allowed() -> None:
    built = Counter[str]()
    lock = threading.Lock()

    def build(position: int, frame: int) -> None:
        with lock:
            built["samples"] += 1

    plan = plan_of(LENGTHS)
    pipeline = start(plan, LENGTHS, builder=FakeBuilder(build), decoded_queue_size=4)
    for number, _ in enumerate(pipeline):
        time.sleep(0.001)
        with lock:
            assert built["samples"] <= number + 4
    assert built["samples"] == sum(LENGTHS)


def test_an_empty_plan_ends_at_once() -> None:
    assert delivered(start(plan_of([]), [])) == []


# -- budget -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_budget_is_kept_and_never_blocks(seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 60, len(LENGTHS)).tolist()
    budget = max(sizes) + 10
    plan = plan_of(LENGTHS, sizes=sizes, budget_bytes=budget, seed_key=(seed,), pool_size=4)
    jitter = random.Random(seed)
    builder = FakeBuilder(lambda position, frame: time.sleep(jitter.random() * 0.001))
    pipeline = start(plan, LENGTHS, sizes=sizes, budget=budget, builder=builder)
    found = []
    for sample in pipeline:
        assert pipeline.cache.reserved_bytes <= budget
        found.append(sample["anchor"])
    assert found == anchors_of(plan)
    assert pipeline.cache.peak_reserved_bytes <= budget
    assert pipeline.cache.reserved_bytes == pipeline.cache.resident_bytes == 0


def test_an_episode_is_released_when_its_last_anchor_is_decoded() -> None:
    lengths = [3, 3]
    plan = plan_of(lengths, pool_size=1, sizes=[10, 10], budget_bytes=10)
    pipeline = start(plan, lengths, sizes=[10, 10], budget=10, decoded_queue_size=1)
    for _ in range(3):
        next(pipeline)
    assert pipeline.cache.reserved_bytes == 0
    next(pipeline)
    assert pipeline.cache.reserved_bytes == 10
    pipeline.close()


def test_an_oversized_episode_is_refused_before_anything_is_read() -> None:
    loader = FakeLoader()
    with pytest.raises(ByteBudgetError, match="50 bytes"):
        start(plan_of([3, 3], sizes=[10, 50], budget_bytes=20), [3, 3], loader=loader)
    assert loader.log == []


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "top"])
def test_a_failed_fetch_is_raised_at_the_first_anchor_of_its_episode(part: str) -> None:
    plan = plan_of(LENGTHS)
    broken = plan.admission_order().tolist()[4]

    def read(position: int, name: str) -> None:
        if position == 100 + broken and name == part:
            raise TransferError("the read failed")

    pipeline = start(plan, LENGTHS, loader=FakeLoader(read))
    expected = anchors_of(plan)
    first = next(place for place, (episode, _) in enumerate(expected) if episode == broken)
    assert [next(pipeline)["anchor"] for _ in range(first)] == expected[:first]
    with pytest.raises(TransferError, match="the read failed"):
        next(pipeline)
    assert list(pipeline) == [], "an epoch that failed must not go on"


@pytest.mark.parametrize("bad", [0, 1, 13, 36])
def test_a_failed_decode_is_raised_at_its_own_anchor(bad: int) -> None:
    plan = plan_of(LENGTHS)
    expected = anchors_of(plan)

    def build(position: int, frame: int) -> None:
        if (position - 100, frame) == expected[bad]:
            raise DecodeError("broken bytes")

    pipeline = start(plan, LENGTHS, builder=FakeBuilder(build))
    assert [next(pipeline)["anchor"] for _ in range(bad)] == expected[:bad]
    with pytest.raises(DecodeError, match="broken bytes"):
        next(pipeline)


def test_a_failed_transform_is_raised_on_either_thread() -> None:
    class Failing(FakeBuilder):
        def transform(self, sample: dict[str, Any]) -> dict[str, Any]:
            raise ValueError("no such crop")

    for in_threads in (True, False):
        with pytest.raises(ValueError, match="no such crop"):
            next(start(plan_of(LENGTHS), LENGTHS, builder=Failing(), transform_in_threads=in_threads))


def test_transforms_run_where_they_are_told_to() -> None:
    plan = plan_of(LENGTHS)
    here = threading.current_thread().name
    in_consumer = {s["transformed_by"] for s in start(plan, LENGTHS, transform_in_threads=False)}
    assert in_consumer == {here}
    in_threads = {s["transformed_by"] for s in start(plan, LENGTHS, transform_in_threads=True)}
    assert all(name.startswith("lrstream-decode") for name in in_threads)


# -- end --------------------------------------------------------------------------------------------


def test_closing_early_ends_all_threads_and_gives_back_all_bytes() -> None:
    pipeline = start(plan_of(LENGTHS), LENGTHS)
    next(pipeline)
    assert own_threads()
    pipeline.close()
    assert own_threads() == []
    assert pipeline.cache.reserved_bytes == 0
    pipeline.close()
    assert list(pipeline) == []


def test_an_abandoned_pipeline_is_collected() -> None:
    pipeline = start(plan_of(LENGTHS), LENGTHS)
    next(pipeline)
    # Without cycles, so it is not left to the garbage collector.
    del pipeline
    assert own_threads() == []


def test_an_interrupted_wait_ends_the_threads() -> None:
    class Interrupting(FakeBuilder):
        def transform(self, sample: dict[str, Any]) -> dict[str, Any]:
            raise KeyboardInterrupt

    pipeline = start(plan_of(LENGTHS), LENGTHS, builder=Interrupting(), transform_in_threads=False)
    with pytest.raises(KeyboardInterrupt):
        next(pipeline)
    assert own_threads() == []


class WithoutPictures(FakeBuilder):
    has_pictures = False


@pytest.mark.parametrize("strategy", ["remaining", "round_robin"])
@pytest.mark.parametrize("queue_size", [1, 5, 64])
def test_samples_without_pictures_are_made_where_they_are_asked_for(strategy: str, queue_size: int) -> None:
    plan = plan_of(LENGTHS, strategy=strategy)
    threads: set[str] = set()
    builder = WithoutPictures(lambda position, frame: threads.add(threading.current_thread().name))
    pipeline = start(plan, LENGTHS, builder=builder, decoded_queue_size=queue_size)
    assert delivered(pipeline) == anchors_of(plan)
    assert threads == {threading.current_thread().name}


def test_a_failure_without_pictures_is_raised_at_its_own_anchor() -> None:
    plan = plan_of(LENGTHS)
    expected = anchors_of(plan)

    def build(position: int, frame: int) -> None:
        if (position - 100, frame) == expected[13]:
            raise DecodeError("broken bytes")

    pipeline = start(plan, LENGTHS, builder=WithoutPictures(build))
    assert [next(pipeline)["anchor"] for _ in range(13)] == expected[:13]
    with pytest.raises(DecodeError, match="broken bytes"):
        next(pipeline)
    assert len(pipeline.cache) == 0


def test_an_interruption_without_pictures_is_raised_at_once() -> None:
    """Even where several samples are being made: it is not taken for the fault of one of them."""
    calls = 0

    def build(position: int, frame: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    pipeline = start(plan_of(LENGTHS), LENGTHS, builder=WithoutPictures(build), decoded_queue_size=64)
    with pytest.raises(KeyboardInterrupt):
        next(pipeline)
    assert calls == 2
    assert own_threads() == []
    assert len(pipeline.cache) == 0


def test_a_read_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrstream.streaming.pipeline._CLOSE_TIMEOUT_S", 0.05)
    release = threading.Event()
    plan = plan_of(LENGTHS)
    stuck = plan.admission_order().tolist()[2]
    loader = FakeLoader(lambda position, part: release.wait(20) if position == 100 + stuck else None)  # type: ignore[arg-type]
    pipeline = start(plan, LENGTHS, loader=loader)
    next(pipeline)
    with pytest.warns(RuntimeWarning, match="did not end within"):
        pipeline.close()
    release.set()


# -- metrics ----------------------------------------------------------------------------------------


def test_counters_add_up() -> None:
    metrics = LoaderMetrics()
    loader = FakeLoader(lambda position, part: time.sleep(0.005))
    delivered(start(plan_of(LENGTHS), LENGTHS, metrics=metrics, loader=loader, prefetch_episodes=0))
    counters = metrics.snapshot()
    assert counters["samples"] == counters["wait_s"]["count"] == sum(LENGTHS)
    assert counters["stages"]["decode"]["count"] == sum(LENGTHS)
    assert counters["refill_stalls"] >= 1
    assert 0 < counters["refill_stall_s"] <= counters["wait_s"]["total"]
    assert counters["peak_reserved_bytes"] >= 1


def test_percentiles_of_waits() -> None:
    waits = WaitHistogram()
    assert waits.percentile_s(99) == 0
    values = np.random.default_rng(0).lognormal(-6, 2, 5000)
    for value in values:
        waits.add(float(value))
    for percent in (50, 95, 99):
        exact = float(np.percentile(values, percent))
        assert exact <= waits.percentile_s(percent) * 1.01
        assert waits.percentile_s(percent) <= exact * 1.25
    assert waits.longest_s == values.max()
    waits.add(1e9)
    assert waits.percentile_s(100) <= 1e9


def test_job_threads_start_as_jobs_arrive() -> None:
    threads = JobThreads("lrstream-test", 3)
    assert own_threads() == []
    done = threading.Event()
    threads.submit(done.set)
    assert done.wait(5)
    assert len(own_threads()) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert threads.close(5)
    threads.submit(lambda: pytest.fail("a job ran after the end"))
    assert own_threads() == []
