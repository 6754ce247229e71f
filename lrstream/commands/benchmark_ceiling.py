"""The bare decoder beside the loader: the same anchors, in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.benchmark_common import ChosenEpisodes, num_usable_cpus
from lrstream.index.open import open_index
from lrstream.streaming.ceiling import BareDecoder, DecodedEpisode
from lrstream.streaming.fetch import EpisodeLoader
from lrstream.streaming.gop_table import GopTable
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.planning import PlanSettings, plan_streams

if TYPE_CHECKING:
    from lrstream.commands.benchmark_report import LoaderOptions

__all__ = ["Ceiling", "CeilingProbe", "ceiling_probe", "planned_anchors"]

_MAX_EPISODES = 8
_MAX_SAMPLES_OF_EPISODE = 64
# Anchors of a plan that are looked at; enough to choose some episodes from.
_MAX_PLANNED = 1 << 18
_TOLERANCE_S = 1e-4  # as the loader's own default


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What decoding alone reaches.

    Attributes:
        num_samples: Anchors that were decoded.
        num_pictures: Pictures of them.
        fed_per_picture: Coded pictures that were fed to decoders for each picture that was wanted.
        wall_s: Time, seconds, of one thread.
        cpu_s: Processor time, seconds.
        num_threads: Threads of the loader that can decode at once on this machine.
    """

    num_samples: int
    num_pictures: int
    fed_per_picture: float
    wall_s: float
    cpu_s: float
    num_threads: int

    @property
    def samples_per_s(self) -> float:
        """Samples per second of as many threads, if they do not disturb each other."""
        return self.num_threads * self.num_samples / self.wall_s if self.wall_s else 0.0

    @property
    def cpu_ms_per_sample(self) -> float:
        """Processor time of one sample, milliseconds."""
        return 1000 * self.cpu_s / self.num_samples if self.num_samples else 0.0


class CeilingProbe:
    """Decodes some of the anchors of a run before it, and others behind it.

    A machine whose load changes meanwhile then disturbs both figures alike.

    Args:
        loader: Loads episodes; counts by itself.
        decoder: Decodes.
        anchors: Frames by position in the episode table, those that the run is about to deliver.
        is_thinned: Whether some anchors of each episode may stand for all; not where GOPs are decoded whole.
        num_threads: Decode threads of the loader, over all its workers.
    """

    def __init__(
        self,
        loader: EpisodeLoader,
        decoder: BareDecoder,
        anchors: dict[int, list[int]],
        *,
        is_thinned: bool,
        num_threads: int,
    ) -> None:
        self._loader, self._decoder = loader, decoder
        self._num_threads = min(num_threads, num_usable_cpus())
        chosen = _spread(list(anchors), _MAX_EPISODES)
        limit = _MAX_SAMPLES_OF_EPISODE if is_thinned else max(map(len, anchors.values()), default=0)
        picked = [(position, _spread(anchors[position], limit)) for position in chosen]
        # With a single episode both halves are the same.
        self._halves = [picked[::2], picked[1::2] or picked]
        self._done: list[DecodedEpisode] = []

    def run_half(self) -> None:
        """Decode the next half; to be called twice."""
        for position, frames in self._halves.pop(0):
            self._done.append(self._decoder.decode(self._loader.load(position), frames))

    def result(self) -> Ceiling | None:
        """What it took; None where nothing was to be decoded."""
        num_pictures = sum(item.num_pictures for item in self._done)
        if num_pictures == 0:
            return None
        return Ceiling(
            num_samples=sum(item.num_samples for item in self._done),
            num_pictures=num_pictures,
            fed_per_picture=sum(item.num_fed for item in self._done) / num_pictures,
            wall_s=sum(item.wall_s for item in self._done),
            cpu_s=sum(item.cpu_s for item in self._done),
            num_threads=self._num_threads,
        )


@contextmanager
def ceiling_probe(chosen: ChosenEpisodes, options: LoaderOptions, archive: Path) -> Iterator[CeilingProbe]:
    """A probe of the frames that a loader with these options will deliver.

    Args:
        chosen: The episodes.
        options: Those of the loader.
        archive: The sidecar.
    """
    layout, positions = chosen
    is_coherent = options.strategy == "gop"
    tracks = open_index(archive)
    try:
        loader = EpisodeLoader(
            layout.store, layout, tracks, tolerance_s=_TOLERANCE_S, metrics=LoaderMetrics()
        )
        try:
            anchors = planned_anchors(
                layout.episodes.length[positions],
                positions,
                loader.sizes(positions),
                options.plan_settings(),
                options.samples,
                gops=loader.gops(positions) if is_coherent else None,
            )
            yield CeilingProbe(
                loader,
                BareDecoder.of(layout.info.features.values(), by_gop=is_coherent),
                anchors,
                is_thinned=not is_coherent,
                num_threads=max(1, options.workers) * options.decode_threads,
            )
        finally:
            loader.close()
    finally:
        tracks.close()


def planned_anchors(
    lengths: NDArray[np.int64],
    positions: NDArray[np.int64],
    sizes: NDArray[np.int64],
    settings: PlanSettings,
    limit: int | None,
    *,
    gops: GopTable | None = None,
) -> dict[int, list[int]]:
    """The first anchors that rank 0 will deliver.

    Args:
        lengths: int64[n], frames of each chosen episode.
        positions: int64[n], their positions in the episode table.
        sizes: int64[n], their bytes.
        settings: As those of the loader.
        limit: Anchors that will be delivered at most; None = all.
        gops: Units of each chosen episode; for strategy `gop`.

    Returns:
        Frames by position in the episode table, in no particular order.
    """
    anchors: dict[int, list[int]] = {}
    share = -(-min(limit or _MAX_PLANNED, _MAX_PLANNED) // settings.num_parts)
    for rank, _, stream in plan_streams(lengths, settings, sizes=sizes, gops=gops):
        if rank != 0:
            break
        places = positions[stream.positions]
        for episodes, frames in stream.plan.first(share):
            for position, frame in zip(places[episodes].tolist(), frames.tolist(), strict=True):
                anchors.setdefault(position, []).append(frame)
    return anchors


def _spread(values: list[int], count: int) -> list[int]:
    """At most `count` of the values, evenly spread."""
    if len(values) <= count:
        return values
    return [values[number * len(values) // count] for number in range(count)]
