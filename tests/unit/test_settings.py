"""Arguments that cannot work are refused as such, whatever type they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lrstream.errors import UsageError
from lrstream.streaming.planning import PlanSettings
from lrstream.streaming.settings import check_timeout, distributed_place


@pytest.mark.parametrize("name", ["seed", "epoch", "world_size", "num_workers"])
@pytest.mark.parametrize("value", [1.5, True, "1", 2.0])
def test_only_integers_decide_the_order(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} is {value!r}, expected an integer"):
        PlanSettings(**{name: value})


def test_integers_of_numpy_are_integers() -> None:
    settings = PlanSettings(seed=np.int64(7), epoch=np.uint8(3))  # type: ignore[arg-type]
    assert settings == PlanSettings(seed=7, epoch=3)
    assert type(settings.seed) is int


@pytest.mark.parametrize(("rank", "world_size"), [("0", "2"), (0.0, 2), (True, 2), (0, 2.0)])
def test_ranks_are_integers(rank: Any, world_size: Any) -> None:
    with pytest.raises(UsageError, match="expected an integer"):
        distributed_place(rank, world_size)


@pytest.mark.parametrize("seconds", [-1, float("nan"), "5", None, True])
def test_a_timeout_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(UsageError, match=r"sidecar_lock_timeout_s is .* expected seconds, 0 or more"):
        check_timeout("sidecar_lock_timeout_s", seconds)
    check_timeout("sidecar_lock_timeout_s", 0)
