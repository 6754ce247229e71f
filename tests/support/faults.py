"""Datasets with one thing wrong.

Each function of `FAULTS` takes the root of a dataset of its own (see `copy_dataset`), breaks one thing
in place, and says what it broke. They work on every dataset of `tests.support.datasets` that has at least
two Parquet files and a video camera with two episodes in its first file: ``standard``, ``demo``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import pyarrow as pa
import pyarrow.parquet as pq

from lrstream.demo import DemoCamera, Painter
from lrstream.demo.video import write_video

__all__ = [
    "FAULTS",
    "Broken",
    "edit_episodes",
    "edit_info",
    "lfs_pointer",
    "remux",
    "replace_mp4",
]

Row = dict[str, Any]


@dataclass(frozen=True)
class Broken:
    """What a fault injector did.

    Attributes:
        root: Root of the broken dataset.
        path: Path of the file at fault, relative to the root with forward slashes.
        episode: Index of the episode at fault; None when whole files are.
        camera: Key of the camera at fault, if one is.
    """

    root: Path
    path: str
    episode: int | None = None
    camera: str | None = None


# Helpers --------------------------------------------------------------------------------------------


def edit_info(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change meta/info.json; `change` edits the parsed document in place."""
    path = root / "meta/info.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document, indent=4), encoding="utf-8")


def edit_episodes(root: Path, change: Callable[[Row], None]) -> None:
    """Change rows of meta/episodes; `change` edits one row in place and is called for every row."""
    for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
        table = pq.read_table(path)
        rows = table.to_pylist()
        for row in rows:
            change(row)
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def remux(path: Path, **options: str) -> None:
    """Write an MP4 file again with the same packets and other options of FFmpeg's muxer, in place."""
    temporary = path.with_name(path.name + ".remux")
    with av.open(str(path)) as source, av.open(str(temporary), "w", format="mp4", options=options) as target:
        stream = source.streams.video[0]
        copied = target.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.dts is None:  # the empty packet that flushes
                continue
            packet.stream = copied
            target.mux(packet)
    temporary.replace(path)


def lfs_pointer(path: Path) -> None:
    """Put a Git LFS pointer in the place of a file, as a clone without LFS leaves it."""
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
        f"size {path.stat().st_size}\n",
        encoding="ascii",
    )


def replace_mp4(path: Path, *, keep_mtime: bool = False) -> None:
    """Put another video of equal size, length and frame count in the place of an MP4 file.

    Every picture of the new one carries the identity (15, 255, 0). A `free` box fills the file up to the
    size of the old one.

    Args:
        path: The file.
        keep_mtime: Give the new file the modification time of the old one.
    """
    old = path.stat()
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        num_frames, fps = stream.frames, round(float(stream.average_rate or 0))
        camera = DemoCamera("replacement", stream.height, stream.width, "h264", gop=30)
    picture = Painter(15, camera.height, camera.width, seed=1).paint(255, 0)
    write_video(path, camera, fps, [[picture] * num_frames], faststart=True)
    missing = old.st_size - path.stat().st_size
    assert missing >= 8, f"the replacement is not smaller than {path}"
    with path.open("ab") as file:
        file.write(missing.to_bytes(4, "big") + b"free" + bytes(missing - 8))
    if keep_mtime:
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


def _first(root: Path, pattern: str) -> str:
    return sorted(root.glob(pattern))[0].relative_to(root).as_posix()


def _mp4(root: Path) -> str:
    return _first(root, "videos/*/*/*.mp4")


def _data(root: Path) -> str:
    return _first(root, "data/*/*.parquet")


def _metadata(root: Path) -> str:
    return _first(root, "meta/episodes/*/*.parquet")


def _camera(root: Path) -> str:
    info = json.loads((root / "meta/info.json").read_text(encoding="utf-8"))
    features: dict[str, Row] = info["features"]
    return next(key for key, feature in features.items() if feature["dtype"] == "video")


def _rows(root: Path) -> list[Row]:
    rows: list[Row] = []
    for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
        rows.extend(pq.read_table(path).to_pylist())
    return sorted(rows, key=lambda row: int(row["episode_index"]))


def _truncate(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


# meta/info.json -------------------------------------------------------------------------------------


def version_2_1(root: Path) -> Broken:
    """The dataset says that it has the layout before v3."""
    edit_info(root, lambda info: info.update(codebase_version="v2.1"))
    return Broken(root, "meta/info.json")


def version_4_0(root: Path) -> Broken:
    """The dataset says that it has a layout of the future."""
    edit_info(root, lambda info: info.update(codebase_version="v4.0"))
    return Broken(root, "meta/info.json")


def missing_info(root: Path) -> Broken:
    """There is no info.json."""
    (root / "meta/info.json").unlink()
    return Broken(root, "meta/info.json")


# MP4 files ------------------------------------------------------------------------------------------


def missing_mp4(root: Path) -> Broken:
    """The first MP4 file is not there."""
    path = _mp4(root)
    (root / path).unlink()
    return Broken(root, path)


def lfs_pointer_mp4(root: Path) -> Broken:
    """The first MP4 file is a Git LFS pointer."""
    path = _mp4(root)
    lfs_pointer(root / path)
    return Broken(root, path)


def empty_mp4(root: Path) -> Broken:
    """The first MP4 file has no byte."""
    path = _mp4(root)
    (root / path).write_bytes(b"")
    return Broken(root, path)


def not_mp4(root: Path) -> Broken:
    """The first MP4 file is a web page."""
    path = _mp4(root)
    (root / path).write_text("<!DOCTYPE html><html><body>Not found</body></html>", encoding="ascii")
    return Broken(root, path)


def truncated_before_moov(root: Path) -> Broken:
    """The first MP4 file ends before the `moov` box that would have been its last."""
    path = _mp4(root)
    remux(root / path)
    _truncate(root / path, 0.4)
    return Broken(root, path)


def truncated_payload(root: Path) -> Broken:
    """The first MP4 file has its `moov`, but not all the samples that it lists."""
    path = _mp4(root)
    remux(root / path, movflags="+faststart")
    _truncate(root / path, 0.8)
    return Broken(root, path)


def fragmented_mp4(root: Path) -> Broken:
    """The first MP4 file keeps its samples in movie fragments."""
    path = _mp4(root)
    remux(root / path, movflags="+frag_keyframe+empty_moov")
    return Broken(root, path)


def replaced_mp4(root: Path) -> Broken:
    """The first MP4 file is another video of the same size and length (K23)."""
    path = _mp4(root)
    replace_mp4(root / path)
    return Broken(root, path)


# Parquet files --------------------------------------------------------------------------------------


def lfs_pointer_parquet(root: Path) -> Broken:
    """The first file of rows is a Git LFS pointer."""
    path = _data(root)
    lfs_pointer(root / path)
    return Broken(root, path)


def empty_parquet(root: Path) -> Broken:
    """The first file of rows has no byte."""
    path = _data(root)
    (root / path).write_bytes(b"")
    return Broken(root, path)


def parquet_without_footer(root: Path) -> Broken:
    """The first file of rows was not closed by its writer."""
    path = _data(root)
    _truncate(root / path, 0.6)
    return Broken(root, path)


def missing_parquet(root: Path) -> Broken:
    """The last file of rows is not there, although episodes name it (K01)."""
    path = sorted(root.glob("data/*/*.parquet"))[-1]
    path.unlink()
    return Broken(root, path.relative_to(root).as_posix(), _rows(root)[-1]["episode_index"])


# meta/episodes --------------------------------------------------------------------------------------


def wrong_data_file(root: Path) -> Broken:
    """The first episode of the second file of rows names the first file (K01)."""
    rows = _rows(root)
    place = ("data/chunk_index", "data/file_index")
    stale = {name: rows[0][name] for name in place}
    victim = next(row["episode_index"] for row in rows if any(row[name] != stale[name] for name in place))

    def change(row: Row) -> None:
        if row["episode_index"] == victim:
            row.update(stale)

    edit_episodes(root, change)
    return Broken(root, _metadata(root), victim)


def null_video_index(root: Path) -> Broken:
    """Episode 1 has no file number for the first camera (K02)."""
    camera = _camera(root)

    def change(row: Row) -> None:
        if row["episode_index"] == 1:
            row[f"videos/{camera}/file_index"] = None

    edit_episodes(root, change)
    return Broken(root, _metadata(root), 1, camera)


def span_past_end(root: Path) -> Broken:
    """The last episode lies beyond the end of its MP4 file."""
    camera, last = _camera(root), _rows(root)[-1]["episode_index"]

    def change(row: Row) -> None:
        if row["episode_index"] == last:
            row[f"videos/{camera}/from_timestamp"] += 1000.0
            row[f"videos/{camera}/to_timestamp"] += 1000.0

    edit_episodes(root, change)
    return Broken(root, _metadata(root), last, camera)


def wrong_length(root: Path) -> Broken:
    """Episode 1 claims one frame more than its rows and its index range have."""

    def change(row: Row) -> None:
        if row["episode_index"] == 1:
            row["length"] += 1

    edit_episodes(root, change)
    return Broken(root, _metadata(root), 1)


def overlapping_rows(root: Path) -> Broken:
    """Episode 1 claims the last two rows of episode 0 as its own, in a consistent way."""

    def change(row: Row) -> None:
        if row["episode_index"] == 1:
            row["dataset_from_index"] -= 2
            row["length"] += 2

    edit_episodes(root, change)
    return Broken(root, _metadata(root), 1)


def drifting_clock(root: Path) -> Broken:
    """From episode 1 on, the first camera's times are off by 0.4 of a frame per episode."""
    camera = _camera(root)
    fps = json.loads((root / "meta/info.json").read_text(encoding="utf-8"))["fps"]

    def change(row: Row) -> None:
        drift_s = 0.4 * row["episode_index"] / fps
        row[f"videos/{camera}/from_timestamp"] += drift_s
        row[f"videos/{camera}/to_timestamp"] += drift_s

    edit_episodes(root, change)
    return Broken(root, _metadata(root), 1, camera)


FAULTS: dict[str, Callable[[Path], Broken]] = {
    function.__name__: function
    for function in (
        version_2_1,
        version_4_0,
        missing_info,
        missing_mp4,
        lfs_pointer_mp4,
        empty_mp4,
        not_mp4,
        truncated_before_moov,
        truncated_payload,
        fragmented_mp4,
        replaced_mp4,
        lfs_pointer_parquet,
        empty_parquet,
        parquet_without_footer,
        missing_parquet,
        wrong_data_file,
        null_video_index,
        span_past_end,
        wrong_length,
        overlapping_rows,
        drifting_clock,
    )
}
"""All of them by name, for ``pytest.mark.parametrize("fault", FAULTS)``."""
