"""The real pipeline with episodes that arrive and decode after random delays: LD-1 to LD-6, LD-10.

Expected is a multiset of frames, and an order that two runs with different delays must agree on. Each run
has a time limit of its own, since a pipeline that waits in a circle would wait for ever.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.pipeline import EpochPipeline, PipelineOptions
from lrstream.streaming.planning import PlanSettings, StreamPlan, plan_stream
from lrstream.streaming.strategies import ANCHOR_STRATEGIES

RUN_LIMIT_S = 60.0
MAX_DELAY_S = 0.002


class DelayedEpisodes:
    """Loads episodes of two parts, and makes samples, each after a random delay."""

    num_parts = 2
    has_pictures = True
    image_transforms = None

    def __init__(self, delays: random.Random) -> None:
        self._delays = delays
        self._lock = threading.Lock()
        self.fetched: Counter[int] = Counter()

    def _wait(self) -> None:
        with self._lock:
            delay = self._delays.random()
        if delay > 0.5:
            time.sleep((delay - 0.5) * 2 * MAX_DELAY_S)

    def parts(self, position: int) -> dict[str, Callable[[], Any]]:
        return {name: partial(self._read, position, name) for name in ("", "front")}

    def _read(self, position: int, name: str) -> int:
        self._wait()
        if name:
            with self._lock:
                self.fetched[position] += 1
        return position

    def assemble(self, position: int, parts: dict[str, int]) -> int:
        assert set(parts.values()) == {position}
        return position

    def gop_of(self, episode: int, frame: int) -> int:
        return frame // 3

    def build(
        self, episode: int, frames: list[int], decoders: object, *, memory: None, places: list[None]
    ) -> list[dict[str, Any]]:
        self._wait()
        return [{"anchor": (episode, frame)} for frame in frames]

    def transform(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def run(stream: StreamPlan, sizes: list[int], budget: int | None, options: dict[str, int], seed: int,
        skip: int = 0) -> list[tuple[int, int]]:  # fmt: skip
    """All anchors of a stream as (episode, frame), in the order of delivery."""
    episodes = DelayedEpisodes(random.Random(seed))
    own_sizes = np.array(sizes, dtype=np.int64)[stream.positions]
    pipeline = EpochPipeline(
        stream.plan,
        stream.positions,
        own_sizes,
        budget_bytes=budget,
        loader=episodes,  # type: ignore[arg-type]
        builder=episodes,  # type: ignore[arg-type]
        decoders=None,  # type: ignore[arg-type]
        options=PipelineOptions(**options, transform_in_threads=True),
        metrics=LoaderMetrics(),
        skip_anchors=skip,
    )
    found: list[tuple[int, int]] = []
    failures: list[BaseException] = []

    def consume() -> None:
        try:
            for sample in pipeline:
                if budget is not None:
                    assert pipeline.cache.resident_bytes <= pipeline.cache.reserved_bytes <= budget
                found.append(sample["anchor"])
        except BaseException as error:  # noqa: BLE001  (raised below, in the test's own thread)
            failures.append(error)

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    consumer.join(RUN_LIMIT_S)
    assert not consumer.is_alive(), "the pipeline waits for ever"
    if failures:
        raise failures[0]
    assert pipeline.is_complete
    assert pipeline.cache.reserved_bytes == pipeline.cache.resident_bytes == 0
    if budget is not None:
        assert pipeline.cache.peak_reserved_bytes <= budget
    assert set(episodes.fetched.values()) <= {1}, "an episode was fetched twice"
    return found


OPTIONS = st.fixed_dictionaries(
    {
        "prefetch_episodes": st.integers(0, 9),
        "max_in_flight": st.integers(1, 5),
        "decode_threads": st.integers(1, 4),
        "decoded_queue_size": st.integers(1, 12),
    }
)


@pytest.mark.timeout(300)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    episodes=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 100)), min_size=3, max_size=14),
    world_size=st.integers(1, 3),
    num_workers=st.integers(0, 4),
    pool=st.none() | st.integers(1, 6),
    slack=st.none() | st.integers(0, 250),
    strategy=st.sampled_from(ANCHOR_STRATEGIES),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 5),
    options=OPTIONS,
    data=st.data(),
)
def test_every_frame_once_within_the_budget_in_an_order_that_timing_cannot_change(
    episodes: list[tuple[int, int]],
    world_size: int,
    num_workers: int,
    pool: int | None,
    slack: int | None,
    strategy: Any,
    seed: int,
    epoch: int,
    options: dict[str, int],
    data: st.DataObject,
) -> None:
    lengths, sizes = [length for length, _ in episodes], [size for _, size in episodes]
    # The tightest budget that is allowed lets each busy worker hold the largest episode.
    budget = None if slack is None else (max(sizes) + slack) * max(1, num_workers)
    plan_settings = PlanSettings(
        seed=seed,
        epoch=epoch,
        world_size=world_size,
        num_workers=num_workers,
        strategy=strategy,
        episode_pool_size=pool,
        byte_budget_bytes=budget,
    )
    delivered: Counter[tuple[int, int]] = Counter()
    for rank in range(world_size):
        for worker in range(max(1, num_workers)):
            stream = plan_stream(lengths, plan_settings, rank=rank, worker=worker, sizes=sizes)
            own_budget = plan_settings.budget_of(stream.num_streams)
            found = run(stream, sizes, own_budget, options, seed=1)
            delivered.update((episode, frame) for episode, frame in found)
            if rank == worker == 0:
                other = data.draw(OPTIONS)
                assert run(stream, sizes, own_budget, other, seed=2) == found
                skip = data.draw(st.integers(0, len(found)))
                assert run(stream, sizes, own_budget, other, seed=3, skip=skip) == found[skip:]
    assert delivered == Counter((e, frame) for e, length in enumerate(lengths) for frame in range(length))
