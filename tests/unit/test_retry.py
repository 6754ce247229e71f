"""Waits between attempts: told ones are obeyed, own ones double, and both are bounded."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
import urllib3

from lrstream.errors import TransferError
from lrstream.storage.retry import RetryCounters, RetryPolicy, RetrySchedule, told_wait_s


def schedule(policy: RetryPolicy) -> tuple[RetrySchedule, list[float], RetryCounters]:
    """A schedule whose waits are written down instead of waited."""
    waits: list[float] = []
    counters = RetryCounters()
    return RetrySchedule(policy, "a.mp4, bytes [0, 9)", counters, sleep=waits.append), waits, counters


def test_own_waits_double_up_to_a_ceiling() -> None:
    policy = RetryPolicy(max_attempts=7, first_wait_s=1, longest_wait_s=5, deadline_s=1e9, jitter=0)
    attempts, waits, counters = schedule(policy)
    for _ in range(6):
        attempts.wait("reset")
    assert waits == [1, 2, 4, 5, 5, 5]
    assert (attempts.attempt, counters.retries, counters.slept_s) == (7, 6, 22)
    with pytest.raises(
        TransferError, match=r"a.mp4, bytes \[0, 9\): given up after 7 attempts.*reset"
    ) as caught:
        attempts.wait("reset")
    assert caught.value.fields["attempts"] == 7
    assert len(waits) == 6, "nobody waits before giving up"


def test_told_waits_are_never_cut_short() -> None:
    attempts, waits, _ = schedule(RetryPolicy(max_attempts=200, deadline_s=1e9, longest_wait_s=1))
    for _ in range(100):
        attempts.wait("status 429", told_s=40)
    assert min(waits) >= 40
    assert max(waits) <= 40 * 1.25
    assert len(set(waits)) > 50, "many workers do not come back at once"


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    attempts, waits, _ = schedule(RetryPolicy(deadline_s=60))
    attempts.wait("status 429", told_s=10)
    with pytest.raises(TransferError, match=r"beyond the deadline of 60 s.*status 429") as caught:
        attempts.wait("status 429", told_s=61)
    assert caught.value.fields["wait_s"] >= 61
    assert len(waits) == 1


def test_long_waits_are_told(caplog: pytest.LogCaptureFixture) -> None:
    attempts, _, _ = schedule(RetryPolicy(jitter=0))
    with caplog.at_level(logging.INFO, "lrstream"):
        attempts.wait("reset", told_s=1)
        attempts.wait("status 429 from hub", told_s=30)
    assert [record.getMessage() for record in caplog.records] == [
        "a.mp4, bytes [0, 9): status 429 from hub; next attempt in 30.0 s."
    ]


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7),
        ({"retry-after": " 0 "}, 0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"RateLimit": '"resolvers";r=0;t=123'}, 123),
        ({"ratelimit": '"api"; r=3; t = 9'}, 9),
        ({"RateLimit": "limit=100, remaining=0, reset=5"}, None),
        ({"Retry-After": "3", "RateLimit": '"x";r=0;t=60'}, 60),
        ({"Retry-After": "90", "RateLimit": '"x";r=0;t=60'}, 90),
    ],
)
def test_told_waits(headers: dict[str, str], expected_s: float | None) -> None:
    assert told_wait_s(urllib3.HTTPHeaderDict(headers)) == expected_s


def test_a_date_as_told_wait() -> None:
    moment = datetime.now(UTC) + timedelta(seconds=100)
    wait_s = told_wait_s(urllib3.HTTPHeaderDict({"Retry-After": format_datetime(moment, usegmt=True)}))
    assert wait_s is not None
    assert 98 <= wait_s <= 100
