"""From what a user writes to where a dataset is (DS-1).

    /data/set, ./set, ~/set, file:///data/set      local directory
    OWNER/NAME                                     Hub dataset repository (a bucket with repo_type="bucket")
    hf://datasets/OWNER/NAME[@REVISION][/path]     Hub dataset repository
    hf://buckets/OWNER/BUCKET[/path]               Hub storage bucket
    s3://..., gs://..., memory://..., https://...  anything else that fsspec opens

``OWNER/NAME`` could also be a relative directory. It is one if such a directory exists; whatever
starts with ``/``, ``./``, ``../`` or ``~`` is always local.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

import fsspec

from lrstream.errors import AccessError, NotFoundError, UsageError

__all__ = ["Kind", "Location", "RepoType", "parse_location"]

Kind = Literal["local", "hub", "bucket", "fsspec"]
RepoType = Literal["dataset", "bucket"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPO_ID = re.compile(rf"{_NAME}/{_NAME}")
# Revisions that contain a slash and are still written without quoting after '@'.
_SPECIAL_REF = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:::[A-Za-z0-9+.:-]*)?://")
_HUB_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a dataset is. Picklable, and free of credentials.

    Attributes:
        kind: Which store opens it.
        root: `data_root` of sidecar identities: the local path with ``~`` expanded, or the URL;
            without trailing slash. A Hub dataset has its revision in it as far as it is known, and
            the commit once the location is pinned.
        repo_id: ``OWNER/NAME`` on the Hub, else None.
        path_in_repo: Path of the dataset inside the repository or bucket, ``""`` for its top.
        revision: What was asked for: a branch, tag or commit; None for the default.
    """

    kind: Kind
    root: str
    repo_id: str | None = None
    path_in_repo: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        return self.root


def parse_location(
    source: str | os.PathLike[str], *, repo_type: RepoType = "dataset", revision: str | None = None
) -> Location:
    """Find out where a dataset is, from any form listed in this module's docstring.

    Looks at the local file system (to tell ``OWNER/NAME`` from a directory), never at the network.

    Args:
        source: What the user wrote. A `pathlib.Path` is always local.
        repo_type: What ``OWNER/NAME`` is on the Hub. With ``"bucket"`` it is never a directory.
        revision: Branch, tag or commit; may also stand in an ``hf://datasets`` URL, but not differ.

    Returns:
        The location. A revision given for storage without revisions other than a bucket is kept as
        a label for the dataset's identity.

    Raises:
        UsageError: If the form is not understood, or contradicts ``repo_type`` or ``revision``.
        NotFoundError: If it is local and no such directory exists.
        AccessError: If it is local and may not be looked at.
    """
    if repo_type not in ("dataset", "bucket"):
        raise UsageError(f"repo_type is {repo_type!r}, expected 'dataset' or 'bucket'.")
    if revision is not None and not revision.strip():
        raise UsageError("The revision is empty.", hint="Leave it out to use the default branch.")
    if isinstance(source, os.PathLike):
        return _local(os.fspath(source), revision)
    if not source.strip():
        raise UsageError(
            "The dataset location is empty.", hint="Give a directory, OWNER/NAME, or a URL such as hf://..."
        )
    if (match := _SCHEME.match(source)) is not None:
        return _from_url(source, match.group(1).lower(), revision)
    if source.startswith(("/", "./", "../", "~")) or source in (".", ".."):
        return _local(source, revision)
    if repo_type == "dataset" and os.path.isdir(source):
        return _local(source, revision)
    if _REPO_ID.fullmatch(source):
        return _hub(source, "", revision) if repo_type == "dataset" else _bucket(source, "", revision)
    raise NotFoundError(
        f"{source!r} is neither an existing local directory nor of the form OWNER/NAME.",
        hint="A revision is an option of its own, and a path inside a repository is written "
        "hf://datasets/OWNER/NAME/path.",
    )


def _local(path: str, revision: str | None) -> Location:
    if "\0" in path:
        raise UsageError("The local path has a NUL character in it.")
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise NotFoundError(f"{path!r}: this user has no home directory ({error}).") from error
    hint = "Give the directory that contains meta/info.json."
    try:
        mode = os.stat(expanded).st_mode
    except PermissionError as error:
        raise AccessError(f"The local dataset directory {str(expanded)!r} may not be entered.") from error
    except OSError as error:
        raise NotFoundError(
            f"The local dataset directory {str(expanded)!r} does not exist ({error.strerror}).", hint=hint
        ) from error
    if not stat.S_ISDIR(mode):
        raise NotFoundError(f"The local dataset directory {str(expanded)!r} is not a directory.", hint=hint)
    return Location("local", str(expanded), revision=revision)


def _from_url(url: str, scheme: str, revision: str | None) -> Location:
    if scheme == "hf":
        return _from_hf_url(url, revision)
    if scheme in ("file", "local"):
        return _local(_path_of_file_url(url), revision)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"The {scheme} URL of the dataset is malformed: {error}.") from error
    if not (parts.netloc or parts.path.strip("/")):
        raise UsageError(f"{url!r} names no place within {scheme}.")
    if "@" in parts.netloc and ":" in parts.netloc.rpartition("@")[0]:
        # The root is part of a sidecar's identity and of messages, so a password must not be in it.
        raise UsageError(
            f"The {scheme} URL of the dataset carries a user name and password.",
            hint="Pass them as storage options or through the environment instead.",
        )
    if scheme in ("http", "https"):
        if parts.hostname in _HUB_HOSTS:
            raise UsageError(
                f"{scheme}://{parts.netloc}{parts.path} is a page of the Hub.",
                hint="Write OWNER/NAME, hf://datasets/OWNER/NAME or hf://buckets/OWNER/BUCKET.",
            )
        if parts.query or parts.fragment:
            raise UsageError(
                f"{scheme}://{parts.netloc}{parts.path}: a dataset root is a directory, so its URL has no "
                "query and no fragment.",
            )
    if scheme not in fsspec.available_protocols() and scheme not in fsspec.registry:
        raise UsageError(
            f"{scheme}:// is no protocol that fsspec knows.",
            hint="Supported are local paths, hf://, and the protocols of installed fsspec file systems.",
        )
    return Location("fsspec", url.rstrip("/"), revision=revision)


def _path_of_file_url(url: str) -> str:
    _, _, rest = url.partition("://")
    if rest.startswith("localhost/"):
        rest = rest[len("localhost") :]
    if not rest.startswith(("/", "~")):
        raise UsageError(
            f"{url!r} has no absolute path.", hint="A file URL has three slashes: file:///data/set."
        )
    return unquote(rest)


def _from_hf_url(url: str, revision: str | None) -> Location:
    _, _, rest = url.partition("://")
    kind, _, rest = rest.partition("/")
    if kind not in ("datasets", "buckets"):
        raise UsageError(
            f"{url!r} names no dataset: expected hf://datasets/OWNER/NAME[@REVISION][/path] or "
            "hf://buckets/OWNER/BUCKET[/path]."
        )
    owner, _, rest = rest.partition("/")
    name, at, rest = _split_at_first(rest, "/@")
    if not _REPO_ID.fullmatch(f"{owner}/{name}"):
        raise UsageError(f"{url!r}: {owner + '/' + name!r} is not of the form OWNER/NAME.")
    if kind == "buckets":
        if at == "@":
            raise UsageError(f"{url!r} has a revision, but buckets have none.", hint="Leave out '@...'.")
        return _bucket(f"{owner}/{name}", _inner_path(url, rest), revision)
    in_url: str | None = None
    if at == "@":
        special = _SPECIAL_REF.match(rest)
        if special is not None:
            in_url, rest = special.group(), rest[special.end() :].removeprefix("/")
        else:
            quoted, _, rest = rest.partition("/")
            in_url = unquote(quoted)
        if not in_url:
            raise UsageError(f"{url!r} has '@' but no revision after it.")
    if in_url is not None and revision is not None and in_url != revision:
        raise UsageError(
            f"{url!r} names revision {in_url!r}, but revision {revision!r} was asked for as well.",
            hint="Give only one of them.",
        )
    return _hub(f"{owner}/{name}", _inner_path(url, rest), in_url or revision)


def _split_at_first(text: str, separators: str) -> tuple[str, str, str]:
    for position, character in enumerate(text):
        if character in separators:
            return text[:position], character, text[position + 1 :]
    return text, "", ""


def _inner_path(url: str, path: str) -> str:
    path = path.rstrip("/")
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise UsageError(f"{url!r}: the path {path!r} has empty, '.' or '..' parts.")
    return path


def _hub(repo_id: str, path: str, revision: str | None) -> Location:
    root = f"hf://datasets/{repo_id}"
    if revision is not None:
        special = _SPECIAL_REF.fullmatch(revision)
        root += f"@{revision if special else quote(revision, safe='')}"
    return Location("hub", f"{root}/{path}" if path else root, repo_id, path, revision)


def _bucket(bucket_id: str, path: str, revision: str | None) -> Location:
    if revision is not None:
        raise UsageError(
            f"Revision {revision!r} was asked for, but {bucket_id} is a bucket, and buckets have none.",
            hint="Leave out the revision.",
        )
    root = f"hf://buckets/{bucket_id}"
    return Location("bucket", f"{root}/{path}" if path else root, bucket_id, path)
