"""What earlier builds have finished, as a build asks for it (SC-13)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.identity import SourceFile

__all__ = ["FinishedSources", "Record"]

Record = Callable[[], TrackIndex | None]
"""Reads what an earlier build has kept of a source; gives None after all if that cannot be read."""


class FinishedSources(Protocol):
    """Sources that need not be parsed again, because the same content has been before (SC-13)."""

    def records(self, source: SourceFile, fingerprint: str | None) -> Iterable[Record]:
        """How to read the records that earlier builds have of this source, if its content is the same.

        The first one that can be read is taken. Called from several threads.
        """
        ...

    def keep(self, track: TrackIndex, fingerprint: str | None) -> None:
        """Remember a record that has just been made. Called from several threads."""
        ...

    def keep_packed(self, packed: bytes, fingerprint: str | None) -> None:
        """The same of a record that another process has packed (`lrstream.sidecar.journal.pack_record`)."""
        ...
