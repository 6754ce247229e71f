"""`lrstream convert`: without loss, all or nothing, nothing outdated (SC-8, SC-9, K34)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from lrstream.demo import WrittenDataset
from lrstream.index.open import MappedIndex
from lrstream.sidecar.archive import ArchiveReader
from tests.cli.program import Program

ARRAYS = (
    "sample_pts",
    "sample_durations",
    "sample_composition_offsets",
    "sample_sizes",
    "sample_offsets",
    "sync_samples",
)


@pytest.fixture
def sidecar(hevc_open_dataset: WrittenDataset, tmp_path: Path, lrstream: Program) -> Path:
    """A sidecar whose source has open GOPs and composition offsets."""
    path = tmp_path / "set.npz"
    assert lrstream("build", hevc_open_dataset.root, "-o", path).code == 0
    return path


def content(path: Path) -> dict[str, Any]:
    """Everything in an archive, as numpy loads it."""
    with np.load(path, allow_pickle=False) as archive:
        found: dict[str, Any] = {name: archive[name] for name in archive.files if name != "manifest_json"}
        found["manifest"] = json.loads(archive["manifest_json"].item())
    return found


def rewritten(path: Path, change: Any) -> Path:
    """A copy of an archive with another manifest."""
    with np.load(path, allow_pickle=False) as archive:
        members = {name: archive[name] for name in archive.files}
    document = json.loads(members["manifest_json"].item())
    change(document)
    members["manifest_json"] = np.array(json.dumps(document).encode())
    other = path.with_name("other.npz")
    np.savez_compressed(other, **members)
    return other


def test_there_and_back_is_without_loss(sidecar: Path, tmp_path: Path, lrstream: Program) -> None:
    index, back = tmp_path / "set.arrow", tmp_path / "back.npz"
    first = lrstream("convert", sidecar, "--json").document()["result"]
    assert (first["source_format"], first["output_format"], first["output"]) == ("npz", "index", str(index))
    assert first["output_bytes"] == index.stat().st_size
    second = lrstream("convert", index, "-o", back, "--json").document()["result"]
    assert (second["source_format"], second["output_format"]) == ("index", "npz")
    before, after = content(sidecar), content(back)
    assert before.keys() == after.keys()
    assert before.pop("manifest") == after.pop("manifest")
    for name, array in before.items():
        assert array.dtype == after[name].dtype
        np.testing.assert_array_equal(array, after[name], strict=True)
    assert len(before) == len(ARRAYS) * first["num_sources"]
    assert (
        sum(before[f"{number}/sample_pts"].size for number in range(first["num_sources"]))
        == (first["num_frames"])
    )


def test_parquet_has_a_row_for_every_sample(sidecar: Path, tmp_path: Path, lrstream: Program) -> None:
    output = tmp_path / "samples.parquet"
    assert lrstream("convert", sidecar, "--to", "parquet", "-o", output).code == 0
    table = pq.read_table(output)
    expected = content(sidecar)
    files = [entry["file_path"] for entry in expected["manifest"]["files"]]
    assert table.num_rows == sum(expected[f"{number}/sample_pts"].size for number in range(len(files)))
    assert json.loads(table.schema.metadata[b"lrstream.sidecar"]) == expected["manifest"]["sidecar"]
    paths = np.array(table["file_path"].to_pylist())
    columns = ("pts_s", "duration_ticks", "composition_offset_ticks", "size_bytes", "offset_bytes")
    for number, path in enumerate(files):
        rows = table.filter((paths == path).tolist())
        for column, array in zip(columns, ARRAYS[:-1], strict=True):
            np.testing.assert_array_equal(rows[column].to_numpy(), expected[f"{number}/{array}"])
        np.testing.assert_array_equal(rows["sample"].to_numpy(), np.arange(rows.num_rows))
        np.testing.assert_array_equal(
            np.flatnonzero(rows["is_sync"].to_numpy()), expected[f"{number}/sync_samples"]
        )
        entry = expected["manifest"]["files"][number]["mp4"]
        assert set(rows["codec"].to_pylist()) == {entry["codec"]}
        assert set(rows["timescale"].to_pylist()) == {entry["timescale"]}


def test_a_dry_run_checks_and_writes_nothing(sidecar: Path, tmp_path: Path, lrstream: Program) -> None:
    before = sorted(tmp_path.iterdir())
    outcome = lrstream("convert", sidecar, "--dry-run", "--json")
    result = outcome.document()["result"]
    assert (outcome.code, result["is_dry_run"], result["output_bytes"]) == (0, True, None)
    assert result["num_frames"] > 0
    assert "not written (dry run)" in lrstream("convert", sidecar, "--dry-run").out
    assert sorted(tmp_path.iterdir()) == before
    data = bytearray(sidecar.read_bytes())
    data[len(data) // 2] ^= 0xFF
    sidecar.write_bytes(data)
    assert lrstream("convert", sidecar, "--dry-run", "--json").codes() == ["sidecar"]


def test_an_existing_output_is_kept_unless_forced(sidecar: Path, tmp_path: Path, lrstream: Program) -> None:
    output = tmp_path / "set.arrow"
    output.write_bytes(b"precious")
    outcome = lrstream("convert", sidecar, "--json")
    assert (outcome.code, outcome.codes()) == (2, ["usage"])
    assert "--force" in outcome.document()["problems"][0]["hint"]
    assert output.read_bytes() == b"precious"
    assert lrstream("convert", sidecar, "--force").code == 0
    assert MappedIndex(output).paths
    assert lrstream("convert", output, "-o", output, "--force", "--json").code == 2
    assert lrstream("convert", sidecar, "--to", "npz", "--json").code == 2
    assert lrstream("convert", sidecar, "-o", tmp_path, "--json").code == 2
    assert lrstream("convert", sidecar, "-o", tmp_path / "absent" / "x.arrow", "--json").code == 4


def test_a_damaged_source_leaves_the_old_output(sidecar: Path, tmp_path: Path, lrstream: Program) -> None:
    output = tmp_path / "set.arrow"
    output.write_bytes(b"old")
    broken = rewritten(sidecar, lambda document: document["files"][-1]["mp4"].update(timescale=0))
    outcome = lrstream("convert", broken, "-o", output, "--force", "--json")
    assert (outcome.code, outcome.codes()) == (6, ["sidecar"])
    assert output.read_bytes() == b"old"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("version", [1, 2])
def test_older_schemas_are_refused_with_the_remedy(sidecar: Path, lrstream: Program, version: int) -> None:
    def change(document: dict[str, Any]) -> None:
        document["version"] = version
        document["sidecar"]["schema_version"] = version

    for command in (["convert"], ["inspect", "sidecar"]):
        outcome = lrstream(*command, rewritten(sidecar, change), "--json")
        assert outcome.code == 6
        [problem] = outcome.document()["problems"]
        assert f"schema version {version}" in problem["message"]
        assert "lrstream build" in problem["hint"]


def test_a_bucket_without_fingerprints_is_refused(sidecar: Path, lrstream: Program) -> None:
    def change(document: dict[str, Any]) -> None:
        document["sidecar"]["data_root"] = "hf://buckets/owner/name"
        document["sidecar"]["source_fingerprints"] = {}

    other = rewritten(sidecar, change)
    outcome = lrstream("convert", other, "--json")
    assert (outcome.code, outcome.codes()) == (6, ["sidecar"])
    assert "without fingerprints" in outcome.document()["problems"][0]["message"]
    assert not other.with_suffix(".arrow").exists()
    report = lrstream("inspect", "sidecar", other, "--json").document()["result"]
    assert report["is_publishable"] is False


def test_readers_outlive_the_replacement_of_their_index(
    sidecar: Path, standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program
) -> None:
    output = tmp_path / "set.arrow"
    assert lrstream("convert", sidecar).code == 0
    reader = MappedIndex(output)
    path = reader.paths[0]
    with ArchiveReader(sidecar) as archive:
        expected = archive.track(path)
    before = reader.track(path).samples
    assert lrstream("build", standard_dataset.root, "-o", sidecar, "--force").code == 0
    assert lrstream("convert", sidecar, "--force").code == 0
    assert MappedIndex(output).paths != reader.paths
    # Arrays that were handed out, and new ones from the same mapping.
    np.testing.assert_array_equal(before.pts_s, expected.samples.pts_s)
    np.testing.assert_array_equal(reader.track(reader.paths[-1]).samples.pts_s[:1] >= 0, [True])
    np.testing.assert_array_equal(reader.track(path).samples.offsets_bytes, expected.samples.offsets_bytes)
