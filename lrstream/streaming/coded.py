"""Pictures left to the user: coded, with all that a decoder needs, handed to a decode hook.

A hook is called in place of decoding and says what the sample holds: pictures from a decoder of its own, or
`CodedPictures` as they are, which go through a DataLoader to be decoded on an accelerator by the training
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data._utils.collate import default_collate_fn_map

from lrstream.errors import DecodeError, LrstreamError, UsageError
from lrstream.layout.info import Feature
from lrstream.mp4.codec_config import CodecConfig
from lrstream.mp4.excerpt import excerpt, frame_mappings
from lrstream.mp4.span import Span
from lrstream.mp4.synthesis import mini_mp4, mini_mp4_frames
from lrstream.mp4.track import TrackIndex
from lrstream.streaming.clip import Clip
from lrstream.streaming.decode import decoding_runs
from lrstream.streaming.mapped_decoders import load_torchcodec

__all__ = ["CodedPacket", "CodedPictures", "DecodeHook", "check_decoding", "run_hook"]


class CodedPacket(NamedTuple):
    """One coded picture.

    Attributes:
        data: As stored in MP4: NAL units with lengths for H.264 and HEVC, one temporal unit for AV1.
        pts: Place of the picture, in the order of presentation, among all that were fetched for its episode.
        is_keyframe: Whether decoding may begin here.
    """

    data: memoryview
    pts: int
    is_keyframe: bool


@dataclass(frozen=True, slots=True, eq=False)
class CodedPictures:
    """The coded pictures of one camera for one sample. Immutable, picklable, and its own memory.

    Holds the samples from the first keyframe that is needed to the last wanted picture, in decode order and
    without gaps. `torch.utils.data.default_collate` makes a list of them.

    Attributes:
        camera: Feature key.
        episode_index: The episode.
        file_path: Source file, relative to the dataset's root.
        config: Codec, its global headers (`extradata`), size and colour as the container says.
        wanted: `pts` of the picture of each row of the window, or of the only one; rows that repeat a picture
            repeat its number.
        is_window: Whether samples have an axis of time for this camera.
        runs: Packets that suffice, as half-open ranges of places in `packets`, ascending. Each begins at a
            keyframe; a decoder is drained and flushed between them.
        pts: `pts` of each packet.
        track: Index of these packets alone; offsets count from the start of `data`.
        data: Their bytes.
    """

    camera: str
    episode_index: int
    file_path: str
    config: CodecConfig
    wanted: tuple[int, ...]
    is_window: bool
    runs: tuple[tuple[int, int], ...]
    pts: tuple[int, ...]
    track: TrackIndex
    data: bytes

    @classmethod
    def cut(cls, clip: Clip, wanted: Sequence[int], *, is_window: bool) -> CodedPictures:
        """What some pictures of a clip, by presentation rank, are decoded from.

        Raises:
            DecodeError: One depends on a keyframe that the clip does not hold.
        """
        table = clip.table
        runs = decoding_runs(clip, list(dict.fromkeys(wanted)))
        first, stop = runs[0].first, max(run.stop for run in runs)
        low, high = min(table.starts[first:stop]), max(table.stops[first:stop])
        return cls(
            camera=clip.camera,
            episode_index=clip.episode_index,
            file_path=clip.file_path,
            config=clip.config,
            wanted=tuple(wanted),
            is_window=is_window,
            runs=tuple((run.first - first, run.stop - first) for run in runs),
            pts=tuple(table.ranks[first:stop]),
            track=excerpt(clip.track, Span(first, stop, low, high)),
            data=clip.payload[low:high],
        )

    @property
    def packets(self) -> list[CodedPacket]:
        """The packets in decode order, as views of `data`."""
        samples = self.track.samples
        data = memoryview(self.data)
        sync = set(samples.sync_samples.tolist())
        places = zip(samples.offsets_bytes.tolist(), samples.sizes_bytes.tolist(), self.pts, strict=True)
        return [
            CodedPacket(data[offset : offset + size], pts, number in sync)
            for number, (offset, size, pts) in enumerate(places)
        ]

    @property
    def positions(self) -> list[int]:
        """For each of `wanted` its place in `mini_mp4` among all coded pictures in the order of presentation.

        That is how TorchCodec counts frames with `frame_mappings`. Decoders that hand out picture after
        picture leave out those that need an earlier keyframe (open GOP): go by `times` there.
        """
        places = {pts: place for place, pts in enumerate(sorted(self.pts))}
        return [places[pts] for pts in self.wanted]

    @property
    def times(self) -> list[int]:
        """For each of `wanted` its presentation time in `mini_mp4`, in ticks: the `pts` of a frame."""
        ticks = mini_mp4_frames(self.track, self._span)[0].tolist()
        by_pts = dict(zip(self.pts, ticks, strict=True))
        return [by_pts[pts] for pts in self.wanted]

    def mini_mp4(self) -> bytes:
        """A self-contained MP4 file of the packets."""
        return mini_mp4(self.track, self._span, self.data)

    def frame_mappings(self) -> str:
        """The frames of `mini_mp4` as JSON: TorchCodec's ``custom_frame_mappings``, which spare it a scan."""
        return frame_mappings(self.track, self._span)

    @property
    def _span(self) -> Span:
        return Span(0, len(self.pts), 0, len(self.data))


def _list_coded(batch: list[CodedPictures], *, collate_fn_map: Any = None) -> list[CodedPictures]:
    return list(batch)


default_collate_fn_map[CodedPictures] = _list_coded

DecodeHook = Callable[[CodedPictures], Any]
"""Called on decode threads, several at once; the sample holds what it returns under the camera's key."""


def check_decoding(
    decoder: str,
    hook: DecodeHook | Mapping[str, DecodeHook] | None,
    strategy: str,
    features: Mapping[str, Feature],
) -> dict[str, DecodeHook]:
    """The decode hook of each camera that has one, once all that decides on decoding has been looked at.

    Args:
        decoder: "pyav" or "torchcodec".
        hook: One for all cameras of RGB video, or by key.
        strategy: The sampling strategy.
        features: Those that are delivered.

    Raises:
        UsageError: The hook is none, or of something else than RGB video; the strategy keeps decoded pictures
            itself; TorchCodec cannot be used.
    """
    cameras = [key for key, feature in features.items() if feature.kind == "video"]
    hooks: dict[str, DecodeHook] = {}
    if isinstance(hook, Mapping):
        hooks = dict(hook)
    elif hook is not None:
        hooks = dict.fromkeys(cameras, hook)
        if not callable(hook):
            raise UsageError(f"decode_hook is {hook!r}, expected a callable, or callables by camera.")
    for key, one in hooks.items():
        if key not in cameras:
            raise UsageError(
                f"decode_hook has {key!r}, which is no RGB video among the delivered features "
                f"({', '.join(cameras) or 'there is none'}).",
                hint="Depth and stored images are decoded by the loader.",
            )
        if not callable(one):
            raise UsageError(f"decode_hook has {one!r} for {key!r}, expected a callable.")
    if strategy == "gop" and (hooks or decoder != "pyav"):
        what = "decode_hook" if hooks else f"decoder={decoder!r}"
        raise UsageError(
            f"{what} does not go with sampling_strategy='gop', which keeps pictures as PyAV decodes them.",
            hint="Use sampling_strategy='remaining' or 'round_robin'.",
        )
    if decoder == "torchcodec":
        load_torchcodec()  # rather here than in every worker
    return hooks


def run_hook(hook: DecodeHook, clip: Clip, wanted: Sequence[int], *, is_window: bool) -> Any:
    """What a hook makes of some pictures.

    Raises:
        DecodeError: It failed; the cause is its own error.
    """
    coded = CodedPictures.cut(clip, wanted, is_window=is_window)
    try:
        return hook(coded)
    except LrstreamError:
        raise
    except Exception as error:
        raise DecodeError(
            f"The decode hook failed with {type(error).__name__}: {error} ({clip.place}, pictures "
            f"{', '.join(map(str, wanted[:4]))}{' ...' if len(wanted) > 4 else ''}).",
            hint="The error above is the hook's own.",
            **clip.error_fields(),
        ) from error
