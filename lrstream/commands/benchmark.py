"""Stream an epoch, measure it beside the bare decoder, and check what arrived."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.benchmark_ceiling import ceiling_probe
from lrstream.commands.benchmark_checks import coverage_problems, identity_problems
from lrstream.commands.benchmark_common import (
    DatasetFacts,
    Percentiles,
    choose_episodes,
    load_average,
    this_machine,
)
from lrstream.commands.benchmark_report import LoaderBenchmark, LoaderOptions
from lrstream.commands.benchmark_stages import (
    cpu_ms_per_sample,
    fetched_bytes_per_sample,
    limit_of,
    stage_rates,
    time_shares,
    total_of,
)
from lrstream.commands.build import build_dataset
from lrstream.commands.progress import Progress, no_progress
from lrstream.commands.validate import validate_target
from lrstream.demo import WrittenDataset, write_dataset
from lrstream.errors import UsageError
from lrstream.storage.location import RepoType
from lrstream.streaming.measure import MeasuredDataset, measure_epoch

__all__ = ["LoaderBenchmark", "LoaderOptions", "benchmark_loader"]

# The painted blocks lie in this corner; only it is put aside while the clock runs.
_CORNER = (Ellipsis, slice(0, 16), slice(0, 96))


def benchmark_loader(
    source: str | None = None,
    *,
    demo: bool = False,
    options: LoaderOptions | None = None,
    repo_type: RepoType = "dataset",
    revision: str | None = None,
    progress: Progress = no_progress,
    check_dataset: Callable[[str], None] | None = None,
) -> LoaderBenchmark:
    """Stream one epoch of a dataset, or its beginning, and decode some of the same frames without a loader.

    Args:
        source: The dataset; None with `demo`.
        demo: Write a small dataset into a temporary folder, validate it, and check the pictures too. Its
            caches are there as well, so that nothing is left.
        options: How to run the loader.
        repo_type: What ``OWNER/NAME`` means.
        revision: Branch, tag or commit.
        progress: Told about steps and delivered frames.
        check_dataset: Gets the digest of the chosen episodes before any long work; may refuse them.

    Raises:
        UsageError: Both or neither of `source` and `demo` are given, or no episode is chosen.
        LrstreamError: As `build_dataset` and the loader.
    """
    options = options or LoaderOptions()
    if demo == (source is not None):
        given = "both" if demo else "neither"
        raise UsageError(
            f"Expected a SOURCE or --demo, got {given}.",
            hint="'lrstream benchmark loader --demo' needs nothing.",
        )
    if source is not None:
        return _stream(source, None, options, repo_type, revision, progress, check_dataset)
    with tempfile.TemporaryDirectory(prefix="lrstream-demo-") as folder, _caches_in(Path(folder) / "caches"):
        progress(0, None, "writing the demonstration dataset")
        written = write_dataset(Path(folder) / "demo")
        root = str(written.root)
        report = _stream(root, written, options, "dataset", None, progress, check_dataset)
        checked = validate_target(root, progress=progress)
        return replace(report, source=None, problems=(*checked.problems, *report.problems))


def _stream(
    source: str,
    written: WrittenDataset | None,
    options: LoaderOptions,
    repo_type: RepoType,
    revision: str | None,
    progress: Progress,
    check_dataset: Callable[[str], None] | None,
) -> LoaderBenchmark:
    chosen = choose_episodes(source, options.episodes, repo_type=repo_type, revision=revision)
    facts = DatasetFacts.of(chosen.layout, chosen.positions, is_demo=written is not None)
    if check_dataset is not None:
        check_dataset(facts.digest)
    built = build_dataset(source, repo_type=repo_type, revision=revision, progress=progress)
    table, positions = chosen.layout.episodes, chosen.positions
    expected = np.concatenate(
        [
            np.arange(start, stop, dtype=np.int64)
            for start, stop in zip(
                table.dataset_from_index[positions], table.dataset_to_index[positions], strict=True
            )
        ]
    )
    target = len(expected) if options.samples is None else min(options.samples, len(expected))
    rows: dict[str, list[NDArray[np.int64]]] = {"index": [], "episode_index": [], "frame_index": []}
    corners: dict[str, list[NDArray[np.uint8]]] = {}
    cameras = written.camera_keys if written is not None else ()

    def take(batch: Mapping[str, Any]) -> None:
        for name, parts in rows.items():
            # A copy: what refers to a batch keeps its memory from being used again.
            parts.append(batch[name].numpy().copy())
        for key in cameras:
            corners.setdefault(key, []).append(batch[key][_CORNER].numpy().copy())
        progress(sum(map(len, rows["index"])), target, "frames")

    load = load_average()
    with ExitStack() as stack:
        probe = None
        if built.path is not None:
            probe = stack.enter_context(ceiling_probe(chosen, options, built.path))
        dataset = stack.enter_context(
            MeasuredDataset(
                source,
                episodes=table.episode_index[positions].tolist(),
                repo_type=repo_type,
                revision=revision,
                sampling_strategy=options.strategy,
                decode_threads=options.decode_threads,
                prefetch_episodes=options.prefetch,
                episode_pool_size=options.pool,
                byte_budget_gb=options.budget_gb,
                reservoir_gb=options.reservoir_gb,
                native_http_connections=options.connections,
                return_uint8=True,
                rank=0,
                world_size=1,
            )
        )
        if probe is not None:
            progress(0, None, "decoding without a loader")
            probe.run_half()
        times = measure_epoch(
            dataset,
            batch_size=options.batch_size,
            num_workers=options.workers,
            take=take,
            limits=options.limits,
        )
        if probe is not None:
            progress(0, None, "decoding without a loader")
            probe.run_half()
        ceiling = None if probe is None else probe.result()
    index, episodes, frames = (_joined(rows[name]) for name in rows)
    problems = list(coverage_problems(index, expected, source, is_complete=times.is_complete))
    for camera, key in enumerate(cameras):
        pictures = np.concatenate(corners[key])
        problems += identity_problems(camera, key, pictures, episodes, frames)
    waits = Percentiles.of(times.waits_s)
    shares = time_shares(times)
    cpu_ms = cpu_ms_per_sample(times)
    rate, ceiling_rate = times.samples_per_s, None if ceiling is None else ceiling.samples_per_s
    return LoaderBenchmark(
        source=source,
        demo=written is not None,
        origin=built.origin,
        files=facts.num_files,
        episodes=len(positions),
        frames=len(expected),
        workers=options.workers,
        batch_size=options.batch_size,
        strategy=options.strategy,
        is_complete=times.is_complete,
        build_s=built.elapsed_s,
        first_batch_s=times.first_batch_s,
        epoch_s=times.elapsed_s,
        samples_per_s=rate,
        batch_wait_p50_s=waits.p50,
        batch_wait_p95_s=waits.p95,
        batch_wait_p99_s=waits.p99,
        samples=times.num_samples,
        stages=stage_rates(times.reports, options.decode_threads),
        shares=shares,
        limit=limit_of(times, shares, strategy=options.strategy, load=load),
        cpu_ms_per_sample=cpu_ms,
        ceiling=ceiling,
        ceiling_samples_per_s=ceiling_rate,
        ceiling_cpu_ms_per_sample=None if ceiling is None else ceiling.cpu_ms_per_sample,
        ceiling_ratio=rate / ceiling_rate if ceiling_rate else None,
        ceiling_cpu_ratio=ceiling.cpu_ms_per_sample / cpu_ms if ceiling is not None and cpu_ms else None,
        bytes_per_sample=fetched_bytes_per_sample(times.reports),
        requests=total_of(times.reports, "storage", "requests"),
        retries=total_of(times.reports, "storage", "retries"),
        refill_stalls=total_of(times.reports, "refill_stalls"),
        refill_stall_s=total_of(times.reports, "refill_stall_s"),
        peak_reserved_bytes=total_of(times.reports, "peak_reserved_bytes"),
        rss_bytes=times.memory.rss_bytes,
        pss_bytes=times.memory.pss_bytes,
        load_average=load,
        pictures_checked=len(index) * len(cameras),
        dataset=facts,
        settings=options,
        machine=this_machine(),
        problems=tuple(problems),
        waits_s=times.waits_s,
    )


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


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
