"""The counters of a dataset over HTTP, for Prometheus to scrape."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lrstream.errors import UsageError
from lrstream.streaming.exposition import CONTENT_TYPE
from lrstream.streaming.report import logger

__all__ = ["DEFAULT_HOST", "LARGEST_PORT", "PORT_VARIABLE", "MetricsServer", "environment_address"]

DEFAULT_HOST = "127.0.0.1"
PORT_VARIABLE = "LRSTREAM_PROMETHEUS_PORT"

_PATHS = ("/", "/metrics")
LARGEST_PORT = 65535
_REQUEST_TIMEOUT_S = 5.0


class MetricsServer:
    """Answers GET with text, from a thread of the process that made it.

    Args:
        host: Address to listen at.
        port: Port; 0 lets the system choose one.
        text: Makes the answer; called for each request, one at a time.

    Attributes:
        port: The port that is served.

    Raises:
        OSError: The port cannot be had.
    """

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_TIMEOUT_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in _PATHS:
                    self.send_error(404)
                    return
                with lock:
                    body = text().encode("utf-8")
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                logger.debug("Scrape of metrics: " + format, *args)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            # Two processes on one port would each get some of the scrapes.
            allow_reuse_port = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                logger.debug("A scrape of metrics by %s failed.", client_address, exc_info=True)

        self._owner = os.getpid()
        self._server = Server((host, port), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="lrstream-metrics",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering. In a forked process only its copy of the socket is closed."""
        if os.getpid() != self._owner:
            self._server.socket.close()
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def environment_address() -> tuple[str, int] | None:
    """Where `PORT_VARIABLE` wants metrics served; None if it is not set.

    The value is ``PORT`` or ``HOST:PORT``. Ranks of one machine serve ports in a row: that of
    ``LOCAL_RANK`` is added.

    Raises:
        UsageError: It cannot be understood.
    """
    text = os.environ.get(PORT_VARIABLE, "").strip()
    if not text:
        return None
    host, _, number = text.rpartition(":")
    local_rank = os.environ.get("LOCAL_RANK", "0")
    try:
        port = int(number)
        if port:
            port += int(local_rank)
    except ValueError:
        port = -1
    if not 0 <= port <= LARGEST_PORT:
        raise UsageError(
            f"The environment variable {PORT_VARIABLE} is {text!r}, expected PORT or HOST:PORT, up to "
            f"{LARGEST_PORT} with LOCAL_RANK added."
        )
    return host or DEFAULT_HOST, port
