"""Packets in, pictures out: a decoder fed straight from an episode's bytes, without a container.

What is decoded is what was asked for and what that depends on. Decoding begins at the last sync sample
that is decoded and presented no later than the wanted picture, feeds every packet up to the wanted one,
and then drains the decoder, which hands out what reordering still holds back. Feeding on until the decoder
lets go by itself would decode pictures that nobody asked for, and wait for them.

Errors are not concealed. By default FFmpeg patches damaged H.264 and HEVC pictures up and says so only in
its log; here the decoder is told to give up instead (``err_detect=explode``), as far as the codec notices
at all: no codec checks its payload, so a flipped bit may also just be other pixels (K19). The exception is
H.264 entered at a keyframe that is not an IDR picture, where FFmpeg reports missing references as damage
although nothing that is shown depends on them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

import av
import av.error

from lrstream.errors import DecodeError
from lrstream.mp4.codec_config import CodecConfig
from lrstream.streaming.clip import Clip
from lrstream.streaming.pictures import PictureConverter

__all__ = [
    "Decoder",
    "DecoderPool",
    "DecodingRun",
    "PictureSink",
    "PictureSource",
    "decode_pictures",
    "decoder_names",
    "decoding_runs",
    "open_decoder",
]

# FFmpeg's decoders for a codec, best first. The native `av1` one is absent on purpose: it only drives
# hardware, and says "Function not implemented" where there is none (K13).
_DECODERS = {"av1": ("libdav1d", "libaom-av1"), "vp9": ("vp9", "libvpx-vp9"), "vp8": ("vp8", "libvpx")}
_STRICT_CODECS = frozenset({"h264", "hevc"})
_H264_IDR = 5
# FFmpeg's AVColorRange; PyAV takes its members and plain numbers alike.
_LIMITED_RANGE, _FULL_RANGE = 1, 2


def decoder_names(codec: str) -> tuple[str, ...]:
    """FFmpeg's decoders for a codec, in the order in which they are tried."""
    return _DECODERS.get(codec, (codec,))


class PictureSink(Protocol):
    """Takes decoded pictures, in any order."""

    def __call__(self, position: int, picture: av.VideoFrame, converter: PictureConverter) -> None:
        """Take one picture; it must not be used after the call returns unless it is kept by reference.

        Args:
            position: Place of the picture in the request.
            picture: The decoded picture.
            converter: The decoder's converter, for use during the call.
        """


class PictureSource(Protocol):
    """Where a sample's pictures come from."""

    def write(self, clip: Clip, ranks: Sequence[int], sink: PictureSink) -> None:
        """Hand pictures of one clip to `sink`; see `decode_pictures`."""


@dataclass(slots=True, eq=False)
class Decoder:
    """An open decoder with its converter. One thread at a time."""

    config: CodecConfig
    is_strict: bool
    context: av.VideoCodecContext
    converter: PictureConverter


class DecoderPool:
    """Open decoders, at most `capacity` of them, the least recently used closed first (LD-7, K27).

    Decoders depend on the codec configuration alone, so all episodes and files written by one encoder
    share them. A decoder is lent to one thread at a time; where all are lent and none more may be opened,
    the next thread waits. Thread-safe; belongs to one process and is never forked or pickled (K16).

    Args:
        capacity: Most decoders open at one time, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        # Taken by itself where nobody waits: a `Condition` enters it by a call of Python code.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0
        self._idle: list[Decoder] = []  # least recently used first
        self._num_open = 0
        self._num_opened = 0
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Decoders that are open now."""
        return self._num_open

    @property
    def num_opened(self) -> int:
        """Decoders opened so far; far more than `capacity` means that they are evicted all the time."""
        return self._num_opened

    def write(self, clip: Clip, ranks: Sequence[int], sink: PictureSink) -> None:
        """`decode_pictures` with these decoders."""
        decode_pictures(clip, ranks, sink, self)

    def lend(self, config: CodecConfig, *, is_strict: bool) -> AbstractContextManager[Decoder]:
        """A decoder for this configuration, flushed, for the duration of the block.

        Raises:
            DecodeError: None can be opened.
        """
        return _Loan(self, config, is_strict)

    def _take(self, config: CodecConfig, is_strict: bool) -> Decoder:
        with self._lock:
            while True:
                idle = self._idle
                # The most recently used one: the others may then age and be evicted.
                for place in range(len(idle) - 1, -1, -1):
                    decoder = idle[place]
                    if decoder.is_strict == is_strict and (
                        decoder.config is config or decoder.config == config
                    ):
                        del idle[place]
                        return decoder
                if self._num_open < self.capacity:
                    break
                if idle:
                    del idle[0]
                    self._num_open -= 1
                    break
                self._num_waiting += 1
                try:
                    self._changed.wait()
                finally:
                    self._num_waiting -= 1
            self._num_open += 1
            self._num_opened += 1
        try:
            return Decoder(config, is_strict, open_decoder(config, is_strict=is_strict), PictureConverter())
        except BaseException:
            self._give_back(None)
            raise

    def _give_back(self, decoder: Decoder | None) -> None:
        """Take back a flushed decoder; None = it is gone."""
        with self._lock:
            if decoder is not None and not self._is_closed:
                self._idle.append(decoder)
            else:
                self._num_open -= 1
            if self._num_waiting:
                self._changed.notify()

    def close(self) -> None:
        """Close all decoders; those that are lent when they come back."""
        with self._lock:
            self._is_closed = True
            self._num_open -= len(self._idle)
            self._idle.clear()


class _Loan(AbstractContextManager[Decoder]):
    """A decoder that is lent; a class, since one is made for every picture."""

    __slots__ = ("_config", "_decoder", "_is_strict", "_pool")

    def __init__(self, pool: DecoderPool, config: CodecConfig, is_strict: bool) -> None:
        self._pool = pool
        self._config = config
        self._is_strict = is_strict

    def __enter__(self) -> Decoder:
        self._decoder = self._pool._take(self._config, self._is_strict)
        return self._decoder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reusable: Decoder | None = None
        try:
            if kind is None:
                self._decoder.context.flush_buffers()
                reusable = self._decoder
        finally:
            self._pool._give_back(reusable)


def open_decoder(config: CodecConfig, *, is_strict: bool) -> av.VideoCodecContext:
    """Open a decoder.

    Raises:
        DecodeError: No decoder for the codec is installed, or all of them refuse the configuration.
    """
    refusals = []
    for name in decoder_names(config.codec):
        try:
            context = av.CodecContext.create(name, "r")
        except (av.error.FFmpegError, ValueError) as error:
            refusals.append(f"{name}: {error}")
            continue
        if not isinstance(context, av.VideoCodecContext):
            refusals.append(f"{name}: not a video decoder")
            continue
        # One thread and no threading method: parallelism comes from decoding several samples at once,
        # frame threads would add delay, and slice threads have deadlocked (K12).
        context.thread_count = 1
        context.thread_type = "NONE"
        context.extradata = config.extradata or None
        context.width, context.height = config.width, config.height
        if config.color is not None:
            # As a demuxer does. Decoders overwrite it where the stream says something itself.
            context.color_primaries = config.color.primaries
            context.color_trc = config.color.transfer
            context.colorspace = config.color.matrix
            if config.color.full_range is not None:
                context.color_range = _FULL_RANGE if config.color.full_range else _LIMITED_RANGE
        if is_strict:
            context.options = {"err_detect": "crccheck+explode"}
        try:
            context.open()
        except (av.error.FFmpegError, NotImplementedError, ValueError) as error:
            refusals.append(f"{name}: {error}")
            continue
        return context
    what = {"av1": "AV1", "h264": "H.264", "hevc": "HEVC", "vp9": "VP9"}.get(config.codec, config.codec)
    raise DecodeError(
        f"There is no usable {what} decoder in PyAV {av.__version__} ({'; '.join(refusals)}).",
        hint="Install the PyAV wheels from PyPI, which bring libdav1d for AV1 and the other decoders "
        "(pip install --force-reinstall av).",
        codec=config.codec,
    )


def decode_pictures(clip: Clip, ranks: Sequence[int], sink: PictureSink, pool: DecoderPool) -> None:
    """Decode pictures of one clip, each GOP at most once.

    Args:
        clip: Camera and episode.
        ranks: Distinct presentation ranks, in any order.
        sink: Given every picture, by its place in `ranks`, in the order in which they come out.
        pool: Where decoders come from.

    Raises:
        DecodeError: A decoder refused the bytes or a picture did not come out, naming episode, camera,
            file and byte range.
    """
    if len(ranks) == 1:
        # The usual case; what follows is for all others.
        sample = clip.table.samples[ranks[0]]
        entry = clip.table.entries[sample]
        if entry >= 0:
            _decode_run(clip, DecodingRun(entry, sample + 1, {ranks[0]}), {ranks[0]: 0}, sink, pool)
            return
    positions = {rank: position for position, rank in enumerate(ranks)}
    for run in decoding_runs(clip, ranks):
        _decode_run(clip, run, positions, sink, pool)


class DecodingRun(NamedTuple):
    """Samples to feed one after the other, half-open, and the ranks wanted of them."""

    first: int
    stop: int
    ranks: set[int]


def decoding_runs(clip: Clip, ranks: Sequence[int]) -> list[DecodingRun]:
    """Group wanted pictures by the sync samples at which decoding must begin.

    Where decoding one picture ends at or behind the place at which the next begins, it just goes on.
    """
    table = clip.table
    wanted = []
    for rank in ranks:
        sample = table.samples[rank]
        wanted.append((table.entries[sample], sample, rank))
    wanted.sort()
    runs: list[DecodingRun] = []
    for entry, sample, rank in wanted:
        if entry < 0:
            raise DecodeError(
                f"Picture {rank} depends on a keyframe that its file does not hold ({clip.place}).",
                **clip.error_fields(),
            )
        if runs and entry <= runs[-1].stop:
            last = runs[-1]
            last.ranks.add(rank)
            runs[-1] = last._replace(stop=max(last.stop, sample + 1))
        else:
            runs.append(DecodingRun(entry, sample + 1, {rank}))
    return runs


def _decode_run(
    clip: Clip, run: DecodingRun, positions: dict[int, int], sink: PictureSink, pool: DecoderPool
) -> None:
    """Decode one run; enter one keyframe earlier where a picture does not come out.

    A keyframe that begins a gradual refresh (H.264 recovery point) is marked as a sync sample by common
    writers, but pictures soon after it are complete only if decoding began before it.
    """
    first = run.first
    missing = run.ranks
    while True:
        is_idr = clip.config.codec != "h264" or _holds_idr(clip, first)
        is_strict = is_idr and clip.config.codec in _STRICT_CODECS
        try:
            with pool.lend(clip.config, is_strict=is_strict) as decoder:
                _feed(clip, first, run.stop, missing, positions, sink, decoder)
        except (av.error.FFmpegError, NotImplementedError) as error:
            # Only a recovery point may fail where an earlier entry succeeds.
            if is_idr or first == clip.table.sync_samples[0]:
                raise _refused(clip, first, run.stop, error) from error
        if not missing:
            return
        sync = clip.table.sync_samples
        entry = bisect_left(sync, first)
        if entry == 0:
            raise _absent(clip, first, run.stop, missing)
        first = sync[entry - 1]


def _feed(
    clip: Clip,
    first: int,
    stop: int,
    missing: set[int],
    positions: dict[int, int],
    sink: PictureSink,
    decoder: Decoder,
) -> None:
    """Feed samples ``[first, stop)`` and drain; removes from `missing` what came out undamaged."""
    table = clip.table
    payload = memoryview(clip.payload)
    decode = decoder.context.decode
    for sample in range(first, stop + 1):
        if sample < stop:
            # Any buffer will do, whatever the stubs of PyAV say; it is copied once, into the packet.
            data = payload[table.starts[sample] : table.stops[sample]]
            packet = av.Packet(data)  # type: ignore[arg-type]
            packet.pts = table.ranks[sample]
            packet.dts = sample
            pictures = decode(packet)
        else:
            pictures = decode(None)
        for picture in pictures:
            rank = picture.pts
            if rank in missing and not picture.is_corrupt:
                sink(positions[rank], picture, decoder.converter)
                missing.discard(rank)
        if not missing:
            return


def _holds_idr(clip: Clip, sample: int) -> bool:
    """Whether an H.264 sample holds an IDR picture (ISO/IEC 14496-10, 7.4.1), not just a recovery point."""
    data = memoryview(clip.payload)[clip.table.starts[sample] : clip.table.stops[sample]]
    extradata = clip.config.extradata
    # avcC: the low two bits of byte 4 are the size of the length before each NAL unit, minus one.
    length_size = (extradata[4] & 3) + 1 if len(extradata) > 4 and extradata[0] == 1 else 4
    at = 0
    while at + length_size < len(data):
        if data[at + length_size] & 0x1F == _H264_IDR:
            return True
        at += length_size + int.from_bytes(data[at : at + length_size], "big")
    return False


def _bytes_of(clip: Clip, first: int, stop: int) -> str:
    """Byte range in the file of samples ``[first, stop)``, for messages."""
    low = min(clip.table.starts[first:stop]) + clip.span.start_byte
    high = max(clip.table.stops[first:stop]) + clip.span.start_byte
    return f"bytes [{low}, {high})"


_DAMAGED_HINT = (
    "The file is damaged or was changed after it was indexed: compare it with its source, and run "
    "`lrstream validate`."
)


def _refused(clip: Clip, first: int, stop: int, error: Exception) -> DecodeError:
    return DecodeError(
        f"The {clip.config.codec} decoder refused {_bytes_of(clip, first, stop)} of file {clip.file_path} "
        f"(episode {clip.episode_index}, camera {clip.camera}): {getattr(error, 'strerror', None) or error}.",
        hint=_DAMAGED_HINT,
        **clip.error_fields(),
    )


def _absent(clip: Clip, first: int, stop: int, missing: set[int]) -> DecodeError:
    times = ", ".join(f"{clip.table.times_s[rank]:.6f} s" for rank in sorted(missing)[:4])
    return DecodeError(
        f"The {clip.config.codec} decoder gave no undamaged picture for {len(missing)} of the wanted times "
        f"({times}) from {_bytes_of(clip, first, stop)} of file {clip.file_path} "
        f"(episode {clip.episode_index}, camera {clip.camera}).",
        hint=_DAMAGED_HINT,
        **clip.error_fields(),
    )
