"""Reservations, leases and waits of the episode byte cache (LD-5)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from lrstream.errors import ByteBudgetError, LrstreamError, UsageError
from lrstream.streaming.budget import EpisodeByteCache

Cache = EpisodeByteCache[int, str]


def in_thread(action: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Start an action; its result appears in the list when it has ended."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    return thread, results


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.001)


def finish(thread: threading.Thread) -> None:
    thread.join(10)
    assert not thread.is_alive()


def test_bytes_count_from_reservation_to_the_last_lease() -> None:
    cache = Cache(100)
    assert cache.reserve(1, 60)
    assert (cache.reserved_bytes, cache.resident_bytes) == (60, 0)
    cache.fill(1, "payload", num_bytes=50)
    assert (cache.reserved_bytes, cache.resident_bytes) == (60, 50)
    with cache.lease(1) as payload:
        assert payload == "payload"
        second = cache.lease(1)
        cache.retire(1)
        assert 1 not in cache
        assert (cache.reserved_bytes, cache.resident_bytes) == (60, 50)
    assert cache.reserved_bytes == 60
    second.release()
    assert (cache.reserved_bytes, cache.resident_bytes, len(cache)) == (0, 0, 0)
    assert (cache.peak_reserved_bytes, cache.peak_resident_bytes) == (60, 50)


def test_a_lease_ends_once() -> None:
    cache = Cache(100)
    cache.reserve(1, 10)
    cache.fill(1, "x")
    first, second = cache.lease(1), cache.lease(1)
    cache.retire(1)
    first.release()
    first.release()
    assert cache.reserved_bytes == 10
    assert second.payload == "x"
    with pytest.raises(LrstreamError, match="after its lease had ended"):
        _ = first.payload
    second.release()
    assert cache.reserved_bytes == 0


def test_a_lease_ends_when_decoding_fails() -> None:
    cache = Cache(100)
    cache.reserve(1, 10)
    cache.fill(1, "x")
    lease = cache.lease(1)
    cache.retire(1)
    with pytest.raises(ZeroDivisionError), lease:
        raise ZeroDivisionError
    assert cache.reserved_bytes == 0


def test_an_oversized_episode_raises_at_once_even_when_the_cache_is_full() -> None:
    cache = Cache(100)
    cache.reserve(1, 100)
    for ask in (cache.reserve, cache.try_reserve):
        with pytest.raises(ByteBudgetError, match=r"episode 2 needs 101 bytes.*100 bytes"):
            ask(2, 101)


def test_speculation_pauses_at_a_full_budget() -> None:
    cache = Cache(100)
    assert cache.try_reserve(1, 60)
    assert not cache.try_reserve(2, 41)
    assert cache.reserved_bytes == 60
    assert cache.try_reserve(2, 40)
    cache.retire(1)
    assert cache.try_reserve(3, 60)


def test_a_prefetched_episode_is_admitted_without_more_room() -> None:
    cache = Cache(100)
    assert cache.try_reserve(1, 100)
    assert cache.reserve(1, 100)
    assert cache.reserved_bytes == 100


def test_admission_waits_for_the_last_decode() -> None:
    cache = Cache(100)
    cache.reserve(1, 80)
    cache.fill(1, "x")
    lease = cache.lease(1)
    thread, results = in_thread(lambda: cache.reserve(2, 30))
    wait_until(lambda: cache.num_waits == 1)
    cache.retire(1)
    assert results == []
    assert cache.reserved_bytes == 80
    lease.release()
    finish(thread)
    assert results == [True]
    assert cache.reserved_bytes == 30
    assert cache.waited_s > 0


def test_waits_are_served_in_order_and_before_speculation() -> None:
    cache = Cache(100)
    cache.reserve(1, 60)
    big, big_results = in_thread(lambda: cache.reserve(2, 90))
    wait_until(lambda: cache.num_waits == 1)
    # 10 bytes would fit now, but would let the large episode starve.
    assert not cache.try_reserve(3, 10)
    small, small_results = in_thread(lambda: cache.reserve(4, 10))
    wait_until(lambda: cache.num_waits == 2)
    assert small_results == []
    cache.retire(1)
    finish(big)
    finish(small)
    assert big_results == small_results == [True]
    assert cache.reserved_bytes == 100


def test_a_retired_episode_can_be_reserved_again_after_its_last_lease() -> None:
    cache = Cache(100)
    cache.reserve(1, 10)
    cache.fill(1, "first epoch")
    lease = cache.lease(1)
    cache.retire(1)
    assert not cache.try_reserve(1, 10)
    thread, results = in_thread(lambda: cache.reserve(1, 10))
    wait_until(lambda: cache.num_waits == 1)
    assert results == []
    lease.release()
    finish(thread)
    cache.fill(1, "second epoch")
    with cache.lease(1) as payload:
        assert payload == "second epoch"


def test_close_wakes_every_waiter() -> None:
    cache = Cache(100)
    cache.reserve(1, 100)
    cache.fill(1, "x")
    lease = cache.lease(1)
    waiting = [in_thread(lambda n=n: cache.reserve(n, 50)) for n in (2, 3, 4)]  # type: ignore[misc]
    wait_until(lambda: cache.num_waits == 3)
    cache.close()
    for thread, results in waiting:
        finish(thread)
        assert results == [False]
    assert not cache.reserve(5, 1)
    assert lease.payload == "x"
    cache.fill(2, "fetched too late")  # a fetch that was under way has nobody to tell
    cache.retire(1)
    assert cache.reserved_bytes == 100
    lease.release()
    assert (cache.reserved_bytes, cache.resident_bytes) == (0, 0)


def test_a_cancelled_wait_lets_the_next_one_pass() -> None:
    cache = Cache(100)
    cache.reserve(1, 60)
    cancel = threading.Event()
    big, big_results = in_thread(lambda: cache.reserve(2, 90, cancel_event=cancel))
    wait_until(lambda: cache.num_waits == 1)
    small, small_results = in_thread(lambda: cache.reserve(3, 40))
    wait_until(lambda: cache.num_waits == 2)
    cancel.set()
    finish(big)
    finish(small)
    assert big_results == [False]
    assert small_results == [True]
    assert cache.reserved_bytes == 100


def test_a_failed_fetch_gives_its_bytes_back() -> None:
    cache = Cache(100)
    cache.reserve(1, 100)
    cache.retire(1)
    assert cache.try_reserve(2, 100)


def test_no_budget_means_no_limit() -> None:
    cache = Cache(None)
    assert all(cache.try_reserve(n, 2**40) for n in range(5))
    assert cache.reserved_bytes == 5 * 2**40


def test_misuse_is_an_error_not_a_wrong_count() -> None:
    cache = Cache(100)
    with pytest.raises(LrstreamError, match="filled without a reservation"):
        cache.fill(1, "x")
    with pytest.raises(LrstreamError, match="retired without a reservation"):
        cache.retire(1)
    cache.reserve(1, 10)
    with pytest.raises(LrstreamError, match="bytes are not held"):
        cache.lease(1)
    with pytest.raises(LrstreamError, match="holds 11 bytes, but only 10"):
        cache.fill(1, "x", num_bytes=11)
    cache.fill(1, "x")
    with pytest.raises(LrstreamError, match="filled twice"):
        cache.fill(1, "x")
    cache.retire(1)
    with pytest.raises(LrstreamError, match="bytes are not held"):
        cache.lease(1)
    with pytest.raises(UsageError, match="reserve -1 bytes"):
        cache.reserve(2, -1)
    with pytest.raises(UsageError, match="byte budget is -5"):
        Cache(-5)
    assert (cache.reserved_bytes, cache.resident_bytes) == (0, 0)
