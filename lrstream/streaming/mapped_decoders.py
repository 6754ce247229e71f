"""TorchCodec as a decoder: over mini-MP4s in memory, told by the index where each frame is.

TorchCodec reads containers, so each episode and camera has a decoder of its own, which reads the mini-MP4
from the episode's bytes as they are in memory. Its list of frames comes from the index
(``custom_frame_mappings``), so nothing is scanned.

Two things are looked at that TorchCodec does not promise. Every picture must carry the time of the frame that
was asked for. And the first picture of every episode and camera is decoded a second time by PyAV: pictures
that differ are refused, since samples may not depend on the decoder. That happens: TorchCodec takes AV1 and
VP9 of full range for limited range.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from lrstream.errors import DecodeError, LrstreamError, UsageError
from lrstream.mp4.excerpt import frame_mappings
from lrstream.mp4.span import Span
from lrstream.mp4.synthesis import mini_mp4_frames, mini_mp4_header
from lrstream.streaming.clip import Clip
from lrstream.streaming.decode import DecoderPool, PictureSink, decoding_runs
from lrstream.streaming.pictures import PictureConverter

__all__ = ["MOST_DIFFERENCE", "MappedDecoders", "load_torchcodec"]

MOST_DIFFERENCE = 2
"""Most that a value of a picture may differ from PyAV's, of 255: rounding of another FFmpeg's scaler."""

_USE_PYAV = "Use decoder='pyav', which is the default."


def load_torchcodec() -> Any:
    """TorchCodec's ``VideoDecoder``.

    Raises:
        UsageError: It is not installed, or cannot be loaded here.
    """
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "torchcodec":
            raise UsageError(
                "decoder='torchcodec' needs TorchCodec, which is not installed.",
                hint="pip install 'lrstream[torchcodec]', and FFmpeg's libraries (apt install ffmpeg). "
                + _USE_PYAV,
            ) from error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"decoder='torchcodec': TorchCodec is installed, but cannot be loaded ({reason[0]}).",
            hint="It needs FFmpeg's shared libraries (apt install ffmpeg), a release that fits this PyTorch, "
            "and CUDA's libraries unless that release is built for processors. " + _USE_PYAV,
        ) from error
    return VideoDecoder


class _MiniMp4File:
    """A mini-MP4 as a file: its header, and the clip's bytes where they are.

    The clip is not kept alive: at its end its bytes are given back, whoever still holds the decoder.
    """

    def __init__(self, header: bytes, clip: Clip) -> None:
        self._header = header
        self._clip = weakref.ref(clip)
        self._size = len(header) + len(clip.payload)
        self._at = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes from where the last read ended."""
        clip = self._clip()
        if clip is None:
            raise LrstreamError("A decoder reads from an episode that is gone.")
        start, self._at = self._at, min(self._at + size, self._size)
        begin, end = start - len(self._header), self._at - len(self._header)
        if begin >= 0:
            return clip.payload[begin:end]
        return self._header[start : self._at] + clip.payload[: max(0, end)]

    def seek(self, offset: int, whence: int) -> int:
        """As of any file."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at


class _MappedDecoder:
    """A decoder of one clip. One thread at a time."""

    def __init__(self, clip: Clip, video_decoder: Any) -> None:
        track = clip.track
        span = Span(0, track.samples.num_samples, 0, len(clip.payload))
        ticks = mini_mp4_frames(track, span)[0]
        self._times_s: NDArray[np.float64] = np.sort(ticks) / track.timescale
        self._tolerance_s = 0.5 / track.timescale + 1e-9 * float(self._times_s[-1])
        self.clip_id = id(clip)
        self.is_checked = False
        self.converter = PictureConverter()
        self._decoder = video_decoder(
            _MiniMp4File(mini_mp4_header(track, span), clip),
            dimension_order="NHWC",  # as it comes, without a second pass
            num_ffmpeg_threads=1,
            device="cpu",
            custom_frame_mappings=frame_mappings(track, span),
        )

    def pictures(self, ranks: Sequence[int]) -> NDArray[np.uint8]:
        """Pictures, uint8 ``(n, height, width, 3)``.

        Raises:
            ValueError: One of them is not the one that was asked for.
        """
        batch = self._decoder.get_frames_at(list(ranks))
        times_s = batch.pts_seconds.numpy()
        wanted_s = self._times_s[list(ranks)]
        if np.abs(times_s - wanted_s).max() > self._tolerance_s:
            raise ValueError(f"gave pictures of {times_s.tolist()} s, asked for {wanted_s.tolist()} s")
        pictures: NDArray[np.uint8] = batch.data.numpy()
        return pictures


class MappedDecoders(DecoderPool):
    """Decodes some cameras by TorchCodec, and all others as `DecoderPool` does.

    At most `capacity` decoders of TorchCodec are open, the least recently used closed first, and those of
    episodes that are gone before; for the other cameras, and for comparing, as many of PyAV. Thread-safe;
    belongs to one process.

    Args:
        capacity: See above, at least 1.
        cameras: Cameras of RGB pictures.

    Raises:
        UsageError: TorchCodec cannot be used.
    """

    def __init__(self, capacity: int, cameras: Collection[str]) -> None:
        super().__init__(capacity)
        self._cameras = frozenset(cameras)
        self._video_decoder = load_torchcodec()
        self._mapped_changed = threading.Condition()
        self._idle_mapped: OrderedDict[int, _MappedDecoder] = OrderedDict()  # least recently used first
        self._lent: set[int] = set()
        self._gone: deque[int] = deque()  # clips that are no more; appended to by the garbage collector
        self._watched: dict[int, weakref.ref[Clip]] = {}
        self._num_mapped_opened = 0
        self._is_ended = False

    @property
    def num_open(self) -> int:
        """Decoders that are open now, of both kinds."""
        return super().num_open + len(self._idle_mapped) + len(self._lent)

    @property
    def num_opened(self) -> int:
        """Decoders opened so far, of both kinds."""
        return super().num_opened + self._num_mapped_opened

    def write(self, clip: Clip, ranks: Sequence[int], sink: PictureSink) -> None:
        """Hand pictures of a clip to `sink`, by their places in `ranks`.

        Raises:
            DecodeError: TorchCodec refused the bytes, or its pictures are not those of PyAV.
        """
        if clip.camera not in self._cameras:
            super().write(clip, ranks, sink)
            return
        decoding_runs(clip, ranks)  # refuses pictures without a keyframe
        with self._lend_mapped(clip) as decoder:
            try:
                pictures = decoder.pictures(ranks)
            except (RuntimeError, ValueError, IndexError) as error:
                raise _failure(clip, error) from error
            if not decoder.is_checked:
                self._compare(clip, ranks[0], pictures[0])
                decoder.is_checked = True
            for position, pixels in enumerate(pictures):
                picture = av.VideoFrame.from_numpy_buffer(pixels, format="rgb24")
                sink(position, picture, decoder.converter)

    def close(self) -> None:
        """Close all decoders; those that are lent when they come back."""
        super().close()
        with self._mapped_changed:
            self._is_ended = True
            self._idle_mapped.clear()
            self._watched.clear()

    def _compare(self, clip: Clip, rank: int, pixels: NDArray[np.uint8]) -> None:
        """Refuse a picture that is not PyAV's."""
        expected = np.empty((3, *pixels.shape[:2]), dtype=np.uint8)

        def keep(position: int, picture: av.VideoFrame, converter: PictureConverter) -> None:
            converter.write_rgb(picture, expected)

        super().write(clip, [rank], keep)
        found = pixels.transpose(2, 0, 1).astype(np.int16)
        difference = int(np.abs(found - expected).max())
        if difference > MOST_DIFFERENCE:
            raise DecodeError(
                f"TorchCodec's picture of {clip.config.codec} video differs from PyAV's by up to "
                f"{difference} of 255 ({clip.place}); allowed is {MOST_DIFFERENCE}.",
                hint="TorchCodec does not convert this format alike, such as AV1 and VP9 of full range. "
                + _USE_PYAV,
                **clip.error_fields(),
            )

    @contextmanager
    def _lend_mapped(self, clip: Clip) -> Iterator[_MappedDecoder]:
        key = id(clip)
        decoder = self._take_mapped(clip)
        is_reusable = False
        try:
            if decoder is None:
                try:
                    decoder = _MappedDecoder(clip, self._video_decoder)
                except (RuntimeError, ValueError) as error:
                    raise _failure(clip, error) from error
            yield decoder
            is_reusable = True
        finally:
            with self._mapped_changed:
                self._lent.discard(key)
                if is_reusable and decoder is not None and not self._is_ended:
                    self._idle_mapped[key] = decoder
                    if key not in self._watched:
                        gone = self._gone
                        self._watched[key] = weakref.ref(clip, lambda _: gone.append(key))
                self._mapped_changed.notify_all()

    def _take_mapped(self, clip: Clip) -> _MappedDecoder | None:
        """The clip's decoder; None where it is to be opened, for which there is room then."""
        key = id(clip)
        with self._mapped_changed:
            while True:
                # First, because a new clip may have the number of one that is gone.
                while self._gone:
                    gone = self._gone.popleft()
                    self._idle_mapped.pop(gone, None)
                    self._watched.pop(gone, None)
                if key not in self._lent:
                    decoder = self._idle_mapped.pop(key, None)
                    has_room = len(self._idle_mapped) + len(self._lent) < self.capacity
                    if decoder is None and not has_room and self._idle_mapped:
                        evicted, _ = self._idle_mapped.popitem(last=False)
                        self._watched.pop(evicted, None)
                        has_room = True
                    if decoder is not None or has_room:
                        self._lent.add(key)
                        self._num_mapped_opened += decoder is None
                        return decoder
                self._mapped_changed.wait()


def _failure(clip: Clip, error: Exception) -> DecodeError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DecodeError(
        f"TorchCodec cannot decode {clip.config.codec} video of {clip.place}: {reason}.",
        hint="Where decoder='pyav' can, it is TorchCodec's limit; else the file is damaged: run "
        "`lrstream validate`.",
        **clip.error_fields(),
    )
