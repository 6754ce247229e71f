"""Check a sidecar, a dataset, or one against the other."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.episode_spec import parse_episode_spec
from lrstream.commands.opened import OpenedDataset, open_dataset
from lrstream.commands.progress import Progress, no_progress
from lrstream.errors import DatasetFormatError, NotFoundError, SidecarError, UsageError
from lrstream.layout.layout import resolve_selection
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.build import request_identity
from lrstream.sidecar.identity import cache_path
from lrstream.sidecar.problems import Problem, problem_of
from lrstream.sidecar.validate import validate_archive, validate_dataset, validate_sidecar
from lrstream.sidecar.validate_checksums import ChecksumCheck, validate_checksums
from lrstream.storage.home import lerobot_home
from lrstream.storage.location import RepoType

__all__ = ["ValidateResult", "is_sidecar_file", "validate_target"]


@dataclass(frozen=True, slots=True)
class ValidateResult:
    """What was checked and what was found.

    Attributes:
        sidecar: The archive; None if the dataset has none in the local cache, and was checked without.
        source: The dataset; None if only a file was checked.
        files: MP4 files that were checked; None if the archive does not say.
        episodes: Episodes that were checked; None without a dataset.
        rows: Whether the rows of the tables were checked too.
        num_errors: Problems that make reading fail, or read something wrong.
        num_warnings: Other problems.
        elapsed_s: Duration.
        problems: All of them.
        checksums: Payload checksums beside the sidecar; None if there are none.
        spans_with_checksum: Spans of which they have one; None if they cannot be read.
        spans_compared: Spans whose payload was read and compared with them.
    """

    sidecar: Path | None
    source: str | None
    files: int | None
    episodes: int | None
    rows: bool
    num_errors: int
    num_warnings: int
    elapsed_s: float
    problems: tuple[Problem, ...]
    checksums: Path | None = None
    spans_with_checksum: int | None = None
    spans_compared: int = 0

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without the problems, which have a place of their own in the document."""
        fields = asdict(self)
        del fields["problems"]
        return fields


def is_sidecar_file(target: str) -> bool:
    """Whether a target is meant as a sidecar file rather than as a dataset."""
    return target.endswith(".npz") or Path(target).expanduser().is_file()


def validate_target(
    target: str,
    *,
    source: str | None = None,
    repo_id: str | None = None,
    repo_type: RepoType = "dataset",
    revision: str | None = None,
    episodes: str | None = None,
    deep: bool = False,
    rows: bool | None = None,
    progress: Progress = no_progress,
) -> ValidateResult:
    """Check whatever `target` is.

    Args:
        target: A sidecar file, or a dataset. Of a dataset, the sidecar in the local cache is checked too;
            where there is none, the videos are indexed for the check, and nothing is kept.
        source: With a sidecar file, the dataset that it should belong to.
        repo_id: Name of the dataset in the identity. None: derived from a dataset, not compared in a file.
        repo_type: What ``OWNER/NAME`` means.
        revision: Branch, tag or commit. None: not compared in a file.
        episodes: Episodes to check, as `parse_episode_spec` takes them; None for all.
        deep: Index every video again, and compare with the sidecar; compare payload with its checksums.
        rows: Check the rows of every episode's table. None: only if `target` is a dataset.
        progress: Told about finished files.

    Raises:
        UsageError: Arguments that need a dataset, without one.
        NotFoundError: The file or the dataset does not exist.
        LrstreamError: The metadata of the dataset cannot be used at all.
    """
    started_s = time.monotonic()
    spec = None if episodes is None else parse_episode_spec(episodes)
    is_file = is_sidecar_file(target)
    if is_file and source is None and (spec is not None or deep or rows):
        raise UsageError(
            "Episodes, rows and videos cannot be checked without the dataset.",
            hint="Name it with --source DATASET.",
        )
    if not is_file and source is not None:
        raise UsageError(
            f"--source is for sidecar files, but {target!r} is none.",
            hint="To check a dataset, give it alone; its sidecar is found.",
        )

    def tell(done: int, total: int) -> None:
        progress(done, total, "video files")

    def tell_read(done: int, total: int) -> None:
        progress(done >> 20, total >> 20, "MiB compared with checksums")

    positions: NDArray[np.int64] | None = None

    def result(
        sidecar: Path | None, problems: list[Problem], dataset: OpenedDataset | None, num_episodes: int | None
    ) -> ValidateResult:
        check = ChecksumCheck(None, None, 0, ())
        if sidecar is not None and not any(problem.code == "archive-invalid" for problem in problems):
            check = validate_checksums(
                sidecar,
                None if dataset is None else dataset.store,
                None if dataset is None else dataset.layout,
                positions=positions,
                deep=deep,
                progress=tell_read,
            )
            problems = [*problems, *check.problems]
        num_errors = sum(problem.severity == "error" for problem in problems)
        return ValidateResult(
            sidecar=sidecar,
            source=str(dataset.store.location) if dataset is not None else None,
            files=len(dataset.layout.video_files()) if dataset is not None else _num_sources(sidecar),
            episodes=num_episodes,
            rows=check_rows,
            num_errors=num_errors,
            num_warnings=len(problems) - num_errors,
            elapsed_s=time.monotonic() - started_s,
            problems=tuple(problems),
            checksums=check.path,
            spans_with_checksum=check.num_spans,
            spans_compared=check.num_compared,
        )

    check_rows = rows if rows is not None else not is_file
    if is_file and source is None:
        path = Path(target).expanduser()
        return result(path, validate_archive(path, progress=tell), None, None)
    contradictions: list[DatasetFormatError] = []
    dataset = open_dataset(
        source or target, repo_type=repo_type, revision=revision, contradictions=contradictions
    )
    available = dataset.layout.episodes.episode_index.tolist()
    positions = resolve_selection(dataset.layout, None if spec is None else spec.select(available))
    sidecar = Path(target).expanduser() if is_file else _cached(dataset, repo_id, revision)
    if sidecar is None:
        check = partial(validate_dataset, dataset.store, dataset.layout)
    else:
        check = partial(
            validate_sidecar,
            sidecar,
            dataset.store,
            dataset.layout,
            repo_id=repo_id if is_file else None,
            revision=revision if is_file else None,
            deep=deep,
        )
    problems = [problem_of(error, code=error.fields["problem"]) for error in contradictions]
    problems += check(rows=check_rows, positions=positions, progress=tell)
    return result(sidecar, problems, dataset, len(positions))


def _cached(dataset: OpenedDataset, repo_id: str | None, revision: str | None) -> Path | None:
    """The archive that training would find for the dataset as it is now."""
    if not dataset.layout.video_files():
        return None
    try:
        identity = request_identity(dataset.store, dataset.layout, repo_id=repo_id, revision=revision)
    except NotFoundError:
        # Videos are missing: the check of the dataset names each of them.
        return None
    path = cache_path(identity, lerobot_home())
    return path if path.exists() else None


def _num_sources(sidecar: Path | None) -> int | None:
    if sidecar is None:
        return None
    try:
        with ArchiveReader(sidecar) as archive:
            return len(archive.paths)
    except SidecarError:
        # It is among the problems already.
        return None
