"""Sidecars shared with LeRobot's tools, both ways (SC-2, SC-4, SC-6, SC-7).

The other side is played by NumPy, json and loops over boxes, written from the description of the formats
and using nothing of lrstream: it names, places and writes sidecars by itself. Its files are used without a
new index, and what lrstream writes is where it looks, with the content that it would have written.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import __version__ as client_version

from lrstream import StreamingLeRobotDataset
from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.layout.layout import load_layout
from lrstream.sidecar.resolve import ResolvedSidecar, resolve_sidecar
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.support import media
from tests.support.hub import LoopbackHub
from tests.support.remote import assert_same_epoch, epoch

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(60)

REPO = "robots/pick"
BUCKET = "robots/shelf"
HAS_BUCKETS = tuple(int(part) for part in client_version.split(".")[:2]) >= (1, 6)


# -- the other side ---------------------------------------------------------------------------------


def fields(payload: bytes, version_0: str, version_1: str) -> tuple[int, ...]:
    """Leading fields of a box with version and flags."""
    return struct.unpack_from(">4x" + (version_1 if payload[0] else version_0), payload)


def rows(payload: bytes, form: str) -> list[tuple[int, ...]]:
    """Rows of a table behind version, flags and their number."""
    (count,) = struct.unpack_from(">4xI", payload)
    size = struct.calcsize(">" + form)
    return [struct.unpack_from(">" + form, payload, 8 + number * size) for number in range(count)]


def index_by_hand(path: str, data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Element `mp4` of the manifest, and the six arrays, of a file with one track."""
    top = media.parse(data)
    starts, at = {}, 0
    for box in top:
        starts[box.kind] = at
        at += len(box.to_bytes())
    boxes = {node.kind: node for node in media.walk(top)}
    timescale, duration = fields(boxes[b"mdhd"].payload, "8xII", "16xIQ")
    (track_id,) = fields(boxes[b"tkhd"].payload, "8xI", "16xI")
    width, height = struct.unpack(">II", boxes[b"tkhd"].payload[-8:])
    stsd = boxes[b"stsd"].payload

    durations = [ticks for count, ticks in rows(boxes[b"stts"].payload, "II") for _ in range(count)]
    offsets_s = [0] * len(durations)
    if b"ctts" in boxes:
        form = "Ii" if boxes[b"ctts"].payload[0] else "II"
        offsets_s = [ticks for count, ticks in rows(boxes[b"ctts"].payload, form) for _ in range(count)]
    one_size, num_samples = struct.unpack_from(">4xII", boxes[b"stsz"].payload)
    assert (one_size, num_samples) == (0, len(durations))
    sizes = list(struct.unpack_from(f">{num_samples}I", boxes[b"stsz"].payload, 12))
    chunks = [row[0] for row in rows(boxes[b"stco"].payload, "I")]
    groups = rows(boxes[b"stsc"].payload, "III")
    offsets: list[int] = []
    for number, chunk in enumerate(chunks, start=1):
        per_chunk = next(group[1] for group in reversed(groups) if group[0] <= number)
        for _ in range(per_chunk):
            offsets.append(chunk)
            chunk += sizes[len(offsets) - 1]
    keyframes = list(range(num_samples))
    if b"stss" in boxes:
        keyframes = [row[0] - 1 for row in rows(boxes[b"stss"].payload, "I")]
    edit_s = 0.0
    if b"elst" in boxes:
        form = "QqI" if boxes[b"elst"].payload[0] else "IiI"
        ((_, media_time, _),) = rows(boxes[b"elst"].payload, form)
        edit_s = -media_time / timescale
    times, now = [], 0
    for ticks, offset in zip(durations, offsets_s, strict=True):
        times.append((now + offset) / timescale + edit_s)
        now += ticks

    scalars = {
        "file_path": path,
        "file_size": len(data),
        "ftyp": boxes[b"ftyp"].to_bytes().hex(),
        "moov_offset": starts[b"moov"],
        "mdat_offset": starts[b"mdat"],
        "mdat_payload_offset": starts[b"mdat"] + 8,
        "mdat_payload_size": len(boxes[b"mdat"].payload),
        "faststart": starts[b"moov"] < starts[b"mdat"],
        "codec": stsd[12:16].decode(),
        "timescale": timescale,
        "duration": duration,
        "track_id": track_id,
        "width": width >> 16,
        "height": height >> 16,
        "stsd_body": stsd.hex(),
    }
    arrays = {
        "sample_pts": np.array(times, np.float64),
        "sample_durations": np.array(durations, np.int64),
        "sample_composition_offsets": np.array(offsets_s, np.int64),
        "sample_sizes": np.array(sizes, np.int64),
        "sample_offsets": np.array(offsets, np.int64),
        "sync_samples": np.array(keyframes, np.int64),
    }
    return scalars, arrays


class Plain:
    """A sidecar written by hand."""

    def __init__(
        self,
        folder: Path,
        *,
        repo_id: str,
        revision: str,
        data_root: str,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        self.repo_id, self.revision = repo_id, revision
        paths = sorted(str(path.relative_to(folder)) for path in (folder / "videos").rglob("*.mp4"))
        identity: dict[str, Any] = {
            "schema_version": 3,
            "repo_id": repo_id,
            "revision": revision,
            "data_root": data_root,
        }
        found = [index_by_hand(path, (folder / path).read_bytes()) for path in paths]
        named = dict(fingerprints or {})
        self.manifest = {
            "version": 3,
            "sidecar": {
                **identity,
                "source_files": [{"path": mp4["file_path"], "size": mp4["file_size"]} for mp4, _ in found],
                "source_fingerprints": named,
            },
            "files": [
                {"file_path": mp4["file_path"], "file_size": mp4["file_size"], "mp4": mp4} for mp4, _ in found
            ],
        }
        self.arrays = {
            f"{number}/{name}": array
            for number, (_, arrays) in enumerate(found)
            for name, array in arrays.items()
        }
        digested = json.dumps(
            {**identity, "source_fingerprints": named} if named else identity,
            sort_keys=True,
            separators=(",", ":"),
        )
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", revision).strip("-")[:32]
        self.name = f"mp4-v3-{slug}-{hashlib.sha256(digested.encode()).hexdigest()[:16]}.npz"

    def cached(self, home: Path) -> Path:
        """Its place in the cache below a home directory."""
        repository = re.sub(r"[^A-Za-z0-9_.-]+", "--", self.repo_id).strip("-")
        return home / "lerobot" / "streaming-sidecars" / repository / self.name

    def content(self) -> bytes:
        file = io.BytesIO()
        np.savez_compressed(file, manifest_json=np.array(json.dumps(self.manifest).encode()), **self.arrays)  # type: ignore[arg-type]
        return file.getvalue()

    def install(self, home: Path) -> Path:
        path = self.cached(home)
        path.parent.mkdir(parents=True)
        path.write_bytes(self.content())
        return path

    def assert_equal(self, content: bytes) -> None:
        """An archive of lrstream's holds the same, member by member and bit by bit."""
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            assert set(archive.files) == {"manifest_json", *self.arrays}
            assert json.loads(archive["manifest_json"].item()) == self.manifest
            for name, array in self.arrays.items():
                assert (archive[name].dtype, archive[name].ndim) == (array.dtype, 1), name
                assert archive[name].tobytes() == array.tobytes(), name


def fingerprints_of(folder: Path) -> dict[str, str]:
    """Those of local videos."""
    found = {}
    for path in (folder / "videos").rglob("*.mp4"):
        status = path.stat()
        found[str(path.relative_to(folder))] = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
    return found


# -- the tests --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """Two cameras of H.264 with B-frames, so with composition offsets and an edit list."""
    cameras = tuple(
        DemoCamera(f"observation.images.{name}", 32, 96, gop=6, bframes=2, episodes_per_file=2)
        for name in ("front", "side")
    )
    spec = DemoSpec((8, 7, 9), cameras, fps=10)
    return write_dataset(tmp_path_factory.mktemp("interchange") / "dataset", spec)


def resolved(source: str | Path, repo_id: str | None = None) -> ResolvedSidecar:
    """The sidecar that lrstream takes for a dataset."""
    store = open_store(parse_location(source))
    return resolve_sidecar(store, load_layout(store), repo_id=repo_id)


def local_sidecar(folder: Path) -> Plain:
    return Plain(
        folder, repo_id=REPO, revision="v3.0", data_root=str(folder), fingerprints=fingerprints_of(folder)
    )


def test_the_other_side_reads_what_is_built_for_a_directory(
    dataset: WrittenDataset, isolated_home: Path
) -> None:
    found = resolved(dataset.root, REPO)
    assert found.origin == "built"
    theirs = local_sidecar(dataset.root)
    assert found.path == theirs.cached(isolated_home)
    assert any(array.any() for name, array in theirs.arrays.items() if name.endswith("composition_offsets"))
    theirs.assert_equal(found.path.read_bytes())


def test_a_cache_entry_of_the_other_side_is_used(dataset: WrittenDataset, isolated_home: Path) -> None:
    path = local_sidecar(dataset.root).install(isolated_home)
    before = path.read_bytes()
    found = resolved(dataset.root, REPO)
    assert (found.origin, found.path) == ("cache", path)
    assert path.read_bytes() == before


@pytest.fixture
def hub(loopback_hub: LoopbackHub, dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    loopback_hub.create_dataset(REPO, dataset.root)
    loopback_hub.tag(REPO, "v3.0")
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    return loopback_hub


def hub_sidecar(hub: LoopbackHub, folder: Path, revision: str | None = None) -> Plain:
    """Pinned to the commit of the tag."""
    commit = hub.references(REPO)["refs/tags/v3.0"]
    return Plain(
        folder, repo_id=REPO, revision=revision or commit, data_root=f"hf://datasets/{REPO}@{commit}"
    )


def videos_read(hub: LoopbackHub) -> int:
    return sum(record.path.endswith(".mp4") for record in hub.log.records(method="GET"))


def test_what_is_built_for_the_hub(hub: LoopbackHub, dataset: WrittenDataset, isolated_home: Path) -> None:
    found = resolved(REPO)
    theirs = hub_sidecar(hub, dataset.root, "v3.0")
    assert (found.origin, found.path) == ("built", theirs.cached(isolated_home))
    assert videos_read(hub) > 0
    theirs.assert_equal(found.path.read_bytes())


def test_a_cache_entry_for_the_hub(hub: LoopbackHub, dataset: WrittenDataset, isolated_home: Path) -> None:
    path = hub_sidecar(hub, dataset.root, "v3.0").install(isolated_home)
    found = resolved(REPO)
    assert (found.origin, found.path) == ("cache", path)
    assert videos_read(hub) == 0
    assert_same_epoch(epoch(REPO), epoch(dataset.root))


def test_a_sidecar_published_in_the_repository(hub: LoopbackHub, dataset: WrittenDataset) -> None:
    """On its own branch, named after the commit."""
    theirs = hub_sidecar(hub, dataset.root)
    hub.branch(REPO, "lerobot-sidecars", "v3.0")
    hub.commit_files(REPO, {f"meta/mp4-sidecars/{theirs.name}": theirs.content()}, branch="lerobot-sidecars")
    found = resolved(REPO)
    assert found.origin == "published"
    assert videos_read(hub) == 0
    theirs.assert_equal(found.path.read_bytes())
    assert_same_epoch(epoch(REPO), epoch(dataset.root))


@pytest.mark.skipif(not HAS_BUCKETS, reason="this client knows no buckets")
@pytest.mark.parametrize("folder", ["", "sets/pick/"])
def test_a_sidecar_published_in_a_bucket(hub: LoopbackHub, dataset: WrittenDataset, folder: str) -> None:
    """Beside the dataset, with the hashes of the videos in its identity."""
    hub.create_bucket(BUCKET)
    hashes = {}
    for path in (path for path in dataset.root.rglob("*") if path.is_file()):
        name = str(path.relative_to(dataset.root))
        found_hash = hub.put_bucket_file(BUCKET, folder + name, path.read_bytes())
        if name.endswith(".mp4"):
            hashes[name] = found_hash
    root = f"hf://buckets/{BUCKET}/{folder}".rstrip("/")
    with StreamingLeRobotDataset(root) as opened:
        identity = opened.root
    assert identity == root
    built = resolved(root)
    theirs = Plain(
        dataset.root,
        repo_id=built.identity.repo_id,
        revision=built.identity.revision,
        data_root=root,
        fingerprints=hashes,
    )
    theirs.assert_equal(built.path.read_bytes())
    built.path.unlink()
    hub.put_bucket_file(BUCKET, f"{folder}meta/mp4-sidecars/{theirs.name}", theirs.content())
    hub.log.clear()
    found = resolved(root)
    assert found.origin == "published"
    assert videos_read(hub) == 0
