"""What the loader serves for Prometheus, scraped over loopback and read by Prometheus' own parser (LD-13)."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch.utils.data import DataLoader

import lrstream
from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.errors import UsageError
from lrstream.streaming.metrics_board import MetricsBoard

pytestmark = pytest.mark.timeout(240)

COUNTERS = (
    "samples",
    "episodes_loaded",
    "frames_loaded",
    "fetched_bytes",
    "refill_stalls",
    "decoders_opened",
    "storage_requests",
    "storage_retries",
)


@pytest.fixture
def dataset(tiny_dataset: WrittenDataset) -> Iterator[StreamingLeRobotDataset]:
    with StreamingLeRobotDataset(tiny_dataset.root) as opened:
        yield opened


def scrape(port: int) -> dict[tuple[str, str, str], float]:
    """Values by name, worker, and stage or quantile; families and types are checked on the way."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("counter", "gauge", "summary")
        for sample in family.samples:
            assert sample.labels["rank"] == "0"
            extra = sample.labels.get("stage") or sample.labels.get("quantile") or ""
            key = (sample.name, sample.labels["worker"], extra)
            assert key not in found
            found[key] = sample.value
    return found


def drain(dataset: StreamingLeRobotDataset, num_workers: int, start_method: str | None = None) -> int:
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=start_method
    )
    return sum(1 for _ in loader)


def test_without_workers_the_counters_are_those_of_this_process(dataset: StreamingLeRobotDataset) -> None:
    port = dataset.serve_metrics(0)
    assert port is not None
    assert drain(dataset, 0) == 21
    found, metrics = scrape(port), dataset.metrics()
    assert found["lrstream_samples_total", "main", ""] == 21 == metrics["samples"]
    assert {worker for _, worker, _ in found} == {"main"}
    for name in COUNTERS:
        place = metrics["storage"] if name.startswith("storage_") else metrics
        assert found[f"lrstream_{name}_total", "main", ""] == place[name.removeprefix("storage_")]
    for stage, numbers in metrics["stages"].items():
        assert found["lrstream_stage_operations_total", "main", stage] == numbers["count"]
        assert found["lrstream_stage_seconds_total", "main", stage] == numbers["seconds"]
    assert found["lrstream_sample_wait_seconds_count", "main", ""] == 21
    assert found["lrstream_sample_wait_seconds_sum", "main", ""] == metrics["wait_s"]["total"]
    assert found["lrstream_sample_wait_seconds", "main", "0.95"] == metrics["wait_s"]["p95"]
    assert found["lrstream_peak_reserved_bytes", "main", ""] == metrics["peak_reserved_bytes"] > 0
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/secrets", timeout=10)


@pytest.mark.parametrize(
    ("start_method", "num_workers", "num_epochs"), [("fork", 2, 2), ("forkserver", 1, 1)]
)
def test_workers_are_added_up(
    dataset: StreamingLeRobotDataset, start_method: str, num_workers: int, num_epochs: int
) -> None:
    port = dataset.serve_metrics(0)
    assert port is not None
    workers = [str(number) for number in range(num_workers)]
    totals = []
    for epoch in range(num_epochs):  # new worker processes in each; their counters begin at zero again
        dataset.set_epoch(epoch)
        assert drain(dataset, num_workers, start_method) == 21
        found = scrape(port)
        assert {worker for name, worker, _ in found if name == "lrstream_samples_total"} == {"main", *workers}
        assert found["lrstream_samples_total", "main", ""] == 0
        totals.append(sum(found["lrstream_samples_total", worker, ""] for worker in workers))
        frames = sum(found["lrstream_frames_loaded_total", worker, ""] for worker in workers)
        decoded = sum(found["lrstream_stage_operations_total", worker, "decode"] for worker in workers)
        assert frames == totals[-1] == decoded
        assert found["lrstream_reserved_bytes", "0", ""] == 0
    assert totals == [21, 42][:num_epochs]


def test_waits_for_batches_are_those_of_training(dataset: StreamingLeRobotDataset) -> None:
    port = dataset.serve_metrics(0)
    assert port is not None
    batches = sum(1 for _ in dataset.follow(DataLoader(dataset, batch_size=4, num_workers=0)))
    found = scrape(port)
    assert found["lrstream_batch_wait_seconds_count", "main", ""] == batches == 6


def test_a_port_in_use_is_a_warning_and_training_goes_on(
    dataset: StreamingLeRobotDataset, tiny_dataset: WrittenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    port = dataset.serve_metrics(0)
    assert port is not None
    with StreamingLeRobotDataset(tiny_dataset.root) as other:
        with caplog.at_level(logging.WARNING, "lrstream.loader"):
            assert other.serve_metrics(port) is None
        assert f"port {port} of 127.0.0.1 cannot be had" in caplog.text
        assert drain(other, 0) == 21
    with pytest.raises(UsageError, match="served already"):
        dataset.serve_metrics(0)
    for wrong in (-1, 70000):
        with pytest.raises(UsageError):
            dataset.serve_metrics(wrong)


def test_closing_frees_the_port_and_the_directory(
    tiny_dataset: WrittenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with StreamingLeRobotDataset(tiny_dataset.root) as dataset:
        port = dataset.serve_metrics(0)
        assert port is not None
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())
    with StreamingLeRobotDataset(tiny_dataset.root) as dataset:
        assert dataset.serve_metrics(port) == port
        reader = iter(dataset)
        next(reader)
        del reader
    with StreamingLeRobotDataset(tiny_dataset.root) as dataset:
        dropped = dataset.serve_metrics(0)
    del dataset
    assert dropped is not None
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{dropped}/metrics", timeout=10)


def test_the_environment_variable(
    tiny_dataset: WrittenDataset, dataset: StreamingLeRobotDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = dataset.serve_metrics(0)  # a port that nobody else has now
    assert free is not None
    dataset.close()
    monkeypatch.setenv("LRSTREAM_PROMETHEUS_PORT", str(free - 1))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with StreamingLeRobotDataset(tiny_dataset.root) as served:
        drain(served, 0)
        assert scrape(free)["lrstream_samples_total", "main", ""] == 21


@pytest.mark.parametrize("value", ["x", "-1", "70000", "host:"])
def test_an_environment_variable_that_makes_no_sense(
    tiny_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("LRSTREAM_PROMETHEUS_PORT", value)
    with pytest.raises(UsageError, match="LRSTREAM_PROMETHEUS_PORT"):
        StreamingLeRobotDataset(tiny_dataset.root)


def test_the_counters_as_json_and_flat(dataset: StreamingLeRobotDataset) -> None:
    drain(dataset, 0)
    metrics = dataset.metrics()
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    flat = lrstream.flat_metrics(metrics)
    assert all(type(value) is float for value in flat.values())
    assert flat["lrstream/samples"] == 21.0
    assert flat["lrstream/stages/decode/seconds"] == metrics["stages"]["decode"]["seconds"]
    assert flat["lrstream/wait_s/p95"] == metrics["wait_s"]["p95"]
    assert flat["lrstream/storage/requests"] == metrics["storage"]["requests"]

    def leaves(value: Any) -> int:
        return sum(map(leaves, value.values())) if isinstance(value, dict) else 1

    assert len(flat) == leaves(metrics)
    assert lrstream.flat_metrics({"a": {"b": 1}, "c": "text", "d": float("nan")}, prefix="") == {"a/b": 1.0}


def test_a_board_without_its_directory_does_not_stop_a_worker(tmp_path: Path) -> None:
    board = MetricsBoard()
    board.close()
    board.write(0, {"samples": 1})
    assert board.read() == {}
