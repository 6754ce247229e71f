"""Find `moov` in a file by byte ranges and read the first video track from it; no I/O here.

`probe_track` is a generator that says which bytes it wants and is sent them, so one piece of logic
serves a local file, an HTTP client and a test that counts requests. What it asks for (MP-4):

* `moov` in front: the first probe, then, when the box is longer, the bytes from there to exactly
  the end of the box. That second range has `ByteRange.continues` set. A driver whose first reply
  is still open asks `front_moov_stop` and reads on, and the whole is one request.
* `moov` at the end: the first probe, the bytes behind `mdat`, and the rest of the box if it is
  longer than a probe.

Media payload is never asked for on purpose; the first probe of a file with `moov` at the end
covers some of it, because nobody knows yet what stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np

from lrstream.errors import Mp4Error, TransferError, UnsupportedMp4Error
from lrstream.mp4.boxes import Box, fourcc_text, malformed, read_header, unsupported
from lrstream.mp4.movie import VideoTrack, read_movie
from lrstream.mp4.track import SampleTable, TrackIndex

__all__ = [
    "FIRST_PROBE_BYTES",
    "MAX_MOOV_BYTES",
    "ByteRange",
    "RangeReply",
    "drive",
    "front_moov_stop",
    "probe_track",
]

FIRST_PROBE_BYTES = 256 * 1024
"""Default size of the first range. It holds the `moov` of some 30 000 pictures (about 8 bytes each), which is
what LeRobot's files of 100 to 200 MB have, and costs a few milliseconds where it holds none."""

MAX_MOOV_BYTES = 256 * 1024 * 1024
"""Largest `moov` that is read: more than 20 million samples, or a week of video."""

_MAX_FTYP_BYTES = 4096
_MAX_TOP_LEVEL_READS = 32
_FIRST_BOXES = frozenset(
    (
        b"ftyp",
        b"styp",
        b"moov",
        b"moof",
        b"mdat",
        b"free",
        b"skip",
        b"wide",
        b"pnot",
        b"uuid",
        b"sidx",
        b"pdin",
    )
)
_BEHIND_MOOV = frozenset(
    (b"mdat", b"free", b"skip", b"wide", b"uuid", b"meta", b"udta", b"moof", b"styp", b"sidx")
)
# Size, type, and a size of 64 bits (ISO/IEC 14496-12, 4.2).
_MOST_HEADER_BYTES = 16
_LFS_PREFIX = b"version https://git-lfs.github.com/spec/"


class ByteRange(NamedTuple):
    """A wanted byte range ``[start, stop)`` of the file.

    Attributes:
        start: First byte wanted.
        stop: End of the range, excluded; may lie behind the end of the file.
        continues: The range starts exactly where the previous reply ended, so a driver that has kept
            that reply open may read on instead of sending a new request.
    """

    start: int
    stop: int
    continues: bool = False


class RangeReply(NamedTuple):
    """Answer to a `ByteRange`.

    Attributes:
        data: The bytes of ``[start, min(stop, file_size))``.
        file_size: Size of the whole file in bytes.
    """

    data: bytes
    file_size: int


Probe = Generator[ByteRange, RangeReply, TrackIndex]


def drive(probe: Probe, read: Callable[[int, int], RangeReply]) -> TrackIndex:
    """Run a probe to its end, answering every range with ``read(start, stop)``."""
    try:
        wanted = next(probe)
        while True:
            wanted = probe.send(read(wanted.start, wanted.stop))
    except StopIteration as done:
        result: TrackIndex = done.value
        return result
    finally:
        probe.close()


def probe_track(file_path: str, *, first_probe_bytes: int = FIRST_PROBE_BYTES) -> Probe:
    """Index the first video track of one file.

    Args:
        file_path: Path recorded in the index and named in errors.
        first_probe_bytes: Size of the first range, see `FIRST_PROBE_BYTES`; 4096 where less is given, so
            that `ftyp` is always in it.

    Yields:
        The ranges wanted, in order.

    Returns:
        The index of the track.

    Raises:
        MalformedMp4Error: The file is empty, a Git LFS pointer, not an MP4, truncated, or
            contradicts itself.
        UnsupportedMp4Error: Fragmented, encrypted, without video, or otherwise refused (MP-2, MP-3).
        TransferError: A reply does not have the bytes that were asked for.
    """
    walk = _Walk(file_path)
    probe_bytes = max(first_probe_bytes, _MAX_FTYP_BYTES)
    yield from walk.fetch(0, probe_bytes)
    _check_first_bytes(file_path, bytes(walk.window(0, 64)), walk.file_size)
    reads = 0
    while not walk.advance():
        reads += 1
        if reads > _MAX_TOP_LEVEL_READS:
            raise unsupported(
                file_path, f"no moov box within {reads} separate reads", box="file", offset=walk.position
            )
        # Most often this is the end of mdat and moov is all that follows, so a probe's worth of it
        # is wanted, not only the header.
        yield from walk.fetch(walk.position, walk.position + probe_bytes)
    if walk.moov_stop > walk.window_stop:
        # With the header of what follows, usually mdat.
        yield from walk.fetch(walk.window_stop, walk.moov_stop + _MOST_HEADER_BYTES)
    moov = walk.moov()
    walk.position = walk.moov_stop
    may_go_on = walk.advance_behind_moov()
    # The box is the only thing needed from here on; the window may go.
    track = read_movie(moov, walk.file_size)
    # What is said of mdat must not depend on how much was read at first, or builds would differ.
    while may_go_on and walk.mdat_of(track.first_byte) is None and reads < _MAX_TOP_LEVEL_READS:
        reads += 1
        yield from walk.fetch(walk.position, walk.position + _MOST_HEADER_BYTES)
        may_go_on = walk.advance_behind_moov()
    return _assemble(walk, track)


def front_moov_stop(file_path: str, head: bytes, file_size: int) -> int:
    """How far to read on from the beginning of a file to have all of `moov`.

    Args:
        file_path: The file, for nothing but messages that are not raised here.
        head: Its first bytes.
        file_size: Its size in bytes.

    Returns:
        Where the header of the box behind `moov` ends, if `moov` begins within these bytes and is longer;
        otherwise their number. Files that the probe will refuse are no matter of this.
    """
    walk = _Walk(file_path)
    walk.take(0, head, file_size)
    try:
        found = walk.advance()
    except Mp4Error:
        return len(head)
    return max(min(walk.moov_stop + _MOST_HEADER_BYTES, file_size), len(head)) if found else len(head)


def _check_first_bytes(file_path: str, head: bytes, file_size: int) -> None:
    if file_size == 0:
        raise malformed(
            file_path,
            "the file is empty",
            box="file",
            offset=0,
            hint="A recording or copy was interrupted; record or copy it again.",
        )
    if head.startswith(_LFS_PREFIX):
        raise malformed(
            file_path,
            "a Git LFS pointer stands in place of the video",
            box="file",
            offset=0,
            hint="Run `git lfs pull` in the dataset's clone.",
        )
    if head[4:8] not in _FIRST_BOXES:
        raise malformed(
            file_path,
            f"not an MP4 file: it starts with {head[:8]!r}, not with a box",
            box="file",
            offset=0,
        )


class _Walk:
    """Position in the chain of top-level boxes, and the one window of bytes held in memory.

    Attributes:
        file_size: Size of the file in bytes, known after the first reply.
        position: Absolute offset of the next box header to read.
        mdats: ``(header offset, payload start, payload stop)`` of every `mdat` met, in file order.
        ftyp: The whole `ftyp` box, empty when none was met.
        moov_start, moov_stop: Absolute range ``[start, stop)`` of `moov`, once it was met.
    """

    def __init__(self, file_path: str) -> None:
        self.file_path = file_path
        self.file_size = -1
        self.position = 0
        self.mdats: list[tuple[int, int, int]] = []
        self.ftyp = b""
        self.moov_start = -1
        self.moov_stop = -1
        self._moov_header_size = 8
        self._window_start = 0
        self._window = b""

    @property
    def window_stop(self) -> int:
        return self._window_start + len(self._window)

    def window(self, start: int, stop: int) -> memoryview:
        """Bytes ``[start, stop)`` of the file, as far as they are in memory."""
        view = memoryview(self._window)
        return view[max(start - self._window_start, 0) : max(stop - self._window_start, 0)]

    def fetch(self, start: int, stop: int) -> Generator[ByteRange, RangeReply, None]:
        """Ask for ``[start, stop)``; extend the window when it continues there, else replace it."""
        if self.file_size >= 0:
            stop = min(stop, self.file_size)
        continues = self.file_size >= 0 and start == self.window_stop
        reply = yield ByteRange(start, stop, continues)
        if self.file_size not in (-1, reply.file_size):
            raise TransferError(
                f"{self.file_path}: size changed from {self.file_size} to {reply.file_size} bytes "
                "while it was read.",
                hint="Another process is writing this file; try again when it has finished.",
                file_path=self.file_path,
            )
        expected = max(min(stop, reply.file_size) - start, 0)
        if len(reply.data) != expected:
            raise TransferError(
                f"{self.file_path}: {len(reply.data)} bytes came for the range [{start}, {stop}), "
                f"expected {expected}.",
                file_path=self.file_path,
            )
        self.file_size = reply.file_size
        if continues and self.moov_start >= 0:
            # Only moov is still of interest: leave what stands before it.
            self._window = b"".join((self.window(self.moov_start, self.window_stop), reply.data))
            self._window_start = self.moov_start
        else:
            self.take(start, bytes(reply.data), reply.file_size)

    def take(self, start: int, data: bytes, file_size: int) -> None:
        """Hold these bytes, and no others."""
        self._window, self._window_start, self.file_size = data, start, file_size

    def advance(self) -> bool:
        """Walk the boxes in the window until `moov` (True) or the end of the window (False)."""
        while True:
            box = self._next_box()
            if box is None:
                return False
            kind, start, payload_start, stop = box
            if kind == b"moov":
                self._meet_moov(start, payload_start, stop)
                return True

    def advance_behind_moov(self) -> bool:
        """Walk on over known boxes behind `moov` as far as the window goes, to learn where `mdat` is.

        Whatever else stands there is no business of the index, so it ends the walk without an error.

        Returns:
            Whether there may be more of them behind the window.
        """
        while self._window_start <= self.position < self.window_stop:
            header = read_header(memoryview(self._window), self.position - self._window_start)
            if header is None:
                return self.window_stop < self.file_size
            if header.kind not in _BEHIND_MOOV or self._next_box() is None:
                return False
        return self.position + 8 <= self.file_size

    def mdat_of(self, offset: int) -> tuple[int, int, int] | None:
        """The first `mdat` met whose payload holds a byte of the file."""
        return next((mdat for mdat in self.mdats if mdat[1] <= offset < mdat[2]), None)

    def moov(self) -> Box:
        payload = self.window(self.moov_start + self._moov_header_size, self.moov_stop)
        return Box(self.file_path, "moov", self.moov_start, self._moov_header_size, payload)

    def _next_box(self) -> tuple[bytes, int, int, int] | None:
        """Take one top-level box: ``(kind, start, payload start, stop)``; None when more bytes are needed."""
        start = self.position
        left = self.file_size - start
        if left < 8 and self.moov_start < 0:
            raise malformed(
                self.file_path,
                f"no moov: truncated, the file ends at byte {self.file_size} without one",
                box="file",
                offset=start,
                hint="The recording was interrupted before its tables were written; record this file again.",
            )
        if start < self._window_start or start > self.window_stop:
            return None
        header = read_header(memoryview(self._window), start - self._window_start)
        if header is None:
            if self.window_stop < self.file_size:
                return None
            raise malformed(self.file_path, "the file ends inside a box header", box="file", offset=start)
        kind, size, header_size = header
        name = fourcc_text(kind)
        if "\\x" in name and kind[0] != 0xA9:
            raise malformed(self.file_path, f"no box stands here but {kind!r}", box="file", offset=start)
        if size is not None and size < header_size:
            raise malformed(
                self.file_path, f"box size {size} is smaller than its own header", box=name, offset=start
            )
        stop = self.file_size if size is None else start + size
        if kind in (b"moof", b"styp", b"sidx"):
            raise _fragmented(self.file_path, name, start)
        if stop > self.file_size:
            missing = "" if kind == b"moov" or self.moov_start >= 0 else "no moov: "
            raise malformed(
                self.file_path,
                f"{missing}truncated, the box ends at byte {stop}, but the file has {self.file_size}",
                box=name,
                offset=start,
                hint="The recording or copy was interrupted; record or copy this file again.",
            )
        if kind == b"mdat":
            self.mdats.append((start, start + header_size, stop))
        elif kind == b"ftyp" and not self.ftyp:
            if stop - start > _MAX_FTYP_BYTES:
                raise malformed(
                    self.file_path, f"{stop - start} bytes are too many", box="ftyp", offset=start
                )
            if stop > self.window_stop:
                return None
            self.ftyp = bytes(self.window(start, stop))
        self.position = stop
        return kind, start, start + header_size, stop

    def _meet_moov(self, start: int, payload_start: int, stop: int) -> None:
        if stop - start > MAX_MOOV_BYTES:
            raise unsupported(
                self.file_path,
                f"{stop - start} bytes of tables are more than the limit of {MAX_MOOV_BYTES}",
                box="moov",
                offset=start,
            )
        self.moov_start, self.moov_stop, self._moov_header_size = start, stop, payload_start - start


def _fragmented(file_path: str, box: str, offset: int) -> UnsupportedMp4Error:
    return unsupported(
        file_path,
        "fragmented MP4 is not supported",
        box=box,
        offset=offset,
        hint="Remux it into one movie: ffmpeg -i IN.mp4 -c copy -movflags +faststart OUT.mp4.",
    )


def _assemble(walk: _Walk, track: VideoTrack) -> TrackIndex:
    samples, first, last = track.samples, track.first_byte, track.stop_byte
    if not any(start <= first and last <= stop for _, start, stop in walk.mdats):
        _check_inside_mdat(walk, samples)
    # Where boxes that we do not know stand before it, the payload is what the samples cover; a header of 8
    # bytes is the rule, and 16 bytes once the size needs 64 bits.
    inferred = (max(first - (8 if last - first < (1 << 32) - 8 else 16), 0), first, last)
    mdat, payload_start, payload_stop = walk.mdat_of(first) or inferred
    return TrackIndex(
        file_path=walk.file_path,
        file_size=walk.file_size,
        ftyp=walk.ftyp,
        moov_offset=walk.moov_start,
        mdat_offset=mdat,
        mdat_payload_offset=payload_start,
        mdat_payload_size=payload_stop - payload_start,
        faststart=walk.moov_start < mdat,
        codec=track.codec,
        timescale=track.timescale,
        duration_ticks=track.duration_ticks,
        track_id=track.track_id,
        width=track.width,
        height=track.height,
        stsd_body=track.stsd_body,
        samples=samples,
    )


def _check_inside_mdat(walk: _Walk, samples: SampleTable) -> None:
    """Every sample lies in one `mdat` payload, or behind the last box that was looked at."""
    regions = [(start, stop) for _, start, stop in walk.mdats]
    if walk.position < walk.file_size:
        regions.append((walk.position, walk.file_size))
    starts = np.array([start for start, _ in regions], dtype=np.int64)
    stops = np.array([stop for _, stop in regions], dtype=np.int64)
    region = np.searchsorted(starts, samples.offsets_bytes, side="right") - 1
    outside = region < 0
    if len(regions):
        outside |= samples.offsets_bytes + samples.sizes_bytes > stops[region]
    if bool(outside.any()):
        sample = int(np.argmax(outside))
        start = int(samples.offsets_bytes[sample])
        raise malformed(
            walk.file_path,
            f"sample {sample} at byte {start} ({int(samples.sizes_bytes[sample])} bytes) is outside mdat",
            box="moov/trak/mdia/minf/stbl",
            offset=walk.moov_start,
            hint="A chunk offset is wrong, as when a 32-bit offset wrapped round in a file above 4 GiB.",
            sample=sample,
        )
