"""A part of a track as a track of its own: what a mini-MP4 of few samples is made from, wherever it goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lrstream.mp4.span import Span
from lrstream.mp4.synthesis import mini_mp4_frames
from lrstream.mp4.track import SampleTable, TrackIndex

__all__ = ["excerpt", "frame_mappings"]


def excerpt(track: TrackIndex, span: Span) -> TrackIndex:
    """The samples of a span, numbered from 0, with offsets from the span's first byte.

    The arrays are copies, so the index of the whole file may go. ``Span(0, n, 0, span.num_bytes)`` is the
    same span in the result.
    """
    samples = track.samples
    part = slice(span.first_sample, span.stop_sample)
    low, high = np.searchsorted(samples.sync_samples, (span.first_sample, span.stop_sample))
    table = SampleTable(
        pts_s=samples.pts_s[part].copy(),
        durations_ticks=samples.durations_ticks[part].copy(),
        composition_offsets_ticks=samples.composition_offsets_ticks[part].copy(),
        sizes_bytes=samples.sizes_bytes[part].copy(),
        offsets_bytes=samples.offsets_bytes[part].astype(np.int64) - span.start_byte,
        sync_samples=samples.sync_samples[low:high].astype(np.int64) - span.first_sample,
    )
    return replace(track, samples=table)


def frame_mappings(track: TrackIndex, span: Span) -> str:
    """The frames of a mini-MP4 as JSON, as TorchCodec's ``custom_frame_mappings`` and ffprobe spell them.

    Frames stand in decode order; ``pts`` and ``duration`` are media ticks of the mini-MP4.
    """
    pts, durations, is_sync = mini_mp4_frames(track, span)
    frames = ",".join(
        f'{{"pts":{pts_ticks},"duration":{duration_ticks},"key_frame":{key_frame}}}'
        for pts_ticks, duration_ticks, key_frame in zip(
            pts.tolist(), durations.tolist(), is_sync.astype(int).tolist(), strict=True
        )
    )
    return f'{{"frames":[{frames}]}}'
