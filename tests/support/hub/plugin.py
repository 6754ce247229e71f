"""Fixture of the loopback Hub: ``pytest_plugins = ["tests.support.hub.plugin"]`` in a test module."""

from collections.abc import Iterator

import pytest

from tests.support.hub.loopback import LoopbackHub


@pytest.fixture
def loopback_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A running, empty Hub; its threads have ended and its own failures are raised when the test is over."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    with LoopbackHub.start() as hub:
        yield hub
