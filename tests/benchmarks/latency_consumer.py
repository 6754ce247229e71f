"""A consumer for ``latency_figures``, in a process of its own: ``python -m ...latency_consumer SOURCE N``.

N is the number of workers.

Not in the process of the tests' configuration, which keeps the Hub out of reach.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from lrstream import StreamingLeRobotDataset

BATCH, POOL = 32, 16
_START = 10  # steps in which workers and pools begin
AHEAD = 4  # batches: workers give theirs at the same time, so the next one of each has to wait somewhere


def train(source: str, num_workers: int) -> dict[str, Any]:
    """One pass as fast as possible, one by a consumer that takes its time."""
    options: dict[str, Any] = {"return_uint8": True, "episode_pool_size": POOL}
    if num_workers == 0:
        options["decoded_queue_size"] = 2 * BATCH  # batches ahead, as workers have them
    else:
        options["episode_pool_size"] = POOL // num_workers

    with StreamingLeRobotDataset(source, **options) as dataset:
        started = time.monotonic()
        batches = iter(DataLoader(dataset, batch_size=BATCH, num_workers=num_workers))
        first = next(batches)
        first_s = time.monotonic() - started
        begun, count = time.monotonic(), 0
        for batch in batches:
            count += len(batch["index"])
        rate = count / (time.monotonic() - begun)
        num_cameras = sum(key.startswith("observation.images.") for key in first)
        ranges = num_cameras * min(POOL, dataset.num_episodes)
    step_s = BATCH / (0.8 * rate)
    paced = {}
    for ahead in (0, AHEAD):
        with StreamingLeRobotDataset(source, **options) as dataset:
            loader = DataLoader(dataset, batch_size=BATCH, num_workers=num_workers)
            with closing(dataset.follow(loader, ahead=ahead)) as followed:
                paced[f"{ahead} ahead"] = _at_a_pace(followed, step_s)
    return {
        "started": started,
        "ranges_of_pool": ranges,
        "samples": count + BATCH,
        "samples_per_s": round(rate, 1),
        "step_ms": round(1e3 * step_s, 1),
        "first_batch_s": round(first_s, 3),
        **paced,
    }


def _at_a_pace(batches: Iterator[Any], step_s: float) -> dict[str, Any]:
    """Waits of a training whose steps take so long, from the second batch on."""
    batch = next(batches)
    waits, begun = [], time.monotonic()
    while True:
        time.sleep(step_s)
        # Let go of when its step is over, as where it has been copied to a device.
        del batch
        asked = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            break
        waits.append(time.monotonic() - asked)
    total_s = asked - begun
    running = waits[_START:]
    return {
        "wait_over_step_time": round(sum(waits) / total_s, 5),
        f"without_first_{_START}": round(sum(running) / (sum(running) + len(running) * step_s), 5),
        "wait_ms_p50_p99_max": [round(1e3 * float(x), 3) for x in np.percentile(waits, (50, 99, 100))],
    }


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]))))
