"""Windows that reach far beyond both ends of an episode, against a reader that shares no code (K07, LD-4)."""

from __future__ import annotations

import itertools

import pytest

from lrstream.demo import WrittenDataset
from tests.support.loader import assert_same_sample, open_loader
from tests.support.reference import ReferenceDataset

FRONT = "observation.images.front"
DELTAS = [-400, -105, -1, 0, 1, 105, 400]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["remaining", "round_robin"])
def test_values_and_masks_equal_map_style(long_dataset: WrittenDataset, strategy: str) -> None:
    """Both edges of both 300-frame episodes, and anchors between them."""
    seconds = [delta / 30 for delta in DELTAS]
    windows = {"action": seconds, "observation.state": seconds, FRONT: seconds}
    reference = ReferenceDataset(long_dataset.root)
    dataset = open_loader(
        long_dataset, delta_timestamps=windows, return_uint8=True, sampling_strategy=strategy
    )
    compared = 0
    for sample in itertools.islice(dataset, 250):
        index = int(sample["index"])
        frame = index % 300
        assert sample["action_is_pad"].tolist() == [not 0 <= frame + delta < 300 for delta in DELTAS]
        if frame in (0, 1, 104, 105, 194, 195, 299) or index % 11 == 0:
            assert_same_sample(sample, reference.sample(index, windows), f"index {index}")
            compared += 1
    dataset.close()
    assert compared > 15
