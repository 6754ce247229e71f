"""`lrstream benchmark plan`: its figures are those of a real epoch over a slow network."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.streaming.strategies import SAMPLING_STRATEGIES
from tests.cli.program import Program
from tests.support.hub import LoopbackHub
from tests.support.remote import spans_by_file

pytest_plugins = ["tests.support.hub.plugin"]

REPO = "robots/pick"


def plan_of(lrstream: Program, source: object, *words: str) -> dict[str, Any]:
    outcome = lrstream("benchmark", "plan", str(source), *words, "--json")
    assert outcome.code == 0, outcome.out
    assert outcome.err == ""
    document = outcome.document()
    assert document["schema"] == "lrstream.benchmark.plan/1"
    return dict(document["result"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", SAMPLING_STRATEGIES)
def test_an_epoch_over_a_slow_network_is_what_was_planned(
    strategy: Any,
    standard_dataset: WrittenDataset,
    loopback_hub: LoopbackHub,
    lrstream: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loopback_hub.create_dataset(REPO, standard_dataset.root)
    loopback_hub.connect_process(monkeypatch)
    words = ("--workers", "0", "--queue", "1", "--pool", "2", "--prefetch", "1", "--batch-size", "8")
    plan = plan_of(lrstream, REPO, *words, "--latency", "40", "--strategy", strategy)
    loopback_hub.faults.add(r"\.mp4$", "slow", server="cdn", latency_s=0.04)
    loopback_hub.log.clear()
    batches: list[set[int]] = []
    started_s = time.monotonic()
    with StreamingLeRobotDataset(
        REPO,
        sampling_strategy=strategy,
        episode_pool_size=2,
        prefetch_episodes=1,
        decoded_queue_size=1,
        return_uint8=True,
    ) as dataset:
        for number, sample in enumerate(dataset):
            if number % 8 == 0:
                batches.append(set())
            batches[-1].add(int(sample["episode_index"]))
        peak = dataset.metrics()["peak_reserved_bytes"]
        fetched = dataset.metrics()["fetched_bytes"]
    elapsed_s = time.monotonic() - started_s
    records = loopback_hub.log.records(r"\.mp4$", server="cdn")
    assert plan["requests"] == len(records) == 14
    assert plan["bytes"] == fetched == sum(record.bytes_sent for record in records)
    if strategy == "gop":
        # A unit that is still being decoded keeps its bytes while the next one is fetched. The plan is that
        # of decoders that keep up; on a busy machine they may not.
        assert plan["peak_reserved_bytes"] <= peak < fetched
    else:
        assert plan["peak_reserved_bytes"] == peak
    mixing = [len(batch) for batch in batches]
    assert plan["batches"] == len(mixing)
    assert plan["mixing"]["mean"] == pytest.approx(np.mean(mixing))
    assert (plan["mixing"]["least"], plan["mixing"]["largest"]) == (min(mixing), max(mixing))
    # The model leaves out decoding and rows, so that a real epoch takes longer.
    assert 0.04 <= plan["epoch_s"] <= elapsed_s
    assert plan["stalls"] >= 1


def test_bytes_are_those_of_the_spans(
    standard_dataset: WrittenDataset, lrstream: Program, tmp_path: Path
) -> None:
    archive = tmp_path / "set.npz"
    assert lrstream("build", standard_dataset.root, "-o", archive).code == 0
    spans = spans_by_file(standard_dataset.root, archive)
    expected = [stop - start for ranges in spans.values() for start, stop in ranges.elements()]
    plan = plan_of(lrstream, standard_dataset.root)
    assert (plan["bytes"], plan["requests"]) == (sum(expected), len(expected))
    # Ranks have their own shares, and all of them together have everything.
    shares = [
        plan_of(lrstream, standard_dataset.root, "--world-size", "3", "--rank", str(rank))
        for rank in range(3)
    ]
    for name in ("bytes", "requests", "frames"):
        assert sum(share[name] for share in shares) == plan[name]


def test_times_follow_from_the_slowest_stage(standard_dataset: WrittenDataset, lrstream: Program) -> None:
    frames = standard_dataset.num_frames
    decode = plan_of(lrstream, standard_dataset.root, "--decode-rate", "10", "--consumer-rate", "1000")
    assert decode["limit"]["stage"] == "decode"
    assert frames / 10 <= decode["epoch_s"] <= frames / 10 * 1.1 + 16 / 1000
    consumer = plan_of(lrstream, standard_dataset.root, "--decode-rate", "1000", "--consumer-rate", "10")
    assert consumer["limit"]["stage"] == "consumer"
    assert consumer["epoch_s"] == pytest.approx(consumer["first_batch_s"] + frames / 10)
    mib_per_s = consumer["bytes"] / 2**20 / 5
    network = plan_of(lrstream, standard_dataset.root, "--bandwidth", f"{mib_per_s:.9f}", "--pool", "1")
    assert network["limit"]["stage"] == "network"
    assert network["epoch_s"] == pytest.approx(5.0, rel=1e-3), "all bytes at that rate"
    assert network["capacities"]["network"] == pytest.approx(frames / 5, rel=1e-3)
    stalls = plan_of(
        lrstream,
        standard_dataset.root,
        *("--latency", "500", "--decode-rate", "200", "--pool", "1", "--prefetch", "0", "--workers", "1"),
    )
    assert stalls["epoch_s"] == pytest.approx(7 * 0.5 + frames / 200)
    assert stalls["stalls"] == 7
    assert stalls["limit"]["stage"] in ("network", "stalls")
    nothing = plan_of(lrstream, standard_dataset.root)
    assert (nothing["limit"]["stage"], nothing["epoch_s"]) == ("nothing", 0.0)


def test_datasets_without_video(image_dataset: WrittenDataset, lrstream: Program) -> None:
    plan = plan_of(lrstream, image_dataset.root, "--bandwidth", "1", "--decode-rate", "10")
    assert (plan["bytes"], plan["requests"], plan["peak_reserved_bytes"]) == (0, 0, 0)
    assert plan["limit"]["stage"] == "decode"


def test_text_comparison_and_plot(
    standard_dataset: WrittenDataset, lrstream: Program, tmp_path: Path
) -> None:
    before, plot = tmp_path / "before.json", tmp_path / "plot.html"
    first = lrstream("benchmark", "plan", standard_dataset.root, "--latency", "10", "--json")
    before.write_text(first.out)
    outcome = lrstream(
        *("benchmark", "plan", standard_dataset.root, "--latency", "20"),
        *("--compare", before, "--plot", plot),
    )
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 100 + len(str(before))
    assert "settings latency_ms was 10, now it is 20." in outcome.out
    assert "2.00 x" in outcome.out, "twice the latency, twice the time"
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--bandwidth", "0"], 2, "--bandwidth is 0, expected more than 0"),
        (["--bandwidth", "inf"], 2, "--bandwidth"),
        (["--latency", "-1"], 2, "--latency is -1"),
        (["--decode-rate", "0"], 2, "--decode-rate"),
        (["--consumer-rate", "0"], 2, "--consumer-rate"),
        (["--rank", "1"], 2, "--world-size"),
        (["--world-size", "99"], 2, "99"),
        (["--episodes", "9"], 4, "Episode 9"),
        (["--budget", "0.000001"], 7, "episode"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], code: int, told: str, standard_dataset: WrittenDataset, lrstream: Program
) -> None:
    outcome = lrstream("benchmark", "plan", standard_dataset.root, *words).without_traceback()
    assert (outcome.code, outcome.out) == (code, "")
    assert told in outcome.err


def test_no_such_dataset(lrstream: Program, tmp_path: Path) -> None:
    outcome = lrstream("benchmark", "plan", tmp_path / "absent").without_traceback()
    assert outcome.code == 4
