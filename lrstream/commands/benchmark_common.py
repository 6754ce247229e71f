"""What all benchmarks record beside their figures: which dataset, which machine, how loaded it was."""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.episode_spec import parse_episode_spec
from lrstream.commands.opened import open_dataset
from lrstream.errors import UsageError
from lrstream.layout.layout import DatasetLayout, resolve_selection
from lrstream.storage.location import RepoType

__all__ = [
    "ChosenEpisodes",
    "DatasetFacts",
    "Limit",
    "LimitingStage",
    "Machine",
    "Percentiles",
    "choose_episodes",
    "load_average",
    "num_usable_cpus",
    "refuse_unless",
    "this_machine",
]

_LIBRARIES = ("lrstream", "torch", "av", "numpy", "pyarrow")


class ChosenEpisodes(NamedTuple):
    """The episodes that a benchmark is about: positions in the table of a dataset, int64, ascending."""

    layout: DatasetLayout
    positions: NDArray[np.int64]


def choose_episodes(
    source: str,
    episodes: str | None,
    *,
    repo_type: RepoType,
    revision: str | None,
    check: Callable[[str], None] | None = None,
) -> ChosenEpisodes:
    """Open a dataset and choose episodes of it.

    Args:
        source: The dataset.
        episodes: As `parse_episode_spec` takes them; None = all.
        repo_type: What ``OWNER/NAME`` means.
        revision: Branch, tag or commit.
        check: Gets the digest of what was chosen, and may refuse it.

    Raises:
        UsageError: The episodes cannot be understood, or there is none.
        NotFoundError: The dataset or an episode does not exist.
        LrstreamError: As `open_dataset`.
    """
    spec = None if episodes is None else parse_episode_spec(episodes)
    layout = open_dataset(source, repo_type=repo_type, revision=revision).layout
    wanted = None if spec is None else spec.select(layout.episodes.episode_index.tolist())
    positions = resolve_selection(layout, wanted)
    if not len(positions):
        raise UsageError(
            f"{source} has no episode to measure.",
            hint="Choose episodes that exist ('lrstream inspect dataset' lists them), or another dataset.",
        )
    chosen = ChosenEpisodes(layout, positions)
    if check is not None:
        check(DatasetFacts.of(*chosen).digest)
    return chosen


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """Which dataset was measured.

    Attributes:
        location: Its root; None for a demonstration, which is gone.
        revision: Revision it was read at; None where there is none.
        num_episodes: Episodes that were chosen.
        num_frames: Their frames.
        num_files: MP4 files that hold them.
        digest: Says whether two datasets agree in features, chosen episodes and their lengths.
    """

    location: str | None
    revision: str | None
    num_episodes: int
    num_frames: int
    num_files: int
    digest: str

    @classmethod
    def of(
        cls, layout: DatasetLayout, positions: NDArray[np.int64] | None = None, *, is_demo: bool = False
    ) -> DatasetFacts:
        """Facts of a dataset, or of the episodes at some positions of its table."""
        table = layout.episodes
        chosen = np.arange(len(table)) if positions is None else positions
        features = sorted(
            (key, feature.kind, feature.dtype, *feature.shape)
            for key, feature in layout.info.features.items()
        )
        content = hashlib.sha256(repr((features, layout.info.fps)).encode())
        for column in (table.episode_index, table.length):
            content.update(np.ascontiguousarray(column[chosen], dtype="<i8").tobytes())
        return cls(
            location=None if is_demo else layout.store.location.root,
            revision=layout.store.location.revision,
            num_episodes=len(chosen),
            num_frames=int(table.length[chosen].sum()),
            num_files=len(
                {
                    camera.files[number]
                    for camera in table.cameras.values()
                    for number in np.unique(camera.file[chosen]).tolist()
                }
            ),
            digest=content.hexdigest()[:16],
        )


LimitingStage = Literal["network", "decode", "assembly", "consumer", "stalls", "nothing"]


@dataclass(frozen=True, slots=True)
class Limit:
    """The stage that limits, and what to change.

    Attributes:
        stage: Its name.
        reason: What tells so.
        advice: What to change, likeliest first.
    """

    stage: LimitingStage
    reason: str
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures depend on besides the dataset and the settings.

    Attributes:
        system: Operating system and processor architecture.
        processor: Its name, as far as the system tells it.
        num_cpus: Processors that this process may use.
        python: Version of Python.
        libraries: Versions of the libraries that do the work.
    """

    system: str
    processor: str
    num_cpus: int
    python: str
    libraries: dict[str, str]


def this_machine() -> Machine:
    """The machine of this process."""
    libraries = {}
    for name in _LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            continue  # run from a source tree that was not installed
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor_name(),
        num_cpus=num_usable_cpus(),
        python=platform.python_version(),
        libraries=libraries,
    )


def num_usable_cpus() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def load_average() -> float | None:
    """Processes that wanted a processor in the last minute, on average; None where nobody knows."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Summary of durations, seconds; all zero without any.

    Attributes:
        count: How many.
        mean: Their mean.
        p50: Half of them took at most this long (interpolated, as NumPy does).
        p95: 95 % of them.
        p99: 99 % of them.
        largest: The longest.
    """

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> Percentiles:
        """Summary of durations."""
        if len(seconds) == 0:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p95, p99 = (float(value) for value in np.percentile(seconds, [50, 95, 99]))
        return cls(len(seconds), float(seconds.mean()), p50, p95, p99, float(seconds.max()))


def refuse_unless(
    option: str, value: float | None, accept: Callable[[float], bool], expected: str, hint: str | None = None
) -> None:
    """Refuse the value of an option, unless it is None or `accept` says yes.

    Raises:
        UsageError: The value is refused, or no finite number.
    """
    if value is not None and (not math.isfinite(value) or not accept(value)):
        raise UsageError(f"{option} is {value:g}, expected {expected}.", hint=hint)


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # another system
    return platform.processor() or platform.machine()
