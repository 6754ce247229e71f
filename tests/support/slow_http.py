"""An HTTP server of a directory in which every read of a video takes its time, as over a long distance."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

__all__ = ["SlowHttpServer"]


class SlowHttpServer:
    """Serves `root` with ranges and ETags. Use as a context manager.

    Args:
        root: Directory.
        latency_s: How long each GET of an MP4 waits.

    Attributes:
        url: Base URL.
        reads: Path and time of each GET of an MP4, in the order of arrival.
        most_at_once: Largest number of such requests that were waiting at the same time.
    """

    def __init__(self, root: Path, latency_s: float) -> None:
        self.latency_s = latency_s
        self.reads: list[tuple[str, float]] = []
        self.most_at_once = 0
        self._root = root
        self._lock = threading.Lock()
        self._waiting = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                owner._answer(self, with_body=False)

            def do_GET(self) -> None:
                owner._answer(self, with_body=True)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def forget(self) -> None:
        """Begin the record anew."""
        with self._lock:
            self.reads.clear()
            self.most_at_once = 0

    def _answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = unquote(urlsplit(request.path).path).lstrip("/")
        file = self._root / path
        if not file.is_file():
            request.send_response(404)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if with_body and file.suffix == ".mp4":
            self._delay(path)
        data = file.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, len(data))) if wanted else (0, len(data))
        request.send_response(206 if wanted else 200)
        if wanted:
            request.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        request.send_header("Content-Length", str(stop - start))
        request.end_headers()
        if with_body:
            with contextlib.suppress(ConnectionError):  # a client that was killed
                request.wfile.write(data[start:stop])

    def _delay(self, path: str) -> None:
        with self._lock:
            self.reads.append((path, time.monotonic()))
            self._waiting += 1
            self.most_at_once = max(self.most_at_once, self._waiting)
        time.sleep(self.latency_s)
        with self._lock:
            self._waiting -= 1
