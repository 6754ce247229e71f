"""`lrstream validate --deep`: are the pictures that training would get the right ones? (K13, MP-6)

Every picture of the chosen episodes is decoded twice. Once as training does it: byte ranges from the
sidecar, packets into a decoder. Once without lrstream's index: FFmpeg demuxes and decodes the whole file in
order, and a row's picture is the one whose time is nearest. Both must be equal, pixel for pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from lrstream.commands.deep_pictures import digest_of_picture, digest_of_pixels, pictures_in_order
from lrstream.commands.episode_spec import parse_episode_spec
from lrstream.commands.inspect_source import InspectedDataset, SourceOptions, open_metadata, use_index
from lrstream.commands.progress import Progress, no_progress
from lrstream.commands.validate import ValidateResult
from lrstream.errors import DecodeError, LrstreamError
from lrstream.index.open import ArchiveIndex
from lrstream.layout.layout import resolve_selection
from lrstream.layout.rows import EpisodeRows
from lrstream.mp4.codec_config import CodecConfig, codec_configuration
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.identity import SourceFile
from lrstream.sidecar.index_source import index_source
from lrstream.sidecar.problems import Problem, problem_of
from lrstream.storage.byte_source import ByteSource
from lrstream.storage.store import DatasetStore
from lrstream.streaming.decode import DecoderPool, decode_pictures
from lrstream.streaming.episode import CameraRecord
from lrstream.streaming.fetch import EpisodeLoader
from lrstream.streaming.metrics import LoaderMetrics
from lrstream.streaming.pictures import PictureConverter
from lrstream.streaming.sources import TrackSource

__all__ = [
    "DEFAULT_SAMPLE",
    "DecoderReport",
    "DeepReport",
    "compare_pictures",
    "validate_pictures",
]

DEFAULT_SAMPLE = 8
"""Episodes compared unless said otherwise."""

_TOLERANCE_S = 1e-4
# Files of one codec that are tried before its decoder counts as unusable.
_FILES_TRIED = 3
# FFmpeg counts in ticks of the file's clock and seconds are rounded; neighbours are a frame apart.
_SAME_TIME_S = 1e-3


@dataclass(frozen=True, slots=True)
class DecoderReport:
    """One codec of the dataset, and what decodes it here.

    Attributes:
        codec: FFmpeg's name of the codec.
        fourcc: Sample entry.
        decoder: Name of the decoder; None where none is usable.
        num_files: Files of the dataset that need it.
    """

    codec: str
    fourcc: str
    decoder: str | None
    num_files: int


@dataclass(frozen=True, slots=True)
class DeepReport:
    """What was compared.

    Attributes:
        pyav: Version of PyAV.
        ffmpeg: Versions of FFmpeg's libraries.
        decoders: Every codec of the dataset.
        episodes: Episodes compared.
        num_pictures: Pictures compared.
        num_different: Pictures that differ.
        problems: What is wrong.
    """

    pyav: str
    ffmpeg: dict[str, str]
    decoders: tuple[DecoderReport, ...]
    episodes: tuple[int, ...]
    num_pictures: int
    num_different: int
    problems: tuple[Problem, ...]


def validate_pictures(
    opened: InspectedDataset,
    positions: NDArray[np.int64],
    *,
    sample: int | None = DEFAULT_SAMPLE,
    progress: Progress = no_progress,
) -> DeepReport:
    """Check that every codec has a decoder, and compare pictures; problems are collected, not raised.

    Args:
        opened: The dataset.
        positions: Episodes that may be compared, as positions in the episode table.
        sample: How many of them, evenly spaced; None for all.
        progress: Told about finished files.
    """
    decoders, usable, problems = _check_decoders(opened)
    chosen = _evenly(positions, sample) if opened.tracks is not None else positions[:0]
    comparison = _Comparison(opened, usable, problems)
    try:
        comparison.run(chosen, progress)
    finally:
        comparison.close()
    return DeepReport(
        pyav=av.__version__,
        ffmpeg={name: ".".join(map(str, version)) for name, version in sorted(av.library_versions.items())},
        decoders=tuple(decoders),
        episodes=tuple(opened.layout.episodes.episode_index[chosen].tolist()),
        num_pictures=comparison.num_pictures,
        num_different=comparison.num_different,
        problems=tuple(problems),
    )


def compare_pictures(
    result: ValidateResult,
    options: SourceOptions,
    *,
    episodes: str | None = None,
    sample: int | None = DEFAULT_SAMPLE,
    progress: Progress = no_progress,
) -> tuple[ValidateResult, DeepReport]:
    """Go on from where `validate_target` ended, with the sidecar that it has checked.

    Args:
        result: What was found so far, of a dataset.
        options: The dataset.
        episodes: Episodes that may be compared, as `parse_episode_spec` takes them; None for all.
        sample: As `validate_pictures`.
        progress: As `validate_pictures`.

    Returns:
        The result with what is new added to it, and what was compared.

    Raises:
        LrstreamError: The metadata of the dataset, or the sidecar as a whole, cannot be used.
    """
    layout = open_metadata(options, contradictions=[])  # which `validate_target` has listed
    spec = None if episodes is None else parse_episode_spec(episodes)
    available = layout.episodes.episode_index.tolist()
    positions = resolve_selection(layout, None if spec is None else spec.select(available))
    tracks: TrackSource | None = None
    if layout.video_files():
        # Without a sidecar, videos are indexed as they are needed, and nothing is kept.
        tracks = _FreshIndex(layout.store) if result.sidecar is None else ArchiveIndex(result.sidecar)
    with use_index(layout, tracks, result.sidecar, None) as opened:
        report = validate_pictures(opened, positions, sample=sample, progress=progress)
    # A file that is known to be unusable was looked at in vain here, which is no news.
    known = {problem.source for problem in result.problems if problem.episode_index is None}
    new = [item for item in report.problems if item.episode_index is not None or item.source not in known]
    problems = (*result.problems, *new)
    num_errors = sum(problem.severity == "error" for problem in problems)
    return (
        replace(result, problems=problems, num_errors=num_errors, num_warnings=len(problems) - num_errors),
        replace(report, problems=tuple(new)),
    )


class _FreshIndex:
    """Sample tables read from the videos themselves when they are asked for."""

    def __init__(self, store: DatasetStore) -> None:
        self._store = store

    def track(self, file_path: str) -> TrackIndex:
        return index_source(self._store, SourceFile(file_path))

    def fingerprint(self, file_path: str) -> None:
        """The tables were read from the file as it is."""

    def close(self) -> None:
        """Nothing is held."""


def _evenly(positions: NDArray[np.int64], sample: int | None) -> NDArray[np.int64]:
    if sample is None or sample >= len(positions):
        return positions
    return positions[np.linspace(0, len(positions) - 1, sample).round().astype(np.int64)]


def _check_decoders(opened: InspectedDataset) -> tuple[list[DecoderReport], set[str], list[Problem]]:
    """Open a decoder for each codec, and decode the first keyframe of a file that needs it.

    Returns:
        The decoders, the files that they serve, and problems.
    """
    configs: dict[tuple[str, str], CodecConfig] = {}
    paths: dict[tuple[str, str], list[str]] = {}
    usable: set[str] = set()
    problems: list[Problem] = []
    for path in opened.layout.video_files() if opened.tracks is not None else ():
        try:
            with opened.files.use(path) as file:
                config = codec_configuration(file.track.stsd_body, file_path=path)
        except LrstreamError as error:
            problems.append(problem_of(error, source=path))
            continue
        key = (config.codec, config.fourcc)
        configs.setdefault(key, config)
        paths.setdefault(key, []).append(path)
    reports = []
    for key, config in configs.items():
        pool = DecoderPool(1)
        name: str | None = None
        try:
            with pool.lend(config, is_strict=False) as decoder:
                name = decoder.context.codec.name
        except DecodeError as error:
            # No decoder for the codec at all: said once, and nothing of it can be compared.
            problems.append(problem_of(error, source=paths[key][0]))
        finally:
            pool.close()
        reports.append(DecoderReport(key[0], key[1], name, len(paths[key])))
        if name is not None:
            usable.update(paths[key])
            problems += _try_decoder(opened, config, paths[key][:_FILES_TRIED])
    return reports, usable, problems


def _try_decoder(opened: InspectedDataset, config: CodecConfig, paths: list[str]) -> list[Problem]:
    """Decode one keyframe; a decoder that opens may still be unable to (K13), or the file is damaged.

    Returns:
        Nothing if one of the files could be decoded; else what happened with each.
    """
    problems = []
    for path in paths:
        pool = DecoderPool(1)
        try:
            with pool.lend(config, is_strict=False) as decoder, opened.files.use(path) as file:
                samples = file.track.samples
                at = int(samples.sync_samples[0])
                start = int(samples.offsets_bytes[at])
                data = file.source.read(start, start + int(samples.sizes_bytes[at]))
                if [*decoder.context.decode(av.Packet(data)), *decoder.context.decode(None)]:
                    return []
            reason = "it gave no picture"
        except LrstreamError as error:
            reason = error.message
        except (av.error.FFmpegError, NotImplementedError) as error:
            reason = str(error)
        finally:
            pool.close()
        message = f"The {config.codec} decoder refused the first keyframe of {path}: {reason}."
        hint = (
            "If every file of this codec fails, install the PyAV wheels from PyPI; otherwise the file is "
            "damaged."
        )
        problems.append(Problem("decode", "error", path, None, message, hint))
    return problems


class _Comparison:
    """Decodes episodes both ways, file by file, and keeps digests rather than pictures."""

    def __init__(self, opened: InspectedDataset, usable: set[str], problems: list[Problem]) -> None:
        self._opened = opened
        self._usable = usable
        self._problems = problems
        self._loader = EpisodeLoader(
            opened.store, opened.layout, opened.tracks, tolerance_s=_TOLERANCE_S, metrics=LoaderMetrics()
        )
        self._pool = DecoderPool(2)
        self.num_pictures = 0
        self.num_different = 0

    def run(self, chosen: NDArray[np.int64], progress: Progress) -> None:
        work: dict[tuple[str, str], list[int]] = {}
        for position in chosen.tolist():
            for camera, columns in self._opened.layout.episodes.cameras.items():
                work.setdefault((columns.path(position), camera), []).append(position)
        for done, ((path, camera), positions) in enumerate(sorted(work.items())):
            progress(done, len(work), "files compared")
            if path in self._usable:
                with self._opened.files.use(path) as file:
                    self._compare_file(path, camera, positions, file.source)
        progress(len(work), len(work), "files compared")

    def close(self) -> None:
        self._pool.close()
        self._loader.close()

    def _compare_file(self, path: str, camera: str, positions: list[int], source: ByteSource) -> None:
        is_depth = self._opened.layout.info.features[camera].kind == "depth"
        wanted: list[tuple[int, NDArray[np.float64], list[bytes | None]]] = []
        for position in positions:
            try:
                parts = self._loader.parts(position)
                rows: EpisodeRows = parts[""]()
                from_s = float(self._opened.layout.episodes.cameras[camera].from_s[position])
                record = CameraRecord.match(parts[camera](), from_s, rows.timestamp_s, _TOLERANCE_S)
                digests = self._through_sidecar(record, is_depth=is_depth)
            except LrstreamError as error:
                self._problems.append(problem_of(error, source=path, episode_index=self._name(position)))
                continue
            wanted.append((position, from_s + rows.timestamp_s.astype(np.float64), digests))
        if not wanted:
            return
        low = min(float(times.min()) for _, times, _ in wanted) - 1.0
        high = max(float(times.max()) for _, times, _ in wanted) + 1.0
        reference: dict[float, bytes] = {}
        try:
            for time_s, picture in pictures_in_order(source):
                if low <= time_s <= high:
                    reference[time_s] = digest_of_picture(picture, is_depth=is_depth)
        except (av.error.FFmpegError, NotImplementedError) as error:
            message = f"{path} cannot be decoded from its beginning: {error}."
            hint = "The file is damaged: restore it from its source."
            self._problems.append(Problem("decode", "error", path, None, message, hint))
            return
        for position, times, digests in wanted:
            self._compare(path, camera, position, times, digests, reference)

    def _through_sidecar(self, record: CameraRecord, *, is_depth: bool) -> list[bytes | None]:
        """Digest of every row's picture as training decodes it; None where a row has none."""
        ranks = record.ranks.tolist()
        distinct = sorted({rank for rank in ranks if rank >= 0})
        found: dict[int, bytes] = {}

        def take(position: int, picture: av.VideoFrame, converter: PictureConverter) -> None:
            if is_depth:
                found[distinct[position]] = digest_of_picture(picture, is_depth=True)
                return
            # The way to the tensor is part of what is compared.
            planes = np.empty((3, picture.height, picture.width), dtype=np.uint8)
            converter.write_rgb(picture, planes)
            found[distinct[position]] = digest_of_pixels(planes.transpose(1, 2, 0))

        decode_pictures(record.clip, distinct, take, self._pool)
        return [found.get(rank) for rank in ranks]

    def _compare(
        self,
        path: str,
        camera: str,
        position: int,
        times: NDArray[np.float64],
        digests: list[bytes | None],
        reference: dict[float, bytes],
    ) -> None:
        shown = np.array(sorted(reference))
        different, absent = [], []
        for frame, (time_s, digest) in enumerate(zip(times.tolist(), digests, strict=True)):
            nearest = float(shown[np.argmin(np.abs(shown - time_s))]) if shown.size else np.inf
            if digest is None or abs(nearest - time_s) > _SAME_TIME_S:
                absent.append(frame)
            elif digest != reference[nearest]:
                different.append(frame)
        self.num_pictures += len(digests) - len(absent)
        self.num_different += len(different)
        if absent:
            self._tell(
                "picture-missing",
                path,
                position,
                f"{len(absent)} of {len(digests)} frames have no picture of camera {camera} at their time, "
                f"the first is frame {absent[0]}",
                "The table's times and the video do not fit: repair the dataset or leave the episode out.",
            )
        if different:
            self._tell(
                "pixels-differ",
                path,
                position,
                f"{len(different)} of {len(digests)} pictures of camera {camera} differ between the "
                f"sidecar and a decode of the whole file, the first is frame {different[0]}",
                "The file is damaged, or was changed since it was indexed: `lrstream build --force`.",
            )

    def _tell(self, code: str, path: str, position: int, what: str, hint: str) -> None:
        name = self._name(position)
        self._problems.append(
            Problem(code, "error", path, name, f"Episode {name}, file {path}: {what}.", hint)
        )

    def _name(self, position: int) -> int:
        return int(self._opened.layout.episodes.episode_index[position])
