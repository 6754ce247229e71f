"""What the index knows about one MP4 file: plain records and arrays, no behaviour beyond checks.

The records are what a sidecar stores for each source file (`files[i].mp4` and the arrays
``i/...`` of schema 3), under names that carry their unit. All arrays are one-dimensional, in
*decode order*, and read-only by convention: they may be views of a file mapped by several
processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SampleTable", "TrackIndex"]


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Sample table of one video track (ISO/IEC 14496-12, 8.6 and 8.7), resolved to plain arrays.

    Attributes:
        pts_s: Presentation time, float64 seconds, shape ``(n,)``, edit list applied (MP-2).
        durations_ticks: Decode duration in media ticks, integer, shape ``(n,)``.
        composition_offsets_ticks: `ctts` offset in media ticks, integer, shape ``(n,)``; zeros when absent.
        sizes_bytes: Size of the coded picture, integer, shape ``(n,)``.
        offsets_bytes: Absolute offset of the coded picture in the file, integer, shape ``(n,)``.
        sync_samples: Zero-based sample numbers of keyframes, strictly increasing, integer, shape ``(k,)``.
    """

    pts_s: NDArray[np.float64]
    durations_ticks: NDArray[np.integer]
    composition_offsets_ticks: NDArray[np.integer]
    sizes_bytes: NDArray[np.integer]
    offsets_bytes: NDArray[np.integer]
    sync_samples: NDArray[np.integer]

    @property
    def num_samples(self) -> int:
        """Number of samples ``n``."""
        return int(self.pts_s.shape[0])


@dataclass(frozen=True, slots=True)
class TrackIndex:
    """First video track of one MP4 file, with what synthesis needs from the rest of the file.

    Attributes:
        file_path: Path relative to the dataset root, with forward slashes.
        file_size: Size of the whole file in bytes.
        ftyp: The whole `ftyp` box (header included); empty when the file has none.
        moov_offset: Absolute offset of the `moov` box.
        mdat_offset: Absolute offset of the first `mdat` box that holds samples.
        mdat_payload_offset: Absolute offset of that box's payload.
        mdat_payload_size: Size of that payload in bytes.
        faststart: Whether `moov` stands before `mdat`.
        codec: Four-character sample entry (``av01``, ``avc1``, ``hvc1``, ...).
        timescale: Media ticks per second (`mdhd`).
        duration_ticks: Media duration in media ticks; the movie's duration where that is 0.
        track_id: `tkhd.track_ID`.
        width: Integer part of `tkhd.width`, pixels.
        height: Integer part of `tkhd.height`, pixels.
        stsd_body: Payload of `stsd` verbatim (version and flags, entry count, entries).
        samples: The sample table.
    """

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
    samples: SampleTable
