"""What distance costs, in figures: ``python -m tests.benchmarks.latency_figures``.

Two parts, named as arguments, both without any:

- ``build``: indexing videos of 600 and of 6,000 frames on the loopback Hub when every range of a video takes
  20 ms, by 1 to 16 workers, with the processor time of the build and of the server, which is another process;
  256 of them also where every reply takes as long, and where the Hub serves videos itself, and 2,048 by one
  process and by as many as a build takes by itself;
- ``train``: an epoch from the loopback Hub with 50 ms for each range, by a consumer that takes 80 % of what
  the loader can deliver, with and without batches taken ahead. ``train DIRECTORY`` reads another dataset
  than the one that is written for it.

One line of JSON for each part, with the load of the machine; nothing is asserted about times.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.parts import Part, run_parts

# isort: split
from lrstream.demo import DemoCamera, DemoSpec, write_dataset
from tests.cli.program import run_process
from tests.support.hub import LoopbackHub
from tests.support.many_files import write_many_files

MANY_FILES = 2048
NUM_FILES, FRAMES, BUILD_WORKERS = 256, (600, 6000), (1, 2, 4, 8, 16)
BUILD_LATENCY_S, TRAIN_LATENCY_S = 0.02, 0.05


def build_part(directory: Path) -> dict[str, Any]:
    """Videos behind a redirect each, as on the Hub; the server is this process, the build another."""
    result: dict[str, Any] = {"latency_s": BUILD_LATENCY_S}
    most = max(BUILD_WORKERS)
    for frames in FRAMES:
        found = result[f"{frames} frames"] = {}
        root = write_many_files(directory / f"many-{frames}", MANY_FILES, frames=frames)
        with LoopbackHub.start() as hub:
            _fill(hub, root, server="cdn")
            for workers in BUILD_WORKERS:
                found[f"{workers} workers"] = _build(hub, workers)
            for name, processes in (("1 process", 1), ("automatic processes", None)):
                found[f"{MANY_FILES} videos, {name}"] = _build(hub, most, MANY_FILES, processes)
        with LoopbackHub.start() as hub:
            _fill(hub, root)
            found["every reply"] = _build(hub, most, server=None)
        with LoopbackHub.start() as hub:
            _fill(hub, root, lfs_mode="regular")
            found["served directly"] = _build(hub, most, server=None)
        shutil.rmtree(root)
    return result


def _fill(hub: LoopbackHub, root: Path, *, lfs_mode: Any = "auto", server: str | None = None) -> None:
    """Put a dataset there; every reply for a video takes its time, of one server or of all."""
    hub.create_dataset("robots/pick", root, lfs_mode=lfs_mode)
    # The Hub knows the hashes of its files; this one computes each when it is first asked.
    for entry in hub.settings.datasets["robots/pick"].branches["main"].files.values():
        hub.settings.store.xet_hash(entry.blob)
    hub.faults.add(r"\.mp4$", "slow", server=server, latency_s=BUILD_LATENCY_S)


def _build(
    hub: LoopbackHub,
    workers: int,
    videos: int = NUM_FILES,
    processes: int | None = 1,
    server: str | None = "cdn",
) -> dict[str, Any]:
    hub.log.clear()
    words = ["benchmark", "build", "robots/pick", "--videos", str(videos), "--json"]
    if processes is not None:
        words += ["--processes", str(processes)]
    server_s, load = time.process_time(), os.getloadavg()[0]
    done = run_process(*words, "--workers", str(workers), env=hub.env(hub.read_token))
    server_s = time.process_time() - server_s
    assert done.code == 0, done.out + done.err
    found = done.document()["result"]
    # Those that take their time.
    slow = hub.log.records(r"\.mp4$", server=server)
    return {
        "processes": found["processes"],
        "slow_requests_per_video": len(slow) / videos,
        "bytes_per_video": round(found["bytes_read"] / videos),
        "moov_bytes_per_video": found["moov_bytes"] and round(found["moov_bytes"] / videos),
        "elapsed_s": round(found["elapsed_s"], 3),
        "by_requests_x_latency_over_workers": round(
            found["elapsed_s"] / (len(slow) * BUILD_LATENCY_S / workers), 2
        ),
        "cpu_ms_per_video": round(1e3 * found["cpu_s"] / videos, 2),
        "server_cpu_ms_per_video": round(1e3 * server_s / videos, 2),
        "load": round(load, 1),
    }


def train_part(directory: Path, root: Path | None = None) -> dict[str, Any]:
    """First as fast as it goes, then at 80 % of that; the Hub and the training are two processes."""
    if root is None:
        cameras = tuple(
            DemoCamera(f"observation.images.{name}", 240, 320, codec="av1") for name in ("a", "b")
        )
        root = write_dataset(directory / "train", DemoSpec((240,) * 48, cameras, fps=30)).root
    with LoopbackHub.start() as hub:
        hub.create_dataset("robots/pick", root)
        done = run_process("build", "robots/pick", "--json", env=hub.env(hub.read_token))
        assert done.code == 0, done.out + done.err
        hub.faults.add(r"\.mp4$", "slow", server="cdn", latency_s=TRAIN_LATENCY_S)
        result: dict[str, Any] = {"latency_s": TRAIN_LATENCY_S}
        for num_workers in (0, 2):
            hub.log.clear()
            consumer = subprocess.run(
                [sys.executable, "-m", "tests.benchmarks.latency_consumer", "robots/pick", str(num_workers)],
                env={**os.environ, **hub.env(hub.read_token)},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=900,
            )
            found = json.loads(consumer.stdout)
            ranges = hub.log.records(r"\.mp4$", server="cdn", method="GET")
            reads = sorted(record.started for record in ranges)
            pool_s = reads[found.pop("ranges_of_pool") - 1] + TRAIN_LATENCY_S - found.pop("started")
            found |= {
                "pool_arrived_s": round(pool_s, 3),
                "first_batch_after_pool_s": round(found["first_batch_s"] - pool_s, 3),
            }
            result[f"{num_workers} workers"] = found
    return result


def main(words: list[str]) -> int:
    """Run the named parts on the named dataset; 0 if all are as they should be."""
    parts: dict[str, Part] = {
        "build": lambda directory, patch: build_part(directory),
        "train": lambda directory, patch: train_part(directory, *other),
    }
    other = [Path(word) for word in words if word not in parts]
    return run_parts(parts, [word for word in words if word in parts])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
