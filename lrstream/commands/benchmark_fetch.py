"""`lrstream benchmark fetch`: the ranges of episodes, as the loader asks for them, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.benchmark_charts import Bars, Chart, Histogram
from lrstream.commands.benchmark_common import (
    ChosenEpisodes,
    DatasetFacts,
    Machine,
    Percentiles,
    load_average,
    this_machine,
)
from lrstream.commands.progress import Progress, no_progress
from lrstream.errors import UsageError
from lrstream.index.open import open_index
from lrstream.sidecar.problems import Problem
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.storage.store import DatasetStore, open_store
from lrstream.streaming.sources import EpisodeSpans, TrackSource, VideoFiles

__all__ = ["FetchBenchmark", "FetchOptions", "FetchPass", "benchmark_fetch"]

_MAX_OPEN_FILES = 16
_MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How episodes are fetched.

    Attributes:
        episodes: Episodes to choose from, as `parse_episode_spec` takes them; None = all.
        count: Most episodes that are fetched, chosen at random; None = all of these.
        at_once: Episodes at once, each in a read for every camera.
        connections: HTTP connections; None = the default of the store.
        subranges: Parallel parts of one read over HTTP.
        seed: Seed of the choice and of the order.
    """

    episodes: str | None = None
    count: int | None = 32
    at_once: int = 16
    connections: int | None = None
    subranges: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FetchPass:
    """One pass over the ranges.

    Attributes:
        reads: Ranges that were read.
        bytes: Their bytes.
        elapsed_s: Duration.
        mib_per_s: Bytes over duration.
        latency_s: From asking for a range to its last byte.
        at_once: Reads under way on average.
        requests: Requests that they took; redirects and repetitions count.
        retries: Repetitions.
        slept_s: Time in which repetitions were waited for, over all reads.
        connections: Connections that were opened; None where the store does not tell.
    """

    reads: int
    bytes: int
    elapsed_s: float
    mib_per_s: float
    latency_s: Percentiles
    at_once: float
    requests: int
    retries: int
    slept_s: float
    connections: int | None


@dataclass(frozen=True, slots=True)
class FetchBenchmark:
    """Episodes fetched twice.

    Attributes:
        episodes: Episodes that were fetched.
        frames: Their frames.
        files: Files that they are in.
        frames_per_s: Frames per second of the first pass.
        cold: The first pass: nothing is connected, nothing resolved. The system's own cache of local
            files is not emptied.
        repeated: The second one, over the same ranges.
        load_average: Processes that wanted a processor in the minute before.
        dataset: Which dataset.
        settings: How it was fetched.
        machine: Where.
        latencies_s: Each read of both passes, seconds.
    """

    episodes: int
    frames: int
    files: int
    frames_per_s: float
    cold: FetchPass
    repeated: FetchPass
    load_average: float | None
    dataset: DatasetFacts
    settings: FetchOptions
    machine: Machine
    latencies_s: tuple[NDArray[np.float64], NDArray[np.float64]]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """None: a range that cannot be read is an error."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without the single reads."""
        fields = asdict(self)
        del fields["latencies_s"]
        return fields

    def charts(self) -> list[Chart | None]:
        """What a plot shows."""
        rates = (("cold", self.cold.mib_per_s), ("repeated", self.repeated.mib_per_s))
        return [
            Bars("Throughput", "MiB/s", rates),
            Histogram.of("Latency of a range, cold", self.latencies_s[0]),
            Histogram.of("Latency of a range, repeated", self.latencies_s[1]),
        ]


class _Range(NamedTuple):
    path: str
    start: int
    stop: int


def benchmark_fetch(
    chosen: ChosenEpisodes, options: FetchOptions, *, progress: Progress = no_progress
) -> FetchBenchmark:
    """Fetch the ranges of some episodes twice. The sidecar is found or built first.

    Args:
        chosen: Episodes to choose from.
        options: How to fetch.
        progress: Told about ranges.

    Raises:
        UsageError: The dataset has no video.
        LrstreamError: As `resolve_sidecar`; or a range cannot be read.
    """
    layout, positions = chosen
    if not layout.video_files():
        raise UsageError(
            f"{layout.store.location} has no video, so that there is nothing to fetch by ranges.",
            hint="'lrstream benchmark loader' measures datasets whose pictures are in tables.",
        )
    random = np.random.Generator(np.random.PCG64(options.seed))
    picked = random.permutation(positions)[: options.count]
    tracks = open_index(resolve_sidecar(layout.store, layout))
    # A store of its own, which has neither connections nor counted anything yet.
    store = open_store(layout.store.location, connections=options.connections, subranges=options.subranges)
    try:
        ranges = _ranges(chosen, store, tracks, picked)
        files = VideoFiles(store, tracks, _MAX_OPEN_FILES)
        load = load_average()
        try:
            passes = [
                _run(store, files, ranges, options, len(layout.episodes.cameras), progress, name)
                for name in ("ranges", "ranges once more")
            ]
        finally:
            files.close()
    finally:
        tracks.close()
        close = getattr(store, "close", None)  # only stores with connections have one
        if close is not None:
            close()
    frames = int(layout.episodes.length[picked].sum())
    (cold, first), (repeated, second) = passes
    return FetchBenchmark(
        episodes=len(picked),
        frames=frames,
        files=len({item.path for item in ranges}),
        frames_per_s=frames / cold.elapsed_s,
        cold=cold,
        repeated=repeated,
        load_average=load,
        dataset=DatasetFacts.of(*chosen),
        settings=options,
        machine=this_machine(),
        latencies_s=(first, second),
    )


def _ranges(
    chosen: ChosenEpisodes, store: DatasetStore, tracks: TrackSource, picked: NDArray[np.int64]
) -> list[_Range]:
    table = chosen.layout.episodes
    files = VideoFiles(store, tracks, _MAX_OPEN_FILES)
    try:
        spans = EpisodeSpans(table, files)
        spans.sizes(picked)
        ranges = []
        for position in picked.tolist():
            for camera, columns in table.cameras.items():
                span = spans.span(position, camera)
                ranges.append(_Range(columns.path(position), span.start_byte, span.stop_byte))
        return ranges
    finally:
        files.close()


def _run(
    store: DatasetStore,
    files: VideoFiles,
    ranges: Sequence[_Range],
    options: FetchOptions,
    num_cameras: int,
    progress: Progress,
    name: str,
) -> tuple[FetchPass, NDArray[np.float64]]:
    before = _Counts.of(store)
    num_done = 0
    lock = threading.Lock()

    def read(item: _Range) -> float:
        nonlocal num_done
        started_s = time.perf_counter()
        with files.use(item.path) as file:
            file.source.read(item.start, item.stop)
        seconds = time.perf_counter() - started_s
        with lock:
            num_done += 1
            progress(num_done, len(ranges), name)
        return seconds

    started_s = time.perf_counter()
    threads = ThreadPoolExecutor(
        min(_MAX_THREADS, options.at_once * num_cameras), thread_name_prefix="lrstream-fetch"
    )
    try:
        latencies = np.array(list(threads.map(read, ranges)), dtype=np.float64)
    finally:
        threads.shutdown(cancel_futures=True)  # also when the first of them has failed
    elapsed_s = time.perf_counter() - started_s
    after = _Counts.of(store)
    num_bytes = sum(item.stop - item.start for item in ranges)
    opened = None
    if before.connections is not None and after.connections is not None:
        opened = after.connections - before.connections
    figures = FetchPass(
        reads=len(ranges),
        bytes=num_bytes,
        elapsed_s=elapsed_s,
        mib_per_s=num_bytes / 2**20 / elapsed_s,
        latency_s=Percentiles.of(latencies),
        at_once=float(latencies.sum()) / elapsed_s,
        requests=after.requests - before.requests,
        retries=after.retries - before.retries,
        slept_s=after.slept_s - before.slept_s,
        connections=opened,
    )
    return figures, latencies


class _Counts(NamedTuple):
    requests: int
    retries: int
    slept_s: float
    connections: int | None

    @classmethod
    def of(cls, store: DatasetStore) -> _Counts:
        retries = getattr(store, "retry_counters", None)  # only remote stores repeat requests
        return cls(
            store.counters.requests,
            0 if retries is None else retries.retries,
            0.0 if retries is None else retries.slept_s,
            getattr(store, "connections_opened", None),
        )
