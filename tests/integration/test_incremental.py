"""A new state of a dataset: only what has changed is read (SC-13)."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from lrstream.commands.build import build_dataset
from lrstream.errors import NotFoundError
from lrstream.layout.layout import DatasetLayout, load_layout
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.resolve import build_locked, resolve_sidecar
from lrstream.sidecar.resumable import BuildOptions
from lrstream.storage.bucket_store import BucketStore
from lrstream.storage.location import parse_location
from lrstream.storage.store import DatasetStore, open_store
from tests.integration.test_build import CountingStore, assert_like_ffmpeg
from tests.support.hub import LoopbackHub
from tests.support.many_files import CAMERA, change_video, video_path, write_many_files

pytest_plugins = ["tests.support.hub.plugin"]

COUNT = 200
REPO = "robots/many"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many_files(tmp_path_factory.mktemp("many") / "d", COUNT)


@pytest.fixture
def root(many: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(many, tmp_path / "d"))


def opened(root: Path) -> tuple[CountingStore, DatasetLayout]:
    store = CountingStore(root)
    return store, load_layout(store)


# Local directories -----------------------------------------------------------------------------------------


def test_one_changed_file_among_200(root: Path, tmp_path: Path) -> None:
    first = resolve_sidecar(*opened(root), home=tmp_path)
    change_video(root, 117, 1)
    store, layout = opened(root)
    second = resolve_sidecar(store, layout, home=tmp_path)
    assert second.path != first.path
    assert store.opened == [video_path(117)]
    assert second.report is not None
    assert (second.report.num_reused, second.report.requests) == (COUNT - 1, 1)
    assert_like_ffmpeg(second.path, root)


def test_files_added_and_removed(root: Path, tmp_path: Path) -> None:
    """As when episodes are appended: the old archive covers other files than the new one."""
    small = write_many_files(tmp_path / "small", 150)
    big = tmp_path / "big"
    shutil.copytree(small, big)
    home = tmp_path / "home"
    resolve_sidecar(*opened(big), home=home)
    # The metadata of 200 files in the place of those of 150.
    shutil.copytree(root / "meta", big / "meta", dirs_exist_ok=True)
    for number in range(150, COUNT):
        shutil.copyfile(root / video_path(number), big / video_path(number))
    store, layout = opened(big)
    resolved = resolve_sidecar(store, layout, home=home)
    assert sorted(store.opened) == [video_path(number) for number in range(150, COUNT)]
    assert_like_ffmpeg(resolved.path, big)


def test_a_named_base(root: Path, tmp_path: Path) -> None:
    base = tmp_path / "old.npz"
    build_locked(*opened(root), destination=base, home=tmp_path / "a")
    change_video(root, 3, 1)
    result = build_dataset(str(root), output=tmp_path / "new.npz", base=base)
    assert (result.reused, result.requests) == (COUNT - 1, 1)
    assert_like_ffmpeg(tmp_path / "new.npz", root)
    with pytest.raises(NotFoundError, match=r"missing\.npz"):
        build_dataset(str(root), output=tmp_path / "x.npz", base=tmp_path / "missing.npz")


def test_building_over_an_older_file_uses_it(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.npz"
    build_locked(*opened(root), destination=output)
    change_video(root, 7, 1)
    store, layout = opened(root)
    build_locked(store, layout, destination=output)
    assert store.opened == [video_path(7)]
    # Unless all is to be read.
    result = build_dataset(str(root), output=output, force=True)
    assert (result.reused, result.requests) == (0, COUNT)


def test_a_copy_of_the_dataset_is_another_dataset(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Times of files say nothing about files of another directory."""
    base = tmp_path / "old.npz"
    build_locked(*opened(root), destination=base)
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    store, layout = opened(copy)
    with caplog.at_level(logging.WARNING):
        build_locked(store, layout, destination=tmp_path / "new.npz", options=BuildOptions(base=base))
    assert len(store.opened) == COUNT
    assert "Nothing of" in caplog.text


def test_a_damaged_earlier_sidecar_is_no_reason_to_fail(root: Path, tmp_path: Path) -> None:
    """What of it is damaged is read; what cannot be opened is passed over."""
    first = resolve_sidecar(*opened(root), home=tmp_path)
    data = bytearray(first.path.read_bytes())
    with ArchiveReader(first.path) as reader:
        listing = reader.directory_listing().decode().splitlines()
    place = next(line for line in listing if line.startswith("5/sample_sizes"))
    data[int(place.split()[-1]) + 80] ^= 255
    first.path.write_bytes(data)
    change_video(root, 100, 1)
    store, layout = opened(root)
    second = resolve_sidecar(store, layout, home=tmp_path)
    assert sorted(store.opened) == [video_path(5), video_path(100)]
    assert_like_ffmpeg(second.path, root)
    second.path.write_bytes(b"PK\x05\x06")
    first.path.write_bytes(b"")
    change_video(root, 100, 2)
    store, layout = opened(root)
    resolve_sidecar(store, layout, home=tmp_path)
    assert len(store.opened) == COUNT


# The Hub ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(loopback_hub: LoopbackHub, many: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    loopback_hub.create_dataset(REPO, many)
    loopback_hub.connect_process(monkeypatch, loopback_hub.write_token)
    loopback_hub.settings.xet = False
    return loopback_hub


def resolve_on_hub(home: Path, **options: Any) -> tuple[DatasetStore, Any]:
    store = open_store(parse_location(REPO))
    return store, resolve_sidecar(store, load_layout(store), home=home, **options)


def videos_read(hub: LoopbackHub) -> list[str]:
    """Videos that were asked for at the Hub, and how often at the CDN."""
    return sorted({record.path.rpartition("/")[2] for record in hub.log if record.path.endswith(".mp4")})


def changed(many: Path, hub: LoopbackHub, *numbers: int) -> str:
    data = {video_path(number): (many / video_path(number)).read_bytes() for number in numbers}
    return hub.commit_files(REPO, {path: content[:-1] + b"!" for path, content in data.items()})


def test_a_new_commit_with_one_changed_file_among_200(hub: LoopbackHub, many: Path, tmp_path: Path) -> None:
    resolve_on_hub(tmp_path)
    commit = changed(many, hub, 42)
    hub.log.clear()
    _, resolved = resolve_on_hub(tmp_path)
    assert resolved.identity.data_root == f"hf://datasets/{REPO}@{commit}"
    assert resolved.origin == "built"
    assert resolved.report.num_reused == COUNT - 1
    assert videos_read(hub) == ["file-042.mp4"]
    assert_like_ffmpeg(resolved.path, many)  # the changed byte is in a box of no meaning
    assert len([record for record in hub.log if "/tree/" in record.path]) <= 2 * (COUNT // 100 + 2)


def test_from_the_published_sidecar_of_an_earlier_commit(
    hub: LoopbackHub, many: Path, tmp_path: Path
) -> None:
    """A machine without a cache downloads one file instead of reading 199 headers."""
    from lrstream.commands.publish import publish_built

    for _ in range(2):  # the nearest of several
        _, resolved = resolve_on_hub(tmp_path / "first")
        publish_built(resolved.path)
        changed(many, hub, 1, 2)
    hub.commit_files(REPO, {"README.md": b"# many"})
    changed(many, hub, 9)
    hub.log.clear()
    _, resolved = resolve_on_hub(tmp_path / "second")
    assert resolved.origin == "built"
    assert videos_read(hub) == ["file-009.mp4"]
    assert list((tmp_path / "second").rglob("*.tmp")) == []
    assert_like_ffmpeg(resolved.path, many)


def test_an_old_commit_that_is_gone_means_reading_everything(
    hub: LoopbackHub, many: Path, tmp_path: Path
) -> None:
    _, first = resolve_on_hub(tmp_path)
    changed(many, hub, 3)
    hub.faults.add(first.identity.data_root.partition("@")[2], "status", status=404)
    hub.log.clear()
    _, resolved = resolve_on_hub(tmp_path)
    assert len(videos_read(hub)) == COUNT
    assert resolved.report.num_reused == 0


def test_an_interrupted_build_of_a_hub_dataset(hub: LoopbackHub, tmp_path: Path) -> None:
    """Sizes are not known before, and there are no fingerprints: the commit pins both."""
    store = open_store(parse_location(REPO))
    layout = load_layout(store)
    fault = hub.faults.add(r"file-15\d\.mp4", "status", status=404)
    with pytest.raises(NotFoundError, match="10 of 200"):
        resolve_sidecar(store, layout, home=tmp_path)
    hub.faults.clear()
    assert fault.hits
    hub.log.clear()
    resolved = resolve_sidecar(store, layout, home=tmp_path)
    assert videos_read(hub) == [f"file-15{digit}.mp4" for digit in range(10)]
    assert resolved.report is not None
    assert resolved.report.num_reused == COUNT - 10


def test_a_bucket_knows_its_files_by_hash(
    loopback_hub: LoopbackHub, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    loopback_hub.create_bucket("robots/bucket", many)
    for number, expected in ((0, COUNT), (1, 1)):
        store = open_store(parse_location("hf://buckets/robots/bucket"))
        assert isinstance(store, BucketStore)
        loopback_hub.log.clear()
        resolve_sidecar(store, load_layout(store), home=tmp_path)
        assert len(videos_read(loopback_hub)) == expected
        path = f"videos/{CAMERA}/chunk-000/file-{60 + number:03d}.mp4"
        data = loopback_hub.bucket_files("robots/bucket")[path]
        loopback_hub.replace_bucket_file("robots/bucket", path, data[:-1] + b"!")
