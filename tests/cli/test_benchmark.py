"""`lrstream benchmark loader`: figures, and checks that do find what is wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from lrstream.commands import benchmark
from lrstream.commands.benchmark import coverage_problems, identity_problems
from lrstream.demo import DemoSpec, Painter, WrittenDataset, write_dataset
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


@pytest.mark.parametrize("strategy", ["remaining", "round_robin"])
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
