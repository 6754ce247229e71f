"""Run many cases under supervision: a case that crashes or hangs its process is a failure like any other."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.limits import Outcome
from tests.fuzz.mp4_cases import prepare, run_mp4_case
from tests.fuzz.sidecar_cases import run_sidecar_case

_HANG_S = 30.0  # wall time, far above the limit of CPU time, since machines are shared
_ADDRESS_SPACE = 8 << 30
_POLL_S = 0.2


@dataclass
class Summary:
    """What all cases of one kind came to."""

    results: Counter[str] = field(default_factory=Counter)
    mutations: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_cpu_s: float = 0.0
    most_bytes: int = 0
    elapsed_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.results[outcome.result] += 1
        self.mutations[outcome.mutation.partition("+")[0]] += 1
        self.slowest_cpu_s = max(self.slowest_cpu_s, outcome.cpu_s)
        self.most_bytes = max(self.most_bytes, outcome.peak_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "cases": sum(self.results.values()) + len(self.failures),
            "results": dict(self.results.most_common()),
            "failures": self.failures,
            "slowest_cpu_s": round(self.slowest_cpu_s, 3),
            "most_bytes_held": self.most_bytes,
            "mutations": dict(sorted(self.mutations.items())),
            "elapsed_s": round(self.elapsed_s, 1),
        }


def _work(kind: str, first: int, stop: int, seed: int, av1: bool, current: Any, results: Any) -> None:
    """Cases ``[first, stop)`` in a process of their own."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        for number in range(first, stop):
            current.value = number
            try:
                if kind == "mp4":
                    results.send(run_mp4_case(number, seed, av1=av1))
                else:
                    results.send(run_sidecar_case(number, seed, Path(directory)))
            except BaseException:  # noqa: BLE001  (whatever escapes is what is looked for)
                results.send(f"case {number}: {traceback.format_exc(limit=-4)}")
        results.send(None)


def run(kind: str, first: int, stop: int, seed: int, *, av1: bool) -> Summary:
    """Run cases ``[first, stop)`` of a kind."""
    summary, start = Summary(), time.monotonic()
    context = multiprocessing.get_context("fork")
    while first < stop:
        current = context.Value("q", first, lock=False)
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(kind, first, stop, seed, av1, current, sender))
        child.start()
        sender.close()
        first = _watch(child, receiver, current, summary, stop)
        done = sum(summary.results.values()) + len(summary.failures)
        print(f"{kind}: {done} cases, {len(summary.failures)} failures", file=sys.stderr, flush=True)
    summary.elapsed_s = time.monotonic() - start
    return summary


def _watch(child: Any, receiver: Any, current: Any, summary: Summary, stop: int) -> int:
    """Collect until the child has ended; returns the case to go on with."""
    seen, since = -1, time.monotonic()
    while True:
        if receiver.poll(_POLL_S):
            try:
                message = receiver.recv()
            except EOFError:
                child.join()
                summary.failures.append(f"case {current.value}: the process ended with {child.exitcode}")
                return int(current.value) + 1
            if message is None:
                child.join()
                return stop
            if isinstance(message, str):
                summary.failures.append(message)
            else:
                summary.add(message)
        if current.value != seen:
            seen, since = current.value, time.monotonic()
        elif time.monotonic() - since > _HANG_S:
            child.kill()
            child.join()
            summary.failures.append(f"case {seen}: no end within {_HANG_S:g} s")
            return int(seen) + 1


def main() -> int:
    """Parse arguments, run, print one JSON document; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--mp4", type=int, default=2000, metavar="N", help="mutated MP4 files")
    parser.add_argument("--sidecar", type=int, default=500, metavar="N", help="mutated archives and indexes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin with this case")
    parser.add_argument("--no-av1", action="store_true", help="without the codec that is slow to encode")
    arguments = parser.parse_args()
    av1 = not arguments.no_av1
    os.environ.setdefault("SVT_LOG", "1")
    report: dict[str, Any] = {"seed": arguments.seed}
    if arguments.mp4:
        prepare(av1=av1)
    for kind, count in (("mp4", arguments.mp4), ("sidecar", arguments.sidecar)):
        if count:
            first = arguments.first
            report[kind] = run(kind, first, first + count, arguments.seed, av1=av1).to_json()
    print(json.dumps(report, indent=2))
    return 1 if any(part["failures"] for name, part in report.items() if name != "seed") else 0


if __name__ == "__main__":
    sys.exit(main())
