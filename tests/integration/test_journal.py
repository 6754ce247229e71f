"""The journal of unfinished builds (SC-13): whatever ends a build, the next one goes on from there."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from lrstream.demo import WrittenDataset
from lrstream.errors import InputError, SidecarError
from lrstream.layout.layout import DatasetLayout, load_layout
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.build import BuildReport
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from lrstream.sidecar.journal import BuildJournal, JournalRecords, journal_path
from lrstream.sidecar.resolve import build_locked, resolve_sidecar
from lrstream.sidecar.resumable import BuildInterrupt, BuildOptions
from lrstream.storage.store import DatasetStore
from tests.integration.test_build import CountingStore, assert_like_ffmpeg, video_paths
from tests.support import faults
from tests.support.datasets import copy_dataset
from tests.support.shared import PROJECT
from tests.support.tracks import assert_same_track, identity_of, make_tracks

TRACKS = make_tracks(5, num_samples=12)
IDENTITY = identity_of(TRACKS)


def fill(destination: Path, tracks: list[TrackIndex] = TRACKS, identity: SidecarIdentity = IDENTITY) -> Path:
    journal = BuildJournal(destination, identity)
    for track in tracks:
        journal.keep(track, identity.source_fingerprints[track.file_path])
    journal.close()
    return journal.path


def found(destination: Path, identity: SidecarIdentity = IDENTITY) -> list[TrackIndex]:
    journal = BuildJournal(destination, identity)
    try:
        readers = [
            journal.find(source, identity.source_fingerprints.get(source.path))
            for source in identity.source_files
        ]
        records = [read() for read in readers if read is not None]
    finally:
        journal.close()
    return [record for record in records if record is not None]


# The file --------------------------------------------------------------------------------------------


def test_records_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = fill(tmp_path / "x.npz")
    assert path == journal_path(tmp_path / "x.npz") == tmp_path / "x.npz.journal"
    for one, other in zip(found(tmp_path / "x.npz"), TRACKS, strict=True):
        assert_same_track(one, other)


def test_it_is_a_plain_zstandard_file_with_checksums(tmp_path: Path) -> None:
    data = fill(tmp_path / "x.npz").read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
        content = reader.read()
    assert all(track.file_path.encode() in content for track in TRACKS)
    frame = data.index(b"\x28\xb5\x2f\xfd")
    assert zstandard.get_frame_parameters(data[frame:]).has_checksum


def test_nothing_is_written_before_the_first_record(tmp_path: Path) -> None:
    journal = BuildJournal(tmp_path / "x.npz", IDENTITY)
    journal.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tail", [b"", b"\0" * 700, b"\x5c\x2a\x4d\x18", b"\xff" * 100])
def test_torn_at_any_byte(tmp_path: Path, tail: bytes) -> None:
    """After a power failure: a file cut anywhere, and perhaps blocks of zeros that were never written."""
    destination = tmp_path / "x.npz"
    path = fill(destination)
    whole = path.read_bytes()
    ends = []
    for count in range(1, len(TRACKS) + 1):
        path.unlink()
        ends.append(len(fill(destination, TRACKS[:count]).read_bytes()))
    step = 3 if not tail else 41
    for cut in range(0, len(whole), step):
        path.write_bytes(whole[:cut] + tail)
        survivors = sum(end <= cut for end in ends)
        assert len(found(destination)) == survivors, cut
        if cut % (17 * step) == 0:
            # And it is continued there.
            fill(destination, TRACKS[survivors:])
            assert len(found(destination)) == len(TRACKS)
            assert path.read_bytes() == whole


def test_flipped_bytes_never_give_another_record(tmp_path: Path) -> None:
    destination = tmp_path / "x.npz"
    path = fill(destination)
    whole, dice = path.read_bytes(), random.Random(3)
    for _ in range(300):
        data = bytearray(whole)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        for record in found(destination):
            assert_same_track(record, next(t for t in TRACKS if t.file_path == record.file_path))


def test_threads_write_whole_records(tmp_path: Path) -> None:
    tracks = make_tracks(60, num_samples=30)
    identity = identity_of(tracks)
    journal = BuildJournal(tmp_path / "x.npz", identity)

    def write(part: list[TrackIndex]) -> None:
        for track in part:
            journal.keep(track, identity.source_fingerprints[track.file_path])

    threads = [threading.Thread(target=write, args=(tracks[number::6],)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert len(found(tmp_path / "x.npz", identity)) == 60


# What is used again --------------------------------------------------------------------------------------


def test_other_content_is_not_used(tmp_path: Path) -> None:
    destination = tmp_path / "x.npz"
    fill(destination)
    path = TRACKS[1].file_path
    changed = dict(IDENTITY.source_fingerprints) | {path: "9:9"}
    assert [
        track.file_path for track in found(destination, identity_of(TRACKS, source_fingerprints=changed))
    ] == [track.file_path for track in TRACKS if track.file_path != path]
    sizes = tuple(SourceFile(track.file_path, track.file_size + (track is TRACKS[2])) for track in TRACKS)
    assert len(found(destination, identity_of(TRACKS, source_files=sizes))) == len(TRACKS) - 1


def test_another_root_begins_anew(tmp_path: Path) -> None:
    destination = tmp_path / "x.npz"
    fill(destination)
    other = identity_of(TRACKS, data_root="/elsewhere")
    assert found(destination, other) == []
    fill(destination, TRACKS[:1], other)
    assert len(found(destination, other)) == 1
    assert found(destination) == []


def test_without_identity_of_the_content_only_pinned_roots_are_continued(tmp_path: Path) -> None:
    for root, expected in (("https://host/x", 0), ("hf://datasets/a/b@" + "c" * 40, len(TRACKS))):
        destination = tmp_path / f"{expected}.npz"
        identity = identity_of(TRACKS, data_root=root, source_fingerprints={})
        journal = BuildJournal(destination, identity)
        for track in TRACKS:
            journal.keep(track, None)
        journal.close()
        assert len(found(destination, identity)) == expected
        assert journal_path(destination).exists() == bool(expected)


def frame(content: bytes, length: int | None = None, **options: Any) -> bytes:
    packed = zstandard.ZstdCompressor(3, write_checksum=True, **options).compress(content)
    return struct.pack("<III", 0x184D2A5C, 4, len(packed) if length is None else length) + packed


HEADER = json.dumps({"format": 1, "data_root": IDENTITY.data_root}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04" * 20,
        frame(b"[]"),
        frame(b"\xff\xfe"),
        frame(b"[" * 100_000),
        frame(json.dumps({"format": 2, "data_root": IDENTITY.data_root}).encode()),
        frame(HEADER, 1 << 31),
        frame(HEADER) + frame(b""),
        frame(HEADER) + frame(b"\xff\xff\xff\xff"),
        frame(HEADER) + frame(struct.pack("<I", 2) + b"{}"),
        frame(HEADER) + frame(HEADER),
        frame(HEADER) + frame(bytes(1 << 24)),
        frame(HEADER) + zstandard.ZstdCompressor().compress(HEADER),
        frame(HEADER) + frame(HEADER, write_content_size=False),
    ],
)
def test_a_file_that_is_no_journal_is_written_over(tmp_path: Path, data: bytes) -> None:
    destination = tmp_path / "x.npz"
    journal_path(destination).write_bytes(data)
    assert found(destination) == []
    fill(destination)
    assert len(found(destination)) == len(TRACKS)


def test_a_record_that_contradicts_itself_is_read_again(tmp_path: Path) -> None:
    """Its checksum is right, so whoever wrote it was wrong: the same checks as for an archive."""
    destination = tmp_path / "x.npz"
    track = TRACKS[0]
    offsets = track.samples.offsets_bytes.copy()
    track.samples.offsets_bytes[3] = track.file_size
    try:
        fill(destination, [track])
    finally:
        track.samples.offsets_bytes[:] = offsets
    records = JournalRecords(journal_path(destination), IDENTITY.data_root)
    assert len(records) == 1
    source, fingerprint = IDENTITY.source_files[0], IDENTITY.source_fingerprints[track.file_path]
    read = records.find(source, fingerprint, is_pinned=False)
    assert read is not None
    assert read() is None
    records.close()


# Builds --------------------------------------------------------------------------------------------------


class Broken(Exception):
    """Something that ends a build without order."""


@pytest.fixture
def dataset(demo_dataset: WrittenDataset, tmp_path: Path) -> Path:
    return copy_dataset(demo_dataset, tmp_path / "d")


def opened(root: Path, on_open: Callable[[str], None] | None = None) -> tuple[CountingStore, DatasetLayout]:
    store = CountingStore(root, on_open)
    return store, load_layout(store)


def build(store: DatasetStore, layout: DatasetLayout, destination: Path, **changes: Any) -> BuildReport:
    return build_locked(
        store, layout, destination=destination, workers=1, options=BuildOptions(reuse=False, **changes)
    )


def break_at(number: int, error: BaseException) -> Callable[[str], None]:
    count = iter(range(1000))

    def on_open(path: str) -> None:
        if next(count) == number:
            raise error

    return on_open


@pytest.mark.parametrize("done", range(6))
def test_a_broken_build_goes_on_where_it_was(dataset: Path, tmp_path: Path, done: int) -> None:
    destination, files = tmp_path / "out" / "x.npz", video_paths(dataset)
    with pytest.raises(Broken):
        build(*opened(dataset, break_at(done, Broken())), destination)
    assert not destination.exists()
    store, layout = opened(dataset)
    report = build(store, layout, destination)
    assert store.opened == files[done:]
    assert report.num_reused == done
    assert report.requests == len(files) - done
    assert_like_ffmpeg(destination, dataset)
    assert sorted(os.listdir(destination.parent)) == ["x.npz", "x.npz.lock"]


def test_the_archive_is_the_same_as_without_interruption(dataset: Path, tmp_path: Path) -> None:
    build(*opened(dataset), tmp_path / "whole.npz")
    for done in range(5):
        with pytest.raises(Broken):
            build(*opened(dataset, break_at(1, Broken())), tmp_path / "x.npz")
        assert len(JournalRecords(journal_path(tmp_path / "x.npz"), str(dataset))) == done + 1
    build(*opened(dataset), tmp_path / "x.npz")
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_no_resume(dataset: Path, tmp_path: Path) -> None:
    destination = tmp_path / "x.npz"
    with pytest.raises(Broken):
        build(*opened(dataset, break_at(4, Broken())), destination)
    with pytest.raises(Broken):
        build(*opened(dataset, break_at(4, Broken())), destination, resume=False)
    assert not journal_path(destination).exists()
    store, layout = opened(dataset)
    build(store, layout, destination, resume=False)
    assert store.opened == video_paths(dataset)


def test_ctrl_c_says_how_to_go_on(dataset: Path, tmp_path: Path) -> None:
    destination = tmp_path / "x.npz"
    with pytest.raises(BuildInterrupt) as caught:
        build(*opened(dataset, break_at(4, KeyboardInterrupt())), destination)
    assert "4 of 6 video files" in caught.value.hint
    with pytest.raises(BuildInterrupt) as caught:
        build(*opened(dataset, break_at(4, KeyboardInterrupt())), destination, resume=False)
    assert "begins again" in caught.value.hint


def test_repairing_a_bad_file_does_not_mean_reading_the_good_ones_again(
    dataset: Path, tmp_path: Path
) -> None:
    """In the cache the name changes with each fingerprint; the journal is found all the same."""
    files = video_paths(dataset)
    good = (dataset / files[3]).read_bytes()
    faults.lfs_pointer(dataset / files[3])
    with pytest.raises(InputError, match="Git LFS pointer"):
        resolve_sidecar(*opened(dataset), home=tmp_path)
    journals = list(tmp_path.glob("streaming-sidecars/*/*.journal"))
    assert len(journals) == 1
    (dataset / files[3]).write_bytes(good)
    store, layout = opened(dataset)
    resolved = resolve_sidecar(store, layout, home=tmp_path)
    assert store.opened == [files[3]]
    assert resolved.path.with_name(resolved.path.name + ".journal") != journals[0]
    assert_like_ffmpeg(resolved.path, dataset)
    assert list(tmp_path.glob("streaming-sidecars/*/*.journal")) == []


def test_a_damaged_journal_costs_reading_and_nothing_else(dataset: Path, tmp_path: Path) -> None:
    destination = tmp_path / "x.npz"
    with pytest.raises(Broken):
        build(*opened(dataset, break_at(5, Broken())), destination)
    data = bytearray(journal_path(destination).read_bytes())
    data[len(data) // 2] ^= 255
    journal_path(destination).write_bytes(data)
    store, layout = opened(dataset)
    report = build(store, layout, destination)
    assert 0 < report.num_reused < 5
    assert len(store.opened) == 6 - report.num_reused
    assert_like_ffmpeg(destination, dataset)


# The program -----------------------------------------------------------------------------------------------

_SLOW = """
import os, sys, time
from lrstream.sidecar import build
index_source = build.index_source
def slow(store, source, **options):
    with open(os.environ["OPENED"], "a") as file:
        file.write(source.path + "\\n")
    if os.environ.get("STUCK") and source.path.endswith("wrist/chunk-000/file-000.mp4"):
        time.sleep(60)
    time.sleep(0.05)
    return index_source(store, source, **options)
build.index_source = slow
from lrstream.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def start(log: Path, *arguments: str, stuck: bool = False) -> subprocess.Popen[str]:
    environment = os.environ | {"OPENED": str(log), "PYTHONPATH": str(PROJECT), "STUCK": "1" if stuck else ""}
    log.touch()
    return subprocess.Popen(
        [sys.executable, "-c", _SLOW, "build", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(log: Path, count: int) -> None:
    limit = time.monotonic() + 60
    while len(log.read_text().splitlines()) < count:
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_and_the_next_run(dataset: Path, tmp_path: Path, how: signal.Signals) -> None:
    output, log = tmp_path / "x.npz", tmp_path / "log"
    command = (str(dataset), "-o", str(output), "--workers", "1", "--json")
    child = start(log, *command)
    wait_for_lines(log, 4)
    child.send_signal(how)
    out, err = child.communicate(timeout=60)
    assert not output.exists()
    if how != signal.SIGKILL:
        assert child.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[how]
        (problem,) = json.loads(out)["problems"]
        assert problem["code"] == "interrupted"
        assert "Run the same command again" in problem["hint"]
        assert "Traceback" not in err
    else:
        assert child.returncode == -how
    log.write_text("")
    child = start(log, *command)
    out, _ = child.communicate(timeout=60)
    result = json.loads(out)["result"]
    # Three were indexed for certain; the fourth was being read.
    assert len(log.read_text().splitlines()) == 6 - result["reused"] <= 3
    assert_like_ffmpeg(output, dataset)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "x"))) == [
        "x.npz",
        "x.npz.lock",
    ]


def test_a_second_ctrl_c_does_not_wait(dataset: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "x.npz", tmp_path / "log"
    child = start(log, str(dataset), "-o", str(output), "--workers", "2", stuck=True)
    wait_for_lines(log, 4)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        child.communicate(timeout=1.0)  # one file is still being read
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=5)
    assert child.returncode == 130
    build_locked(*opened(dataset), destination=output)
    assert_like_ffmpeg(output, dataset)


def test_a_base_that_is_no_sidecar(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "old.npz").write_bytes(b"PK")
    with pytest.raises(SidecarError):
        build_locked(
            *opened(dataset), destination=tmp_path / "x.npz", options=BuildOptions(base=tmp_path / "old.npz")
        )
    with ArchiveReader(build(*opened(dataset), tmp_path / "x.npz").path) as reader:
        assert reader.verify() > 0
