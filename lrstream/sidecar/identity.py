"""Which dataset snapshot a sidecar describes, and the names that follow from it (formats, section 2).

The identity is compared, not trusted: a file's *name* only says where to look, and a sidecar is
used when its recorded identity `matches` what was asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lrstream.errors import SidecarError, UsageError

__all__ = [
    "SCHEMA_VERSION",
    "SidecarIdentity",
    "SourceFile",
    "cache_path",
    "identity_from_json",
    "is_text",
    "pinned_commit",
    "repo_slug",
    "revision_slug",
]

SCHEMA_VERSION = 3

_PINNED_ROOT = re.compile(r"hf://datasets/[^/@]+/[^/@]+@([0-9a-f]{40})(?:/.*)?")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """One MP4 file of the dataset.

    Attributes:
        path: Path relative to the data root, with forward slashes.
        size: Size in bytes, or None while it is not known (a pinned Hub snapshot before its build).
    """

    path: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class SidecarIdentity:
    """What a sidecar was built from (SC-6).

    Attributes:
        repo_id: Repository id, or the name given to a dataset that lives elsewhere.
        revision: What was asked for or resolved (``v3.0``, ``main``, a commit).
        data_root: Where the files are, in the notation of formats.md section 2; no trailing slash.
        source_files: One entry per MP4 file, sorted by path, paths unique.
        source_fingerprints: Content identity per path; empty, or one for every source.
    """

    repo_id: str
    revision: str
    data_root: str
    source_files: tuple[SourceFile, ...]
    source_fingerprints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths = self.paths
        for earlier, later in itertools.pairwise(paths):
            if earlier >= later:
                raise SidecarError(
                    f"The source files of a sidecar must be sorted by path and unique, "
                    f"but {later!r} follows {earlier!r}."
                )
        if self.source_fingerprints and self.source_fingerprints.keys() != set(paths):
            odd = sorted(self.source_fingerprints.keys() ^ set(paths))
            raise SidecarError(
                f"A sidecar records a fingerprint for every source file or for none, "
                f"but {len(odd)} of {len(paths)} do not pair up, for example {odd[0]!r}."
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the source files, sorted."""
        return tuple(source.path for source in self.source_files)

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the identity JSON."""
        document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "repo_id": self.repo_id,
            "revision": self.revision,
            "data_root": self.data_root,
        }
        if self.source_fingerprints:
            document["source_fingerprints"] = dict(self.source_fingerprints)
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]

    @property
    def file_name(self) -> str:
        """Name of the sidecar file, in the local cache and where it is published."""
        return f"mp4-v{SCHEMA_VERSION}-{revision_slug(self.revision)}-{self.digest}.npz"

    @property
    def is_pinned(self) -> bool:
        """Whether the data root names a commit, so that its content cannot change."""
        return pinned_commit(self.data_root) is not None

    def with_sizes(self, sizes: Mapping[str, int]) -> SidecarIdentity:
        """The same identity with the size of every source file filled in.

        Raises:
            KeyError: A source file has no size in `sizes`.
        """
        files = tuple(SourceFile(source.path, sizes[source.path]) for source in self.source_files)
        return replace(self, source_files=files)

    def narrowed(self, paths: Collection[str]) -> SidecarIdentity:
        """The identity of an archive that covers only some of the source files."""
        wanted = set(paths)
        return replace(
            self,
            source_files=tuple(source for source in self.source_files if source.path in wanted),
            source_fingerprints={
                path: value for path, value in self.source_fingerprints.items() if path in wanted
            },
        )

    def matches(self, request: SidecarIdentity) -> bool:
        """Whether a sidecar with this identity answers `request`."""
        return not self.mismatches(request)

    def mismatches(self, request: SidecarIdentity) -> list[str]:
        """Why a sidecar with this identity does not answer `request`, one sentence each.

        Args:
            request: The identity asked for; its sizes may be unknown (None).

        Returns:
            An empty list when it does match.
        """
        reasons = []
        for name in ("repo_id", "data_root"):
            found, wanted = getattr(self, name), getattr(request, name)
            if found != wanted:
                reasons.append(f"{name} is {found!r}, expected {wanted!r}")
        if self.revision != request.revision and not (
            self.is_pinned and pinned_commit(self.data_root) == pinned_commit(request.data_root)
        ):
            reasons.append(f"revision is {self.revision!r}, expected {request.revision!r}")
        mine = {source.path: source.size for source in self.source_files}
        theirs = {source.path: source.size for source in request.source_files}
        reasons += _name_some("not indexed", sorted(theirs.keys() - mine.keys()))
        reasons += _name_some("indexed but not part of the dataset", sorted(mine.keys() - theirs.keys()))
        reasons += _name_some(
            "of another size",
            [
                f"{path} ({mine[path]} bytes indexed, {size} bytes now)"
                for path, size in theirs.items()
                if size is not None and path in mine and mine[path] != size
            ],
        )
        if self.source_fingerprints != request.source_fingerprints:
            reasons += _fingerprint_mismatches(self.source_fingerprints, request.source_fingerprints)
        return reasons

    def to_json(self) -> dict[str, Any]:
        """The ``sidecar`` object of `manifest_json` (sizes must be known)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "repo_id": self.repo_id,
            "revision": self.revision,
            "data_root": self.data_root,
            "source_files": [{"path": source.path, "size": source.size} for source in self.source_files],
            "source_fingerprints": dict(sorted(self.source_fingerprints.items())),
        }


def identity_from_json(document: object) -> SidecarIdentity:
    """Read the ``sidecar`` object of a manifest, checking every type.

    Args:
        document: The object as JSON gives it; source files may be `SourceFile` already.

    Raises:
        SidecarError: A key is missing, of another type, or the parts contradict each other.
    """
    if not isinstance(document, dict):
        raise SidecarError("The sidecar manifest holds no identity object under 'sidecar'.")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise SidecarError(
            f"The sidecar identity has schema version {document.get('schema_version')!r}, "
            f"expected {SCHEMA_VERSION}."
        )
    texts = {name: document.get(name) for name in ("repo_id", "revision", "data_root")}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise SidecarError(f"The sidecar identity has {name} = {value!r}, expected a string.")
    entries = document.get("source_files")
    fingerprints = document.get("source_fingerprints", {})
    if not isinstance(entries, list):
        raise SidecarError("The sidecar identity has no list of source_files.")
    if not isinstance(fingerprints, dict) or not all(isinstance(v, str) for v in fingerprints.values()):
        raise SidecarError("The sidecar identity has source_fingerprints that are not strings by path.")
    files = []
    for entry in entries:
        if isinstance(entry, SourceFile):  # made while the text was parsed
            files.append(entry)
            continue
        path = entry.get("path") if isinstance(entry, dict) else None
        size = entry.get("size") if isinstance(entry, dict) else None
        if not isinstance(path, str) or type(size) is not int or size < 0:
            raise SidecarError(f"The sidecar identity lists a source file as {str(entry)[:200]}.")
        files.append(SourceFile(path, size))
    strings = [*texts.values(), *(file.path for file in files), *fingerprints, *fingerprints.values()]
    if any(not is_text(str(value)) for value in strings):
        raise SidecarError("The sidecar identity has strings that are no Unicode text.")
    return SidecarIdentity(
        repo_id=str(texts["repo_id"]),
        revision=str(texts["revision"]),
        data_root=str(texts["data_root"]),
        source_files=tuple(files),
        source_fingerprints=fingerprints,
    )


def pinned_commit(data_root: str) -> str | None:
    """The commit that a Hub data root is pinned to, or None for roots whose content may change."""
    match = _PINNED_ROOT.fullmatch(data_root)
    return match.group(1) if match else None


def is_text(value: str) -> bool:
    """Whether a string from JSON can be stored as UTF-8; JSON can spell halves of surrogate pairs alone."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def repo_slug(repo_id: str) -> str:
    """Directory name for a repository id.

    Raises:
        UsageError: The id would name a directory outside the cache (``.`` or ``..``).
    """
    slug = _UNSAFE.sub("--", repo_id).strip("-") or "dataset"
    if slug in (".", ".."):
        raise UsageError(
            f"{repo_id!r} cannot be used as a repository id.", hint="Use a name like OWNER/NAME."
        )
    return slug


def revision_slug(revision: str) -> str:
    """Part of a sidecar's file name that tells a person the revision."""
    return _UNSAFE.sub("-", revision).strip("-")[:32] or "revision"


def cache_path(identity: SidecarIdentity, home: Path) -> Path:
    """Where the sidecar of `identity` lives in the local cache.

    Args:
        identity: What was asked for.
        home: LeRobot's home directory (`lrstream.storage.home.lerobot_home`).
    """
    return home / "streaming-sidecars" / repo_slug(identity.repo_id) / identity.file_name


def _name_some(what: str, names: list[str]) -> list[str]:
    """One sentence for many files: how many, and the first three by name."""
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{len(names)} source files {what}: {', '.join(names[:3])}{more}"]


def _fingerprint_mismatches(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    if not found:
        return ["it records no fingerprints, but the storage has them"]
    if not wanted:
        return ["it records fingerprints, but the request has none"]
    changed = sorted(path for path in found.keys() & wanted.keys() if found[path] != wanted[path])
    return _name_some("changed since they were indexed", changed)
