"""Reports on sidecars, datasets, episodes and plans, against FFmpeg's demuxer, pyarrow and plain loops."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from lrstream.commands.inspect_dataset import inspect_dataset
from lrstream.commands.inspect_episode import EpisodeReport, inspect_episode
from lrstream.commands.inspect_pictures import evenly_spaced
from lrstream.commands.inspect_plan import inspect_plan
from lrstream.commands.inspect_sidecar import inspect_sidecar, refusals_to_publish
from lrstream.commands.inspect_source import InspectedDataset, SourceOptions, open_indexed, open_metadata
from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, read_identity, write_dataset
from lrstream.errors import NotFoundError, SidecarError, UsageError
from lrstream.sidecar.identity import SidecarIdentity, SourceFile
from tests.support.datasets import DatasetCache, copy_dataset
from tests.support.faults import FAULTS
from tests.support.loader import open_loader

FRONT = "observation.images.front"
SIDE = "observation.images.side"


@contextmanager
def opened(root: Path) -> Iterator[InspectedDataset]:
    with open_indexed(SourceOptions(str(root))) as found:
        yield found


def codes(root: Path) -> list[str]:
    with opened(root) as found:
        return [finding.code for finding in inspect_dataset(found).findings]


@dataclasses.dataclass
class Packets:
    """What FFmpeg's demuxer says of one file."""

    sizes: list[int]
    gops: list[int]
    is_reordered: bool
    times_s: list[float]


def packets_of(path: Path) -> Packets:
    sizes: list[int] = []
    gops: list[int] = []
    times: list[float] = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        for packet in container.demux(stream):
            if packet.dts is None:
                continue
            sizes.append(packet.size)
            assert packet.pts is not None
            times.append(float(packet.pts * packet.time_base))
            if packet.is_keyframe:
                gops.append(0)
            gops[-1] += 1
    return Packets(sizes, gops, times != sorted(times), times)


@pytest.mark.parametrize("name", ["standard", "long", "hevc_open", "h264"])
def test_cameras_are_as_the_demuxer_sees_them(dataset_cache: DatasetCache, name: str) -> None:
    dataset = dataset_cache.get(name)
    with opened(dataset.root) as found:
        report = inspect_dataset(found)
    assert (report.num_episodes, report.num_frames) == (dataset.spec.num_episodes, dataset.num_frames)
    assert report.duration_s == pytest.approx(dataset.num_frames / dataset.spec.fps)
    assert report.episode_frames.largest == max(dataset.episode_lengths)
    for camera, spec in zip(report.cameras, dataset.spec.cameras, strict=True):
        files = [dataset.root / path for path in dataset.video_files[spec.key]]
        packets = [packets_of(path) for path in files]
        sizes = [size for file in packets for size in file.sizes]
        gops = [length for file in packets for length in file.gops]
        assert camera.key == spec.key
        assert camera.num_files == len(files)
        assert camera.source_bytes == sum(path.stat().st_size for path in files)
        assert camera.num_pictures == len(sizes)
        assert camera.bytes_per_picture == pytest.approx(sum(sizes) / len(sizes))
        assert (camera.gop.count, camera.gop.largest, camera.gop.least) == (len(gops), max(gops), min(gops))
        assert camera.has_bframes == any(file.is_reordered for file in packets)
        assert camera.sizes == (f"{spec.width}x{spec.height}",)
        assert camera.drift_s < 1e-6
        assert camera.num_drifting == 0
        assert camera.span_ratio >= 1.0
    assert report.episode_bytes.total == sum(camera.episode_bytes.total for camera in report.cameras)


def test_drift_is_the_distance_to_the_nearest_picture(
    standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    broken = FAULTS["drifting_clock"](copy_dataset(standard_dataset, tmp_path / "drift"))
    with opened(broken.root) as found:
        report = inspect_dataset(found)
        camera = next(item for item in report.cameras if item.key == broken.camera)
        expected = []
        columns = found.layout.episodes.cameras[camera.key]
        for position, length in enumerate(standard_dataset.episode_lengths):
            times = packets_of(broken.root / columns.path(position)).times_s
            wanted = [columns.from_s[position] + frame / standard_dataset.spec.fps for frame in range(length)]
            expected.append(max(min(abs(time - want) for time in times) for want in wanted))
    assert camera.drift_s == pytest.approx(max(expected), abs=1e-9)
    assert expected[camera.drift_episode or 0] == pytest.approx(max(expected), abs=1e-9)
    assert camera.num_drifting == sum(drift > 1e-4 for drift in expected) > 0
    assert "timestamp-drift" in [finding.code for finding in report.findings]


def test_an_episode_outside_its_file_does_not_end_the_report(
    standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    broken = FAULTS["span_past_end"](copy_dataset(standard_dataset, tmp_path / "past"))
    with opened(broken.root) as found:
        report = inspect_dataset(found)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert [(error.code, error.episode_index) for error in errors] == [("timestamp", broken.episode)]
    camera = next(item for item in report.cameras if item.key == broken.camera)
    assert camera.episode_bytes.count == report.num_episodes - 1


def rewrite_tables(root: Path, **options: Any) -> None:
    for path in sorted(root.glob("data/*/*.parquet")):
        pq.write_table(pq.read_table(path), path, **options)


@pytest.mark.parametrize("name", ["demo", "rich"])
def test_row_groups_cost_what_their_footers_say(dataset_cache: DatasetCache, name: str) -> None:
    dataset = dataset_cache.get(name)
    with opened(dataset.root) as found:
        tables = inspect_dataset(found).tables
        costs = []
        for position, episode in enumerate(found.layout.episodes.episode_index.tolist()):
            file = pq.ParquetFile(dataset.root / found.layout.episodes.data_path(position))
            cost = 0
            for group in range(file.metadata.num_row_groups):
                if episode in file.read_row_group(group, columns=["episode_index"])[0].to_pylist():
                    row_group = file.metadata.row_group(group)
                    columns = [row_group.column(leaf) for leaf in range(row_group.num_columns)]
                    cost += sum(column.total_compressed_size for column in columns)
            costs.append(cost)
    assert tables.episode_read_bytes.total == sum(costs)
    assert tables.episode_read_bytes.largest == max(costs)
    assert tables.num_files == len(dataset.data_files)
    assert tables.num_without_statistics == 0
    assert tables.num_with_statistics == tables.num_row_groups
    assert tables.rows_per_group.total == dataset.num_frames


def test_tables_without_statistics_are_pointed_out(demo_dataset: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(demo_dataset, tmp_path / "plain")
    rewrite_tables(root, write_statistics=False, row_group_size=50)
    with opened(root) as found:
        report = inspect_dataset(found)
    assert report.tables.num_with_statistics == 0
    assert report.tables.num_without_statistics == report.tables.num_row_groups > len(demo_dataset.data_files)
    assert "parquet-no-statistics" in [finding.code for finding in report.findings]


def test_every_warning_has_its_situation(tmp_path: Path, standard_dataset: WrittenDataset) -> None:
    spec = DemoSpec(
        (3,) * 5 + (70,),
        (DemoCamera(FRONT, 16, 96, gop=70, episodes_per_file=6),),
        episodes_per_data_file=6,
        episodes_per_row_group=6,
        faststart=False,
    )
    root = write_dataset(tmp_path / "odd", spec).root
    assert codes(root) == ["parquet-large-row-groups", "long-gop", "moov-last"]
    root = copy_dataset(standard_dataset, tmp_path / "mixed")
    shutil.copy(root / standard_dataset.video_files[SIDE][0], root / standard_dataset.video_files[FRONT][0])
    assert "mixed-formats" in codes(root)
    root = copy_dataset(standard_dataset, tmp_path / "tables")
    FAULTS["parquet_without_footer"](root)
    with opened(root) as found:
        findings = inspect_dataset(found).findings
    assert [(finding.code, finding.severity) for finding in findings] == [("dataset", "error")]


def test_short_episodes_in_long_gops_fetch_too_much(tmp_path: Path) -> None:
    short = DemoSpec((4,) * 8, (DemoCamera(FRONT, 16, 96, gop=2, episodes_per_file=8),), fps=60)
    assert codes(write_dataset(tmp_path / "short", short).root) == ["large-spans"]


def test_a_dataset_without_video_needs_no_sidecar(image_dataset: WrittenDataset, isolated_home: Path) -> None:
    with opened(image_dataset.root) as found:
        report = inspect_dataset(found)
    assert (report.sidecar, report.cameras, report.episode_bytes.count) == (None, (), 0)
    assert not (isolated_home / "lerobot").exists()


# Episodes ------------------------------------------------------------------------------------------


def episode_of(root: Path, number: int, **options: Any) -> EpisodeReport:
    with opened(root) as found:
        return inspect_episode(found, number, **options)


@pytest.mark.parametrize("name", ["standard", "hevc_open"])
def test_a_mini_mp4_shows_the_episode(dataset_cache: DatasetCache, name: str, tmp_path: Path) -> None:
    dataset = dataset_cache.get(name)
    path = tmp_path / "episode.mp4"
    report = episode_of(dataset.root, 2, camera=FRONT, mini_mp4_path=path)
    [camera] = report.cameras
    assert report.mini_mp4 == path
    assert path.stat().st_size == camera.mini_mp4_bytes == camera.header_bytes + camera.payload_bytes
    assert camera.payload_bytes == camera.stop_byte - camera.start_byte
    shown = set()
    with av.open(str(path)) as container:
        for picture in container.decode(video=0):
            assert picture.time is not None
            time_s = picture.time + camera.time_offset_s
            if camera.from_s - 1e-4 <= time_s < camera.to_s - 1e-4:
                shown.add(read_identity(picture.to_ndarray(format="rgb24")))
    assert shown == {(0, 2, frame) for frame in range(dataset.episode_lengths[2])}
    assert camera.num_own_pictures == report.num_frames == dataset.episode_lengths[2]


def test_a_report_counts_what_fetching_the_episode_takes(standard_dataset: WrittenDataset) -> None:
    with opened(standard_dataset.root) as found:
        report = inspect_episode(found, 4)
        requests, read = found.store.counters.requests, found.store.counters.bytes_read
        for camera in report.cameras:
            with found.files.use(camera.file) as file:
                file.source.read(camera.start_byte, camera.stop_byte)
        assert found.store.counters.requests - requests == report.video_requests
        assert found.store.counters.bytes_read - read == sum(item.payload_bytes for item in report.cameras)
    assert report.tasks == (standard_dataset.spec.tasks[4 % 3],)
    start = sum(standard_dataset.episode_lengths[:4])
    assert (report.rows.first_index, report.rows.stop_index) == (start, start + 18)


def test_a_contact_sheet_shows_evenly_spaced_frames(standard_dataset: WrittenDataset, tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    report = episode_of(standard_dataset.root, 2, contact_sheet_path=path, num_pictures=6)
    assert report.contact_sheet == path
    frames = evenly_spaced(31, 6).tolist()
    assert frames == [0, 6, 12, 18, 24, 30]
    with Image.open(path) as image:
        sheet = np.asarray(image.convert("RGB"))
    # Thumbnails have the size of the pictures here (96 and 112 pixels wide), below a title of 14 lines.
    top = 14
    for number, (height, width) in enumerate([(64, 96), (48, 112)]):
        left = 4
        for frame in frames:
            thumbnail = sheet[top : top + height, left : left + width]
            assert read_identity(np.ascontiguousarray(thumbnail)) == (number, 2, frame)
            left += max(width, 96) + 4
        top += height + 14 + 4 + 14


@pytest.mark.parametrize(("length", "count"), [(1, 12), (5, 12), (12, 12), (300, 7), (300, 1)])
def test_spacing_reaches_both_ends(length: int, count: int) -> None:
    frames = evenly_spaced(length, count).tolist()
    assert frames == sorted(set(frames))
    assert len(frames) == min(length, count)
    assert frames[0] == 0
    if count > 1:
        assert frames[-1] == length - 1
        gaps = {after - before for before, after in itertools.pairwise(frames)}
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_depth_and_rgb_fit_on_one_sheet(depth_dataset: WrittenDataset, tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    episode_of(depth_dataset.root, 0, contact_sheet_path=path)
    with Image.open(path) as image:
        assert image.height > 64 + 32


def test_outputs_are_checked_before_anything_is_written(
    standard_dataset: WrittenDataset, tmp_path: Path, image_dataset: WrittenDataset
) -> None:
    root = standard_dataset.root
    existing = tmp_path / "exists.mp4"
    existing.write_bytes(b"precious")
    sheet = tmp_path / "sheet.png"
    with pytest.raises(UsageError, match="exists already"):
        episode_of(root, 0, camera=FRONT, mini_mp4_path=existing, contact_sheet_path=sheet)
    with pytest.raises(UsageError, match="one camera, but the dataset has 2"):
        episode_of(root, 0, mini_mp4_path=tmp_path / "a.mp4", contact_sheet_path=sheet)
    with pytest.raises(UsageError, match="both be written"):
        episode_of(root, 0, camera=FRONT, mini_mp4_path=sheet, contact_sheet_path=sheet)
    with pytest.raises(NotFoundError, match="no camera 'nope'; it has"):
        episode_of(root, 0, camera="nope", contact_sheet_path=sheet)
    with pytest.raises(NotFoundError, match="no episode 99"):
        episode_of(root, 99, contact_sheet_path=sheet)
    with pytest.raises(NotFoundError, match="does not exist"):
        episode_of(root, 0, contact_sheet_path=tmp_path / "absent" / "sheet.png")
    with pytest.raises(UsageError, match="no video"):
        episode_of(image_dataset.root, 0, contact_sheet_path=sheet)
    assert existing.read_bytes() == b"precious"
    assert sorted(tmp_path.iterdir()) == [existing]
    episode_of(root, 0, camera=FRONT, mini_mp4_path=existing, force=True)
    assert existing.read_bytes()[4:8] == b"ftyp"


# Sidecars ------------------------------------------------------------------------------------------


def test_a_sidecar_report_sums_up_its_files(hevc_open_dataset: WrittenDataset) -> None:
    dataset = hevc_open_dataset
    with opened(dataset.root) as found:
        assert found.sidecar is not None
        report = inspect_sidecar(found.sidecar)
    packets = [packets_of(dataset.root / path) for path in dataset.video_files[FRONT]]
    [group] = report.groups
    assert (group.num_files, group.num_frames) == (len(packets), sum(len(file.sizes) for file in packets))
    assert group.gop.largest == max(length for file in packets for length in file.gops)
    assert group.num_files_with_bframes == sum(file.is_reordered for file in packets)
    assert report.source_bytes == sum(source.size_bytes for source in report.sources)
    assert report.has_fingerprints
    assert not report.is_publishable
    assert "not on the Hub" in report.not_publishable_because[0]


def identity(data_root: str, *, fingerprint: str | None = None) -> SidecarIdentity:
    files = (SourceFile("a.mp4", 1),)
    return SidecarIdentity("o/n", "main", data_root, files, {"a.mp4": fingerprint} if fingerprint else {})


def test_only_pinned_and_fingerprinted_sidecars_may_be_published() -> None:
    assert refusals_to_publish(identity("hf://datasets/o/n@" + "0" * 40)) == []
    assert refusals_to_publish(identity("hf://buckets/o/n", fingerprint="x")) == []
    for root in ("hf://datasets/o/n", "hf://buckets/o/n", "/data/set", "s3://bucket/set"):
        assert len(refusals_to_publish(identity(root))) == 1, root


def test_files_that_are_no_sidecars_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"hello")
    for path, error in ((tmp_path / "a.npz", SidecarError), (tmp_path, SidecarError)):
        with pytest.raises(error, match=r"neither a sidecar|is a directory"):
            inspect_sidecar(path)
    with pytest.raises(NotFoundError):
        inspect_sidecar(tmp_path / "absent.npz")


# Plans ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 3), (7, 1)])
def test_a_plan_shares_out_everything(
    standard_dataset: WrittenDataset, world_size: int, num_workers: int
) -> None:
    layout = open_metadata(SourceOptions(str(standard_dataset.root)))
    report = inspect_plan(layout, world_size=world_size, num_workers=num_workers)
    workers = [worker for rank in report.ranks for worker in rank.workers]
    assert len(workers) == world_size * max(1, num_workers)
    assert sum(worker.num_frames for worker in workers) == standard_dataset.num_frames
    assert sum(worker.num_episodes for worker in workers) == standard_dataset.spec.num_episodes
    for rank in report.ranks:
        assert rank.num_frames == sum(worker.num_frames for worker in rank.workers)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (2, 1)])
def test_a_plan_counts_the_batches_that_dataloaders_give(
    standard_dataset: WrittenDataset, world_size: int, num_workers: int, drop_last: bool
) -> None:
    batch_size = 4
    layout = open_metadata(SourceOptions(str(standard_dataset.root)))
    report = inspect_plan(
        layout, world_size=world_size, num_workers=num_workers, batch_size=batch_size, episode_pool_size=2
    )
    different = []
    for rank in range(world_size):
        loader = open_loader(
            standard_dataset, rank=rank, world_size=world_size, episode_pool_size=2, return_uint8=True
        )
        batches: DataLoader[Any] = DataLoader(
            loader,
            batch_size=batch_size,
            num_workers=num_workers,
            multiprocessing_context="fork",
            drop_last=drop_last,
        )
        counts = [len(set(batch["episode_index"].tolist())) for batch in batches]
        loader.close()
        share = report.ranks[rank]
        assert len(counts) == (share.num_full_batches if drop_last else share.num_batches)
        different += counts
    if not drop_last:
        mixing = next(item for item in report.mixing if item.strategy == "remaining")
        assert (mixing.least, mixing.largest) == (min(different), max(different))
        assert mixing.mean == pytest.approx(np.mean(different))


def test_plans_warn_of_uneven_ranks_and_idle_workers(tmp_path: Path) -> None:
    spec = DemoSpec((10, 10, 100), (DemoCamera(FRONT, 16, 96, kind="image"),))
    layout = open_metadata(SourceOptions(str(write_dataset(tmp_path / "uneven", spec).root)))
    report = inspect_plan(layout, world_size=2, num_workers=4, batch_size=8)
    assert [rank.num_frames for rank in report.ranks] in ([100, 20], [20, 100])
    found = [finding.code for finding in report.findings]
    assert found == ["uneven-batches", "uneven-batches", "idle-workers"]
    assert report.num_idle_workers == 5
    assert report.rank_balance == pytest.approx(100 / 60)
    with pytest.raises(UsageError, match="A rank has no data"):
        inspect_plan(layout, world_size=4)
