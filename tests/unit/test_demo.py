"""Demonstration datasets: the layout is LeRobot's, and every picture says which one it is."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lrstream.demo import (
    EXTRA_KEYS,
    DemoCamera,
    DemoSpec,
    Painter,
    WrittenDataset,
    depth_codes,
    read_identities,
    read_identity,
    write_dataset,
)
from lrstream.demo import video as demo_video
from lrstream.errors import UsageError
from tests.support.datasets import SPECS, DatasetCache
from tests.support.reference import frame_to_array
from tests.support.shared import requires_shared, shared_dataset

Array = NDArray[Any]


def decode(path: Path, pixel_format: str = "rgb24") -> tuple[Array, list[float]]:
    """All pictures of a file and their times, in presentation order, by FFmpeg's demuxer."""
    pictures, times = [], []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            assert frame.time is not None
            pictures.append(frame_to_array(frame, pixel_format))
            times.append(frame.time)
    return np.stack(pictures), times


def packet_times(path: Path) -> list[tuple[int, bool]]:
    """(pts, keyframe) of all packets of a file in decode order."""
    with av.open(str(path)) as container:
        return [
            (packet.pts, packet.is_keyframe)
            for packet in container.demux(container.streams.video[0])
            if packet.pts is not None and packet.size
        ]


def top_level_boxes(path: Path) -> list[bytes]:
    """Types of the boxes of a file that has no 64-bit sizes."""
    data, offset, types = path.read_bytes(), 0, []
    while offset < len(data):
        types.append(data[offset + 4 : offset + 8])
        offset += int.from_bytes(data[offset : offset + 4], "big")
    return types


def episode_rows(written: WrittenDataset) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in sorted((written.root / "meta/episodes").glob("*/*.parquet")):
        rows.extend(pq.read_table(path).to_pylist())
    return rows


def data_rows(written: WrittenDataset) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in written.data_files:
        rows.extend(pq.read_table(written.root / path).to_pylist())
    return rows


class TestIdentity:
    @given(st.integers(0, 15), st.integers(0, 255), st.integers(0, 4095), st.booleans())
    def test_what_was_painted_is_read(self, camera: int, episode: int, frame: int, planar: bool) -> None:
        picture = Painter(camera, 16, 96, seed=3).paint(episode, frame)
        assert picture.shape == (16, 96, 3)
        assert read_identity(picture.transpose(2, 0, 1) if planar else picture) == (camera, episode, frame)

    def test_the_bits_are_where_the_format_says(self) -> None:
        picture = Painter(0b0001, 24, 104, seed=0).paint(0b10000001, 0b100000000010)
        bright = [(picture[8 * (bit // 12) + 4, 8 * (bit % 12) + 4] == 255).all() for bit in range(24)]
        assert [bit for bit in range(24) if bright[bit]] == [0, 4, 11, 13, 23]

    def test_batches_and_windows_keep_their_leading_shape(self) -> None:
        painter = Painter(2, 32, 100, seed=0)
        pictures = np.stack([painter.paint(7, frame).transpose(2, 0, 1) for frame in range(6)])
        expected = np.array([(2, 7, frame) for frame in range(6)])
        np.testing.assert_array_equal(read_identities(pictures), expected)
        np.testing.assert_array_equal(
            read_identities(pictures.reshape(2, 3, 3, 32, 100)), expected.reshape(2, 3, 3)
        )

    @pytest.mark.parametrize(
        "pictures",
        [
            np.zeros((3, 16, 96), np.float32),
            np.zeros((16, 96), np.uint8),
            np.zeros((1, 16, 96), np.uint8),
            np.zeros((3, 8, 96), np.uint8),
            np.zeros((16, 64, 3), np.uint8),
        ],
    )
    def test_pictures_without_an_identity_are_refused(self, pictures: Array) -> None:
        with pytest.raises(UsageError, match=r"[Ii]dentit"):
            read_identities(pictures)

    def test_one_picture_is_not_a_batch(self) -> None:
        with pytest.raises(UsageError, match="three dimensions"):
            read_identity(np.zeros((1, 3, 16, 96), np.uint8))

    @requires_shared
    @pytest.mark.parametrize(
        ("name", "key", "camera"),
        [
            ("av1_two_cameras", "top", 0),
            ("av1_two_cameras", "wrist", 1),
            ("h264_bframes_gop30", "front", 0),
            ("hevc_gop12", "front", 0),
            ("hevc_gop12", "side", 1),
            ("video_and_depth", "rgb", 0),
        ],
    )
    def test_identities_of_real_datasets(self, name: str, key: str, camera: int) -> None:
        root = shared_dataset(name)
        table = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").select(
            ["length", f"videos/observation.images.{key}/file_index"]
        )
        for path in sorted((root / f"videos/observation.images.{key}/chunk-000").glob("*.mp4")):
            pictures, _ = decode(path)
            expected = [
                (camera, episode, frame)
                for episode, (length, file) in enumerate(zip(*table.to_pydict().values(), strict=True))
                if f"file-{file:03d}.mp4" == path.name
                for frame in range(length)
            ]
            np.testing.assert_array_equal(read_identities(pictures), expected)


class TestVideos:
    @pytest.mark.parametrize("name", SPECS)
    def test_every_picture_is_at_the_time_of_its_row(self, name: str, dataset_cache: DatasetCache) -> None:
        written = dataset_cache.get(name)
        rows = episode_rows(written)
        for number, camera in enumerate(written.spec.cameras):
            if camera.kind != "video":
                continue
            for place, path in enumerate(written.video_files[camera.key]):
                pictures, times = decode(written.root / path, "gray12le" if camera.is_depth else "rgb24")
                inside = [row for row in rows if row["episode_index"] // camera.episodes_per_file == place]
                order = [(row["episode_index"], frame) for row in inside for frame in range(row["length"])]
                expected_times = [
                    row[f"videos/{camera.key}/from_timestamp"] + frame / written.spec.fps
                    for row in inside
                    for frame in range(row["length"])
                ]
                np.testing.assert_allclose(times, expected_times, atol=1e-9)
                if camera.is_depth:
                    for picture, (episode, frame) in zip(pictures, order, strict=True):
                        codes = depth_codes(number, episode, frame, camera.height, camera.width)
                        np.testing.assert_array_equal(picture, codes)
                else:
                    expected = [(number, episode, frame) for episode, frame in order]
                    np.testing.assert_array_equal(read_identities(pictures), expected)

    def test_cameras_roll_over_at_different_episodes_and_start_at_0(
        self, standard_dataset: WrittenDataset
    ) -> None:
        rows = episode_rows(standard_dataset)
        starts = {
            key: [row["episode_index"] for row in rows if row[f"videos/{key}/from_timestamp"] == 0.0]
            for key in standard_dataset.camera_keys
        }
        assert starts == {
            "observation.images.front": [0, 3, 6],
            "observation.images.side": [0, 2, 4, 6],
        }

    def test_an_episode_begins_where_the_one_before_ends(self, demo_dataset: WrittenDataset) -> None:
        for key in demo_dataset.camera_keys:
            for before, after in pairwise(episode_rows(demo_dataset)):
                end = before[f"videos/{key}/to_timestamp"]
                assert after[f"videos/{key}/from_timestamp"] in (0.0, end)

    @pytest.mark.parametrize("name", ["h264", "h264_open", "hevc", "hevc_open", "vp9", "av1", "demo"])
    def test_every_episode_begins_with_a_keyframe(self, name: str, dataset_cache: DatasetCache) -> None:
        written = dataset_cache.get(name)
        camera = written.spec.cameras[0]
        lengths = written.spec.episode_lengths
        for place, path in enumerate(written.video_files[camera.key]):
            packets = packet_times(written.root / path)
            first = place * camera.episodes_per_file
            start = 0
            for length in lengths[first : first + camera.episodes_per_file]:
                # Decode order keeps episodes apart, so its n-th packet begins the episode.
                assert packets[start][1]
                assert packets[start][0] == min(pts for pts, _ in packets[start:])
                start += length

    @pytest.mark.parametrize(
        ("name", "reordered", "leading"),
        [
            ("h264", True, False),
            ("h264_open", True, True),
            ("hevc", True, False),
            ("hevc_open", True, True),
            ("vp9", False, False),
            ("demo", False, False),
        ],
    )
    def test_b_frames_and_open_gops_are_really_there(
        self, name: str, reordered: bool, leading: bool, dataset_cache: DatasetCache
    ) -> None:
        written = dataset_cache.get(name)
        packets = packet_times(written.root / next(iter(written.video_files.values()))[0])
        times = [pts for pts, _ in packets]
        assert (times != sorted(times)) is reordered
        keyframes = [place for place, (_, keyframe) in enumerate(packets) if keyframe]
        later_but_before = [
            pts for place in keyframes for pts, _ in packets[place + 1 :] if pts < packets[place][0]
        ]
        assert bool(later_but_before) is leading

    @pytest.mark.parametrize(
        ("faststart", "order"), [(True, [b"moov", b"mdat"]), (False, [b"mdat", b"moov"])]
    )
    def test_place_of_moov(self, faststart: bool, order: list[bytes], tmp_path: Path) -> None:
        camera = DemoCamera("observation.images.front", 16, 96)
        written = write_dataset(tmp_path / "d", DemoSpec((3,), (camera,), faststart=faststart))
        boxes = top_level_boxes(written.root / written.video_files[camera.key][0])
        assert [box for box in boxes if box in order] == order

    def test_a_missing_encoder_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(demo_video._ENCODERS, "h264", ("no-such-encoder",))
        with pytest.raises(UsageError, match="no-such-encoder"):
            write_dataset(tmp_path / "d", SPECS["tiny"])
        assert os.listdir(tmp_path) == []


class TestTables:
    def test_default_is_the_documented_demonstration(self, demo_dataset: WrittenDataset) -> None:
        info = json.loads((demo_dataset.root / "meta/info.json").read_text(encoding="utf-8"))
        assert (info["codebase_version"], info["total_episodes"], info["total_frames"]) == ("v3.0", 12, 600)
        assert {key: len(files) for key, files in demo_dataset.video_files.items()} == {
            "observation.images.top": 3,
            "observation.images.wrist": 3,
        }

    @pytest.mark.parametrize("name", ["demo", "tiny", "standard", "images", "rich"])
    def test_rows_are_complete_and_in_order(self, name: str, dataset_cache: DatasetCache) -> None:
        written = dataset_cache.get(name)
        rows = data_rows(written)
        assert [row["index"] for row in rows] == list(range(written.num_frames))
        assert [(row["episode_index"], row["frame_index"]) for row in rows] == list(written.frames())
        for row in rows:
            assert row["timestamp"] == np.float32(row["frame_index"] / written.spec.fps)
            assert row["task_index"] == row["episode_index"] % len(written.spec.tasks)

    @pytest.mark.parametrize("name", ["demo", "standard", "rich"])
    def test_episodes_table_points_at_the_rows(self, name: str, dataset_cache: DatasetCache) -> None:
        written = dataset_cache.get(name)
        info = json.loads((written.root / "meta/info.json").read_text(encoding="utf-8"))
        for row in episode_rows(written):
            path = info["data_path"].format(
                chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
            )
            found = [
                one["index"]
                for one in pq.read_table(written.root / path).to_pylist()
                if one["episode_index"] == row["episode_index"]
            ]
            assert found == list(range(row["dataset_from_index"], row["dataset_to_index"]))
            assert len(found) == row["length"] == written.episode_lengths[row["episode_index"]]
            assert row["tasks"] == [written.spec.tasks[row["episode_index"] % len(written.spec.tasks)]]

    def test_row_groups_hold_the_episodes_asked_for(self, rich_dataset: WrittenDataset) -> None:
        sizes = []
        for path in rich_dataset.data_files:
            metadata = pq.ParquetFile(rich_dataset.root / path).metadata
            sizes.append([metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)])
        assert sizes == [[6 + 3, 8], [5 + 4]]

    def test_chunks_roll_over(self, rich_dataset: WrittenDataset) -> None:
        assert rich_dataset.video_files["observation.images.front"] == (
            "videos/observation.images.front/chunk-000/file-000.mp4",
            "videos/observation.images.front/chunk-000/file-001.mp4",
            "videos/observation.images.front/chunk-001/file-000.mp4",
        )
        assert len(list((rich_dataset.root / "meta/episodes").glob("*/*.parquet"))) == 3

    def test_extra_features(self, rich_dataset: WrittenDataset) -> None:
        rows = data_rows(rich_dataset)
        assert rows[7][EXTRA_KEYS["string"]] == "episode 1, frame 1 ✓"
        assert {row[EXTRA_KEYS["bool"]] for row in rows} == {True, False}
        counters = [row[EXTRA_KEYS["int64"]] for row in rows]
        assert min(counters) > 2**53
        assert len(set(counters)) == len(rows)
        assert np.shape([row[EXTRA_KEYS["float2d"]] for row in rows]) == (len(rows), 2, 3)
        assert rows[0]["language_persistent"][0]["style"] == "plan"
        assert [len(row["language_events"]) for row in rows[:6]] == [0, 1, 0, 0, 0, 1]

    def test_statistics_are_those_of_the_rows(self, tiny_dataset: WrittenDataset) -> None:
        states = np.array([row["observation.state"] for row in data_rows(tiny_dataset)])
        stats = json.loads((tiny_dataset.root / "meta/stats.json").read_text(encoding="utf-8"))
        np.testing.assert_allclose(stats["observation.state"]["mean"], states.mean(axis=0), atol=1e-6)
        assert stats["observation.state"]["count"] == [21]
        first = episode_rows(tiny_dataset)[0]
        np.testing.assert_allclose(first["stats/observation.state/max"], states[:5].max(axis=0), atol=1e-6)

    @requires_shared
    def test_tables_have_the_types_of_real_ones(self, demo_dataset: WrittenDataset) -> None:
        real = shared_dataset("av1_two_cameras")
        for path in ("data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"):
            ours, theirs = pq.read_schema(demo_dataset.root / path), pq.read_schema(real / path)
            assert {field.name: field.type for field in ours} == {field.name: field.type for field in theirs}
        ours = pq.read_schema(demo_dataset.root / "meta/tasks.parquet").pandas_metadata
        theirs = pq.read_schema(real / "meta/tasks.parquet").pandas_metadata
        assert {**ours, "pandas_version": "", "creator": ""} == {
            **theirs,
            "pandas_version": "",
            "creator": "",
        }
        info, real_info = (
            json.loads((one / "meta/info.json").read_text()) for one in (demo_dataset.root, real)
        )
        assert info.keys() == real_info.keys()
        assert info["features"].keys() == real_info["features"].keys()


class TestWriting:
    def test_an_empty_directory_is_taken(self, tmp_path: Path) -> None:
        root = tmp_path / "d"
        root.mkdir()
        assert write_dataset(root, SPECS["images"]).root == root
        assert os.listdir(tmp_path) == ["d"]
        assert (root / "meta/info.json").is_file()

    def test_a_directory_with_something_in_it_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
        with pytest.raises(UsageError, match="not an empty directory"):
            write_dataset(tmp_path, SPECS["images"])
        assert os.listdir(tmp_path) == ["notes.txt"]

    def test_a_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_text("mine", encoding="utf-8")
        with pytest.raises(UsageError, match="not an empty directory"):
            write_dataset(path, SPECS["images"])
        assert path.read_text(encoding="utf-8") == "mine"

    def test_a_failure_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError("no space left")

        monkeypatch.setattr("lrstream.demo.writer.write_video", fail)
        with pytest.raises(OSError, match="no space left"):
            write_dataset(tmp_path / "d", SPECS["tiny"])
        assert os.listdir(tmp_path) == []

    def test_the_same_spec_gives_the_same_bytes(self, tiny_dataset: WrittenDataset, tmp_path: Path) -> None:
        again = write_dataset(tmp_path / "again", tiny_dataset.spec)
        files = sorted(path.relative_to(again.root) for path in again.root.rglob("*") if path.is_file())
        assert len(files) == 4 + len(again.data_files) + sum(map(len, again.video_files.values()))
        for path in files:
            assert (again.root / path).read_bytes() == (tiny_dataset.root / path).read_bytes(), path

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (DemoSpec(()), "at least one frame"),
            (DemoSpec((3, 0)), "at least one frame"),
            (DemoSpec(tasks=()), "at least one task"),
            (DemoSpec(fps=0), "at least 1"),
            (DemoSpec(episodes_per_metadata_file=0), "at least 1"),
            (DemoSpec(cameras=(DemoCamera("a", 15, 96),)), "even"),
            (DemoSpec(cameras=(DemoCamera("a", 16, 94),)), "16 x 96"),
            (DemoSpec(cameras=(DemoCamera("a", 16, 96, gop=0),)), "gop"),
            (DemoSpec(cameras=(DemoCamera("a", 16, 96), DemoCamera("a", 16, 96))), "distinct"),
        ],
    )
    def test_what_cannot_be_written_is_refused_first(
        self, spec: DemoSpec, message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(UsageError, match=message):
            write_dataset(tmp_path / "sub" / "d", spec)
        assert os.listdir(tmp_path) == []
