"""Checking a sidecar and its dataset: all problems in one run, none raised.

Three checks, each of which includes less than the next needs to be useful alone:

    validate_archive   the file by itself: structure, every array
    validate_sidecar   the file against the dataset as it is now: identity, sources, episodes
    validate_dataset   the dataset without any sidecar, from the videos themselves

Codes and their meaning are in `lrstream.sidecar.problems`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import DatasetFormatError, LrstreamError, NotFoundError
from lrstream.layout.layout import DatasetLayout
from lrstream.layout.rows import EpisodeRowReader
from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.build import DEFAULT_WORKERS
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from lrstream.sidecar.index_source import index_source
from lrstream.sidecar.problems import PROBLEM_CODES, Problem, Severity, problem_of, problems_of_failures
from lrstream.sidecar.validate_spans import check_file
from lrstream.storage.store import DatasetStore, FileInfo
from lrstream.timebase import presentation_times_s

__all__ = [
    "DEFAULT_TOLERANCE_S",
    "PROBLEM_CODES",
    "Problem",
    "Severity",
    "problem_of",
    "problems_of_failures",
    "validate_archive",
    "validate_dataset",
    "validate_sidecar",
]

DEFAULT_TOLERANCE_S = 1e-4

Item = TypeVar("Item")

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

_REBUILD_HINT = "Rebuild the sidecar with `lrstream build`."


def validate_archive(path: Path, *, progress: Progress | None = None) -> list[Problem]:
    """Check a sidecar file by itself.

    Args:
        path: The archive.
        progress: Called after each source file.

    Raises:
        NotFoundError, AccessError: There is no such file, or it may not be read.
    """
    return _check_archive(path, progress)[0]


def validate_sidecar(
    path: Path,
    store: DatasetStore,
    layout: DatasetLayout,
    *,
    repo_id: str | None = None,
    revision: str | None = None,
    deep: bool = False,
    rows: bool = False,
    positions: NDArray[np.int64] | None = None,
    tolerance_s: float = DEFAULT_TOLERANCE_S,
    workers: int = DEFAULT_WORKERS,
    progress: Progress | None = None,
) -> list[Problem]:
    """Check a sidecar against its dataset as it is now.

    Args:
        path: The archive.
        store: Where the dataset is.
        layout: Its metadata.
        repo_id: Repository id it should have; not compared when None.
        revision: Revision it should have; not compared when None.
        deep: Index every video again and compare.
        rows: Read every episode's table rows too (K01).
        positions: Positions of the episodes to check; all when None.
        tolerance_s: Largest distance between a row's time and its picture's.
        workers: Videos or episodes read at the same time.
        progress: Called after each source file.

    Returns:
        The archive's own problems, then those of identity and sources, then those of the episodes.

    Raises:
        NotFoundError, AccessError: The archive does not exist or may not be read.
        TransferError: The storage cannot be asked.
    """
    problems, good = _check_archive(path, progress)
    try:
        reader = ArchiveReader(path)
    except LrstreamError:
        # Already among the problems; without a manifest nothing can be compared.
        return problems
    with reader:
        identity = reader.identity
        current, missing = _file_infos(store, layout.video_files())
        problems += missing
        problems += _identity_problems(path, identity, store, repo_id, revision)
        problems += _source_problems(path, identity, current, set(layout.video_files()))
        usable = [name for name in good if name in current]
        if deep:
            problems += _deep_problems(reader, store, usable, workers)
        chosen = _chosen(layout, positions)
        for name in usable:
            problems += check_file(reader.track(name), layout, chosen, tolerance_s=tolerance_s)
    if rows:
        problems += _row_problems(store, layout, chosen, tolerance_s, workers)
    return problems


def validate_dataset(
    store: DatasetStore,
    layout: DatasetLayout,
    *,
    rows: bool = False,
    positions: NDArray[np.int64] | None = None,
    tolerance_s: float = DEFAULT_TOLERANCE_S,
    workers: int = DEFAULT_WORKERS,
    progress: Progress | None = None,
) -> list[Problem]:
    """Check a dataset without a sidecar: every video is indexed now, in memory, and forgotten.

    A video that cannot be indexed is one problem, with the code of its error; the episodes of the
    others are checked all the same. Args as `validate_sidecar`.
    """
    chosen = _chosen(layout, positions)
    paths = _paths_of(layout, chosen)
    current, problems = _file_infos(store, paths)

    def check(path: str) -> list[Problem]:
        try:
            track = index_source(store, SourceFile(path, current[path].size))
        except LrstreamError as error:
            return [problem_of(error, source=path)]
        return check_file(track, layout, chosen, tolerance_s=tolerance_s)

    for done, found in enumerate(_in_order(check, list(current), workers), 1):
        problems += found
        if progress is not None:
            progress(done, len(current))
    if rows:
        problems += _row_problems(store, layout, chosen, tolerance_s, workers)
    return problems


def _check_archive(path: Path, progress: Progress | None) -> tuple[list[Problem], list[str]]:
    """Problems of the file by itself, and the sources whose arrays are good."""
    problems: list[Problem] = []
    good: list[str] = []
    try:
        reader = ArchiveReader(path)
    except LrstreamError as error:
        if error.exit_code == NotFoundError.exit_code:
            raise
        return [problem_of(error, code="archive-invalid", source=str(path))], []
    with reader:
        for done, name in enumerate(reader.paths, 1):
            try:
                track = reader.track(name)
            except LrstreamError as error:
                problems.append(problem_of(error, code="arrays-invalid", source=name))
            else:
                good.append(name)
                problems += _time_problems(track)
            if progress is not None:
                progress(done, len(reader.paths))
    return problems, good


def _time_problems(track: TrackIndex) -> Iterator[Problem]:
    """Times must follow from the ticks up to one constant, the edit offset (MP-2)."""
    samples = track.samples
    bare = presentation_times_s(
        samples.durations_ticks.astype(np.int64),
        samples.composition_offsets_ticks.astype(np.int64),
        track.timescale,
        0.0,
    )
    offset = samples.pts_s - bare
    # Far less than one frame, far more than rounding at any time of day.
    wrong = np.abs(offset - offset[0]) > 1e-6
    if wrong.any():
        at = int(np.argmax(wrong))
        yield Problem(
            "times-inconsistent",
            "warning",
            track.file_path,
            None,
            f"{track.file_path}: sample {at} is presented at {samples.pts_s[at]:.6f} s, but its durations "
            f"and composition offset put it at {bare[at] + offset[0]:.6f} s "
            f"({int(wrong.sum())} samples differ).",
            _REBUILD_HINT,
        )


def _file_infos(store: DatasetStore, paths: Iterable[str]) -> tuple[dict[str, FileInfo], list[Problem]]:
    """What the storage says about each path, and a problem for each that is missing."""
    wanted = list(paths)
    try:
        return store.file_info(wanted), []
    except NotFoundError as error:
        missing = set(error.fields.get("paths") or ())
        if not missing:
            raise
    problems = [
        Problem(
            "source-missing",
            "error",
            path,
            None,
            f"{path} does not exist in {store.location}, but episodes refer to it.",
            "Download the dataset completely, or convert it again.",
        )
        for path in sorted(missing)
    ]
    return store.file_info([path for path in wanted if path not in missing]), problems


def _identity_problems(
    path: Path, identity: SidecarIdentity, store: DatasetStore, repo_id: str | None, revision: str | None
) -> Iterator[Problem]:
    # The file sets are compared one by one elsewhere; here only what they are said to be of.
    request = SidecarIdentity(
        repo_id if repo_id is not None else identity.repo_id,
        revision if revision is not None else identity.revision,
        store.location.root,
        identity.source_files,
        identity.source_fingerprints,
    )
    for reason in identity.mismatches(request):
        yield Problem("identity-mismatch", "error", str(path), None, f"{path}: {reason}.", _REBUILD_HINT)


def _source_problems(
    path: Path, identity: SidecarIdentity, current: dict[str, FileInfo], wanted: set[str]
) -> Iterator[Problem]:
    def problem(code: str, source: str, text: str) -> Problem:
        return Problem(code, "error", source, None, f"{source} {text}.", _REBUILD_HINT)

    indexed = {source.path: source.size for source in identity.source_files}
    for name in sorted(wanted - indexed.keys()):
        yield problem("source-not-indexed", name, f"is used by episodes, but is not in {path.name}")
    for name in sorted(indexed.keys() - wanted):
        yield problem("source-unknown", name, f"is in {path.name}, but no episode uses it")
    for name in sorted(indexed.keys() & current.keys()):
        info, fingerprint = current[name], identity.source_fingerprints.get(name)
        if info.size is not None and info.size != indexed[name]:
            yield problem("source-size", name, f"has {info.size} bytes, but had {indexed[name]} when indexed")
        elif fingerprint != info.fingerprint:
            yield problem(
                "source-changed",
                name,
                f"was replaced or touched since it was indexed (fingerprint {info.fingerprint}, "
                f"recorded {fingerprint})",
            )


def _deep_problems(
    reader: ArchiveReader, store: DatasetStore, paths: list[str], workers: int
) -> Iterator[Problem]:
    """Index each video again and compare the records."""

    def compare(path: str) -> list[Problem]:
        try:
            fresh = index_source(store, SourceFile(path))
        except LrstreamError as error:
            return [problem_of(error, source=path)]
        differences = _differences(reader.track(path), fresh)
        if not differences:
            return []
        text = f"{path} differs from its record in the sidecar in {', '.join(differences)}."
        return [Problem("source-differs", "error", path, None, text, _REBUILD_HINT)]

    for found in _in_order(compare, paths, workers):
        yield from found


def _differences(recorded: TrackIndex, fresh: TrackIndex) -> list[str]:
    """Names of the fields in which two records differ."""
    names = [
        name
        for name in TrackIndex.__slots__
        if name != "samples" and getattr(recorded, name) != getattr(fresh, name)
    ]
    for name in SampleTable.__slots__:
        if not np.array_equal(getattr(recorded.samples, name), getattr(fresh.samples, name)):
            names.append(f"samples.{name}")
    return names


def _row_problems(
    store: DatasetStore,
    layout: DatasetLayout,
    positions: NDArray[np.int64],
    tolerance_s: float,
    workers: int,
) -> Iterator[Problem]:
    """Read the rows of each episode: they must be its own, and on the frame grid (K01)."""
    reader = EpisodeRowReader(store, layout, columns=[])
    check = partial(_check_rows, reader, layout, tolerance_s)
    try:
        for found in _in_order(check, positions.tolist(), workers):
            yield from found
    finally:
        reader.close()


def _check_rows(
    reader: EpisodeRowReader, layout: DatasetLayout, tolerance_s: float, position: int
) -> list[Problem]:
    episode = int(layout.episodes.episode_index[position])
    source = layout.episodes.data_path(position)
    try:
        rows = reader.read(position)
    except (DatasetFormatError, NotFoundError) as error:
        return [problem_of(error, code="rows-invalid", source=source, episode_index=episode)]
    grid = np.arange(len(rows), dtype=np.float64) / float(layout.info.fps)
    distance = np.abs(rows.timestamp_s.astype(np.float64) - grid)
    # float32 seconds: the stored value may be half a step away from the grid.
    wrong = distance > tolerance_s + np.spacing(grid.astype(np.float32)) / 2
    if not wrong.any():
        return []
    at = int(np.argmax(wrong))
    text = (
        f"{source}: episode {episode}: row {at} has timestamp {rows.timestamp_s[at]:.6f} s, expected "
        f"{grid[at]:.6f} s ({int(wrong.sum())} of {len(rows)} rows differ by more than {tolerance_s:g} s)."
    )
    hint = "Pictures are looked up by this timestamp; convert the dataset again, or raise the tolerance."
    return [Problem("row-times", "error", source, episode, text, hint)]


def _chosen(layout: DatasetLayout, positions: NDArray[np.int64] | None) -> NDArray[np.int64]:
    return np.arange(len(layout.episodes), dtype=np.int64) if positions is None else np.sort(positions)


def _paths_of(layout: DatasetLayout, positions: NDArray[np.int64]) -> list[str]:
    """Videos that hold at least one of the chosen episodes, sorted."""
    found: set[str] = set()
    for camera in layout.episodes.cameras.values():
        found.update(camera.files[number] for number in np.unique(camera.file[positions]).tolist())
    return sorted(found)


def _in_order(
    work: Callable[[Item], list[Problem]], items: list[Item], workers: int
) -> Iterator[list[Problem]]:
    """Results of `work` in the order of `items`, at most `workers` of them ahead of the reader."""
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="lrstream-check") as pool:
        waiting: deque[Future[list[Problem]]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= max(1, workers):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
