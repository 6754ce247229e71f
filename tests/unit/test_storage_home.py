"""Where local caches live."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrstream.storage.home import lerobot_home


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_LEROBOT_HOME": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_LEROBOT_HOME": "", "HF_HOME": "/b"}, "/b/lerobot"),
        ({"HF_HOME": "~/b"}, "/home/me/b/lerobot"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/lerobot"),
        ({}, "/home/me/.cache/huggingface/lerobot"),
    ],
)
def test_lerobot_home(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_LEROBOT_HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert lerobot_home() == Path(expected)
