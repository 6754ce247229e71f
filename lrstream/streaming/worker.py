"""What one process needs to read a dataset, opened there at first use and never shared (K16)."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrstream.layout.layout import DatasetLayout
from lrstream.sidecar.checksum_file import ChecksumFile
from lrstream.storage.store import DatasetStore
from lrstream.streaming.batches import BatchMemory, Placer
from lrstream.streaming.decode import DecoderPool
from lrstream.streaming.fetch import EpisodeLoader
from lrstream.streaming.mapped_decoders import MappedDecoders
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.pipeline import EpochPipeline, PipelineOptions
from lrstream.streaming.planning import Frames, plan_stream, stream_share
from lrstream.streaming.report import PeriodicReport
from lrstream.streaming.samples import SampleBuilder
from lrstream.streaming.settings import LoaderSettings
from lrstream.streaming.sources import TrackSource
from lrstream.streaming.threads import JobThreads

__all__ = ["ProcessReader"]


class ProcessReader:
    """The readers of one process: index, files, decoders, counters. Thread-safe after `open`.

    Made empty in every process by `lrstream.storage.per_process.PerProcess`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.metrics = LoaderMetrics()
        self.report = PeriodicReport()
        self._pid = os.getpid()
        self._loader: EpisodeLoader | None = None
        self._decoders: DecoderPool | None = None
        self._tracks: TrackSource | None = None
        self._store: DatasetStore | None = None
        self._pipelines: weakref.WeakSet[EpochPipeline] = weakref.WeakSet()
        self.batches = BatchMemory()
        """Where this process stacks samples."""

    def loader(
        self,
        store: DatasetStore,
        layout: DatasetLayout,
        open_tracks: Callable[[], TrackSource | None],
        tolerance_s: float,
        checksums: ChecksumFile | None = None,
        require_checksums: bool = False,
    ) -> EpisodeLoader:
        """The loader of this process, opened at the first call."""
        with self.lock:
            if self._loader is None:
                self._tracks, self._store = open_tracks(), store
                self._loader = EpisodeLoader(
                    store,
                    layout,
                    self._tracks,
                    tolerance_s=tolerance_s,
                    metrics=self.metrics,
                    checksums=checksums,
                    require_checksums=require_checksums,
                )
            return self._loader

    def decoders(self, capacity: int, mapped_cameras: Collection[str] = ()) -> DecoderPool:
        """The decoders of this process; a later capacity replaces an earlier one.

        Args:
            capacity: Most of them.
            mapped_cameras: Cameras that TorchCodec decodes.
        """
        with self.lock:
            if self._decoders is None or self._decoders.capacity != capacity:
                if self._decoders is not None:
                    self._decoders.close()
                self._decoders = (
                    MappedDecoders(capacity, mapped_cameras) if mapped_cameras else DecoderPool(capacity)
                )
            return self._decoders

    def start_epoch(
        self,
        loader: EpisodeLoader,
        builder: SampleBuilder,
        settings: LoaderSettings,
        lengths: NDArray[np.int64],
        positions: NDArray[np.int64],
        names: NDArray[np.int64],
        *,
        epoch: int,
        worker: int,
        num_workers: int,
        skip_anchors: int = 0,
        stage: int = 0,
        frames: Frames | None = None,
        placer: Placer | None = None,
        threads: JobThreads | None = None,
    ) -> EpochPipeline | None:
        """A pipeline for one worker's share of an epoch; None where it owns no episode.

        Args:
            loader: From `loader`.
            builder: Makes samples.
            settings: Options.
            lengths: int64[n], frames of each selected episode.
            positions: int64[n], their positions in the episode table.
            names: int64[n], their episode indices.
            epoch: Epoch number.
            worker: This worker, 0 without workers.
            num_workers: Workers of the rank, 0 = the training process.
            skip_anchors: Anchors of the worker that were delivered before.
            stage: How often this epoch was planned anew for other numbers (LD-15).
            frames: Anchors of each selected episode in this stage; None = all.
            placer: Says where samples are made, see `EpochPipeline`.
            threads: Decode threads, where several pipelines share them; None = its own.
        """
        rank = settings.rank
        plan_settings = settings.plan_settings(epoch=epoch, num_workers=num_workers, stage=stage)
        share, num_owned = stream_share(lengths, plan_settings, rank=rank, worker=worker, frames=frames)
        if len(share) == 0:
            if frames is None:  # of the rest of an epoch a worker may well have nothing
                warnings.warn(
                    f"Worker {worker} of rank {rank} has no data: the rank has {num_owned} episodes for "
                    f"{num_workers} workers. Use num_workers={num_owned} or fewer.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None
        sizes = np.zeros(len(lengths), dtype=np.int64)
        sizes[share] = loader.sizes(positions[share])
        gops = None
        if plan_settings.strategy == "gop":
            gops = loader.gops(positions[share]).spread(share, len(lengths))
        stream = plan_stream(
            lengths,
            plan_settings,
            rank=rank,
            worker=worker,
            sizes=sizes,
            frames=frames,
            episode_index=names,
            gops=gops,
        )
        pool_size = plan_settings.pool_size_of(stream.num_streams)
        capacity = settings.num_decoders(
            pool_size=pool_size, num_cameras=loader.num_parts - 1, num_streams=stream.num_streams
        )
        pipeline = EpochPipeline(
            stream.plan,
            positions[stream.positions],
            sizes[stream.positions],
            budget_bytes=plan_settings.budget_of(stream.num_streams),
            loader=loader,
            builder=builder,
            decoders=self.decoders(capacity, builder.video_keys if settings.decoder == "torchcodec" else ()),
            options=PipelineOptions(
                prefetch_episodes=settings.prefetch_episodes,
                max_in_flight=settings.max_num_shards,
                decode_threads=settings.decode_threads,
                decoded_queue_size=settings.decoded_queue_size,
                transform_in_threads=num_workers > 0,
            ),
            metrics=self.metrics,
            skip_anchors=skip_anchors,
            placer=placer,
            threads=threads,
        )
        self._pipelines.add(pipeline)
        return pipeline

    def snapshot(self) -> dict[str, Any]:
        """Counters of this process, and what is open and in memory now."""
        pipelines = list(self._pipelines)
        caches = [pipeline.cache for pipeline in pipelines]
        reservoirs = [pipeline.reservoir for pipeline in pipelines if pipeline.reservoir is not None]
        decoders = self._decoders
        counters = self.metrics.snapshot()
        transfers = None if self._store is None else self._store.counters
        # Only remote stores repeat requests.
        retries = getattr(self._store, "retry_counters", None)
        return {
            **counters,
            "storage": {
                "requests": 0 if transfers is None else transfers.requests,
                "bytes_read": 0 if transfers is None else transfers.bytes_read,
                "retries": 0 if retries is None else retries.retries,
                "slept_s": 0.0 if retries is None else retries.slept_s,
            },
            "open_decoders": 0 if decoders is None else decoders.num_open,
            "batch_bytes": self.batches.num_bytes,
            "decoders_opened": 0 if decoders is None else decoders.num_opened,
            "reserved_bytes": sum(cache.reserved_bytes for cache in caches),
            "resident_bytes": sum(cache.resident_bytes for cache in caches),
            "peak_reserved_bytes": max(
                [counters["peak_reserved_bytes"], *(cache.peak_reserved_bytes for cache in caches)]
            ),
            "reservoir_bytes": sum(reservoir.held_bytes for reservoir in reservoirs),
            "peak_reservoir_bytes": max(
                [counters["peak_reservoir_bytes"], *(reservoir.peak_held_bytes for reservoir in reservoirs)]
            ),
        }

    def close(self) -> None:
        """End pipelines and close everything; what is read later is opened again."""
        for pipeline in list(self._pipelines):
            pipeline.close()
        with self.lock:
            loader, self._loader = self._loader, None
            decoders, self._decoders = self._decoders, None
            tracks, self._tracks = self._tracks, None
        if loader is not None:
            loader.close()
        if decoders is not None:
            decoders.close()
        if tracks is not None:
            tracks.close()
