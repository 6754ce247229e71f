"""`lrstream inspect dataset`: what streaming this dataset means, camera by camera."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lrstream.commands.inspect_figures import Distribution, TrackFigures, finding
from lrstream.commands.inspect_source import InspectedDataset
from lrstream.commands.inspect_tables import TableReport, inspect_tables
from lrstream.commands.progress import Progress, no_progress
from lrstream.errors import TimestampError
from lrstream.mp4.synthesis import mini_mp4_size
from lrstream.sidecar.problems import Problem

__all__ = ["CameraReport", "DatasetReport", "inspect_dataset"]

# The loader's default tolerance; more than this between a row and its picture ends training.
TOLERANCE_S = 1e-4
_LONG_GOP = 60
_WASTEFUL_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class CameraReport:
    """One video feature.

    Attributes:
        key: Feature key.
        kind: ``video`` or ``depth``.
        num_files: MP4 files.
        codecs: Sample entries in use.
        sizes: Picture sizes in use, ``WIDTHxHEIGHT``.
        num_pictures: Coded pictures in all files.
        source_bytes: Bytes of all files.
        bytes_per_picture: Mean size of a coded picture.
        gop: Lengths of GOPs, pictures.
        has_bframes: Whether some file stores pictures in another order than it shows them.
        num_files_moov_last: Files whose index stands behind the pictures (indexing takes more requests).
        episode_bytes: Exact mini-MP4 size of each episode.
        span_ratio: Pictures in the spans of all episodes for each picture that a row needs.
        drift_s: Largest distance between a row's time and the nearest picture, seconds.
        drift_episode: Episode in which that is; None where no episode could be looked at.
        num_drifting: Episodes in which it is beyond the tolerance.
    """

    key: str
    kind: str
    num_files: int
    codecs: tuple[str, ...]
    sizes: tuple[str, ...]
    num_pictures: int
    source_bytes: int
    bytes_per_picture: float
    gop: Distribution
    has_bframes: bool
    num_files_moov_last: int
    episode_bytes: Distribution
    span_ratio: float
    drift_s: float
    drift_episode: int | None
    num_drifting: int


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """A dataset from outside.

    Attributes:
        root: Where it is.
        codebase_version: Of its layout.
        fps: Frames per second.
        num_episodes: Episodes.
        num_frames: Rows.
        num_tasks: Task strings.
        duration_s: Of all episodes together.
        features: Kind of each feature by key.
        episode_frames: Length of each episode, frames.
        sidecar: The sidecar in use.
        sidecar_origin: ``cache``, ``published`` or ``built``.
        cameras: Video features.
        episode_bytes: Exact mini-MP4 bytes of each episode over all cameras.
        tables: Parquet files of rows.
        findings: What deserves attention.
    """

    root: str
    codebase_version: str
    fps: float
    num_episodes: int
    num_frames: int
    num_tasks: int
    duration_s: float
    features: dict[str, str]
    episode_frames: Distribution
    sidecar: Path | None
    sidecar_origin: str | None
    cameras: tuple[CameraReport, ...]
    episode_bytes: Distribution
    tables: TableReport
    findings: tuple[Problem, ...]


def inspect_dataset(opened: InspectedDataset, *, progress: Progress = no_progress) -> DatasetReport:
    """Look at every file's index and every episode's span; payloads are not read."""
    layout = opened.layout
    info, episodes = layout.info, layout.episodes
    tables, findings = inspect_tables(layout, progress=progress)
    cameras = []
    totals = np.zeros(len(episodes), dtype=np.int64)
    for key in episodes.cameras:
        camera = _Camera(opened, key, progress)
        cameras.append(camera.report())
        findings += camera.findings
        totals += camera.sizes
    return DatasetReport(
        root=layout.store.location.root,
        codebase_version=info.codebase_version,
        fps=info.fps,
        num_episodes=len(episodes),
        num_frames=episodes.num_frames,
        num_tasks=len(layout.tasks),
        duration_s=episodes.num_frames / info.fps,
        features={key: feature.kind for key, feature in info.features.items()},
        episode_frames=Distribution.of(episodes.length),
        sidecar=opened.sidecar,
        sidecar_origin=opened.origin,
        cameras=tuple(cameras),
        episode_bytes=Distribution.of(totals) if cameras else Distribution.of(totals[:0]),
        tables=tables,
        findings=tuple(findings),
    )


class _Camera:
    """Walks over the files of one camera once."""

    def __init__(self, opened: InspectedDataset, key: str, progress: Progress) -> None:
        self._opened = opened
        self._key = key
        self._columns = opened.layout.episodes.cameras[key]
        count = len(opened.layout.episodes)
        self.findings: list[Problem] = []
        self.sizes = np.zeros(count, dtype=np.int64)
        self._span_samples = np.zeros(count, dtype=np.int64)
        self._drift_s = np.full(count, np.nan)
        self._figures: list[TrackFigures] = []
        self._codecs: set[str] = set()
        self._shapes: set[str] = set()
        self._source_bytes = 0
        self._moov_last: list[str] = []
        for number, path in enumerate(self._columns.files):
            progress(number, len(self._columns.files), f"files of {key}")
            self._look_at_file(path, np.flatnonzero(self._columns.file == number))

    def _look_at_file(self, path: str, members: NDArray[np.intp]) -> None:
        opened, episodes = self._opened, self._opened.layout.episodes
        with opened.files.use(path) as file:
            track = file.track
            self._figures.append(TrackFigures.of(track.samples))
            self._codecs.add(track.codec)
            self._shapes.add(f"{track.width}x{track.height}")
            self._source_bytes += track.file_size
            if not track.faststart:
                self._moov_last.append(path)
            presented = np.sort(track.samples.pts_s)
            for position in members.tolist():
                from_s = float(self._columns.from_s[position])
                wanted = from_s + np.arange(int(episodes.length[position])) / opened.layout.info.fps
                self._drift_s[position] = _largest_distance(presented, wanted)
                try:
                    span = opened.spans.span(position, self._key)
                except TimestampError as error:
                    self.findings.append(
                        finding(
                            error.code,
                            error.message,
                            error.hint,
                            severity="error",
                            source=path,
                            episode_index=int(episodes.episode_index[position]),
                        )
                    )
                    continue
                self.sizes[position] = mini_mp4_size(track, span)
                self._span_samples[position] = span.num_samples

    def report(self) -> CameraReport:
        """The camera's part of the report; adds findings about the camera as a whole."""
        episodes = self._opened.layout.episodes
        measured = self.sizes > 0
        gops = Distribution.of(np.concatenate([figures.gops for figures in self._figures]))
        num_pictures = sum(figures.num_frames for figures in self._figures)
        drifting = self._drift_s > TOLERANCE_S
        worst = int(np.argmax(self._drift_s)) if len(episodes) else None
        needed = int(episodes.length[measured].sum())
        report = CameraReport(
            key=self._key,
            kind=self._opened.layout.info.features[self._key].kind,
            num_files=len(self._columns.files),
            codecs=tuple(sorted(self._codecs)),
            sizes=tuple(sorted(self._shapes)),
            num_pictures=num_pictures,
            source_bytes=self._source_bytes,
            bytes_per_picture=sum(figures.picture_bytes for figures in self._figures) / max(1, num_pictures),
            gop=gops,
            has_bframes=any(figures.is_reordered for figures in self._figures),
            num_files_moov_last=len(self._moov_last),
            episode_bytes=Distribution.of(self.sizes[measured]),
            span_ratio=int(self._span_samples.sum()) / needed if needed else 0.0,
            drift_s=0.0 if worst is None else float(self._drift_s[worst]),
            drift_episode=None if worst is None else int(episodes.episode_index[worst]),
            num_drifting=int(drifting.sum()),
        )
        self.findings += _findings_of(report, self._moov_last)
        return report


def _findings_of(camera: CameraReport, moov_last: list[str]) -> list[Problem]:
    found = []
    if camera.num_drifting:
        found.append(
            finding(
                "timestamp-drift",
                f"Camera {camera.key}: in {camera.num_drifting} episodes rows and pictures are more than "
                f"{TOLERANCE_S * 1e3:g} ms apart; the most, {camera.drift_s * 1e3:.3f} ms, in episode "
                f"{camera.drift_episode}.",
                "Training refuses such rows. Repair from_timestamp in meta/episodes, or leave these episodes "
                "out; `lrstream validate` lists them.",
                source=camera.key,
                episode_index=camera.drift_episode,
            )
        )
    if len(camera.codecs) > 1 or len(camera.sizes) > 1:
        found.append(
            finding(
                "mixed-formats",
                f"Camera {camera.key} has files of different formats: {', '.join(camera.codecs)}; "
                f"{', '.join(camera.sizes)}.",
                "Pictures of different sizes cannot be stacked into a batch.",
                source=camera.key,
            )
        )
    if camera.gop.largest >= _LONG_GOP:
        found.append(
            finding(
                "long-gop",
                f"Camera {camera.key} has keyframes up to {camera.gop.largest} pictures apart, so a random "
                f"frame decodes {(camera.gop.largest + 1) / 2:.0f} pictures on average in such a GOP.",
                "Encode with a GOP of 2 (LeRobot's default) for random access.",
                source=camera.key,
            )
        )
    if moov_last:
        found.append(
            finding(
                "moov-last",
                f"Camera {camera.key}: {len(moov_last)} of {camera.num_files} files have their index behind "
                f"the pictures, for example {moov_last[0]}; indexing them takes up to three requests each.",
                "Write them again: ffmpeg -i old.mp4 -c copy -movflags +faststart new.mp4.",
                source=moov_last[0],
            )
        )
    if camera.span_ratio >= _WASTEFUL_RATIO:
        found.append(
            finding(
                "large-spans",
                f"Camera {camera.key}: episodes fetch {camera.span_ratio:.1f} pictures for each one they "
                "need, because they are short or their keyframes far apart.",
                "Start each episode with a keyframe, and use shorter GOPs.",
                source=camera.key,
            )
        )
    return found


def _largest_distance(presented_s: NDArray[np.float64], wanted_s: NDArray[np.float64]) -> float:
    """Largest distance from a wanted time to the nearest presented one, seconds."""
    after = np.clip(np.searchsorted(presented_s, wanted_s), 0, len(presented_s) - 1)
    before = np.maximum(after - 1, 0)
    distance = np.minimum(np.abs(presented_s[after] - wanted_s), np.abs(presented_s[before] - wanted_s))
    return float(distance.max())
