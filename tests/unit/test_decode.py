"""Packets straight from memory give the pixels that FFmpeg's demuxer and decoder give for the whole file."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from lrstream.errors import DecodeError
from lrstream.mp4.codec_config import CodecConfig, codec_configuration
from lrstream.mp4.excerpt import excerpt
from lrstream.mp4.span import Span
from lrstream.streaming import decode as decode_module
from lrstream.streaming.clip import Clip, ClipTable
from lrstream.streaming.decode import DecoderPool, decode_pictures
from lrstream.streaming.pictures import PictureConverter
from tests.support import media

CLIPS = {
    "h264 all intra": media.Clip("h264", frames=12, gop=1),
    "h264 no reordering": media.Clip("h264", frames=30, gop=10),
    "h264 B-frames": media.Clip("h264", frames=36, gop=12, bframes=3),
    "h264 open GOP": media.Clip("h264", frames=40, gop=10, bframes=3, open_gop=True),
    "h264 odd size": media.Clip("h264", frames=12, gop=6, bframes=2, size=(98, 66)),
    "h264 full range BT.709": media.Clip("h264", frames=8, gop=4, color=(1, 1, 1, 2)),
    "hevc B-frames": media.Clip("hevc", frames=30, gop=10, bframes=3),
    "hevc open GOP": media.Clip("hevc", frames=40, gop=10, bframes=4, open_gop=True, size=(98, 66)),
    "vp9": media.Clip("vp9", frames=30, gop=10, size=(98, 66)),
    "av1 GOP 2": media.Clip("av1", frames=20, gop=2, size=(96, 64)),
    "av1 GOP 10": media.Clip("av1", frames=24, gop=10, size=(98, 66)),
    "mpeg4 B-frames": media.Clip("mpeg4", frames=24, gop=8, bframes=2),
    "h264 hidden lead-in": media.Clip("h264", frames=24, gop=8, bframes=2, start=3),
}


def whole_file(data: bytes) -> list[NDArray[np.uint8]]:
    """RGB pictures of a file, channel-first, in the order in which FFmpeg presents them."""
    container: Any
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        return [picture.to_ndarray(format="rgb24").transpose(2, 0, 1) for picture in container.decode(stream)]


def clip_of(data: bytes) -> Clip:
    """All of a file as one clip."""
    track = media.index(data)
    samples = track.samples
    start = int(samples.offsets_bytes.min())
    stop = int((samples.offsets_bytes + samples.sizes_bytes).max())
    span = Span(0, samples.num_samples, start, stop)
    return Clip(
        camera="observation.images.top",
        episode_index=7,
        file_path="videos/top/file-000.mp4",
        span=span,
        config=codec_configuration(track.stsd_body),
        track=excerpt(track, span),
        table=ClipTable.from_span(samples, span),
        payload=data[start:stop],
    )


@functools.cache
def prepared(name: str) -> tuple[Clip, list[NDArray[np.uint8]]]:
    data = media.clip_bytes(CLIPS[name])
    return clip_of(data), whole_file(data)


class Collector:
    """A sink that keeps pixels by place in the request, and counts what it was given."""

    def __init__(self) -> None:
        self.pictures: dict[int, NDArray[np.uint8]] = {}

    def __call__(self, position: int, picture: av.VideoFrame, converter: PictureConverter) -> None:
        assert position not in self.pictures, "a picture was given twice"
        out = np.empty((3, picture.height, picture.width), dtype=np.uint8)
        converter.write_rgb(picture, out)
        self.pictures[position] = out


def decoded(clip: Clip, ranks: Sequence[int], pool: DecoderPool) -> list[NDArray[np.uint8]]:
    sink = Collector()
    decode_pictures(clip, ranks, sink, pool)
    return [sink.pictures[position] for position in range(len(ranks))]


@pytest.mark.parametrize("name", CLIPS)
def test_each_picture_alone_equals_the_whole_file(name: str) -> None:
    clip, expected = prepared(name)
    assert len(clip.table) == len(expected)
    pool = DecoderPool(2)
    for rank in np.random.default_rng(1).permutation(len(expected)).tolist():
        (picture,) = decoded(clip, [rank], pool)
        np.testing.assert_array_equal(picture, expected[rank], err_msg=f"picture {rank}")


@pytest.mark.parametrize("name", CLIPS)
def test_windows_in_any_order_equal_the_whole_file(name: str) -> None:
    clip, expected = prepared(name)
    pool = DecoderPool(2)
    random = np.random.default_rng(2)
    requests = [random.choice(len(expected), size, replace=False).tolist() for size in (2, 3, 5, 8)]
    requests.append(list(range(len(expected))))
    requests.append(list(reversed(range(len(expected)))))
    for ranks in requests:
        for rank, picture in zip(ranks, decoded(clip, ranks, pool), strict=True):
            np.testing.assert_array_equal(picture, expected[rank], err_msg=f"picture {rank} of {ranks}")


@pytest.mark.parametrize("name", ["h264 B-frames", "h264 open GOP", "hevc open GOP", "av1 GOP 10"])
def test_a_span_in_the_middle_gives_its_own_pictures(name: str) -> None:
    data = media.clip_bytes(CLIPS[name])
    _, expected = prepared(name)
    samples = media.index(data).samples
    fps = CLIPS[name].fps
    from_s, to_s = 13 / fps, 22 / fps
    from lrstream.mp4.span import episode_span

    span = episode_span(samples, from_s, to_s)
    whole = clip_of(data)
    clip = replace(
        whole,
        span=span,
        table=ClipTable.from_span(samples, span),
        payload=data[span.start_byte : span.stop_byte],
    )
    pool = DecoderPool(1)
    presented = np.sort(samples.pts_s)
    for number in range(13, 22):
        rank = int(np.argmin(np.abs(clip.table.times_s - presented[number])))
        (picture,) = decoded(clip, [rank], pool)
        np.testing.assert_array_equal(picture, expected[number], err_msg=f"picture {number}")


def test_a_window_inside_one_gop_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clip, _ = prepared("h264 B-frames")
    fed: list[int] = []
    real = av.Packet

    def counting(data: Any) -> Any:
        fed.append(len(data))
        return real(data)

    monkeypatch.setattr("lrstream.streaming.decode.av.Packet", counting)
    decoded(clip, list(range(12)), DecoderPool(1))
    assert len(fed) == 12
    fed.clear()
    last = clip.table.samples[5]
    decoded(clip, [5], DecoderPool(1))
    assert len(fed) <= last + 1, "packets behind the wanted picture were decoded"


def test_open_gop_leading_pictures_begin_one_keyframe_earlier() -> None:
    clip, _ = prepared("hevc open GOP")
    table = clip.table
    leading = 0
    for sample, rank in enumerate(table.ranks):
        naive = max(sync for sync in table.sync_samples if sync <= sample and table.ranks[sync] <= rank)
        assert table.entries[sample] == naive
        leading += table.entries[sample] != max(sync for sync in table.sync_samples if sync <= sample)
    assert leading > 0, "the clip has no leading pictures, so this shows nothing"


def test_a_gradual_refresh_is_entered_earlier_until_the_picture_is_whole() -> None:
    data = _intra_refresh()
    clip, expected = clip_of(data), whole_file(data)
    assert len(clip.table.sync_samples) > 1, "the encoder marked no recovery points"
    pool = DecoderPool(2)
    for rank in range(len(expected)):
        (picture,) = decoded(clip, [rank], pool)
        np.testing.assert_array_equal(picture, expected[rank], err_msg=f"picture {rank}")


def _intra_refresh() -> bytes:
    """H.264 whose later keyframes are recovery points only."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        options = {"x264-params": "intra-refresh=1:keyint=12:bframes=0:threads=1", "preset": "veryfast"}
        stream: Any = container.add_stream("libx264", rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        base = np.random.default_rng(3).integers(0, 255, (96, 190, 3), dtype=np.uint8)
        for number in range(40):
            picture = np.ascontiguousarray(base[:, number : number + 128])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


# -- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h264 B-frames", "hevc B-frames", "av1 GOP 10", "vp9"])
def test_destroyed_bytes_are_an_error_that_says_where(name: str) -> None:
    clip, expected = prepared(name)
    table = clip.table
    damaged = bytearray(clip.payload)
    sample = table.sync_samples[1]
    # The whole keyframe, with the length of its NAL unit or its header: nothing can be concealed.
    damaged[table.starts[sample] : table.stops[sample]] = b"\xa5" * (
        table.stops[sample] - table.starts[sample]
    )
    broken = replace(clip, payload=bytes(damaged))
    pool = DecoderPool(2)
    with pytest.raises(DecodeError) as caught:
        decoded(broken, [table.ranks[sample]], pool)
    message = str(caught.value)
    assert "episode 7" in message
    assert "observation.images.top" in message
    assert "videos/top/file-000.mp4" in message
    first = table.starts[sample] + clip.span.start_byte
    assert f"[{first}, " in message, message
    assert caught.value.fields["episode_index"] == 7
    # The pool still serves what is not damaged.
    (picture,) = decoded(broken, [0], pool)
    np.testing.assert_array_equal(picture, expected[0])


def test_most_flipped_bytes_are_noticed() -> None:
    """FFmpeg conceals by default; strict decoding tells of it. No codec can notice everything."""
    clip, _ = prepared("h264 B-frames")
    random = np.random.default_rng(4)
    noticed = 0
    pool = DecoderPool(2)
    for _ in range(40):
        damaged = bytearray(clip.payload)
        sample = int(random.integers(len(clip.table)))
        start, stop = clip.table.starts[sample], clip.table.stops[sample]
        for place in random.integers(start, stop, 3):
            damaged[int(place)] ^= int(random.integers(1, 256))
        try:
            decoded(replace(clip, payload=bytes(damaged)), [clip.table.ranks[sample]], pool)
        except DecodeError:
            noticed += 1
    assert noticed >= 24


def test_a_missing_packet_is_an_error() -> None:
    clip, _ = prepared("h264 B-frames")
    table = clip.table
    sample = table.samples[5]
    stops = list(table.stops)
    stops[sample] = table.starts[sample]
    with pytest.raises(DecodeError, match="episode 7"):
        decoded(replace(clip, table=replace(table, stops=stops)), [5], DecoderPool(1))


def test_a_picture_without_its_keyframe_is_an_error() -> None:
    clip, _ = prepared("hevc open GOP")
    table = clip.table
    entries = list(table.entries)
    entries[table.samples[3]] = -1
    with pytest.raises(DecodeError, match="depends on a keyframe"):
        decoded(replace(clip, table=replace(table, entries=entries)), [3], DecoderPool(1))


def test_without_an_av1_decoder_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    clip, _ = prepared("av1 GOP 2")
    monkeypatch.setattr(decode_module, "decoder_names", lambda codec: ("libnothing", "libmissing"))
    with pytest.raises(
        DecodeError, match=r"no usable AV1 decoder.*libnothing.*libmissing.*pip install"
    ) as caught:
        decoded(clip, [0], DecoderPool(1))
    assert caught.value.fields["codec"] == "av1"


def test_a_decoder_that_is_not_implemented_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clip, expected = prepared("av1 GOP 2")
    # FFmpeg's native AV1 decoder needs hardware and says ENOSYS without it (K13).
    monkeypatch.setattr(decode_module, "decoder_names", lambda codec: ("libnothing", "libdav1d"))
    (picture,) = decoded(clip, [4], DecoderPool(1))
    np.testing.assert_array_equal(picture, expected[4])


def test_the_native_av1_decoder_is_never_chosen() -> None:
    assert "av1" not in decode_module.decoder_names("av1")


# -- decoders ---------------------------------------------------------------------------------------


def test_decoders_are_shared_bounded_and_evicted() -> None:
    names = ["h264 B-frames", "hevc B-frames", "vp9"]
    pool = DecoderPool(2)
    for _ in range(2):
        for name in names[:2]:
            for rank in (3, 9, 1):
                decoded(prepared(name)[0], [rank], pool)
    assert (pool.num_open, pool.num_opened) == (2, 2)
    decoded(prepared(names[2])[0], [0], pool)
    assert (pool.num_open, pool.num_opened) == (2, 3)
    decoded(prepared(names[1])[0], [0], pool)
    assert pool.num_opened == 3, "the most recently used decoder was evicted"
    pool.close()
    assert pool.num_open == 0


def test_a_failed_decoder_is_closed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clip, _ = prepared("av1 GOP 2")
    pool = DecoderPool(1)
    with monkeypatch.context() as patch:
        patch.setattr(decode_module, "decoder_names", lambda codec: ("libnothing",))
        for _ in range(3):
            with pytest.raises(DecodeError):
                decoded(clip, [0], pool)
    assert pool.num_open == 0
    decoded(clip, [0], pool)
    assert pool.num_open == 1


def test_one_decoder_serves_many_threads_in_turn() -> None:
    clip, expected = prepared("h264 B-frames")
    pool = DecoderPool(1)
    most = 0
    lock = threading.Lock()

    def one(rank: int) -> bool:
        nonlocal most
        (picture,) = decoded(clip, [rank], pool)
        with lock:
            most = max(most, pool.num_open)
        return bool(np.array_equal(picture, expected[rank]))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(len(expected))))
    assert most == 1


@pytest.mark.timeout(60)
def test_sixteen_threads_decode_ninety_six_requests() -> None:
    """No decoder threads of FFmpeg's own, hence nothing that could wait for another one (K12)."""
    names = ["hevc open GOP", "h264 open GOP", "av1 GOP 10"]
    pool = DecoderPool(16)
    before = threading.active_count()

    def one(number: int) -> bool:
        clip, expected = prepared(names[number % len(names)])
        ranks = [number % len(expected), (number * 7 + 3) % len(expected)]
        ranks = list(dict.fromkeys(ranks))
        pictures = decoded(clip, ranks, pool)
        return all(np.array_equal(p, expected[r]) for p, r in zip(pictures, ranks, strict=True))

    for name in names:
        prepared(name)
    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(one, range(96)))
    assert pool.num_open <= 16
    assert threading.active_count() == before


def test_the_container_colour_reaches_the_decoder() -> None:
    """Where the stream itself is silent, `colr` decides how YUV becomes RGB."""
    from lrstream.mp4.codec_config import ColorInfo

    clip, plain = prepared("h264 no reordering")
    config: CodecConfig = replace(clip.config, color=ColorInfo(1, 1, 1, True))
    (picture,) = decoded(replace(clip, config=config), [0], DecoderPool(1))
    assert not np.array_equal(picture, plain[0])
    container: Any
    with av.open(io.BytesIO(media.clip_bytes(CLIPS["h264 no reordering"]))) as container:
        stream = container.streams.video[0]
        context = stream.codec_context  # what a demuxer that has read `colr` fills in
        context.color_primaries = context.color_trc = context.colorspace = 1
        context.color_range = 2
        expected = next(container.decode(stream)).to_ndarray(format="rgb24").transpose(2, 0, 1)
    np.testing.assert_array_equal(picture, expected)
