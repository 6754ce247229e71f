"""How long starting takes, in figures: ``python -m tests.benchmarks.start_figures``.

Bare Python, ``import lrstream`` and ``lrstream --help`` in turn, so that all meet the same load: medians and
minima of 20 rounds, wall and processor time, one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from tests.support.shared import import_path

ROUNDS = 20
COMMANDS = {
    "python": ("-c", "pass"),
    "import lrstream": ("-c", "import lrstream"),
    "lrstream --help": ("-m", "lrstream", "--help"),
}


def measure(words: tuple[str, ...]) -> tuple[float, float]:
    """Wall and processor time of one process, milliseconds."""
    path = import_path()
    before, start = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, *words],
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path},
    )
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return 1e3 * wall, 1e3 * cpu


def main() -> int:
    load = os.getloadavg()[0]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS + 1):
        for name, words in COMMANDS.items():
            found[name].append(measure(words))
    result: dict[str, Any] = {}
    for name, times in found.items():
        walls, cpus = zip(*times[1:], strict=True)  # the first round reads files from the disk
        result[name] = {
            "wall_ms": round(statistics.median(walls), 1),
            "least_wall_ms": round(min(walls), 1),
            "cpu_ms": round(statistics.median(cpus), 1),
        }
    imports = [one[0] - bare[0] for one, bare in zip(found["import lrstream"], found["python"], strict=True)]
    result["import over python, wall_ms"] = round(statistics.median(imports[1:]), 1)
    print(json.dumps({"part": "start", "rounds": ROUNDS, **result, "load": round(load, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
