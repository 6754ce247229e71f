"""`StreamingLeRobotDataset`: the thin adapter between PyTorch's `DataLoader` and the pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lrstream.index.open import open_index
from lrstream.layout.layout import load_layout, resolve_selection
from lrstream.layout.projection import narrow_layout
from lrstream.sidecar.checksum_file import ChecksumFile
from lrstream.sidecar.identity import SidecarIdentity
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.storage.location import RepoType, parse_location
from lrstream.storage.per_process import PerProcess
from lrstream.storage.store import open_store
from lrstream.streaming.batches import Placer
from lrstream.streaming.checkpoint import Checkpointer, Progress
from lrstream.streaming.coded import DecodeHook, check_decoding
from lrstream.streaming.content import content_digest, source_sizes
from lrstream.streaming.fetch import EpisodeLoader
from lrstream.streaming.gop_table import GopTable
from lrstream.streaming.iterated import IteratedDataset
from lrstream.streaming.iteration import SampleStream
from lrstream.streaming.loading import EpisodeShares, Figures
from lrstream.streaming.meta import DatasetMeta
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.observed import MetricsExport
from lrstream.streaming.partition import PartitionReport, partition_report, rank_share
from lrstream.streaming.pipeline import EpochPipeline
from lrstream.streaming.report import BuildNotice, PeriodicReport, log_interval_s, tell_partition
from lrstream.streaming.samples import ReturnUint8, SampleBuilder
from lrstream.streaming.settings import (
    LoaderSettings,
    VideoDecoderName,
    check_mapping,
    check_timeout,
    check_transforms,
    distributed_place,
)
from lrstream.streaming.sources import TrackSource
from lrstream.streaming.state import LoaderState, selection_digest
from lrstream.streaming.strategies import SamplingStrategy
from lrstream.streaming.verify import PayloadChecksums, check_payload_checksums, open_payload_checksums
from lrstream.streaming.windows import WindowSpec, picture_windows
from lrstream.streaming.worker import ProcessReader

__all__ = ["StreamingLeRobotDataset"]


class StreamingLeRobotDataset(IteratedDataset):
    """A LeRobotDataset v3 streamed into training, every selected frame once per epoch.

    Samples equal those of LeRobot's map-style `LeRobotDataset` in keys, dtypes, shapes and values. Whole
    episodes are fetched (rows and byte ranges of MP4 files), held within a byte budget, and decoded one
    anchor at a time in an order that depends on the seed, the epoch and these settings only (LD-2).
    Use it with a `DataLoader` without a sampler and without ``shuffle``. Each worker owns whole episodes;
    more workers than the rank has episodes stay idle.

    An epoch is one iteration. `set_epoch` chooses which one, also for persistent workers; it stays as set
    until it is set again, so without it every iteration gives the same order. With ``repeat=True`` one
    iteration goes through epoch after epoch, from the chosen one on, without end.

    Rank and world size are looked up once, here: workers know nothing of `torch.distributed`.

    Args:
        repo_id: ``OWNER/NAME`` on the Hub, or any root: a directory or a URL. With `root`, only a name.
        root: Directory or URL of the dataset; None = `repo_id` says it.
        episodes: Episode indices to use, in any order; None = all, empty = none.
        exclude_episodes: Episode indices to leave out of these.
        image_transforms: Applied to every RGB camera, never to depth. Without workers they run in the
            consuming thread, in order, so that one seed gives the same transforms (LD-9).
        delta_timestamps: For each feature the seconds relative to the anchor of a window: multiples of
            ``1 / fps``. Beyond the episode the first or last frame is repeated and marked in
            ``{key}_is_pad``.
        tolerance_s: Largest distance between a row's time and its picture's.
        revision: Branch, tag or commit on the Hub.
        repo_type: What ``OWNER/NAME`` is, "dataset" or "bucket".
        seed: Seed of the order; None = 42.
        sampling_strategy: "remaining": the next episode is drawn in proportion to its remaining anchors;
            "round_robin": one anchor of each episode of the pool in every round; "gop": whole GOPs are
            decoded once, and their anchors mixed in a reservoir of decoded pictures.
        episode_pool_size: Episodes that each worker mixes; None = 32 / number of workers.
        prefetch_episodes: Episodes that each worker fetches ahead of its pool.
        byte_budget_gb: MP4 bytes that a rank may hold, shared by its workers; 1 GB counts as 2**30 bytes.
        reservoir_gb: Decoded pictures that a rank keeps with "gop", shared by its workers; 1 GB counts as
            2**30 bytes. Other strategies keep none.
        decode_threads: Threads that decode in each worker.
        decoded_queue_size: Samples that each worker keeps ahead.
        video_decoder_cache_size: Open decoders of the rank, shared by its workers; None = pool × cameras.
        max_num_shards: Episodes that each worker fetches at once.
        native_http_connections: HTTP connections of each process, None = derived; Hub only.
        native_http_subranges: Parallel parts of one range read; Hub only.
        sidecar_lock_timeout_s: Longest wait for another process that builds the same index.
        features: Features to deliver; None = all. What is left out is neither fetched nor decoded, and
            does not count for the byte budget. ``index``, ``episode_index``, ``frame_index``,
            ``timestamp``, ``task_index`` and ``task`` are always there.
        return_uint8: RGB video as uint8 rather than float32 in [0, 1]; "all" = images in tables, too.
        depth_output_unit: "mm" or "m".
        repeat: Whether an iteration never ends.
        rank: This process's rank; None = of `torch.distributed` if initialised, else ``RANK``, else 0.
        world_size: Number of ranks; None = likewise, else ``WORLD_SIZE``, else 1.
        storage_options: Arguments of the fsspec file system; they reach every worker.
        payload_checksums: "auto": fetched video is held against its checksums where `lrstream build
            --checksums` has made them; "require": nothing starts without them; "off".
        decoder: What decodes RGB video: "pyav", or "torchcodec" over mini-MP4s, told by the index where
            frames are. Pictures that differ from PyAV's are refused.
        decode_hook: Called with the `CodedPictures` of each sample, for all cameras of RGB video or by key;
            the sample holds what it returns, as it is. Runs on decode threads; importable for "spawn".

    Attributes:
        repo_id: Name of the dataset.
        meta: Metadata of the whole dataset as far as it is delivered, under LeRobot's names.
        episodes: Selected episode indices, ascending.
        log_interval_s: Seconds between two log lines of a worker on its counters, 0 = none; from the
            environment variable LRSTREAM_LOG_INTERVAL_S, else 60. To be set before iterating.

    Raises:
        UsageError: An argument cannot work, or a rank has no episode (LD-9).
        NotFoundError: The dataset or a selected episode does not exist.
        DatasetFormatError: Its metadata cannot be used.
        SidecarLockTimeoutError: Another process is indexing it and has not come to an end.
    """

    def __init__(
        self,
        repo_id: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        episodes: Iterable[int] | None = None,
        exclude_episodes: Iterable[int] | None = None,
        image_transforms: Callable[[torch.Tensor], Any] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        tolerance_s: float = 1e-4,
        revision: str | None = None,
        *,
        repo_type: RepoType = "dataset",
        seed: int | None = 42,
        sampling_strategy: SamplingStrategy = "remaining",
        episode_pool_size: int | None = None,
        prefetch_episodes: int = 8,
        byte_budget_gb: float = 8.0,
        reservoir_gb: float = 2.0,
        decode_threads: int = 2,
        decoded_queue_size: int = 8,
        video_decoder_cache_size: int | None = None,
        max_num_shards: int = 16,
        native_http_connections: int | None = None,
        native_http_subranges: int = 1,
        sidecar_lock_timeout_s: float = 1800.0,
        features: Iterable[str] | None = None,
        return_uint8: ReturnUint8 = False,
        depth_output_unit: str = "mm",
        repeat: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        payload_checksums: PayloadChecksums = "auto",
        decoder: VideoDecoderName = "pyav",
        decode_hook: DecodeHook | Mapping[str, DecodeHook] | None = None,
    ) -> None:
        rank, world_size = distributed_place(rank, world_size)
        self._settings = LoaderSettings(
            seed=seed,
            sampling_strategy=sampling_strategy,
            episode_pool_size=episode_pool_size,
            prefetch_episodes=prefetch_episodes,
            byte_budget_gb=byte_budget_gb,
            reservoir_gb=reservoir_gb,
            decode_threads=decode_threads,
            decoded_queue_size=decoded_queue_size,
            video_decoder_cache_size=video_decoder_cache_size,
            max_num_shards=max_num_shards,
            return_uint8=return_uint8,
            depth_output_unit=depth_output_unit,
            tolerance_s=tolerance_s,
            repeat=repeat,
            rank=rank,
            world_size=world_size,
            decoder=decoder,
        )
        check_transforms(image_transforms)
        check_timeout("sidecar_lock_timeout_s", sidecar_lock_timeout_s)
        check_mapping("delta_timestamps", delta_timestamps)
        check_mapping("storage_options", storage_options)
        check_payload_checksums(payload_checksums)
        location = parse_location(repo_id if root is None else root, repo_type=repo_type, revision=revision)
        self._store = open_store(
            location,
            storage_options=storage_options,
            connections=native_http_connections,
            subranges=native_http_subranges,
        )
        whole = load_layout(self._store)
        self._layout = narrow_layout(whole, features)
        info, table = self._layout.info, self._layout.episodes
        self._positions = resolve_selection(self._layout, episodes, exclude_episodes)
        self._lengths = table.length[self._positions]
        self._share_frames = self._count_share()
        windows = WindowSpec.parse(
            delta_timestamps,
            info.features,
            fps=info.fps,
            tolerance_s=tolerance_s,
            left_out=self._layout.left_out,
        )
        self._settings = replace(self._settings, picture_windows=picture_windows(windows, table.cameras))
        self._builder = SampleBuilder(
            features=info.features,
            tasks=self._layout.tasks,
            windows=windows,
            return_uint8=return_uint8,
            depth_unit=depth_output_unit,
            image_transforms=image_transforms,
            decode_hooks=check_decoding(decoder, decode_hook, sampling_strategy, info.features),
        )
        self.repo_id = os.fspath(repo_id)
        self.meta = DatasetMeta(
            self._layout,
            repo_id=self.repo_id,
            # On the Hub also the one that was chosen where none was asked for.
            revision=self._store.location.revision,
            depth_unit=depth_output_unit,
        )
        self.episodes: list[int] = table.episode_index[self._positions].tolist()
        # The path alone: the record of a large dataset's sidecar would be sent to every worker.
        self._sidecar: Path | None = None
        identity: SidecarIdentity | None = None
        self._checksums: ChecksumFile | None = None
        self._require_checksums = payload_checksums == "require"
        if self._layout.video_files() and len(self._positions):
            # Here rather than in the workers, so that only one process of the rank builds it.
            resolved = resolve_sidecar(
                self._store,
                whole,  # a dataset has one sidecar, whatever is wanted of it
                # Without `root`, the name follows from the location, so that `lrstream build` finds the same.
                repo_id=None if root is None else self.repo_id,
                revision=revision,
                lock_timeout_s=sidecar_lock_timeout_s,
                progress=BuildNotice(self.repo_id),
            )
            self._sidecar, identity = resolved.path, resolved.identity
            self._checksums = open_payload_checksums(
                payload_checksums, self._store, self._layout, resolved, self._positions
            )
        template = LoaderState(
            data_root=self._store.location.root,
            revision=self._store.location.revision or "",
            selection_digest=selection_digest(
                self.episodes, self._lengths, source_sizes(self._layout, identity)
            ),
            features=tuple(self._layout.info.features) if self._layout.left_out else None,
            content_digest=content_digest(self._layout, self._positions, identity),
            **self._settings.plan_fields(),
            rank=rank,
            num_workers=0,
            batch_size=1,
        )
        self._checkpoint = Checkpointer(template, EpisodeShares(self._lengths), repeat=repeat)
        self.log_interval_s = log_interval_s()
        self._process: PerProcess[ProcessReader] = PerProcess(ProcessReader)
        self._export = MetricsExport()
        self._serve_from_environment()

    # -- what it is -------------------------------------------------------------------------------

    @property
    def num_frames(self) -> int:
        """Selected frames, over all ranks."""
        return int(self._lengths.sum())

    @property
    def num_episodes(self) -> int:
        """Selected episodes, over all ranks."""
        return len(self._positions)

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self.meta.fps

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """Features that are delivered, as in info.json."""
        return self.meta.features

    @property
    def root(self) -> str:
        """Directory or URL of the dataset."""
        return self.meta.root

    @property
    def revision(self) -> str | None:
        """Revision that was asked for."""
        return self.meta.revision

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._settings.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._settings.world_size

    def __len__(self) -> int:
        """Frames that this rank delivers in one epoch, all its workers together."""
        return self._share_frames

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.repo_id!r}, root={self.root!r}, num_episodes={self.num_episodes}, "
            f"num_frames={self.num_frames}, rank={self.rank} of {self.world_size})"
        )

    # -- iteration --------------------------------------------------------------------------------

    @property
    def _repeats(self) -> bool:
        return self._settings.repeat

    def _streams(self) -> Callable[[Progress], SampleStream | None]:
        return partial(self._start_pipeline, Placer(self._process.get().batches))

    def _log(self) -> PeriodicReport:
        return self._process.get().report

    def _start_pipeline(self, placer: Placer, progress: Progress) -> EpochPipeline | None:
        if not len(self._positions):
            return None
        return self._start_epoch(
            self._settings,
            epoch=progress.state.epoch,
            worker=progress.part,
            num_workers=progress.state.num_workers,
            skip_anchors=progress.num_samples,
            stage=progress.stage,
            frames=progress.frames,
            placer=placer,
        )

    def _start_epoch(self, settings: LoaderSettings, **place: Any) -> EpochPipeline | None:
        """See `ProcessReader.start_epoch`."""
        return self._process.get().start_epoch(
            self._episode_loader(),
            self._builder,
            settings,
            self._lengths,
            self._positions,
            self._layout.episodes.episode_index[self._positions],
            **place,
        )

    def _episode_loader(self) -> EpisodeLoader:
        reader = self._process.get()
        return reader.loader(
            self._store,
            self._layout,
            self._open_tracks,
            self._settings.tolerance_s,
            self._checksums,
            self._require_checksums,
        )

    def _metrics(self) -> LoaderMetrics:
        return self._process.get().metrics

    def _sizes(self) -> NDArray[np.int64]:
        return self._episode_loader().sizes(self._positions)

    def _gops(self) -> GopTable:
        return self._episode_loader().gops(self._positions)

    def _figures(self) -> Figures:
        return Figures(self._sizes, self._gops)

    def _open_tracks(self) -> TrackSource | None:
        return None if self._sidecar is None else open_index(self._sidecar)

    def _count_share(self) -> int:
        if not len(self._positions):
            return 0
        share = rank_share(self._lengths, self._settings.rank, self._settings.world_size)
        return int(np.sum(self._lengths[share]))

    # -- reports and end --------------------------------------------------------------------------

    def partition_report(
        self, num_workers: int = 0, batch_size: int = 1, drop_last: bool = False
    ) -> PartitionReport:
        """Frames, episodes and batches of every rank in one epoch, before it is run (K17); also logged.

        Args:
            num_workers: DataLoader workers of each rank.
            batch_size: Of the DataLoader, for the log line; see `PartitionReport.batches_per_rank`.
            drop_last: Likewise.
        """
        report = partition_report(self._lengths, self.world_size, num_workers)
        tell_partition(report, rank=self.rank, batch_size=batch_size, drop_last=drop_last)
        return report

    def metrics(self) -> dict[str, Any]:
        """Counters of this process since the dataset was opened here (LD-13); workers have their own.

        Samples, per-stage counts, seconds and samples per second, fetched bytes per sample, percentiles of
        waits for samples and (through `follow`) batches, refill stalls, open decoders, reserved and
        resident bytes, and requests, retries and slept time of the storage.
        """
        return self._process.get().snapshot()

    def close(self) -> None:
        """End iterations of this process and close its files and decoders; iterating opens them again."""
        self._export.close()
        reader = self._process.drop()
        if reader is not None:
            reader.close()
