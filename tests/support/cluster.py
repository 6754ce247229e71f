"""A real Dask cluster on this machine: a scheduler and worker processes of their own, which may be killed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tests.support.shared import PROJECT

__all__ = ["DaskCluster"]

_START_TIMEOUT_S = 60.0


class DaskCluster:
    """Use as a context manager; everything it started has ended when it is left.

    Args:
        directory: Where logs go.
        environment: Of all its processes, added to that of this one; None takes a variable away.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str | None] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        changed = {**os.environ, "PYTHONPATH": str(PROJECT), **(environment or {})}
        # Everything the library would ever log.
        changed["DASK_LOGGING__DISTRIBUTED"] = "debug"
        self._environment = {name: value for name, value in changed.items() if value is not None}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        self.address = ""

    def __enter__(self) -> DaskCluster:
        try:
            note = self._directory / "scheduler.json"
            self._start(
                "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard",
                "--scheduler-file", str(note),
            )  # fmt: skip
            limit = time.monotonic() + _START_TIMEOUT_S
            while not self.address:
                assert time.monotonic() < limit, self.logs()
                time.sleep(0.02)
                if note.exists() and (text := note.read_text()).strip():
                    self.address = json.loads(text)["address"]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start one worker process of one thread; it has joined when `wait_for_workers` returns."""
        return self._start(
            "distributed.cli.dask_worker", self.address, "--no-nanny", "--nthreads", "1", "--no-dashboard",
            "--host", "127.0.0.1", "--local-directory", str(self._directory),
        )  # fmt: skip

    def second_worker(self) -> subprocess.Popen[bytes]:
        """The second worker: the one that runs, or a new one. Both have joined afterwards."""
        running = [process for process in self._processes[1:] if process.poll() is None]
        second = running[1] if len(running) > 1 else self.start_worker()
        self.wait_for_workers(2)
        return second

    def one_worker(self) -> None:
        """Leave only the first worker."""
        for process in self._processes[2:]:
            if process.poll() is None:
                self.kill(process)
        self.wait_for_workers(1)

    def wait_for_workers(self, count: int) -> None:
        """Wait until exactly `count` workers have joined, and can begin at once."""
        from distributed import Client

        with Client(self.address, set_as_default=False, timeout=_START_TIMEOUT_S) as client:
            limit = time.monotonic() + _START_TIMEOUT_S
            while len(client.nthreads()) != count:
                assert time.monotonic() < limit, self.logs()
                time.sleep(0.05)
            # Importing takes longer than what tests give them to do.
            client.run(importlib.import_module, "lrstream.sidecar.cluster_task")

    def scheduler_process(self) -> subprocess.Popen[bytes]:
        """The scheduler."""
        return self._processes[0]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a process at once."""
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)

    def logs(self) -> str:
        """All that its processes have written."""
        return "\n".join(path.read_text("utf-8", "replace") for path in sorted(self._directory.glob("*.log")))

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self._directory / f"{len(self._processes)}.log").open("wb")
        self._logs.append(log)
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=self._environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self._directory,
        )
        self._processes.append(process)
        return process

    def _end(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(timeout=30)
        for log in self._logs:
            log.close()
