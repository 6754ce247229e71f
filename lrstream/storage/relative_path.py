"""Paths inside a dataset: relative, with forward slashes, never leaving the root."""

from __future__ import annotations

from collections.abc import Iterable

from lrstream.errors import DatasetFormatError

__all__ = ["check_relative_path", "common_directory"]


def check_relative_path(path: str) -> str:
    """Return ``path`` if it names something inside a dataset root.

    Paths come from templates and tables of datasets that others wrote, so one that would leave the
    root is refused before any store sees it.

    Raises:
        DatasetFormatError: If the path is empty, absolute, or has empty, ``.`` or ``..`` parts.
    """
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts) or "\\" in path or "\0" in path:
        raise DatasetFormatError(
            f"{path!r} is no path inside a dataset: expected a relative path with forward slashes "
            "and without empty, '.' or '..' parts.",
            file_path=path,
        )
    return path


def common_directory(paths: Iterable[str]) -> str:
    """Longest directory that contains all paths, ``""`` for the root."""
    parts = [path.split("/")[:-1] for path in paths]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return "/".join(shared)
