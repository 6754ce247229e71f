"""Where a mapped index lives, and which one belongs to an archive as it is now.

    $HF_LEROBOT_HOME/streaming-indexes/lrstream-arrow-<format>/<name of the archive>-<its path, hashed>/
        <content key>.arrow     one generation: the index of one content of the archive
        current.json            which generation belongs to the archive with this inode and time stamps
        .lock                   held while a generation is made

The content key is derived from the archive's members (names, sizes, CRC-32), so a copied or
touched archive needs no new conversion, and a replaced one cannot be mistaken for the old. Reading
it takes longer the more files there are; `current.json` spares that as long as the archive is the
same file with the same time stamps. Older generations stay, because workers that were started
before a replacement may still open them; `list_generations` tells which are unused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrstream.index.format import FORMAT_VERSION
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.install import write_atomically

__all__ = ["Generation", "IndexDirectory", "content_key", "list_generations"]

_FAMILY = f"lrstream-arrow-{FORMAT_VERSION}"


@dataclass(frozen=True, slots=True)
class Generation:
    """One mapped index on disk.

    Attributes:
        path: The Arrow file.
        size_bytes: Its size.
        archive: The archive it was made from.
        current: Whether it belongs to that archive as it is now; others may be removed once no
            process uses them.
    """

    path: Path
    size_bytes: int
    archive: Path
    current: bool


class IndexDirectory:
    """The directory of one archive's generations; nothing is created by looking.

    Args:
        archive: The sidecar archive.
        home: LeRobot's home directory.
    """

    def __init__(self, archive: Path, home: Path) -> None:
        # One archive has one index, however it is reached.
        self.archive = Path(os.path.realpath(archive))
        mark = hashlib.sha256(os.fsencode(self.archive)).hexdigest()[:12]
        self.path = home / "streaming-indexes" / _FAMILY / f"{self.archive.stem[:80]}-{mark}"

    @property
    def lock_path(self) -> Path:
        """The lock held while a generation is made."""
        return self.path / ".lock"

    def generation(self, key: str) -> Path:
        """Path of the generation with a content key; need not exist."""
        return self.path / f"{key}.arrow"

    def current(self) -> Path | None:
        """The generation noted for the archive as it is now, if both exist."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads((self.path / "current.json").read_text("utf-8"))
            if note["archive_state"] == _state(self.archive):
                generation = self.generation(str(note["key"]))
                if generation.is_file():
                    return generation
        return None

    def note_current(self, key: str, state: dict[str, int]) -> None:
        """Remember which generation belongs to the archive in `state` (of `archive_state`)."""
        note = {"archive": str(self.archive), "archive_state": state, "key": key}
        write_atomically(self.path / "current.json", json.dumps(note).encode(), durable=False)

    def archive_state(self) -> dict[str, int]:
        """Which file the archive is now: inode, size and time stamps."""
        return _state(self.archive)


def content_key(reader: ArchiveReader) -> str:
    """Key of an archive's content: 32 hex digits from its directory of members."""
    return reader.content_digest()[:32]


def list_generations(home: Path) -> list[Generation]:
    """All mapped indexes of this format under `home`, for reports and for pruning."""
    found = []
    for note_path in sorted((home / "streaming-indexes" / _FAMILY).glob("*/current.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note: dict[str, Any] = json.loads(note_path.read_text("utf-8"))
            archive = Path(note["archive"])
            current = IndexDirectory(archive, home).current()
            for path in sorted(note_path.parent.glob("*.arrow")):
                found.append(Generation(path, path.stat().st_size, archive, path == current))
    return found


def _state(archive: Path) -> dict[str, int]:
    status = os.stat(archive)
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }
