"""An epoch, and an index, while one request in ten meets a fault of any kind (LD-12).

Either every sample is right, or there is one error that tells what was tried; retries and waits stay within
the stated bounds and are reported. Bytes that are changed on the way are left out: nothing in the Hub's
protocol covers a part of a file (see docs/explanation/guarantees.md).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.errors import AccessError, LrstreamError, TransferError
from lrstream.layout.layout import load_layout
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.integration.test_build import assert_like_ffmpeg
from tests.support.hub import LoopbackHub
from tests.support.remote import Sample, assert_same_epoch, epoch, hurry_retries

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(120)

REPO = "robots/storm"
MAX_ATTEMPTS, DEADLINE_S = 4, 20.0  # those of `hurry_retries`

# What passes by itself, and what the server should never do; all of them at once.
PASSING: list[tuple[str, dict[str, Any]]] = [
    ("rate-limit", {"retry_after": 0}),
    ("rate-limit", {"ratelimit": 0}),
    ("timeout", {}),
    ("server-error", {"status": 500}),
    ("server-error", {"status": 503, "retry_after": 0}),
    ("reset", {}),
    ("reset-after-headers", {"after_bytes": 50}),
    ("truncate", {}),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("short-body", {"missing_bytes": 3}),
    ("wrong-content-range", {"shift": 7}),
    ("ignore-range", {}),
    ("expired-url", {}),
    ("forbidden", {}),
]


@pytest.fixture
def hub(
    loopback_hub: LoopbackHub, demo_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> LoopbackHub:
    loopback_hub.create_dataset(REPO, demo_dataset.root)
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    loopback_hub.settings.xet = False
    hurry_retries(monkeypatch)
    return loopback_hub


@pytest.fixture(scope="module")
def expected(demo_dataset: WrittenDataset, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_LEROBOT_HOME", str(tmp_path_factory.mktemp("expected")))
        return epoch(demo_dataset.root)


def seeds(count: int) -> list[Any]:
    """The first is for every run of the suite."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(count)]


def unleash(
    hub: LoopbackHub, kinds: list[tuple[Any, dict[str, Any]]], probability: float, seed: int
) -> list[Any]:
    hub.faults.clear()
    hub.faults.seed(seed)
    each = probability / len(kinds)
    return [hub.faults.add(r"(videos|data)/", kind, probability=each, **options) for kind, options in kinds]


@pytest.mark.parametrize("seed", seeds(4))
def test_an_epoch_of_faults_that_pass(hub: LoopbackHub, expected: list[Sample], seed: int) -> None:
    epoch(REPO)  # indexed before the storm
    rules = unleash(hub, PASSING, 0.1, seed)
    samples: list[Sample] = []
    failure: TransferError | None = None
    start = time.monotonic()
    with StreamingLeRobotDataset(REPO, prefetch_episodes=1, max_num_shards=2) as dataset:
        try:
            samples.extend(dataset)
        except TransferError as error:
            failure = error
        storage = dataset.metrics()["storage"]
    if failure is not None:  # as many faults in a row on one range: rare, and said so
        assert failure.fields["attempts"] == MAX_ATTEMPTS
        assert f"{MAX_ATTEMPTS} attempts" in failure.message
        return
    assert_same_epoch(samples, expected)
    hits = sum(rule.hits for rule in rules)
    assert hits > 0
    assert 0 < storage["retries"] <= hits
    assert storage["slept_s"] <= storage["retries"] * 0.025 + 0.1
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("seed", seeds(6))
def test_an_epoch_of_every_fault(hub: LoopbackHub, expected: list[Sample], seed: int) -> None:
    epoch(REPO)
    rules = unleash(hub, PASSING + WRONG, 0.1, seed)
    samples: list[Sample] = []
    failure: LrstreamError | None = None
    with StreamingLeRobotDataset(REPO) as dataset:
        try:
            samples.extend(dataset)
        except LrstreamError as error:
            failure = error
    if failure is None:
        assert_same_epoch(samples, expected)
        return
    # What was delivered until then is right, and the error names the file and the cause.
    assert_same_epoch(samples, expected[: len(samples)])
    assert failure.exit_code in (4, 5)
    assert any(name in str(failure) for name in ("videos/", "data/"))
    assert any(rule.hits for rule in rules)


def test_never_a_wrong_sample(hub: LoopbackHub, expected: list[Sample]) -> None:
    """Again and again until the epoch is through, as a job that is started again: it gets there."""
    epoch(REPO)
    for seed in range(20):
        unleash(hub, PASSING + WRONG, 0.1, 100 + seed)
        try:
            found = epoch(REPO)
        except LrstreamError:
            continue
        assert_same_epoch(found, expected)
        return
    pytest.fail("not one epoch of twenty came through")


def test_a_build_in_the_storm_goes_on_until_it_is_done(
    hub: LoopbackHub, demo_dataset: WrittenDataset, tmp_path: Path
) -> None:
    """What was read before a failure is kept, so that repeating the command always gets further."""
    store = open_store(parse_location(REPO))
    layout = load_layout(store)
    for seed in range(40):
        unleash(hub, PASSING + WRONG, 0.5, seed)
        try:
            resolved = resolve_sidecar(store, layout, home=tmp_path)
        except (TransferError, AccessError):
            continue
        hub.faults.clear()
        assert_like_ffmpeg(resolved.path, demo_dataset.root)
        with ArchiveReader(resolved.path) as reader:
            assert reader.verify() == 1200
        assert list(tmp_path.rglob("*.journal")) == []
        return
    pytest.fail("the build never ended")
