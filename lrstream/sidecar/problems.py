"""What a check can find, each with a code that programs may rely on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lrstream.errors import LrstreamError

__all__ = ["PROBLEM_CODES", "Problem", "Severity", "problem_of", "problems_of_failures"]

Severity = Literal["error", "warning"]

PROBLEM_CODES: Mapping[str, str] = {
    "archive-invalid": "the sidecar is no readable schema 3 archive",
    "arrays-invalid": "the arrays of one source cannot describe a file of its size",
    "times-inconsistent": "presentation times do not follow from durations and composition offsets",
    "identity-mismatch": "the sidecar belongs to another repository, revision or place",
    "source-not-indexed": "a video of the dataset is not in the sidecar",
    "source-unknown": "the sidecar describes a file that no episode of the dataset uses",
    "source-missing": "a video that episodes refer to does not exist",
    "source-size": "a video has another size than when it was indexed",
    "source-changed": "a video has another fingerprint than when it was indexed",
    "source-differs": "the video, indexed again, gives another sample table than the sidecar holds",
    "span-outside-file": "an episode's time range lies outside its video",
    "picture-missing": "some rows of an episode have no picture within the tolerance",
    "picture-count": "an episode's time range holds another number of pictures than the episode has frames",
    "picture-undecodable": "some of an episode's pictures precede the first keyframe of the file",
    "episodes-overlap": "two episodes claim the same stretch of a video",
    "episode-length": "the length of an episode is not that of its range of rows",
    "rows-overlap": "two episodes claim the same rows of the dataset",
    "totals-differ": "info.json counts other episodes or frames than the episode metadata",
    "rows-invalid": "a table does not hold exactly the rows of an episode",
    "checksums-invalid": "the payload checksums beside the sidecar are damaged or of another format",
    "checksums-mismatch": "the payload checksums beside the sidecar belong to another one, and are not used",
    "checksums-incomplete": "some episodes have no payload checksum",
    "payload-differs": "the bytes of an episode's video are not those of which the checksum was made",
    "row-times": "timestamps of an episode's rows are not multiples of one frame",
}
"""All codes that checks of this package give, besides the codes of `lrstream.errors`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that a check found.

    Attributes:
        code: Stable short name: one of `PROBLEM_CODES`, or the code of an error's class where a
            source could not be read at all.
        severity: ``error`` where training would fail or read something wrong, else ``warning``.
        source: The file concerned: the sidecar, or a path inside the dataset.
        episode_index: The episode concerned.
        message: What is wrong, with what was found and what was expected.
        hint: What to do about it.
    """

    code: str
    severity: Severity
    source: str | None
    episode_index: int | None
    message: str
    hint: str | None = None


def problem_of(
    error: LrstreamError,
    *,
    code: str | None = None,
    source: str | None = None,
    episode_index: int | None = None,
) -> Problem:
    """An error as a problem; facts that are not given are taken from its fields."""
    if source is None:
        source = error.fields.get("file_path") or error.fields.get("path")
    if episode_index is None:
        episode_index = error.fields.get("episode_index")
    return Problem(
        code or error.code, "error", source, episode_index, error.message or str(error), error.hint
    )


def problems_of_failures(error: LrstreamError) -> list[Problem]:
    """The error of a build as one problem for each source that failed."""
    failures = error.fields.get("failures")
    if not failures:
        return [problem_of(error)]
    return [
        Problem(failure.code, "error", failure.path, None, failure.message, failure.hint)
        for failure in failures
    ]
