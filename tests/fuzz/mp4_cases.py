"""One mutated MP4 through the whole of `lrstream.mp4`, and what comes out of it through FFmpeg."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable

import av

from lrstream.mp4.codec_config import codec_configuration
from lrstream.mp4.probe import RangeReply, drive, probe_track
from lrstream.mp4.span import Span, episode_span
from lrstream.mp4.synthesis import mini_mp4, mini_mp4_size
from lrstream.mp4.track import TrackIndex
from tests.fuzz.limits import Outcome, measured
from tests.fuzz.mp4_mutations import mutate
from tests.media.clips import CLIPS, FRAGMENTED, LAYOUTS
from tests.support.media import Clip, Node, clip_bytes, demux, edit, index, set_edits

__all__ = ["prepare", "run_mp4_case"]


def _delayed(nodes: list[Node]) -> None:
    set_edits(nodes, [(100, -1, 1 << 16), (900, 512, 1 << 16)])


_LAYOUTS: dict[str, Callable[[list[Node]], None]] = {**LAYOUTS, "delayed": _delayed}


def _clips(*, av1: bool) -> tuple[Clip, ...]:
    return tuple(clip for clip in (*CLIPS, FRAGMENTED) if av1 or clip.codec != "av1")


@functools.cache
def _original(clip: Clip, layout: str | None) -> tuple[bytes, TrackIndex | None]:
    data = clip_bytes(clip)
    if layout is not None:
        data = edit(data, _LAYOUTS[layout])
    return data, None if clip is FRAGMENTED else index(data)


def prepare(*, av1: bool) -> None:
    """Encode everything now, so that no case pays for it."""
    for clip in _clips(av1=av1):
        clip_bytes(clip)


def run_mp4_case(number: int, seed: int, *, av1: bool) -> Outcome:
    """Case `number` of run `seed`.

    Raises:
        AssertionError: A limit was exceeded, or the mini-MP4 is not what the index says.
        BaseException: Anything but an error of lrstream escaped.
    """
    rng = random.Random(f"mp4 {seed} {number}")
    clip = rng.choice(_clips(av1=av1))
    can_edit = clip is not FRAGMENTED
    layout = rng.choice((None, None, *_LAYOUTS)) if can_edit else None
    data, original = _original(clip, layout)
    mutation, damaged = mutate(rng, data)
    track, parsed = measured(lambda: _index(damaged), len(damaged))
    if track is None:
        assert parsed.refusal is not None
        fields = parsed.refusal.fields
        assert fields["file_path"] == "fuzz.mp4", "the error does not name the file"
        assert {"box", "offset"} <= fields.keys(), "the error does not say where"
        return Outcome(mutation, "refused", parsed.cpu_s, parsed.peak_bytes, len(damaged))
    mini, made = measured(lambda: _mini(rng, track, damaged), len(damaged))
    cpu_s, peak = parsed.cpu_s + made.cpu_s, max(parsed.peak_bytes, made.peak_bytes)
    if mini is None:
        return Outcome(mutation, "mini-MP4 refused", cpu_s, peak, len(damaged))
    span, content = mini
    try:
        packets = demux(content)
        pictures = _count_pictures(content)
    except av.error.FFmpegError:
        assert not _is_intact(track, span, damaged, original, data), "FFmpeg refuses intact pictures"
        return Outcome(mutation, "decoder refused", cpu_s, peak, len(damaged))
    sizes = track.samples.sizes_bytes[span.first_sample : span.stop_sample]
    assert packets.sizes == sizes[sizes > 0].tolist(), "the mini-MP4 holds other samples than the index"
    if _is_intact(track, span, damaged, original, data):
        assert pictures > 0, "intact pictures, but none is decoded"
    return Outcome(mutation, "decoded", cpu_s, peak, len(damaged))


def _index(data: bytes) -> TrackIndex:
    return drive(probe_track("fuzz.mp4"), lambda start, stop: RangeReply(data[start:stop], len(data)))


def _count_pictures(content: bytes) -> int:
    with av.open(io.BytesIO(content), "r") as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        return len(list(container.decode(stream)))


def _mini(rng: random.Random, track: TrackIndex, data: bytes) -> tuple[Span, bytes]:
    samples = track.samples
    codec_configuration(track.stsd_body)
    middle = float(samples.pts_s[rng.randrange(samples.num_samples)])
    span = episode_span(samples, middle, middle + rng.choice((0.01, 0.2, 10.0)))
    content = mini_mp4(track, span, data[span.start_byte : span.stop_byte])
    assert len(content) == mini_mp4_size(track, span), "the size was announced wrongly"
    return span, content


def _is_intact(
    track: TrackIndex, span: Span, data: bytes, original: TrackIndex | None, original_data: bytes
) -> bool:
    """Whether the span's pictures, their keyframe flags and the decoder's configuration are undamaged."""
    if (
        original is None
        or track.stsd_body != original.stsd_body
        or track.samples.num_samples != original.samples.num_samples
    ):
        return False
    if track.samples.sync_samples.tolist() != original.samples.sync_samples.tolist():
        return False
    for number in range(span.first_sample, span.stop_sample):
        one, other = (
            content[at : at + size]
            for content, at, size in (
                (data, *_place(track, number)),
                (original_data, *_place(original, number)),
            )
        )
        if one != other:
            return False
    return True


def _place(track: TrackIndex, number: int) -> tuple[int, int]:
    return int(track.samples.offsets_bytes[number]), int(track.samples.sizes_bytes[number])
