"""A dataset in a bucket, at its root and below it: index, publication, training, replacement."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.errors import CheckFailedError, LrstreamError, TransferError, UsageError
from lrstream.layout.layout import load_layout
from lrstream.sidecar.archive import ArchiveReader, write_archive
from lrstream.sidecar.publish import publish_sidecar
from lrstream.storage.bucket_store import BucketStore
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.cli.program import Program, run_process
from tests.support.hub import LoopbackHub
from tests.support.remote import (
    assert_no_credentials,
    assert_same_epoch,
    epoch,
    hurry_retries,
    ranges_by_file,
    spans_by_file,
)

pytest_plugins = ["tests.support.hub.plugin"]

CLIENT_VERSION = tuple(int(part) for part in huggingface_hub.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(CLIENT_VERSION < (1, 6), reason="this client knows no buckets"),
]

BUCKET = "robots/store"
URL = f"hf://buckets/{BUCKET}"


@pytest.fixture(params=["", "sets/a b"], ids=["root", "below"])
def inner(request: pytest.FixtureRequest) -> str:
    """Where the dataset is inside the bucket."""
    return str(request.param)


@pytest.fixture
def source(inner: str) -> str:
    """URL of the dataset."""
    return f"{URL}/{inner}" if inner else URL


@pytest.fixture
def hub(
    loopback_hub: LoopbackHub,
    tiny_dataset: WrittenDataset,
    inner: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> LoopbackHub:
    """A Hub with a private bucket that holds the tiny dataset, and a neighbour with a similar name."""
    folder = tmp_path / "bucket"
    shutil.copytree(tiny_dataset.root, folder / inner)
    (folder / inner / "videos_old").mkdir()
    (folder / inner / "videos_old" / "file.mp4").write_bytes(b"not part of the dataset")
    loopback_hub.create_bucket(BUCKET, folder, private=True)
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    hurry_retries(monkeypatch)
    return loopback_hub


@pytest.fixture
def lrstream(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


def in_bucket(inner: str, path: str) -> str:
    return f"{inner}/{path}" if inner else path


@pytest.mark.slow
def test_from_build_to_training(
    hub: LoopbackHub,
    inner: str,
    source: str,
    tiny_dataset: WrittenDataset,
    tmp_path: Path,
    isolated_home: Path,
) -> None:
    maintainer = tmp_path / "maintainer"
    env = hub.env(hub.write_token, home=maintainer)
    built = run_process("build", source, "--json", env=env)
    assert built.code == 0, built.out + built.err
    archive = Path(built.document()["result"]["path"])
    # One listing gave all sizes and hashes; indexing took one range (and its redirect) for each file.
    assert hub.log.count(r"\.mp4$", server="hub") == hub.log.count(r"\.mp4$", server="cdn") == 3
    with ArchiveReader(archive) as reader:
        files = hub.settings.buckets[BUCKET].listing()
        assert reader.identity.data_root == source
        assert reader.identity.source_fingerprints == {
            path: files[in_bucket(inner, path)].xet_hash for path in reader.paths
        }
    hub.log.clear()
    outcome = run_process("publish", archive, source, "--json", env=env)
    assert outcome.code == 0, outcome.out + outcome.err
    result = outcome.document()["result"]
    assert (result["action"], result["branch"], result["commit"]) == ("published", None, None)
    assert result["path"] == in_bucket(inner, f"meta/mp4-sidecars/{archive.name}")
    assert hub.bucket_files(BUCKET)[result["path"]] == archive.read_bytes()
    assert hub.log.count("/batch", method="POST") == 1
    hub.log.clear()
    outcome = run_process("publish", archive, source, "--json", env=env)
    assert outcome.document()["result"]["action"] == "unchanged"
    assert hub.log.count("/batch") == 0

    before = hub.bucket_files(BUCKET)
    hub.log.clear()
    found = epoch(source, num_workers=2)
    assert_same_epoch(found, epoch(tiny_dataset.root, num_workers=2))
    assert hub.log.count(r"\.npz$", server="cdn") == 1
    payload = hub.log.records(r"\.mp4$", server="cdn")
    assert ranges_by_file(payload) == spans_by_file(tiny_dataset.root, archive)
    assert not [record for record in hub.log if record.method not in ("GET", "HEAD")]
    assert not [record for record in hub.log.records(server="cdn") if record.authorization]
    assert hub.bucket_files(BUCKET) == before
    assert_no_credentials(hub, isolated_home)
    assert_no_credentials(hub, maintainer)


def test_other_ways_to_name_it(hub: LoopbackHub, inner: str, source: str) -> None:
    store = open_store(parse_location(source))
    assert isinstance(store, BucketStore)
    if not inner:
        assert open_store(parse_location(BUCKET, repo_type="bucket")).location == store.location
    assert store.fingerprints_required
    listed = store.list_files("videos")
    assert all(path.startswith("videos/") for path in listed), "text prefixes are no directories"
    assert len(listed) == 3
    assert store.exists("meta/info.json")
    assert not store.exists("meta")
    assert not store.exists("meta/info.jso")
    with pytest.raises(LrstreamError, match="1 of 1 files do not exist"):
        store.file_info(["videos/none.mp4"])
    with pytest.raises(UsageError, match="not a file on this machine"):
        store.local_path("meta/info.json")


def test_a_video_is_replaced_by_one_of_the_same_size(
    hub: LoopbackHub, inner: str, source: str, tiny_dataset: WrittenDataset
) -> None:
    """Path, size and time stay; the hash tells, at the next open (K23)."""
    assert_same_epoch(epoch(source), epoch(tiny_dataset.root))
    path = in_bucket(inner, "videos/observation.images.front/chunk-000/file-000.mp4")
    data = bytearray(hub.bucket_files(BUCKET)[path])
    position = data.index(b"Lavf") if b"Lavf" in data else data.index(b"mdat") + 4
    data[position] ^= 1
    hub.replace_bucket_file(BUCKET, path, bytes(data))
    hub.log.clear()
    with StreamingLeRobotDataset(source):
        pass
    assert hub.log.count(rf"{path}$", server="cdn") >= 1, "its index was read again"


def test_a_video_is_replaced_during_training(
    hub: LoopbackHub, inner: str, source: str, tiny_dataset: WrittenDataset
) -> None:
    """Content that is not what was listed is not decoded with the old index."""
    with StreamingLeRobotDataset(source) as dataset:
        path = in_bucket(inner, "videos/observation.images.front/chunk-000/file-000.mp4")
        data = bytearray(hub.bucket_files(BUCKET)[path])
        data[-1] ^= 1
        hub.replace_bucket_file(BUCKET, path, bytes(data))
        with pytest.raises(TransferError, match="the content was replaced: hash"):
            list(dataset)


def test_sidecars_without_fingerprints_cannot_be_published(
    hub: LoopbackHub, source: str, tmp_path: Path, lrstream: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Path(lrstream("build", source, "--json").document()["result"]["path"])
    from dataclasses import replace

    plain = tmp_path / "plain.npz"
    with ArchiveReader(built) as reader:
        write_archive(plain, replace(reader.identity, source_fingerprints={}), list(reader.tracks()))
    hub.connect_process(monkeypatch, hub.write_token)
    store = open_store(parse_location(source))
    assert isinstance(store, BucketStore)
    with pytest.raises(CheckFailedError, match="records no fingerprints"):
        publish_sidecar(plain, store, load_layout(store))
    # And one in the cache is not used, but replaced.
    os.replace(plain, built)
    result = lrstream("build", source, "--json").document()["result"]
    assert (result["origin"], Path(result["path"])) == ("built", built)


def test_a_sidecar_of_older_content_cannot_be_published(
    hub: LoopbackHub, inner: str, source: str, lrstream: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = lrstream("build", source, "--json").document()["result"]["path"]
    path = in_bucket(inner, "videos/observation.images.front/chunk-000/file-000.mp4")
    data = bytearray(hub.bucket_files(BUCKET)[path])
    data[-1] ^= 1
    hub.replace_bucket_file(BUCKET, path, bytes(data))
    hub.connect_process(monkeypatch, hub.write_token)
    outcome = lrstream("publish", built, source, "--json")
    assert (outcome.code, outcome.codes()) == (3, ["check-failed"])
    assert "changed since they were indexed" in outcome.document()["problems"][0]["message"]


def test_who_may_not(
    hub: LoopbackHub, source: str, lrstream: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = lrstream("build", source, "--json").document()["result"]["path"]
    cases = [
        (hub.read_token, "publish", 4, "no-access", "cannot write there"),
        (None, "build", 4, "not-found", "no token was found"),
        (hub.stranger_token, "build", 4, "not-found", "may not see it"),
        ("hf_WrongTokenSENTINEL0123456789abcdef", "build", 4, "no-access", "does not accept the token"),
    ]
    for token, command, status, code, said in cases:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub.connect_process(monkeypatch, token)
        arguments = ["publish", built, source] if command == "publish" else ["build", source]
        outcome = lrstream(*arguments, "--json")
        assert (outcome.code, outcome.codes()) == (status, [code]), (token, outcome.out)
        problem = outcome.document()["problems"][0]
        assert said in problem["message"]
        assert f"bucket {BUCKET}" in problem["message"]
        assert "SENTINEL" not in outcome.out + outcome.err
    hub.connect_process(monkeypatch, hub.read_token)
    outcome = lrstream("build", "hf://buckets/robots/absent", "--json")
    assert (outcome.code, outcome.codes()) == (4, ["not-found"])


def test_a_bucket_has_no_revision(lrstream: Program) -> None:
    outcome = lrstream("build", BUCKET, "--repo-type", "bucket", "--revision", "main", "--json")
    assert (outcome.code, outcome.codes()) == (2, ["usage"])
