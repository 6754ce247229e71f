"""Stream one epoch, measure it, and check what arrived."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.build import build_dataset
from lrstream.commands.opened import open_dataset
from lrstream.commands.progress import Progress, no_progress
from lrstream.commands.validate import validate_target
from lrstream.demo import WrittenDataset, read_identities, write_dataset
from lrstream.errors import UsageError
from lrstream.sidecar.problems import Problem
from lrstream.sidecar.resolve import Origin
from lrstream.storage.location import RepoType
from lrstream.streaming.dataset import StreamingLeRobotDataset
from lrstream.streaming.measure import measure_epoch
from lrstream.streaming.strategies import SamplingStrategy

__all__ = ["BENCHMARK_CODES", "LoaderBenchmark", "benchmark_loader", "coverage_problems", "identity_problems"]

BENCHMARK_CODES = ("frame-missing", "frame-repeated", "frame-unknown", "wrong-picture")
"""Codes of the problems that are found here."""

_MAX_SHOWN = 5
# The painted blocks lie in this corner; only it is put aside while the clock runs.
_CORNER = (Ellipsis, slice(0, 16), slice(0, 96))


@dataclass(frozen=True, slots=True)
class LoaderBenchmark:
    """What one epoch took and whether it was right.

    Attributes:
        source: The dataset; None for a demonstration, which is gone.
        demo: Whether it was a demonstration, so that the pictures were checked too.
        origin: Where its sidecar came from; None without video.
        files: MP4 files.
        episodes: Episodes.
        frames: Frames of all episodes.
        workers: DataLoader workers.
        batch_size: Samples of a batch.
        strategy: How frames were drawn.
        build_s: Duration of finding or building the sidecar.
        first_batch_s: From starting the workers to the first batch.
        epoch_s: From starting the workers to the end.
        samples_per_s: Samples per second once the first batch was there.
        batch_wait_p50_s: Half of the later batches took at most this long to arrive.
        batch_wait_p95_s: 95 % of them.
        batch_wait_p99_s: 99 % of them.
        samples: Samples that arrived.
        pictures_checked: Pictures whose painted identity was compared with their row.
        problems: What was wrong.
    """

    source: str | None
    demo: bool
    origin: Origin | None
    files: int
    episodes: int
    frames: int
    workers: int
    batch_size: int
    strategy: SamplingStrategy
    build_s: float
    first_batch_s: float
    epoch_s: float
    samples_per_s: float
    batch_wait_p50_s: float
    batch_wait_p95_s: float
    batch_wait_p99_s: float
    samples: int
    pictures_checked: int
    problems: tuple[Problem, ...]

    @property
    def num_errors(self) -> int:
        """Problems that are not just warnings."""
        return sum(problem.severity == "error" for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without the problems, which have a place of their own in the document."""
        fields = asdict(self)
        del fields["problems"]
        return fields


def benchmark_loader(
    source: str | None = None,
    *,
    demo: bool = False,
    workers: int = 2,
    batch_size: int = 16,
    strategy: SamplingStrategy = "remaining",
    repo_type: RepoType = "dataset",
    revision: str | None = None,
    progress: Progress = no_progress,
) -> LoaderBenchmark:
    """Stream one epoch of a dataset.

    Args:
        source: The dataset; None with `demo`.
        demo: Write a small dataset into a temporary folder, validate it, and check the pictures too. Its
            caches are there as well, so that nothing is left.
        workers: DataLoader workers.
        batch_size: Samples of a batch.
        strategy: How frames are drawn.
        repo_type: What ``OWNER/NAME`` means.
        revision: Branch, tag or commit.
        progress: Told about steps and delivered frames.

    Raises:
        UsageError: Both or neither of `source` and `demo` are given.
        LrstreamError: As `build_dataset` and the loader.
    """
    if demo == (source is not None):
        given = "both" if demo else "neither"
        raise UsageError(
            f"Expected a SOURCE or --demo, got {given}.",
            hint="'lrstream benchmark loader --demo' needs nothing.",
        )
    if source is not None:
        return _stream(source, None, workers, batch_size, strategy, repo_type, revision, progress)
    with tempfile.TemporaryDirectory(prefix="lrstream-demo-") as folder, _caches_in(Path(folder) / "caches"):
        progress(0, None, "writing the demonstration dataset")
        written = write_dataset(Path(folder) / "demo")
        root = str(written.root)
        report = _stream(root, written, workers, batch_size, strategy, "dataset", None, progress)
        checked = validate_target(root, progress=progress)
        return replace(report, source=None, problems=(*checked.problems, *report.problems))


def coverage_problems(
    delivered: NDArray[np.int64], expected: NDArray[np.int64], source: str
) -> Iterator[Problem]:
    """Frames that did not arrive exactly once.

    Args:
        delivered: ``index`` of every sample that arrived, int64, shape ``(n,)``.
        expected: ``index`` of every frame that should, int64, shape ``(m,)``, without duplicates.
        source: Name for the messages.
    """
    found, counts = np.unique(delivered, return_counts=True)
    groups = (
        ("frame-missing", "did not arrive", np.setdiff1d(expected, found)),
        ("frame-repeated", "arrived more than once", found[counts > 1]),
        ("frame-unknown", "arrived but are not in the dataset", np.setdiff1d(found, expected)),
    )
    for code, what, indices in groups:
        if len(indices):
            message = f"{len(indices)} of {len(expected)} frames {what}: index {_shown(indices)}."
            yield Problem(code, "error", source, None, message, None)


def identity_problems(
    camera: int, key: str, pictures: NDArray[np.uint8], episodes: NDArray[np.int64], frames: NDArray[np.int64]
) -> Iterator[Problem]:
    """Pictures that are not the ones of their rows.

    Args:
        camera: Number of the camera.
        key: Its feature key.
        pictures: uint8, shape ``(n, 3, h, w)``, the corner that holds the painted blocks.
        episodes: ``episode_index`` of each sample, int64, shape ``(n,)``.
        frames: ``frame_index`` of each sample, int64, shape ``(n,)``.
    """
    expected = np.stack([np.full_like(episodes, camera), episodes, frames], axis=-1)
    wrong = (read_identities(pictures) != expected).any(axis=-1)
    for episode in np.unique(episodes[wrong]):
        rows = np.sort(frames[wrong & (episodes == episode)])
        message = f"{len(rows)} pictures of {key} are not those of their rows: frames {_shown(rows)}."
        yield Problem("wrong-picture", "error", key, int(episode), message, None)


def _stream(
    source: str,
    written: WrittenDataset | None,
    workers: int,
    batch_size: int,
    strategy: SamplingStrategy,
    repo_type: RepoType,
    revision: str | None,
    progress: Progress,
) -> LoaderBenchmark:
    built = build_dataset(source, repo_type=repo_type, revision=revision, progress=progress)
    table = open_dataset(source, repo_type=repo_type, revision=revision).layout.episodes
    expected = np.concatenate(
        [
            np.arange(start, stop, dtype=np.int64)
            for start, stop in zip(table.dataset_from_index, table.dataset_to_index, strict=True)
        ]
        or [np.empty(0, dtype=np.int64)]
    )
    rows: dict[str, list[NDArray[np.int64]]] = {"index": [], "episode_index": [], "frame_index": []}
    corners: dict[str, list[NDArray[np.uint8]]] = {}
    cameras = written.camera_keys if written is not None else ()

    def take(batch: Mapping[str, Any]) -> None:
        for name, parts in rows.items():
            parts.append(batch[name].numpy())
        for key in cameras:
            corners.setdefault(key, []).append(batch[key][_CORNER].numpy().copy())
        progress(sum(map(len, rows["index"])), len(expected), "frames")

    with StreamingLeRobotDataset(
        source,
        repo_type=repo_type,
        revision=revision,
        sampling_strategy=strategy,
        return_uint8=True,
        rank=0,
        world_size=1,
    ) as dataset:
        times = measure_epoch(dataset, batch_size=batch_size, num_workers=workers, take=take)
    index, episodes, frames = (_joined(rows[name]) for name in rows)
    problems = list(coverage_problems(index, expected, source))
    for camera, key in enumerate(cameras):
        pictures = np.concatenate(corners[key])
        problems += identity_problems(camera, key, pictures, episodes, frames)
    waits = times.waits_s if len(times.waits_s) else np.zeros(1)
    p50, p95, p99 = (float(value) for value in np.percentile(waits, [50, 95, 99]))
    return LoaderBenchmark(
        source=source,
        demo=written is not None,
        origin=built.origin,
        files=built.files,
        episodes=len(table),
        frames=len(expected),
        workers=workers,
        batch_size=batch_size,
        strategy=strategy,
        build_s=built.elapsed_s,
        first_batch_s=times.first_batch_s,
        epoch_s=times.elapsed_s,
        samples_per_s=times.samples_per_s,
        batch_wait_p50_s=p50,
        batch_wait_p95_s=p95,
        batch_wait_p99_s=p99,
        samples=times.num_samples,
        pictures_checked=len(index) * len(cameras),
        problems=tuple(problems),
    )


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _shown(values: NDArray[np.int64]) -> str:
    text = ", ".join(str(value) for value in values[:_MAX_SHOWN])
    return f"{text}, ..." if len(values) > _MAX_SHOWN else text


@contextmanager
def _caches_in(directory: Path) -> Iterator[None]:
    """Keep LeRobot's caches of this process, and of the workers it starts, in a directory."""
    before = os.environ.get("HF_LEROBOT_HOME")
    os.environ["HF_LEROBOT_HOME"] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_LEROBOT_HOME"]
        else:
            os.environ["HF_LEROBOT_HOME"] = before
