"""Training while the network misbehaves: an epoch is exactly right, or ends with one clear error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lrstream.demo import WrittenDataset
from lrstream.errors import AccessError, DecodeError, LrstreamError, TransferError
from tests.support.hub import LoopbackHub
from tests.support.remote import Sample, assert_same_epoch, epoch, hurry_retries

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(60)

REPO = "robots/pick"


@pytest.fixture
def hub(
    loopback_hub: LoopbackHub, tiny_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> LoopbackHub:
    """A Hub with the tiny dataset, which has been indexed here already."""
    loopback_hub.create_dataset(REPO, tiny_dataset.root, private=True)
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    loopback_hub.settings.xet = False  # the content store has no part in these tests, and takes time
    hurry_retries(monkeypatch)
    epoch(REPO)
    loopback_hub.log.clear()
    return loopback_hub


@pytest.fixture(scope="module")
def expected(tiny_dataset: WrittenDataset, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """The epoch as it is read from the local directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_LEROBOT_HOME", str(tmp_path_factory.mktemp("expected")))
        return epoch(tiny_dataset.root)


# Each hits videos and tables, at the Hub and at the CDN, for as long as attempts last.
PASSING: list[tuple[str, dict[str, Any]]] = [
    ("rate-limit", {"retry_after": 0}),
    ("rate-limit", {"ratelimit": 0}),
    ("timeout", {}),
    ("server-error", {"status": 500}),
    ("server-error", {"status": 503, "retry_after": 0}),
    ("reset", {}),
    ("reset-after-headers", {"after_bytes": 100}),
    ("truncate", {"after_bytes": 1000}),
    ("slow", {"latency_s": 0.05}),
]


@pytest.mark.parametrize(("kind", "arguments"), PASSING)
def test_an_epoch_through_failures_that_pass(
    hub: LoopbackHub, expected: list[Sample], kind: Any, arguments: dict[str, Any]
) -> None:
    rules = [
        hub.faults.add(pattern, kind, times=2, server=server, **arguments)
        for pattern in (r"videos/.*\.mp4$", r"data/.*\.parquet$")
        for server in ("hub", "cdn")
    ]
    assert_same_epoch(epoch(REPO), expected)
    assert all(rule.hits for rule in rules if rule.server == "cdn")


def test_an_epoch_of_expiring_urls(hub: LoopbackHub, expected: list[Sample]) -> None:
    hub.signer.lifetime_s = 0.3
    hub.faults.add(r"\.mp4$", "slow", latency_s=0.1)
    assert_same_epoch(epoch(REPO, max_num_shards=1, prefetch_episodes=0), expected)


def test_an_epoch_with_workers_through_a_storm(
    hub: LoopbackHub, tiny_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two of five requests fail, in any order: that thirty attempts all fail will not happen.
    hurry_retries(monkeypatch, max_attempts=30)
    for kind in ("reset", "truncate", "server-error"):
        hub.faults.add(r"(videos|data)/", kind, probability=0.15)
    found = epoch(REPO, num_workers=2)
    assert_same_epoch(found, epoch(tiny_dataset.root, num_workers=2))


REFUSED: list[tuple[str, dict[str, Any], type[LrstreamError], str]] = [
    ("ignore-range", {}, TransferError, "ignored the range"),
    ("wrong-content-range", {"shift": 7}, TransferError, "instead"),
    ("short-body", {"missing_bytes": 5}, TransferError, "declares a body of"),
    ("forbidden", {}, AccessError, "a freshly signed URL was refused"),
    ("expired-url", {}, AccessError, "a freshly signed URL was refused"),
    ("server-error", {"status": 502}, TransferError, "4 attempts.*status 502"),
    ("rate-limit", {"retry_after": 900}, TransferError, "beyond the deadline.*status 429"),
    ("reset", {}, TransferError, "4 attempts"),
    ("truncate", {}, TransferError, "4 attempts"),
]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "arguments", "error", "said"), REFUSED)
def test_one_error_names_file_range_and_cause(
    hub: LoopbackHub,
    kind: Any,
    arguments: dict[str, Any],
    error: type[LrstreamError],
    said: str,
    num_workers: int,
) -> None:
    hub.faults.add(r"side/.*file-000\.mp4$", kind, server="cdn", **arguments)
    with pytest.raises(error, match=f"(?s){said}") as caught:
        epoch(REPO, num_workers=num_workers)
    message = str(caught.value)
    assert "videos/observation.images.side/chunk-000/file-000.mp4, bytes [" in message
    assert "Signature=" not in message
    assert "SENTINEL" not in message


def test_bytes_that_the_hub_never_wrote(hub: LoopbackHub, expected: list[Sample]) -> None:
    """A range has no checksum: a flipped byte of a picture is for the decoder to notice, if it can.

    Nothing in the Hub's protocol covers part of a file, so this is the limit of what can be checked. What
    must hold all the same: number and order of the samples, and everything that does not come from the
    damaged range.
    """
    hub.faults.add(r"side/.*\.mp4$", "flip-byte", server="cdn", offset=700)
    found: list[Sample] = []
    failure: DecodeError | None = None
    try:
        found = epoch(REPO)
    except DecodeError as error:
        failure = error
    if failure is not None:
        assert "observation.images.side" in str(failure)
        return
    assert [int(one["index"]) for one in found] == [int(one["index"]) for one in expected]
    for one, other in zip(found, expected, strict=True):
        del one["observation.images.side"]
        del other["observation.images.side"]
    assert_same_epoch(found, expected)


def test_a_damaged_published_sidecar_is_not_used(
    hub: LoopbackHub,
    expected: list[Sample],
    isolated_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sidecar does have a checksum, in its listing: any flipped byte is noticed, and it is built here."""
    archive = next(isolated_home.rglob("streaming-sidecars/**/*.npz"))
    from lrstream.sidecar.archive import ArchiveReader
    from lrstream.sidecar.publication import published_name

    with ArchiveReader(archive) as reader:
        name = published_name(reader.identity)
    size = archive.stat().st_size
    hub.branch(REPO, "lerobot-sidecars")
    hub.commit_files(REPO, {f"meta/mp4-sidecars/{name}": archive.read_bytes()}, branch="lerobot-sidecars")
    for number in range(3):
        monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / str(number)))
        hub.faults.clear()
        offset = random.Random(number).randrange(size)
        hub.faults.add(r"\.npz$", "flip-byte", server="cdn", offset=offset)
        caplog.clear()
        assert_same_epoch(epoch(REPO), expected)
        assert "No published sidecar can be had" in caplog.text
        assert list((tmp_path / str(number)).rglob("streaming-sidecars/**/*.npz"))
