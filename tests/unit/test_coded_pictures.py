"""What a decode hook is handed decodes, by FFmpeg and without the loader, to the pictures that are wanted."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lrstream.errors import DecodeError
from lrstream.mp4.excerpt import frame_mappings
from lrstream.mp4.span import Span
from lrstream.streaming.clip import Clip
from lrstream.streaming.coded import CodedPictures, run_hook
from tests.unit.test_decode import CLIPS, prepared

NAMES = ["h264 B-frames", "h264 open GOP", "hevc open GOP", "vp9", "av1 GOP 2", "mpeg4 B-frames"]


def requests(num_pictures: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [[rank] for rank in random.permutation(num_pictures)[:8].tolist()] + [
        [0, 0, 0, 1],
        [num_pictures - 1, 2, num_pictures // 2],
        random.choice(num_pictures, 5).tolist(),
    ]


def test_names_are_of_clips() -> None:
    assert set(NAMES) <= set(CLIPS)


@pytest.mark.parametrize("name", NAMES)
def test_the_mini_mp4_holds_the_wanted_pictures(name: str) -> None:
    clip, expected = prepared(name)
    for wanted in requests(len(expected)):
        coded = CodedPictures.cut(clip, wanted, is_window=len(wanted) > 1)
        presented = by_time(coded.mini_mp4())
        for rank, ticks in zip(wanted, coded.times, strict=True):
            np.testing.assert_array_equal(presented[ticks], expected[rank], err_msg=f"{rank} of {wanted}")


def by_time(data: bytes) -> dict[int, NDArray[np.uint8]]:
    """Pictures of a file by their time in ticks."""
    container: Any
    with av.open(io.BytesIO(data)) as container:
        pictures = list(container.decode(video=0))
    return {picture.pts: picture.to_ndarray(format="rgb24").transpose(2, 0, 1) for picture in pictures}


def decode_runs(coded: CodedPictures) -> dict[int, NDArray[np.uint8]]:
    """Pictures by pts, from the packets and the configuration alone."""
    names = {"av1": "libdav1d"}
    found: dict[int, NDArray[np.uint8]] = {}
    for first, stop in coded.runs:
        context: Any = av.CodecContext.create(names.get(coded.config.codec, coded.config.codec), "r")
        context.extradata = coded.config.extradata or None
        assert coded.packets[first].is_keyframe
        for item in coded.packets[first:stop]:
            packet = av.Packet(bytes(item.data))
            packet.pts = item.pts
            for picture in context.decode(packet):
                found[picture.pts] = picture.to_ndarray(format="rgb24").transpose(2, 0, 1)
        for picture in context.decode(None):
            found[picture.pts] = picture.to_ndarray(format="rgb24").transpose(2, 0, 1)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_packets_of_the_runs_suffice(name: str) -> None:
    clip, expected = prepared(name)
    for wanted in requests(len(expected)):
        found = decode_runs(CodedPictures.cut(clip, wanted, is_window=False))
        for rank in wanted:
            np.testing.assert_array_equal(found[rank], expected[rank], err_msg=f"{rank} of {wanted}")


def test_runs_leave_out_what_lies_between() -> None:
    clip, _ = prepared("vp9")  # 30 pictures, keyframes 0, 10 and 20
    coded = CodedPictures.cut(clip, [22, 3, 3], is_window=True)
    assert coded.runs == ((0, 4), (20, 23))
    assert coded.wanted == (22, 3, 3)
    assert coded.positions == [22, 3, 3]
    assert len(coded.packets) == 23
    assert len(coded.data) == sum(len(packet.data) for packet in coded.packets)
    later = CodedPictures.cut(clip, [25], is_window=False)
    assert later.runs == ((0, 6),)
    assert later.pts == tuple(range(20, 26))
    assert later.positions == [5]


@pytest.mark.parametrize("name", [*NAMES, "h264 hidden lead-in", "av1 GOP 10"])
def test_frame_mappings_are_what_a_demuxer_finds(name: str) -> None:
    clip, expected = prepared(name)
    whole = json.loads(frame_mappings(clip.track, Span(0, len(expected), 0, len(clip.payload))))
    part = CodedPictures.cut(clip, [len(expected) // 2], is_window=False)
    for frames, data in (
        (whole["frames"], CodedPictures.cut(clip, range(len(expected)), is_window=True).mini_mp4()),
        (json.loads(part.frame_mappings())["frames"], part.mini_mp4()),
    ):
        container: Any
        with av.open(io.BytesIO(data)) as container:
            found = [
                {"pts": packet.pts, "duration": packet.duration, "key_frame": int(packet.is_keyframe)}
                for packet in container.demux(container.streams.video[0])
                if packet.size
            ]
        assert frames == found


def test_it_survives_a_pickle_and_becomes_a_list_in_a_batch() -> None:
    clip, expected = prepared("h264 B-frames")
    coded = CodedPictures.cut(clip, [7, 9], is_window=True)
    copy = pickle.loads(pickle.dumps(coded))
    assert copy.mini_mp4() == coded.mini_mp4()
    assert (copy.wanted, copy.config, copy.camera) == (coded.wanted, coded.config, coded.camera)
    assert len(pickle.dumps(coded)) < len(coded.data) + 8000, "the rest of the file does not travel along"
    batch = default_collate([{"a": coded, "b": 1}, {"a": copy, "b": 2}])
    assert batch["a"] == [coded, copy]
    assert batch["b"].tolist() == [1, 2]
    assert len(expected) > len(coded.packets)


def test_a_hook_that_fails_says_where() -> None:
    clip, _ = prepared("h264 B-frames")

    def fail(coded: CodedPictures) -> None:
        raise RuntimeError("no device")

    said = r"hook failed with RuntimeError: no device .*episode 7, camera observation.images.top"
    with pytest.raises(DecodeError, match=said) as caught:
        run_hook(fail, clip, [3], is_window=False)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.fields["file_path"] == clip.file_path


def test_an_own_error_of_the_project_passes() -> None:
    clip: Clip
    clip, _ = prepared("h264 B-frames")

    def fail(coded: CodedPictures) -> None:
        raise DecodeError("as it is")

    with pytest.raises(DecodeError, match=r"^as it is"):
        run_hook(fail, clip, [3], is_window=False)
