"""Checking the payload checksums beside a sidecar: do they belong to it, cover everything, and still hold?"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lrstream.errors import NotFoundError, SidecarError
from lrstream.index.open import open_index
from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.build import DEFAULT_WORKERS
from lrstream.sidecar.checksum_file import ChecksumFile, FileChecksums, checksums_path
from lrstream.sidecar.checksum_pass import PayloadPass
from lrstream.sidecar.checksum_wanted import coverage_of, wanted_intervals
from lrstream.sidecar.problems import Problem, problem_of
from lrstream.storage.store import DatasetStore

__all__ = ["ChecksumCheck", "validate_checksums"]

_MAKE = "Make them again with `lrstream build --checksums`."


@dataclass(frozen=True, slots=True)
class ChecksumCheck:
    """What was found of the companion of a sidecar.

    Attributes:
        path: The companion; None if there is none.
        num_spans: Spans of which it has checksums; None if it cannot be read.
        num_compared: Spans whose payload was read and compared.
        problems: What is wrong.
    """

    path: Path | None
    num_spans: int | None
    num_compared: int
    problems: tuple[Problem, ...]


def validate_checksums(
    archive: Path,
    store: DatasetStore | None = None,
    layout: DatasetLayout | None = None,
    *,
    positions: NDArray[np.int64] | None = None,
    deep: bool = False,
    workers: int = DEFAULT_WORKERS,
    progress: Callable[[int, int], None] | None = None,
) -> ChecksumCheck:
    """Check the companion of a sidecar, if there is one; nothing is removed.

    Args:
        archive: The sidecar.
        store: The dataset; None to look at the files alone.
        layout: Its metadata.
        positions: Positions of the episodes to check; all when None.
        deep: Read the payload of these episodes and compare.
        workers: Reads at the same time.
        progress: Called with (bytes done, bytes in all) while payload is read.
    """
    path = checksums_path(archive)
    problems: list[Problem] = []
    try:
        checksums = ChecksumFile(path, remove_damaged=False)
    except NotFoundError:
        return ChecksumCheck(None, None, 0, ())
    except SidecarError as error:
        return ChecksumCheck(path, None, 0, (problem_of(error, code="checksums-invalid", source=str(path)),))
    num_compared = 0
    with contextlib.closing(checksums):
        try:
            checksums.verify()
            with ArchiveReader(archive) as reader:
                mismatches = checksums.mismatches(reader.identity)
        except SidecarError as error:
            problem = problem_of(error, code="checksums-invalid", source=str(path))
            return ChecksumCheck(path, None, 0, (problem,))
        if mismatches:
            message = f"{path} belongs to another sidecar: {'; '.join(mismatches)}; it is not used."
            problems.append(Problem("checksums-mismatch", "warning", str(path), None, message, _MAKE))
        elif store is not None and layout is not None:
            coverage = coverage_of(checksums, layout, positions)
            if coverage.first_missing is not None:
                episode, camera, file = coverage.first_missing
                message = (
                    f"{path} has no checksum of {coverage.num_missing} of {coverage.num_spans} spans, the "
                    f"first is that of episode {episode}, camera {camera}, file {file}."
                )
                problem = Problem("checksums-incomplete", "warning", str(path), episode, message, _MAKE)
                problems.append(problem)
            if deep:
                comparison = _Comparison(archive, store, layout, checksums, positions)
                problems += comparison.run(workers, progress)
                num_compared = comparison.num_compared
        return ChecksumCheck(path, checksums.num_spans, num_compared, tuple(problems))


class _Comparison:
    """Reads payload and compares it."""

    def __init__(
        self,
        archive: Path,
        store: DatasetStore,
        layout: DatasetLayout,
        checksums: ChecksumFile,
        positions: NDArray[np.int64] | None,
    ) -> None:
        self.num_compared = 0
        self._archive = archive
        self._store = store
        self._layout = layout
        self._checksums = checksums
        self._positions = positions

    def run(self, workers: int, progress: Callable[[int, int], None] | None) -> Iterator[Problem]:
        def tell(done: int, total: int, _: int) -> None:
            if progress is not None:
                progress(done, total)

        # Files without checksums have been reported, and there is nothing to compare.
        work = {
            path: intervals
            for path, intervals in wanted_intervals(self._layout, self._positions).items()
            if self._checksums.file(path) is not None
        }
        with contextlib.closing(open_index(self._archive)) as index:
            reading = PayloadPass(
                self._store, index.identity, index, work, workers, hold_against_listing=False
            )
            reading.run(tell)
        for path, error in sorted(reading.failures, key=lambda failure: failure[0]):
            yield problem_of(error, source=path)
        for path, fresh in sorted(reading.done.items()):
            recorded = self._checksums.file(path)
            assert recorded is not None
            yield from self._compare(recorded, fresh)

    def _compare(self, recorded: FileChecksums, fresh: FileChecksums) -> Iterator[Problem]:
        names = self._names(fresh.path)
        columns = (fresh.from_s, fresh.to_s, fresh.start_byte, fresh.stop_byte, fresh.crc32)
        for from_s, to_s, start, stop, found in zip(*(column.tolist() for column in columns), strict=True):
            expected = recorded.find(start, stop)
            if expected is None:
                continue
            self.num_compared += 1
            if found == expected or self._again(fresh.path, start, stop) == expected:
                continue
            episode, camera = names[from_s, to_s]
            message = (
                f"{fresh.path}: episode {episode}, camera {camera}, bytes [{start}, {stop}): CRC-32 is "
                f"{found:08x}, expected {expected:08x}."
            )
            hint = (
                "The file is damaged: restore it. If it is right, make the checksums anew with "
                "`lrstream build --checksums --force`."
            )
            yield Problem("payload-differs", "error", fresh.path, episode, message, hint)

    def _again(self, path: str, start: int, stop: int) -> int:
        """What was changed on its way for a moment is right when it is read again."""
        with contextlib.closing(self._store.open(path)) as source:
            return zlib.crc32(source.read(start, stop))

    def _names(self, path: str) -> dict[tuple[float, float], tuple[int, str]]:
        """Episode and camera of each interval in a file."""
        episodes = self._layout.episodes
        found = {}
        for key, camera in episodes.cameras.items():
            if path in camera.files:
                here = np.flatnonzero(camera.file == camera.files.index(path))
                columns = (camera.from_s[here], camera.to_s[here], episodes.episode_index[here])
                for from_s, to_s, episode in zip(*(column.tolist() for column in columns), strict=True):
                    found[from_s, to_s] = (episode, key)
        return found
