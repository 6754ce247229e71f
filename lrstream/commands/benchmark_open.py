"""`lrstream benchmark open`: from a sidecar to what a worker knows of its episodes, in new processes."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.benchmark_charts import Bars, Chart
from lrstream.commands.benchmark_common import (
    ChosenEpisodes,
    DatasetFacts,
    Machine,
    load_average,
    this_machine,
)
from lrstream.commands.progress import Progress, no_progress
from lrstream.errors import LrstreamError, UsageError
from lrstream.index.open import open_index
from lrstream.layout.episodes import EpisodeTable
from lrstream.sidecar.problems import Problem
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.storage.store import DatasetStore
from lrstream.streaming.footprint import Footprint, footprint_of
from lrstream.streaming.planning import PlanSettings, stream_share
from lrstream.streaming.sources import EpisodeSpans, VideoFiles

__all__ = ["OpenBenchmark", "OpenOptions", "OpenStep", "benchmark_open"]

_MAX_OPEN_FILES = 16


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Whose share is looked at.

    Attributes:
        episodes: Episodes of the job, as `parse_episode_spec` takes them; None = all.
        world_size: Ranks of the job.
        workers: DataLoader workers of each.
    """

    episodes: str | None = None
    world_size: int = 1
    workers: int = 0


@dataclass(frozen=True, slots=True)
class OpenStep:
    """One step in a new process.

    Attributes:
        seconds: Time.
        cpu_s: Processor time, seconds.
        rss_growth_bytes: Resident memory more than before; None where nobody knows.
        private_growth_bytes: The part of it that is not backed by a file.
    """

    seconds: float
    cpu_s: float
    rss_growth_bytes: int | None
    private_growth_bytes: int | None


@dataclass(frozen=True, slots=True)
class OpenBenchmark:
    """A sidecar, opened.

    Attributes:
        files: Files of the sidecar.
        frames: Coded pictures in them, as far as episodes have them.
        share_files: Files of the share of the first worker.
        share_episodes: Its episodes.
        share_frames: Their frames.
        archive_bytes: Size of the sidecar.
        index_bytes: Size of the mapped index made from it.
        archive_bytes_per_frame: The former for each frame.
        index_bytes_per_frame: The latter for each frame.
        private_bytes_per_frame: Memory that the share takes in its process alone, for each of its frames.
        convert: Making the index, the growth being that at its peak.
        open: Opening it.
        records: Looking up every file of the share.
        sizes: Computing the exact sizes of its episodes, which the plan needs.
        peak_rss_bytes: Largest memory of the process that opened it.
        load_average: Processes that wanted a processor in the minute before.
        dataset: Which dataset.
        settings: Whose share.
        machine: Where.
    """

    files: int
    frames: int
    share_files: int
    share_episodes: int
    share_frames: int
    archive_bytes: int
    index_bytes: int
    archive_bytes_per_frame: float
    index_bytes_per_frame: float
    private_bytes_per_frame: float | None
    convert: OpenStep
    open: OpenStep
    records: OpenStep
    sizes: OpenStep
    peak_rss_bytes: int | None
    load_average: float | None
    dataset: DatasetFacts
    settings: OpenOptions
    machine: Machine

    @property
    def problems(self) -> tuple[Problem, ...]:
        """None: a sidecar that cannot be opened is an error."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def charts(self) -> list[Chart | None]:
        """What a plot shows."""
        steps = (("convert", self.convert), ("open", self.open), ("records", self.records),
                 ("sizes", self.sizes))  # fmt: skip
        growth = tuple((name, (step.rss_growth_bytes or 0) / 2**20) for name, step in steps)
        return [
            Bars("Time", "ms", tuple((name, 1000 * step.seconds) for name, step in steps)),
            Bars("Growth of resident memory", "MiB", growth),
        ]


@dataclass(frozen=True, slots=True)
class _Share:
    """What the second process is to open."""

    store: DatasetStore
    episodes: EpisodeTable
    positions: NDArray[np.int64]
    paths: tuple[str, ...]


def benchmark_open(
    chosen: ChosenEpisodes, options: OpenOptions, *, progress: Progress = no_progress
) -> OpenBenchmark:
    """Convert the sidecar into a temporary directory and open the result there.

    The sidecar itself is found, or built where there is none, as training would do it.

    Args:
        chosen: Episodes of the job.
        options: Whose share.
        progress: Told about steps.

    Raises:
        UsageError: The dataset has no video, or a rank no episode.
        LrstreamError: As `resolve_sidecar` and `open_index`.
    """
    layout, positions = chosen
    table = layout.episodes
    if not layout.video_files():
        raise UsageError(f"{layout.store.location} has no video, so that it needs no index.")
    settings = PlanSettings(world_size=options.world_size, num_workers=options.workers)
    places, _ = stream_share(table.length[positions], settings, rank=0, worker=0)
    share = _Share(
        layout.store,
        table,
        positions[places],
        tuple(
            sorted(
                {
                    camera.files[number]
                    for camera in table.cameras.values()
                    for number in camera.file[positions[places]].tolist()
                }
            )
        ),
    )
    archive = resolve_sidecar(layout.store, layout).path
    load = load_average()
    with tempfile.TemporaryDirectory(prefix="lrstream-open-") as folder:
        home = Path(folder)
        progress(0, None, "converting the sidecar")
        convert, index_bytes = _in_new_process(_convert, archive, home)
        progress(0, None, "opening the index")
        (opened, records, sizes), peak, num_files = _in_new_process(_open, archive, home, share)
    share_frames = int(table.length[share.positions].sum())
    private = [step.private_growth_bytes for step in (opened, records, sizes)]
    known = [value for value in private if value is not None]
    frames = int(table.length.sum()) * len(table.cameras)
    archive_bytes = archive.stat().st_size
    return OpenBenchmark(
        files=num_files,
        frames=frames,
        share_files=len(share.paths),
        share_episodes=len(share.positions),
        share_frames=share_frames,
        archive_bytes=archive_bytes,
        index_bytes=index_bytes,
        archive_bytes_per_frame=archive_bytes / frames,
        index_bytes_per_frame=index_bytes / frames,
        private_bytes_per_frame=sum(known) / share_frames if len(known) == len(private) else None,
        convert=convert,
        open=opened,
        records=records,
        sizes=sizes,
        peak_rss_bytes=peak,
        load_average=load,
        dataset=DatasetFacts.of(*chosen),
        settings=options,
        machine=this_machine(),
    )


class _Watch:
    """Time, processor time and memory of steps, one after the other."""

    def __init__(self) -> None:
        self._start = self._mark()

    @staticmethod
    def _mark() -> tuple[float, float, Footprint]:
        return time.perf_counter(), time.process_time(), footprint_of()

    def step(self, *, at_peak: bool = False) -> OpenStep:
        """What happened since the last step."""
        seconds, cpu_s = time.perf_counter(), time.process_time()
        memory = footprint_of()
        before = self._start
        rss = memory.peak_rss_bytes if at_peak else memory.rss_bytes
        step = OpenStep(
            seconds - before[0],
            cpu_s - before[1],
            _difference(rss, before[2].rss_bytes),
            _difference(memory.private_bytes, before[2].private_bytes),
        )
        self._start = self._mark()
        return step


def _convert(archive: Path, home: Path) -> tuple[OpenStep, int]:
    watch = _Watch()
    index = open_index(archive, home=home)
    step = watch.step(at_peak=True)
    size = index.path.stat().st_size
    index.close()
    return step, size


def _open(archive: Path, home: Path, share: _Share) -> tuple[tuple[OpenStep, ...], int | None, int]:
    watch = _Watch()
    index = open_index(archive, home=home)
    opened = watch.step()
    for path in share.paths:
        index.track(path)
    records = watch.step()
    files = VideoFiles(share.store, index, _MAX_OPEN_FILES)
    EpisodeSpans(share.episodes, files).sizes(share.positions)
    sizes = watch.step()
    return (opened, records, sizes), footprint_of().peak_rss_bytes, len(index.paths)


def _in_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Result of `work` in a process that has done nothing else, so that its memory says something."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, work, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        has_failed, answer = receiver.recv()
    except EOFError as error:
        process.join()
        raise LrstreamError(
            f"The process that was to measure has ended with status {process.exitcode} and said nothing."
        ) from error
    finally:
        receiver.close()
    process.join()
    if has_failed:
        raise answer
    return answer


def _answer(sender: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send((False, work(*arguments)))
    except Exception as error:  # noqa: BLE001  (raised again by whoever asked)
        sender.send((True, error))


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
