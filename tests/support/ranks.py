"""Programs started rank by rank as users start them, with ``torchrun`` or ``accelerate launch``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support.shared import import_path

__all__ = ["run_ranks", "torchrun"]


def torchrun(world_size: int) -> list[str]:
    """The launcher of PyTorch for so many ranks, which meet at a port that the system chooses."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return ["torch.distributed.run", f"--nproc-per-node={world_size}", *rendezvous]


def run_ranks(
    launcher: Sequence[str],
    program: str | os.PathLike[str],
    *arguments: str | os.PathLike[str],
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run a script in several ranks of this machine, and wait for all of them.

    Args:
        launcher: A module that is run as a program, and its options.
        program: The script.
        arguments: What it finds in `sys.argv` behind its own name.
        timeout_s: Until the launcher is killed.

    Raises:
        AssertionError: A rank failed; the end of what all of them wrote is in the message.
        subprocess.TimeoutExpired: It took longer.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, program, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done
