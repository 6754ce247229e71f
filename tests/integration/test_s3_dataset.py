"""Datasets behind fsspec: a loopback S3 through s3fs, and ``memory://``."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.errors import AccessError, NotFoundError, TransferError
from lrstream.sidecar.archive import ArchiveReader
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.cli.program import Program
from tests.support.remote import assert_same_epoch, epoch

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytest.importorskip("flask_cors")

from moto.server import ThreadedMotoServer

pytestmark = pytest.mark.timeout(60)

NUMBERS = itertools.count()
KEY, SECRET = "AKIALOOPBACK", "loopback-secret-SENTINEL"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """URL of an S3 server in this process."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket; credentials of this process are those of nobody."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    name = f"robots-{next(NUMBERS)}"
    client(endpoint).mkdir(name)
    return name


def options(endpoint: str) -> dict[str, Any]:
    return {
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "eu-west-1"},
    }


def client(endpoint: str) -> Any:
    return fsspec.filesystem("s3", skip_instance_cache=True, **options(endpoint))


@pytest.fixture
def source(endpoint: str, bucket: str, tiny_dataset: WrittenDataset) -> str:
    """URL of the tiny dataset in the bucket."""
    client(endpoint).put(f"{tiny_dataset.root}/", f"{bucket}/sets/pick/", recursive=True)
    return f"s3://{bucket}/sets/pick"


@pytest.fixture
def lrstream(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


@pytest.mark.parametrize(
    "start_method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)], ids=str
)
def test_training_from_s3(
    endpoint: str, source: str, tiny_dataset: WrittenDataset, start_method: str | None, isolated_home: Path
) -> None:
    """Options of the file system reach every worker, also after the parent has used its own (K16)."""
    workers = {None: 0, "fork": 2, "spawn": 1}[start_method]
    with StreamingLeRobotDataset(source, storage_options=options(endpoint)) as dataset:
        next(iter(dataset))
    found = epoch(source, storage_options=options(endpoint), num_workers=workers, start_method=start_method)
    assert_same_epoch(found, epoch(tiny_dataset.root, num_workers=workers))
    for file in (isolated_home / "lerobot").rglob("*"):
        if file.is_file():
            assert b"SENTINEL" not in file.read_bytes()


def test_credentials_of_the_environment(
    endpoint: str,
    source: str,
    tiny_dataset: WrittenDataset,
    monkeypatch: pytest.MonkeyPatch,
    lrstream: Program,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    result = lrstream("build", source, "--json").document()["result"]
    assert (result["origin"], result["files"]) == ("built", 3)
    # Sizes come from the listing, the index from one range of each file.
    assert result["requests"] == 3
    assert lrstream("validate", source).code == 0
    with ArchiveReader(result["path"]) as reader:
        listed = {
            info["Key"].removeprefix(source.removeprefix("s3://") + "/"): info["ETag"]
            for info in client(endpoint).find(source, detail=True).values()
        }
        assert reader.identity.data_root == source
        assert reader.identity.source_fingerprints == {path: listed[path] for path in reader.paths}
    assert lrstream("build", source, "--json").document()["result"]["origin"] == "cache"
    outcome = lrstream("publish", result["path"], source, "--json")
    assert (outcome.code, outcome.codes()) == (2, ["usage"])
    assert_same_epoch(epoch(source), epoch(tiny_dataset.root))


def test_an_object_is_replaced_by_one_of_the_same_size(endpoint: str, source: str) -> None:
    path = "videos/observation.images.front/chunk-000/file-000.mp4"
    with StreamingLeRobotDataset(source, storage_options=options(endpoint)) as dataset:
        first = dataset.root
    store = open_store(parse_location(source), storage_options=options(endpoint))
    before = store.file_info([path])[path]
    data = bytearray(store.read_bytes(path))
    data[-1] ^= 1
    client(endpoint).pipe_file(f"{source}/{path}", bytes(data))
    after = store.file_info([path])[path]
    assert (before.size, before.fingerprint != after.fingerprint) == (after.size, True)
    assert first == source


def test_an_object_is_cut_short(endpoint: str, source: str) -> None:
    store = open_store(parse_location(source), storage_options=options(endpoint))
    path = "videos/observation.images.front/chunk-000/file-000.mp4"
    opened = store.open(path, store.file_info([path])[path].size)
    size = opened.size()
    client(endpoint).pipe_file(f"{source}/{path}", b"short")
    with pytest.raises(TransferError, match=r"file-000.mp4"):
        opened.read(size - 100, size)


def test_no_credentials_and_no_bucket(
    endpoint: str, source: str, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    without = {"client_kwargs": options(endpoint)["client_kwargs"]}
    with pytest.raises(AccessError, match="no usable credentials") as caught:
        open_store(parse_location(source), storage_options=without).read_bytes("meta/info.json")
    assert "SENTINEL" not in str(caught.value)
    missing = open_store(parse_location(f"s3://{bucket}-none/pick"), storage_options=options(endpoint))
    with pytest.raises(NotFoundError):
        missing.read_bytes("meta/info.json")
    assert missing.list_files() == {}
    assert "SENTINEL" not in repr(missing)


def test_no_network(source: str) -> None:
    nowhere = options("http://127.0.0.1:9")
    nowhere["config_kwargs"] = {"retries": {"total_max_attempts": 1}, "connect_timeout": 1}
    store = open_store(parse_location(source), storage_options=nowhere)
    with pytest.raises(TransferError, match=r"s3://.*meta/info.json could not be read") as caught:
        store.read_bytes("meta/info.json")
    assert "SENTINEL" not in str(caught.value)


def test_a_store_travels_with_its_options(endpoint: str, source: str) -> None:
    store = open_store(parse_location(source), storage_options=options(endpoint))
    store.read_bytes("meta/info.json")
    again = pickle.loads(pickle.dumps(store))
    assert again.read_bytes("meta/info.json") == store.read_bytes("meta/info.json")


# memory://, which lives in one process


@pytest.fixture
def memory(tiny_dataset: WrittenDataset) -> Iterator[str]:
    """URL of the tiny dataset in memory."""
    filesystem = fsspec.filesystem("memory")
    for file in tiny_dataset.root.rglob("*"):
        if file.is_file():
            name = file.relative_to(tiny_dataset.root).as_posix()
            filesystem.pipe_file(f"/pick/{name}", file.read_bytes())
    yield "memory://pick"
    filesystem.rm("/pick", recursive=True)


def test_training_from_memory(memory: str, tiny_dataset: WrittenDataset) -> None:
    assert_same_epoch(epoch(memory, world_size=2), epoch(tiny_dataset.root, world_size=2))


def test_identity_in_memory(memory: str, lrstream: Program) -> None:
    """Whatever identity the file system has decides; where it has none, the index is made anew (SC-6)."""
    first = lrstream("build", memory, "--json").document()["result"]
    store = open_store(parse_location(memory))
    path = "videos/observation.images.front/chunk-000/file-000.mp4"
    one, other = store.file_info([path])[path], store.file_info([path])[path]
    again = lrstream("build", memory, "--json").document()["result"]
    assert first["origin"] == "built"
    assert again["origin"] == ("cache" if one.fingerprint == other.fingerprint else "built")


def test_file_urls_are_local(tiny_dataset: WrittenDataset) -> None:
    assert_same_epoch(epoch(f"file://{tiny_dataset.root}"), epoch(tiny_dataset.root))
