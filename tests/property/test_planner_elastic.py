"""Any chain of elastic resumes gives every frame of the epoch exactly once (LD-15)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lrstream.streaming.planning import plan_stream
from lrstream.streaming.position import worker_offsets
from lrstream.streaming.state import EpochStage, LoaderState, remaining_after, replan
from lrstream.streaming.strategies import SAMPLING_STRATEGIES

STAGES = st.builds(
    EpochStage,
    world_size=st.integers(1, 3),
    num_workers=st.integers(0, 3),
    batch_size=st.integers(1, 5),
    drop_last=st.booleans(),
    strategy=st.sampled_from(SAMPLING_STRATEGIES),
    episode_pool_size=st.none() | st.integers(1, 4),
    byte_budget_bytes=st.none() | st.integers(60, 200),
    num_batches=st.integers(0, 6),
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=3, max_size=9),
    st.lists(STAGES, min_size=1, max_size=4),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3),
)
def test_each_frame_once_through_all_stages(
    episodes: list[tuple[int, int]], stages: list[EpochStage], seed: int, epoch: int
) -> None:
    lengths = [length for length, _ in episodes]
    sizes = [size for _, size in episodes]
    seen: Counter[tuple[int, int]] = Counter()
    saved: LoaderState | None = None
    for stage in stages:
        values = {
            name: getattr(stage, name) for name in EpochStage.__dataclass_fields__ if name != "num_batches"
        }
        current = LoaderState("root", "rev", "digest", seed=seed, epoch=epoch, rank=0, **values)
        state = current if saved is None else replan(saved, current)
        frames = None
        if state.earlier_stages:
            frames = remaining_after(state.earlier_stages, lengths, seed=seed, epoch=epoch, sizes=sizes)
            left = sum(len(anchors) for anchors in frames)
            assert left + sum(seen.values()) == sum(lengths)
        for rank in range(stage.world_size):
            streams = [
                plan_stream(lengths, state.settings, rank=rank, worker=w, sizes=sizes, frames=frames)
                for w in range(max(1, stage.num_workers))
            ]
            owned = [stream.plan.num_anchors for stream in streams]
            offsets = worker_offsets(stage.num_batches, stage.batch_size, owned, drop_last=stage.drop_last)
            for stream, delivered in zip(streams, offsets.samples, strict=True):
                anchors = [
                    (int(stream.positions[e]), f)
                    for block in stream.plan
                    for e, f in zip(block.episode.tolist(), block.frame.tolist(), strict=True)
                ]
                seen.update(anchors[:delivered])
        saved = state.at_batch(stage.num_batches)
    assert saved is not None
    closing = replan(saved, saved)
    rest = remaining_after(closing.earlier_stages, lengths, seed=seed, epoch=epoch, sizes=sizes)
    seen.update((episode, frame) for episode, anchors in enumerate(rest) for frame in anchors.tolist())
    assert seen == Counter((e, f) for e, length in enumerate(lengths) for f in range(length))
