"""`meta/info.json`: version, frame rate, features and path templates (DS-2, DS-4, DS-5)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from lrstream.errors import DatasetFormatError, NotFoundError
from lrstream.layout.templates import PathTemplate
from lrstream.storage.store import DatasetStore

__all__ = ["INFO_PATH", "DatasetInfo", "DepthParameters", "Feature", "FeatureKind", "load_info", "parse_info"]

INFO_PATH = "meta/info.json"

FeatureKind = Literal["video", "depth", "image", "depth_image", "numeric", "string", "language"]

_VERSION = re.compile(r"v?(\d+)(?:\.(\d+))?(?:\.\d+)*")
_LANGUAGE_KEYS = ("language_persistent", "language_events")
_NUMERIC = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")
_CONVERTER_HINT = (
    "Convert it with LeRobot: python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=OWNER/NAME "
    "(in newer releases lerobot.scripts.convert_dataset_v21_to_v30); a v2.0 dataset goes to v2.1 first."
)


@dataclass(frozen=True, slots=True)
class DepthParameters:
    """How the 12-bit codes of a depth video were made from distances.

    Attributes:
        min_m: Distance of code 0, metres.
        max_m: Distance of the largest code, metres.
        shift_m: Added before the logarithm, metres.
        use_log: Whether codes are spaced evenly in log(distance + shift) rather than in distance.
        unit: Unit the dataset says its depth was recorded in, ``"m"`` or ``"mm"``; None if it says nothing.
    """

    min_m: float = 0.01
    max_m: float = 10.0
    shift_m: float = 3.5
    use_log: bool = True
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Feature:
    """One declared feature.

    Attributes:
        key: Name, as in samples.
        kind: ``video`` and ``depth`` are stored as MP4, everything else as Parquet columns.
        dtype: As declared (``float32``, ``video``, ...).
        shape: As declared; ``(height, width, channels)`` in any order for pictures.
        names: As declared (list, mapping or None).
        depth: Quantization of ``depth`` and unit of ``depth_image`` features, else None.
        info: The feature's ``info`` block (codec, pixel format, ...).
    """

    key: str
    kind: FeatureKind
    dtype: str
    shape: tuple[int, ...]
    names: Any = None
    depth: DepthParameters | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_video(self) -> bool:
        """Whether the feature is stored in MP4 files rather than in the tables."""
        return self.kind in ("video", "depth")


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Checked content of `meta/info.json`.

    Attributes:
        codebase_version: As written, e.g. ``v3.0``.
        fps: Frames per second; an int where it is integral.
        features: All features by key, in the order of the file.
        data_path: Template of the Parquet files.
        video_path: Template of the MP4 files, None for datasets without video.
        total_episodes: As declared, None where absent.
        total_frames: As declared, None where absent.
        chunks_size: Most files in one chunk directory.
        raw: The whole file as parsed.
    """

    codebase_version: str
    fps: float
    features: dict[str, Feature]
    data_path: PathTemplate
    video_path: PathTemplate | None
    total_episodes: int | None
    total_frames: int | None
    chunks_size: int
    raw: dict[str, Any]

    @property
    def video_keys(self) -> tuple[str, ...]:
        """Keys stored in MP4 files (RGB and depth), in declared order."""
        return tuple(key for key, feature in self.features.items() if feature.in_video)


def load_info(store: DatasetStore) -> DatasetInfo:
    """Read and check `meta/info.json`.

    Raises:
        NotFoundError: If there is none.
        DatasetFormatError: If it cannot be used, or the dataset has another version (DS-5).
    """
    where = f"{store.location}/{INFO_PATH}"
    try:
        data = store.read_bytes(INFO_PATH)
    except NotFoundError as error:
        if store.exists("meta/episodes.jsonl"):
            raise _outdated(where, "v2.x (it has meta/episodes.jsonl and no meta/info.json)") from error
        raise NotFoundError(
            f"{store.location} is not a LeRobotDataset: it has no {INFO_PATH}.",
            hint="Give the directory, repository or URL that contains 'meta', 'data' and 'videos'.",
            file_path=INFO_PATH,
        ) from error
    return parse_info(data, where)


def parse_info(data: bytes, where: str) -> DatasetInfo:
    """Check the content of an `info.json`; ``where`` names the file in messages."""
    if data.startswith(b"version https://git-lfs"):
        raise DatasetFormatError(
            f"{where} is a Git LFS pointer, not the file itself.", hint="Run: git lfs pull"
        )
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DatasetFormatError(f"{where} is not valid JSON: {error}.", file_path=INFO_PATH) from error
    if not isinstance(raw, dict):
        raise DatasetFormatError(f"{where} holds a {type(raw).__name__}, expected a JSON object.")
    version = _check_version(raw.get("codebase_version"), where)
    features = raw.get("features")
    if not isinstance(features, dict) or not features:
        raise DatasetFormatError(f"{where}: 'features' is {_shown(features)}, expected a non-empty object.")
    parsed = {key: _feature(key, value, where) for key, value in features.items()}
    data_path = _template(raw, "data_path", ("chunk_index", "file_index"), where)
    video_path = _template(raw, "video_path", ("video_key", "chunk_index", "file_index"), where)
    videos = [key for key, feature in parsed.items() if feature.in_video]
    if data_path is None:
        raise DatasetFormatError(f"{where}: 'data_path' is missing, expected a path template.")
    if videos and video_path is None:
        raise DatasetFormatError(
            f"{where}: feature {videos[0]!r} is stored as video, but 'video_path' is missing or null."
        )
    return DatasetInfo(
        codebase_version=version,
        fps=_fps(raw.get("fps"), where),
        features=parsed,
        data_path=data_path,
        video_path=video_path,
        total_episodes=_count(raw, "total_episodes", where),
        total_frames=_count(raw, "total_frames", where),
        chunks_size=_count(raw, "chunks_size", where) or 1000,
        raw=raw,
    )


def _check_version(version: object, where: str) -> str:
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None or not isinstance(version, str):
        raise DatasetFormatError(f"{where}: 'codebase_version' is {_shown(version)}, expected e.g. 'v3.0'.")
    major = int(match.group(1))
    if major < 3:
        raise _outdated(where, version)
    if major > 3:
        raise DatasetFormatError(
            f"{where}: the dataset has version {version}, and lrstream reads v3.x.",
            hint="A newer lrstream may read it.",
            codebase_version=version,
        )
    return version


def _outdated(where: str, version: str) -> DatasetFormatError:
    return DatasetFormatError(
        f"{where}: the dataset has version {version}, and lrstream reads v3.x.",
        hint=_CONVERTER_HINT,
        codebase_version=version,
    )


def _is_number(value: object) -> TypeGuard[float]:
    # JSON as Python reads it also has NaN and Infinity, and true is an int.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _fps(value: object, where: str) -> float:
    if not _is_number(value) or value <= 0:
        raise DatasetFormatError(f"{where}: 'fps' is {_shown(value)}, expected a positive number.")
    return int(value) if float(value).is_integer() else float(value)


def _count(raw: Mapping[str, Any], name: str, where: str) -> int | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DatasetFormatError(f"{where}: {name!r} is {_shown(value)}, expected a count.")
    return value


def _template(raw: Mapping[str, Any], name: str, fields: tuple[str, ...], where: str) -> PathTemplate | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise DatasetFormatError(f"{where}: {name!r} is {_shown(value)}, expected a path template.")
    return PathTemplate.parse(value, fields, f"{where}: {name!r}")


def _feature(key: str, value: object, where: str) -> Feature:
    here = f"{where}: feature {key!r}"
    if not isinstance(value, dict):
        raise DatasetFormatError(f"{here} is {_shown(value)}, expected an object with 'dtype' and 'shape'.")
    dtype, shape = value.get("dtype"), value.get("shape", ())
    if not isinstance(dtype, str):
        raise DatasetFormatError(f"{here}: 'dtype' is {_shown(dtype)}, expected a string.")
    if not isinstance(shape, (list, tuple)) or not all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape
    ):
        raise DatasetFormatError(f"{here}: 'shape' is {_shown(shape)}, expected a list of sizes.")
    info = _info_block(value, here)
    is_depth = bool(info.get("is_depth_map") or info.get("video.is_depth_map"))
    kind = _kind(key, dtype, is_depth, here)
    return Feature(
        key=key,
        kind=kind,
        dtype=dtype,
        shape=tuple(shape),
        names=value.get("names"),
        depth=_depth(info, here) if kind in ("depth", "depth_image") else None,
        info=info,
    )


def _info_block(feature: Mapping[str, Any], here: str) -> dict[str, Any]:
    # Datasets converted from v2 keep what is now "info" under "video_info".
    merged: dict[str, Any] = {}
    for name in ("video_info", "info"):
        block = feature.get(name)
        if block is None:
            continue
        if not isinstance(block, dict):
            raise DatasetFormatError(f"{here}: {name!r} is {_shown(block)}, expected an object.")
        merged.update(block)
    return merged


def _kind(key: str, dtype: str, is_depth: bool, here: str) -> FeatureKind:
    if dtype == "video":
        return "depth" if is_depth else "video"
    if dtype == "image":
        return "depth_image" if is_depth else "image"
    if dtype == "language" or key in _LANGUAGE_KEYS:
        return "language"
    if dtype == "string":
        return "string"
    if _NUMERIC.fullmatch(dtype):
        return "numeric"
    raise DatasetFormatError(
        f"{here}: dtype {dtype!r} is not supported; expected video, image, string, language, bool, or an "
        "int, uint or float type with its number of bits."
    )


def _depth(info: Mapping[str, Any], here: str) -> DepthParameters:
    defaults = DepthParameters()

    def metres(name: str, default: float) -> float:
        value = info.get(f"video.{name}", info.get(name))
        if value is None:
            return default
        if not _is_number(value):
            raise DatasetFormatError(f"{here}: depth parameter {name!r} is {_shown(value)}, expected metres.")
        return float(value)

    use_log = info.get("video.use_log", info.get("use_log"))
    if use_log is not None and not isinstance(use_log, bool):
        raise DatasetFormatError(f"{here}: depth parameter 'use_log' is {_shown(use_log)}, expected a bool.")
    unit = info.get("depth_unit", info.get("video.depth_unit"))
    if unit not in (None, "m", "mm"):
        raise DatasetFormatError(f"{here}: 'depth_unit' is {_shown(unit)}, expected 'm' or 'mm'.")
    depth = DepthParameters(
        min_m=metres("depth_min", defaults.min_m),
        max_m=metres("depth_max", defaults.max_m),
        shift_m=metres("shift", defaults.shift_m),
        use_log=defaults.use_log if use_log is None else use_log,
        unit=unit,
    )
    if depth.min_m >= depth.max_m:
        raise DatasetFormatError(f"{here}: depth_min {depth.min_m} m is not below depth_max {depth.max_m} m.")
    if depth.use_log and depth.min_m + depth.shift_m <= 0:
        raise DatasetFormatError(f"{here}: depth_min {depth.min_m} + shift {depth.shift_m} must be positive.")
    return depth


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
