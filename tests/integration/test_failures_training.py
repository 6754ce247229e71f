"""What fails in the middle of training is one clear error, never an epoch with fewer samples (K19)."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lrstream.demo import WrittenDataset
from lrstream.errors import DecodeError, TransferError
from tests.support import media
from tests.support.datasets import copy_dataset
from tests.support.loader import indices, loader_threads, open_loader

FRONT = "observation.images.front"


def batches_of(dataset: Any, num_workers: int) -> DataLoader[Any]:
    fork: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    return DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=indices, **fork)


@pytest.mark.timeout(120)
def test_a_worker_that_is_killed_ends_training_with_an_error(standard_dataset: WrittenDataset) -> None:
    dataset = open_loader(standard_dataset)
    delivered: list[list[int]] = []

    def train() -> None:
        for batch in dataset.follow(batches_of(dataset, 2)):
            delivered.append(batch)
            if len(delivered) == 2:
                os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"worker \(pid\(?s?\)? ?\d+\) (is killed by signal|exited)"):
        train()
    assert sum(map(len, delivered)) < standard_dataset.num_frames
    # Training knows where it stood, so it can go on there with new workers.
    state = dataset.state_dict()
    assert state["num_batches"] == len(delivered)
    again = open_loader(standard_dataset)
    again.load_state_dict(state)
    delivered += list(again.follow(batches_of(again, 2)))
    assert sorted(itertools.chain(*delivered)) == list(range(standard_dataset.num_frames))


# -- damaged bytes ----------------------------------------------------------------------------------


def gop_of(root: Path, gop: int) -> tuple[Path, int, int]:
    """First video of a camera, and the byte range of one of its GOPs."""
    path = sorted((root / "videos" / FRONT).rglob("*.mp4"))[0]
    samples = media.index(path.read_bytes()).samples
    first, stop = (int(samples.sync_samples[number]) for number in (gop, gop + 1))
    last = stop - 1
    return (
        path,
        int(samples.offsets_bytes[first]),
        int(samples.offsets_bytes[last] + samples.sizes_bytes[last]),
    )


def outcome_of(dataset: Any) -> tuple[list[int], DecodeError | None]:
    """What an epoch delivers, and the error with which it ends. Any other error fails the test."""
    found: list[int] = []
    try:
        found += (int(sample["index"]) for sample in dataset)
    except DecodeError as error:
        return found, error
    return found, None


@pytest.mark.parametrize("place", range(20))
def test_a_flipped_byte_is_an_error_or_a_whole_epoch(
    standard_dataset: WrittenDataset, tmp_path: Path, place: int
) -> None:
    """Decoders do not notice every flip; whatever they notice is raised, and nothing is left out."""
    root = copy_dataset(standard_dataset, tmp_path / "flipped")
    path, start, stop = gop_of(root, 5)
    data = bytearray(path.read_bytes())
    at = start + (stop - 1 - start) * place // 19
    data[at] ^= 0xFF
    path.write_bytes(data)
    dataset = open_loader(root, episodes=[0, 1, 2], return_uint8=True)
    found, error = outcome_of(dataset)
    if error is None:
        assert sorted(found) == list(range(61))
    else:
        for part in (FRONT, path.relative_to(root).as_posix(), "bytes ["):
            assert part in str(error)
    assert loader_threads() == []
    dataset.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_a_gop_whose_lengths_are_damaged_is_noticed(
    standard_dataset: WrittenDataset, tmp_path: Path, num_workers: int
) -> None:
    """The first byte of a coded picture belongs to the length of its first unit."""
    root = copy_dataset(standard_dataset, tmp_path / "lengths")
    path, start, _ = gop_of(root, 5)
    data = bytearray(path.read_bytes())
    data[start] ^= 0x40
    path.write_bytes(data)
    dataset = open_loader(root, episodes=[0, 1, 2])
    with pytest.raises(DecodeError) as caught:
        for _ in batches_of(dataset, num_workers):
            pass
    assert FRONT in str(caught.value)
    assert "bytes [" in str(caught.value)


# -- reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_a_range_that_fails_for_good_stops_at_its_episode(
    standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    from lrstream.storage.local import LocalByteSource

    probe = open_loader(standard_dataset)
    wanted = probe._episode_loader()._spans.span(3, FRONT)
    probe.close()
    real = LocalByteSource.read
    attempts: list[tuple[int, int]] = []

    def failing(self: LocalByteSource, start: int, stop: int) -> bytes:
        if (start, stop) == (wanted.start_byte, wanted.stop_byte) and f"/{FRONT}/" in self.path:
            attempts.append((start, stop))
            raise TransferError(f"{self.path}, bytes [{start}, {stop}): the server said 503 for good.")
        return real(self, start, stop)

    monkeypatch.setattr(LocalByteSource, "read", failing)
    dataset = open_loader(standard_dataset)
    delivered: list[int] = []
    expected = rf"file-001\.mp4, bytes \[{wanted.start_byte}, {wanted.stop_byte}\)"

    def train() -> None:
        for batch in batches_of(dataset, num_workers):
            delivered.extend(batch)

    with pytest.raises(TransferError, match=expected):
        train()
    lengths = [23, 7, 31, 12, 18, 5, 27]
    first, stop = sum(lengths[:3]), sum(lengths[:4])
    assert not set(delivered) & set(range(first, stop)), "a sample of an episode that never arrived"
    assert len(set(delivered)) == len(delivered)
    if num_workers == 0:
        assert attempts == [(wanted.start_byte, wanted.stop_byte)]
    assert loader_threads() == []


def test_noise_in_place_of_pictures_is_never_delivered_as_fewer(
    standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "noise")
    path, start, stop = gop_of(root, 2)
    data = bytearray(path.read_bytes())
    data[start:stop] = np.random.default_rng(0).integers(0, 256, stop - start, dtype=np.uint8).tobytes()
    path.write_bytes(data)
    with pytest.raises(DecodeError):
        indices(open_loader(root, episodes=[0]))
