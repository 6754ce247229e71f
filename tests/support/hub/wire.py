"""HTTP side of the loopback Hub: requests, replies, ranges, faults and the threads that carry them."""

import json
import re
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.support.hub.blobs import Blob, blob_of_bytes
from tests.support.hub.faults import Fault, Faults
from tests.support.hub.request_log import RequestLog, RequestRecord

_SEND_BYTES = 64 * 2**10
_NOTHING = blob_of_bytes(b"")


@dataclass
class Request:
    """A request as the routes see it; `path` is as sent, `headers` have lower-case names."""

    server: str
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes

    def parameter(self, name: str) -> str | None:
        """Last value of a query parameter."""
        values = parse_qs(self.query).get(name)
        return values[-1] if values else None

    def flag(self, name: str) -> bool:
        """Whether a query parameter says yes."""
        return (self.parameter(name) or "").lower() in ("true", "1")

    def json(self) -> Any:
        """The body read as JSON."""
        return json.loads(self.body or b"{}")


@dataclass
class Reply:
    """An answer. `ranged` marks a content of which a Range header may ask a part."""

    status: int = 200
    content: Blob = _NOTHING
    headers: dict[str, str] = field(default_factory=dict)
    ranged: bool = False


class HubError(Exception):
    """An error answer in the form of the real Hub: status, X-Error-Code, X-Error-Message, JSON body."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.reply = json_reply({"error": message}, status)
        self.reply.headers["X-Error-Message"] = message
        if code is not None:
            self.reply.headers["X-Error-Code"] = code
        self.reply.headers.update({name.replace("_", "-"): value for name, value in headers.items()})


def json_reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    """A JSON document."""
    content = blob_of_bytes(json.dumps(value).encode())
    return Reply(status, content, {"Content-Type": "application/json; charset=utf-8", **(headers or {})})


def text_reply(text: str, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    """Plain text."""
    return Reply(status, _blob_of_text(text), {"Content-Type": "text/plain", **(headers or {})})


@lru_cache(maxsize=64)
def _blob_of_text(text: str) -> Blob:
    return blob_of_bytes(text.encode())


Handler = Callable[..., Reply]


class Router:
    """Finds the function for a method and path; named groups reach it unquoted, as keyword arguments."""

    def __init__(self) -> None:
        self._routes: list[tuple[frozenset[str], re.Pattern[str], Handler]] = []

    def add(self, methods: str, pattern: str, handler: Handler) -> None:
        """`methods` are separated by spaces; `pattern` matches the whole path as sent."""
        self._routes.append((frozenset(methods.split()), re.compile(pattern), handler))

    def __call__(self, request: Request) -> Reply:
        for methods, pattern, handler in self._routes:
            match = pattern.fullmatch(request.path)
            if match and request.method in methods:
                groups = {name: unquote(value or "") for name, value in match.groupdict().items()}
                return handler(request, **groups)
        raise HubError(404, f"no such page: {request.method} {request.path}")


class RoleServer(ThreadingHTTPServer):
    """One listening server ("hub", "cdn" or "cas") that logs, misbehaves as told, and ends cleanly."""

    daemon_threads = False  # so that closing joins the threads
    block_on_close = True
    request_queue_size = 256

    def __init__(self, role: str, host_name: str, router: Router, faults: Faults, log: RequestLog) -> None:
        self.role = role
        self.router = router
        self.faults = faults
        self.log = log
        self.stopping = threading.Event()
        self.internal_errors: list[str] = []
        self.to_reset: set[socket.socket] = set()
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _RoleHandler)
        self.url = f"http://{host_name}:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name=f"loopback-{role}")

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Closes all connections and waits for all threads."""
        self.stopping.set()
        self.shutdown()
        self._thread.join()
        with self._open_lock:
            for connection in self._open:
                # The peer may have gone already; then there is nothing left to wake.
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        if request in self.to_reset:
            # Zero linger and no shutdown before: the peer gets RST, not FIN.
            self.to_reset.discard(request)
            request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_request(request)
        else:
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = traceback.format_exc()
        # A client that hangs up is no fault of the server.
        if "ConnectionResetError" not in error and "BrokenPipeError" not in error:
            self.internal_errors.append(error)


class _RoleHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are separate writes; with Nagle each reply would wait for a delayed ACK.
    disable_nagle_algorithm = True
    server: RoleServer

    def log_message(self, format: str, *args: Any) -> None:
        """Silences the access log on stderr; the request log has it."""

    def version_string(self) -> str:
        return "loopback-hub"

    def _serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        path, _, query = self.path.partition("?")
        body = self._read_body(headers)
        request = Request(self.server.role, self.command, path, query, headers, body)
        host, readable = headers.get("host", ""), unquote(path)
        record = RequestRecord(
            self.server.role, self.command, host, readable, path, query, headers, len(body)
        )
        fault, slow = self.server.faults.draw(self.server.role, self.command, readable)
        record.fault = fault.kind if fault else (slow[0].kind if slow else None)
        self.server.log.append(record)
        try:
            for rule in slow:
                self.server.stopping.wait(rule.arguments["latency_s"])
            self._answer(request, record, fault, [rule.arguments["bytes_per_s"] for rule in slow])
        finally:
            record.finished = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _read_body(self, headers: dict[str, str]) -> bytes:
        if "chunked" in headers.get("transfer-encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(headers.get("content-length", 0)))

    def _answer(
        self, request: Request, record: RequestRecord, fault: Fault | None, rates: list[float | None]
    ) -> None:
        kind = fault.kind if fault else None
        if kind == "reset":
            self._reset()
            return
        reply = _status_fault(fault) or self._route(request)
        if kind == "lose-reply":
            self._reset()
            return
        plan = _plan_body(reply, request.headers.get("range"), ignore_range=kind == "ignore-range")
        if fault is not None:
            _spoil(plan, fault)
        record.status = plan.status
        self.send_response(plan.status)
        for name, value in plan.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(plan.announced))
        self.end_headers()
        if request.method != "HEAD":
            self._send(plan, record, min((rate for rate in rates if rate), default=None))
        if kind == "reset-after-headers":
            self._reset()
        elif plan.sent < plan.announced and request.method != "HEAD":
            self.close_connection = True

    def _route(self, request: Request) -> Reply:
        try:
            return self.server.router(request)
        except HubError as error:
            return error.reply
        except Exception:  # noqa: BLE001 - a bug in the double must reach the test, not end in a lost thread
            self.server.internal_errors.append(traceback.format_exc())
            return text_reply("the loopback Hub failed, see its internal errors", 500)

    def _send(self, plan: "_Plan", record: RequestRecord, bytes_per_s: float | None) -> None:
        # About twenty writes a second when throttled, so that the rate is even.
        step = _SEND_BYTES if bytes_per_s is None else max(1, min(_SEND_BYTES, int(bytes_per_s / 20)))
        begun = time.monotonic()
        for offset in range(0, plan.sent, step):
            block = bytearray(
                plan.content.read(plan.start + offset, plan.start + min(offset + step, plan.sent))
            )
            if plan.flipped is not None and offset <= plan.flipped < offset + len(block):
                block[plan.flipped - offset] ^= plan.flip_mask
            if bytes_per_s is not None:
                due = begun + (offset + len(block)) / bytes_per_s
                self.server.stopping.wait(max(0.0, due - time.monotonic()))
            # Counted before the write: a client with its last byte in hand finds the log complete.
            record.bytes_sent += len(block)
            self.wfile.write(block)

    def _reset(self) -> None:
        self.close_connection = True
        self.server.to_reset.add(self.connection)


@dataclass
class _Plan:
    """What will be written: `sent` bytes of content from `start`, while the headers announce `announced`."""

    status: int
    headers: dict[str, str]
    content: Blob
    start: int
    sent: int
    announced: int
    flipped: int | None = None
    flip_mask: int = 0xFF


def _plan_body(reply: Reply, range_header: str | None, *, ignore_range: bool) -> _Plan:
    size = reply.content.size
    plan = _Plan(reply.status, dict(reply.headers), reply.content, 0, size, size)
    if not reply.ranged or reply.status != 200:
        return plan
    plan.headers["Accept-Ranges"] = "bytes"
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", range_header or "")
    if ignore_range or match is None or match.groups() == ("", ""):
        return plan
    first, last = match.groups()
    start, stop = (
        (int(first), min(int(last or size), size - 1) + 1) if first else (max(0, size - int(last)), size)
    )
    if start >= size or start >= stop:
        return _Plan(416, {**plan.headers, "Content-Range": f"bytes */{size}"}, _NOTHING, 0, 0, 0)
    plan.status = 206
    plan.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    plan.start = start
    plan.sent = plan.announced = stop - start
    return plan


def _status_fault(fault: Fault | None) -> Reply | None:
    """The reply of the faults that replace it, None for the others."""
    if fault is None:
        return None
    given = fault.arguments
    match fault.kind:
        case "rate-limit":
            reply = text_reply(
                "Too Many Requests", 429, _retry_after(given["retry_after"], given["http_date"])
            )
            if given["ratelimit"] is not None:
                reply.headers["RateLimit"] = f'"resolvers";r=0;t={given["ratelimit"]}'
                reply.headers["RateLimit-Policy"] = '"fixed window";"resolvers";q=500;w=300'
            return reply
        case "timeout":
            return text_reply("Request Timeout", 408)
        case "server-error":
            status = HTTPStatus(given["status"])
            return text_reply(status.phrase, status, _retry_after(given["retry_after"], False))
        case "status":
            return text_reply(given["body"], given["status"], given["headers"])
        case "expired-url":
            return expired_reply()
        case "forbidden":
            return text_reply("SignatureError", 403)
        case _:
            return None


def expired_reply() -> Reply:
    """What the CDN answers to a signed URL past its date."""
    body = "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
    return text_reply(body, 403, {"Content-Type": "application/xml"})


def _retry_after(seconds: float | None, http_date: bool) -> dict[str, str]:
    if seconds is None:
        return {}
    # A date has whole seconds only: round up, so that the wait is never shorter than asked for.
    date = formatdate(int(time.time() + seconds + 0.999), usegmt=True)
    return {"Retry-After": date if http_date else str(seconds)}


def _spoil(plan: _Plan, fault: Fault) -> None:
    """Applies the faults that change a proper reply."""
    given = fault.arguments
    match fault.kind:
        case "reset-after-headers":
            plan.sent = min(plan.sent, given["after_bytes"])
        case "truncate":
            cut = plan.sent // 2 if given["after_bytes"] is None else given["after_bytes"]
            plan.sent = min(plan.sent, cut)
        case "short-body":
            plan.sent = plan.announced = max(0, plan.sent - given["missing_bytes"])
        case "wrong-content-range":
            if match := re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", plan.headers.get("Content-Range", "")):
                first, last = (int(value) + given["shift"] for value in match.groups()[:2])
                plan.headers["Content-Range"] = f"bytes {first}-{last}/{match[3]}"
        case "flip-byte":
            plan.flipped, plan.flip_mask = given["offset"], given["mask"]
        case "wrong-etag":
            for name in ("ETag", "X-Linked-ETag"):
                if name in plan.headers:
                    plan.headers[name] = given["etag"]
        case "drop-headers":
            dropped = {name.lower() for name in given["names"]}
            plan.headers = {
                name: value for name, value in plan.headers.items() if name.lower() not in dropped
            }
