"""`lrstream build`: what it makes, where, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.lock import ProcessLock, lock_path
from tests.cli.program import Program
from tests.support.datasets import copy_dataset
from tests.support.faults import FAULTS


def video_files(dataset: WrittenDataset) -> set[str]:
    return {path for paths in dataset.video_files.values() for path in paths}


def test_the_cache_is_filled_once_and_found_by_the_loader(
    standard_dataset: WrittenDataset, isolated_home: Path, lrstream: Program
) -> None:
    root = standard_dataset.root
    first = lrstream("build", root, "--json").document()["result"]
    assert first["origin"] == "built"
    assert first["complete"] is True
    assert first["files"] == first["requests"] == len(video_files(standard_dataset))
    assert (first["episodes"], first["frames"]) == (7, standard_dataset.num_frames)
    assert first["bytes_read"] > 0
    assert first["elapsed_s"] > 0
    assert Path(first["path"]).is_relative_to(isolated_home / "lerobot" / "streaming-sidecars")
    with ArchiveReader(first["path"]) as archive:
        assert set(archive.paths) == video_files(standard_dataset)

    second = lrstream("build", root, "--json").document()["result"]
    assert (second["origin"], second["path"]) == ("cache", first["path"])
    assert (second["requests"], second["bytes_read"]) == (0, 0)

    before = sorted(Path(first["path"]).parents[1].rglob("*.npz"))
    with StreamingLeRobotDataset(str(root)):
        pass
    assert sorted(Path(first["path"]).parents[1].rglob("*.npz")) == before, "the loader built another one"

    third = lrstream("build", root, "--force", "--json").document()["result"]
    assert (third["origin"], third["path"]) == ("built", first["path"])


def test_text_says_the_same(standard_dataset: WrittenDataset, lrstream: Program) -> None:
    outcome = lrstream("build", standard_dataset.root)
    assert outcome.code == 0
    assert outcome.err == "", "progress is for terminals"
    facts = dict(line.split(maxsplit=1) for line in outcome.out.splitlines())
    assert Path(facts["sidecar"]).exists()
    assert facts["files"] == str(len(video_files(standard_dataset)))
    assert facts["frames"] == str(standard_dataset.num_frames)


def test_a_file_can_be_written_instead(
    standard_dataset: WrittenDataset, tmp_path: Path, isolated_home: Path, lrstream: Program
) -> None:
    target = tmp_path / "x.npz"
    result = lrstream("build", standard_dataset.root, "-o", target, "--json").document()["result"]
    assert result["path"] == str(target)
    assert result["complete"] is True
    with np.load(target, allow_pickle=False) as archive:
        assert json.loads(archive["manifest_json"].item())["version"] == 3
    assert not list((isolated_home / "lerobot").rglob("*.npz")), "the cache stays as it was"


def test_some_episodes(standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program) -> None:
    target = tmp_path / "some.npz"
    outcome = lrstream("build", standard_dataset.root, "--episodes", "0-1,6-", "-o", target, "--json")
    result = outcome.document()["result"]
    # cameras have 3 and 2 episodes in a file
    front, side = standard_dataset.video_files.values()
    assert result["complete"] is False
    assert result["episodes"] == 3
    assert result["frames"] == 23 + 7 + 27
    with ArchiveReader(target) as archive:
        assert set(archive.paths) == {front[0], front[2], side[0], side[3]}
    assert result["files"] == 4


@pytest.mark.parametrize(
    ("spec", "code", "needle"),
    [
        ("1,1", 2, "twice"),
        ("0-3,2", 2, "twice"),
        ("5-2", 2, "ends before"),
        ("a", 2, "cannot be understood"),
        ("", 2, "cannot be understood"),
        ("-3", 2, "cannot be understood"),
        ("3-,5", 2, "twice"),
        ("7", 4, "not in the dataset"),
        ("0-7", 4, "not in the dataset"),
    ],
)
def test_episodes_that_cannot_be(
    spec: str, code: int, needle: str, standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program
) -> None:
    target = tmp_path / "x.npz"
    outcome = lrstream("build", standard_dataset.root, f"--episodes={spec}", "-o", target).without_traceback()
    assert outcome.code == code
    assert needle in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_part_never_goes_into_the_cache(standard_dataset: WrittenDataset, lrstream: Program) -> None:
    outcome = lrstream("build", standard_dataset.root, "--episodes", "0")
    assert outcome.code == 2
    assert "--output" in outcome.err


def test_arguments_are_checked_before_anything_is_read(tmp_path: Path, lrstream: Program) -> None:
    # The dataset does not exist, yet the output is what is refused.
    assert lrstream("build", "/no/such", "-o", tmp_path).code == 2
    assert lrstream("build", "/no/such", "-o", tmp_path / "no" / "x.npz").code == 4
    assert lrstream("build", "/no/such", "--episodes", "x", "-o", tmp_path / "x.npz").code == 2


def test_images_need_no_sidecar(image_dataset: WrittenDataset, lrstream: Program) -> None:
    result = lrstream("build", image_dataset.root, "--json").document()["result"]
    assert (result["path"], result["origin"], result["files"]) == (None, None, 0)
    assert "nothing to index" in lrstream("build", image_dataset.root).out


def test_the_cache_directory_can_be_chosen(
    standard_dataset: WrittenDataset, tmp_path: Path, isolated_home: Path, lrstream: Program
) -> None:
    root = standard_dataset.root
    result = lrstream("build", root, "--json", "--cache-dir", tmp_path / "c").document()["result"]
    assert Path(result["path"]).is_relative_to(tmp_path / "c")
    assert not list((isolated_home / "lerobot").rglob("*.npz"))


# What each fault must say by itself: (exit status, words).
BUILD_FAULTS = {
    "version_2_1": (6, "v2.1"),
    "version_4_0": (6, "v4.0"),
    "missing_info": (4, "meta/info.json"),
    "missing_mp4": (4, "not exist"),
    "lfs_pointer_mp4": (6, "git lfs pull"),
    "empty_mp4": (6, "empty"),
    "not_mp4": (6, "not an MP4"),
    "truncated_before_moov": (6, "moov"),
    "fragmented_mp4": (6, "fragment"),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("fault", BUILD_FAULTS)
def test_each_fault_has_its_own_message(
    fault: str,
    as_json: bool,
    standard_dataset: WrittenDataset,
    tmp_path: Path,
    isolated_home: Path,
    lrstream: Program,
) -> None:
    broken = FAULTS[fault](copy_dataset(standard_dataset, tmp_path / "dataset"))
    code, words = BUILD_FAULTS[fault]
    outcome = lrstream("build", broken.root, *(["--json"] if as_json else [])).without_traceback()
    assert outcome.code == code
    text = outcome.out if as_json else outcome.err
    assert words.lower() in text.lower()
    assert Path(broken.path).name in text
    if as_json:
        assert len(outcome.codes()) == 1
        assert outcome.err == ""
    else:
        assert outcome.out == ""
    assert not list((isolated_home / "lerobot").rglob("*.npz")), "no sidecar may be left"


def test_all_bad_files_are_named_in_one_run(
    standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program
) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "dataset")
    FAULTS["empty_mp4"](root)
    other = sorted(video_files(standard_dataset))[-1]
    (root / other).write_bytes(b"<!DOCTYPE html><html></html>")
    outcome = lrstream("build", root, "--json")
    assert outcome.code == 6
    problems = outcome.document()["problems"]
    assert {problem["source"] for problem in problems} == {sorted(video_files(standard_dataset))[0], other}
    assert len({problem["message"] for problem in problems}) == 2


def test_a_lock_that_stays_taken(standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program) -> None:
    target = tmp_path / "x.npz"
    with ProcessLock(lock_path(target)) as lock:
        lock.acquire(1.0)
        outcome = lrstream(
            "build", standard_dataset.root, "-o", target, "--lock-timeout", "0.1", "--json"
        ).without_traceback()
    assert outcome.code == 5
    assert outcome.codes() == ["lock-timeout"]
    assert not target.exists()


def test_a_missing_dataset(tmp_path: Path, lrstream: Program) -> None:
    outcome = lrstream("build", tmp_path / "nowhere").without_traceback()
    assert outcome.code == 4
    assert "nowhere" in outcome.err
    assert "hint:" in outcome.err
