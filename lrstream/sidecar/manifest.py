"""`manifest_json`: the scalars of every track and the identity, as JSON (formats, section 1).

Everything read here may come from the network. Types, ranges and agreement between the parts are
checked before any value is used to size, seek or allocate something.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lrstream.errors import SidecarError
from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.sidecar.identity import SCHEMA_VERSION, SidecarIdentity, SourceFile, identity_from_json, is_text

__all__ = ["Manifest", "TrackScalars", "manifest_chunks", "parse_entry", "parse_manifest", "source_entry"]

REBUILD_HINT = "Rebuild it with `lrstream build`."

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_MAX63 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TrackScalars:
    """Everything of a `TrackIndex` but its arrays; field meanings as there."""

    file_path: str
    file_size: int
    ftyp: bytes
    moov_offset: int
    mdat_offset: int
    mdat_payload_offset: int
    mdat_payload_size: int
    faststart: bool
    codec: str
    timescale: int
    duration_ticks: int
    track_id: int
    width: int
    height: int
    stsd_body: bytes

    def with_samples(self, samples: SampleTable) -> TrackIndex:
        """The complete record."""
        return TrackIndex(**{name: getattr(self, name) for name in self.__slots__}, samples=samples)


class Manifest(NamedTuple):
    """A checked manifest: the identity, and the scalars of each source in the identity's order."""

    identity: SidecarIdentity
    tracks: tuple[TrackScalars, ...]


class _Range(NamedTuple):
    """Inclusive limits of an integer in ``mp4``, under its JSON name and its name in the record."""

    key: str
    attribute: str
    low: int
    high: int


_INTEGERS = (
    _Range("file_size", "file_size", 0, _MAX63),
    _Range("moov_offset", "moov_offset", 0, _MAX63),
    _Range("mdat_offset", "mdat_offset", 0, _MAX63),
    _Range("mdat_payload_offset", "mdat_payload_offset", 0, _MAX63),
    _Range("mdat_payload_size", "mdat_payload_size", 0, _MAX63),
    _Range("timescale", "timescale", 1, 2**32 - 1),
    _Range("duration", "duration_ticks", 0, _MAX63),
    _Range("track_id", "track_id", 0, 2**32 - 1),
    _Range("width", "width", 0, 2**16 - 1),
    _Range("height", "height", 0, 2**16 - 1),
)
_SOURCE_KEYS = {"path", "size"}
_SHARED = ("file_path", "codec", "ftyp", "stsd_body")
_INSIDE_FILE = ("moov_offset", "mdat_offset", "mdat_payload_offset")


def source_entry(track: TrackIndex) -> bytes:
    """One element of ``files``, UTF-8 JSON."""
    mp4: dict[str, Any] = {"file_path": track.file_path, "ftyp": track.ftyp.hex()}
    mp4 |= {limit.key: int(getattr(track, limit.attribute)) for limit in _INTEGERS}
    mp4 |= {"faststart": track.faststart, "codec": track.codec, "stsd_body": track.stsd_body.hex()}
    return _dump({"file_path": track.file_path, "file_size": track.file_size, "mp4": mp4})


def manifest_chunks(identity: SidecarIdentity, entries: Iterator[bytes]) -> Iterator[bytes]:
    """The manifest's bytes around already encoded ``files`` (joined here with commas).

    Args:
        identity: Identity with every size known.
        entries: The elements from `source_entry`, in the identity's order.
    """
    yield b'{"version":%d,"sidecar":' % SCHEMA_VERSION
    yield _dump(identity.to_json())
    yield b',"files":['
    for number, entry in enumerate(entries):
        yield (b"," + entry) if number else entry
    yield b"]}"


def parse_manifest(text: str) -> Manifest:
    """Read and check a manifest.

    Elements become compact records while the text is parsed, since all of them as JSON objects would take
    several times the memory.

    Raises:
        SidecarError: It is not JSON, has another schema version, or contradicts itself.
    """
    try:
        document = json.loads(text, object_hook=_Compact())
    except (ValueError, RecursionError) as error:
        raise SidecarError(
            f"The manifest of the sidecar is not valid JSON: {error}.", hint=REBUILD_HINT
        ) from error
    if not isinstance(document, dict):
        raise SidecarError("The manifest of the sidecar is not a JSON object.", hint=REBUILD_HINT)
    _check_version(document.get("version"))
    identity = identity_from_json(document.get("sidecar"))
    files = document.get("files")
    if not isinstance(files, list) or len(files) != len(identity.source_files):
        found = len(files) if isinstance(files, list) else "no"
        raise SidecarError(
            f"The sidecar lists {len(identity.source_files)} source files, but describes {found} files.",
            hint=REBUILD_HINT,
        )
    tracks = []
    for source, entry in zip(identity.source_files, files, strict=True):
        track = entry if isinstance(entry, TrackScalars) else parse_entry(source.path, entry)
        if track.file_path != source.path:
            raise _refused(source.path, f"stands at the place of another file ({track.file_path[:200]!r})")
        if track.file_size != source.size:
            raise SidecarError(
                f"The sidecar gives two sizes for {source.path}: {source.size} and {track.file_size} bytes.",
                hint=REBUILD_HINT,
                file_path=source.path,
            )
        tracks.append(track)
    return Manifest(identity, tuple(tracks))


class _Compact:
    """Turns elements of ``files`` and ``source_files`` into records as soon as they are read.

    What is no valid element stays as it is, to be refused where it stands: here it is not known yet
    whether the manifest is of this version at all. Equal texts and bytes become one object.
    """

    def __init__(self) -> None:
        self._shared: dict[str | bytes, str | bytes] = {}

    def __call__(self, document: dict[str, Any]) -> Any:
        if len(document) == 2 and document.keys() == _SOURCE_KEYS:
            path, size = document["path"], document["size"]
            if isinstance(path, str) and type(size) is int and size >= 0:
                return SourceFile(self._share(path), size)
        elif "mp4" in document and isinstance(document.get("file_path"), str):
            with contextlib.suppress(SidecarError):
                track = parse_entry(document["file_path"], document)
                shared = {name: self._share(getattr(track, name)) for name in _SHARED}
                return replace(track, **shared)
        return document

    def _share(self, value: Any) -> Any:
        return self._shared.setdefault(value, value)


def _refused(path: str, what: str) -> SidecarError:
    return SidecarError(f"The sidecar's entry for {path} {what}.", hint=REBUILD_HINT, file_path=path)


def _check_version(version: object) -> None:
    if version == SCHEMA_VERSION and type(version) is int:
        return
    if type(version) is int and 0 < version < SCHEMA_VERSION:
        lacks = "composition offsets" if version == 2 else "composition offsets and the dataset's identity"
        raise SidecarError(
            f"The sidecar has schema version {version}, which lacks {lacks}; it must be rebuilt "
            f"as version {SCHEMA_VERSION}.",
            hint=REBUILD_HINT,
            schema_version=version,
        )
    if type(version) is int and version > SCHEMA_VERSION:
        raise SidecarError(
            f"The sidecar has schema version {version}; this release reads version {SCHEMA_VERSION}.",
            hint="Update lrstream, or rebuild the sidecar with this release.",
            schema_version=version,
        )
    raise SidecarError(f"The sidecar has no usable schema version (found {version!r}).", hint=REBUILD_HINT)


def parse_entry(path: str, entry: object) -> TrackScalars:
    """Check one element of ``files``, which has to be that of `path`.

    Raises:
        SidecarError: Naming the value that cannot be.
    """

    def refuse(what: str) -> SidecarError:
        return _refused(path, what)

    if not isinstance(entry, dict) or not isinstance(entry.get("mp4"), dict):
        raise refuse("has no object 'mp4'")
    if entry.get("file_path") != path:
        raise refuse(f"stands at the place of another file ({str(entry.get('file_path'))[:200]!r})")
    mp4 = entry["mp4"]
    values: dict[str, Any] = {"file_path": path}
    for limit in _INTEGERS:
        value = mp4.get(limit.key)
        if type(value) is not int or not limit.low <= value <= limit.high:
            raise refuse(
                f"has {limit.key} = {str(value)[:50]}, expected an integer from {limit.low} to {limit.high}"
            )
        values[limit.attribute] = value
    if entry.get("file_size") != values["file_size"]:
        raise refuse(f"gives two sizes, {str(entry.get('file_size'))[:50]} and {values['file_size']} bytes")
    for name in _INSIDE_FILE:
        if values[name] > values["file_size"]:
            raise refuse(f"has {name} = {values[name]}, beyond its {values['file_size']} bytes")
    if not isinstance(mp4.get("faststart"), bool):
        raise refuse("has no boolean 'faststart'")
    values["faststart"] = mp4["faststart"]
    codec = mp4.get("codec")
    if not isinstance(codec, str) or not 1 <= len(codec) <= 4 or not is_text(codec):
        raise refuse(f"has codec = {str(codec)[:50]!r}, expected four characters")
    values["codec"] = codec
    for name in ("ftyp", "stsd_body"):
        try:
            values[name] = bytes.fromhex(mp4[name])
        except (KeyError, TypeError, ValueError):
            raise refuse(f"has no hexadecimal text '{name}'") from None
    if len(values["stsd_body"]) < 8:
        raise refuse("has a 'stsd_body' without an entry")
    return TrackScalars(**values)


def _dump(document: object) -> bytes:
    return _ENCODER.encode(document).encode("utf-8")
