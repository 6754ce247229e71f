"""A decode hook in place of the loader's decoder: the same samples, wherever the hook's result is decoded."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.errors import DecodeError, UsageError
from lrstream.streaming.coded import CodedPictures
from lrstream.streaming.mixture import MixtureDataset
from tests.support.loader import assert_same_sample, open_loader

FRONT, WRIST = "observation.images.front", "observation.images.wrist"


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    cameras = (
        DemoCamera(FRONT, 48, 96, codec="h264", gop=5, bframes=2),
        DemoCamera(WRIST, 48, 96, codec="vp9", gop=4),
        DemoCamera("observation.depth", 48, 96, codec="depth"),
    )
    return write_dataset(tmp_path_factory.mktemp("hooked") / "dataset", DemoSpec((9, 7), cameras, fps=10))


def decode(coded: CodedPictures) -> torch.Tensor:
    """FFmpeg's demuxer and decoder over the mini-MP4; importable, so that it reaches spawned workers."""
    container: Any
    with av.open(io.BytesIO(coded.mini_mp4())) as container:
        pictures = {frame.pts: frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)}
    chosen = [torch.from_numpy(pictures[time].transpose(2, 0, 1).copy()) for time in coded.times]
    return torch.stack(chosen) if coded.is_window else chosen[0]


def keep(coded: CodedPictures) -> CodedPictures:
    """Leaves decoding to the training process."""
    return coded


def plain(dataset: WrittenDataset, **options: Any) -> Iterator[dict[str, Any]]:
    return iter(open_loader(dataset, return_uint8=True, **options))


@pytest.mark.parametrize("strategy", ["remaining", "round_robin"])
@pytest.mark.parametrize("window", [None, [-0.1, 0.0, 0.1], [0.0]], ids=str)
def test_samples_of_a_hook_equal_those_of_the_loader(
    hooked: WrittenDataset, window: list[float] | None, strategy: str
) -> None:
    options: dict[str, Any] = {"sampling_strategy": strategy}
    if window is not None:
        options["delta_timestamps"] = {FRONT: window}
    found = list(open_loader(hooked, decode_hook=decode, **options))
    expected = list(plain(hooked, **options))
    assert len(found) == hooked.num_frames
    for sample, other in zip(found, expected, strict=True):
        assert_same_sample(sample, other)


def test_workers_decode_by_the_hook(hooked: WrittenDataset) -> None:
    # Through a pickle, as to spawned workers.
    dataset = pickle.loads(pickle.dumps(open_loader(hooked, decode_hook=decode)))
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    expected = DataLoader(open_loader(hooked, return_uint8=True), batch_size=4)
    for found, other in zip(loader, expected, strict=True):
        assert_same_sample(found, other)


def test_coded_pictures_go_through_workers_to_be_decoded_by_training(hooked: WrittenDataset) -> None:
    dataset = open_loader(hooked, decode_hook={FRONT: keep})
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    for epoch in range(2):
        dataset.set_epoch(epoch)
        other = open_loader(hooked, return_uint8=True)
        other.set_epoch(epoch)
        for batch, expected in zip(loader, DataLoader(other, batch_size=4), strict=True):
            assert all(isinstance(coded, CodedPictures) for coded in batch[FRONT])
            batch[FRONT] = torch.stack([decode(coded) for coded in batch[FRONT]])
            np.testing.assert_array_equal(batch[FRONT].numpy(), expected[FRONT].numpy())
            # The camera without a hook is float32, as it is without any.
            wrist = expected.pop(WRIST).numpy().astype(np.float32) / np.float32(255)
            np.testing.assert_array_equal(batch.pop(WRIST).numpy(), wrist)
            assert_same_sample(batch, expected)


def test_a_result_is_left_alone(hooked: WrittenDataset) -> None:
    dataset = open_loader(
        hooked,
        decode_hook={WRIST: lambda coded: coded.wanted},
        image_transforms=lambda picture: picture.mean(),
    )
    firsts = set()
    for sample in dataset:
        # Counted from the first picture that was fetched, which is one of the episode before.
        assert len(sample[WRIST]) == 1
        firsts.add((int(sample["episode_index"]), sample[WRIST][0] - int(sample["frame_index"])))
        assert sample[FRONT].shape == ()
    assert sorted(episode for episode, _ in firsts) == [0, 1]
    stage = dataset.metrics()["stages"]["decode"]
    assert stage["count"] == hooked.num_frames


def test_what_a_hook_raises_reaches_training_with_its_place(hooked: WrittenDataset) -> None:
    said = rf"hook failed with ZeroDivisionError.*camera {FRONT}, file"
    with pytest.raises(DecodeError, match=said) as caught:
        list(open_loader(hooked, decode_hook={FRONT: fail}))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def fail(coded: CodedPictures) -> float:
    return 1 / (len(coded.wanted) - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_hook": 3}, "decode_hook is 3, expected a callable"),
        ({"decode_hook": {FRONT: None}}, f"decode_hook has None for '{FRONT}', expected a callable"),
        ({"decode_hook": {"observation.depth": keep}}, "'observation.depth', which is no RGB video"),
        ({"decode_hook": {FRONT: keep}, "features": [WRIST]}, f"'{FRONT}', which is no RGB video"),
        (
            {"decode_hook": keep, "sampling_strategy": "gop"},
            "decode_hook does not go with sampling",
        ),
        ({"decoder": "nvdec"}, "decoder is 'nvdec', expected 'pyav' or 'torchcodec'"),
        ({"decoder": "torchcodec", "sampling_strategy": "gop"}, "decoder='torchcodec' does not go with"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    hooked: WrittenDataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_loader(hooked, **options)


def test_a_hook_cannot_be_forgotten_where_there_is_no_video(tmp_path: Path) -> None:
    camera = DemoCamera(FRONT, 16, 96, kind="image")
    images = write_dataset(tmp_path / "images", DemoSpec((3,), (camera,), fps=10))
    assert len(list(open_loader(images, decode_hook=keep))) == 3
    with pytest.raises(UsageError, match="there is none"):
        open_loader(images, decode_hook={FRONT: keep})


def test_members_of_a_mixture_agree_on_who_decodes(hooked: WrittenDataset) -> None:
    members = [open_loader(hooked, decode_hook=keep), open_loader(hooked)]
    with pytest.raises(UsageError, match=rf"differ in '{FRONT}'.*decode_hook"):
        MixtureDataset(members)
    members[1] = open_loader(hooked, decode_hook=keep)
    mixture = MixtureDataset(members)
    assert sum(isinstance(sample[FRONT], CodedPictures) for sample in mixture) == 2 * hooked.num_frames
