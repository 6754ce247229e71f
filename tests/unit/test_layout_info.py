"""`meta/info.json`: what is read, and what is refused with which words (DS-2, DS-4, DS-5, K14)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lrstream.errors import DatasetFormatError, NotFoundError
from lrstream.layout.info import DepthParameters, load_info, parse_info
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.support.tables import TableDataset


def parse(info: dict[str, Any]) -> Any:
    return parse_info(json.dumps(info).encode(), "set/meta/info.json")


def with_feature(key: str, feature: Any) -> dict[str, Any]:
    info = TableDataset().info
    info["features"][key] = feature
    return info


def test_what_is_read() -> None:
    info = parse(TableDataset(cameras=("top", "side")).info)
    assert (info.codebase_version, info.fps, info.total_episodes, info.total_frames) == ("v3.0", 10, 3, 21)
    assert isinstance(info.fps, int)
    assert info.video_keys == ("top", "side")
    assert info.features["observation.state"].shape == (2,)
    assert info.features["observation.state"].names == ["x", "y"]
    assert info.data_path.path(chunk_index=2, file_index=13) == "data/chunk-002/file-013.parquet"
    assert info.video_path.path(chunk_index=1, file_index=1234, video_key="top") == (
        "videos/top/chunk-001/file-1234.mp4"
    )


@pytest.mark.parametrize(
    ("key", "feature", "kind"),
    [
        ("a", {"dtype": "video", "shape": [4, 4, 3]}, "video"),
        ("a", {"dtype": "video", "shape": [4, 4, 3], "info": None}, "video"),
        ("a", {"dtype": "video", "shape": [4, 4, 1], "info": {"is_depth_map": True}}, "depth"),
        ("a", {"dtype": "video", "shape": [4, 4, 1], "info": {"video.is_depth_map": True}}, "depth"),
        ("a", {"dtype": "video", "shape": [4, 4, 1], "video_info": {"video.is_depth_map": True}}, "depth"),
        ("a", {"dtype": "video", "shape": [4, 4, 3], "info": {"is_depth_map": False}}, "video"),
        ("a", {"dtype": "image", "shape": [4, 4, 3]}, "image"),
        ("a", {"dtype": "image", "shape": [4, 4, 1], "info": {"is_depth_map": True}}, "depth_image"),
        ("a", {"dtype": "string", "shape": [1]}, "string"),
        ("language_events", {"dtype": "language", "shape": [1]}, "language"),
        ("a", {"dtype": "language", "shape": [1]}, "language"),
        ("a", {"dtype": "bool", "shape": [1]}, "numeric"),
        ("a", {"dtype": "uint8", "shape": [3, 4]}, "numeric"),
        ("a", {"dtype": "float64", "shape": []}, "numeric"),
    ],
)
def test_feature_kinds(key: str, feature: dict[str, Any], kind: str) -> None:
    assert parse(with_feature(key, feature)).features[key].kind == kind


@pytest.mark.parametrize("prefix", ["video.", ""])
def test_depth_parameters(prefix: str) -> None:
    def depth(**info: Any) -> DepthParameters | None:
        feature = {"dtype": "video", "shape": [4, 4, 1], "info": {"is_depth_map": True, **info}}
        parsed: DepthParameters | None = parse(with_feature("d", feature)).features["d"].depth
        return parsed

    assert depth() == DepthParameters(min_m=0.01, max_m=10.0, shift_m=3.5, use_log=True, unit=None)
    written = {
        f"{prefix}depth_min": 0.2,
        f"{prefix}depth_max": 5,
        f"{prefix}shift": 0.0,
        f"{prefix}use_log": False,
        "depth_unit": "m",
    }
    assert depth(**written) == DepthParameters(0.2, 5.0, 0.0, False, "m")
    with pytest.raises(DatasetFormatError, match="must be positive"):
        depth(**{f"{prefix}shift": -0.01})
    with pytest.raises(DatasetFormatError, match="not below depth_max"):
        depth(**{f"{prefix}depth_min": 10})
    with pytest.raises(DatasetFormatError, match="'depth_unit' is 'cm'"):
        depth(depth_unit="cm")
    with pytest.raises(DatasetFormatError, match="expected a bool"):
        depth(**{f"{prefix}use_log": 1})


def test_fps_keeps_its_kind() -> None:
    for written, read in ((30, 30), (30.0, 30), (29.97, 29.97)):
        fps = parse({**TableDataset().info, "fps": written}).fps
        assert fps == read
        assert isinstance(fps, type(read))


@pytest.mark.parametrize("version", ["v3.0", "v3.1", "3.0", "v3.0.1"])
def test_versions_that_are_read(version: str) -> None:
    assert parse({**TableDataset().info, "codebase_version": version}).codebase_version == version


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebase_version": "v2.1"}, r"version v2\.1, .*convert_dataset_v21_to_v30"),
        ({"codebase_version": "v4.0"}, r"version v4\.0, .*A newer lrstream"),
        ({"codebase_version": None}, "'codebase_version' is None"),
        ({"codebase_version": "new"}, "'codebase_version' is 'new'"),
        ({"fps": 0}, "'fps' is 0"),
        ({"fps": True}, "'fps' is True"),
        ({"fps": float("nan")}, "'fps' is nan"),
        ({"features": {}}, "'features' is {}"),
        ({"features": {"a": []}}, r"feature 'a' is \[\]"),
        ({"features": {"a": {"dtype": 3}}}, "'dtype' is 3"),
        ({"features": {"a": {"dtype": "float32", "shape": [-1]}}}, r"'shape' is \[-1\]"),
        ({"features": {"a": {"dtype": "complex64", "shape": [1]}}}, "'complex64' is not supported"),
        ({"features": {"a": {"dtype": "video", "shape": [1], "info": 3}}}, "'info' is 3"),
        ({"video_path": None}, "stored as video, but 'video_path' is missing"),
        ({"data_path": None}, "'data_path' is missing"),
        ({"data_path": 7}, "'data_path' is 7"),
        ({"total_frames": -3}, "'total_frames' is -3"),
        ({"data_path": "data/{episode_chunk}/x"}, r"uses 'episode_chunk'.*v2\.x"),
        ({"data_path": "data/{file_index"}, "no valid template"),
        ({"data_path": "data/{file_index.real}"}, r"uses 'file_index\.real'"),
        ({"data_path": "data/{}"}, "uses ''"),
        ({"data_path": "data/{file_index!r}"}, "not supported"),
        # Would need 10 GB.
        ({"data_path": "data/{file_index:09999999999d}"}, "not supported"),
        ({"data_path": "../{file_index}"}, r"gives '\.\./0' is no path inside"),
        ({"data_path": "/etc/{file_index}"}, "is no path inside"),
        ({"video_path": "videos/{video_key:99999999}/{file_index}"}, "not supported"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetFormatError, match=message) as caught:
        parse({**TableDataset().info, **change})
    assert "set/meta/info.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "holds a list"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer.*git lfs pull"),
    ],
)
def test_content_that_is_no_info(content: bytes, message: str) -> None:
    with pytest.raises(DatasetFormatError, match=message):
        parse_info(content, "info.json")


def test_missing_info(tmp_path: Path) -> None:
    store = open_store(parse_location(tmp_path))
    with pytest.raises(NotFoundError, match=r"not a LeRobotDataset: it has no meta/info\.json"):
        load_info(store)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/episodes.jsonl").touch()
    with pytest.raises(DatasetFormatError, match=r"version v2\.x .*convert_dataset_v21_to_v30"):
        load_info(store)
