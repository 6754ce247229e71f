"""What an index of very many files costs, in figures: ``python -m tests.benchmarks.index_figures``.

``--files`` is the number of videos (100,000 by default, the size of a dataset of 100 TB: some 8 GB of disk
while it runs), ``--frames`` the pictures in each, ``--directory`` where to work. Parts, each in a process of
its own, and a line of JSON for each:

- ``write``: the archive, through the real writer, from a few sample tables that are compressed once;
- ``convert``: archive to mapped index: time, threads' processor time, memory, bytes for each picture;
- ``open``: opening that index and making the records of 500 files, random ones and the first ones: the
  median of 15 processes, with the memory that it adds to a process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.large_archive import run_on_archive, write_large_archive

NUM_RECORDS, ROUNDS = 500, 15

_CONVERT = """
    before, start, cpu = memory("VmRSS"), time.monotonic(), time.process_time()
    index = open_index(archive, home=home)
    print(json.dumps({
        "wall_s": round(time.monotonic() - start, 2), "cpu_s": round(time.process_time() - cpu, 2),
        "peak_rss_bytes": memory("VmHWM"), "grown_bytes": memory("VmHWM") - before,
        "index_bytes": index.path.stat().st_size, "archive_bytes": archive.stat().st_size,
    }))
"""

# The first record of a process also loads modules and code; the second opening is what an index costs.
_OPEN = """
    paths = [large_path(number) for number in CHOSEN]
    cold = time.perf_counter()
    open_index(archive, home=home).track(paths[0])
    cold = time.perf_counter() - cold
    before, start, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    index = open_index(archive, home=home)
    opened = time.perf_counter() - start
    records = [index.track(path) for path in paths]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - start
    assert [record.file_path for record in records] == paths
    print(json.dumps({"first_ms": 1e3 * cold, "open_ms": 1e3 * opened, "wall_ms": 1e3 * wall,
                      "cpu_ms": 1e3 * cpu, "grown_bytes": memory("VmHWM") - before}))
"""


def report(part: str, load: float, **figures: Any) -> None:
    print(json.dumps({"part": part, **figures, "load": round(load, 1)}), flush=True)


def open_part(directory: Path, num_files: int, chosen: str) -> dict[str, Any]:
    """Medians over processes; the memory is the largest of all."""
    found = [run_on_archive(_OPEN.replace("CHOSEN", chosen), directory, num_files) for _ in range(ROUNDS)]
    medians = {
        name: round(statistics.median(one[name] for one in found), 1)
        for name in ("first_ms", "open_ms", "wall_ms", "cpu_ms")
    }
    return {"processes": ROUNDS, **medians, "grown_bytes": max(one["grown_bytes"] for one in found)}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.index_figures")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--frames", type=int, default=6000)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args(words)
    directory = Path(tempfile.mkdtemp(prefix="lrstream-index-", dir=options.directory))
    try:
        load, start, cpu = os.getloadavg()[0], time.monotonic(), time.process_time()
        write_large_archive(directory / "x.npz", options.files, options.frames)
        report(
            "write",
            load,
            files=options.files,
            frames_per_file=options.frames,
            wall_s=round(time.monotonic() - start, 1),
            cpu_s=round(time.process_time() - cpu, 1),
        )
        load = os.getloadavg()[0]
        found = run_on_archive(_CONVERT, directory, options.files)
        bytes_per_frame = found["index_bytes"] / (options.files * options.frames)
        report("convert", load, **found, bytes_per_frame=round(bytes_per_frame, 3))
        count = min(NUM_RECORDS, options.files)
        for name, chosen in (
            ("random", f"random.Random(1).sample(range(num_files), {count})"),
            ("first", f"range({count})"),
        ):
            load = os.getloadavg()[0]
            figures = open_part(directory, options.files, chosen)
            report("open", load, records=count, chosen=name, **figures)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
