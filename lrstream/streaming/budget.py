"""Episode bytes in memory, kept within a budget (LD-5).

A reservation is made before the first byte of an episode is requested and ends when the last decode of
the episode has let go of it, so `reserved_bytes` covers pending fetches, completed prefetches, resident
episodes and retired ones that are still being decoded. It never exceeds the budget.

Why this cannot stop for ever when it follows a plan: reservations are asked for in the order of
admission, and the plan keeps the resident episodes plus the next one within the budget. An admission that
waits therefore waits only for retired episodes, whose decodes need nothing more. Prefetch must keep to
the same order: an episode prefetched behind the one that waits would hold bytes that nobody gives back.
So admission and prefetch reserve at one frontier: in one thread, or under one lock that is held while an
admission waits (`try_reserve` never waits, and yields to whoever does, but cannot know who comes next).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from lrstream.errors import ByteBudgetError, LrstreamError, UsageError

__all__ = ["EpisodeByteCache", "Lease", "oversized_episode_error"]

K = TypeVar("K", bound=Hashable)
P = TypeVar("P")

# How often a waiting thread looks at its cancel event: nothing else can tell it that the event was set.
_CANCEL_POLL_S = 0.05


def oversized_episode_error(
    episode: object, size_bytes: int, budget_bytes: int, *, num_oversized: int = 1
) -> ByteBudgetError:
    """The error for an episode that fits no pool under this budget, not even alone.

    Args:
        episode: Its episode_index.
        size_bytes: Exact bytes of all its cameras.
        budget_bytes: Budget of the process that would have to hold it.
        num_oversized: How many episodes are too large; the named one should be the largest.
    """
    others = f" ({num_oversized - 1} more episodes are too large as well)" if num_oversized > 1 else ""
    return ByteBudgetError(
        f"Byte budget exceeded: episode {episode} needs {size_bytes} bytes ({size_bytes / 2**20:.1f} MiB), "
        f"but its worker's whole budget is {budget_bytes} bytes ({budget_bytes / 2**20:.1f} MiB){others}.",
        hint="Use a larger budget per rank, fewer workers (they share it), fewer cameras, or a "
        "payload layout with smaller episode spans. A smaller pool cannot help: the episode does not "
        "fit alone.",
        episode_index=episode,
        size_bytes=size_bytes,
        budget_bytes=budget_bytes,
        num_oversized=num_oversized,
    )


@dataclass(slots=True)
class _Entry(Generic[P]):
    """One reserved episode."""

    size_bytes: int
    payload: P | None = None
    resident_bytes: int = 0
    num_leases: int = 0
    is_filled: bool = False
    is_retired: bool = False


class Lease(Generic[P]):
    """The right to use an episode's payload; ends by `release` or at the end of a `with` block.

    Args:
        cache: Where the episode is.
        episode: Which one.
        entry: What the cache knows of it.
        payload: What was given to `EpisodeByteCache.fill`.
    """

    __slots__ = ("_cache", "_entry", "_episode", "_is_released", "_payload")

    def __init__(self, cache: EpisodeByteCache[Any, P], episode: Any, entry: _Entry[P], payload: P) -> None:
        self._cache = cache
        self._episode = episode
        self._entry = entry
        self._payload: P | None = payload
        self._is_released = False

    @property
    def payload(self) -> P:
        """What was given to `fill`.

        Raises:
            LrstreamError: The lease has ended.
        """
        payload = self._payload
        if self._is_released:
            raise LrstreamError("An episode's payload was used after its lease had ended.")
        return payload  # type: ignore[return-value]  # None only after release, or if P admits it

    def release(self) -> None:
        """End the lease; more calls do nothing."""
        self._cache._end(self)

    def __enter__(self) -> P:
        return self.payload

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class EpisodeByteCache(Generic[K, P]):
    """Reservations and payloads of the episodes of one process. Thread-safe; not to be forked or pickled.

    Life of an episode: `reserve` or `try_reserve` → `fill` → any number of `lease`s → `retire`. The bytes
    are free again once it is retired and the last lease has ended. An episode whose fetch failed is
    retired without having been filled.

    Args:
        budget_bytes: Most bytes reserved at one time, or None for no limit.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise UsageError(f"The byte budget is {budget_bytes}, expected 0 or more.")
        self.budget_bytes = budget_bytes
        # Taken by itself where nobody waits: a `Condition` enters it by a call of Python code.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._entries: dict[K, _Entry[P]] = {}
        self._queue: deque[object] = deque()
        self._is_closed = False
        self._reserved = self._resident = 0
        self._peak_reserved = self._peak_resident = 0
        self._num_waits = 0
        self._waited_s = 0.0

    # -- reservations -----------------------------------------------------------------------------

    def reserve(
        self,
        episode: K,
        size_bytes: int,
        *,
        block: bool = True,
        cancel_event: threading.Event | None = None,
    ) -> bool:
        """Reserve an episode's bytes, waiting for room behind those who came before.

        An episode that is reserved already (it was prefetched) needs no room, so this returns at once.
        One that is retired but still leased counts as absent: its new reservation waits for its end.

        Args:
            episode: Key of the episode, unique within the epoch.
            size_bytes: Its exact size.
            block: Whether to wait for room.
            cancel_event: Setting it ends the wait (within some hundredths of a second).

        Returns:
            True if the bytes are reserved; False if there was no room and `block` is false, or the wait
            was cancelled, or the cache was closed.

        Raises:
            ByteBudgetError: The episode is larger than the whole budget.
            UsageError: The size is negative.
        """
        self._check_size(episode, size_bytes)
        with self._changed:
            if self._is_closed:
                return False
            if self._is_held(episode) or (not self._queue and self._take(episode, size_bytes)):
                return True
            if not block:
                return False
            return self._wait_in_line(episode, size_bytes, cancel_event)

    def try_reserve(self, episode: K, size_bytes: int) -> bool:
        """Reserve for a speculative prefetch: never waits, and yields to every admission that does."""
        return self.reserve(episode, size_bytes, block=False)

    def _check_size(self, episode: K, size_bytes: int) -> None:
        if size_bytes < 0:
            raise UsageError(f"Episode {episode} cannot reserve {size_bytes} bytes.")
        if self.budget_bytes is not None and size_bytes > self.budget_bytes:
            raise oversized_episode_error(episode, size_bytes, self.budget_bytes)

    def _is_held(self, episode: K) -> bool:
        entry = self._entries.get(episode)
        return entry is not None and not entry.is_retired

    def _take(self, episode: K, size_bytes: int) -> bool:
        """Reserve if there is room and the key is free; the caller holds the lock."""
        if episode in self._entries:
            return False
        if self.budget_bytes is not None and self._reserved + size_bytes > self.budget_bytes:
            return False
        self._entries[episode] = _Entry(size_bytes)
        self._reserved += size_bytes
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        return True

    def _wait_in_line(self, episode: K, size_bytes: int, cancel_event: threading.Event | None) -> bool:
        me = object()
        self._queue.append(me)
        self._num_waits += 1
        started = time.perf_counter()
        try:
            while not self._is_closed and not (cancel_event is not None and cancel_event.is_set()):
                if self._is_held(episode):
                    return True
                if self._queue[0] is me and self._take(episode, size_bytes):
                    return True
                self._changed.wait(None if cancel_event is None else _CANCEL_POLL_S)
            return False
        finally:
            self._waited_s += time.perf_counter() - started
            self._queue.remove(me)
            self._changed.notify_all()  # the next in line may fit

    # -- payloads ---------------------------------------------------------------------------------

    def fill(self, episode: K, payload: P, *, num_bytes: int | None = None) -> None:
        """Hand in what was fetched for a reserved episode; after `close` it is dropped.

        Args:
            episode: Key of the episode.
            payload: Anything; the cache keeps a reference until the reservation ends.
            num_bytes: What the payload really holds, at most the reservation; None = all of it.

        Raises:
            LrstreamError: The episode is not reserved, filled already, or larger than its reservation.
        """
        with self._changed:
            entry = self._entries.get(episode)
            if entry is None or entry.is_retired:
                if self._is_closed:
                    return
                raise LrstreamError(f"Episode {episode} was filled without a reservation.")
            if entry.is_filled:
                raise LrstreamError(f"Episode {episode} was filled twice.")
            held = entry.size_bytes if num_bytes is None else num_bytes
            if not 0 <= held <= entry.size_bytes:
                raise LrstreamError(
                    f"Episode {episode} holds {held} bytes, but only {entry.size_bytes} are reserved for it."
                )
            entry.payload, entry.resident_bytes, entry.is_filled = payload, held, True
            self._resident += held
            self._peak_resident = max(self._peak_resident, self._resident)

    def lease(self, episode: K) -> Lease[P]:
        """Keep an episode's bytes while decoding: `with cache.lease(e) as payload:`, or hold the `Lease`.

        A lease taken when an anchor is scheduled, and released when it is decoded, lets the planner
        retire the episode right after scheduling its last anchor.

        Raises:
            LrstreamError: The episode is not filled, or retired already.
        """
        with self._lock:
            entry = self._entries.get(episode)
            if entry is None or entry.is_retired or not entry.is_filled:
                raise LrstreamError(f"Episode {episode} was to be decoded, but its bytes are not held.")
            entry.num_leases += 1
            payload: P = entry.payload  # type: ignore[assignment]  # it is filled
        return Lease(self, episode, entry, payload)

    def _end(self, lease: Lease[P]) -> None:
        with self._lock:
            if lease._is_released:
                return
            lease._is_released = True
            lease._payload = None
            entry = lease._entry
            entry.num_leases -= 1
            self._free_if_unused(lease._episode, entry)

    def retire(self, episode: K) -> None:
        """No more leases will be asked for: free the bytes now, or when the last lease ends.

        After `close` this does nothing, since that has retired everything.

        Raises:
            LrstreamError: The episode is not reserved, or retired already.
        """
        with self._changed:
            entry = self._entries.get(episode)
            if entry is None or entry.is_retired:
                if self._is_closed:
                    return
                raise LrstreamError(f"Episode {episode} was retired without a reservation.")
            entry.is_retired = True
            self._free_if_unused(episode, entry)

    def _free_if_unused(self, episode: K, entry: _Entry[P]) -> None:
        if entry.is_retired and entry.num_leases == 0:
            del self._entries[episode]
            self._reserved -= entry.size_bytes
            self._resident -= entry.resident_bytes
            entry.payload = None
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse new reservations, wake all who wait (they get False), and retire everything.

        Leases that exist stay valid; their bytes are freed when they end.
        """
        with self._changed:
            self._is_closed = True
            for episode, entry in list(self._entries.items()):
                entry.is_retired = True
                self._free_if_unused(episode, entry)
            self._changed.notify_all()

    # -- reports ----------------------------------------------------------------------------------

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all reservations: pending, prefetched, resident, and retired but still decoding."""
        with self._changed:
            return self._reserved

    @property
    def resident_bytes(self) -> int:
        """Bytes of payloads that are in memory."""
        with self._changed:
            return self._resident

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest `reserved_bytes` so far."""
        with self._changed:
            return self._peak_reserved

    @property
    def peak_resident_bytes(self) -> int:
        """Largest `resident_bytes` so far."""
        with self._changed:
            return self._peak_resident

    @property
    def num_waits(self) -> int:
        """Reservations that had to wait for room (refill stalls on the budget)."""
        with self._changed:
            return self._num_waits

    @property
    def waited_s(self) -> float:
        """Seconds that finished waits took, all threads together."""
        with self._changed:
            return self._waited_s

    def __len__(self) -> int:
        """Number of reserved episodes."""
        with self._changed:
            return len(self._entries)

    def __contains__(self, episode: object) -> bool:
        """Whether the episode is reserved and not retired."""
        with self._changed:
            return self._is_held(episode)  # type: ignore[arg-type]  # any key may be asked for
