"""The archive against numpy and json alone, in both directions (SC-2), and what it refuses (K29)."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrstream.errors import DiskFullError, NotFoundError, SidecarError
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar import writer as writer_module
from lrstream.sidecar.archive import ArchiveReader, ArchiveWriter, write_archive
from lrstream.sidecar.install import scratch_file
from lrstream.sidecar.members import check_samples
from lrstream.sidecar.writer import encode_source
from lrstream.sidecar.zip_stream import ZipStream, deflate_member
from tests.support.tracks import (
    assert_same_track,
    identity_of,
    make_track,
    make_tracks,
    plain_arrays,
    plain_manifest,
    replace_member,
    save_plain,
)


@pytest.fixture
def tracks() -> list[TrackIndex]:
    return [
        make_track("videos/a/chunk-000/file-000.mp4", num_samples=61),
        make_track("videos/a/chunk-000/file-001.mp4", num_samples=1, seed=3),
        make_track(
            "videos/b/chunk-000/file-000.mp4", num_samples=90, reordered=True, gop=30, offset_s=-1 / 15
        ),
    ]


@pytest.fixture
def archive(tmp_path: Path, tracks: list[TrackIndex]) -> Path:
    path = tmp_path / "ours.npz"
    write_archive(path, identity_of(tracks), tracks)
    return path


def test_numpy_and_json_read_what_we_write(archive: Path, tracks: list[TrackIndex]) -> None:
    with np.load(archive, allow_pickle=False) as data:
        manifest = data["manifest_json"]
        assert manifest.shape == ()
        assert manifest.dtype.kind == "S"
        assert json.loads(manifest.item().decode("utf-8")) == plain_manifest(identity_of(tracks), tracks)
        expected = plain_arrays(tracks)
        assert set(data.files) == {"manifest_json", *expected}
        for name, array in expected.items():
            assert data[name].dtype == (np.dtype("<f8") if name.endswith("pts") else np.dtype("<i8"))
            np.testing.assert_array_equal(data[name], array, strict=True)
    with zipfile.ZipFile(archive) as members:
        assert members.testzip() is None
        assert {info.compress_type for info in members.infolist()} == {zipfile.ZIP_DEFLATED}


def test_an_archive_written_by_numpy_is_accepted(tmp_path: Path, tracks: list[TrackIndex]) -> None:
    path = tmp_path / "plain.npz"
    save_plain(path, plain_manifest(identity_of(tracks), tracks), plain_arrays(tracks))
    with ArchiveReader(path) as reader:
        assert reader.identity == identity_of(tracks)
        for found, expected in zip(reader.tracks(), tracks, strict=True):
            assert_same_track(found, expected)
        assert reader.verify() == 152


def test_reading_one_track_by_path(archive: Path, tracks: list[TrackIndex]) -> None:
    with ArchiveReader(archive) as reader:
        assert reader.paths == tuple(track.file_path for track in tracks)
        assert_same_track(reader.track(tracks[2].file_path), tracks[2])
        with pytest.raises(ValueError, match="read-only"):
            reader.track(tracks[0].file_path).samples.sizes_bytes[0] = 1
        with pytest.raises(NotFoundError, match=r"file-009\.mp4"):
            reader.track("videos/a/chunk-000/file-009.mp4")


@pytest.mark.parametrize("held_bytes", [0, 20_000, 1 << 20])
def test_finishing_order_does_not_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_bytes: int
) -> None:
    """Whether what is early waits on disk, in memory, or some here and some there."""
    monkeypatch.setattr(writer_module, "_MOST_HELD_BYTES", held_bytes)
    tracks = make_tracks(40)
    first, second = tmp_path / "1.npz", tmp_path / "2.npz"
    write_archive(first, identity_of(tracks), tracks)
    shuffled = tracks.copy()
    random.Random(5).shuffle(shuffled)
    write_archive(second, identity_of(tracks), shuffled)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.npz", "2.npz"]


def test_unknown_sizes_are_filled_in(tmp_path: Path, tracks: list[TrackIndex]) -> None:
    from lrstream.sidecar.identity import SourceFile

    unknown = identity_of(tracks, source_files=tuple(SourceFile(track.file_path) for track in tracks))
    recorded = write_archive(tmp_path / "x.npz", unknown, tracks)
    assert recorded == identity_of(tracks)
    with ArchiveReader(tmp_path / "x.npz") as reader:
        assert reader.identity == identity_of(tracks)


def test_a_dataset_without_videos_has_an_archive_without_files(tmp_path: Path) -> None:
    write_archive(tmp_path / "x.npz", identity_of([]), [])
    with ArchiveReader(tmp_path / "x.npz") as reader:
        assert reader.paths == ()
        assert list(reader.tracks()) == []


def test_writer_refuses_what_does_not_belong(tmp_path: Path, tracks: list[TrackIndex]) -> None:
    path = tmp_path / "x.npz"
    with ArchiveWriter(path, identity_of(tracks)) as writer:
        writer.add(encode_source(1, tracks[1]))
        with pytest.raises(SidecarError, match="twice"):
            writer.add(encode_source(1, tracks[1]))
        with pytest.raises(SidecarError, match="not source 0"):
            writer.add(encode_source(0, tracks[2]))
        with pytest.raises(SidecarError, match="2 of 3 source files were not added"):
            writer.install()
    assert list(tmp_path.iterdir()) == []
    replaced = [make_track(tracks[0].file_path, seed=9)]
    other = identity_of(replaced)
    with ArchiveWriter(path, other) as writer, pytest.raises(SidecarError, match="when the build began"):
        writer.add(encode_source(0, tracks[0]))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupted_write_keeps_the_previous_file(
    archive: Path, tracks: list[TrackIndex], interruption: type[BaseException]
) -> None:
    before = archive.read_bytes()

    def half_a_build() -> None:
        with ArchiveWriter(archive, identity_of(tracks)) as writer:
            writer.add(encode_source(2, tracks[2]))
            raise interruption

    with pytest.raises(interruption):
        half_a_build()
    assert archive.read_bytes() == before
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, tracks: list[TrackIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(self: ZipStream, member: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ZipStream, "append", no_space)
    with ArchiveWriter(tmp_path / "x.npz", identity_of(tracks)) as writer:
        with pytest.raises(DiskFullError, match=r"\d+ bytes are needed, \d+ bytes are free"):
            writer.add(encode_source(0, tracks[0]))
        with pytest.raises(SidecarError, match="has failed before"):
            writer.install()
    assert list(tmp_path.iterdir()) == []


def test_more_members_than_a_plain_zip_can_count(tmp_path: Path) -> None:
    """Above 65,535 members only the ZIP64 end record tells the number; zipfile is the judge."""
    path = tmp_path / "many.zip"
    with path.open("w+b") as file, scratch_file(tmp_path) as scratch:
        stream = ZipStream(file, scratch)
        for number in range(70_000):
            stream.append([deflate_member(f"{number}", b"%d" % number)])
        stream.finish()
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == 70_000
        assert archive.read("69999") == b"69999"


# --- what must be refused ---------------------------------------------------------------------


def npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def forged_header(shape: str, dtype: str = "<i8", data: bytes = b"") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


BAD_ARRAYS: list[tuple[str, bytes | None, str]] = [
    ("0/sample_sizes.npy", None, "13|members"),
    ("0/sample_sizes.npy", npy(np.array([object()] * 61), allow_pickle=True), "Python objects"),
    ("0/sample_sizes.npy", forged_header("(1000000000000,)"), "claims 1000000000000 values"),
    ("0/sample_sizes.npy", forged_header("(-1,)"), "unreadable"),
    ("0/sample_sizes.npy", forged_header("((((((("), "unreadable .npy header"),
    ("0/sample_sizes.npy", b"not an array", "unreadable .npy header"),
    ("0/sample_sizes.npy", npy(np.zeros(60, np.int64)), "different lengths"),
    ("0/sample_sizes.npy", npy(np.zeros((61, 1), np.int64)), "one dimension"),
    ("0/sample_sizes.npy", npy(np.zeros(61, np.int32)), "expected one dimension of int64"),
    ("0/sample_sizes.npy", npy(np.full(61, -1)), "expected a value from 0"),
    ("0/sample_sizes.npy", npy(np.full(61, 2**62)), "expected a value from 0"),
    ("0/sample_offsets.npy", npy(np.full(61, 2**62)), "expected a value from 0"),
    ("0/sample_durations.npy", npy(np.full(61, -5)), "sample_durations"),
    ("0/sample_composition_offsets.npy", npy(np.full(61, 2**40)), "sample_composition_offsets"),
    ("0/sample_pts.npy", npy(np.full(61, np.nan)), "finite"),
    ("0/sample_pts.npy", npy(np.zeros(61, np.int64)), "float64"),
    ("0/sync_samples.npy", npy(np.array([0, 61])), "value from 0 to 60"),
    ("0/sync_samples.npy", npy(np.array([0, 2, 2])), "strictly increasing"),
    ("0/sync_samples.npy", npy(np.array([], np.int64)), "at least one keyframe"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "message"), BAD_ARRAYS)
def test_bad_arrays_are_refused(archive: Path, name: str, data: bytes | None, message: str) -> None:
    replace_member(archive, name, data)
    with pytest.raises(SidecarError, match=message) as caught, ArchiveReader(archive) as reader:
        reader.verify()
    assert str(archive) in str(caught.value)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), SidecarError)


def test_an_offset_whose_sample_ends_beyond_the_file_is_refused(
    archive: Path, tracks: list[TrackIndex]
) -> None:
    offsets = np.array(tracks[0].samples.offsets_bytes)
    offsets[-1] = tracks[0].file_size - 1
    replace_member(archive, "0/sample_offsets.npy", npy(offsets))
    with ArchiveReader(archive) as reader, pytest.raises(SidecarError, match="an end within the file"):
        reader.track(tracks[0].file_path)


def edit(document: dict[str, Any], keys: tuple[Any, ...], value: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(document))
    target: Any = copy
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    return copy


BAD_MANIFESTS: list[tuple[tuple[Any, ...], object, str]] = [
    (("version",), 1, "schema version 1.*must be rebuilt"),
    (("version",), 2, "schema version 2.*composition offsets.*must be rebuilt"),
    (("version",), 4, "schema version 4; this release reads version 3"),
    (("version",), "3", "no usable schema version"),
    (("version",), None, "no usable schema version"),
    (("sidecar",), None, "no identity"),
    (("sidecar", "schema_version"), 2, "schema version 2"),
    (("files",), [], "describes 0 files"),
    (("files", 0), 7, "no object 'mp4'"),
    (("files", 0, "file_path"), "other.mp4", "place of another file"),
    (("files", 0, "file_size"), 1, "two sizes"),
    (("sidecar", "source_files", 0, "size"), 1, "two sizes"),
    (("files", 0, "mp4", "timescale"), 0, "timescale"),
    (("files", 0, "mp4", "timescale"), 1.5, "timescale"),
    (("files", 0, "mp4", "duration"), -1, "duration"),
    (("files", 0, "mp4", "width"), 2**40, "width"),
    (("files", 0, "mp4", "moov_offset"), 2**50, "beyond"),
    (("files", 0, "mp4", "faststart"), 1, "faststart"),
    (("files", 0, "mp4", "codec"), "toolong", "codec"),
    (("files", 0, "mp4", "stsd_body"), "zz", "stsd_body"),
    (("files", 0, "mp4", "stsd_body"), "00", "without an entry"),
    (("files", 0, "mp4", "ftyp"), None, "ftyp"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "value", "message"), BAD_MANIFESTS)
def test_bad_manifests_are_refused(
    tmp_path: Path, tracks: list[TrackIndex], keys: tuple[Any, ...], value: object, message: str
) -> None:
    path = tmp_path / "x.npz"
    save_plain(path, edit(plain_manifest(identity_of(tracks), tracks), keys, value), plain_arrays(tracks))
    with pytest.raises(SidecarError, match=message):
        ArchiveReader(path)


@pytest.mark.parametrize(
    "manifest",
    ["text", [b"{}"], b"{", b"\xff\xfe", b"[" * 5000, b"[]"],
)
def test_a_manifest_that_is_no_json_object_in_bytes_is_refused(tmp_path: Path, manifest: Any) -> None:
    np.savez_compressed(tmp_path / "x.npz", manifest_json=np.array(manifest))
    with pytest.raises(SidecarError):
        ArchiveReader(tmp_path / "x.npz")


def test_additional_members_are_refused(archive: Path) -> None:
    replace_member(archive, "3/sample_pts.npy", npy(np.zeros(1)))
    with pytest.raises(SidecarError, match="3 source files need 19 members, but it has 20"):
        ArchiveReader(archive)


def test_truncated_and_foreign_files_are_refused(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], whole[:10], b"", b"version https://git-lfs"):
        archive.write_bytes(data)
        with pytest.raises(SidecarError, match="not a complete ZIP archive"):
            ArchiveReader(archive)
    with pytest.raises(NotFoundError):
        ArchiveReader(tmp_path / "absent.npz")


def test_a_member_cannot_claim_more_than_deflate_can_hold(archive: Path) -> None:
    """A directory entry that promises 2 GiB from a few bytes is refused before anything is read."""
    data = bytearray(archive.read_bytes())
    entry = data.rindex(b"0/sample_sizes.npy") - 46
    data[entry + 24 : entry + 28] = (2**31).to_bytes(4, "little")
    archive.write_bytes(bytes(data))
    with ArchiveReader(archive) as reader, pytest.raises(SidecarError, match="more than its"):
        reader.verify()


@pytest.mark.parametrize(
    "attribute", ["durations_ticks", "composition_offsets_ticks", "sizes_bytes", "offsets_bytes"]
)
@pytest.mark.parametrize("value", [-(2**63), -(2**31) - 1, -(2**31), -1, 0, 2**32 - 1, 2**32, 2**63 - 1])
def test_each_value_is_held_against_its_limits(attribute: str, value: int) -> None:
    track = make_tracks(1)[0]
    low, high = {
        "durations_ticks": (0, 2**32 - 1),
        "composition_offsets_ticks": (-(2**31), 2**32 - 1),
        "sizes_bytes": (0, 2**32 - 1),
        "offsets_bytes": (0, 2**40),
    }[attribute]
    values = getattr(track.samples, attribute).copy()
    values[len(values) // 2] = value
    samples = replace(track.samples, **{attribute: values})
    if low <= value <= high:
        check_samples(samples, track.file_path, 2**40)
    else:
        with pytest.raises(SidecarError, match=f"has {value} at place"):
            check_samples(samples, track.file_path, 2**40)
