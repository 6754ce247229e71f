"""Checksums of payload on local roots: making them, using them, damage, and those who make them at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lrstream.commands.inspect_cache import inspect_cache
from lrstream.commands.inspect_prune import prune_cache
from lrstream.demo import WrittenDataset
from lrstream.errors import CheckFailedError, LrstreamError, PayloadError, TransferError, UsageError
from lrstream.layout.layout import load_layout
from lrstream.sidecar.checksum_build import ChecksumReport, build_checksums
from lrstream.sidecar.checksum_file import ChecksumFile, FileChecksums, checksums_path, write_checksums
from lrstream.sidecar.checksum_journal import ChecksumJournal, checksum_journal_path
from lrstream.sidecar.lock import ProcessLock, lock_path
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.sidecar.resumable import BuildInterrupt
from lrstream.storage.home import lerobot_home
from lrstream.storage.local import LocalByteSource, LocalStore
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.cli.program import Program
from tests.support.datasets import copy_dataset
from tests.support.loader import assert_same_sample, indices, open_loader
from tests.support.many_files import change_video, write_many_files
from tests.support.remote import spans_by_file

pytestmark = pytest.mark.timeout(120)

FRONT = "observation.images.front"
NAME = "test/dataset"


@pytest.fixture
def lrstream(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


def make(root: Path, *, positions: Any = None, **options: Any) -> tuple[Path, ChecksumReport]:
    """Sidecar and checksums of a local dataset under the name that `open_loader` gives it."""
    store = open_store(parse_location(root))
    layout = load_layout(store)
    archive = resolve_sidecar(store, layout, repo_id=NAME).path
    return archive, build_checksums(store, layout, archive, positions=positions, **options)


def recorded(archive: Path) -> dict[str, FileChecksums]:
    with contextlib.closing(ChecksumFile(checksums_path(archive))) as checksums:
        found = {path: checksums.file(path) for path in checksums.paths}
    return {path: row for path, row in found.items() if row is not None}


def assert_right(archive: Path, root: Path) -> int:
    """Every span has the CRC-32 of the file's bytes, and there are no others; returns how many."""
    expected = {path: set(spans) for path, spans in spans_by_file(root, archive).items()}
    rows = recorded(archive)
    assert rows.keys() == expected.keys()
    for path, row in rows.items():
        data = (root / path).read_bytes()
        assert row.file_size == len(data)
        assert set(zip(row.start_byte.tolist(), row.stop_byte.tolist(), strict=True)) == expected[path]
        for start, stop, crc in zip(row.start_byte, row.stop_byte, row.crc32, strict=True):
            assert int(crc) == zlib.crc32(data[int(start) : int(stop)])
    return sum(map(len, rows.values()))


class Flipper:
    """Changes one bit of what is read of a file, every time or the first few times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str, at: int, bit: int = 0, times: int = -1):
        self.times = times
        self.reads = 0
        real = LocalByteSource.read

        def read(source: LocalByteSource, start: int, stop: int) -> bytes:
            data = real(source, start, stop)
            if not source.path.endswith(path) or not start <= at < stop:
                return data
            self.reads += 1
            if self.times == 0:
                return data
            self.times -= 1
            changed = bytearray(data)
            changed[at - start] ^= 1 << bit
            return bytes(changed)

        monkeypatch.setattr(LocalByteSource, "read", read)


# Making them


@pytest.mark.parametrize("name", ["standard", "h264_open", "hevc", "depth"])
def test_they_are_those_of_the_spans(dataset_cache: Any, name: str) -> None:
    root = dataset_cache.get(name).root
    archive, report = make(root)
    before = archive.read_bytes()
    assert assert_right(archive, root) == report.num_spans
    # The union of all spans is read once, although neighbours overlap.
    covered = 0
    for spans in spans_by_file(root, archive).values():
        at = 0
        for start, stop in sorted(spans):
            covered += max(0, stop - max(start, at))
            at = max(at, stop)
    assert report.bytes_read == covered
    again, second = make(root)
    assert (second.num_reused, second.bytes_read) == (report.num_files, 0)
    assert again.read_bytes() == before, "the sidecar is the same with and without"


@pytest.mark.parametrize("piece", [100, 4096])
def test_pieces_of_any_size_and_reads_ahead(
    standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr("lrstream.sidecar.checksum_pass._PIECE_BYTES", piece)
    for workers in (1, 16):
        archive, _ = make(standard_dataset.root, workers=workers, force=True)
        assert_right(archive, standard_dataset.root)


def test_the_command(standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program) -> None:
    output = tmp_path / "out.npz"
    outcome = lrstream("build", standard_dataset.root, "--checksums", "-o", output, "--json")
    assert outcome.code == 0, outcome.err
    made = outcome.document()["result"]["checksums"]
    assert (made["path"], made["num_spans"]) == (str(checksums_path(output)), 14)
    assert_right(output, standard_dataset.root)
    shown = lrstream("inspect", "sidecar", output)
    assert "14 spans in 7 files" in shown.out
    assert lrstream("validate", output, "--source", standard_dataset.root, "--deep").code == 0
    part = tmp_path / "part.npz"
    outcome = lrstream(
        "build", standard_dataset.root, "--checksums", "--episodes", "0-1", "-o", part, "--json"
    )
    assert outcome.document()["result"]["checksums"]["num_spans"] == 4


def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    root = write_many_files(tmp_path / "many", 30)
    make(root)
    change_video(root, 4, 1)
    archive, report = make(root)
    assert (report.num_files, report.num_reused) == (30, 29)
    assert_right(archive, root)
    assert make(root, force=True)[1].num_reused == 0


def test_a_file_that_cannot_be_read(
    standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error; what was read is kept for the next attempt."""
    real = LocalByteSource.read

    def failing(source: LocalByteSource, start: int, stop: int) -> bytes:
        if "side/chunk-000/file-001" in source.path:
            raise TransferError(f"{source.path}: gone for a while.")
        return real(source, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(LocalByteSource, "read", failing)
        with pytest.raises(TransferError, match=r"file-001\.mp4: gone for a while"):
            make(standard_dataset.root)
    archive, report = make(standard_dataset.root)
    assert (report.num_files, report.num_reused) == (7, 6)
    assert_right(archive, standard_dataset.root)
    assert not checksum_journal_path(archive).exists()


def test_ctrl_c_says_how_to_go_on(standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, kept = ChecksumJournal.keep, []

    def interrupting(journal: ChecksumJournal, row: FileChecksums) -> None:
        keep(journal, row)
        kept.append(row.path)
        if len(kept) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ChecksumJournal, "keep", interrupting)
        with pytest.raises(BuildInterrupt) as caught:
            make(standard_dataset.root, workers=1)
    assert "of 7 video files are read and will not be read again" in caught.value.hint
    archive, report = make(standard_dataset.root, workers=1)
    assert report.num_reused == len(kept) >= 3
    assert_right(archive, standard_dataset.root)


# Using them


def train(loader: DataLoader[Any]) -> tuple[list[int], LrstreamError | None]:
    """Values of ``index``, and the error with which it ended.

    The error comes without its traceback, which would keep the iterator and so its workers.
    """
    found: list[int] = []
    try:
        for batch in loader:
            found.extend(batch)
    except LrstreamError as error:
        return found, error.with_traceback(None)
    return found, None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bit_that_stays_flipped_is_one_error(
    standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    archive, _ = make(standard_dataset.root)
    path = f"videos/{FRONT}/chunk-000/file-001.mp4"
    row = recorded(archive)[path]
    start, stop = int(row.start_byte[1]), int(row.stop_byte[1])
    Flipper(monkeypatch, path, stop - 1, bit=3)
    dataset = open_loader(standard_dataset)
    fork: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=indices, **fork)
    found, error = train(loader)
    assert isinstance(error, PayloadError)
    message = str(error)
    for part in (FRONT, path, "CRC-32 is", f"expected {int(row.crc32[1]):08x}", "read twice", "Restore it"):
        assert part in message
    # Two neighbouring spans may share the byte; the error is of one of them.
    assert "bytes [" in message
    assert len(found) == len(set(found)) < standard_dataset.num_frames
    if num_workers == 0:
        assert dataset.metrics()["payload_checks"]["damaged"] >= 1
        fields = error.fields
        assert fields["start_byte"] <= stop - 1 < fields["stop_byte"]
        assert (fields["camera"], fields["file_path"]) == (FRONT, path)
        assert start < stop
    dataset.close()


def test_a_bit_that_was_flipped_for_a_moment_heals(
    standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = list(open_loader(standard_dataset))
    archive, report = make(standard_dataset.root)
    path = f"videos/{FRONT}/chunk-000/file-000.mp4"
    at = int(recorded(archive)[path].start_byte[0]) + 200
    flipper = Flipper(monkeypatch, path, at, times=1)
    with open_loader(standard_dataset, payload_checksums="require") as dataset, caplog.at_level("WARNING"):
        found = list(dataset)
        checks = dataset.metrics()["payload_checks"]
    assert flipper.times == 0
    for one, other in zip(found, expected, strict=True):
        assert_same_sample(one, other)
    assert checks == {"correct": report.num_spans - 1, "unchecked": 0, "healed": 1, "damaged": 0}
    assert "arrived damaged (CRC-32" in caplog.text
    assert path in caplog.text


def test_off_and_none(
    standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lrstream.loader"), open_loader(standard_dataset) as dataset:
        indices(dataset)
        assert dataset.metrics()["payload_checks"]["unchecked"] == 14
    assert "There are no payload checksums" in caplog.text
    make(standard_dataset.root)
    with open_loader(standard_dataset, payload_checksums="off") as dataset:
        indices(dataset)
        assert dataset.metrics()["payload_checks"]["unchecked"] == 14
    with pytest.raises(UsageError, match=r"payload_checksums is 'sometimes', expected 'auto', 'require' or"):
        open_loader(standard_dataset, payload_checksums="sometimes")


def test_required_ones_that_are_absent(
    standard_dataset: WrittenDataset, image_dataset: WrittenDataset
) -> None:
    with pytest.raises(CheckFailedError, match=r"no payload checksums.*lrstream build --checksums"):
        open_loader(standard_dataset, payload_checksums="require")
    # Without video there is nothing that could be missing.
    open_loader(image_dataset, payload_checksums="require").close()
    open_loader(standard_dataset, episodes=[], payload_checksums="require").close()


def test_some_spans_without(standard_dataset: WrittenDataset, caplog: pytest.LogCaptureFixture) -> None:
    make(standard_dataset.root, positions=np.array([0, 2, 4]))
    with caplog.at_level("WARNING"), open_loader(standard_dataset) as dataset:
        indices(dataset)
        checks = dataset.metrics()["payload_checks"]
    said = [record.message for record in caplog.records if "have no payload checksum" in record.message]
    assert len(said) == 1
    assert "8 of the 14 spans of this selection" in said[0]
    assert "episode 1" in said[0]
    assert (checks["correct"], checks["unchecked"]) == (6, 8)
    with pytest.raises(CheckFailedError, match=r"8 of the 14 spans.*lrstream build --checksums"):
        open_loader(standard_dataset, payload_checksums="require")
    with open_loader(standard_dataset, episodes=[0, 4], payload_checksums="require") as dataset:
        indices(dataset)
        assert dataset.metrics()["payload_checks"]["correct"] == 4
    # Completing them reads only what is missing.
    archive, report = make(standard_dataset.root)
    assert report.num_spans == 14
    assert_right(archive, standard_dataset.root)


def test_damaged_and_foreign_ones(
    standard_dataset: WrittenDataset, tiny_dataset: WrittenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    archive, _ = make(standard_dataset.root)
    companion = checksums_path(archive)
    content = companion.read_bytes()
    for damaged in (b"", content[:200], content[:-100], b"x" * 500):
        companion.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level("WARNING"), open_loader(standard_dataset) as dataset:
            assert len(indices(dataset)) == standard_dataset.num_frames
        assert "are damaged" in caplog.text
        assert not companion.exists()
        companion.write_bytes(damaged)
        with pytest.raises(CheckFailedError, match="damaged"):
            open_loader(standard_dataset, payload_checksums="require")
    other, _ = make(tiny_dataset.root)
    shutil.copy(checksums_path(other), companion)
    caplog.clear()
    with caplog.at_level("WARNING"), open_loader(standard_dataset) as dataset:
        indices(dataset)
        assert dataset.metrics()["payload_checks"]["unchecked"] == 14
    assert "belongs to another sidecar" in caplog.text
    assert companion.exists()
    assert make(standard_dataset.root)[1].num_reused == 0
    assert_right(archive, standard_dataset.root)


def test_a_replaced_video_takes_its_checksums_out_of_use(
    standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "d")
    make(root)
    path = root / "videos" / FRONT / "chunk-000/file-000.mp4"
    path.write_bytes(path.read_bytes())  # the same bytes, but nobody can know
    with open_loader(root) as dataset:
        assert len(indices(dataset)) == standard_dataset.num_frames
        assert dataset.metrics()["payload_checks"]["correct"] == 0
    _, report = make(root)
    assert (report.num_reused, report.num_files) == (6, 7)


# Looking at them


def test_validate(
    standard_dataset: WrittenDataset, tmp_path: Path, lrstream: Program, monkeypatch: Any
) -> None:
    root = standard_dataset.root
    output = tmp_path / "x.npz"
    assert lrstream("build", root, "-o", output, "--checksums").code == 0
    companion = checksums_path(output)

    def outcome(*options: str) -> tuple[int, list[str], dict[str, Any]]:
        found = lrstream("validate", output, "--source", root, "--no-rows", "--json", *options)
        return found.code, found.codes(), found.document()["result"]

    code, codes, result = outcome("--deep", "--sample", "1")
    assert (code, codes, result["spans_compared"]) == (0, [], 14)
    with monkeypatch.context() as patch:
        row = next(iter(recorded(output).values()))
        Flipper(patch, row.path, int(row.start_byte[0]) + 5, times=1)
        assert outcome("--deep", "--sample", "1")[:2] == (0, []), "a flip that passes is no finding"
        Flipper(patch, row.path, int(row.start_byte[0]) + 5)
        code, codes, _ = outcome("--deep", "--sample", "1")
        assert code == 3
        assert "payload-differs" in codes
    content = companion.read_bytes()
    companion.write_bytes(content[: len(content) // 2])
    assert outcome()[:2] == (3, ["checksums-invalid"])
    assert companion.exists(), "looking removes nothing"
    rows = recorded_rows(content, tmp_path)
    store = open_store(parse_location(root))
    identity = resolve_sidecar(store, load_layout(store)).identity
    write_checksums(companion, identity, rows[1:])
    code, codes, result = outcome()
    assert (code, codes) == (0, ["checksums-incomplete"])
    write_checksums(companion, replace(identity, repo_id="somebody/else"), rows)
    assert outcome()[:2] == (0, ["checksums-mismatch"])
    assert "not used: repo_id" in lrstream("inspect", "sidecar", output).out


def recorded_rows(content: bytes, directory: Path) -> list[FileChecksums]:
    copy = directory / "copy.checksums.arrow"
    copy.write_bytes(content)
    checksums = ChecksumFile(copy)
    return [row for path in checksums.paths if (row := checksums.file(path)) is not None]


def test_cache_and_prune(tmp_path: Path) -> None:
    root = write_many_files(tmp_path / "many", 3)
    old, _ = make(root)
    time.sleep(0.02)
    change_video(root, 1, 1)
    new, _ = make(root)
    orphan = checksums_path(new.with_name("mp4-v3-gone-0000000000000000.npz"))
    shutil.copy(checksums_path(new), orphan)
    damaged = checksums_path(new.with_name("mp4-v3-bad-0000000000000000.npz"))
    damaged.write_bytes(b"nothing")

    def states() -> dict[Path, tuple[str, bool]]:
        report = inspect_cache(idle_s=0)
        return {entry.path: (entry.state, entry.is_removable) for entry in report.entries}

    found = states()
    assert found[checksums_path(new)] == ("current", False)
    assert found[checksums_path(old)] == ("superseded", True)
    assert found[orphan] == ("orphan", True)
    assert found[damaged] == ("damaged", True)
    assert damaged.exists()
    with ProcessLock(lock_path(old)) as lock:
        lock.acquire(0)
        pruned = prune_cache(inspect_cache(idle_s=0))
        assert (checksums_path(old), "it is being made just now") in pruned.kept
    prune_cache(inspect_cache(idle_s=0))
    left = list((lerobot_home() / "streaming-sidecars").rglob("*.arrow"))
    assert left == [checksums_path(new)]


# Several at once, and sudden ends


class SlowStore(LocalStore):
    """Notes every video that is opened in a file that survives the process, and takes its time.

    With a limit it waits for ever where one more would be opened: to be killed there.
    """

    def __init__(self, root: Path, log: Path, limit: int | None = None) -> None:
        super().__init__(parse_location(root))
        self._log = log
        self._allowed = None if limit is None else threading.Semaphore(limit)

    def open(self, path: str, size: int | None = None) -> LocalByteSource:
        if path.endswith(".mp4"):
            if self._allowed is not None:
                self._allowed.acquire()
            time.sleep(0.02)
            descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, b"x")
            os.close(descriptor)
        return super().open(path, size)


@contextlib.contextmanager
def child(root: Path, archive: Path, log: Path, limit: int | None = None) -> Iterator[Any]:
    def work() -> None:
        code = 1
        try:
            store = SlowStore(root, log, limit)
            build_checksums(store, load_layout(store), archive, workers=2)
            code = 0
        finally:
            os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    try:
        yield process
    finally:
        process.join(60)


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Each file is read once, and those in hand at each kill; what is there is complete or absent."""
    most_opened = 4
    root = write_many_files(tmp_path / "many", 40)
    store = open_store(parse_location(root))
    archive = resolve_sidecar(store, load_layout(store), repo_id=NAME).path
    log, dice = tmp_path / "log", random.Random(1)
    log.touch()
    kills = 0
    for _ in range(int(os.environ.get("LRSTREAM_KILLS", "8"))):
        limit, before = dice.randint(1, most_opened), log.stat().st_size
        with child(root, archive, log, limit) as process:
            # It cannot get further, unless that is the end of its work.
            while log.stat().st_size < before + limit and process.is_alive():
                time.sleep(0.001)
            time.sleep(dice.uniform(0.0, 0.01))
            os.kill(process.pid, signal.SIGKILL)
        if process.exitcode == 0:
            break
        kills += 1
        if checksums_path(archive).exists():
            ChecksumFile(checksums_path(archive)).verify()
    with child(root, archive, log) as process:
        pass
    assert process.exitcode == 0
    assert_right(archive, root)
    # None of these could finish: fewer files than there are had been opened.
    assert kills >= min(int(os.environ.get("LRSTREAM_KILLS", "8")), 39 // most_opened)
    # Two threads have a file in hand each.
    assert 40 <= len(log.read_bytes()) <= 40 + 2 * kills
    prune_cache(inspect_cache())
    names = {path.name for path in archive.parent.iterdir()}
    assert not [name for name in names if name.endswith((".tmp", ".journal"))]


def test_two_at_the_same_time(tmp_path: Path) -> None:
    root = write_many_files(tmp_path / "many", 20)
    store = open_store(parse_location(root))
    archive = resolve_sidecar(store, load_layout(store), repo_id=NAME).path
    log = tmp_path / "log"
    with child(root, archive, log) as one, child(root, archive, log) as other:
        pass
    assert (one.exitcode, other.exitcode) == (0, 0)
    assert len(log.read_bytes()) == 20, "the second one waited and used what the first one had made"
    assert_right(archive, root)


def test_training_does_not_wait_for_the_pass(
    standard_dataset: WrittenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    archive, _ = make(standard_dataset.root)
    checksums_path(archive).unlink()
    with ProcessLock(lock_path(archive)) as lock:
        lock.acquire(0)
        with open_loader(standard_dataset) as dataset:
            assert len(indices(dataset)) == standard_dataset.num_frames


def test_no_error_escapes_the_tree(standard_dataset: WrittenDataset) -> None:
    """A companion that is damaged while workers have it open is one clear error."""
    archive, _ = make(standard_dataset.root)
    dataset = open_loader(standard_dataset)
    companion = checksums_path(archive)
    content = bytearray(companion.read_bytes())
    row = next(iter(recorded(archive).values()))
    at = content.index(row.crc32.tobytes())
    content[at] ^= 1
    companion.write_bytes(content)
    with pytest.raises(LrstreamError, match="damaged") as caught:
        indices(dataset)
    assert caught.value.code == "sidecar"
    dataset.close()
