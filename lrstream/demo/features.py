"""Features of a demonstration dataset: their entries in info.json, their columns, their values."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from lrstream.demo.pictures import Painter, depth_codes
from lrstream.demo.spec import DemoCamera, DemoSpec

__all__ = ["EXTRA_KEYS", "episode_columns", "feature_entries", "numeric_keys", "row_schema"]

EXTRA_KEYS = {
    "string": "observation.note",
    "bool": "observation.gripper_open",
    "int64": "observation.counter",
    "float2d": "observation.grid",
    "language": "language_persistent",
}
"""Feature key of each `lrstream.demo.spec.Extra`; ``language`` also writes ``language_events``."""

_JOINTS = ["j0", "j1", "j2", "j3", "j4", "j5"]
_GRID = (2, 3)
_EVENT = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("content", pa.string()),
        pa.field("style", pa.string()),
        pa.field("camera", pa.string()),
        pa.field("tool_calls", pa.list_(pa.string())),
    ]
)
_PERSISTENT = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("content", pa.string()),
        pa.field("style", pa.string()),
        pa.field("timestamp", pa.float32(), nullable=False),
        pa.field("camera", pa.string()),
        pa.field("tool_calls", pa.list_(pa.string())),
    ]
)


def _entry(dtype: str, shape: tuple[int, ...] = (1,), names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "names": names}


def feature_entries(spec: DemoSpec) -> dict[str, dict[str, Any]]:
    """``features`` of info.json, in the order in which LeRobot writes them."""
    entries = {
        "observation.state": _entry("float32", (6,), _JOINTS),
        "action": _entry("float32", (6,), _JOINTS),
        "next.reward": _entry("float32"),
        "next.done": _entry("bool"),
    }
    if "string" in spec.extras:
        entries[EXTRA_KEYS["string"]] = _entry("string")
    if "bool" in spec.extras:
        entries[EXTRA_KEYS["bool"]] = _entry("bool")
    if "int64" in spec.extras:
        entries[EXTRA_KEYS["int64"]] = _entry("int64")
    if "float2d" in spec.extras:
        entries[EXTRA_KEYS["float2d"]] = _entry("float32", _GRID)
    if "language" in spec.extras:
        entries["language_persistent"] = _entry("language")
        entries["language_events"] = _entry("language")
    for camera in spec.cameras:
        entries[camera.key] = _camera_entry(camera, spec.fps)
    entries["timestamp"] = _entry("float32")
    for key in ("frame_index", "episode_index", "index", "task_index"):
        entries[key] = _entry("int64")
    return entries


def _camera_entry(camera: DemoCamera, fps: int) -> dict[str, Any]:
    channels = 1 if camera.is_depth else 3
    entry = _entry(camera.kind, (camera.height, camera.width, channels), ["height", "width", "channels"])
    if camera.kind == "image":
        if camera.is_depth:
            entry["info"] = {"is_depth_map": True, "depth_unit": "mm"}
        return entry
    entry["info"] = {
        "is_depth_map": camera.is_depth,
        "video.height": camera.height,
        "video.width": camera.width,
        "video.codec": "hevc" if camera.is_depth else camera.codec,
        "video.pix_fmt": "gray12le" if camera.is_depth else "yuv420p",
        "video.fps": fps,
        "video.channels": channels,
        "has_audio": False,
        "video.g": camera.gop,
    }
    if camera.is_depth:
        entry["info"] |= {
            "depth_unit": "mm",
            "video.depth_min": camera.depth.min_m,
            "video.depth_max": camera.depth.max_m,
            "video.shift": camera.depth.shift_m,
            "video.use_log": camera.depth.use_log,
        }
    return entry


def numeric_keys(spec: DemoSpec) -> tuple[str, ...]:
    """Keys of features whose values are numbers in the tables."""
    skipped = {"video", "image", "string", "language"}
    return tuple(key for key, entry in feature_entries(spec).items() if entry["dtype"] not in skipped)


def row_schema(spec: DemoSpec) -> pa.Schema:
    """Arrow schema of the row tables, with the ``huggingface`` metadata that `datasets` reads."""
    fields: list[pa.Field] = []
    described: dict[str, Any] = {}
    for key, entry in feature_entries(spec).items():
        if entry["dtype"] == "video":
            continue
        arrow_type, description = _column_type(key, entry)
        fields.append(pa.field(key, arrow_type))
        described[key] = description
    metadata = {"huggingface": json.dumps({"info": {"features": described}})}
    return pa.schema(fields, metadata=metadata)


def _column_type(key: str, entry: dict[str, Any]) -> tuple[pa.DataType, Any]:
    dtype, shape = entry["dtype"], entry["shape"]
    if dtype == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())]), {"_type": "Image"}
    if dtype == "language":
        row = _PERSISTENT if key == "language_persistent" else _EVENT
        return pa.list_(row), {"feature": _described_struct(row), "_type": "List"}
    value = {"dtype": dtype, "_type": "Value"}
    base = {
        "float32": pa.float32(),
        "int64": pa.int64(),
        "bool": pa.bool_(),
        "string": pa.string(),
    }[dtype]
    if shape == [1]:
        return base, value
    if len(shape) == 1:
        return pa.list_(base, shape[0]), {"feature": value, "length": shape[0], "_type": "List"}
    return pa.list_(pa.list_(base)), {"shape": shape, "dtype": dtype, "_type": "Array2D"}


def _described_struct(struct: pa.StructType) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for field in struct:
        if pa.types.is_list(field.type):
            described[field.name] = {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"}
        else:
            dtype = "float32" if pa.types.is_floating(field.type) else "string"
            described[field.name] = {"dtype": dtype, "_type": "Value"}
    return described


def episode_columns(spec: DemoSpec, episode: int, painters: dict[str, Painter]) -> dict[str, Any]:
    """Values of all table columns for one episode, arrays of shape ``(length, ...)`` or lists.

    Args:
        spec: The dataset.
        episode: Its index.
        painters: By key, for the RGB cameras that are stored as images.
    """
    length = spec.episode_lengths[episode]
    random = np.random.default_rng([spec.seed, 1 << 20, episode])
    frames = np.arange(length, dtype=np.int64)
    columns: dict[str, Any] = {
        "observation.state": random.standard_normal((length, 6), dtype=np.float32),
        "action": random.standard_normal((length, 6), dtype=np.float32),
        "next.reward": (frames / length).astype(np.float32),
        "next.done": frames == length - 1,
        "timestamp": (frames / spec.fps).astype(np.float32),
        "frame_index": frames,
        "episode_index": np.full(length, episode, dtype=np.int64),
        "index": frames + sum(spec.episode_lengths[:episode]),
        "task_index": np.full(length, episode % len(spec.tasks), dtype=np.int64),
    }
    if "string" in spec.extras:
        columns[EXTRA_KEYS["string"]] = [f"episode {episode}, frame {frame} ✓" for frame in range(length)]
    if "bool" in spec.extras:
        columns[EXTRA_KEYS["bool"]] = (frames // 3 + episode) % 2 == 0
    if "int64" in spec.extras:
        # Beyond 2**53, so that a detour through floats is noticed.
        columns[EXTRA_KEYS["int64"]] = (np.int64(1) << 53) + 1 + 1000 * episode + frames
    if "float2d" in spec.extras:
        columns[EXTRA_KEYS["float2d"]] = random.standard_normal((length, *_GRID), dtype=np.float32)
    if "language" in spec.extras:
        columns |= _language_columns(episode, length)
    for number, camera in enumerate(spec.cameras):
        if camera.kind == "image":
            columns[camera.key] = [
                {
                    "bytes": _image_bytes(camera, number, episode, frame, painters),
                    "path": f"frame-{frame:06d}",
                }
                for frame in range(length)
            ]
    return columns


def _language_columns(episode: int, length: int) -> dict[str, Any]:
    plan = {
        "role": "assistant",
        "content": f"plan of episode {episode}",
        "style": "plan",
        "timestamp": 0.0,
        "camera": None,
        "tool_calls": None,
    }
    events: list[list[dict[str, Any]]] = [
        [
            {
                "role": "user",
                "content": f"stop at {frame}?",
                "style": "interjection",
                "camera": None,
                "tool_calls": [],
            }
        ]
        if frame % 4 == 1
        else []
        for frame in range(length)
    ]
    return {"language_persistent": [[plan]] * length, "language_events": events}


def _image_bytes(
    camera: DemoCamera, number: int, episode: int, frame: int, painters: dict[str, Painter]
) -> bytes:
    buffer = io.BytesIO()
    if camera.is_depth:
        codes: NDArray[np.uint16] = depth_codes(number, episode, frame, camera.height, camera.width)
        Image.fromarray(codes).save(buffer, format="TIFF", compression="raw")
    else:
        picture = painters[camera.key].paint(episode, frame)
        Image.fromarray(picture).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
