"""A file that is replaced after the dataset was opened is refused, never decoded by the old index (K23)."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
from torch.utils.data import DataLoader

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.errors import SidecarError, TransferError
from lrstream.index.open import MappedIndex
from lrstream.storage.location import Location
from lrstream.storage.store import open_store
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


def test_a_file_system_of_fsspec_is_asked_before_the_first_read(tmp_path: Path) -> None:
    file = tmp_path / "a.mp4"
    file.write_bytes(b"0123456789")
    store = open_store(Location("fsspec", f"file://{tmp_path}"))
    fingerprint = store.file_info(["a.mp4"])["a.mp4"].fingerprint
    assert fingerprint is not None
    source = store.open("a.mp4", 10)
    source.expect(fingerprint)
    requests = store.counters.requests
    assert [source.read(0, 2), source.read(2, 4)] == [b"01", b"23"]
    assert store.counters.requests == requests + 3, "asked once, read twice"

    rewrite(file, in_place=True)
    os.utime(file, ns=(1, 1))
    late = store.open("a.mp4", 10)
    late.expect(fingerprint)
    with pytest.raises(TransferError, match="was changed after it was indexed"):
        late.read(0, 2)


def test_storage_without_identities_has_nothing_to_compare(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/nameless/a.mp4", b"0123456789")
    try:
        source = open_store(Location("fsspec", "memory://nameless")).open("a.mp4", 10)
        source.expect("a random value")
        assert source.read(0, 2) == b"01"
    finally:
        memory.rm("/nameless", recursive=True)


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
