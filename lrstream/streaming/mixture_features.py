"""What the samples of a mixture have in common: the features of all members, alike in every one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from lrstream.errors import UsageError
from lrstream.layout.info import Feature
from lrstream.layout.rows import ROW_KEYS
from lrstream.streaming.samples import SampleBuilder

__all__ = ["KEY_OF_MEMBER", "check_frame_rates", "common_features", "member_names"]

KEY_OF_MEMBER = "dataset_index"
"""Key of a sample that says which member it is from."""

_CHANNELS = (1, 3, 4)


class _Delivered(NamedTuple):
    """What arrives in a sample under one key; None where it cannot be told before."""

    what: str
    dtype: str
    shape: tuple[int, ...] | None
    window: int | None
    has_padding: bool

    def differs_from(self, other: _Delivered) -> bool:
        if None in (self.shape, other.shape):
            return self._replace(shape=None) != other._replace(shape=None)
        return self != other

    def __str__(self) -> str:
        shape = "of a size that its transforms decide" if self.shape is None else str(self.shape)
        window = "no window" if not self.has_padding else f"a window of {self.window or 1}"
        return f"{self.what} {self.dtype} {shape}, {window}"


def common_features(builders: Sequence[SampleBuilder], names: Sequence[str]) -> list[str]:
    """Keys that all members have, in the order of the first one; says what is left out.

    Args:
        builders: Of each member.
        names: What each member is called in messages.

    Raises:
        UsageError: A key means different things in two members, so that no batch could hold both.

    Warns:
        RuntimeWarning: Once, with everything that only some of the members have.
    """
    for builder, name in zip(builders, names, strict=True):
        if KEY_OF_MEMBER in builder.features:
            raise UsageError(
                f"{name} has a feature called {KEY_OF_MEMBER!r}, which in a mixture says which member a "
                "sample is from.",
                hint="Leave it out with features=[...].",
            )
    common = [key for key in builders[0].features if all(key in builder.features for builder in builders)]
    dropped = [
        f"{', '.join(only)} of {name}"
        for builder, name in zip(builders, names, strict=True)
        if (only := [key for key in builder.features if key not in common and key not in ROW_KEYS])
    ]
    if dropped:
        warnings.warn(
            f"Samples of this mixture have what all members have. Left out, and not read: "
            f"{'; '.join(dropped)}. Name what you want with features=[...] in each member.",
            RuntimeWarning,
            stacklevel=3,
        )
    for key in (*common, *(key for key in ROW_KEYS if key not in common)):
        first = _delivered(key, builders[0])
        for builder, name in zip(builders[1:], names[1:], strict=True):
            other = _delivered(key, builder)
            if first.differs_from(other):
                raise UsageError(
                    f"Members of a mixture differ in {key!r}: {names[0]} has {first}; {name} has {other}.",
                    hint="Leave it out with features=[...], or make the members alike (delta_timestamps, "
                    "return_uint8, decode_hook, depth_output_unit; image_transforms of each member may "
                    "resize pictures).",
                    key=key,
                )
    return common


def check_frame_rates(rates: Sequence[float], names: Sequence[str], *, allow_different: bool) -> None:
    """Refuse members of different frame rates unless that was asked for.

    Raises:
        UsageError: The rates differ.
    """
    if allow_different or all(rate == rates[0] for rate in rates):
        return
    listing = ", ".join(f"{name} {rate}" for name, rate in zip(names, rates, strict=True))
    raise UsageError(
        f"Members of a mixture have different frame rates: {listing} frames per second.",
        hint="With allow_different_fps=True they are mixed as they are: the seconds of delta_timestamps are "
        "each member's own multiples of 1 / fps, and nothing is resampled.",
    )


def _delivered(key: str, builder: SampleBuilder) -> _Delivered:
    feature = builder.features.get(key)
    if feature is None:  # tables may have it without a declaration
        feature = Feature(key, "numeric", "float32" if key == "timestamp" else "int64", (1,))
    group = builder.windows.keys.get(key)
    length = None if group is None else len(builder.windows.groups[group])
    # A video's window of one frame loses its axis; an image's does not.
    window = None if feature.in_video and length == 1 else length
    what, dtype, shape = _value(feature, builder)
    return _Delivered(what, dtype, shape, window, length is not None)


def _value(feature: Feature, builder: SampleBuilder) -> tuple[str, str, tuple[int, ...] | None]:
    kind = feature.kind
    if feature.key in builder.decode_hooks:
        return "what a decode_hook returns", "anything", None
    if kind in ("video", "image"):
        is_raw = builder.return_uint8 if kind == "video" else builder.return_uint8 == "all"
        shape = None if builder.image_transforms is not None else _channels_first(feature.shape)
        return "pictures", "uint8" if is_raw else "float32", shape
    if kind in ("depth", "depth_image"):
        return f"depth in {builder.depth_unit}", "float32", (1, *_channels_first(feature.shape)[1:])
    if kind == "numeric":
        return "numbers", _tensor_type(feature.dtype), () if feature.shape == (1,) else feature.shape
    return kind, "text" if kind == "string" else "annotations", ()


def _tensor_type(dtype: str) -> str:
    if dtype == "bool":
        return "bool"
    return "float32" if dtype.startswith("float") else "int64"


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a picture as delivered; info.json has the channels at either end."""
    if len(shape) == 3 and shape[0] not in _CHANNELS and shape[-1] in _CHANNELS:
        return (shape[-1], *shape[:-1])
    return shape


def member_names(repo_ids: Sequence[str]) -> list[str]:
    """What members are called in messages."""
    return [f"member {number} ({name})" for number, name in enumerate(repo_ids)]
