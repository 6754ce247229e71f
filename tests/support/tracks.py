"""Sample tables made up from parameters, for tests that need no decodable video."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from lrstream.mp4.track import SampleTable, TrackIndex
from lrstream.sidecar.identity import SidecarIdentity, SourceFile

# The payload of an `stsd` box: version and flags, one entry, and an entry of the given type.
STSD_AV1 = bytes(4) + (1).to_bytes(4, "big") + (20).to_bytes(4, "big") + b"av01" + bytes(12)
STSD_H264 = bytes(4) + (1).to_bytes(4, "big") + (20).to_bytes(4, "big") + b"avc1" + bytes(12)


def make_track(
    path: str = "videos/top/chunk-000/file-000.mp4",
    *,
    num_samples: int = 60,
    gop: int = 2,
    timescale: int = 15360,
    duration: int = 512,
    reordered: bool = False,
    contiguous: bool = True,
    offset_s: float = 0.0,
    start: int = 4096,
    seed: int = 0,
) -> TrackIndex:
    """A consistent track; presentation times are computed with a plain loop."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(200, 9000, num_samples)
    gaps = np.zeros(num_samples, np.int64) if contiguous else rng.integers(0, 5000, num_samples)
    offsets, position = [], start
    for size, gap in zip(sizes.tolist(), gaps.tolist(), strict=True):
        position += gap
        offsets.append(position)
        position += size
    pattern = [2 * duration, 4 * duration, duration, duration] if reordered else [0]
    compositions = [pattern[i % len(pattern)] for i in range(num_samples)]
    pts = [(i * duration + compositions[i]) / timescale for i in range(num_samples)]
    if offset_s:
        pts = [time + offset_s for time in pts]
    samples = SampleTable(
        pts_s=np.array(pts, np.float64),
        durations_ticks=np.full(num_samples, duration, np.int64),
        composition_offsets_ticks=np.array(compositions, np.int64),
        sizes_bytes=sizes.astype(np.int64),
        offsets_bytes=np.array(offsets, np.int64),
        sync_samples=np.arange(0, num_samples, gop, dtype=np.int64),
    )
    return TrackIndex(
        file_path=path,
        file_size=position + 100,
        ftyp=bytes.fromhex("000000146674797069736f6d0000020061763031"),
        moov_offset=32,
        mdat_offset=start - 8,
        mdat_payload_offset=start,
        mdat_payload_size=position - start,
        faststart=True,
        codec="avc1" if reordered else "av01",
        timescale=timescale,
        duration_ticks=num_samples * duration,
        track_id=1,
        width=640,
        height=480,
        stsd_body=STSD_H264 if reordered else STSD_AV1,
        samples=samples,
    )


def make_tracks(count: int, **parameters: Any) -> list[TrackIndex]:
    """Tracks of several files, sorted by path, each with its own sizes."""
    return [
        make_track(f"videos/top/chunk-000/file-{number:06d}.mp4", seed=number, **parameters)
        for number in range(count)
    ]


def identity_of(tracks: list[TrackIndex], **changes: Any) -> SidecarIdentity:
    """The identity that a build of these tracks from a local directory has."""
    values: dict[str, Any] = {
        "repo_id": "someone/pick-and-place",
        "revision": "v3.0",
        "data_root": "/data/pick-and-place",
        "source_files": tuple(SourceFile(track.file_path, track.file_size) for track in tracks),
        "source_fingerprints": {track.file_path: f"{number}:1" for number, track in enumerate(tracks)},
    }
    return SidecarIdentity(**{**values, **changes})


def plain_manifest(identity: SidecarIdentity, tracks: list[TrackIndex]) -> dict[str, Any]:
    """The manifest as the format's page describes it, written out by hand."""
    return {
        "version": 3,
        "sidecar": {
            "schema_version": 3,
            "repo_id": identity.repo_id,
            "revision": identity.revision,
            "data_root": identity.data_root,
            "source_files": [{"path": track.file_path, "size": track.file_size} for track in tracks],
            "source_fingerprints": dict(identity.source_fingerprints),
        },
        "files": [
            {
                "file_path": track.file_path,
                "file_size": track.file_size,
                "mp4": {
                    "file_path": track.file_path,
                    "file_size": track.file_size,
                    "ftyp": track.ftyp.hex(),
                    "moov_offset": track.moov_offset,
                    "mdat_offset": track.mdat_offset,
                    "mdat_payload_offset": track.mdat_payload_offset,
                    "mdat_payload_size": track.mdat_payload_size,
                    "faststart": track.faststart,
                    "codec": track.codec,
                    "timescale": track.timescale,
                    "duration": track.duration_ticks,
                    "track_id": track.track_id,
                    "width": track.width,
                    "height": track.height,
                    "stsd_body": track.stsd_body.hex(),
                },
            }
            for track in tracks
        ],
    }


def plain_arrays(tracks: list[TrackIndex]) -> dict[str, Any]:
    """The arrays of the format by member name."""
    arrays: dict[str, Any] = {}
    for number, track in enumerate(tracks):
        samples = track.samples
        arrays[f"{number}/sample_pts"] = np.asarray(samples.pts_s)
        arrays[f"{number}/sample_durations"] = np.asarray(samples.durations_ticks)
        arrays[f"{number}/sample_composition_offsets"] = np.asarray(samples.composition_offsets_ticks)
        arrays[f"{number}/sample_sizes"] = np.asarray(samples.sizes_bytes)
        arrays[f"{number}/sample_offsets"] = np.asarray(samples.offsets_bytes)
        arrays[f"{number}/sync_samples"] = np.asarray(samples.sync_samples)
    return arrays


def save_plain(path: Path, manifest: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write a sidecar with numpy and json alone."""
    np.savez_compressed(path, manifest_json=np.array(json.dumps(manifest).encode()), **arrays)


def replace_member(path: Path, name: str, data: bytes | None) -> None:
    """Rewrite an archive with one member replaced (or left out when `data` is None)."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    members.pop(name, None)
    if data is not None:
        members[name] = data
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    path.write_bytes(buffer.getvalue())


def assert_same_track(found: TrackIndex, expected: TrackIndex) -> None:
    """Every scalar equal, every array equal bit for bit in its canonical type."""
    for name in TrackIndex.__slots__:
        if name != "samples":
            assert getattr(found, name) == getattr(expected, name), name
    for name in SampleTable.__slots__:
        left, right = getattr(found.samples, name), getattr(expected.samples, name)
        assert left.dtype == (np.float64 if name == "pts_s" else np.int64), name
        assert left.shape == right.shape, name
        assert np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes(), name
