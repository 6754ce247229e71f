"""Scripts in processes of their own that need not import PyTorch again, which takes seconds of a processor.

The `forkserver` of multiprocessing imports the libraries once for each test process, and every script runs in
a fork of it: with its own environment, directory and streams, as ``__main__``, and with nothing of the test
process. The Hub's client is not among the libraries, because it reads the environment when it is imported.
What the script starts in the same way, DataLoader's workers for one, comes from a server that is its own,
with its environment, but again a fork. What is tested about interpreters themselves (start, signals, exit
status at their end) takes real ones.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

__all__ = ["preload_libraries", "run_script"]

_LIBRARIES = ["torch", "torch.utils.data", "av", "numpy", "pyarrow.parquet"]


def preload_libraries() -> None:
    """Let the `forkserver` of this process import the libraries; of no effect once it runs."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_LIBRARIES)


def run_script(
    text: str,
    *arguments: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """Run a script as ``python script.py`` would; a failure is the caller's to judge.

    Args:
        text: The script.
        arguments: What it finds in `sys.argv` behind its own name.
        env: Its whole environment; None is that of this process.
        cwd: Its directory; None is that of this process.
        timeout_s: Until it is killed.

    Raises:
        subprocess.TimeoutExpired: It took longer.
    """
    preload_libraries()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        script, out, err = directory / "script.py", directory / "out", directory / "err"
        script.write_text(text, encoding="utf-8")
        words = [str(script), *(os.fspath(argument) for argument in arguments)]
        context = multiprocessing.get_context("forkserver")
        process = context.Process(
            target=_run,
            args=(words, dict(os.environ if env is None else env), str(cwd or Path.cwd()), out, err),
        )
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout_s, out.read_bytes(), err.read_bytes())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(words, code, out.read_text("utf-8"), err.read_text("utf-8"))


def _run(words: Sequence[str], env: Mapping[str, str], cwd: str, out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (lives as long as the process)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = list(words)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path.insert(0, str(Path(words[0]).parent))
    _fork_server()
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.stdout.flush()


def _fork_server() -> None:
    """Start the `forkserver` of a script, which has no threads yet, by a fork in place of an interpreter."""
    spawn = util.spawnv_passfds

    def fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            kept = sorted({0, 1, 2, *passfds})
            for first, last in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
                os.closerange(first + 1, last)
            exec(args[-1], {})
            code = 0
        finally:
            os._exit(code)

    util.spawnv_passfds = fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn
