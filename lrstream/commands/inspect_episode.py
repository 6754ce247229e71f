"""`lrstream inspect episode`: where one episode lies, and what fetching it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lrstream.commands.inspect_outputs import check_output
from lrstream.commands.inspect_source import InspectedDataset
from lrstream.commands.inspect_tables import episode_row_groups
from lrstream.errors import NotFoundError, UsageError
from lrstream.mp4.synthesis import mini_mp4, mini_mp4_size, mini_mp4_time_offset_s
from lrstream.sidecar.install import write_atomically

__all__ = ["EpisodeCamera", "EpisodeReport", "EpisodeRows", "inspect_episode", "write_mini_mp4"]


@dataclass(frozen=True, slots=True)
class EpisodeCamera:
    """One camera of the episode; ranges are half-open, sizes in bytes, times in seconds.

    Attributes:
        key: Feature key.
        file: MP4 file.
        file_bytes: Its size.
        codec: Sample entry.
        from_s: Start of the episode in the file's clock.
        to_s: Its end.
        first_sample: First coded picture fetched, in decode order.
        stop_sample: End of those.
        start_byte: First byte fetched.
        stop_byte: End of those.
        num_own_pictures: Pictures presented within [from_s, to_s).
        num_keyframes: Keyframes fetched.
        header_bytes: Synthesized header of the mini-MP4.
        payload_bytes: Bytes fetched.
        mini_mp4_bytes: Exact size of the mini-MP4, which the byte budget counts.
        time_offset_s: To be added to a time in the mini-MP4 to get the time in the file.
        requests: Range requests.
    """

    key: str
    file: str
    file_bytes: int
    codec: str
    from_s: float
    to_s: float
    first_sample: int
    stop_sample: int
    start_byte: int
    stop_byte: int
    num_own_pictures: int
    num_keyframes: int
    header_bytes: int
    payload_bytes: int
    mini_mp4_bytes: int
    time_offset_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """The episode's rows.

    Attributes:
        file: Parquet file.
        first_index: First value of ``index``.
        stop_index: End of those, excluded.
        row_groups: Row groups that have to be read.
        num_row_groups: Row groups of the file.
        read_bytes: Compressed bytes of the columns in these.
    """

    file: str
    first_index: int
    stop_index: int
    row_groups: tuple[int, ...]
    num_row_groups: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """One episode.

    Attributes:
        episode_index: Its number.
        num_frames: Its rows.
        duration_s: Its length, seconds.
        tasks: Its task strings.
        rows: Where its rows are.
        cameras: Where its pictures are.
        mini_mp4_bytes: Exact mini-MP4 bytes of these cameras together.
        video_requests: Range requests for these cameras.
        mini_mp4: Mini-MP4 that was written, if one was asked for.
        contact_sheet: Picture that was written, if one was asked for.
    """

    episode_index: int
    num_frames: int
    duration_s: float
    tasks: tuple[str, ...]
    rows: EpisodeRows
    cameras: tuple[EpisodeCamera, ...]
    mini_mp4_bytes: int
    video_requests: int
    mini_mp4: Path | None = None
    contact_sheet: Path | None = None


def inspect_episode(
    opened: InspectedDataset,
    episode_index: int,
    *,
    camera: str | None = None,
    mini_mp4_path: Path | None = None,
    contact_sheet_path: Path | None = None,
    num_pictures: int = 12,
    force: bool = False,
) -> EpisodeReport:
    """Report on one episode, and write its mini-MP4 or a contact sheet if asked to.

    Args:
        opened: The dataset.
        episode_index: The episode.
        camera: Only this camera; None for all.
        mini_mp4_path: Where to write the mini-MP4 of the one camera.
        contact_sheet_path: Where to write a PNG of evenly spaced frames with their numbers.
        num_pictures: Frames of each camera on the sheet.
        force: Replace existing files.

    Raises:
        NotFoundError: There is no such episode or camera.
        UsageError: The mini-MP4 of several cameras, or a picture of none, is asked for, or an output exists.
        TimestampError: The episode's times do not fit its video.
    """
    layout = opened.layout
    position = layout.episodes.position(episode_index)
    keys = _cameras(opened, camera)
    outputs = [path for path in (mini_mp4_path, contact_sheet_path) if path is not None]
    if outputs and not keys:
        raise UsageError("The dataset has no video, so there is neither a mini-MP4 nor a contact sheet.")
    if mini_mp4_path is not None and len(keys) > 1:
        raise UsageError(
            f"A mini-MP4 holds one camera, but the dataset has {len(keys)}: {', '.join(keys)}.",
            hint="Choose one with --camera.",
        )
    if mini_mp4_path is not None and mini_mp4_path == contact_sheet_path:
        raise UsageError(f"Mini-MP4 and contact sheet would both be written to {mini_mp4_path}.")
    outputs = [check_output(path, force=force) for path in outputs]
    cameras = tuple(_camera(opened, position, key) for key in keys)
    groups = episode_row_groups(layout, position)
    if mini_mp4_path is not None:
        mini_mp4_path = outputs[0]
        write_mini_mp4(opened, position, keys[0], mini_mp4_path)
    if contact_sheet_path is not None:
        # Pictures need a decoder and its libraries; reports do without.
        from lrstream.commands.inspect_pictures import write_contact_sheet

        contact_sheet_path = outputs[-1]
        write_contact_sheet(opened, position, keys, contact_sheet_path, num_pictures)
    episodes = layout.episodes
    length = int(episodes.length[position])
    return EpisodeReport(
        episode_index=episode_index,
        num_frames=length,
        duration_s=length / layout.info.fps,
        tasks=tuple(episodes.tasks[position]),
        rows=EpisodeRows(
            file=episodes.data_path(position),
            first_index=int(episodes.dataset_from_index[position]),
            stop_index=int(episodes.dataset_to_index[position]),
            row_groups=groups.groups,
            num_row_groups=groups.num_groups,
            read_bytes=groups.read_bytes,
        ),
        cameras=cameras,
        mini_mp4_bytes=sum(report.mini_mp4_bytes for report in cameras),
        video_requests=sum(report.requests for report in cameras),
        mini_mp4=mini_mp4_path,
        contact_sheet=contact_sheet_path,
    )


def write_mini_mp4(opened: InspectedDataset, position: int, camera: str, path: Path) -> None:
    """Write the mini-MP4 of one camera of one episode, atomically."""
    span = opened.spans.span(position, camera)
    with opened.files.use(opened.layout.episodes.cameras[camera].path(position)) as file:
        payload = file.source.read(span.start_byte, span.stop_byte)
        write_atomically(path, mini_mp4(file.track, span, payload))


def _cameras(opened: InspectedDataset, camera: str | None) -> list[str]:
    known = list(opened.layout.episodes.cameras)
    if camera is None:
        return known
    if camera not in known:
        raise NotFoundError(
            f"The dataset has no camera {camera!r}; it has {', '.join(known) or 'none'}.", camera=camera
        )
    return [camera]


def _camera(opened: InspectedDataset, position: int, key: str) -> EpisodeCamera:
    columns = opened.layout.episodes.cameras[key]
    path = columns.path(position)
    from_s, to_s = float(columns.from_s[position]), float(columns.to_s[position])
    span = opened.spans.span(position, key)
    with opened.files.use(path) as file:
        samples = file.track.samples
        part = slice(span.first_sample, span.stop_sample)
        pts_s = samples.pts_s[part]
        # Ends of intervals are sums of durations and rounded; half a frame keeps neighbours apart.
        slack_s = 0.5 / opened.layout.info.fps
        own = (pts_s >= from_s - slack_s) & (pts_s < to_s - slack_s)
        low, high = np.searchsorted(samples.sync_samples, (span.first_sample, span.stop_sample))
        size = mini_mp4_size(file.track, span)
        return EpisodeCamera(
            key=key,
            file=path,
            file_bytes=file.track.file_size,
            codec=file.track.codec,
            from_s=from_s,
            to_s=to_s,
            first_sample=span.first_sample,
            stop_sample=span.stop_sample,
            start_byte=span.start_byte,
            stop_byte=span.stop_byte,
            num_own_pictures=int(own.sum()),
            num_keyframes=int(high - low),
            header_bytes=size - span.num_bytes,
            payload_bytes=span.num_bytes,
            mini_mp4_bytes=size,
            time_offset_s=mini_mp4_time_offset_s(file.track, span),
            requests=1,
        )
