"""When to try a request again, and how long to wait before (LD-12, K21).

Retried are the statuses 408, 425, 429 and 5xx that pass by themselves, and connections that failed or
broke. A server that says how long to wait (`Retry-After`, RFC 9110 10.2.3; `RateLimit` with `t=`) is
obeyed; otherwise waits double, with jitter, up to a ceiling. The number of attempts and the total time
of one operation are bounded; what is exhausted first is said in the error.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from lrstream.errors import TransferError
from lrstream.storage.per_process import PerProcess

__all__ = ["RETRYABLE_STATUSES", "RetryCounters", "RetryPolicy", "RetrySchedule", "told_wait_s"]

logger = logging.getLogger(__name__)

RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524})

_TOLD_FROM_S = 5.0
# With the default waits that is about four seconds.
_UNRESOLVED_ATTEMPTS = 4
_UNRESOLVED_HINT = (
    "The name of the host cannot be resolved: check the network of this machine, and the address "
    "(HF_ENDPOINT for the Hub)."
)
_RATE_LIMIT_RESET = re.compile(r"(?:^|[;,\s])t\s*=\s*(\d+)")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of the retries of one operation (one range, one resolution).

    Attributes:
        max_attempts: Attempts including the first.
        first_wait_s: Wait before the second attempt when the server names none; doubles each time.
        longest_wait_s: Ceiling of the waits that are our own choice.
        deadline_s: No wait is begun that would end later than this after the first attempt began. The
            Hub counts requests in windows of five minutes, so waits that it asks for must fit in.
        jitter: Random share added to each wait, so that many workers do not come back at once.
    """

    max_attempts: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    deadline_s: float = 600.0
    jitter: float = 0.25


class _Totals:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.retries = 0
        self.slept_s = 0.0


class RetryCounters:
    """Retries made and seconds slept by this process. Thread-safe; a child starts at zero."""

    def __init__(self) -> None:
        self._totals = PerProcess(_Totals)

    def add(self, slept_s: float) -> None:
        """Count one retry that was waited for during `slept_s` seconds."""
        totals = self._totals.get()
        with totals.lock:
            totals.retries += 1
            totals.slept_s += slept_s

    @property
    def retries(self) -> int:
        """Attempts beyond the first."""
        return self._totals.get().retries

    @property
    def slept_s(self) -> float:
        """Seconds spent waiting before them."""
        return self._totals.get().slept_s


class RetrySchedule:
    """The attempts of one operation. Belongs to one thread.

    Args:
        policy: The bounds.
        what: What is being done, for the error: ``videos/a.mp4, bytes [0, 100)``.
        counters: Where retries are counted.
        sleep: How to wait; replaced in tests.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        what: str,
        counters: RetryCounters,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._policy = policy
        self._what = what
        self._counters = counters
        self._sleep = sleep
        self._begin = time.monotonic()
        self.attempt = 1

    def wait(self, failure: str, *, told_s: float | None = None, unresolved: bool = False) -> None:
        """Wait until the next attempt is due.

        Args:
            failure: What went wrong in the last attempt, without secrets.
            told_s: Seconds that the server asked to wait, if it did.
            unresolved: Whether the name of a host could not be resolved that has never answered. That is
                hardly ever an outage, so there are few attempts.

        Raises:
            TransferError: Attempts or time are exhausted; names the last failure and wait.
        """
        policy = self._policy
        own_s = min(policy.longest_wait_s, policy.first_wait_s * 2 ** (self.attempt - 1))
        wait_s = own_s if told_s is None else max(told_s, 0.0)
        wait_s *= 1 + policy.jitter * random.random()
        elapsed_s = time.monotonic() - self._begin
        attempts = min(policy.max_attempts, _UNRESOLVED_ATTEMPTS) if unresolved else policy.max_attempts
        if self.attempt >= attempts:
            bound = f"{self.attempt} attempts in {elapsed_s:.1f} s"
        elif elapsed_s + wait_s > policy.deadline_s:
            bound = (
                f"{self.attempt} attempts in {elapsed_s:.1f} s; the next one is due in {wait_s:.1f} s, "
                f"beyond the deadline of {policy.deadline_s:g} s"
            )
        else:
            # Long waits are told, so that nobody takes them for a hang.
            level = logging.WARNING if wait_s >= _TOLD_FROM_S else logging.DEBUG
            logger.log(level, "%s: %s; next attempt in %.1f s.", self._what, failure, wait_s)
            self._sleep(wait_s)
            self._counters.add(wait_s)
            self.attempt += 1
            return
        raise TransferError(
            f"{self._what}: given up after {bound}. The last failure: {failure}.",
            hint=_UNRESOLVED_HINT if unresolved else "Try again later, with fewer connections or workers.",
            attempts=self.attempt,
            last_failure=failure,
            wait_s=wait_s,
        )


def told_wait_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a response asks the client to wait, None if it does not say.

    Args:
        headers: Response headers, looked up without regard to case by the mapping itself.

    Understands `Retry-After` as seconds or HTTP date and the reset time ``t=`` of `RateLimit`; where
    both are given, the longer one counts.
    """
    waits = []
    retry_after = headers.get("Retry-After")
    if retry_after is not None:
        parsed = _retry_after_s(retry_after.strip())
        if parsed is not None:
            waits.append(parsed)
    rate_limit = headers.get("RateLimit")
    if rate_limit is not None and (match := _RATE_LIMIT_RESET.search(rate_limit)) is not None:
        waits.append(float(match.group(1)))
    return max(waits, default=None)


def _retry_after_s(value: str) -> float | None:
    if value.isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None  # a header that nobody can read is as good as none
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
