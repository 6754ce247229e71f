"""Path templates of `meta/info.json` (DS-3): obeyed, but not trusted."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from lrstream.errors import DatasetFormatError
from lrstream.storage.relative_path import check_relative_path

__all__ = ["PathTemplate"]

# Widths of at most two digits: a format like {file_index:9999999999d} would fill the memory.
_FORMAT = re.compile(r"0?\d{0,2}d?")


@dataclass(frozen=True, slots=True)
class PathTemplate:
    """A template such as ``data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet``.

    Attributes:
        text: The template as written in the dataset.
        where: File and field it comes from, for messages.
    """

    text: str
    where: str

    @classmethod
    def parse(cls, text: str, fields: tuple[str, ...], where: str) -> PathTemplate:
        """Check a template.

        Args:
            text: The template.
            fields: Names it may use; it need not use all of them.
            where: What it is, for messages.

        Raises:
            DatasetFormatError: If it is no format string, uses another name, an attribute, an index,
                a conversion or a format that is not a plain integer, or yields no relative path.
        """
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise DatasetFormatError(f"{where}: {text!r} is no valid template: {error}.") from error
        for _, name, spec, conversion in parts:
            if name is None:
                continue
            if name not in fields:
                raise DatasetFormatError(
                    f"{where}: {text!r} uses {name!r}, expected only {', '.join(fields)}.",
                    hint="Templates of v2.x datasets (episode_chunk, episode_index) need a converted dataset."
                    if name in ("episode_chunk", "episode_index")
                    else None,
                )
            if conversion or (spec and (name == "video_key" or not _FORMAT.fullmatch(spec))):
                raise DatasetFormatError(
                    f"{where}: the format of {name!r} in {text!r} is not supported, expected e.g. ':03d'."
                )
        template = cls(text, where)
        template.path(chunk_index=0, file_index=0, video_key="key")
        return template

    def path(self, *, chunk_index: int, file_index: int, video_key: str = "") -> str:
        """The path relative to the dataset root, with forward slashes."""
        path = self.text.format(chunk_index=chunk_index, file_index=file_index, video_key=video_key)
        try:
            return check_relative_path(path)
        except DatasetFormatError as error:
            raise DatasetFormatError(f"{self.where}: {self.text!r} gives {error.message}") from error
