"""What the loader says by itself: periodic lines, warnings with remedies (LD-13, troubleshooting table)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lrstream.demo import WrittenDataset
from lrstream.errors import UsageError
from lrstream.sidecar.build import BuildProgress
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.report import BuildNotice, PeriodicReport
from tests.support.loader import indices, open_loader


class Clock:
    """Stands in for `time.monotonic`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("lrstream.streaming.report.time.monotonic", found)
    return found


def counters(**changes: Any) -> dict[str, Any]:
    storage = {"requests": 5, "bytes_read": 100, "retries": 3, "slept_s": 1.5}
    process = {"open_decoders": 4, "reserved_bytes": 700, "resident_bytes": 600, "storage": storage}
    return {**LoaderMetrics().snapshot(), **process, **changes}


def test_a_line_every_interval_with_what_has_happened_in_it(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lrstream.loader")
    report = PeriodicReport()
    for seconds, samples in ((59.0, 100), (1.0, 120), (59.0, 150), (1.0, 720)):
        clock.now_s += seconds
        if report.is_due(60.0):
            report.tell("rank 0 worker 1 epoch 2", counters(samples=samples))
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("rank 0 worker 1 epoch 2: 120 samples (2.0/s)")
    assert caplog.messages[1].startswith("rank 0 worker 1 epoch 2: 720 samples (10.0/s)")
    for part in ("700 bytes reserved, 600 resident", "4 open decoders", "3 retries (slept 1.5 s)"):
        assert part in caplog.messages[0]


@pytest.mark.parametrize(("stall_s", "is_told"), [(5.0, False), (7.0, True)])
def test_high_refill_stalls_are_a_warning_with_the_remedy(
    clock: Clock, caplog: pytest.LogCaptureFixture, stall_s: float, is_told: bool
) -> None:
    report = PeriodicReport()
    clock.now_s += 60
    report.tell("rank 0", counters(samples=10, refill_stalls=1, refill_stall_s=50.0))
    assert caplog.messages == [], "the first filling of the pool is no fault"
    clock.now_s += 60
    report.tell("rank 0", counters(samples=20, refill_stalls=3, refill_stall_s=50.0 + stall_s))
    assert bool(caplog.messages) == is_told
    if is_told:
        for part in ("2 took 7.0 of 60.0 s", "p95", "prefetch_episodes gradually", "matches the revision"):
            assert part in caplog.messages[0]


def test_a_build_that_takes_long_is_announced(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    notice = BuildNotice("someone/something")
    notice(BuildProgress(1, 100, 0, 10))
    assert caplog.messages == []
    clock.now_s += 3
    notice(BuildProgress(7, 100, 0, 10))
    assert "first batch of someone/something takes long" in caplog.messages[0]
    assert "7 of 100 videos" in caplog.messages[0]
    assert "lrstream publish" in caplog.messages[0]
    notice(BuildProgress(8, 100, 0, 10))
    clock.now_s += 20
    notice(BuildProgress(60, 100, 0, 10))
    assert [message for message in caplog.messages[1:] if "60 of 100" in message] == caplog.messages[1:]


def test_the_interval_comes_from_the_environment(
    image_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_loader(image_dataset).log_interval_s == 60.0
    monkeypatch.setenv("LRSTREAM_LOG_INTERVAL_S", "soon")
    with pytest.raises(UsageError, match="LRSTREAM_LOG_INTERVAL_S is 'soon'"):
        open_loader(image_dataset)
    monkeypatch.setenv("LRSTREAM_LOG_INTERVAL_S", "0.000001")
    dataset = open_loader(image_dataset)
    caplog.set_level(logging.INFO, "lrstream.loader")
    indices(dataset)
    lines = [message for message in caplog.messages if message.startswith("rank 0 worker 0 epoch 0")]
    assert len(lines) == image_dataset.num_frames + 1
    assert " has ended: " in lines[-1]


def test_stages_in_samples_per_second(image_dataset: WrittenDataset) -> None:
    dataset = open_loader(image_dataset)
    indices(dataset)
    metrics = dataset.metrics()
    stages = metrics["stages"]
    assert metrics["frames_loaded"] == image_dataset.num_frames
    for stage, count in (("rows", 3), ("assembly", 3), ("decode", image_dataset.num_frames)):
        assert stages[stage]["count"] == count
        expected = image_dataset.num_frames / stages[stage]["seconds"]
        assert stages[stage]["samples_per_s"] == pytest.approx(expected)
    assert metrics["storage"]["requests"] > 0
    assert metrics["storage"]["retries"] == 0
