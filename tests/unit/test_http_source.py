"""Ranges over HTTP against a real server that misbehaves on demand: exact bytes, or one clear error."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lrstream.errors import AccessError, LrstreamError, NotFoundError, TransferError
from lrstream.storage.byte_source import TransferCounters
from lrstream.storage.http_pool import HttpPool
from lrstream.storage.http_source import HttpByteSource
from lrstream.storage.hub_client import hub_headers
from lrstream.storage.retry import RetryCounters, RetryPolicy
from tests.support.hub import LoopbackHub

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(30)

REPO = "robots/pick"
VIDEO = "videos/front/chunk-000/file 0.mp4"
CONTENT = random.Random(7).randbytes(1_500_000)
QUICK = RetryPolicy(max_attempts=4, first_wait_s=0.01, longest_wait_s=0.02, deadline_s=20)


@pytest.fixture
def hub(loopback_hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """A Hub with one private video, and a reader's token in the environment."""
    loopback_hub.create_dataset(REPO, private=True)
    loopback_hub.commit_files(REPO, {VIDEO: CONTENT, "small.txt": b"plain text", "empty.txt": b""})
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    return loopback_hub


@pytest.fixture
def open_source(hub: LoopbackHub) -> Callable[..., HttpByteSource]:
    """Makes sources; all arguments of `HttpByteSource` may be given."""

    def make(path: str = VIDEO, *, policy: RetryPolicy = QUICK, **options: object) -> HttpByteSource:
        from urllib.parse import quote

        arguments: dict[str, object] = {
            "headers": hub_headers,
            "counters": TransferCounters(),
            "retry_counters": RetryCounters(),
            "policy": policy,
            **options,
        }
        url = f"{hub.endpoint}/datasets/{REPO}/resolve/main/{quote(path)}"
        return HttpByteSource(path, url, HttpPool(8), **arguments)  # type: ignore[arg-type]

    return make


Open = Callable[..., HttpByteSource]


def test_ranges_are_the_bytes_of_the_file(hub: LoopbackHub, open_source: Open) -> None:
    source = open_source()
    rng = random.Random(3)
    for _ in range(20):
        start = rng.randrange(len(CONTENT))
        stop = rng.randrange(start, len(CONTENT) + 1)
        assert source.read(start, stop) == CONTENT[start:stop]
    assert source.read_upto(len(CONTENT) - 3, len(CONTENT) + 100) == (CONTENT[-3:], len(CONTENT))
    assert source.read_upto(len(CONTENT) + 5, len(CONTENT) + 100) == (b"", len(CONTENT))
    assert source.size() == len(CONTENT)
    # One redirect for all reads.
    assert hub.log.count("/resolve/") == 1


def test_size_costs_the_redirect_alone_and_the_next_read_uses_it(hub: LoopbackHub, open_source: Open) -> None:
    source = open_source()
    assert source.size() == len(CONTENT)
    assert [record.server for record in hub.log] == ["hub"]
    assert source.read(10, 20) == CONTENT[10:20]
    assert [record.server for record in hub.log] == ["hub", "cdn"]


@pytest.mark.parametrize("redirected", [False, True])
def test_files_served_by_the_hub_itself(hub: LoopbackHub, open_source: Open, redirected: bool) -> None:
    hub.settings.regular_redirect = redirected
    source = open_source("small.txt")
    assert source.read(2, 7) == b"ain t"
    assert source.read_upto(0, 1 << 20) == (b"plain text", 10)
    assert open_source("small.txt").size() == 10
    assert {record.server for record in hub.log} == {"hub"}
    # The token goes along on the same origin, also after a redirect (K30).
    assert all(record.authorization == f"Bearer {hub.read_token}" for record in hub.log)


def test_an_empty_file(open_source: Open) -> None:
    source = open_source("empty.txt")
    assert source.size() == 0
    assert source.read_upto(0, 100) == (b"", 0)
    with pytest.raises(TransferError, match=r"empty.txt, bytes \[0, 1\) were wanted, but the file ends at 0"):
        source.read(0, 1)


def test_the_token_stays_at_the_hub(hub: LoopbackHub, open_source: Open) -> None:
    open_source().read(0, 100)
    hub_requests, cdn_requests = hub.log.records(server="hub"), hub.log.records(server="cdn")
    assert [record.authorization for record in hub_requests] == [f"Bearer {hub.read_token}"]
    assert [record.authorization for record in cdn_requests] == [None]
    assert all("cookie" not in record.headers for record in cdn_requests)


def test_parallel_parts_of_one_range(hub: LoopbackHub, open_source: Open) -> None:
    source = open_source(subranges=4)
    assert source.read(5, 1_400_000) == CONTENT[5:1_400_000]
    parts = hub.log.records(server="cdn")
    assert len(parts) == 4
    assert sum(record.bytes_sent for record in parts) == 1_400_000 - 5
    assert hub.log.count(server="hub") == 1
    hub.log.clear()
    assert source.read(0, 1000) == CONTENT[:1000]
    assert len(hub.log) == 1, "a short range is one request"


# Failures that pass

PASSING: list[tuple[str, dict[str, object]]] = [
    ("timeout", {}),
    ("server-error", {"status": 500}),
    ("server-error", {"status": 502}),
    ("server-error", {"status": 503, "retry_after": 0}),
    ("server-error", {"status": 504}),
    ("rate-limit", {}),
    ("reset", {}),
    ("reset-after-headers", {}),
    ("reset-after-headers", {"after_bytes": 50_000}),
    ("truncate", {}),
    ("truncate", {"after_bytes": 0}),
]


@pytest.mark.parametrize("server", ["hub", "cdn"])
@pytest.mark.parametrize(("kind", "arguments"), PASSING)
def test_failures_that_pass_leave_exact_bytes(
    hub: LoopbackHub, open_source: Open, server: str, kind: str, arguments: dict[str, object]
) -> None:
    counters = RetryCounters()
    source = open_source(retry_counters=counters)
    hub.faults.add("file 0", kind, times=2, server=server, **arguments)  # type: ignore[arg-type]
    assert source.read(1000, 200_000) == CONTENT[1000:200_000]
    # A redirect's own body does not matter, so a cut there costs nothing.
    assert counters.retries == 2 or (server == "hub" and kind in ("truncate", "reset-after-headers"))


@pytest.mark.parametrize(("kind", "arguments"), PASSING)
def test_failures_that_do_not_pass_end_in_one_error(
    hub: LoopbackHub, open_source: Open, kind: str, arguments: dict[str, object]
) -> None:
    hub.faults.add("file 0", kind, server="cdn", **arguments)  # type: ignore[arg-type]
    with pytest.raises(TransferError) as caught:
        open_source().read(1000, 200_000)
    message = str(caught.value)
    assert f"{VIDEO}, bytes [1000, 200000)" in message
    assert "4 attempts" in message
    assert "localhost" in message, "the host that failed is named"
    assert hub.log.count(server="cdn") == 4
    assert_no_secret(hub, caught.value)


def test_told_waits_are_waited(hub: LoopbackHub, open_source: Open) -> None:
    hub.faults.add("file 0", "rate-limit", times=1, server="cdn", retry_after=1)
    counters = RetryCounters()
    begin = time.monotonic()
    assert open_source(retry_counters=counters).read(0, 10) == CONTENT[:10]
    assert time.monotonic() - begin >= 1
    assert (counters.retries, counters.slept_s >= 1) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "least_s"), [({"ratelimit": 2}, 2), ({"retry_after": 2, "http_date": True}, 0.9)]
)
def test_other_ways_to_tell_a_wait(
    hub: LoopbackHub, open_source: Open, arguments: dict[str, object], least_s: float
) -> None:
    hub.faults.add("file 0", "rate-limit", times=1, server="hub", **arguments)  # type: ignore[arg-type]
    counters = RetryCounters()
    assert open_source(retry_counters=counters).read(0, 10) == CONTENT[:10]
    # A date has whole seconds, so up to one of them may have passed.
    assert counters.slept_s >= least_s


def test_a_told_wait_beyond_the_deadline_is_not_begun(hub: LoopbackHub, open_source: Open) -> None:
    hub.faults.add("file 0", "rate-limit", server="cdn", retry_after=3600)
    begin = time.monotonic()
    with pytest.raises(TransferError, match=r"status 429.*") as caught:
        open_source().read(0, 10)
    assert time.monotonic() - begin < 2
    assert "beyond the deadline of 20 s" in str(caught.value)


# Replies that are not what was asked for


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("ignore-range", {}, "ignored the range"),
        ("wrong-content-range", {"shift": 1}, r"sent bytes \[1001, 2001\) of 1500000 instead"),
        ("wrong-content-range", {"shift": -1000}, r"sent bytes \[0, 1000\) of 1500000 instead"),
        ("short-body", {"missing_bytes": 1}, "declares a body of 999 bytes, expected 1000"),
        ("drop-headers", {"names": ("Content-Range",)}, "without saying which"),
        ("status", {"status": 418}, "status 418.*expected 206"),
    ],
)
def test_wrong_replies_are_refused(
    hub: LoopbackHub, open_source: Open, kind: str, arguments: dict[str, object], said: str
) -> None:
    hub.faults.add("file 0", kind, server="cdn", **arguments)  # type: ignore[arg-type]
    with pytest.raises(TransferError, match=said) as caught:
        open_source().read(1000, 2000)
    assert f"{VIDEO}, bytes [1000, 2000)" in str(caught.value)
    assert_no_secret(hub, caught.value)


def test_a_whole_file_is_not_pulled_for_a_range(hub: LoopbackHub, open_source: Open) -> None:
    big = random.Random(1).randbytes(24 << 20)
    hub.commit_files(REPO, {"big.mp4": big})
    hub.faults.add("big", "ignore-range", server="cdn")
    counters = TransferCounters()
    with pytest.raises(TransferError, match="ignored the range"):
        open_source("big.mp4", counters=counters).read(100, 200)
    hub.log.wait_until_idle()
    assert counters.bytes_read == 0
    # Beyond what socket buffers hold, nothing was taken.
    assert hub.log.bytes_sent(server="cdn") < 16 << 20


def test_a_reply_with_the_whole_file_is_right_for_a_request_of_all(
    hub: LoopbackHub, open_source: Open
) -> None:
    hub.faults.add("file 0", "ignore-range", server="cdn")
    assert open_source().read(0, len(CONTENT)) == CONTENT


def test_a_file_of_another_size_is_refused(open_source: Open) -> None:
    with pytest.raises(TransferError, match="the file has 1500000 bytes now, expected 1500001"):
        open_source(size=len(CONTENT) + 1).read(0, 10)


def test_a_file_of_another_hash_is_refused(hub: LoopbackHub, open_source: Open) -> None:
    with pytest.raises(
        TransferError, match=f"content was replaced: hash [0-9a-f]{{64}}, expected {'0' * 64}"
    ):
        open_source(content_hash="0" * 64).read(0, 10)
    assert hub.log.count(server="cdn") == 0


# Signed URLs


def test_an_expired_url_is_resolved_once_more(hub: LoopbackHub, open_source: Open) -> None:
    source = open_source()
    for _ in range(3):
        assert source.read(0, 10) == CONTENT[:10]
        hub.signer.expire_all()
    assert hub.log.count(server="hub") == 3
    assert hub.log.count(server="cdn", status=403) == 2


def test_sixteen_threads_on_one_expired_url_refresh_it_once(hub: LoopbackHub, open_source: Open) -> None:
    source = open_source()
    source.read(0, 10)
    hub.signer.expire_all()
    hub.log.clear()
    # The refusals come late, so that every thread is under way with the old URL.
    hub.faults.add("file 0", "slow", times=16, server="cdn", latency_s=0.2)
    together = threading.Barrier(16)

    def read(number: int) -> bytes:
        together.wait()
        return source.read(number, number + 100)

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(read, range(16)))
    assert found == [CONTENT[number : number + 100] for number in range(16)]
    assert hub.log.count(server="cdn", status=403) >= 8
    assert hub.log.count(server="hub") == 1


def test_sixteen_threads_on_a_new_source_resolve_it_once(hub: LoopbackHub, open_source: Open) -> None:
    hub.faults.add("file 0", "slow", server="hub", latency_s=0.1)
    source = open_source()
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda number: source.read(number, number + 5), range(16)))
    assert found == [CONTENT[number : number + 5] for number in range(16)]
    assert hub.log.count(server="hub") == 1


def test_a_refusal_that_does_not_heal_is_not_repeated_for_ever(hub: LoopbackHub, open_source: Open) -> None:
    hub.faults.add("file 0", "forbidden", server="cdn")
    with pytest.raises(AccessError, match="a freshly signed URL was refused") as caught:
        open_source().read(1000, 2000)
    assert "SignatureError" in str(caught.value), "the server's words are passed on"
    assert f"{VIDEO}, bytes [1000, 2000)" in str(caught.value)
    assert (hub.log.count(server="hub"), hub.log.count(server="cdn")) == (2, 2)
    assert_no_secret(hub, caught.value)


def test_a_url_may_expire_twice_during_one_read(hub: LoopbackHub, open_source: Open) -> None:
    source = open_source()
    source.read(0, 1)
    hub.signer.expire_all()
    busy = hub.faults.add("file 0", "server-error", times=1, server="cdn", after=1, status=503, retry_after=1)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(source.read, 5, 50)
        while busy.hits == 0:
            time.sleep(0.01)
        # While it waits, the second URL serves another read and then expires too.
        assert source.read(0, 1) == CONTENT[:1]
        hub.signer.expire_all()
        assert reading.result() == CONTENT[5:50]
    assert hub.log.count(server="hub") == 3


# Refusals of the Hub itself


def test_a_missing_file(open_source: Open, hub: LoopbackHub) -> None:
    with pytest.raises(NotFoundError, match=r"absent.mp4 does not exist: status 404 .*Entry not found"):
        open_source("absent.mp4").read(0, 10)
    assert len(hub.log) == 1


@pytest.mark.parametrize("token", [None, "hf_WrongTokenSENTINEL0123456789", "stranger"])
def test_no_access(
    hub: LoopbackHub, open_source: Open, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    hub.connect_process(monkeypatch, hub.stranger_token if token == "stranger" else token)
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    with pytest.raises((AccessError, NotFoundError), match=r"status 40[14] from 127\.0\.0\.1") as caught:
        open_source().read(0, 10)
    assert len(hub.log) == 1, "not repeated"
    assert_no_secret(hub, caught.value)


def test_a_token_that_arrives_later_is_used(
    hub: LoopbackHub, open_source: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    source = open_source()
    with pytest.raises(AccessError):
        source.read(0, 10)
    monkeypatch.setenv("HF_TOKEN", hub.read_token)
    assert source.read(0, 10) == CONTENT[:10]


def test_a_server_that_is_not_there(open_source: Open, hub: LoopbackHub) -> None:
    source = open_source(headers=dict)
    source._url = "http://127.0.0.1:9/nothing"
    with pytest.raises(TransferError, match=r"given up after 4 attempts.*127.0.0.1:9"):
        source.read(0, 10)


# Processes


def test_a_source_travels_without_token_or_signed_url(hub: LoopbackHub, open_source: Open) -> None:
    source = open_source()
    source.read(0, 10)
    pickled = pickle.dumps(source)
    assert hub.read_token.encode() not in pickled
    assert b"Signature" not in pickled
    assert pickle.loads(pickled).read(3, 9) == CONTENT[3:9]


def assert_no_secret(hub: LoopbackHub, error: LrstreamError) -> None:
    import traceback

    shown = "".join(traceback.format_exception(error)) + repr(error.fields)
    assert "SENTINEL" not in shown
    assert "Signature=" not in shown
