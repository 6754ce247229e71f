"""Files that commands write where the user says: checked before anything is done (K34)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lrstream.errors import NotFoundError, UsageError

__all__ = ["check_output"]


def check_output(path: Path, *, force: bool, inputs: Iterable[Path] = ()) -> Path:
    """Refuse an output that cannot be written or would destroy something.

    Args:
        path: Where the output shall go.
        force: Whether an existing file may be replaced.
        inputs: Files that are being read, which even `force` does not replace.

    Returns:
        The path with ``~`` expanded.

    Raises:
        UsageError: It exists (without `force`), is a directory, or is an input.
        NotFoundError: Its directory does not exist.
    """
    path = path.expanduser()
    if path.is_dir():
        raise UsageError(f"The output {path} is a directory, expected the name of a file.", path=str(path))
    if not path.parent.is_dir():
        raise NotFoundError(
            f"The directory {path.parent} for the output does not exist.",
            hint="Create it first.",
            path=str(path),
        )
    if path.exists():
        if any(path.samefile(source) for source in inputs if source.exists()):
            raise UsageError(f"The output {path} is the input itself.", path=str(path))
        if not force:
            raise UsageError(
                f"The output {path} exists already.",
                hint="Choose another name, or replace it with --force.",
                path=str(path),
            )
    return path
