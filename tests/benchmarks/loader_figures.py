"""What strategies, windows and samples cost, in figures: ``python -m tests.benchmarks.loader_figures``.

Writes its own datasets (two cameras, H.264 with GOPs of 30 and AV1 with GOPs of 2), and measures in turn, in
one run, so that a busy machine disturbs all alike. Ratios are of processor time, unless they are called
rates. One line of JSON for each figure. Parts are named as arguments; all without any:

- ``strategies``: `remaining` and `gop` beside the bare decoder, which decodes random anchors in a plain loop.
- ``windows``: `gop` with three past pictures beside a single one.
- ``mixing``: episodes in batches of 64 of a plan for a large dataset.
- ``planner``: anchors planned in a second.
- ``overhead``: a sample of ten numeric features and nothing else.
- ``threads``: wall time of the loader beside as many bare processes as there are processors.
"""

from __future__ import annotations

import argparse
import bisect
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from av.video.reformatter import VideoReformatter
from torch.utils.data import DataLoader

from lrstream import StreamingLeRobotDataset
from lrstream.demo import DemoCamera, DemoSpec
from lrstream.streaming.gop_table import GopTable, format_windows
from lrstream.streaming.planning import DEFAULT_POOL_SIZE
from lrstream.streaming.pool import AnchorPlan, episodes_per_batch
from tests.support.datasets import write_dataset_in_child

BATCH, LARGE_BATCH = 32, 64
FPS = 30
PAST_S = [-2 / FPS, -1 / FPS, 0.0]
KEYS = tuple(f"observation.images.c{number}" for number in range(2))
RGB_PLANES = (2, 0, 1)


class Cost(NamedTuple):
    """What some samples took, seconds."""

    num_samples: int
    cpu_s: float
    wall_s: float

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_s / self.num_samples

    @property
    def rate(self) -> float:
        return self.num_samples / self.wall_s


def cameras(codec: Any, gop: int, height: int, width: int) -> tuple[DemoCamera, ...]:
    return tuple(DemoCamera(key, height, width, codec, gop=gop) for key in KEYS)


SPECS = {
    "h264_gop30_480x640": DemoSpec((90,) * 8, cameras("h264", 30, 480, 640)),
    "av1_gop2_480x640": DemoSpec((60,) * 12, cameras("av1", 2, 480, 640)),
    "av1_gop2_240x320": DemoSpec((120,) * 12, cameras("av1", 2, 240, 320)),
    "numeric": DemoSpec((300,) * 16, (DemoCamera(KEYS[0], 16, 96),), extras=("bool",)),
}
VIDEO = ("h264_gop30_480x640", "av1_gop2_480x640", "av1_gop2_240x320")


class Datasets:
    """Writes the datasets on first use, each in a child process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def root(self, name: str) -> Path:
        root = self.directory / name
        if not root.exists():
            write_dataset_in_child(SPECS[name], root, timeout_s=600.0)
        return root


def open_dataset(root: Path, **options: Any) -> StreamingLeRobotDataset:
    return StreamingLeRobotDataset(str(root), return_uint8=True, **options)


# -- the bare decoder -----------------------------------------------------------------------------


class Bare:
    """Packets in memory, one decoder for each camera, tensors in rows of a batch, nothing else.

    For files without reordering, whose pictures are those of the episodes one after the other.
    """

    def __init__(self, root: Path) -> None:
        self._cameras = []
        for key in KEYS:
            packets: list[tuple[bytes, bool]] = []
            context: Any = None
            for path in sorted((root / "videos" / key).glob("*/*.mp4")):
                with av.open(str(path)) as container:
                    stream = container.streams.video[0]
                    if context is None:
                        name = stream.codec_context.name
                        context = av.CodecContext.create("libdav1d" if "av1" in name else name, "r")
                        context.thread_count = 1
                        context.extradata = stream.codec_context.extradata
                    packets += [(bytes(p), bool(p.is_keyframe)) for p in container.demux(stream) if p.size]
            sync = [number for number, (_, is_keyframe) in enumerate(packets) if is_keyframe]
            self._cameras.append((context, VideoReformatter(), packets, sync))
        self.num_samples = len(self._cameras[0][2])
        self._out: dict[int, Any] = {}

    def decode(self, number: int, row: int) -> None:
        for place, (context, scaler, packets, sync) in enumerate(self._cameras):
            first = sync[bisect.bisect_right(sync, number) - 1]
            picture: Any = None
            for at in range(first, number + 1):
                packet = av.Packet(packets[at][0])
                packet.pts = at
                picture = next(iter(context.decode(packet)), picture)
            if picture is None or picture.pts != number:
                picture = next(reversed(context.decode(None)))
            context.flush_buffers()
            assert picture.pts == number
            planes = scaler.reformat(picture, format="gbrp", threads=1).planes
            height, width = picture.height, picture.width
            if row == 0 or place not in self._out:
                self._out[place] = np.empty((BATCH, 3, height, width), np.uint8)
            for channel, plane in zip(self._out[place][row], RGB_PLANES, strict=True):
                pixels = np.frombuffer(memoryview(planes[plane]), np.uint8).reshape(
                    -1, planes[plane].line_size
                )
                channel[:] = pixels[:height, :width]

    def run(self, numbers: Any) -> Cost:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for place, number in enumerate(numbers):
            self.decode(int(number), place % BATCH)
        return Cost(len(numbers), time.process_time() - cpu_s, time.perf_counter() - wall_s)


def bare_process(root: str, seed: int, num_samples: int, barrier: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    bare = Bare(Path(root))
    numbers = np.random.default_rng(seed).permutation(bare.num_samples)[:num_samples]
    bare.run(numbers[:BATCH])
    barrier.wait()
    queue.put(tuple(bare.run(numbers)))


# -- the loader -----------------------------------------------------------------------------------


def cpu_s_of(pid: int) -> float:
    """Processor time of another process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Stream:
    """Batches of a dataset for as long as they are wanted, measured some at a time."""

    def __init__(self, root: Path, batch_size: int = BATCH, num_workers: int = 0, **options: Any) -> None:
        self.dataset = open_dataset(root, repeat=True, **options)
        self._batches = iter(DataLoader(self.dataset, batch_size=batch_size, num_workers=num_workers))
        next(self._batches)
        children = multiprocessing.active_children() if num_workers else []
        self._workers = [child.pid for child in children if child.pid is not None]

    def _cpu_s(self) -> float:
        return time.process_time() + sum(map(cpu_s_of, self._workers))

    def run(self, num_samples: int) -> Cost:
        cpu_s, wall_s = self._cpu_s(), time.perf_counter()
        done = 0
        while done < num_samples:
            done += len(next(self._batches)["index"])
        return Cost(done, self._cpu_s() - cpu_s, time.perf_counter() - wall_s)

    def close(self) -> None:
        del self._batches


def epoch(
    root: Path, batch_size: int = LARGE_BATCH, **options: Any
) -> tuple[Cost, list[int], dict[str, Any]]:
    """A whole epoch: its cost from the first batch to the end of all threads, episodes in each full batch."""
    dataset = open_dataset(root, **options)
    different = []
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for batch in DataLoader(dataset, batch_size=batch_size):
        if len(batch["index"]) == batch_size:
            different.append(len(set(batch["episode_index"].tolist())))
    cost = Cost(len(dataset), time.process_time() - cpu_s, time.perf_counter() - wall_s)
    return cost, different, dataset.metrics()


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def spread(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in sorted(values)]


# -- parts ----------------------------------------------------------------------------------------


def strategies(datasets: Datasets, rounds: int) -> Iterator[dict[str, Any]]:
    for name in VIDEO:
        root = datasets.root(name)
        bare = Bare(root)
        numbers = np.random.default_rng(0).permutation(bare.num_samples)
        step = 96 if "gop30" in name else 320
        remaining = Stream(root)
        costs: dict[str, list[Cost]] = {"bare": [], "remaining": [], "gop": []}
        _, different, _ = epoch(root, sampling_strategy="gop")
        gop = Stream(root, LARGE_BATCH, sampling_strategy="gop")
        gop.run(bare.num_samples)
        for number in range(rounds):
            costs["bare"].append(bare.run(np.roll(numbers, -number * step)[:step]))
            costs["remaining"].append(remaining.run(step))
            costs["gop"].append(gop.run(bare.num_samples))  # an epoch: each picture decoded once
        metrics = gop.dataset.metrics()
        remaining.close()
        gop.close()
        ratios = {
            key: [a.cpu_ms / b.cpu_ms for a, b in zip(costs[key[0]], costs[key[1]], strict=True)]
            for key in (("remaining", "gop"), ("remaining", "bare"))
        }
        yield {
            "part": "strategies",
            "dataset": name,
            **{f"{key}_cpu_ms": median([cost.cpu_ms for cost in found]) for key, found in costs.items()},
            "remaining_over_gop": median(ratios["remaining", "gop"]),
            "remaining_over_gop_rounds": spread(ratios["remaining", "gop"]),
            "remaining_over_bare": median(ratios["remaining", "bare"]),
            "gop_episodes_per_batch_of_64": [min(different), median(different)],
            "gop_stage_ms": {
                stage: round(1000 * metrics["stages"][stage]["seconds"] / metrics["samples"], 3)
                for stage in ("unit", "decode")
            },
        }


def windows(datasets: Datasets, rounds: int) -> Iterator[dict[str, Any]]:
    """In the middle of long runs: the first filling of a reservoir is the system's work, not the loader's."""
    for name in VIDEO:
        options: dict[str, Any] = {"sampling_strategy": "gop", "reservoir_gb": 0.25}
        single = Stream(datasets.root(name), **options)
        several = Stream(datasets.root(name), delta_timestamps=dict.fromkeys(KEYS, PAST_S), **options)
        num_samples = len(single.dataset)
        ratios, costs = [], []
        for number in range(rounds + 1):
            one, three = single.run(num_samples), several.run(num_samples)
            if number:
                ratios.append(three.cpu_ms / one.cpu_ms)
                costs.append((one.cpu_ms, three.cpu_ms))
        metrics = several.dataset.metrics()
        single.close()
        several.close()
        yield {
            "part": "windows",
            "dataset": name,
            "single_cpu_ms": median([one for one, _ in costs]),
            "three_cpu_ms": median([three for _, three in costs]),
            "three_over_single": median(ratios),
            "rounds": spread(ratios),
            "pictures_decoded_per_sample_and_camera": round(
                metrics["reservoir_pictures"] / (metrics["samples"] * len(KEYS)), 2
            ),
        }


def large_table(num_episodes: int, length: int, gop: int, height: int, width: int) -> GopTable:
    """A dataset of two cameras of 4:2:0, as the index would describe it."""
    starts = np.arange(0, length, max(gop, 8), dtype=np.int32)
    return GopTable(
        KEYS,
        np.tile(starts, num_episodes),
        np.arange(num_episodes + 1, dtype=np.int64) * len(starts),
        np.full((num_episodes, 2), height * width * 3 // 2, dtype=np.int64),
    )


def large_plan(windows: str, gop: int, height: int, width: int, **options: Any) -> AnchorPlan:
    return AnchorPlan(
        np.full(200, 300),
        pool_size=DEFAULT_POOL_SIZE,
        strategy="gop",
        seed_key=(1,),
        gops=large_table(200, 300, gop, height, width),
        reservoir_bytes=2 << 30,
        picture_windows=windows,
        **options,
    )


PAST = format_windows({key: [-2, -1, 0] for key in KEYS})


def mixing(datasets: Datasets, rounds: int) -> Iterator[dict[str, Any]]:
    for gop, height, width in ((30, 480, 640), (2, 480, 640), (2, 240, 320)):
        for name, text in (("single", ""), ("three_past", PAST)):
            counts = episodes_per_batch(large_plan(text, gop, height, width), LARGE_BATCH)[:-1]
            yield {
                "part": "mixing",
                "gop": gop,
                "size": f"{height}x{width}",
                "pictures": name,
                "episodes_per_batch_of_64": {
                    "min": int(counts.min()),
                    "p5": int(np.percentile(counts, 5)),
                    "median": int(np.median(counts)),
                },
            }


def planner(datasets: Datasets, rounds: int) -> Iterator[dict[str, Any]]:
    plans: dict[str, Callable[[], AnchorPlan]] = {
        "gop_without_pictures": lambda: AnchorPlan(
            np.full(1000, 300), pool_size=32, strategy="gop", seed_key=(1,)
        ),
        "gop_h264_gop30": lambda: large_plan("", 30, 480, 640),
        "gop_av1_gop2": lambda: large_plan("", 2, 240, 320),
        "gop_av1_gop2_three_past": lambda: large_plan(PAST, 2, 240, 320),
    }
    for name, make in plans.items():
        plan = make()
        rates = []
        for _ in range(rounds):
            cpu_s = time.process_time()
            assert sum(map(len, plan)) == plan.num_anchors
            rates.append(plan.num_anchors / (time.process_time() - cpu_s) / 1e6)
        yield {"part": "planner", "plan": name, "million_anchors_per_s": median(rates)}


def overhead(datasets: Datasets, rounds: int) -> Iterator[dict[str, Any]]:
    root = datasets.root("numeric")
    with_all = open_dataset(root)
    keys = [key for key, feature in with_all.features.items() if feature["dtype"] != "video"]
    for strategy in ("remaining", "gop"):
        stream = Stream(root, features=keys, sampling_strategy=strategy)
        stream.run(2000)
        costs = [stream.run(4800) for _ in range(rounds)]
        stream.close()
        yield {
            "part": "overhead",
            "strategy": strategy,
            "numeric_features": len(keys),
            "cpu_us_per_sample": round(1000 * statistics.median(cost.cpu_ms for cost in costs), 1),
            "rounds": spread([1000 * cost.cpu_ms for cost in costs]),
        }


def threads(datasets: Datasets, rounds: int) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    number = len(os.sched_getaffinity(0))
    for name, num_samples in (
        ("av1_gop2_240x320", 640),
        ("av1_gop2_480x640", 320),
        ("h264_gop30_480x640", 96),
    ):
        root = datasets.root(name)
        streams = {
            f"{number}_threads": Stream(root, decode_threads=number),
            f"{number}_workers": Stream(root, num_workers=number, decode_threads=1),
        }
        found: dict[str, list[tuple[float, float]]] = {key: [] for key in streams}
        for seed in range(rounds):
            barrier, queue = context.Barrier(number), context.Queue()
            children = [
                context.Process(
                    target=bare_process, args=(str(root), seed * 8 + child, num_samples, barrier, queue)
                )
                for child in range(number)
            ]
            for child in children:
                child.start()
            costs = [Cost(*queue.get(timeout=600)) for _ in children]
            for child in children:
                child.join()
            bare = Cost(
                sum(cost.num_samples for cost in costs),
                sum(cost.cpu_s for cost in costs),
                max(cost.wall_s for cost in costs),
            )
            for key, stream in streams.items():
                # What was made ahead while others were measured does not count: two batches for each worker.
                stream.run(2 * number * BATCH)
                cost = stream.run(number * num_samples)
                found[key].append((cost.rate / bare.rate, cost.cpu_ms / bare.cpu_ms))
        for key, stream in streams.items():
            stream.close()
            yield {
                "part": "threads",
                "dataset": name,
                "loader": key,
                "rate_over_bare_processes": median([rate for rate, _ in found[key]]),
                "rounds": spread([rate for rate, _ in found[key]]),
                "cpu_over_bare": median([ratio for _, ratio in found[key]]),
            }


PARTS = {part.__name__: part for part in (strategies, windows, mixing, planner, overhead, threads)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="what to measure; all without any")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions, of which medians are given")
    parser.add_argument("--datasets", type=Path, help="keep the datasets here, and use what is there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lrstream-figures-") as scratch:
        os.environ["HF_LEROBOT_HOME"] = str(Path(scratch) / "home")
        datasets = Datasets(chosen.datasets or Path(scratch) / "datasets")
        for name in chosen.parts or PARTS:
            for figure in PARTS[name](datasets, chosen.rounds):
                load = [round(value, 1) for value in os.getloadavg()]
                print(json.dumps({**figure, "load_average": load}), flush=True)


if __name__ == "__main__":
    main()
