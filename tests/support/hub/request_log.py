"""Thread-safe log of the requests the loopback Hub received."""

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """One request and what was answered.

    Attributes:
        server: Role of the server that was asked: ``hub``, ``cdn`` or ``cas``.
        method: HTTP method.
        host: Host header as sent, with the port.
        path: Path with percent-encoding undone, without the query; see `raw_path`.
        raw_path: Path as sent.
        query: Query string as sent, secrets included; empty when there is none.
        headers: Request headers, names in lower case.
        body_size: Bytes of request body.
        status: Status answered; 0 until it is known, and for ever when the connection was reset before it.
        bytes_sent: Body bytes handed to the socket. A client that hangs up may have read fewer.
        fault: Kind of the fault that was applied, else None.
        started: ``time.monotonic()`` when the request had been read.
        finished: Whether the server is done with it.
    """

    server: str
    method: str
    host: str
    path: str
    raw_path: str
    query: str
    headers: dict[str, str]
    body_size: int = 0
    status: int = 0
    bytes_sent: int = 0
    fault: str | None = None
    started: float = field(default_factory=time.monotonic)
    finished: bool = False

    @property
    def range(self) -> str | None:
        """Value of the Range header, or None."""
        return self.headers.get("range")

    @property
    def authorization(self) -> str | None:
        """Value of the Authorization header, or None."""
        return self.headers.get("authorization")

    @property
    def url(self) -> str:
        """Path and query as sent."""
        return f"{self.raw_path}?{self.query}" if self.query else self.raw_path

    def __str__(self) -> str:
        asked = f" [{self.range}]" if self.range else ""
        fault = f" ({self.fault})" if self.fault else ""
        return f"{self.server} {self.method} {self.path}{asked} -> {self.status}, {self.bytes_sent} B{fault}"


class RequestLog:
    """Every request in order of arrival; filters return copies."""

    def __init__(self) -> None:
        self._records: list[RequestRecord] = []
        self._lock = threading.Lock()

    def append(self, record: RequestRecord) -> None:
        """Adds a record; done before the answer, so that a client with its reply in hand is in the log."""
        with self._lock:
            self._records.append(record)

    def clear(self) -> None:
        """Forgets all requests so far."""
        with self._lock:
            self._records.clear()

    def records(
        self,
        path: str | None = None,
        *,
        server: str | None = None,
        method: str | None = None,
        status: int | None = None,
        fault: str | None = None,
    ) -> list[RequestRecord]:
        """Requests that match all the filters given.

        Args:
            path: Regular expression searched in the unquoted path.
            server: ``hub``, ``cdn`` or ``cas``.
            method: HTTP method.
            status: Status answered.
            fault: Kind of fault applied.
        """
        pattern = re.compile(path) if path is not None else None
        with self._lock:
            records = list(self._records)
        return [
            record
            for record in records
            if (pattern is None or pattern.search(record.path))
            and (server is None or record.server == server)
            and (method is None or record.method == method)
            and (status is None or record.status == status)
            and (fault is None or record.fault == fault)
        ]

    def count(
        self,
        path: str | None = None,
        *,
        server: str | None = None,
        method: str | None = None,
        status: int | None = None,
        fault: str | None = None,
    ) -> int:
        """Number of requests that match, see :meth:`records`."""
        return len(self.records(path, server=server, method=method, status=status, fault=fault))

    def bytes_sent(self, path: str | None = None, *, server: str | None = None) -> int:
        """Body bytes sent in answer to the matching requests."""
        return sum(record.bytes_sent for record in self.records(path, server=server))

    def wait_until_idle(self, timeout_s: float = 5.0) -> None:
        """Waits until no logged request is being answered any more.

        Raises:
            TimeoutError: Some request is still open after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while any(not record.finished for record in self.records()):
            if time.monotonic() > deadline:
                open_requests = [str(record) for record in self.records() if not record.finished]
                raise TimeoutError(f"requests still being answered: {open_requests}")
            time.sleep(0.005)

    def __len__(self) -> int:
        with self._lock:
            return len(self._records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self.records())

    def __str__(self) -> str:
        return "\n".join(str(record) for record in self.records())
