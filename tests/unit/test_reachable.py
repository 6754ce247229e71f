"""Names that cannot be resolved: told apart from other failures, and soon given up at a first contact."""

from __future__ import annotations

import socket
import time
from typing import Any

import huggingface_hub.constants
import pytest
import urllib3

from lrstream import StreamingLeRobotDataset
from lrstream.errors import TransferError
from lrstream.storage import reachable
from lrstream.storage.http_pool import HttpPool
from lrstream.storage.http_reply import RetryLater, transport_failure
from lrstream.storage.reachable import has_answered, is_unresolved, note_answer
from lrstream.storage.retry import RetryCounters, RetryPolicy, RetrySchedule
from tests.support.remote import hurry_retries

URL = "http://hub.invalid"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_answered", set())


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No name can be resolved, as without network; the names that were asked for."""
    asked: list[str] = []

    def fail(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    return asked


def test_failures_of_a_connection_pool(no_names: list[str]) -> None:
    with pytest.raises(urllib3.exceptions.HTTPError) as caught:
        HttpPool(1).get(f"{URL}/a", {})
    assert is_unresolved(caught.value)
    later = transport_failure(caught.value, "a.mp4", URL)
    assert isinstance(later, RetryLater)
    assert later.unresolved
    note_answer(f"{URL}/b")
    later = transport_failure(caught.value, "a.mp4", URL)
    assert isinstance(later, RetryLater)
    assert not later.unresolved, "it has answered before: an outage"


def test_other_failures() -> None:
    with pytest.raises(urllib3.exceptions.HTTPError) as caught:
        HttpPool(1).get("http://127.0.0.1:9/a", {})
    assert not is_unresolved(caught.value)
    assert not has_answered("http://127.0.0.1:9")


def test_failures_of_the_hub_s_client(no_names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever HTTP library it is built on."""
    with pytest.raises(Exception, match="name resolution") as caught:
        huggingface_hub.HfApi(endpoint=URL).list_repo_refs("a/b", repo_type="dataset")
    assert is_unresolved(caught.value)


def test_few_attempts_at_a_first_contact_and_many_later() -> None:
    policy = RetryPolicy(jitter=0)
    for unresolved, attempts, seconds in ((True, 4, 3.5), (False, 8, 61.5)):
        waits: list[float] = []
        schedule = RetrySchedule(policy, "a.mp4", RetryCounters(), sleep=waits.append)

        def fail(schedule: RetrySchedule = schedule, unresolved: bool = unresolved) -> None:
            while True:
                schedule.wait("no such name", unresolved=unresolved)

        with pytest.raises(TransferError, match=f"given up after {attempts} attempts") as caught:
            fail()
        assert sum(waits) == seconds
        assert ("HF_ENDPOINT" in str(caught.value)) is unresolved


@pytest.mark.parametrize("revision", [None, "main", "a" * 40])
def test_opening_without_network(
    no_names: list[str], monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """A commit needs no look-up: the first contact is the client's download, with attempts of its own."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", URL)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hurry_retries(monkeypatch, max_attempts=50)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"given up after 4 attempts.*check the network of this machine"):
        StreamingLeRobotDataset("robots/pick", revision=revision)
    assert time.monotonic() - started < 10
    assert set(no_names) == {"hub.invalid"}
