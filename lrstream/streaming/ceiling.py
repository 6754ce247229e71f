"""What decoding alone costs: the bound for a loader.

Packets that lie in memory go through a decoder and become channel-first tensors, in one thread, in a plain
loop: no plan, no queue, no rows, no batch. What the loader takes per sample beyond this is its own cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import torch
from numpy.typing import NDArray

from lrstream.errors import DecodeError
from lrstream.streaming.clip import Clip
from lrstream.streaming.decode import open_decoder
from lrstream.streaming.episode import EpisodeRecord
from lrstream.streaming.pictures import PictureConverter, depth_table

__all__ = ["BareDecoder", "DecodedEpisode"]


@dataclass(frozen=True, slots=True)
class DecodedEpisode:
    """What bare decoding of some anchors took.

    Attributes:
        num_samples: Anchors of which every camera was decoded.
        num_pictures: Pictures converted.
        num_fed: Coded pictures fed to decoders.
        wall_s: Time, seconds.
        cpu_s: Processor time of the thread, seconds.
    """

    num_samples: int
    num_pictures: int
    num_fed: int
    wall_s: float
    cpu_s: float


class BareDecoder:
    """Decodes anchors in a plain loop. For one thread.

    Args:
        depth_tables: For each depth camera the depth of each code, float32 ``(4096,)``.
        by_gop: Decode each GOP once for all its anchors, rather than once for each anchor.
    """

    def __init__(
        self, depth_tables: dict[str, NDArray[np.float32]] | None = None, *, by_gop: bool = False
    ) -> None:
        self._tables = depth_tables or {}
        self._by_gop = by_gop
        self._contexts: dict[Any, av.VideoCodecContext] = {}
        self._converter = PictureConverter()

    @classmethod
    def of(cls, features: Iterable[Any], *, by_gop: bool = False) -> BareDecoder:
        """With the depth tables of a dataset's features."""
        tables = {
            feature.key: depth_table(feature.depth, "mm")
            for feature in features
            if feature.kind == "depth" and feature.depth is not None
        }
        return cls(tables, by_gop=by_gop)

    def decode(self, episode: EpisodeRecord, frames: Sequence[int]) -> DecodedEpisode:
        """Decode all cameras of some frames of a loaded episode; only decoding is timed.

        Raises:
            DecodeError: A picture does not come out.
        """
        jobs = [self._job(key, episode, frames) for key in episode.cameras]
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        num_fed = num_pictures = 0
        for context, groups, packets, key in jobs:
            for first, stop, wanted in groups:
                num_fed += self._run(context, packets[first:stop], wanted, key)
                num_pictures += len(wanted)
        return DecodedEpisode(
            len(frames), num_pictures, num_fed, time.perf_counter() - wall_s, time.thread_time() - cpu_s
        )

    def _job(
        self, key: str, episode: EpisodeRecord, frames: Sequence[int]
    ) -> tuple[av.VideoCodecContext, list[tuple[int, int, list[int]]], list[Any], str]:
        camera = episode.cameras[key]
        ranks = camera.ranks_of(np.asarray(frames, dtype=np.int64)).tolist()
        clip = camera.clip
        return self._context(clip), self._groups(clip, ranks), _packets(clip), key

    def _groups(self, clip: Clip, ranks: list[int]) -> list[tuple[int, int, list[int]]]:
        """Runs of samples ``[first, stop)`` and the ranks wanted of each."""
        table = clip.table
        if not self._by_gop:
            return [
                (table.entries[sample], sample + 1, [rank])
                for rank in ranks
                for sample in (table.samples[rank],)
            ]
        together: dict[int, list[int]] = {}
        for rank in ranks:
            together.setdefault(table.entries[table.samples[rank]], []).append(rank)
        return [
            (entry, max(table.samples[rank] for rank in wanted) + 1, wanted)
            for entry, wanted in sorted(together.items())
        ]

    def _run(self, context: av.VideoCodecContext, packets: list[Any], wanted: list[int], key: str) -> int:
        missing = set(wanted)
        context.flush_buffers()
        for packet in [*packets, None]:
            for picture in context.decode(packet):
                if picture.pts in missing:
                    missing.discard(picture.pts)
                    self._tensor(picture, key)
            if not missing:
                break
        if missing:
            raise DecodeError(f"{len(missing)} pictures of {key} do not come out of a plain decoder.")
        return len(packets)

    def _tensor(self, picture: av.VideoFrame, key: str) -> torch.Tensor:
        table = self._tables.get(key)
        size = (picture.height, picture.width)
        if table is not None:
            depth = np.empty((1, *size), dtype=np.float32)
            self._converter.write_depth(picture, table, depth)
            return torch.from_numpy(depth)
        pixels = np.empty((3, *size), dtype=np.uint8)
        self._converter.write_rgb(picture, pixels)
        return torch.from_numpy(pixels)

    def _context(self, clip: Clip) -> av.VideoCodecContext:
        config = clip.config
        context = self._contexts.get(config)
        if context is None:
            context = self._contexts[config] = open_decoder(config, is_strict=False)
        return context


def _packets(clip: Clip) -> list[Any]:
    """All coded pictures of a clip, each with its presentation rank as time stamp."""
    payload, table, packets = memoryview(clip.payload), clip.table, []
    for sample, (start, stop) in enumerate(zip(table.starts, table.stops, strict=True)):
        packet = av.Packet(payload[start:stop])  # type: ignore[arg-type]  # any buffer will do
        packet.pts, packet.dts = table.ranks[sample], sample
        packets.append(packet)
    return packets
