"""TorchCodec as a decoder: the frames of the index, the pixels of PyAV, or an error.

The first part runs everywhere, with FFmpeg's demuxer and decoder in TorchCodec's place behind the same
interface; the second one where TorchCodec can be loaded.
"""

from __future__ import annotations

import functools
import gc
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, read_identity, write_dataset
from lrstream.errors import DecodeError, UsageError
from lrstream.mp4.excerpt import excerpt
from lrstream.mp4.span import Span
from lrstream.streaming import mapped_decoders
from lrstream.streaming.clip import Clip, ClipTable
from lrstream.streaming.mapped_decoders import MappedDecoders, load_torchcodec
from tests.support import media
from tests.support.loader import assert_same_sample, open_loader
from tests.unit.test_decode import CLIPS, Collector, clip_of, prepared, whole_file

CAMERA = "observation.images.top"


@functools.cache
def missing() -> str:
    """Why TorchCodec cannot be used here; empty if it can."""
    try:
        load_torchcodec()
    except UsageError as error:
        return error.message
    return ""


needs_torchcodec = pytest.mark.skipif("missing()", reason=missing() or "it is there")


class StandIn:
    """TorchCodec's `VideoDecoder`, as far as it is used, by PyAV.

    Attributes:
        opened: Decoders made so far.
    """

    opened = 0
    shift = 0  # in the frame that is given
    brighten = 0
    barrier: threading.Barrier | None = None

    def __init__(self, source: Any, *, custom_frame_mappings: str, **options: Any) -> None:
        assert options == {"dimension_order": "NHWC", "num_ffmpeg_threads": 1, "device": "cpu"}
        type(self).opened += 1
        self._times = sorted(frame["pts"] for frame in json.loads(custom_frame_mappings)["frames"])
        container: Any
        with av.open(_File(source)) as container:
            stream = container.streams.video[0]
            self._base = float(stream.time_base)
            self._pictures = {picture.pts: picture for picture in container.decode(stream)}

    def get_frames_at(self, indices: list[int]) -> Any:
        if self.barrier is not None:
            self.barrier.wait(5)
        times = [self._times[min(index + self.shift, len(self._times) - 1)] for index in indices]
        pictures = [self._pictures[time].to_ndarray(format="rgb24") + self.brighten for time in times]
        return SimpleNamespace(
            data=torch.from_numpy(np.stack(pictures).astype(np.uint8)),
            pts_seconds=torch.tensor([time * self._base for time in times], dtype=torch.float64),
        )


class _File(io.RawIOBase):
    """A file of PyAV's that reads as TorchCodec reads: by `read` and `seek` with two arguments."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        assert size > 0
        data: bytes = self._source.read(size)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = self._source.seek(offset, whence)
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    class Own(StandIn):
        opened = 0  # others use the class itself

    monkeypatch.setattr(mapped_decoders, "load_torchcodec", lambda: Own)
    return Own


def pictures_of(pool: MappedDecoders, clip: Clip, ranks: list[int]) -> list[NDArray[np.uint8]]:
    sink = Collector()
    pool.write(clip, ranks, sink)
    return [sink.pictures[place] for place in range(len(ranks))]


def check_every_picture(name: str) -> None:
    clip, expected = prepared(name)
    pool = MappedDecoders(2, [CAMERA])
    order = np.random.default_rng(1).permutation(len(expected)).tolist()
    for rank in order:
        np.testing.assert_array_equal(pictures_of(pool, clip, [rank])[0], expected[rank], err_msg=str(rank))
    for rank, picture in zip(order, pictures_of(pool, clip, order), strict=True):
        np.testing.assert_array_equal(picture, expected[rank], err_msg=str(rank))


def copy_of(clip: Clip) -> Clip:
    return replace(clip)


# -- with PyAV in TorchCodec's place ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["h264 B-frames", "vp9", "h264 hidden lead-in"])
def test_pictures_are_those_of_the_index(name: str, stand_in: type[StandIn]) -> None:
    check_every_picture(name)
    assert stand_in.opened == 1


def test_a_decoder_ends_with_its_episode_and_does_not_keep_its_bytes(stand_in: type[StandIn]) -> None:
    whole, _ = prepared("vp9")
    pool = MappedDecoders(4, [CAMERA])
    clips = [copy_of(whole) for _ in range(3)]
    for clip in clips:
        pictures_of(pool, clip, [1])
    num_pyav = 1
    assert pool.num_open == 3 + num_pyav
    del clip, clips[1:]
    gc.collect()
    for clip in [copy_of(whole) for _ in range(2)]:
        pictures_of(pool, clip, [2])
    assert pool.num_open <= 3 + num_pyav
    pictures_of(pool, clips[0], [5])
    assert stand_in.opened == 5, "the one that was left is still open"
    assert pool.num_opened == 5 + num_pyav
    pool.close()
    assert pool.num_open == 0


def test_the_least_recently_used_is_closed(stand_in: type[StandIn]) -> None:
    whole, _ = prepared("vp9")
    pool = MappedDecoders(2, [CAMERA])
    first, second, third = (copy_of(whole) for _ in range(3))
    for clip in (first, second, first, third, first):
        pictures_of(pool, clip, [1])
    assert stand_in.opened == 3
    pictures_of(pool, second, [1])
    assert stand_in.opened == 4


def test_threads_share_one_decoder_in_turn_and_use_two_at_once(stand_in: type[StandIn]) -> None:
    whole, expected = prepared("vp9")
    pool = MappedDecoders(2, [CAMERA])
    clips = [copy_of(whole), copy_of(whole)]
    for clip in clips:
        pictures_of(pool, clip, [0])
    stand_in.barrier = threading.Barrier(2)  # both are inside, or this fails
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            list(threads.map(lambda clip: pictures_of(pool, clip, [3]), clips))
    stand_in.barrier = None
    with ThreadPoolExecutor(4) as threads:
        ranks = [place % len(expected) for place in range(60)]
        for rank, found in zip(
            ranks, threads.map(lambda rank: pictures_of(pool, clips[0], [rank])[0], ranks), strict=True
        ):
            np.testing.assert_array_equal(found, expected[rank])
    assert stand_in.opened == 2


def test_other_pixels_are_refused(stand_in: type[StandIn]) -> None:
    clip, expected = prepared("h264 B-frames")
    stand_in.brighten = 1
    found = pictures_of(MappedDecoders(1, [CAMERA]), clip, [4])[0]
    assert int(np.abs(found.astype(int) - expected[4]).max()) in (1, 255), "rounding is let pass"
    stand_in.brighten = 40
    with pytest.raises(
        DecodeError, match=r"differs from PyAV's by up to \d+ of 255 \(episode 7, camera"
    ) as caught:
        pictures_of(MappedDecoders(1, [CAMERA]), clip, [4])
    assert "decoder='pyav'" in str(caught.value.hint)


def test_another_frame_is_refused(stand_in: type[StandIn]) -> None:
    clip, _ = prepared("h264 B-frames")
    stand_in.shift = 1
    with pytest.raises(DecodeError, match=r"gave pictures of \[.*\] s, asked for"):
        pictures_of(MappedDecoders(1, [CAMERA]), clip, [4])


def test_it_is_missed_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_dataset: WrittenDataset
) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    monkeypatch.delitem(sys.modules, "torchcodec.decoders", raising=False)
    with pytest.raises(UsageError, match="needs TorchCodec, which is not installed") as caught:
        open_loader(demo_dataset, decoder="torchcodec")
    assert "pip install 'lrstream[torchcodec]'" in str(caught.value.hint)
    monkeypatch.delitem(sys.modules, "torchcodec")
    (tmp_path / "torchcodec").mkdir()
    (tmp_path / "torchcodec/__init__.py").write_text("raise RuntimeError('no libavutil.so\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"installed, but cannot be loaded \(no libavutil\.so\)"):
        open_loader(demo_dataset, decoder="torchcodec")


# -- with TorchCodec --------------------------------------------------------------------------------


@needs_torchcodec
@pytest.mark.parametrize("name", CLIPS)
def test_every_picture_equals_pyav(name: str) -> None:
    check_every_picture(name)


COLORS = {
    f"{codec} matrix {color[2]} range {color[3]}": media.Clip(codec, frames=4, gop=4, color=color)
    for codec in ("h264", "hevc", "av1", "vp9")
    for color in ((1, 1, 1, 1), (1, 1, 1, 2), (5, 6, 6, 1), (9, 14, 9, 1))
}
REFUSED = {"av1 matrix 1 range 2", "vp9 matrix 1 range 2"}


@needs_torchcodec
@pytest.mark.parametrize("name", COLORS)
def test_colours_are_equal_or_refused(name: str) -> None:
    data = media.clip_bytes(COLORS[name])
    clip, expected = clip_of(data), whole_file(data)
    found, refusal = attempt(clip, [2, 0])
    if refusal is not None:
        assert name in REFUSED, refusal
        assert "differs from PyAV's" in refusal
        return
    np.testing.assert_array_equal(found[0], expected[2])
    np.testing.assert_array_equal(found[1], expected[0])


def attempt(clip: Clip, ranks: list[int]) -> tuple[list[NDArray[np.uint8]], str | None]:
    """The pictures, or why there are none."""
    try:
        return pictures_of(MappedDecoders(1, [CAMERA]), clip, ranks), None
    except DecodeError as error:
        return [], error.message


@needs_torchcodec
def test_a_span_in_the_middle_gives_its_own_pictures() -> None:
    whole, expected = prepared("h264 B-frames")
    span = Span(12, 36, whole.span.start_byte + whole.table.starts[12], whole.span.stop_byte)
    clip = replace(
        whole,
        span=span,
        track=excerpt(whole.track, Span(12, 36, whole.table.starts[12], len(whole.payload))),
        payload=whole.payload[whole.table.starts[12] :],
    )
    clip = replace(clip, table=ClipTable.from_span(clip.track.samples, Span(0, 24, 0, len(clip.payload))))
    for rank in (23, 0, 7):
        found = pictures_of(MappedDecoders(1, [CAMERA]), clip, [rank])
        np.testing.assert_array_equal(found[0], expected[12 + rank])


@needs_torchcodec
def test_bytes_that_are_no_video_are_an_error_that_says_where() -> None:
    clip, _ = prepared("vp9")
    broken = replace(clip, payload=bytes(len(clip.payload)))
    with pytest.raises(DecodeError, match=r"TorchCodec cannot decode vp9 video of episode 7, camera"):
        pictures_of(MappedDecoders(1, [CAMERA]), broken, [3])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    cameras = (
        DemoCamera("observation.images.front", 48, 96, codec="h264", gop=5, bframes=2),
        DemoCamera("observation.images.wrist", 50, 98, codec="vp9", gop=4),
        DemoCamera("observation.depth", 48, 96, codec="depth"),
    )
    return write_dataset(
        tmp_path_factory.mktemp("mapped") / "dataset", DemoSpec((19, 17, 11), cameras, fps=10)
    )


def loaders(written: WrittenDataset) -> Iterator[tuple[str, Callable[[str], Any]]]:
    for num_workers in (0, 2):
        for window in (None, [-0.2, 0.0, 0.3]):
            options: dict[str, Any] = {"return_uint8": True}
            if window:
                options["delta_timestamps"] = {"observation.images.front": window}
            yield f"{num_workers} {window}", functools.partial(_batches, written, num_workers, options)


def _batches(written: WrittenDataset, num_workers: int, options: dict[str, Any], decoder: str) -> Any:
    dataset = open_loader(written, decoder=decoder, **options)
    dataset.set_epoch(3)
    context = "fork" if num_workers else None
    return DataLoader(dataset, batch_size=4, num_workers=num_workers, multiprocessing_context=context)


@needs_torchcodec
def test_batches_equal_those_of_pyav_and_every_frame_is_the_one(written: WrittenDataset) -> None:
    for name, batches in loaders(written):
        seen = []
        for found, expected in zip(batches("torchcodec"), batches("pyav"), strict=True):
            assert_same_sample(found, expected, name)
            for row, index in enumerate(found["index"].tolist()):
                seen.append(index)
                picture = found["observation.images.front"][row]
                picture = picture if picture.ndim == 3 else picture[1]
                _, episode, frame = read_identity(picture.numpy())
                assert (episode, frame) == (int(found["episode_index"][row]), int(found["frame_index"][row]))
        assert sorted(seen) == list(range(written.num_frames))
