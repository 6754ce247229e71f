"""A sidecar in parts: each is built by a process that knows nothing of the others, then they are merged.

Shard I of N (counted from 1) is an archive of the format that covers some of the sources. Which ones is a
pure function of the dataset: the sources, the largest first, are dealt in rounds of N, and in each round the
larger ones go to the shards that have fewer bytes so far. So all shards have equally many sources (give or
take one) and about as many bytes. Where sizes are not known, every N-th source goes to the same shard.

What a shard is a part of stands in the comment of its ZIP file, as JSON; readers of the format do not look
there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lrstream.errors import UsageError
from lrstream.sidecar.identity import SidecarIdentity, SourceFile, cache_path, pinned_commit

__all__ = [
    "MAX_SHARDS",
    "Shard",
    "ShardNote",
    "parse_shard",
    "shard_directory",
    "shard_path",
    "shard_sources",
]

MAX_SHARDS = 100_000

_FORMAT = 1
_SHARD = re.compile(r"([0-9]{1,9})/([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """One part of several.

    Attributes:
        number: From 1 to `count`.
        count: Parts in all.
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True, slots=True)
class ShardNote:
    """What a shard is a part of.

    Attributes:
        shard: Which part.
        sidecar: Name of the complete sidecar; a commit's is the same for all its branches and tags.
        num_sources: Sources of the complete sidecar.
        arguments: Arguments of ``lrstream build`` that make another shard of it, without ``--shard``.
    """

    shard: Shard
    sidecar: str
    num_sources: int
    arguments: tuple[str, ...]

    def encode(self) -> bytes:
        """The comment of the archive."""
        document = {
            "lrstream_shard": _FORMAT,
            "number": self.shard.number,
            "count": self.shard.count,
            "sidecar": self.sidecar,
            "num_sources": self.num_sources,
            "arguments": list(self.arguments),
        }
        return json.dumps(document).encode("ascii")

    @classmethod
    def decode(cls, comment: bytes) -> ShardNote | None:
        """The note in the comment of an archive, None if there is none or it cannot be understood."""
        try:
            document: Any = json.loads(comment.decode("ascii"))
        except (ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or document.get("lrstream_shard") != _FORMAT:
            return None
        numbers = [document.get(name) for name in ("number", "count", "num_sources")]
        sidecar, arguments = document.get("sidecar"), document.get("arguments")
        if any(type(number) is not int for number in numbers) or not isinstance(sidecar, str):
            return None
        if not isinstance(arguments, list) or not all(isinstance(word, str) for word in arguments):
            return None
        number, count, num_sources = (int(str(value)) for value in numbers)
        if not 1 <= number <= count <= MAX_SHARDS or num_sources < 0:
            return None
        return cls(Shard(number, count), sidecar, num_sources, tuple(arguments))


def parse_shard(text: str) -> Shard:
    """Understand ``I/N``.

    Raises:
        UsageError: It is no such pair, or out of range.
    """
    match = _SHARD.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} names no shard, expected I/N, such as 1/8 for the first of eight.",
        )
    shard = Shard(int(match[1]), int(match[2]))
    if not 1 <= shard.count <= MAX_SHARDS:
        raise UsageError(f"{text} asks for {shard.count} shards, expected 1 to {MAX_SHARDS}.")
    if not 1 <= shard.number <= shard.count:
        raise UsageError(
            f"There is no shard {text}: shards are counted from 1/{shard.count} to "
            f"{shard.count}/{shard.count}."
        )
    return shard


def shard_sources(files: Sequence[SourceFile], shard: Shard) -> list[str]:
    """Paths of the sources of one shard, sorted.

    Args:
        files: All sources, sorted by path.
        shard: Which part.
    """
    mine = shard.number - 1
    if any(source.size is None for source in files):
        return [source.path for source in files[mine :: shard.count]]
    ordered = sorted(files, key=lambda source: (-(source.size or 0), source.path))
    loads = [0] * shard.count
    paths = []
    for start in range(0, len(ordered), shard.count):
        dealt = ordered[start : start + shard.count]
        receivers = sorted(range(shard.count), key=lambda number: (loads[number], number))
        for number, source in zip(receivers, dealt, strict=False):
            loads[number] += source.size or 0
            if number == mine:
                paths.append(source.path)
    return sorted(paths)


def shard_note(identity: SidecarIdentity, shard: Shard, arguments: Sequence[str]) -> ShardNote:
    """The note of a shard of the sidecar with the complete `identity`."""
    return ShardNote(shard, sidecar_name(identity), len(identity.source_files), tuple(arguments))


def sidecar_name(identity: SidecarIdentity) -> str:
    """Name that all shards of a snapshot agree on, by whatever branch or tag it was asked for."""
    commit = pinned_commit(identity.data_root)
    return identity.file_name if commit is None else replace(identity, revision=commit).file_name


def shard_directory(identity: SidecarIdentity, home: Path) -> Path:
    """Where the shards of a sidecar are built when no other place is named.

    Args:
        identity: The complete identity.
        home: LeRobot's home directory.
    """
    name = sidecar_name(identity).removesuffix(".npz")
    return cache_path(identity, home).parent / f"{name}.shards"


def shard_path(identity: SidecarIdentity, shard: Shard, home: Path) -> Path:
    """The archive of one shard in `shard_directory`."""
    return shard_directory(identity, home) / f"shard-{shard.number:05}-of-{shard.count:05}.npz"
