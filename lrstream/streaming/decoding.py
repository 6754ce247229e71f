"""Decode threads: anchors in, samples out, in whatever order they are done."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from lrstream.streaming.batches import BatchMemory, Place, Sample
from lrstream.streaming.budget import Lease
from lrstream.streaming.decode import DecoderPool
from lrstream.streaming.episode import EpisodeRecord
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.samples import SampleBuilder
from lrstream.streaming.threads import JobThreads

__all__ = ["DecodeStage", "Outcome"]


class Outcome(NamedTuple):
    """What a decode thread has made of an anchor."""

    number: int
    sample: Sample | None
    error: BaseException | None


class _Anchor(NamedTuple):
    """An anchor that waits to be decoded."""

    number: int
    lease: Lease[EpisodeRecord]
    frame: int
    place: Place | None


@dataclass(slots=True, eq=False)
class _Job:
    """Anchors of one GOP that are decoded together, unless a thread has begun before the next one came."""

    anchors: list[_Anchor] = field(default_factory=list)


class DecodeStage:
    """Decode threads and the queue of what they have made. Fed by one thread.

    Anchors whose pictures lie in the same GOP are decoded in one go where they wait at the same time.

    Args:
        builder: Makes samples.
        decoders: Open decoders.
        metrics: Where times go.
        num_threads: Most threads.
        is_transforming: Whether image transforms run here.
        memory: What stacks the samples later.
    """

    def __init__(
        self,
        builder: SampleBuilder,
        decoders: DecoderPool,
        metrics: LoaderMetrics,
        *,
        num_threads: int,
        is_transforming: bool,
        memory: BatchMemory | None = None,
    ) -> None:
        self._builder = builder
        self._decoders = decoders
        self._is_transforming = is_transforming and builder.image_transforms is not None
        self._metrics = metrics
        self._memory = memory
        self._threads = JobThreads("lrstream-decode", num_threads)
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], _Job] = {}  # that no thread has begun, by episode and GOP
        self._leases: dict[int, Lease[EpisodeRecord]] = {}  # of anchors that are not decoded yet
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def submit(
        self, number: int, lease: Lease[EpisodeRecord], frame: int, place: Place | None = None
    ) -> None:
        """Decode an anchor; its outcome arrives in `outcomes`.

        Args:
            number: Name of the anchor in its outcome.
            lease: Its episode; released once it is decoded.
            frame: The anchor's frame.
            place: Where to write the sample.
        """
        self._leases[number] = lease
        anchor = _Anchor(number, lease, frame, place)
        episode = lease.payload
        gop = episode.gop_of(frame)
        key = (id(episode), gop)
        with self._lock:
            job = self._waiting.get(key)
            if job is not None:
                job.anchors.append(anchor)
                return
            job = _Job([anchor])
            if gop >= 0:
                self._waiting[key] = job
        self._threads.submit(partial(self._run, key, job))

    def close(self, timeout_s: float) -> bool:
        """Drop anchors that are not being decoded, with their bytes; whether all threads have ended."""
        has_ended = self._threads.close(timeout_s)
        while self._leases:
            self._leases.popitem()[1].release()
        return has_ended

    def _run(self, key: tuple[int, int], job: _Job) -> None:
        with self._lock:
            if self._waiting.get(key) is job:
                del self._waiting[key]
        self._decode(job.anchors)

    def _decode(self, anchors: list[_Anchor]) -> None:
        try:
            with self._metrics.timed("decode", len(anchors)):
                samples = self._builder.build(
                    anchors[0].lease.payload,
                    [anchor.frame for anchor in anchors],
                    self._decoders,
                    memory=self._memory,
                    places=[anchor.place for anchor in anchors],
                )
        except BaseException as error:  # noqa: BLE001  (raised again where the sample is waited for)
            if len(anchors) > 1:
                # Which of them is at fault? The others are right, and come before the error if it is theirs.
                for anchor in anchors:
                    self._decode([anchor])
            else:
                self._release(anchors)
                self.outcomes.put(Outcome(anchors[0].number, None, error))
            return
        # The bytes are given back before a sample is announced: whoever has all samples may rely on it
        # that nothing is leased any more.
        self._release(anchors)
        for anchor, sample in zip(anchors, samples, strict=True):
            self.outcomes.put(self._finish(anchor.number, sample))

    def _finish(self, number: int, sample: Sample) -> Outcome:
        if not self._is_transforming:
            return Outcome(number, sample, None)
        try:
            with self._metrics.timed("transform"):
                return Outcome(number, self._builder.transform(sample), None)
        except BaseException as error:  # noqa: BLE001  (raised again where the sample is waited for)
            return Outcome(number, None, error)

    def _release(self, anchors: list[_Anchor]) -> None:
        for anchor in anchors:
            anchor.lease.release()
            self._leases.pop(anchor.number, None)
