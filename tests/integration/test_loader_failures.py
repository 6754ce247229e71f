"""What goes wrong is raised, with its place, wherever it happens; nothing ends an epoch quietly (K19)."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import av
import pytest

from lrstream.demo import WrittenDataset
from lrstream.errors import (
    ByteBudgetError,
    DatasetFormatError,
    DecodeError,
    LrstreamError,
    NotFoundError,
    TimestampError,
    TransferError,
    UsageError,
)
from lrstream.streaming import decode as decode_module
from tests.support import faults, media
from tests.support.datasets import copy_dataset
from tests.support.loader import indices, loader_threads, open_loader, samples_of

FRONT = "observation.images.front"


def destroy_gop(root: Path, camera: str, gop: int) -> str:
    """Overwrite the keyframe of one GOP of a camera's first file; returns the file."""
    path = sorted((root / "videos" / camera).rglob("*.mp4"))[0]
    data = bytearray(path.read_bytes())
    samples = media.index(bytes(data)).samples
    sample = int(samples.sync_samples[gop])
    start, size = int(samples.offsets_bytes[sample]), int(samples.sizes_bytes[sample])
    data[start : start + size] = b"\xa5" * size
    path.write_bytes(data)
    return path.relative_to(root).as_posix()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_gop_is_raised_with_its_place(
    standard_dataset: WrittenDataset, tmp_path: Path, num_workers: int
) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "damaged")
    path = destroy_gop(root, FRONT, gop=6)  # episode 1 begins with GOP 5
    loader = open_loader(root, episodes=[0, 1, 2])
    with pytest.raises(DecodeError) as caught:
        indices(samples_of(loader, num_workers))
    message = str(caught.value)
    assert type(caught.value) is DecodeError
    for part in ("episode 1", FRONT, path, "bytes ["):
        assert part in message, message
    assert loader_threads() == []
    # What is whole is still delivered.
    assert sorted(indices(open_loader(root, episodes=[3, 4]))) == list(range(61, 91))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_read_that_fails_is_raised(
    standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    from lrstream.storage.local import LocalByteSource

    real = LocalByteSource.read

    def failing(self: LocalByteSource, start: int, stop: int) -> bytes:
        if self.path.endswith("side/chunk-000/file-001.mp4"):
            raise TransferError(f"{self.path}: the disk is on fire")
        return real(self, start, stop)

    loader = open_loader(standard_dataset)
    monkeypatch.setattr(LocalByteSource, "read", failing)
    with pytest.raises(TransferError, match="the disk is on fire"):
        indices(samples_of(loader, num_workers))
    assert loader_threads() == []


def test_a_video_that_disappears_is_raised(standard_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(standard_dataset, tmp_path / "gone")
    loader = open_loader(root)
    min((root / "videos").rglob("*.mp4")).unlink()
    with pytest.raises(NotFoundError):
        indices(loader)
    assert loader_threads() == []


def test_no_decoder_is_raised_at_the_first_sample(
    tiny_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_module, "decoder_names", lambda codec: ())
    with pytest.raises(DecodeError, match=r"no usable H\.264 decoder"):
        next(iter(open_loader(tiny_dataset)))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("wrong_data_file", DatasetFormatError),
        ("drifting_clock", TimestampError),
        ("span_past_end", LrstreamError),
        ("truncated_payload", LrstreamError),
        ("missing_parquet", NotFoundError),
        ("overlapping_rows", LrstreamError),
    ],
)
def test_known_faults_are_errors_not_other_samples(
    standard_dataset: WrittenDataset, tmp_path: Path, fault: str, error: type[Exception]
) -> None:
    root = copy_dataset(standard_dataset, tmp_path / fault)
    faults.FAULTS[fault](root)
    with pytest.raises(error) as caught:
        indices(open_loader(root))
    assert isinstance(caught.value, LrstreamError)
    assert loader_threads() == []


def test_a_row_between_two_pictures_names_both_times(tiny_dataset: WrittenDataset, tmp_path: Path) -> None:
    """The clock of one camera runs 40 ms late (K05)."""
    root = copy_dataset(tiny_dataset, tmp_path / "late")

    def late(row: dict[str, Any]) -> None:
        if row["episode_index"] == 1:
            row[f"videos/{FRONT}/from_timestamp"] += 0.04

    faults.edit_episodes(root, late)
    with pytest.raises(TimestampError) as caught:
        indices(open_loader(root, episodes=[1]))
    message = str(caught.value)
    for part in ("episode 1", FRONT, "file-000.mp4", "40 ms away", "tolerance_s"):
        assert part in message, message
    assert sorted(indices(open_loader(root, episodes=[1], tolerance_s=0.045))) == list(range(5, 12))


# -- budget -----------------------------------------------------------------------------------------


def test_an_episode_larger_than_the_budget_is_refused_before_any_payload(
    tiny_dataset: WrittenDataset,
) -> None:
    loader = open_loader(tiny_dataset, byte_budget_gb=1000 / 2**30)
    with pytest.raises(ByteBudgetError) as caught:
        next(iter(loader))
    assert re.search(r"Byte budget exceeded: episode \d needs \d+ bytes", str(caught.value))
    assert caught.value.fields["budget_bytes"] == 1000
    assert loader.metrics()["fetched_bytes"] == 0


def test_a_tight_budget_changes_nothing_but_the_order(standard_dataset: WrittenDataset) -> None:
    loader = open_loader(standard_dataset)
    sizes = (
        loader._process.get()
        .loader(loader._store, loader._layout, loader._open_tracks, 1e-4)
        .sizes(loader._positions)
    )
    budget = int(sizes.max()) + 100
    tight = open_loader(standard_dataset, byte_budget_gb=budget / 2**30)
    found = []
    for sample in tight:
        metrics = tight.metrics()
        assert metrics["resident_bytes"] <= metrics["reserved_bytes"] <= budget
        found.append(int(sample["index"]))
    assert sorted(found) == list(range(standard_dataset.num_frames))
    assert 0 < tight.metrics()["peak_reserved_bytes"] <= budget


def test_the_reserved_size_is_that_of_the_mini_mp4(standard_dataset: WrittenDataset) -> None:
    from lrstream.mp4.synthesis import mini_mp4

    loader = open_loader(standard_dataset)
    reader = loader._process.get().loader(loader._store, loader._layout, loader._open_tracks, 1e-4)
    tracks = loader._open_tracks()
    assert tracks is not None
    for position, size in zip(loader._positions.tolist(), reader.sizes(loader._positions), strict=True):
        record = reader.load(position)
        written = [
            mini_mp4(tracks.track(c.clip.file_path), c.clip.span, c.clip.payload)
            for c in record.cameras.values()
        ]
        assert size == sum(map(len, written))
        for file in written:
            with av.open(io.BytesIO(file)) as container:
                assert container.streams.video[0].frames > 0


# -- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_episodes": -1}, "prefetch_episodes is -1"),
        ({"decode_threads": 0}, "decode_threads is 0"),
        ({"decoded_queue_size": 0}, "decoded_queue_size is 0"),
        ({"max_num_shards": 0}, "max_num_shards is 0"),
        ({"max_num_shards": 1.5}, "max_num_shards is 1.5"),
        ({"episode_pool_size": 0}, "episode_pool_size is 0"),
        ({"video_decoder_cache_size": 0}, "video_decoder_cache_size is 0"),
        ({"byte_budget_gb": 0}, "byte_budget_gb is 0"),
        ({"byte_budget_gb": float("nan")}, "byte_budget_gb is nan"),
        ({"tolerance_s": -1e-4}, "tolerance_s is -0.0001"),
        ({"tolerance_s": "1e-4"}, "tolerance_s is '1e-4'"),
        ({"sampling_strategy": "shuffle"}, "shuffle"),
        ({"return_uint8": "some"}, "return_uint8 is 'some'"),
        ({"depth_output_unit": "cm"}, "depth_output_unit is 'cm'"),
        ({"image_transforms": 3}, "image_transforms is 3"),
        ({"delta_timestamps": [0.1]}, "delta_timestamps is"),
        ({"delta_timestamps": {"speed": [0.0]}}, "'speed'"),
        ({"delta_timestamps": {"action": [0.015]}}, "between two frames"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 0}, "give both"),
        ({"rank": 2, "world_size": 2}, "Rank 2"),
        ({"storage_options": "token"}, "storage_options is"),
        ({"repo_type": "model"}, "repo_type"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(
    tiny_dataset: WrittenDataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        open_loader(tiny_dataset, **options)
    assert message in str(caught.value)
