"""Faults the loopback Hub applies to the requests of a path pattern."""

import random
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

FaultKind = Literal[
    "rate-limit",
    "timeout",
    "server-error",
    "status",
    "reset",
    "reset-after-headers",
    "lose-reply",
    "truncate",
    "short-body",
    "ignore-range",
    "wrong-content-range",
    "expired-url",
    "forbidden",
    "slow",
    "flip-byte",
    "wrong-etag",
    "drop-headers",
]

# Arguments of each kind with their defaults; `Faults.add` refuses any other name.
FAULT_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    # 429. `retry_after`: seconds or None; `http_date`: the same as a date; `ratelimit`: seconds for the
    # `RateLimit` header, or None.
    "rate-limit": {"retry_after": None, "http_date": False, "ratelimit": None},
    "timeout": {},  # 408
    "server-error": {"status": 503, "retry_after": None},
    "status": {"status": 500, "body": "", "headers": {}},
    "reset": {},  # TCP reset before the request has any effect
    "reset-after-headers": {"after_bytes": 0},  # TCP reset when headers and `after_bytes` of body are out
    "lose-reply": {},  # the request takes effect, then a TCP reset instead of the reply
    "truncate": {"after_bytes": None},  # orderly close within the body, headers promise all of it; None: half
    "short-body": {"missing_bytes": 1},  # headers consistent, but fewer bytes than were asked for
    "ignore-range": {},  # 200 with the whole file
    "wrong-content-range": {"shift": 1},  # Content-Range moved by `shift`, body as asked for
    "expired-url": {},  # 403 as for a signed URL past its date
    "forbidden": {},  # 403, body "SignatureError"
    "slow": {"latency_s": 0.0, "bytes_per_s": None},  # combines with another fault
    "flip-byte": {"offset": 0, "mask": 0xFF},  # changes bits of the body byte at `offset` of the reply
    "wrong-etag": {"etag": '"00000000000000000000000000000000"'},  # ETag and X-Linked-ETag
    "drop-headers": {"names": ()},
}


@dataclass
class Fault:
    """One rule.

    Attributes:
        pattern: Searched in the path without the query, percent-encoding undone.
        kind: What goes wrong.
        times: How many more requests it hits; None for ever.
        probability: Chance that it hits a matching request.
        server: Only requests to this server (``hub``, ``cdn``, ``cas``), or None.
        method: Only requests with this method, or None.
        after: Matching requests to let pass first.
        arguments: The kind's arguments, defaults filled in.
        hits: Requests it has hit so far.
    """

    pattern: re.Pattern[str]
    kind: FaultKind
    times: int | None = None
    probability: float = 1.0
    server: str | None = None
    method: str | None = None
    after: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)
    hits: int = 0


class Faults:
    """The rules in force. The first that hits is applied; any number of ``slow`` ones besides."""

    def __init__(self, seed: int = 0) -> None:
        self._rules: list[Fault] = []
        self._lock = threading.Lock()
        self._random = random.Random(seed)

    def add(
        self,
        path_regex: str,
        kind: FaultKind,
        times: int | None = None,
        probability: float = 1.0,
        *,
        server: str | None = None,
        method: str | None = None,
        after: int = 0,
        **arguments: Any,
    ) -> Fault:
        """Adds a rule behind the others, see :class:`Fault` and ``FAULT_ARGUMENTS``.

        Raises:
            ValueError: Unknown kind.
            TypeError: An argument the kind does not have.
        """
        if kind not in get_args(FaultKind):
            raise ValueError(f"unknown fault {kind!r}; known: {', '.join(get_args(FaultKind))}")
        defaults = FAULT_ARGUMENTS[kind]
        if unknown := set(arguments) - set(defaults):
            raise TypeError(f"fault {kind!r} has no argument {sorted(unknown)}; it has {sorted(defaults)}")
        rule = Fault(
            re.compile(path_regex), kind, times, probability, server, method, after, {**defaults, **arguments}
        )
        with self._lock:
            self._rules.append(rule)
        return rule

    def seed(self, seed: int) -> None:
        """Restarts the dice of the probabilities."""
        with self._lock:
            self._random.seed(seed)

    def clear(self) -> None:
        """Removes all rules."""
        with self._lock:
            self._rules.clear()

    def draw(self, server: str, method: str, path: str) -> tuple[Fault | None, list[Fault]]:
        """Decides what happens to one request and counts it.

        Returns:
            The fault to apply or None, and the slow ones to apply besides.
        """
        chosen: Fault | None = None
        slow: list[Fault] = []
        with self._lock:
            for rule in self._rules:
                if rule.server not in (None, server) or rule.method not in (None, method):
                    continue
                if rule.times == 0 or not rule.pattern.search(path):
                    continue
                if rule.kind != "slow" and chosen is not None:
                    continue
                if rule.after > 0:
                    rule.after -= 1
                    continue
                if rule.probability < 1.0 and self._random.random() >= rule.probability:
                    continue
                if rule.times is not None:
                    rule.times -= 1
                rule.hits += 1
                if rule.kind == "slow":
                    slow.append(rule)
                else:
                    chosen = rule
        return chosen, slow
