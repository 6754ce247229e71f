"""`StreamingLeRobotDataset`: the thin adapter between PyTorch's `DataLoader` and the pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lrstream.index.open import open_index
from lrstream.layout.layout import load_layout, resolve_selection
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.storage.location import RepoType, parse_location
from lrstream.storage.per_process import PerProcess
from lrstream.storage.store import open_store
from lrstream.streaming.meta import DatasetMeta
from lrstream.streaming.partition import rank_share
from lrstream.streaming.samples import ReturnUint8, Sample, SampleBuilder
from lrstream.streaming.settings import LoaderSettings, check_mapping, check_transforms, distributed_place
from lrstream.streaming.sources import TrackSource
from lrstream.streaming.strategies import SamplingStrategy
from lrstream.streaming.windows import WindowSpec
from lrstream.streaming.worker import ProcessReader

__all__ = ["StreamingLeRobotDataset"]


class StreamingLeRobotDataset(IterableDataset[Sample]):
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
            "round_robin": one anchor of each episode of the pool in every round.
        episode_pool_size: Episodes that each worker mixes; None = 32 / number of workers.
        prefetch_episodes: Episodes that each worker fetches ahead of its pool.
        byte_budget_gb: MP4 bytes that a rank may hold, shared by its workers; 1 GB counts as 2**30 bytes.
        decode_threads: Threads that decode in each worker.
        decoded_queue_size: Samples that each worker keeps ahead.
        video_decoder_cache_size: Open decoders of the rank, shared by its workers; None = pool × cameras.
        max_num_shards: Episodes that each worker fetches at once.
        native_http_connections: HTTP connections of each process, None = derived; Hub only.
        native_http_subranges: Parallel parts of one range read; Hub only.
        sidecar_lock_timeout_s: Longest wait for another process that builds the same index.
        return_uint8: RGB video as uint8 rather than float32 in [0, 1]; "all" = images in tables, too.
        depth_output_unit: "mm" or "m".
        repeat: Whether an iteration never ends.
        rank: This process's rank; None = of `torch.distributed` if initialised, else ``RANK``, else 0.
        world_size: Number of ranks; None = likewise, else ``WORLD_SIZE``, else 1.
        storage_options: Arguments of the fsspec file system; they reach every worker.

    Attributes:
        repo_id: Name of the dataset.
        meta: Metadata of the whole dataset, under LeRobot's names.
        episodes: Selected episode indices, ascending.

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
        decode_threads: int = 2,
        decoded_queue_size: int = 8,
        video_decoder_cache_size: int | None = None,
        max_num_shards: int = 16,
        native_http_connections: int | None = None,
        native_http_subranges: int = 1,
        sidecar_lock_timeout_s: float = 1800.0,
        return_uint8: ReturnUint8 = False,
        depth_output_unit: str = "mm",
        repeat: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        rank, world_size = distributed_place(rank, world_size)
        self._settings = LoaderSettings(
            seed=seed,
            sampling_strategy=sampling_strategy,
            episode_pool_size=episode_pool_size,
            prefetch_episodes=prefetch_episodes,
            byte_budget_gb=byte_budget_gb,
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
        )
        check_transforms(image_transforms)
        check_mapping("delta_timestamps", delta_timestamps)
        check_mapping("storage_options", storage_options)
        location = parse_location(repo_id if root is None else root, repo_type=repo_type, revision=revision)
        self._store = open_store(
            location,
            storage_options=storage_options,
            connections=native_http_connections,
            subranges=native_http_subranges,
        )
        self._layout = load_layout(self._store)
        info, table = self._layout.info, self._layout.episodes
        self._positions = resolve_selection(self._layout, episodes, exclude_episodes)
        self._lengths = table.length[self._positions]
        self._share_frames = self._count_share()
        self._builder = SampleBuilder(
            features=info.features,
            tasks=self._layout.tasks,
            windows=WindowSpec.parse(delta_timestamps, info.features, fps=info.fps, tolerance_s=tolerance_s),
            return_uint8=return_uint8,
            depth_unit=depth_output_unit,
            image_transforms=image_transforms,
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
        if self._layout.video_files() and len(self._positions):
            # Here rather than in the workers, so that only one process of the rank builds it.
            self._sidecar = resolve_sidecar(
                self._store,
                self._layout,
                # Without `root`, the name follows from the location, so that `lrstream build` finds the same.
                repo_id=None if root is None else self.repo_id,
                revision=revision,
                lock_timeout_s=sidecar_lock_timeout_s,
            ).path
        # Shared memory, so that workers which live on between epochs see what the parent sets.
        self._epoch = torch.zeros(1, dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._process: PerProcess[ProcessReader] = PerProcess(ProcessReader)

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
        """Features of the dataset, as in info.json."""
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

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, in this process and in all its DataLoader workers."""
        self._settings.plan_settings(epoch=epoch, num_workers=0)  # refuses what is no epoch
        self._epoch[0] = epoch

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return int(self._epoch[0])

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker, num_workers = (0, 0) if info is None else (info.id, info.num_workers)
        epoch = self.epoch
        while True:
            num_delivered = 0
            for sample in self._iterate_epoch(epoch, worker, num_workers):
                num_delivered += 1
                yield sample
            if not self._settings.repeat or num_delivered == 0:
                return
            epoch += 1

    def _iterate_epoch(self, epoch: int, worker: int, num_workers: int) -> Iterator[Sample]:
        if not len(self._positions):
            return
        reader = self._process.get()
        pipeline = reader.start_epoch(
            reader.loader(self._store, self._layout, self._open_tracks, self._settings.tolerance_s),
            self._builder,
            self._settings,
            self._lengths,
            self._positions,
            self._layout.episodes.episode_index[self._positions],
            epoch=epoch,
            worker=worker,
            num_workers=num_workers,
        )
        if pipeline is None:
            return
        try:
            yield from pipeline
        finally:
            pipeline.close()

    def _open_tracks(self) -> TrackSource | None:
        return None if self._sidecar is None else open_index(self._sidecar)

    def _count_share(self) -> int:
        if not len(self._positions):
            return 0
        share = rank_share(self._lengths, self._settings.rank, self._settings.world_size)
        return int(np.sum(self._lengths[share]))

    # -- reports and end --------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """Counters of this process since the dataset was made here (LD-13); workers have their own.

        Samples, per-stage counts and seconds, fetched bytes, percentiles of the consumer's waits, refill
        stalls, open decoders, and reserved and resident bytes.
        """
        return self._process.get().snapshot()

    def close(self) -> None:
        """End iterations of this process and close its files and decoders; iterating opens them again."""
        reader = self._process.drop()
        if reader is not None:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
