"""`lrstream build --shard` and `lrstream convert --merge`: the same bytes as one build, or a clear no."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.shards import ShardNote
from tests.cli.program import Program
from tests.support.hub import LoopbackHub
from tests.support.many_files import change_video, write_many_files
from tests.support.remote import hurry_retries

pytest_plugins = ["tests.support.hub.plugin"]

NUM_FILES = 11


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many_files(tmp_path_factory.mktemp("many") / "set", NUM_FILES)


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "set"))


def build_shards(lrstream: Program, root: Path | str, count: int, directory: Path, *options: str) -> Path:
    """All shards of a dataset, as files in a directory of their own."""
    directory.mkdir()
    for number in range(1, count + 1):
        output = directory / f"{number}.npz"
        outcome = lrstream("build", root, "--shard", f"{number}/{count}", "-o", output, *options, "--json")
        result = outcome.document()["result"]
        assert outcome.code == 0
        assert (result["shard"], result["complete"], result["path"]) == (
            f"{number}/{count}",
            count == 1,
            str(output),
        )
    return directory


@pytest.mark.parametrize("count", [3, 12])
def test_merged_shards_are_what_one_build_writes(
    root: Path, tmp_path: Path, lrstream: Program, count: int
) -> None:
    assert lrstream("build", root, "-o", tmp_path / "single.npz").code == 0
    shards = build_shards(lrstream, root, count, tmp_path / "shards")
    files = [len(ArchiveReader(path).paths) for path in shards.glob("*.npz")]
    assert sum(files) == NUM_FILES
    outcome = lrstream("convert", "--merge", shards, "-o", tmp_path / "merged.npz", "--json")
    result = outcome.document()["result"]
    assert result["num_sources"] == NUM_FILES
    assert len(result["shards"]) == count
    assert result["num_frames"] == 2 * NUM_FILES
    assert not result["installed"]
    assert (tmp_path / "merged.npz").read_bytes() == (tmp_path / "single.npz").read_bytes()
    refused = lrstream("convert", "--merge", shards, "-o", tmp_path / "merged.npz", "--json")
    assert (refused.code, refused.codes()) == (2, ["usage"])
    assert lrstream("convert", "--merge", shards, "-o", tmp_path / "merged.npz", "--force").code == 0


def test_the_cache_is_where_they_meet(root: Path, tmp_path: Path, lrstream: Program) -> None:
    places = [
        Path(lrstream("build", root, "--shard", f"{number}/2", "--json").document()["result"]["path"])
        for number in (1, 2)
    ]
    (directory,) = {place.parent for place in places}
    assert directory.name.endswith(".shards")
    assert [place.name for place in places] == ["shard-00001-of-00002.npz", "shard-00002-of-00002.npz"]
    dry = lrstream("convert", "--merge", directory, "--dry-run", "--json").document()["result"]
    assert not Path(dry["output"]).exists()
    assert dry["output_bytes"] is None
    merged = lrstream("convert", "--merge", *places, "--json").document()["result"]
    assert merged["installed"]
    assert merged["output"] == dry["output"]
    found = lrstream("build", root, "--json").document()["result"]
    assert (found["origin"], found["path"]) == ("cache", merged["output"])
    before = os.stat(merged["output"]).st_ino
    again = lrstream("convert", "--merge", directory, "--json").document()["result"]
    assert again["unchanged"]
    assert os.stat(merged["output"]).st_ino == before
    assert lrstream("build", root, "-o", tmp_path / "single.npz", "--force").code == 0
    assert Path(merged["output"]).read_bytes() == (tmp_path / "single.npz").read_bytes()


def test_a_shard_is_continued_like_any_build(root: Path, tmp_path: Path, lrstream: Program) -> None:
    first = lrstream("build", root, "--shard", "1/2", "--json").document()["result"]
    assert (first["files"], first["reused"]) == (6, 0)
    again = lrstream("build", root, "--shard", "1/2", "--json").document()["result"]
    assert (again["files"], again["reused"], again["requests"]) == (6, 6, 0)
    anew = lrstream("build", root, "--shard", "1/2", "--force", "--json").document()["result"]
    assert (anew["reused"], anew["requests"]) == (0, 6)


def test_what_is_missing_is_named_with_the_command(
    root: Path, tmp_path: Path, lrstream: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = build_shards(lrstream, root, 3, tmp_path / "shards", "--repo-id", "my/set")
    (shards / "2.npz").rename(tmp_path / "2.npz")
    outcome = lrstream("convert", "--merge", shards, "--json")
    (problem,) = outcome.document()["problems"]
    assert (outcome.code, problem["code"]) == (4, "shards-missing")
    assert "1 of 3 shards are missing: 2/3. They hold 4 of 11 video files." in problem["message"]
    command = problem["hint"].partition("merge again: lrstream ")[2].split()
    assert command[:3] == ["build", str(root), "--repo-id"]
    assert lrstream(*command, "-o", shards / "again.npz").code == 0
    assert (shards / "again.npz").read_bytes() == (tmp_path / "2.npz").read_bytes()
    assert lrstream("convert", "--merge", shards).code == 0
    (shards / "1.npz").unlink()
    (shards / "3.npz").unlink()
    (problem,) = lrstream("convert", "--merge", shards, "--json").document()["problems"]
    assert problem["hint"].endswith(
        f'for i in 1 3; do lrstream build {root} --repo-id my/set --shard "$i/3"; done'
    )


def assert_refused(lrstream: Program, text: str, *arguments: str | Path) -> None:
    outcome = lrstream("convert", "--merge", *arguments, "--json").without_traceback()
    (problem,) = outcome.document()["problems"]
    assert (outcome.code, problem["code"]) == (6, "sidecar")
    assert text in problem["message"]


def test_what_does_not_belong_together(root: Path, tmp_path: Path, lrstream: Program) -> None:
    two = build_shards(lrstream, root, 2, tmp_path / "two")
    three = build_shards(lrstream, root, 3, tmp_path / "three")
    other = build_shards(lrstream, root, 2, tmp_path / "other", "--repo-id", "another/name")
    assert lrstream("build", root, "-o", tmp_path / "whole.npz").code == 0
    assert_refused(lrstream, "different divisions: 1/2 and 2/3", two / "1.npz", three / "2.npz")
    assert_refused(lrstream, "repo_id is 'set' in one and", two / "1.npz", other / "2.npz")
    assert_refused(lrstream, "no shard", two / "1.npz", tmp_path / "whole.npz")
    shutil.copy(two / "1.npz", tmp_path / "same.npz")
    assert_refused(lrstream, "both shard 1/2", two / "1.npz", tmp_path / "same.npz", two / "2.npz")
    change_video(root, 3, version=1)
    assert lrstream("build", root, "--shard", "2/2", "-o", tmp_path / "late.npz").code == 0
    assert_refused(lrstream, "videos were changed between the two", two / "1.npz", tmp_path / "late.npz")


def test_shards_that_overlap(root: Path, tmp_path: Path, lrstream: Program) -> None:
    two = build_shards(lrstream, root, 2, tmp_path / "two")
    # The archive of the first shard with the note of the second.
    with zipfile.ZipFile(two / "2.npz") as second:
        note = second.comment
    shutil.copy(two / "1.npz", tmp_path / "false.npz")
    with zipfile.ZipFile(tmp_path / "false.npz", "a") as archive:
        archive.comment = note
    assert ShardNote.decode(note) is not None
    assert_refused(lrstream, "is in two shards", two / "1.npz", tmp_path / "false.npz")


def test_a_damaged_shard_leaves_nothing(root: Path, tmp_path: Path, lrstream: Program) -> None:
    two = build_shards(lrstream, root, 2, tmp_path / "two")
    with zipfile.ZipFile(two / "2.npz") as archive:
        place = archive.getinfo("3/sample_sizes.npy").header_offset
    data = bytearray((two / "2.npz").read_bytes())
    data[place + 80] ^= 0xFF
    (two / "2.npz").write_bytes(data)
    outcome = lrstream("convert", "--merge", two, "-o", tmp_path / "x.npz", "--json")
    assert (outcome.code, outcome.codes()) == (6, ["sidecar"])
    assert not [path for path in tmp_path.iterdir() if "x.npz" in path.name and path.suffix != ".lock"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "SET", "--shard", "0/2"),
        ("build", "SET", "--shard", "3/2"),
        ("build", "SET", "--shard", "1/2", "--push"),
        ("build", "SET", "--shard", "1/2", "--episodes", "0"),
        ("convert", "a.npz", "b.npz"),
        ("convert", "--merge", "a.npz", "--to", "parquet"),
    ],
)
def test_arguments_that_make_no_sense(root: Path, lrstream: Program, arguments: tuple[str, ...]) -> None:
    outcome = lrstream(*(str(root) if word == "SET" else word for word in arguments), "--json")
    assert (outcome.code, outcome.codes()) == (2, ["usage"])


def test_nothing_there(tmp_path: Path, lrstream: Program) -> None:
    (tmp_path / "empty").mkdir()
    for what in ("empty", "nothing.npz"):
        outcome = lrstream("convert", "--merge", tmp_path / what, "--json")
        assert (outcome.code, outcome.codes()) == (4, ["not-found"])


def test_a_branch_and_its_commit_are_one_snapshot(
    loopback_hub: LoopbackHub,
    pristine: Path,
    tmp_path: Path,
    lrstream: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loopback_hub.create_dataset("robots/many", pristine, private=True)
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    hurry_retries(monkeypatch)
    assert lrstream("build", "robots/many", "--revision", "main", "-o", tmp_path / "single.npz").code == 0
    first = lrstream("build", "robots/many", "--revision", "main", "--shard", "1/2", "--json")
    place = Path(first.document()["result"]["path"])
    (problem,) = lrstream("convert", "--merge", place, "--json").document()["problems"]
    # Named by its commit, since the branch may move before somebody runs this.
    command = problem["hint"].partition("merge again: lrstream ")[2].split()
    assert "@" in command[1]
    assert lrstream(*command).code == 0
    assert lrstream("convert", "--merge", place.parent, "-o", tmp_path / "merged.npz").code == 0
    assert (tmp_path / "merged.npz").read_bytes() == (tmp_path / "single.npz").read_bytes()
