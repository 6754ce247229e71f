"""Where local caches live."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["lerobot_home"]


def lerobot_home() -> Path:
    """Directory of LeRobot's local caches, read from the environment at each call.

    ``$HF_LEROBOT_HOME``, else ``$HF_HOME/lerobot``, else ``huggingface/lerobot`` under
    ``$XDG_CACHE_HOME`` or ``~/.cache``. An empty variable counts as unset. The directory need not
    exist.
    """
    if explicit := os.environ.get("HF_LEROBOT_HOME"):
        return Path(explicit).expanduser()
    if hf_home := os.environ.get("HF_HOME"):
        return Path(hf_home).expanduser() / "lerobot"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "lerobot"
