"""`lrstream benchmark loader`: figures, and checks that do find what is wrong."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from lrstream.commands import benchmark
from lrstream.commands.benchmark_checks import coverage_problems, identity_problems
from lrstream.demo import DemoCamera, DemoSpec, Painter, WrittenDataset, write_dataset
from tests.cli.program import Program


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> DemoSpec:
    """The demonstration, made of fewer episodes."""
    spec = DemoSpec(episode_lengths=(9, 4, 13, 6, 11))
    monkeypatch.setattr(benchmark, "write_dataset", lambda root: write_dataset(root, spec))
    return spec


def test_the_demonstration(
    small_demo: DemoSpec,
    lrstream: Program,
    isolated_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    document = lrstream("benchmark", "loader", "--demo", "--json").document()
    assert document["schema"] == "lrstream.benchmark.loader/1"
    result = document["result"]
    assert (result["demo"], result["source"], result["origin"]) == (True, None, "built")
    assert result["frames"] == result["samples"] == small_demo.num_frames
    assert result["pictures_checked"] == 2 * small_demo.num_frames
    assert (result["episodes"], result["workers"], result["batch_size"]) == (5, 2, 16)
    assert 0 < result["first_batch_s"] <= result["epoch_s"]
    assert result["samples_per_s"] > 0
    assert 0 <= result["batch_wait_p50_s"] <= result["batch_wait_p95_s"] <= result["batch_wait_p99_s"]
    assert list(tmp_path.iterdir()) == [], "the folder is gone"
    assert not (isolated_home / "lerobot").exists(), "and so are its caches"


def test_the_table_fits_and_says_the_result(small_demo: DemoSpec, lrstream: Program) -> None:
    outcome = lrstream("benchmark", "loader", "--demo", "--workers", "0")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert "samples/s" in lines[0]
    assert max(map(len, lines)) <= 80
    frames = small_demo.num_frames
    assert lines[-1] == f"All {frames} frames arrived exactly once, {2 * frames} pictures were right."


@pytest.mark.parametrize("strategy", ["remaining", "round_robin", "gop"])
def test_a_dataset_of_ones_own(strategy: str, standard_dataset: WrittenDataset, lrstream: Program) -> None:
    outcome = lrstream(
        "benchmark", "loader", standard_dataset.root, "--strategy", strategy, "--batch-size", "7", "--json"
    )
    result = outcome.document()["result"]
    assert result["samples"] == standard_dataset.num_frames
    assert result["pictures_checked"] == 0
    assert result["strategy"] == strategy
    assert result["source"] == str(standard_dataset.root)


def test_datasets_without_video(image_dataset: WrittenDataset, lrstream: Program) -> None:
    result = lrstream("benchmark", "loader", image_dataset.root, "--workers", "0", "--json").document()[
        "result"
    ]
    assert (result["files"], result["origin"]) == (0, None)
    assert result["samples"] == image_dataset.num_frames


def test_language_columns_can_be_batched(rich_dataset: WrittenDataset, lrstream: Program) -> None:
    result = lrstream("benchmark", "loader", rich_dataset.root, "--workers", "0", "--json").document()[
        "result"
    ]
    assert result["samples"] == rich_dataset.num_frames


@pytest.mark.parametrize("words", [[], ["--demo", "x"]])
def test_a_source_or_the_demonstration(words: list[str], lrstream: Program) -> None:
    outcome = lrstream("benchmark", "loader", *words).without_traceback()
    assert outcome.code == 2
    assert "--demo" in outcome.err


def test_wrong_pictures_are_found(lrstream: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The videos of a demonstration whose pictures are those of other episodes."""
    spec = DemoSpec(episode_lengths=(5, 7))

    def write_swapped(root: Path) -> WrittenDataset:
        paint = Painter.paint
        with monkeypatch.context() as patch:
            patch.setattr(Painter, "paint", lambda self, episode, frame: paint(self, 1 - episode, frame))
            return write_dataset(root, spec)

    monkeypatch.setattr(benchmark, "write_dataset", write_swapped)
    outcome = lrstream("benchmark", "loader", "--demo", "--workers", "0", "--json")
    assert outcome.code == 3
    problems = outcome.document()["problems"]
    assert {problem["code"] for problem in problems} == {"wrong-picture"}
    assert sorted({problem["episode_index"] for problem in problems}) == [0, 1]


@pytest.mark.parametrize(
    ("delivered", "codes"),
    [
        ([0, 1, 2, 3], []),
        ([3, 2, 1, 0], []),
        ([0, 1, 3], ["frame-missing"]),
        ([0, 1, 1, 2, 3], ["frame-repeated"]),
        ([0, 1, 2, 3, 9], ["frame-unknown"]),
        ([0, 0, 9], ["frame-missing", "frame-repeated", "frame-unknown"]),
        ([], ["frame-missing"]),
    ],
)
def test_coverage(delivered: list[int], codes: list[str]) -> None:
    found = coverage_problems(np.array(delivered, dtype=np.int64), np.arange(4, dtype=np.int64), "x")
    assert [problem.code for problem in found] == codes


def test_identities_are_compared_row_by_row() -> None:
    painter = Painter(1, 96, 128, 0)
    rows = [(0, 0), (0, 1), (2, 5)]
    pictures = np.stack([np.moveaxis(painter.paint(*row), -1, 0) for row in rows])
    episodes = np.array([0, 0, 2])
    assert not list(identity_problems(1, "k", pictures, episodes, np.array([0, 1, 5])))
    (wrong,) = identity_problems(1, "k", pictures, episodes, np.array([0, 2, 5]))
    assert (wrong.code, wrong.episode_index, wrong.source) == ("wrong-picture", 0, "k")
    assert len(list(identity_problems(0, "k", pictures, episodes, np.array([0, 1, 5])))) == 2


def test_the_command_line_offers_exactly_the_strategies_there_are() -> None:
    from typing import get_args

    from lrstream.cli.benchmark import Strategy
    from lrstream.streaming.strategies import SamplingStrategy

    assert [item.value for item in Strategy] == list(get_args(SamplingStrategy))


def report_of(dataset: WrittenDataset, lrstream: Program, *words: str) -> dict[str, Any]:
    outcome = lrstream("benchmark", "loader", dataset.root, *words, "--json")
    assert outcome.code == 0, outcome.out
    return dict(outcome.document()["result"])


@pytest.fixture(scope="module")
def single_dataset(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """Three episodes, each in files of its own."""
    cameras = (
        DemoCamera("observation.images.front", 64, 96, episodes_per_file=1),
        DemoCamera("observation.images.side", 48, 112, episodes_per_file=1),
    )
    return write_dataset(tmp_path_factory.mktemp("single") / "set", DemoSpec((5, 7, 9), cameras, fps=10))


def packet_bytes(dataset: WrittenDataset) -> int:
    """Bytes of all coded pictures, as FFmpeg's demuxer finds them."""
    total = 0
    for path in dataset.root.rglob("*.mp4"):
        with av.open(str(path)) as container:
            total += sum(packet.size for packet in container.demux(video=0))
    return total


@pytest.mark.parametrize("workers", ["0", "2"])
def test_counts_and_bytes_are_those_of_the_files(
    workers: str, single_dataset: WrittenDataset, lrstream: Program
) -> None:
    used_before = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    result = report_of(single_dataset, lrstream, "--workers", workers, "--batch-size", "4")
    used = [
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        for after, before in zip(
            (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)),
            used_before,
            strict=True,
        )
    ]
    frames = single_dataset.num_frames
    assert result["bytes_per_sample"] * frames == pytest.approx(packet_bytes(single_dataset))
    assert result["is_complete"] is True
    ceiling = result["ceiling"]
    assert (ceiling["num_samples"], ceiling["num_pictures"]) == (frames, 2 * frames)
    assert 0 < result["cpu_ms_per_sample"] * frames / 1000 <= sum(used) + 0.02
    assert 0 < ceiling["cpu_s"] <= used[0]
    ratio = result["ceiling_cpu_ms_per_sample"] / result["cpu_ms_per_sample"]
    assert result["ceiling_cpu_ratio"] == pytest.approx(ratio)
    assert result["ceiling_ratio"] == pytest.approx(result["samples_per_s"] / result["ceiling_samples_per_s"])
    assert result["pss_bytes"] <= result["rss_bytes"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert result["rss_bytes"] <= peak * (1 + int(workers)) * 1.05
    shares = result["shares"]
    assert 0.99 < sum(shares.values()) < 1.01
    assert all(rate > 0 for rate in result["stages"].values())
    assert result["limit"]["stage"] in ("network", "decode", "assembly")
    assert result["requests"] >= 2 * 3  # a range of each episode and camera
    assert result["retries"] == 0


def test_the_ceiling_decodes_from_the_keyframe_of_each_frame(
    long_dataset: WrittenDataset, lrstream: Program
) -> None:
    """Fed pictures against the sizes of GOPs that FFmpeg's demuxer sees."""
    result = report_of(
        long_dataset, lrstream, "--workers", "0", "--samples", "32", "--strategy", "round_robin"
    )
    assert 32 <= result["samples"] <= 48
    assert result["is_complete"] is False
    assert result["ceiling"]["num_samples"] == 32
    # GOPs of 30: a random frame is behind 14.5 others on average.
    assert 8 < result["ceiling"]["fed_per_picture"] < 23


def test_a_slow_consumer_is_what_limits(standard_dataset: WrittenDataset, lrstream: Program) -> None:
    result = report_of(
        standard_dataset,
        lrstream,
        *("--workers", "0", "--samples", "12", "--batch-size", "4", "--consumer-rate", "8"),
    )
    assert result["limit"]["stage"] == "consumer"
    assert 1.0 <= result["epoch_s"] - result["first_batch_s"] < 4.0  # two batches are waited for, one begins
    assert result["samples"] == 12


def test_a_bound_in_seconds(standard_dataset: WrittenDataset, lrstream: Program) -> None:
    result = report_of(
        standard_dataset,
        lrstream,
        *("--workers", "1", "--seconds", "0.2", "--batch-size", "2", "--consumer-rate", "10"),
    )
    assert 0 < result["samples"] < standard_dataset.num_frames
    assert result["epoch_s"] >= 0.2


def test_some_episodes(standard_dataset: WrittenDataset, lrstream: Program) -> None:
    result = report_of(standard_dataset, lrstream, "--workers", "0", "--episodes", "1,3-4")
    assert result["samples"] == result["frames"] == 7 + 12 + 18
    assert result["dataset"]["num_episodes"] == 3


def test_a_run_beside_an_earlier_one(
    tiny_dataset: WrittenDataset, standard_dataset: WrittenDataset, lrstream: Program, tmp_path: Path
) -> None:
    before, plot = tmp_path / "before.json", tmp_path / "plot.html"
    first = lrstream("benchmark", "loader", tiny_dataset.root, "--workers", "0", "--json")
    before.write_text(first.out)
    words = ("benchmark", "loader", tiny_dataset.root, "--workers", "0", "--batch-size", "5")
    outcome = lrstream(*words, "--compare", before, "--plot", plot)
    assert outcome.code == 0
    assert "settings batch_size was 16, now it is 5." in outcome.out
    assert "ceiling_cpu_ratio" in outcome.out
    assert "Wait for a batch" in plot.read_text()
    refused = lrstream("benchmark", "loader", standard_dataset.root, "--compare", before, "--json")
    assert (refused.code, refused.codes()) == (2, ["usage"])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--samples", "0"], 2, "--samples"),
        (["--seconds", "0"], 2, "--seconds is 0, expected more than 0"),
        (["--seconds", "nan"], 2, "--seconds"),
        (["--consumer-rate", "-1"], 2, "--consumer-rate is -1"),
        (["--budget", "0"], 2, "--budget is 0"),
        (["--episodes", "7-9"], 4, "Episode 7, 9"),
        (["--episodes", "x"], 2, "x"),
        (["--plot", "x.gif"], 2, ".html"),
        (["--compare", "absent.json"], 4, "absent.json"),
        (["--strategy", "none"], 2, "none"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    words: list[str],
    code: int,
    told: str,
    tiny_dataset: WrittenDataset,
    lrstream: Program,
    isolated_home: Path,
) -> None:
    outcome = lrstream("benchmark", "loader", tiny_dataset.root, *words).without_traceback()
    assert outcome.code == code
    assert told in outcome.err
    assert len(outcome.err.splitlines()) <= 2
    assert not (isolated_home / "lerobot").exists()
