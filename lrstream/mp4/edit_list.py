"""Edit lists (ISO/IEC 14496-12, 8.6.5 and 8.6.6): a delay and an encoder lead-in, nothing else.

What a recorder or encoder writes is one edit that skips the lead-in, sometimes after an empty
edit that delays the track. Anything else makes the media timeline a different thing from the
presented one, and decoders disagree about it (FFmpeg ignores a rate of 0, for instance), so it is
refused here instead of being left to them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lrstream.mp4.boxes import Box

__all__ = ["EditList", "read_edit_list"]

_ENTRY_V0 = np.dtype([("duration", ">u4"), ("time", ">i4"), ("rate", ">u4")])
_ENTRY_V1 = np.dtype([("duration", ">u8"), ("time", ">i8"), ("rate", ">u4")])
_MAX_ENTRIES = 1024
_UNIT_RATE = 1 << 16  # 16.16 fixed point
_EMPTY_EDIT = -1
_MAX_TICKS = 1 << 53  # the largest count that float64 seconds still tell apart


class EditList(NamedTuple):
    """The two numbers that an accepted edit list comes down to.

    Attributes:
        empty_movie_ticks: Sum of the leading empty edits, in movie ticks.
        media_time_ticks: Composition time that is presented first after them, in media ticks.
    """

    empty_movie_ticks: int
    media_time_ticks: int


def read_edit_list(trak: Box) -> EditList:
    """Read `edts/elst` of a track; a track without one, or with an empty one, is not edited.

    The duration of the media edit is not used: it can only hide samples after the last presented
    one, which no time of a dataset points to.

    Raises:
        UnsupportedMp4Error: Several media edits, none at all, an empty edit that is not a leading
            one, a rate other than 1, or more entries than any writer makes.
        MalformedMp4Error: The table does not fit its box, or its times are impossible.
    """
    edts = trak.find(b"edts")
    elst = edts.find(b"elst") if edts is not None else None
    if elst is None:
        return EditList(0, 0)
    entry = _ENTRY_V1 if elst.version(0, 1) == 1 else _ENTRY_V0
    count = elst.uint(4, 4)
    if count > _MAX_ENTRIES:
        raise elst.unsupported(
            f"the edit list has {count} entries; at most {_MAX_ENTRIES} are supported",
            hint="Encode the video again, or remux it without edits.",
        )
    # Plain numbers: an array costs as much as a hundred of them, and files have one entry, or two.
    entries: list[tuple[int, int, int]] = elst.table(8, count, entry).tolist()
    if not entries:
        return EditList(0, 0)
    media_edits = [number for number, (_, time, _) in enumerate(entries) if time != _EMPTY_EDIT]
    if not media_edits:
        raise elst.unsupported("the edit list has only empty edits, so the track presents nothing")
    media_time = entries[media_edits[0]][1]
    if media_time < 0:
        raise elst.malformed(f"media time {media_time} of an edit is negative and is not -1 (empty edit)")
    if len(media_edits) > 1:
        raise elst.unsupported(
            f"the edit list has {len(media_edits)} media edits; one is supported",
            hint="Encode the video again, or remux it without edits.",
        )
    if media_edits[0] != len(entries) - 1:
        raise elst.unsupported(
            "the edit list has an empty edit after its media edit; only leading ones are supported"
        )
    rate = entries[-1][2]
    if rate != _UNIT_RATE:
        raise elst.unsupported(
            f"the edit list plays at rate {rate / _UNIT_RATE:g}; only 1 is supported",
            hint="Encode the video again, or remux it without edits.",
        )
    empty = sum(duration for duration, _, _ in entries[:-1])
    if max(media_time, empty) > _MAX_TICKS:
        raise elst.malformed(f"times of the edit list are beyond {_MAX_TICKS} ticks")
    return EditList(empty, media_time)
