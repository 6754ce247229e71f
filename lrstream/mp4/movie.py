"""From a `moov` box to the first video track in it (ISO/IEC 14496-12, 8.2 to 8.4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lrstream.mp4.boxes import Box
from lrstream.mp4.edit_list import read_edit_list
from lrstream.mp4.sample_table import read_sample_description, read_sample_table
from lrstream.mp4.track import SampleTable
from lrstream.timebase import edit_offset_s, rescale_ticks

__all__ = ["VideoTrack", "read_movie"]


class VideoTrack(NamedTuple):
    """What `moov` alone says about its first video track; see `lrstream.mp4.track.TrackIndex`.

    The samples stand in bytes ``[first_byte, stop_byte)`` of the file.
    """

    codec: str
    timescale: int
    duration_ticks: int
    track_id: int
    width: int
    height: int
    stsd_body: bytes
    samples: SampleTable
    first_byte: int
    stop_byte: int


class _MediaHeader(NamedTuple):
    timescale: int
    duration: int  # in units of timescale; 0 when unknown


def read_movie(moov: Box, file_size: int) -> VideoTrack:
    """Read the first video track; other tracks and unknown boxes are stepped over.

    Args:
        moov: The movie box, complete.
        file_size: Size of the whole file in bytes.

    Raises:
        UnsupportedMp4Error: Fragmented, compressed, or encrypted movie, no video track, no samples,
            media data in another file, or an edit list that is not understood.
        MalformedMp4Error: Boxes contradict the standard or each other.
    """
    mvhd: Box | None = None
    video: tuple[Box, Box] | None = None
    num_tracks = 0
    for box in moov.children():
        kind = box.kind
        if kind == "mvex":
            raise box.unsupported(
                "fragmented MP4 is not supported",
                hint="Remux it into one movie: ffmpeg -i IN.mp4 -c copy -movflags +faststart OUT.mp4.",
            )
        if kind == "cmov":
            raise box.unsupported("compressed movie boxes are not supported", hint="Remux the file.")
        if kind == "mvhd":
            mvhd = box
        elif kind == "trak":
            num_tracks += 1
            if video is None:
                mdia = box.require(b"mdia")
                if mdia.require(b"hdlr").raw(8, 4) == b"vide":
                    video = box, mdia
    if mvhd is None:
        raise moov.malformed("no mvhd box in it")
    if video is None:
        raise moov.unsupported(f"no video track among {num_tracks} tracks")
    return _read_track(mvhd, *video, file_size)


def _read_track(mvhd: Box, trak: Box, mdia: Box, file_size: int) -> VideoTrack:
    movie, media = _media_header(mvhd), _media_header(mdia.require(b"mdhd"))
    tkhd = trak.require(b"tkhd")
    track_id_at, width_at = (20, 88) if tkhd.version(0, 1) == 1 else (12, 76)
    edits = read_edit_list(trak)
    minf = mdia.require(b"minf")
    _check_data_reference(minf)
    stbl = minf.require(b"stbl")
    description = read_sample_description(stbl)
    samples, first_byte, stop_byte = read_sample_table(
        stbl,
        timescale=media.timescale,
        edit_offset_s=edit_offset_s(
            edits.empty_movie_ticks, movie.timescale, edits.media_time_ticks, media.timescale
        ),
        file_size=file_size,
    )
    return VideoTrack(
        codec=description.codec,
        timescale=media.timescale,
        duration_ticks=(
            media.duration
            or rescale_ticks(movie.duration, movie.timescale, media.timescale)
            or int(np.sum(samples.durations_ticks))
        ),
        track_id=tkhd.uint(track_id_at, 4),
        width=tkhd.uint(width_at, 4) >> 16,
        height=tkhd.uint(width_at + 4, 4) >> 16,
        stsd_body=description.body,
        samples=samples,
        first_byte=first_byte,
        stop_byte=stop_byte,
    )


def _media_header(box: Box) -> _MediaHeader:
    """Timescale and duration of `mvhd` or `mdhd`, which begin alike."""
    wide = box.version(0, 1) == 1
    timescale = box.uint(20 if wide else 12, 4)
    duration = box.uint(24, 8) if wide else box.uint(16, 4)
    if timescale == 0:
        raise box.malformed("timescale is 0")
    if duration == (0xFFFF_FFFF_FFFF_FFFF if wide else 0xFFFF_FFFF):
        duration = 0  # all ones: unknown
    if duration >= 1 << 62:
        raise box.malformed(f"duration {duration} is beyond 2**62 ticks")
    return _MediaHeader(timescale, duration)


def _check_data_reference(minf: Box) -> None:
    """Refuse media data that lives in another file (8.7.2); no reference at all means this file."""
    dinf = minf.find(b"dinf")
    dref = dinf.find(b"dref") if dinf is not None else None
    if dref is None:
        return
    for entry in dref.children(8, padded=True):
        # Some writers leave the flag out; without a location the reference can only mean this file.
        if entry.uint(0, 4) & 1 == 0 and len(entry.payload) > 4:
            raise entry.unsupported("pictures are stored in another file, which is not supported")
