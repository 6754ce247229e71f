"""Every fault is found, named and located; a good dataset has no problem at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrstream.demo import WrittenDataset
from lrstream.errors import NotFoundError
from lrstream.layout.layout import DatasetLayout, load_layout
from lrstream.mp4.track import TrackIndex
from lrstream.sidecar.archive import ArchiveReader, write_archive
from lrstream.sidecar.build import build_sidecar
from lrstream.sidecar.identity import SourceFile
from lrstream.sidecar.problems import PROBLEM_CODES
from lrstream.sidecar.validate import (
    Problem,
    problems_of_failures,
    validate_archive,
    validate_dataset,
    validate_sidecar,
)
from lrstream.storage.location import parse_location
from lrstream.storage.store import DatasetStore, open_store
from tests.support import faults
from tests.support.datasets import copy_dataset
from tests.support.shared import SHARED
from tests.support.tracks import identity_of, make_tracks, replace_member


def opened(root: Path) -> tuple[DatasetStore, DatasetLayout]:
    store = open_store(parse_location(root))
    return store, load_layout(store)


@pytest.fixture
def root(standard_dataset: WrittenDataset, tmp_path: Path) -> Path:
    return copy_dataset(standard_dataset, tmp_path / "dataset")


@pytest.fixture
def archive(root: Path, tmp_path: Path) -> Path:
    return build_sidecar(*opened(root), destination=tmp_path / "x.npz").path


def codes(problems: list[Problem]) -> set[str]:
    assert {problem.code for problem in problems} <= PROBLEM_CODES.keys()
    assert all(problem.message.endswith(".") for problem in problems)
    return {problem.code for problem in problems}


@pytest.mark.parametrize("name", ["standard", "h264", "hevc_open", "depth", "images", "rich", "long"])
def test_good_datasets_have_no_problems(dataset_cache: Any, tmp_path: Path, name: str) -> None:
    store, layout = opened(dataset_cache.get(name).root)
    path = build_sidecar(store, layout, destination=tmp_path / "x.npz").path
    steps: list[tuple[int, int]] = []
    assert validate_archive(path) == []
    assert validate_sidecar(path, store, layout, deep=True, rows=True) == []
    assert validate_dataset(store, layout, rows=True, progress=lambda *step: steps.append(step)) == []
    assert steps == [(n + 1, len(layout.video_files())) for n in range(len(layout.video_files()))]


@pytest.mark.skipif(SHARED is None, reason="needs the shared datasets")
@pytest.mark.parametrize(
    "name", ["av1_two_cameras", "h264_bframes_gop30", "hevc_gop12", "images_only", "video_and_depth"]
)
def test_datasets_by_lerobots_own_writer_have_no_problems(name: str) -> None:
    assert SHARED is not None
    assert validate_dataset(*opened(SHARED / "datasets" / name), rows=True) == []


METADATA_FAULTS: list[tuple[Callable[[Path], faults.Broken], str]] = [
    (faults.span_past_end, "span-outside-file"),
    (faults.drifting_clock, "picture-missing"),
    (faults.wrong_data_file, "rows-invalid"),
    (faults.missing_parquet, "rows-invalid"),
]


@pytest.mark.parametrize(("fault", "code"), METADATA_FAULTS)
def test_contradictions_between_metadata_and_files(
    root: Path, fault: Callable[[Path], faults.Broken], code: str
) -> None:
    broken = fault(root)
    found = validate_dataset(*opened(root), rows=True)
    assert code in codes(found)
    first = next(problem for problem in found if problem.code == code)
    assert first.episode_index == broken.episode
    assert f"episode {broken.episode}" in first.message
    assert first.hint is not None
    if broken.camera is not None:
        assert broken.camera in first.message


def test_a_drift_below_half_a_frame_is_found_in_every_later_episode(root: Path) -> None:
    faults.drifting_clock(root)
    found = validate_dataset(*opened(root))
    assert [p.episode_index for p in found if p.code in ("picture-missing", "span-outside-file")] == list(
        range(1, 7)
    )


FILE_FAULTS: list[tuple[Callable[[Path], faults.Broken], str]] = [
    (faults.lfs_pointer_mp4, "mp4-malformed"),
    (faults.empty_mp4, "mp4-malformed"),
    (faults.truncated_before_moov, "mp4-malformed"),
    (faults.fragmented_mp4, "mp4-unsupported"),
    (faults.missing_mp4, "source-missing"),
]


@pytest.mark.parametrize(("fault", "code"), FILE_FAULTS)
def test_bad_videos_do_not_hide_other_problems(
    root: Path, fault: Callable[[Path], faults.Broken], code: str
) -> None:
    broken = fault(root)
    faults.span_past_end(root)
    found = {(problem.code, problem.source) for problem in validate_dataset(*opened(root))}
    assert (code, broken.path) in found
    assert any(code == "span-outside-file" for code, _ in found)


@pytest.mark.parametrize(
    ("fault", "code"), [(faults.replaced_mp4, "source-changed"), (faults.missing_mp4, "source-missing")]
)
def test_sources_that_changed_since_the_build(
    root: Path, archive: Path, fault: Callable[[Path], faults.Broken], code: str
) -> None:
    broken = fault(root)
    found = validate_sidecar(archive, *opened(root))
    assert [(problem.code, problem.source) for problem in found if problem.code != "picture-missing"] == [
        (code, broken.path)
    ]


def test_a_replacement_is_seen_in_depth_even_without_fingerprints(root: Path, tmp_path: Path) -> None:
    store, layout = opened(root)
    plain = build_sidecar(store, layout, destination=tmp_path / "x.npz")
    broken = faults.replaced_mp4(root)
    after = build_sidecar(store, layout, destination=tmp_path / "y.npz").identity
    with ArchiveReader(plain.path) as reader:
        write_archive(tmp_path / "forged.npz", after, list(reader.tracks()))
    assert validate_sidecar(tmp_path / "forged.npz", store, layout) == []
    found = validate_sidecar(tmp_path / "forged.npz", store, layout, deep=True)
    assert [(problem.code, problem.source) for problem in found] == [("source-differs", broken.path)]
    assert "samples.sizes_bytes" in found[0].message


def test_a_sidecar_of_something_else(root: Path, archive: Path, tmp_path: Path) -> None:
    store, layout = opened(root)
    found = validate_sidecar(archive, store, layout, repo_id="other/name", revision="main")
    assert codes(found) == {"identity-mismatch"}
    assert len(found) == 2

    tracks = make_tracks(2)
    foreign = tmp_path / "foreign.npz"
    write_archive(foreign, identity_of(tracks), tracks)
    found = validate_sidecar(foreign, store, layout)
    assert codes(found) == {"identity-mismatch", "source-not-indexed", "source-unknown"}
    assert {p.source for p in found if p.code == "source-not-indexed"} == set(layout.video_files())


def test_a_changed_size_is_named_with_both_numbers(root: Path, archive: Path) -> None:
    store, layout = opened(root)
    path = layout.video_files()[0]
    size = (root / path).stat().st_size
    with (root / path).open("ab") as file:
        file.write(b"\0\0\0\x08free")
    found = [problem for problem in validate_sidecar(archive, store, layout) if problem.source == path]
    assert [problem.code for problem in found] == ["source-size"]
    assert str(size) in found[0].message
    assert str(size + 8) in found[0].message


def test_all_damaged_arrays_are_listed(root: Path, archive: Path) -> None:
    replace_member(archive, "0/sample_sizes.npy", b"damaged")
    replace_member(archive, "3/sync_samples.npy", b"damaged")
    store, layout = opened(root)
    paths = layout.video_files()
    for found in (validate_archive(archive), validate_sidecar(archive, store, layout)):
        assert [(p.code, p.source) for p in found] == [
            ("arrays-invalid", paths[0]), ("arrays-invalid", paths[3])
        ]  # fmt: skip


def test_a_file_that_is_no_sidecar(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(b"nothing")
    assert codes(validate_archive(path)) == {"archive-invalid"}
    assert codes(validate_sidecar(path, *opened(root))) == {"archive-invalid"}
    with pytest.raises(NotFoundError):
        validate_archive(tmp_path / "absent.npz")


def rewritten(archive: Path, change: Callable[[TrackIndex], None]) -> None:
    """Write the archive again with its first track changed; arrays are copies."""
    with ArchiveReader(archive) as reader:
        identity, tracks = reader.identity, list(reader.tracks())
    for track in tracks:
        for name in track.samples.__slots__:
            object.__setattr__(track.samples, name, getattr(track.samples, name).copy())
    change(tracks[0])
    write_archive(archive, identity, tracks)


def test_times_that_do_not_follow_from_durations(root: Path, archive: Path) -> None:
    def shift(track: TrackIndex) -> None:
        track.samples.pts_s[-1] += 0.01

    rewritten(archive, shift)
    (problem,) = validate_archive(archive)
    assert (problem.code, problem.severity) == ("times-inconsistent", "warning")
    # The last picture belongs to the last episode of that file, whose row does not find it now.
    found = validate_sidecar(archive, *opened(root))
    assert [(p.code, p.episode_index) for p in found] == [
        ("times-inconsistent", None),
        ("picture-missing", 2),
    ]


def test_pictures_before_the_first_keyframe(root: Path, archive: Path) -> None:
    def drop_first_keyframe(track: TrackIndex) -> None:
        object.__setattr__(track.samples, "sync_samples", track.samples.sync_samples[1:])

    rewritten(archive, drop_first_keyframe)
    (problem,) = validate_sidecar(archive, *opened(root))
    assert (problem.code, problem.episode_index) == ("picture-undecodable", 0)
    assert "5 of 23 pictures" in problem.message


def test_overlapping_episodes_and_wrong_ends(root: Path) -> None:
    camera = "observation.images.front"

    def stretch(row: dict[str, Any]) -> None:
        if row["episode_index"] == 0:
            row[f"videos/{camera}/to_timestamp"] += 0.2

    faults.edit_episodes(root, stretch)
    found = validate_dataset(*opened(root))
    assert [(p.code, p.severity, p.episode_index) for p in found] == [
        ("picture-count", "warning", 0),
        ("episodes-overlap", "error", 1),
    ]
    assert "29 pictures, but the episode has 23 frames" in found[0].message
    # Only what concerns the chosen episodes is reported.
    store, layout = opened(root)
    assert validate_dataset(store, layout, positions=np.array([2, 3])) == []
    assert len(validate_dataset(store, layout, positions=np.array([1]))) == 1


def test_rows_off_the_frame_grid(root: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = next(iter(sorted(root.glob("data/*/*.parquet"))))
    table = pq.read_table(path)
    times = table.column("timestamp").to_numpy().copy()
    times[4] += 0.01
    number = table.schema.get_field_index("timestamp")
    pq.write_table(table.set_column(number, table.schema.field(number), pa.array(times)), path)
    (problem,) = validate_dataset(*opened(root), rows=True)
    assert (problem.code, problem.episode_index) == ("row-times", 0)
    assert "row 4" in problem.message


def test_a_failed_build_as_problems(root: Path, tmp_path: Path) -> None:
    from lrstream.errors import LrstreamError

    store, layout = opened(root)
    broken = [layout.video_files()[0], layout.video_files()[2]]
    for path in broken:
        (root / path).write_bytes(b"")
    with pytest.raises(LrstreamError) as caught:
        build_sidecar(store, layout, destination=tmp_path / "x.npz")
    found = problems_of_failures(caught.value)
    assert [(p.code, p.source) for p in found] == [("mp4-malformed", path) for path in broken]
    assert problems_of_failures(LrstreamError("x", file_path="y"))[0].source == "y"


def test_hub_like_identities_are_compared_without_fingerprints(root: Path, archive: Path) -> None:
    """A store that pins a commit gives no fingerprints; the archive then has none either."""
    store, layout = opened(root)
    with ArchiveReader(archive) as reader:
        tracks, identity = list(reader.tracks()), reader.identity
    bare = identity_of(
        tracks, repo_id=identity.repo_id, revision=identity.revision, data_root=identity.data_root,
        source_fingerprints={}, source_files=tuple(SourceFile(t.file_path, t.file_size) for t in tracks),
    )  # fmt: skip
    write_archive(archive, bare, tracks)
    found = validate_sidecar(archive, store, layout)
    assert codes(found) == {"source-changed"}
