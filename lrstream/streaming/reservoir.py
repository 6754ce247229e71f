"""Decoded pictures of the strategy `gop`, from the decoding of their unit to the last anchor that needs them.

What is decoded and when follows from the plan; here it is carried out. Pictures stay as the decoder gave
them, usually 4:2:0 and so half as large as RGB, and are converted for each sample that is delivered. The
bound is kept by counting, before a unit is decoded, the most bytes that its pictures can take. The plan
fills seven eighths of it. The rest lets the next unit be decoded while earlier anchors are still on their
way, so a unit may have to wait for these, but never for anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import av
import numpy as np
import numpy.typing as npt

from lrstream.errors import DecodeError, LrstreamError
from lrstream.streaming.budget import Lease
from lrstream.streaming.clip import NO_PICTURE, Clip
from lrstream.streaming.decode import DecoderPool, PictureSink, decode_pictures
from lrstream.streaming.episode import EpisodeRecord
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.picture_needs import count_needs
from lrstream.streaming.pictures import PictureConverter
from lrstream.streaming.pool import AnchorPlan
from lrstream.streaming.strategies import UnitEntry

__all__ = ["HeldAnchor", "PictureReservoir"]

Job = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Unit:
    """A unit that is being decoded.

    Attributes:
        wanted: Presentation ranks to keep, by number of the camera.
        waiting: What to do when it is decoded; None once it is.
    """

    wanted: dict[int, list[int]]
    waiting: list[Job] | None = field(default_factory=list)


class _Kept(NamedTuple):
    """A picture as the decoder gave it, and the bytes of its planes."""

    picture: av.VideoFrame
    num_bytes: int


@dataclass(slots=True, eq=False)
class _HeldCamera:
    """Pictures of one camera of one episode.

    Attributes:
        key: Feature key.
        ranks: Presentation rank of each row's picture.
        deltas: Rows that an anchor needs, relative to it.
        counts: Needs of each rank that are not met yet.
        pictures: By rank; the unit while it is being decoded, the error where that has failed.
        size_bytes: What a picture counts as.
        known_bytes: Bytes of the planes of a picture, by its format, width and height: they are all that a
            decoder goes by when it takes memory for pictures.
    """

    key: str
    ranks: list[int]
    deltas: tuple[int, ...]
    counts: list[int]
    pictures: dict[int, _Kept | _Unit | BaseException]
    size_bytes: int
    known_bytes: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def ranks_around(self, frame: int) -> list[int]:
        """Ranks that an anchor needs, those of repeated rows as often as they are."""
        if self.deltas == (0,):
            return [self.ranks[frame]]
        last = len(self.ranks) - 1
        return [self.ranks[min(max(frame + delta, 0), last)] for delta in self.deltas]


@dataclass(slots=True, eq=False)
class _HeldEpisode:
    """An episode with pictures in the reservoir; its coded bytes may be gone."""

    record: EpisodeRecord
    cameras: list[_HeldCamera]
    num_left: int


class HeldAnchor:
    """The right to the pictures of one anchor, and the source that its sample takes them from.

    Used like `lrstream.streaming.budget.Lease`: at its end the pictures are let go.

    Args:
        held: The episode.
        end: Called once, when it ends.
        converter: Gives the converter of the calling thread.
    """

    def __init__(
        self, held: _HeldEpisode, end: Callable[[], None], converter: Callable[[], PictureConverter]
    ) -> None:
        self._held = held
        self._end: Callable[[], None] | None = end
        self._converter = converter

    def write(self, clip: Clip, ranks: Sequence[int], sink: PictureSink) -> None:
        """Hand pictures of a clip to `sink`, by their places in `ranks`.

        Raises:
            DecodeError: One of them could not be decoded.
        """
        camera = next(camera for camera in self._held.cameras if camera.key == clip.camera)
        converter = self._converter()
        for position, rank in enumerate(ranks):
            kept = camera.pictures[rank]
            if isinstance(kept, BaseException):
                raise kept
            if not isinstance(kept, _Kept):
                raise LrstreamError("A sample was made before its pictures had been decoded.")
            sink(position, kept.picture, converter)

    def release(self) -> None:
        """Let go of the pictures; more calls do nothing."""
        end, self._end = self._end, None
        if end is not None:
            end()

    @property
    def payload(self) -> EpisodeRecord:
        """The episode, without its coded bytes."""
        return self._held.record


class PictureReservoir:
    """Decoded pictures of one pipeline, within `AnchorPlan.reservoir_bytes`. Thread-safe; not to be forked.

    Args:
        plan: What is delivered.
        left: From `PlanTail`: anchors to be delivered where these are not all.
        decoders: Where decoders come from.
        metrics: Where times and counts go.
    """

    def __init__(
        self,
        plan: AnchorPlan,
        left: Mapping[int, npt.NDArray[np.int32]],
        decoders: DecoderPool,
        metrics: LoaderMetrics,
    ) -> None:
        self._plan = plan
        self._left = dict(left)
        self._decoders = decoders
        self._metrics = metrics
        self._deltas: list[tuple[int, ...]] = [(0,)] * len(plan.gops.cameras)
        for group in plan.gops.groups(plan.picture_windows):
            for camera in group.cameras:
                self._deltas[camera] = group.deltas
        self._lock = threading.Lock()
        self._unit_done = threading.Condition(self._lock)
        self._episodes: dict[int, _HeldEpisode] = {}
        self._leases: dict[int, Lease[EpisodeRecord]] = {}  # of units that are not decoded yet
        self._counted_bytes = 0
        self._held_bytes = self._peak_held_bytes = 0
        self._local = threading.local()

    @property
    def held_bytes(self) -> int:
        """Bytes of the planes of all pictures that are kept now."""
        return self._held_bytes

    @property
    def peak_held_bytes(self) -> int:
        """Largest `held_bytes` so far."""
        return self._peak_held_bytes

    @property
    def num_pending(self) -> int:
        """Units that are not decoded yet."""
        return len(self._leases)

    def enter(self, entry: UnitEntry, lease: Lease[EpisodeRecord], run: Callable[[Job], None]) -> bool:
        """Decode a unit, if its pictures fit.

        Args:
            entry: The unit.
            lease: Of its episode; the reservoir's until the unit is decoded, unless it does not fit.
            run: Runs a job on some thread, not in this call.

        Returns:
            Whether it fits; otherwise nothing has happened.
        """
        with self._lock:
            held = self._episodes.get(entry.episode)
            if held is None:
                held = self._episodes[entry.episode] = self._hold(entry.episode, lease.payload)
            unit = _Unit({})
            size_bytes = 0
            for number, camera in enumerate(held.cameras):
                # Two rows may share a picture, also across units.
                wanted = [
                    rank
                    for rank in dict.fromkeys(camera.ranks[entry.first : entry.stop])
                    if rank != NO_PICTURE and camera.counts[rank] and rank not in camera.pictures
                ]
                size_bytes += len(wanted) * camera.size_bytes
                unit.wanted[number] = wanted
            if self._counted_bytes + size_bytes > self._plan.reservoir_bytes:
                return False
            self._counted_bytes += size_bytes
            for number, wanted in unit.wanted.items():
                held.cameras[number].pictures.update(dict.fromkeys(wanted, unit))
            self._leases[id(unit)] = lease
        run(partial(self._decode, unit, held, lease))
        return True

    def wait_for_unit(self) -> bool:
        """Wait until a unit is decoded and has let go of its episode; False if none is on its way."""
        with self._lock:
            pending = set(self._leases)
            return bool(pending) and self._unit_done.wait_for(lambda: not pending <= self._leases.keys())

    def anchor(self, episode: int, frame: int) -> HeldAnchor:
        """The right to the pictures of an anchor whose units have all entered."""
        held = self._episodes[episode]
        return HeldAnchor(held, partial(self._release, episode, held, frame), self._converter)

    def when_ready(self, episode: int, frame: int, job: Job) -> bool:
        """Call `job` once the pictures of an anchor are decoded, on the thread that decodes the last one.

        Returns:
            False if they are decoded already; then `job` is not called.
        """
        if not self._leases:
            return False
        with self._lock:
            units = {
                id(unit): unit
                for camera in self._episodes[episode].cameras
                for rank in camera.ranks_around(frame)
                if isinstance(unit := camera.pictures.get(rank), _Unit)
            }
            countdown = _Countdown(len(units), job)
            for unit in units.values():
                assert unit.waiting is not None, "a decoded unit is replaced by its pictures"
                unit.waiting.append(countdown)
        return bool(units)

    def close(self) -> None:
        """Let everything go."""
        with self._lock:
            self._episodes.clear()
            self._unit_done.notify_all()
            self._counted_bytes = self._held_bytes = 0
        while self._leases:
            self._leases.popitem()[1].release()

    def _hold(self, episode: int, record: EpisodeRecord) -> _HeldEpisode:
        anchors = self._left.pop(episode, None)
        if anchors is None:
            anchors = self._plan.anchors_of(episode)
        cameras = []
        for number, key in enumerate(self._plan.gops.cameras):
            camera = record.cameras[key]
            needs = count_needs(anchors, len(record), np.array(self._deltas[number], dtype=np.int64)).tolist()
            counts = [0] * len(camera.clip.table)
            ranks = camera.ranks.tolist()
            for rank, count in zip(ranks, needs, strict=True):
                if rank != NO_PICTURE:
                    counts[rank] += count
            size_bytes = int(self._plan.gops.picture_bytes[episode, number])
            cameras.append(_HeldCamera(key, ranks, self._deltas[number], counts, {}, size_bytes))
        # Rows are needed to the end, coded bytes only by the units.
        without_bytes = {
            key: replace(camera, clip=replace(camera.clip, payload=b""))
            for key, camera in record.cameras.items()
        }
        return _HeldEpisode(replace(record, cameras=without_bytes), cameras, len(anchors))

    def _decode(self, unit: _Unit, held: _HeldEpisode, lease: Lease[EpisodeRecord]) -> None:
        errors: dict[int, BaseException] = {}
        with lease as record, self._metrics.timed("unit"):
            for number, ranks in unit.wanted.items():
                camera = held.cameras[number]
                try:
                    sink = partial(self._keep, camera, ranks)
                    decode_pictures(record.cameras[camera.key].clip, ranks, sink, self._decoders)
                except BaseException as error:  # noqa: BLE001  (raised at the anchors that it concerns)
                    errors[number] = error
        with self._lock:
            for number, failure in errors.items():
                pictures = held.cameras[number].pictures
                for rank in unit.wanted[number]:
                    if pictures.get(rank) is unit:
                        pictures[rank] = failure
            # Last: `when_ready` takes it without the lock that no unit is left for all pictures being there.
            self._leases.pop(id(unit), None)
            self._unit_done.notify_all()
            waiting, unit.waiting = unit.waiting, None
        self._metrics.add_pictures(sum(map(len, unit.wanted.values())))
        for job in waiting or ():
            job()

    def _keep(
        self,
        camera: _HeldCamera,
        ranks: list[int],
        position: int,
        picture: av.VideoFrame,
        converter: PictureConverter,
    ) -> None:
        """Take a decoded picture, as it is."""
        kind = picture.format.name, picture.width, picture.height
        num_bytes = camera.known_bytes.get(kind)
        if num_bytes is None:
            num_bytes = camera.known_bytes[kind] = sum(plane.buffer_size for plane in picture.planes)
        if num_bytes > camera.size_bytes:
            raise DecodeError(
                f"A picture of camera {camera.key} has {picture.width}x{picture.height} pixels of "
                f"{picture.format.name}, {num_bytes} bytes, but its file promises at most "
                f"{camera.size_bytes} bytes.",
                hint="The video changes its size or format on the way: use another sampling_strategy.",
                camera=camera.key,
            )
        with self._lock:
            camera.pictures[ranks[position]] = _Kept(picture, num_bytes)
            self._held_bytes += num_bytes
            self._peak_held_bytes = max(self._peak_held_bytes, self._held_bytes)

    def _release(self, episode: int, held: _HeldEpisode, frame: int) -> None:
        freed = []  # given back to the decoder outside of the lock
        with self._lock:
            for camera in held.cameras:
                for rank in camera.ranks_around(frame):
                    if rank == NO_PICTURE:
                        continue
                    camera.counts[rank] -= 1
                    if camera.counts[rank] == 0:
                        kept = camera.pictures.pop(rank, None)
                        self._counted_bytes -= camera.size_bytes
                        if isinstance(kept, _Kept):
                            self._held_bytes -= kept.num_bytes
                            freed.append(kept)
            held.num_left -= 1
            if held.num_left == 0:
                self._episodes.pop(episode, None)

    def _converter(self) -> PictureConverter:
        converter = getattr(self._local, "converter", None)
        if converter is None:
            converter = self._local.converter = PictureConverter()
        return converter


class _Countdown:
    """Calls a job at the last of so many calls.

    Args:
        count: How many.
        job: What to call.
    """

    def __init__(self, count: int, job: Job) -> None:
        self._left = count
        self._job = job
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._job()
