"""A slow reader that is right: the expected values of loader tests where no recorded ones exist.

It shares no code with lrstream. It reads every Parquet file whole, decodes every MP4 file whole and in
order with FFmpeg's own demuxer, and finds windows with plain loops. It was compared with what LeRobot's
map-style reader returned for the real datasets (`tests/unit/test_support.py`).
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image

__all__ = ["ReferenceDataset", "frame_to_array"]


def frame_to_array(frame: av.VideoFrame, pixel_format: str) -> NDArray[Any]:
    """Pixels of a decoded frame, converted by FFmpeg's scaler in this thread."""
    convert: Any = frame.to_ndarray
    try:
        # By default newer versions of PyAV start scaler threads for every frame.
        array: NDArray[Any] = convert(format=pixel_format, threads=1)
    except TypeError:
        array = convert(format=pixel_format)
    return array


class ReferenceDataset:
    """A local LeRobotDataset v3 as a sequence of map-style samples.

    Args:
        root: Dataset root.
        depth_unit: ``mm`` or ``m``, of returned depth maps.
        tolerance_s: Largest distance between a row's time and its picture's.
    """

    def __init__(self, root: Path | str, *, depth_unit: str = "mm", tolerance_s: float = 1e-4) -> None:
        self.root = Path(root)
        self.depth_unit = depth_unit
        self.tolerance_s = tolerance_s
        self.info: dict[str, Any] = json.loads((self.root / "meta/info.json").read_text(encoding="utf-8"))
        self.fps = self.info["fps"]
        self.features: dict[str, dict[str, Any]] = self.info["features"]
        self.tasks = {
            row["task_index"]: row["task"]
            for row in pq.read_table(self.root / "meta/tasks.parquet").to_pylist()
        }
        self.episodes: dict[int, dict[str, Any]] = {}
        for path in sorted((self.root / "meta/episodes").glob("*/*.parquet")):
            names = [name for name in pq.read_schema(path).names if not name.startswith("stats/")]
            for row in pq.read_table(path, columns=names).to_pylist():
                self.episodes[row["episode_index"]] = row
        rows: list[dict[str, Any]] = []
        for path in sorted((self.root / "data").glob("*/*.parquet")):
            rows.extend(pq.read_table(path).to_pylist())
        self.rows = sorted(rows, key=lambda row: int(row["index"]))
        self._videos: dict[str, tuple[list[NDArray[Any]], NDArray[np.float64]]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def keys_of(self, *dtypes: str) -> list[str]:
        """Feature keys whose dtype in info.json is one of these."""
        return [key for key, feature in self.features.items() if feature["dtype"] in dtypes]

    def sample(
        self,
        index: int,
        delta_timestamps: dict[str, list[float]] | None = None,
        *,
        return_uint8: bool = True,
    ) -> dict[str, Any]:
        """The sample of one row, as the map-style reader would return it.

        Args:
            index: Value of the ``index`` column.
            delta_timestamps: Seconds relative to the row, by key.
            return_uint8: RGB video as uint8, else float32 in [0, 1]. Images stored in tables stay float32.
        """
        row = self.rows[index]
        assert row["index"] == index, "rows are not numbered 0, 1, 2, ..."
        episode = self.episodes[row["episode_index"]]
        sample = {key: self._value(key, row[key]) for key in row}
        queried: dict[str, list[int]] = {}
        for key, deltas in (delta_timestamps or {}).items():
            first, last = episode["dataset_from_index"], episode["dataset_to_index"] - 1
            wanted = [index + self._frames(delta) for delta in deltas]
            queried[key] = [min(max(position, first), last) for position in wanted]
            sample[f"{key}_is_pad"] = torch.tensor([not first <= position <= last for position in wanted])
            if key in row:
                sample[key] = torch.stack([self._value(key, self.rows[one][key]) for one in queried[key]])
        for key in self.keys_of("video"):
            times = [self.rows[one]["timestamp"] for one in queried.get(key, [index])]
            sample[key] = self._window(key, episode, times, return_uint8)
        sample["task"] = self.tasks[row["task_index"]]
        return sample

    def _frames(self, delta_s: float) -> int:
        frames: int = round(delta_s * self.fps)
        assert abs(delta_s - frames / self.fps) <= self.tolerance_s, f"{delta_s} s is no multiple of a frame"
        return frames

    # Values from tables ---------------------------------------------------------------------------

    def _value(self, key: str, value: Any) -> Any:
        dtype = self.features[key]["dtype"]
        if dtype == "image":
            return self._image(key, value["bytes"])
        if dtype in ("string", "language"):
            return value
        return torch.tensor(value)

    def _image(self, key: str, encoded: bytes) -> torch.Tensor:
        with Image.open(io.BytesIO(encoded)) as image:
            pixels = np.array(image)
        if pixels.ndim == 3:
            return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32) / 255
        stored = (self.features[key].get("info") or {}).get("depth_unit")
        depth = torch.from_numpy(pixels.astype(np.float32))[None]
        if stored is None or stored == self.depth_unit:
            return depth
        return depth * 1000 if stored == "m" else depth / 1000

    # Pictures from videos -------------------------------------------------------------------------

    def _window(
        self, key: str, episode: dict[str, Any], times_s: list[float], return_uint8: bool
    ) -> torch.Tensor:
        path = self.info["video_path"].format(
            video_key=key,
            chunk_index=episode[f"videos/{key}/chunk_index"],
            file_index=episode[f"videos/{key}/file_index"],
        )
        pictures, presented_s = self._decoded(key, path)
        chosen = []
        for time_s in times_s:
            wanted_s = episode[f"videos/{key}/from_timestamp"] + time_s
            nearest = int(np.argmin(np.abs(presented_s - wanted_s)))
            distance_s = abs(presented_s[nearest] - wanted_s)
            if distance_s > self.tolerance_s:
                raise LookupError(
                    f"{path}: no picture within {self.tolerance_s} s of {wanted_s} s: {distance_s} s"
                )
            chosen.append(torch.from_numpy(pictures[nearest]))
        window = torch.stack(chosen)
        if self._is_depth(key):
            window = self._dequantized(key, window)
        elif not return_uint8:
            window = window.to(torch.float32) / 255
        return window[0] if len(window) == 1 else window

    def _decoded(self, key: str, path: str) -> tuple[list[NDArray[Any]], NDArray[np.float64]]:
        if path not in self._videos:
            pictures, times = [], []
            with av.open(str(self.root / path)) as container:
                stream = container.streams.video[0]
                stream.codec_context.thread_count = 1
                for frame in container.decode(stream):
                    assert frame.pts is not None
                    assert stream.time_base is not None
                    times.append(float(frame.pts * stream.time_base))
                    if self._is_depth(key):
                        pictures.append(frame_to_array(frame, "gray12le")[None].astype(np.int32))
                    else:
                        pictures.append(
                            np.ascontiguousarray(frame_to_array(frame, "rgb24").transpose(2, 0, 1))
                        )
            self._videos[path] = (pictures, np.array(times))
        return self._videos[path]

    def _is_depth(self, key: str) -> bool:
        info = self.features[key].get("info") or {}
        return bool(info.get("is_depth_map") or info.get("video.is_depth_map"))

    def _dequantized(self, key: str, codes: torch.Tensor) -> torch.Tensor:
        info = self.features[key]["info"]
        low, high = info["video.depth_min"], info["video.depth_max"]
        share = codes.to(torch.float32)
        if info["video.use_log"]:
            shift = info["video.shift"]
            start, stop = math.log(low + shift), math.log(high + shift)
            metres = torch.exp(share * ((stop - start) / 4095) + start) - shift
        else:
            metres = share * ((high - low) / 4095) + low
        metres = metres.clamp(low, high)
        depth: torch.Tensor = metres if self.depth_unit == "m" else (metres * 1000).round().clamp(0, 65535)
        return depth
