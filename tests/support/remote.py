"""What tests of remote roots share: whole epochs, the spans they need, what a request log shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lrstream import StreamingLeRobotDataset
from lrstream.layout.layout import load_layout
from lrstream.mp4.span import episode_span
from lrstream.sidecar.archive import ArchiveReader
from lrstream.storage.location import parse_location
from lrstream.storage.retry import RetryPolicy
from lrstream.storage.store import open_store
from tests.support.hub import LoopbackHub, RequestRecord

__all__ = [
    "assert_no_credentials",
    "assert_same_epoch",
    "epoch",
    "hurry_retries",
    "ranges_by_file",
    "spans_by_file",
]

Sample = dict[str, Any]
Range = tuple[int, int]


def epoch(
    source: str | Path,
    *,
    world_size: int = 1,
    num_workers: int = 0,
    start_method: str | None = None,
    **options: Any,
) -> list[Sample]:
    """All samples of an epoch: of each rank in turn, as its DataLoader gives them."""
    samples: list[Sample] = []
    for rank in range(world_size):
        with StreamingLeRobotDataset(source, rank=rank, world_size=world_size, **options) as dataset:
            loader: DataLoader[Sample] = DataLoader(
                dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=start_method
            )
            samples.extend(loader)
    return samples


def assert_same_epoch(found: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> None:
    """Equal samples in equal order: keys, types, values, pixels."""
    assert [int(sample["index"]) for sample in found] == [int(sample["index"]) for sample in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[key].dtype
                assert torch.equal(value, other[key]), key
            else:
                assert value == other[key], key


def spans_by_file(root: Path, archive: Path) -> dict[str, Counter[Range]]:
    """Byte ranges that an epoch needs of each video: one for each episode and camera."""
    episodes = load_layout(open_store(parse_location(root))).episodes
    spans: dict[str, Counter[Range]] = {}
    with ArchiveReader(archive) as reader:
        for camera in episodes.cameras.values():
            for position in range(len(episodes)):
                path = camera.path(position)
                samples = reader.track(path).samples
                span = episode_span(samples, float(camera.from_s[position]), float(camera.to_s[position]))
                spans.setdefault(path, Counter())[span.start_byte, span.stop_byte] += 1
    return spans


def ranges_by_file(records: Iterable[RequestRecord]) -> dict[str, Counter[Range]]:
    """Byte ranges that were asked for, by path of the video below the dataset's root."""
    ranges: dict[str, Counter[Range]] = {}
    for record in records:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", record.range or "")
        assert match is not None, record
        path = record.path[record.path.index("videos/") :]
        ranges.setdefault(path, Counter())[int(match[1]), int(match[2]) + 1] += 1
    return ranges


def hurry_retries(monkeypatch: pytest.MonkeyPatch, max_attempts: int = 4) -> None:
    """Short waits between attempts, and so many of them, wherever no policy is given."""
    initializer: Any = RetryPolicy.__init__
    monkeypatch.setattr(initializer, "__defaults__", (max_attempts, 0.01, 0.02, 20.0, 0.25))


def assert_no_credentials(hub: LoopbackHub, root: Path) -> None:
    """No token and no signed URL in any file below `root`, except what the Hub's client keeps for itself."""
    for file in root.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"SENTINEL" not in content, file
            assert b"Signature=" not in content, file
    assert hub.read_token
