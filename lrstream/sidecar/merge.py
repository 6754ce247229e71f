"""Merging the shards of a sidecar into the archive that one build would have written.

Everything is checked before anything is written: that all shards are parts of one sidecar, that none is
missing and no source is in two. The arrays are read, checked and compressed again by this process, so that
the archive is the same to the byte, whatever machines and libraries wrote the shards.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from lrstream.errors import NotFoundError, SidecarError
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from lrstream.sidecar.install import reclaim_leftovers
from lrstream.sidecar.shards import Shard, ShardNote, sidecar_name
from lrstream.sidecar.writer import ArchiveWriter, EncodedSource, encode_source

__all__ = ["ShardSet", "ShardsMissingError", "merge_shards"]

_THREADS = 4
_LISTED = 8


class ShardsMissingError(NotFoundError):
    """Some shards of a sidecar have not been given, or not been built.

    ``fields["missing"]`` has their numbers, ``fields["command"]`` what builds them.
    """

    code = "shards-missing"


@dataclass(frozen=True, slots=True)
class _Member:
    """One shard: its archive and its note."""

    reader: ArchiveReader
    note: ShardNote

    @property
    def number(self) -> int:
        return self.note.shard.number


class ShardSet:
    """All shards of one sidecar, open. Use as a context manager.

    Args:
        paths: The archives, in any order.

    Attributes:
        identity: Identity of the complete sidecar, with every size.

    Raises:
        SidecarError: A file is no shard, or they do not belong together, or they overlap.
        ShardsMissingError: Not all are there.
        NotFoundError, AccessError: A file cannot be read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        with contextlib.ExitStack() as stack:
            members = [_open(path, stack) for path in dict.fromkeys(paths)]
            members.sort(key=lambda member: member.number)
            self._members = members
            _require_one_sidecar(members)
            _require_each_once(members)
            _require_all(members)
            self._places = _places(members)
            self.identity = _joint_identity(members)
            self._resources = stack.pop_all()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The archives, in the order of their numbers."""
        return tuple(member.reader.path for member in self._members)

    def encoded(self) -> Generator[EncodedSource]:
        """All sources as they go into the archive, in order; reads and checks every array.

        A few are compressed ahead, in threads.

        Raises:
            SidecarError: An array is damaged.
        """
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="lrstream-merge") as pool:
            ahead: deque[Future[EncodedSource]] = deque()
            try:
                for number, path in enumerate(self.identity.paths):
                    ahead.append(pool.submit(self._encode, number, path))
                    if len(ahead) > 2 * _THREADS:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    def _encode(self, number: int, path: str) -> EncodedSource:
        return encode_source(number, self._places[path].track(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()


def merge_shards(
    shards: ShardSet,
    destination: Path | None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write the complete archive, atomically. Takes no lock; callers do.

    Args:
        shards: What to merge.
        destination: Path of the archive; None reads and checks everything and writes nothing.
        progress: Called with (source files done, source files in all).

    Returns:
        Number of coded pictures in all sources.

    Raises:
        SidecarError: An array is damaged; nothing is left behind.
        DiskFullError: No space is left; nothing is left behind.
    """
    total = len(shards.identity.source_files)
    num_samples = 0
    with contextlib.ExitStack() as stack:
        writer = None
        if destination is not None:
            reclaim_leftovers(destination)
            writer = stack.enter_context(ArchiveWriter(destination, shards.identity))
        sources = stack.enter_context(contextlib.closing(shards.encoded()))
        for done, source in enumerate(sources, 1):
            num_samples += source.num_samples
            if writer is not None:
                writer.add(source)
            if progress is not None:
                progress(done, total)
        if writer is not None:
            writer.install()
    return num_samples


def _open(path: Path, stack: contextlib.ExitStack) -> _Member:
    reader = stack.enter_context(ArchiveReader(path))
    note = ShardNote.decode(reader.comment)
    if note is None:
        raise SidecarError(
            f"{path} is a sidecar, but no shard of one.",
            hint="Shards are what `lrstream build --shard I/N` writes.",
            path=str(path),
        )
    return _Member(reader, note)


def _require_one_sidecar(members: Sequence[_Member]) -> None:
    first = members[0]
    for other in members[1:]:
        names = f"{first.reader.path} and {other.reader.path}"
        if (first.note.sidecar, first.note.num_sources) != (other.note.sidecar, other.note.num_sources):
            raise SidecarError(
                f"{names} are shards of different sidecars: {_difference(first, other)}.",
                hint="Merge the shards of one state of the dataset; build those of another state again.",
                path=str(other.reader.path),
            )
        if first.note.shard.count != other.note.shard.count:
            raise SidecarError(
                f"{names} are parts of different divisions: {first.note.shard} and {other.note.shard}.",
                hint="Merge shards that were built with the same N of --shard I/N.",
                path=str(other.reader.path),
            )


def _difference(first: _Member, other: _Member) -> str:
    one, two = first.reader.identity, other.reader.identity
    for name in ("repo_id", "data_root", "revision"):
        if getattr(one, name) != getattr(two, name):
            return f"{name} is {getattr(one, name)!r} in one and {getattr(two, name)!r} in the other"
    if first.note.num_sources != other.note.num_sources:
        return f"the dataset had {first.note.num_sources} videos, then {other.note.num_sources}"
    return (
        "videos were changed between the two builds, or the storage gives no fingerprint that lasts "
        f"({first.note.sidecar}, {other.note.sidecar})"
    )


def _require_each_once(members: Sequence[_Member]) -> None:
    for earlier, later in itertools.pairwise(members):
        if earlier.number == later.number:
            raise SidecarError(
                f"{earlier.reader.path} and {later.reader.path} are both shard {later.note.shard}.",
                hint="Give each shard once.",
                path=str(later.reader.path),
            )


def _require_all(members: Sequence[_Member]) -> None:
    note = members[0].note
    there = {member.number for member in members}
    missing = [number for number in range(1, note.shard.count + 1) if number not in there]
    if not missing:
        return
    covered = sum(len(member.reader.paths) for member in members)
    names = ", ".join(str(Shard(number, note.shard.count)) for number in missing[:_LISTED])
    more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
    command = _build_command(note, missing)
    raise ShardsMissingError(
        f"{len(missing)} of {note.shard.count} shards are missing: {names}{more}. They hold "
        f"{note.num_sources - covered} of {note.num_sources} video files.",
        hint=f"Build {'it' if len(missing) == 1 else 'them'}, then merge again: {command}",
        missing=tuple(missing),
        command=command,
    )


def _build_command(note: ShardNote, missing: Sequence[int]) -> str:
    """The command line that builds the missing shards."""
    build = shlex.join(["lrstream", "build", *note.arguments, "--shard"])
    if len(missing) == 1:
        return f"{build} {Shard(missing[0], note.shard.count)}"
    numbers = " ".join(map(str, missing))
    return f'for i in {numbers}; do {build} "$i/{note.shard.count}"; done'


def _places(members: Sequence[_Member]) -> dict[str, ArchiveReader]:
    """Which archive has each source."""
    places: dict[str, ArchiveReader] = {}
    for member in members:
        for path in member.reader.paths:
            if path in places:
                raise SidecarError(
                    f"{path} is in two shards: {places[path].path} and {member.reader.path}.",
                    hint="Build these shards again.",
                    file_path=path,
                )
            places[path] = member.reader
    return places


def _joint_identity(members: Sequence[_Member]) -> SidecarIdentity:
    """The identity of the complete sidecar; its revision is that of the first shard."""
    files: list[SourceFile] = []
    fingerprints: dict[str, str] = {}
    for member in members:
        files.extend(member.reader.identity.source_files)
        fingerprints.update(member.reader.identity.source_fingerprints)
    identity = replace(
        members[0].reader.identity, source_files=tuple(sorted(files)), source_fingerprints=fingerprints
    )
    note = members[0].note
    if len(files) != note.num_sources or sidecar_name(identity) != note.sidecar:
        raise SidecarError(
            f"Together the {len(members)} shards have {len(files)} video files of {sidecar_name(identity)}, "
            f"but each says that it is a part of {note.num_sources} video files of {note.sidecar}.",
            hint="Build the shards again.",
        )
    return identity
