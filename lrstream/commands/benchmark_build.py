"""`lrstream benchmark build`: index some videos from scratch, whatever is cached."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from lrstream.commands.benchmark_charts import Bars, Chart
from lrstream.commands.benchmark_common import DatasetFacts, Machine, load_average, this_machine
from lrstream.commands.progress import Progress, no_progress
from lrstream.errors import UsageError
from lrstream.layout.layout import DatasetLayout
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.build import DEFAULT_WORKERS, BuildProgress, build_sidecar, request_identity
from lrstream.sidecar.finished import Record
from lrstream.sidecar.identity import SourceFile
from lrstream.sidecar.problems import Problem
from lrstream.sidecar.processes import ProcessIndexer, automatic_processes
from lrstream.sidecar.writer import encode_source
from lrstream.storage.byte_source import ByteSource, GrowingByteSource
from lrstream.storage.store import DatasetStore, open_store

__all__ = ["BuildBenchmark", "BuildOptions", "BuildStages", "benchmark_build"]

_MAX_COMPRESSED = 16


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How videos are indexed.

    Attributes:
        videos: Most videos, spread evenly over the dataset; None = all.
        workers: Videos indexed at once.
        connections: HTTP connections of each process; None = the default of the store.
        processes: Processes; None = as many as the number of videos and processors suggests.
    """

    videos: int | None = 64
    workers: int = DEFAULT_WORKERS
    connections: int | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class BuildStages:
    """Time of each stage, seconds, over all threads together.

    Attributes:
        transfer: Waiting for bytes.
        parse: Making sample tables of them.
        compress: Putting these into the archive; measured behind the build, on some of them.
    """

    transfer: float
    parse: float
    compress: float


@dataclass(frozen=True, slots=True)
class BuildBenchmark:
    """Some videos, indexed. What is None was not measured, because several processes were at work.

    Attributes:
        videos: Videos.
        frames: Coded pictures in them.
        elapsed_s: Duration, without looking for the files.
        listing_s: Duration of looking for the files and what tells when they change.
        videos_per_s: Videos over duration.
        frames_per_s: Pictures over duration.
        requests: Requests.
        bytes_read: Bytes that they brought.
        moov_bytes: Sum of the `moov` boxes, which is what has to be read.
        bytes_over_moov: Bytes read over that.
        source_bytes: Size of the videos.
        archive_bytes: Size of the sidecar.
        archive_bytes_per_frame: Its size for each picture.
        stages: Time of each stage.
        reads_at_once: Reads under way on average, while there is one.
        most_reads_at_once: Most of them.
        processes: Processes that indexed.
        cpu_s: Processor time of all of them, seconds.
        load_average: Processes that wanted a processor in the minute before.
        dataset: Which dataset.
        settings: How it was indexed.
        machine: Where.
    """

    videos: int
    frames: int
    elapsed_s: float
    listing_s: float
    videos_per_s: float
    frames_per_s: float
    requests: int
    bytes_read: int
    moov_bytes: int | None
    bytes_over_moov: float | None
    source_bytes: int
    archive_bytes: int
    archive_bytes_per_frame: float
    stages: BuildStages | None
    reads_at_once: float | None
    most_reads_at_once: int | None
    processes: int
    cpu_s: float
    load_average: float | None
    dataset: DatasetFacts
    settings: BuildOptions
    machine: Machine

    @property
    def problems(self) -> tuple[Problem, ...]:
        """None: a video that cannot be indexed is an error."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def charts(self) -> list[Chart | None]:
        """What a plot shows."""
        sizes = [("read", self.bytes_read / 1024), ("sidecar", self.archive_bytes / 1024)]
        if self.moov_bytes is not None:
            sizes.insert(1, ("moov boxes", self.moov_bytes / 1024))
        charts: list[Chart | None] = [Bars("Bytes", "KiB", tuple(sizes))]
        if self.stages is not None:
            stages = tuple(asdict(self.stages).items())
            charts.insert(0, Bars("Time of each stage, all threads together", "s", stages))
        return charts


def benchmark_build(
    layout: DatasetLayout, options: BuildOptions, *, progress: Progress = no_progress
) -> BuildBenchmark:
    """Index videos into a temporary directory. No sidecar is looked for, and none is left.

    Args:
        layout: The dataset.
        options: How to index it.
        progress: Told about videos.

    Raises:
        UsageError: The dataset has no video.
        LrstreamError: As `build_sidecar`.
    """
    paths = layout.video_files()
    if not paths:
        raise UsageError(f"{layout.store.location} has no video, so that there is nothing to index.")
    count = len(paths) if options.videos is None else min(options.videos, len(paths))
    wanted = [paths[number * len(paths) // count] for number in range(count)]
    opened = open_store(layout.store.location, connections=options.connections)
    processes = options.processes or automatic_processes(options.workers, count, opened.location)
    store = _TimedStore(opened)
    started_s = time.perf_counter()
    identity = request_identity(cast(DatasetStore, store), layout).narrowed(wanted)
    listing_s = time.perf_counter() - started_s

    def tell(state: BuildProgress) -> None:
        progress(state.done, state.total, "videos")

    load = load_average()
    # Other processes open a store of their own, which is not timed.
    clock = _StageClock(store) if processes == 1 else None
    indexer = None if clock else ProcessIndexer(processes, options.workers, packs_records=False)
    with tempfile.TemporaryDirectory(prefix="lrstream-build-") as folder:
        cpu_s = _cpu_s()
        report = build_sidecar(
            cast(DatasetStore, store) if clock else opened,
            layout,
            destination=Path(folder) / "sidecar.npz",
            workers=options.workers,
            identity=identity,
            progress=tell,
            finished=clock,
            indexer=indexer,
        )
        cpu_s = _cpu_s() - cpu_s
    return BuildBenchmark(
        videos=report.num_sources,
        frames=report.num_samples,
        elapsed_s=report.elapsed_s,
        listing_s=listing_s,
        videos_per_s=report.num_sources / report.elapsed_s,
        frames_per_s=report.num_samples / report.elapsed_s,
        requests=report.requests,
        bytes_read=report.bytes_read,
        moov_bytes=store.moov_bytes if clock else None,
        bytes_over_moov=report.bytes_read / max(1, store.moov_bytes) if clock else None,
        source_bytes=report.source_bytes,
        archive_bytes=report.archive_bytes,
        archive_bytes_per_frame=report.archive_bytes / report.num_samples,
        stages=clock.stages(report.num_sources) if clock else None,
        reads_at_once=store.reads_at_once if clock else None,
        most_reads_at_once=store.most_reads_at_once if clock else None,
        processes=processes,
        cpu_s=cpu_s,
        load_average=load,
        dataset=DatasetFacts.of(layout),
        settings=options,
        machine=this_machine(),
    )


def _cpu_s() -> float:
    """Processor time of this process and of those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class _TimedStore:
    """A store whose sources are timed; everything else is the store's own."""

    def __init__(self, store: DatasetStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._num_active = 0
        self._busy_since_s = self._busy_s = self._read_s = 0.0
        self.of_thread = threading.local()
        self.moov_bytes = 0
        self.most_reads_at_once = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, path: str, size: int | None = None) -> _TimedSource:
        source = self._store.open(path, size)
        # Beside this, `isinstance` of a protocol takes as long as parsing a box.
        if hasattr(source, "read_growing"):
            return _TimedGrowingSource(cast(GrowingByteSource, source), self)
        return _TimedSource(source, self)

    @property
    def reads_at_once(self) -> float:
        return self._read_s / self._busy_s if self._busy_s else 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        started_s = time.perf_counter()
        with self._lock:
            if self._num_active == 0:
                self._busy_since_s = started_s
            self._num_active += 1
            self.most_reads_at_once = max(self.most_reads_at_once, self._num_active)
        try:
            yield
        finally:
            ended_s = time.perf_counter()
            self.of_thread.read_s = getattr(self.of_thread, "read_s", 0.0) + ended_s - started_s
            with self._lock:
                self._read_s += ended_s - started_s
                self._num_active -= 1
                if self._num_active == 0:
                    self._busy_s += ended_s - self._busy_since_s

    def add_moov(self, num_bytes: int) -> None:
        with self._lock:
            self.moov_bytes += num_bytes


class _TimedSource:
    """A source that remembers what was read of it until it is closed, to find the size of `moov`."""

    def __init__(self, source: ByteSource, store: _TimedStore) -> None:
        self.path = source.path
        self._source, self._store = source, store
        self._replies: list[tuple[int, bytes]] = []

    def size(self) -> int:
        with self._store.timed():
            return self._source.size()

    def read(self, start: int, stop: int) -> bytes:
        with self._store.timed():
            data = self._source.read(start, stop)
        self._replies.append((start, data))
        return data

    def read_upto(self, start: int, stop: int) -> tuple[bytes, int]:
        with self._store.timed():
            data, size = self._source.read_upto(start, stop)
        self._replies.append((start, data))
        return data, size

    def expect(self, fingerprint: str) -> None:
        self._source.expect(fingerprint)

    def close(self) -> None:
        self._store.add_moov(_moov_bytes(self._replies))
        self._replies = []
        self._source.close()


class _TimedGrowingSource(_TimedSource):
    """The same of a source that can end a request early."""

    def __init__(self, source: GrowingByteSource, store: _TimedStore) -> None:
        super().__init__(source, store)
        self._growing = source

    def read_growing(self, first: int, limit: int, stop_of: Callable[[bytes, int], int]) -> tuple[bytes, int]:
        with self._store.timed():
            data, size = self._growing.read_growing(first, limit, stop_of)
        self._replies.append((0, data))
        return data, size


def _moov_bytes(replies: list[tuple[int, bytes]]) -> int:
    """Size of `moov`, by walking the top-level boxes whose headers were read; 0 where it was not met."""
    at = 0
    while True:
        for start, data in replies:
            header = data[at - start : at - start + 16] if start <= at < start + len(data) else b""
            if len(header) >= 8:
                break
        else:
            return 0
        size, kind = int.from_bytes(header[:4], "big"), header[4:8]
        if size == 1 and len(header) == 16:
            size = int.from_bytes(header[8:], "big")
        if kind == b"moov":
            return size
        if size < 8:
            return 0  # reaches to the end of the file, or is damaged: then the build fails by itself
        at += size


class _StageClock:
    """Is asked before each video and told after it, on its thread: so it knows how long both took."""

    def __init__(self, store: _TimedStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._index_s = self._read_s = 0.0
        self._tracks: list[TrackIndex] = []

    def records(self, source: SourceFile, fingerprint: str | None) -> Iterable[Record]:
        self._of_thread.found_s = time.perf_counter()
        self._store.of_thread.read_s = 0.0
        return ()

    def keep(self, track: TrackIndex, fingerprint: str | None) -> None:
        seconds = time.perf_counter() - self._of_thread.found_s
        with self._lock:
            self._index_s += seconds
            self._read_s += self._store.of_thread.read_s
            if len(self._tracks) < _MAX_COMPRESSED:
                self._tracks.append(track)

    def keep_packed(self, packed: bytes, fingerprint: str | None) -> None:
        raise AssertionError("only other processes pack what they have made")

    def stages(self, num_videos: int) -> BuildStages:
        # Nobody tells how long compressing took within the build: some of it is done once more.
        started_s = time.perf_counter()
        for number, track in enumerate(self._tracks):
            encode_source(number, track)
        each_s = (time.perf_counter() - started_s) / len(self._tracks)
        return BuildStages(self._read_s, self._index_s - self._read_s, each_s * num_videos)
