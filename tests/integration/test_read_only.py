"""A cache that cannot be written, for real: a read-only mount (SC-4, K26)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lrstream.demo import WrittenDataset
from lrstream.errors import AccessError
from lrstream.index.open import ArchiveIndex, MappedIndex, open_index
from lrstream.layout.layout import load_layout
from lrstream.sidecar.resolve import build_locked, resolve_sidecar
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if sys.platform != "linux" or not mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)):
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def make_read_only(disk: Path) -> None:
    assert mount("-o", "remount,ro", str(disk))
    with pytest.raises(OSError, match="Read-only"):
        (disk / "x").write_bytes(b"")


def contents(disk: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in disk.rglob("*")}


def test_a_complete_cache_is_used_as_it_is(tiny_dataset: WrittenDataset, disk: Path) -> None:
    store = open_store(parse_location(tiny_dataset.root))
    layout = load_layout(store)
    resolve_sidecar(store, layout, home=disk)
    make_read_only(disk)
    before, requests = contents(disk), store.counters.requests
    resolved = resolve_sidecar(store, layout, home=disk)
    assert resolved.origin == "cache"
    index = open_index(resolved, home=disk)
    assert isinstance(index, MappedIndex)
    assert all(index.track(path).samples.num_samples for path in index.paths)
    index.close()
    assert contents(disk) == before
    assert store.counters.requests == requests


def test_a_sidecar_without_its_index(
    tiny_dataset: WrittenDataset, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read from the archive, and said that this is the slower way."""
    store = open_store(parse_location(tiny_dataset.root))
    archive = build_locked(store, load_layout(store), destination=disk / "x.npz").path
    make_read_only(disk)
    index = open_index(archive, home=disk)
    assert isinstance(index, ArchiveIndex)
    assert all(index.track(path).samples.num_samples for path in index.paths)
    index.close()
    assert "without a mapped index" in caplog.text


def test_an_empty_cache_is_an_error_that_says_what_to_do(tiny_dataset: WrittenDataset, disk: Path) -> None:
    make_read_only(disk)
    store = open_store(parse_location(tiny_dataset.root))
    with pytest.raises(AccessError, match="cannot be written") as caught:
        resolve_sidecar(store, load_layout(store), home=disk)
    assert "HF_LEROBOT_HOME" in str(caught.value)
    assert caught.value.exit_code == 4
    assert os.listdir(disk) == []


def test_a_directory_that_cannot_be_written_for_an_output(tiny_dataset: WrittenDataset, disk: Path) -> None:
    """The lock beside it cannot be taken; nothing is read before that is known."""
    make_read_only(disk)
    store = open_store(parse_location(tiny_dataset.root))
    layout = load_layout(store)
    requests = store.counters.requests
    with pytest.raises(AccessError, match="cannot be written"):
        build_locked(store, layout, destination=disk / "x.npz")
    assert store.counters.requests == requests
