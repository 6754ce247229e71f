"""A file that is replaced after the dataset was opened is refused, never decoded by the old index (K23)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.errors import SidecarError, TransferError
from lrstream.index.open import MappedIndex
from tests.support.datasets import copy_dataset


def rewrite(file: Path, *, in_place: bool) -> None:
    """Same path, same size, and even the same bytes: only the file system can tell."""
    content = file.read_bytes()
    if in_place:
        file.write_bytes(content)
    else:
        new = file.with_suffix(".new")
        new.write_bytes(content)
        os.replace(new, file)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_video_replaced_between_open_and_read(
    tiny_dataset: WrittenDataset, tmp_path: Path, in_place: bool, num_workers: int
) -> None:
    root = copy_dataset(tiny_dataset.root, tmp_path / "set")
    dataset = StreamingLeRobotDataset(root)
    for file in (root / "videos").rglob("*.mp4"):
        rewrite(file, in_place=in_place)
    with pytest.raises(TransferError, match="was changed after it was indexed"):
        list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    assert len(list(StreamingLeRobotDataset(root))) == sum(tiny_dataset.spec.episode_lengths)


def test_a_file_system_of_fsspec_is_asked_once_for_each_file(
    tiny_dataset: WrittenDataset, tmp_path: Path
) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(tiny_dataset.root), "/replaced-set", recursive=True)
    try:
        dataset = StreamingLeRobotDataset("memory://replaced-set")
        for path in memory.glob("/replaced-set/videos/**/*.mp4"):
            content = memory.cat_file(path)
            memory.rm_file(path)
            memory.pipe_file(path, content)
        with pytest.raises(TransferError, match="was changed after it was indexed"):
            list(dataset)
    finally:
        memory.rm("/replaced-set", recursive=True)


def test_a_damaged_index_is_taken_away_and_made_again(
    tiny_dataset: WrittenDataset, isolated_home: Path
) -> None:
    dataset = StreamingLeRobotDataset(tiny_dataset.root)
    whole = [int(sample["index"]) for sample in dataset]
    dataset.close()
    [generation] = isolated_home.rglob("*.arrow")
    content = generation.read_bytes()
    paths = [path for camera in tiny_dataset.video_files.values() for path in camera]
    refused = 0
    for at in range(1000, len(content) - 2000, 397):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        generation.unlink(missing_ok=True)  # another file, not another content under live readers
        generation.write_bytes(damaged)
        try:
            index = MappedIndex(generation)
            for path in paths:
                index.track(path)
        except SidecarError:
            refused += 1
            assert [int(sample["index"]) for sample in StreamingLeRobotDataset(tiny_dataset.root)] == whole
    assert refused > 0
