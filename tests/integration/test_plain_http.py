"""A dataset on a plain HTTP server: read by ranges, or refused where the server ignores them (K20)."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.errors import TransferError
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.support.loader import indices
from tests.support.remote import assert_same_epoch, epoch

pytestmark = pytest.mark.timeout(60)


class Handler(SimpleHTTPRequestHandler):
    """Python's own file server, which ignores ranges unless it is told otherwise."""

    ranges = False
    sent = 0

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not self.ranges or match is None:
            try:
                super().do_GET()
            except OSError:  # the client has seen enough
                self.close_connection = True
            return
        with open(self.translate_path(self.path), "rb") as file:
            data = file.read()
        first, last = int(match[1]), min(int(match[2]), len(data) - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(data[first : last + 1])


@pytest.fixture
def handler() -> type[Handler]:
    return type("OneHandler", (Handler,), {})


@pytest.fixture
def url(standard_dataset: WrittenDataset, handler: type[Handler]) -> Iterator[str]:
    serve = functools.partial(handler, directory=str(standard_dataset.root))
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve)
    thread = threading.Thread(target=functools.partial(server.serve_forever, 0.01), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_server_that_ignores_ranges(url: str) -> None:
    with pytest.raises(TransferError) as caught:
        indices(StreamingLeRobotDataset(url))
    message = str(caught.value)
    assert "ignored the range and answered with the whole file (status 200, expected 206)" in message
    assert "copy the dataset to a local directory" in message
    assert "127.0.0.1" in message


def test_a_server_that_knows_ranges(
    url: str, handler: type[Handler], standard_dataset: WrittenDataset
) -> None:
    handler.ranges = True
    assert_same_epoch(epoch(url), epoch(standard_dataset.root))


def test_arguments_without_effect_are_said(
    standard_dataset: WrittenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    location = parse_location(standard_dataset.root, revision="v9")
    with caplog.at_level(logging.WARNING):
        open_store(location, storage_options={"key": "SENTINEL"})
    assert "storage_options (key) have no effect" in caplog.text
    assert "revision='v9' is a mere name here" in caplog.text
    assert "SENTINEL" not in caplog.text
    caplog.clear()
    open_store(parse_location(standard_dataset.root), storage_options={})
    assert caplog.text == ""
