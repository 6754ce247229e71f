"""`lrstream validate`: what it says about good and bad datasets and sidecars."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrstream.commands.validate import is_sidecar_file
from lrstream.demo import WrittenDataset
from tests.cli.program import Program
from tests.support.datasets import copy_dataset
from tests.support.faults import FAULTS, edit_episodes, lfs_pointer, replace_mp4


@pytest.fixture
def dataset(standard_dataset: WrittenDataset, tmp_path: Path) -> Path:
    """A dataset that may be changed."""
    return copy_dataset(standard_dataset, tmp_path / "dataset")


@pytest.fixture
def sidecar(dataset: Path, tmp_path: Path, lrstream: Program) -> Path:
    """Its complete sidecar, as a file."""
    path = tmp_path / "complete.npz"
    assert lrstream("build", dataset, "-o", path).code == 0
    return path


def test_a_good_dataset_without_a_sidecar(dataset: Path, isolated_home: Path, lrstream: Program) -> None:
    outcome = lrstream("validate", dataset, "--json")
    assert outcome.code == 0
    result = outcome.document()["result"]
    assert (result["sidecar"], result["files"], result["episodes"]) == (None, 7, 7)
    assert (result["rows"], result["num_errors"], result["num_warnings"]) == (True, 0, 0)
    assert not (isolated_home / "lerobot").exists(), "nothing is kept"
    assert "none in the cache" in lrstream("validate", dataset).out


def test_a_good_dataset_with_a_sidecar_in_the_cache(dataset: Path, lrstream: Program) -> None:
    built = lrstream("build", dataset, "--json").document()["result"]["path"]
    result = lrstream("validate", dataset, "--json").document()["result"]
    assert result["sidecar"] == built


def test_a_good_file(sidecar: Path, dataset: Path, lrstream: Program) -> None:
    alone = lrstream("validate", sidecar, "--json").document()["result"]
    assert (alone["source"], alone["episodes"], alone["files"]) == (None, None, 7)
    both = lrstream("validate", sidecar, "--source", dataset, "--json").document()["result"]
    assert (both["source"], both["episodes"], both["rows"]) == (str(dataset), 7, False)
    rows_too = lrstream("validate", sidecar, "--source", dataset, "--rows", "--json").document()["result"]
    assert rows_too["rows"] is True


def test_a_changed_video(sidecar: Path, dataset: Path, lrstream: Program) -> None:
    broken = FAULTS["replaced_mp4"](dataset)
    outcome = lrstream("validate", sidecar, "--source", dataset, "--json").without_traceback()
    assert outcome.code == 3
    changed = [item for item in outcome.document()["problems"] if item["code"] == "source-changed"]
    assert [item["source"] for item in changed] == [broken.path]

    told = lrstream("validate", sidecar, "--source", dataset)
    assert told.code == 3
    assert "error [source-changed]: " in told.out
    assert "hint:" in told.out
    assert told.err == "", "findings are the answer, not a failure"


def test_a_damaged_file(sidecar: Path, lrstream: Program) -> None:
    os.truncate(sidecar, sidecar.stat().st_size // 2)
    outcome = lrstream("validate", sidecar, "--json").without_traceback()
    assert outcome.code == 3
    assert outcome.codes() == ["archive-invalid"]
    assert outcome.document()["result"]["files"] is None


def test_a_file_that_would_run_code(tmp_path: Path, lrstream: Program) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path(tmp_path / "ran").touch, ())

    target = tmp_path / "evil.npz"
    np.savez(target, manifest_json=np.array([Payload()], dtype=object))
    assert lrstream("validate", target).without_traceback().code == 3
    assert not (tmp_path / "ran").exists()


# Faults of a dataset that a check lists, and codes of which one at least must be among the problems.
FINDINGS = {
    "missing_mp4": {"source-missing"},
    "lfs_pointer_mp4": {"mp4-malformed"},
    "empty_mp4": {"mp4-malformed"},
    "truncated_before_moov": {"mp4-malformed"},
    "truncated_payload": {"mp4-malformed"},
    "fragmented_mp4": {"mp4-unsupported"},
    "span_past_end": {"span-outside-file"},
    "drifting_clock": {"picture-missing"},
    "lfs_pointer_parquet": {"rows-invalid"},
    "empty_parquet": {"rows-invalid"},
    "parquet_without_footer": {"rows-invalid"},
    "missing_parquet": {"rows-invalid"},
    "wrong_data_file": {"rows-invalid"},
    "wrong_length": {"episode-length"},
    "overlapping_rows": {"rows-overlap"},
}


@pytest.mark.parametrize("fault", FINDINGS)
def test_faults_are_findings(fault: str, dataset: Path, lrstream: Program) -> None:
    broken = FAULTS[fault](dataset)
    outcome = lrstream("validate", dataset, "--json").without_traceback()
    assert outcome.code == 3
    assert outcome.err == ""
    problems = outcome.document()["problems"]
    matching = [item for item in problems if item["code"] in FINDINGS[fault]]
    assert matching, problems
    if broken.episode is not None and fault != "drifting_clock":
        assert broken.episode in [item["episode_index"] for item in matching]
    assert lrstream("validate", dataset).code == 3


def test_one_fault_of_each_kind_are_listed_in_one_run(
    dataset: Path, sidecar: Path, lrstream: Program
) -> None:
    def change(row: dict[str, Any]) -> None:
        if row["episode_index"] == 3:
            row["length"] += 1
        if row["episode_index"] == 4:
            row["dataset_from_index"] -= 2
            row["length"] += 2

    edit_episodes(dataset, change)
    expected = {("episode-length", 3), ("rows-overlap", 4)}
    for fault, code in (
        ("span_past_end", "span-outside-file"),
        ("wrong_data_file", "rows-invalid"),
        ("drifting_clock", "picture-missing"),
    ):
        expected.add((code, FAULTS[fault](dataset).episode or 0))
    videos = sorted(path.relative_to(dataset).as_posix() for path in dataset.glob("videos/*/*/*.mp4"))
    replaced, missing, pointer = videos[0], videos[-3], videos[-2]
    replace_mp4(dataset / replaced)
    (dataset / missing).unlink()
    lfs_pointer(dataset / pointer)

    outcome = lrstream("validate", sidecar, "--source", dataset, "--rows", "--deep", "--json")
    assert outcome.without_traceback().code == 3
    problems = outcome.document()["problems"]
    assert expected <= {(item["code"], item["episode_index"]) for item in problems}
    files = {(item["code"], item["source"]) for item in problems}
    assert {
        ("source-changed", replaced),
        ("source-missing", missing),
        ("mp4-malformed", pointer),
        ("source-size", pointer),
    } <= files
    pointers = [item for item in problems if (item["code"], item["source"]) == ("mp4-malformed", pointer)]
    assert "Git LFS" in pointers[0]["message"]


@pytest.mark.parametrize(
    ("fault", "code"), [("version_2_1", 6), ("version_4_0", 6), ("missing_info", 4), ("null_video_index", 6)]
)
def test_metadata_that_cannot_be_read_are_a_failure(
    fault: str, code: int, dataset: Path, lrstream: Program
) -> None:
    FAULTS[fault](dataset)
    outcome = lrstream("validate", dataset).without_traceback()
    assert outcome.code == code
    assert outcome.out == ""


def test_several_faults_come_in_one_run(dataset: Path, lrstream: Program) -> None:
    FAULTS["empty_mp4"](dataset)
    FAULTS["missing_parquet"](dataset)
    FAULTS["span_past_end"](dataset)
    codes = set(lrstream("validate", dataset, "--json").codes())
    assert codes >= {"mp4-malformed", "rows-invalid"}


def test_some_episodes(dataset: Path, lrstream: Program) -> None:
    broken = FAULTS["wrong_data_file"](dataset)
    assert broken.episode is not None
    assert lrstream("validate", dataset, "--episodes", str(broken.episode)).code == 3
    others = f"{broken.episode + 1}-"
    result = lrstream("validate", dataset, "--episodes", others, "--json")
    assert result.code == 0
    assert result.document()["result"]["episodes"] == 7 - broken.episode - 1
    assert lrstream("validate", dataset, "--no-rows").code == 0


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["X.npz", "--rows"], "--source"),
        (["X.npz", "--deep"], "--source"),
        (["X.npz", "--episodes", "0"], "--source"),
        (["X.npz", "--episodes", "nonsense", "--source", "Y"], "nonsense"),
        (["Y", "--source", "Y"], "--source"),
    ],
)
def test_arguments_that_do_not_belong_together(
    words: list[str], needle: str, dataset: Path, sidecar: Path, lrstream: Program
) -> None:
    places = {"X.npz": str(sidecar), "Y": str(dataset)}
    outcome = lrstream("validate", *(places.get(word, word) for word in words)).without_traceback()
    assert outcome.code == 2
    assert needle in outcome.err


@pytest.mark.parametrize("target", ["no/such.npz", "./no-such-dataset"])
def test_a_target_that_does_not_exist(target: str, tmp_path: Path, lrstream: Program) -> None:
    outcome = lrstream("validate", tmp_path / target, "--json").without_traceback()
    assert outcome.code == 4
    assert outcome.codes() == ["not-found"]


def test_what_is_taken_for_a_sidecar(tmp_path: Path) -> None:
    other = tmp_path / "sidecar"
    other.touch()
    assert is_sidecar_file(str(other))
    assert is_sidecar_file("x.npz")
    assert not is_sidecar_file(str(tmp_path))
    assert not is_sidecar_file("OWNER/NAME")
