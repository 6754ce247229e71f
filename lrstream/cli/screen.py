"""Text for people: messages, aligned facts and tables that survive pipes, dumb terminals and odd names.

User text is never parsed as markup, control characters are shown instead of sent, and characters that
the stream cannot encode come out as escapes (K33). Rich lays out the tables and is imported for them
alone.
"""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from lrstream.cli.problems import ProblemLike
from lrstream.cli.redaction import redact

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Column", "Screen", "count", "is_plain_terminal", "make_encodable", "megabytes", "printable"]

# Wide enough for any line when nobody's terminal limits it: what is piped is never cut.
_UNLIMITED_COLUMNS = 100_000
# Text may be folded down to this; between two columns there is so much space.
_LEAST_TEXT_CHARS = 8
_GAP_CHARS = 3


def printable(text: str) -> str:
    """`text` with control and undecodable characters as escapes; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") else ascii(char)[1:-1]
        for char in text
    )


def count(number: int) -> str:
    """A count with its thousands set apart."""
    return f"{number:,}"


def megabytes(num_bytes: int) -> str:
    """A number of bytes, in MiB with one decimal; in KiB where that would be next to nothing."""
    if num_bytes < 2**20:
        return f"{num_bytes / 1024:,.1f} KiB"
    return f"{num_bytes / 2**20:,.1f} MiB"


def is_plain_terminal() -> bool:
    """Whether colours are unwanted (``NO_COLOR``) or unknown to the terminal (``TERM=dumb``)."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "") == "dumb"


def make_encodable(stream: TextIO) -> None:
    """Let `stream` write any text: what its encoding lacks becomes an escape instead of an exception."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        title: Heading.
        is_number: Align to the right and never wrap; text folds where the terminal is too narrow.
    """

    title: str
    is_number: bool = False


class Screen:
    """Writes to one stream; not thread-safe.

    Args:
        stream: Where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def columns(self) -> int | None:
        """Width of the terminal; None where nothing is ever cut or folded."""
        return shutil.get_terminal_size().columns if self._stream.isatty() else None

    def line(self, text: str = "") -> None:
        """One line, never wrapped."""
        self._stream.write(redact(printable(text)) + "\n")

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values, aligned in two columns."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.line(f"{name:<{width}}  {value}")

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """A table; frame lines fall back to ASCII where the stream's encoding has no others.

        On a terminal too narrow for its numbers, each row becomes some lines instead: ``title: cell``.
        """
        if self._is_too_narrow(columns, rows):
            self._stacked(columns, rows)
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in columns:
            table.add_column(
                Text(column.title),
                justify="right" if column.is_number else "left",
                no_wrap=column.is_number,
                overflow="fold",
            )
        for row in rows:
            table.add_row(*(Text(redact(printable(cell))) for cell in row))
        self._console().print(table)

    def _is_too_narrow(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> bool:
        if self.columns is None:
            return False
        needed = 0
        for number, column in enumerate(columns):
            widest = max(len(text) for text in (column.title, *(row[number] for row in rows)))
            needed += (widest if column.is_number else min(widest, _LEAST_TEXT_CHARS)) + _GAP_CHARS
        return needed - _GAP_CHARS > self.columns

    def _stacked(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        for row in rows:
            for column, cell in zip(columns, row, strict=True):
                if cell:
                    self.line(f"{column.title}: {cell}")

    def problem(self, problem: ProblemLike) -> None:
        """One problem in a few lines: severity and place, message, remedy."""
        where = [problem.source] if problem.source and problem.source not in problem.message else []
        if problem.episode_index is not None and f"pisode {problem.episode_index}" not in problem.message:
            where.append(f"episode {problem.episode_index}")
        place = f"{', '.join(where)}: " if where else ""
        self.line(f"{problem.severity} [{problem.code}]: {place}{problem.message}")
        if problem.hint:
            self.line(f"  hint: {problem.hint}")

    def _console(self) -> Console:
        from rich.console import Console

        is_terminal = self._stream.isatty()
        return Console(
            file=self._stream,
            width=None if is_terminal else _UNLIMITED_COLUMNS,
            color_system="auto" if is_terminal and not is_plain_terminal() else None,
            force_terminal=is_terminal,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=False,
        )
