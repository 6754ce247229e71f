"""What may be said about URLs, and where requests go."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from lrstream.storage.http_pool import HttpPool, host_of, redact, same_origin


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("https://hub.example/a", "https://hub.example/b?x=1", True),
        ("https://hub.example/a", "https://HUB.example:443/b", True),
        ("https://hub.example/a", "http://hub.example/a", False),
        ("http://hub.example:80/a", "http://hub.example/a", True),
        ("https://hub.example/a", "https://cdn.hub.example/a", False),
        ("https://hub.example/a", "https://hub.example:8443/a", False),
        ("https://hub.example/a", "https://hub.example@evil.example/a", False),
        ("http://127.0.0.1:1/a", "http://localhost:1/a", False),
    ],
)
def test_same_origin(first: str, second: str, same: bool) -> None:
    assert same_origin(first, second) is same
    assert same_origin(second, first) is same


@pytest.mark.parametrize(
    "text",
    [
        "GET https://cdn.example/a.mp4?Expires=1&Signature=SENTINEL&Key-Pair-Id=K failed",
        "url: 'https://s3.example/a?X-Amz-Signature=SENTINEL'",
        "authorization: Bearer SENTINEL",
        "token hf_SENTINELabcdefghij was refused",
        "<Error>Signature=SENTINEL</Error>",
        "X-Amz-Security-Token: SENTINEL",
    ],
)
def test_secrets_are_cut_out(text: str) -> None:
    shown = redact(text)
    assert "SENTINEL" not in shown
    assert len(shown) > 3


def test_ordinary_text_is_left_alone() -> None:
    text = "videos/observation.images.front/chunk-000/file-000.mp4, bytes [0, 100): status 404 from hub:80"
    assert redact(text) == text
    assert host_of("https://hub.example:8443/a?b") == "hub.example:8443"


class _Proxy(BaseHTTPRequestHandler):
    """Answers whatever it is asked, and remembers the request line."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    _Proxy.asked.clear()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_proxies_of_the_environment(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    pool = HttpPool(2)
    response = pool.get("http://hub.invalid/a?b=1", {})
    assert response.read() == b"ok"
    pool.release(response, reuse=True)
    assert _Proxy.asked == ["http://hub.invalid/a?b=1"]
    # Hosts that are excepted are asked directly.
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    response = pool.get(f"{proxy}/direct", {})
    assert response.read() == b"ok"
    pool.release(response, reuse=True)
    assert _Proxy.asked[1:] == ["/direct"]
    pool.close()


def test_a_pool_travels_without_its_connections(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    pool = HttpPool(2)
    for one in (pool, pickle.loads(pickle.dumps(pool))):
        response = one.get(f"{proxy}/x", {})
        assert response.read() == b"ok"
        one.release(response, reuse=True)
        one.close()
    assert _Proxy.asked == ["/x", "/x"]
