"""Decode threads: anchors in, samples out, in whatever order they are done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from lrstream.streaming.batches import BatchMemory, Place, Sample
from lrstream.streaming.budget import Lease
from lrstream.streaming.decode import DecoderPool
from lrstream.streaming.episode import EpisodeRecord
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.reservoir import HeldAnchor, PictureReservoir
from lrstream.streaming.samples import SampleBuilder
from lrstream.streaming.threads import CallersThread, JobThreads, ThreadShare

__all__ = ["DecodeStage", "Outcome", "QueuedAnchor"]


class Outcome(NamedTuple):
    """What a decode thread has made of an anchor."""

    number: int
    sample: Sample | None
    error: BaseException | None


class QueuedAnchor(NamedTuple):
    """An anchor that is to be decoded.

    Attributes:
        number: Its name in the outcome.
        lease: Its episode, or its pictures where they are in the reservoir; released once it is decoded.
        episode: Its episode in the plan.
        frame: Its frame in the episode.
        place: Where to write the sample.
    """

    number: int
    lease: Lease[EpisodeRecord] | HeldAnchor
    episode: int
    frame: int
    place: Place | None


_GopKey = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Job:
    """Anchors that one thread decodes, those of one GOP together."""

    gops: dict[_GopKey, list[QueuedAnchor]] = field(default_factory=dict)


class DecodeStage:
    """Decode threads and the queue of what they have made. Fed by one thread.

    Anchors whose pictures lie in the same GOP are decoded in one go where they wait at the same time.

    Args:
        builder: Makes samples.
        decoders: Open decoders.
        metrics: Where times go.
        num_threads: Most threads. Samples without pictures are made by the thread that submits them.
        threads: Threads that several stages use; None = its own.
        is_transforming: Whether image transforms run here.
        reservoir: Decoded pictures that anchors wait for; None = each anchor is decoded for itself.
        memory: What stacks the samples later.
    """

    def __init__(
        self,
        builder: SampleBuilder,
        decoders: DecoderPool,
        metrics: LoaderMetrics,
        *,
        num_threads: int,
        threads: JobThreads | None = None,
        is_transforming: bool,
        reservoir: PictureReservoir | None = None,
        memory: BatchMemory | None = None,
    ) -> None:
        self._builder = builder
        self._decoders = decoders
        self._is_transforming = is_transforming and builder.image_transforms is not None
        self._metrics = metrics
        self._memory = memory
        self._reservoir = reservoir
        self._threads: JobThreads | ThreadShare | CallersThread
        if not builder.has_pictures:
            self._threads = CallersThread()
        elif threads is None:
            self._threads = JobThreads("lrstream-decode", num_threads)
        else:
            self._threads = ThreadShare(threads)
        self._lock = threading.Lock()
        self._waiting: dict[_GopKey, _Job] = {}  # that no thread has begun, by episode and GOP
        # Of anchors that are not decoded yet.
        self._leases: dict[int, Lease[EpisodeRecord] | HeldAnchor] = {}
        self.outcomes: queue.SimpleQueue[list[Outcome]] = queue.SimpleQueue()

    def submit(self, anchors: Sequence[QueuedAnchor]) -> None:
        """Decode anchors on one thread; their outcomes arrive in `outcomes`, together if nothing is faster.

        Each list that is handed over wakes a thread, so a few anchors at a time cost less than single ones.
        """
        for anchor in anchors:
            self._leases[anchor.number] = anchor.lease
        if self._reservoir is not None:
            ready = []
            for anchor in anchors:
                alone = partial(self.run, partial(self._deliver, [[anchor]]))
                if not self._reservoir.when_ready(anchor.episode, anchor.frame, alone):
                    ready.append([anchor])
            if ready:
                self.run(partial(self._deliver, ready))
            return
        job = _Job()
        with self._lock:
            for anchor in anchors:
                episode = anchor.lease.payload
                gop = self._builder.gop_of(episode, anchor.frame)
                # Where nothing is known of GOPs, there is nothing to share either.
                key = (id(episode), gop if gop >= 0 else -1 - anchor.frame)
                # One that waits is decoded earlier and has room for all of its GOP.
                self._waiting.setdefault(key, job).gops.setdefault(key, []).append(anchor)
        if job.gops:
            self.run(partial(self._begin, job))

    def run(self, job: Callable[[], None]) -> None:
        """Run something else on the same threads, in its turn."""
        self._threads.submit(job)

    def close(self, timeout_s: float) -> bool:
        """Drop anchors that are not being decoded, with their bytes; whether all threads have ended."""
        has_ended = self._threads.close(timeout_s)
        while self._leases:
            self._leases.popitem()[1].release()
        if self._reservoir is not None:
            self._reservoir.close()
        return has_ended

    def _begin(self, job: _Job) -> None:
        with self._lock:
            for key in job.gops:
                del self._waiting[key]
        self._deliver(job.gops.values())

    def _deliver(self, groups: Collection[list[QueuedAnchor]]) -> None:
        with self._metrics.timed("decode", sum(map(len, groups))):
            outcomes = [outcome for anchors in groups for outcome in self._decode(anchors)]
        if self._is_transforming:
            outcomes = [self._transform(outcome) for outcome in outcomes]
        self.outcomes.put(outcomes)

    def _decode(self, anchors: list[QueuedAnchor]) -> list[Outcome]:
        lease = anchors[0].lease
        try:
            samples = self._builder.build(
                lease.payload,
                [anchor.frame for anchor in anchors],
                lease if isinstance(lease, HeldAnchor) else self._decoders,
                memory=self._memory,
                places=[anchor.place for anchor in anchors],
            )
        except BaseException as error:
            if isinstance(self._threads, CallersThread) and not isinstance(error, Exception):
                raise  # Ctrl-C of whoever asks for samples
            # Raised again where the sample is waited for.
            if len(anchors) > 1:
                # Which of them is at fault? The others are right, and come before the error if it is theirs.
                return [outcome for anchor in anchors for outcome in self._decode([anchor])]
            self._release(anchors)
            return [Outcome(anchors[0].number, None, error)]
        # The bytes are given back before a sample is announced: whoever has all samples may rely on it
        # that nothing is leased any more.
        self._release(anchors)
        return [Outcome(anchor.number, sample, None) for anchor, sample in zip(anchors, samples, strict=True)]

    def _transform(self, outcome: Outcome) -> Outcome:
        if outcome.sample is None:
            return outcome
        try:
            with self._metrics.timed("transform"):
                return outcome._replace(sample=self._builder.transform(outcome.sample))
        except BaseException as error:  # noqa: BLE001  (raised again where the sample is waited for)
            return Outcome(outcome.number, None, error)

    def _release(self, anchors: list[QueuedAnchor]) -> None:
        for anchor in anchors:
            anchor.lease.release()
            self._leases.pop(anchor.number, None)
