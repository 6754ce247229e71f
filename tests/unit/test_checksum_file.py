"""The file of payload checksums and the journal of their making: round trips, damage, belonging."""

from __future__ import annotations

import pickle
import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lrstream.errors import LrstreamError, NotFoundError, SidecarError
from lrstream.sidecar.checksum_file import (
    ChecksumFile,
    FileChecksums,
    checksums_path,
    sidecar_of,
    write_checksums,
)
from lrstream.sidecar.checksum_journal import ChecksumJournal, checksum_journal_path
from lrstream.sidecar.identity import SidecarIdentity, SourceFile

LOCAL = SidecarIdentity(
    "me/set",
    "v3.0",
    "/data/set",
    tuple(SourceFile(f"videos/{number:03}.mp4", 1000 + number) for number in range(7)),
    {f"videos/{number:03}.mp4": f"{number}:1" for number in range(7)},
)
ROOT = "hf://datasets/me/set@"
HUB = SidecarIdentity("me/set", "v3.0", ROOT + "a" * 40, LOCAL.source_files)


def rows(identity: SidecarIdentity = LOCAL, spans: int = 3) -> list[FileChecksums]:
    made = []
    for number, source in enumerate(identity.source_files):
        count = 0 if number == 3 else spans  # a file without any is a row, too
        begins = np.arange(count, dtype=np.float64) / 7 + number
        starts = np.arange(count, dtype=np.int64) * 100
        made.append(
            FileChecksums(
                source.path,
                source.size or 0,
                begins,
                begins + 0.1,
                starts,
                starts + 120,
                np.arange(count, dtype=np.uint32) * 1_234_567 + number,
            )
        )
    return made


def assert_same(found: FileChecksums | None, expected: FileChecksums) -> None:
    assert found is not None
    for name in FileChecksums.__slots__:
        one, other = getattr(found, name), getattr(expected, name)
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype
            assert not one.flags.writeable
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other


@pytest.fixture
def path(tmp_path: Path) -> Path:
    destination = tmp_path / "x.checksums.arrow"
    write_checksums(destination, LOCAL, reversed(rows()))
    return destination


def test_what_is_written_is_read(path: Path) -> None:
    checksums = ChecksumFile(path)
    assert checksums.paths == LOCAL.paths
    assert (len(checksums), checksums.num_spans, checksums.verify()) == (7, 18, 18)
    for row in rows():
        assert_same(checksums.file(row.path), row)
    assert checksums.file("videos/999.mp4") is None
    row = rows()[1]
    assert row.find(100, 220) == 1_234_567 + 1
    assert row.find(100, 219) is None
    assert row.find(101, 220) is None
    assert checksums.mismatches(LOCAL) == []
    copy = pickle.loads(pickle.dumps(checksums))
    assert_same(copy.file("videos/002.mp4"), rows()[2])


def test_any_arrow_tool_reads_it(path: Path) -> None:
    table = pa.ipc.open_file(path).read_all()
    assert table.column("path").to_pylist() == list(LOCAL.paths)
    for row, found in zip(rows(), table.to_pylist(), strict=True):
        assert found["crc32"] == row.crc32.tolist()
        # The checksum of a row, computed from the description of the format alone.
        data = f"{row.path}\0{row.file_size}\0{len(row)}".encode()
        for name, code in (("from_s", "d"), ("to_s", "d"), ("start_byte", "q"), ("stop_byte", "q")):
            data += struct.pack(f"<{len(row)}{code}", *found[name])
        data += struct.pack(f"<{len(row)}I", *found["crc32"])
        assert found["checksum"] == zlib.crc32(data)


def test_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrstream.sidecar.checksum_file._BATCH_ROWS", 2)
    destination = tmp_path / "x.checksums.arrow"
    write_checksums(destination, LOCAL, rows())
    assert pa.ipc.open_file(destination).num_record_batches == 4
    checksums = ChecksumFile(destination)
    for row in rows():
        assert_same(checksums.file(row.path), row)
    assert len(checksums.intervals()) == 18
    assert checksums.file("videos") is None


def test_nothing_in_it(tmp_path: Path) -> None:
    destination = tmp_path / "x.checksums.arrow"
    write_checksums(destination, LOCAL, [])
    checksums = ChecksumFile(destination)
    assert (checksums.paths, checksums.verify(), checksums.file("a")) == ((), 0, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"repo_id": "me/other"}, "repo_id is 'me/set', expected 'me/other'"),
        ({"data_root": "/data/other"}, "data_root"),
        ({"revision": "v3.1"}, "revision is 'v3.0', expected 'v3.1'"),
        (
            {"source_files": (SourceFile("videos/000.mp4", 999), *LOCAL.source_files[1:])},
            "other source files",
        ),
        (
            {"source_fingerprints": {**LOCAL.source_fingerprints, "videos/000.mp4": "0:2"}},
            "other source files, sizes or fingerprints",
        ),
    ],
)
def test_other_sidecars(path: Path, change: dict[str, object], said: str) -> None:
    mismatches = ChecksumFile(path).mismatches(replace(LOCAL, **change))  # type: ignore[arg-type]
    assert len(mismatches) == 1
    assert said in mismatches[0]


def test_names_of_one_commit_share_them(tmp_path: Path) -> None:
    destination = tmp_path / "x.checksums.arrow"
    write_checksums(destination, HUB, rows(HUB))
    checksums = ChecksumFile(destination)
    assert checksums.mismatches(replace(HUB, revision="main")) == []
    assert checksums.mismatches(replace(HUB, data_root=ROOT + "b" * 40, revision="main")) != []


def test_every_changed_byte_is_noticed_or_means_nothing(path: Path) -> None:
    """Arrow files have padding and fields that nobody reads; whatever is read is right or refused."""
    content = path.read_bytes()
    dice = random.Random(1)
    refused = 0
    places = dice.sample(range(len(content)), min(len(content), 700))
    for at in places:
        damaged = bytearray(content)
        damaged[at] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        try:
            checksums = ChecksumFile(path)
            checksums.verify()
            facts = checksums.mismatches(LOCAL)
            found = [checksums.file(name) for name in checksums.paths]
        except LrstreamError:
            refused += 1
            continue
        assert facts == []
        assert len(found) == 7
        for one, other in zip(found, rows(), strict=True):
            assert_same(one, other)
    assert refused > len(places) // 4


def test_a_damaged_file_is_removed_unless_it_is_only_looked_at(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<I", 1_234_567 + 1))
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(SidecarError, match=r"damaged.*videos/001\.mp4.*Remove this file"):
        ChecksumFile(path, remove_damaged=False).verify()
    assert path.exists()
    with pytest.raises(SidecarError, match=r"damaged.*They were removed"):
        ChecksumFile(path).verify()
    with pytest.raises(NotFoundError):
        ChecksumFile(path)


def test_other_files_are_refused_and_stay(tmp_path: Path) -> None:
    other = tmp_path / "index.checksums.arrow"
    table = pa.table({"path": ["a"]})
    with pa.ipc.new_file(other, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(SidecarError, match="no payload checksums of format 1"):
        ChecksumFile(other)
    assert other.exists()


def test_names() -> None:
    archive = Path("/cache/mp4-v3-main-0123456789abcdef.npz")
    companion = checksums_path(archive)
    assert companion.name == "mp4-v3-main-0123456789abcdef.checksums.arrow"
    assert sidecar_of(companion) == archive
    assert checksum_journal_path(archive).name == companion.name + ".journal"


# The journal


def journal_with(tmp_path: Path, count: int) -> ChecksumJournal:
    journal = ChecksumJournal(tmp_path / "x.npz", LOCAL)
    for row in rows()[:count]:
        journal.keep(row)
    journal.close()
    return journal


def test_a_journal_cut_anywhere_has_a_run_of_good_records(tmp_path: Path) -> None:
    path = journal_with(tmp_path, 4).path
    content = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(0, len(content), 3):
        path.write_bytes(content[:cut])
        found = ChecksumJournal(tmp_path / "x.npz", LOCAL).found
        assert len(found) == max(0, sum(end <= cut for end in ends) - 1)
        for name, row in found.items():
            np.testing.assert_array_equal(row.crc32, rows()[LOCAL.paths.index(name)].crc32)


def test_a_journal_goes_on_behind_its_last_good_record(tmp_path: Path) -> None:
    path = journal_with(tmp_path, 2).path
    with path.open("ab") as file:
        file.write(b"torn")
    again = ChecksumJournal(tmp_path / "x.npz", LOCAL)
    for row in rows()[2:]:
        again.keep(row)
    again.close()
    found = ChecksumJournal(tmp_path / "x.npz", LOCAL).found
    assert list(found) == list(LOCAL.paths)
    for row in rows():
        assert found[row.path].checksum() == row.checksum()


def test_changed_bytes_of_a_journal_end_it(tmp_path: Path) -> None:
    path = journal_with(tmp_path, 4).path
    content = path.read_bytes()
    dice = random.Random(2)
    for at in dice.sample(range(len(content)), 200):
        damaged = bytearray(content)
        damaged[at] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        for name, row in ChecksumJournal(tmp_path / "x.npz", LOCAL).found.items():
            assert row.checksum() == rows()[LOCAL.paths.index(name)].checksum()


def test_a_journal_of_another_snapshot_begins_anew(tmp_path: Path) -> None:
    journal_with(tmp_path, 4)
    other = replace(LOCAL, source_fingerprints={**LOCAL.source_fingerprints, "videos/000.mp4": "0:2"})
    journal = ChecksumJournal(tmp_path / "x.npz", other)
    assert journal.found == {}
    journal.keep(rows()[5])
    journal.close()
    assert list(ChecksumJournal(tmp_path / "x.npz", other).found) == ["videos/005.mp4"]
    assert ChecksumJournal(tmp_path / "x.npz", LOCAL).found == {}
