"""Child processes for clients that read their settings at import."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_PROJECT_ROOT = Path(__file__).resolve().parents[3]


def client_environment(
    endpoint: str, home: Path, token: str | None = None, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment in which a Hub client knows only `endpoint` and keeps everything under `home`.

    Args:
        endpoint: Base URL of the Hub.
        home: Directory for caches and settings.
        token: Access token, or None for an anonymous client.
        extra: Variables that are added or replace others.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING_FACE_")) and "proxy" not in name.lower()
    }
    own = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_LEROBOT_HOME": str(home / "lerobot"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_XET_TELEMETRY_ENABLED": "0",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_PROJECT_ROOT), os.environ.get("PYTHONPATH")])),
    }
    if token is not None:
        own["HF_TOKEN"] = token
    return {**kept, **own, **(extra or {})}


def run_python(
    code: str, env: Mapping[str, str], timeout: float = 30.0, *, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a child process and returns its output; a failure is the caller's to judge.

    Args:
        code: Program text.
        env: Its whole environment, see :meth:`LoopbackHub.env`.
        timeout: Seconds until it is killed.
        python: Interpreter, for clients installed elsewhere.

    Raises:
        subprocess.TimeoutExpired: It took longer.
    """
    return subprocess.run(
        [python, "-c", code], env=dict(env), capture_output=True, text=True, timeout=timeout, check=False
    )
