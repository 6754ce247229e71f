"""Stores on fsspec file systems: verified ranges, fresh listings, identities, mapped errors."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lrstream.errors import AccessError, LrstreamError, NotFoundError, TransferError, UsageError
from lrstream.storage.byte_source import ByteSource
from lrstream.storage.fsspec_store import FsspecStore
from lrstream.storage.location import Location, parse_location
from lrstream.storage.store import DatasetStore, open_store

CONTENT = bytes(range(200))


@pytest.fixture
def root() -> Iterator[str]:
    """URL of a dataset in memory, whose name no other test uses."""
    name = f"/set-{uuid.uuid4().hex}"
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"{name}/videos/top/file-000.mp4", CONTENT)
    memory.pipe_file(f"{name}/meta/info.json", b"{}")
    yield f"memory:/{name}"
    for stored in [path for path in memory.store if path.startswith(f"{name}/")]:
        del memory.store[stored]


@pytest.fixture
def store(root: str) -> FsspecStore:
    opened = open_store(parse_location(root))
    assert isinstance(opened, FsspecStore)
    return opened


def test_reads(store: FsspecStore) -> None:
    assert isinstance(store, DatasetStore)
    source = store.open("videos/top/file-000.mp4")
    assert isinstance(source, ByteSource)
    assert source.read(5, 105) == CONTENT[5:105]
    assert source.read(7, 7) == b""
    assert source.read_upto(150, 500) == (CONTENT[150:], 200)
    assert source.size() == 200
    assert store.read_bytes("meta/info.json") == b"{}"
    assert store.counters.bytes_read == 100 + 50 + 2
    source.close()
    assert source.read(0, 1) == CONTENT[:1]


def test_a_known_size_saves_the_request(store: FsspecStore) -> None:
    source = store.open("videos/top/file-000.mp4", size=200)
    assert source.read_upto(190, 300) == (CONTENT[190:], 200)
    assert store.counters.requests == 1


def test_a_short_reply_is_an_error(store: FsspecStore) -> None:
    # fsspec itself returns what there is.
    with pytest.raises(TransferError, match=r"100 bytes were wanted, \[150, 250\), but 50 came"):
        store.open("videos/top/file-000.mp4").read(150, 250)


def test_a_server_that_ignores_ranges_is_an_error(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(memory, "cat_file", lambda *_, **__: CONTENT)
    with pytest.raises(TransferError, match=r"5 bytes were wanted.*200 came"):
        store.open("videos/top/file-000.mp4").read(0, 5)


def test_listing_and_existence(store: FsspecStore) -> None:
    assert list(store.list_files()) == ["meta/info.json", "videos/top/file-000.mp4"]
    assert list(store.list_files("videos/")) == ["videos/top/file-000.mp4"]
    assert store.list_files("none") == {}
    assert store.exists("meta/info.json")
    assert not store.exists("meta/none.json")
    assert not store.exists("meta")
    with pytest.raises(NotFoundError, match=r"1 of 2 files do not exist .*: videos/none\.mp4"):
        store.file_info(["videos/top/file-000.mp4", "videos/none.mp4"])
    with pytest.raises(NotFoundError, match=r"none\.json does not exist"):
        store.read_bytes("meta/none.json")
    with pytest.raises(UsageError, match="not a file on this machine"):
        store.local_path("meta/info.json")


def test_without_identity_every_fingerprint_is_new(store: FsspecStore) -> None:
    path = "videos/top/file-000.mp4"
    assert store.file_info([path])[path].fingerprint != store.file_info([path])[path].fingerprint


@pytest.mark.parametrize(
    ("facts", "fingerprint"),
    [
        ({"ETag": '"a"', "etag": "b", "mtime": 1}, '"a"'),
        ({"etag": "b", "version_id": "v", "mtime": 1}, "b"),
        ({"version_id": "v", "mtime": 1.5, "LastModified": "x"}, "v"),
        ({"ETag": None, "mtime": 1.5, "LastModified": "x"}, "1.5"),
        ({"LastModified": "2026-01-01"}, "2026-01-01"),
    ],
)
def test_identity_is_the_first_known_fact(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], fingerprint: str
) -> None:
    memory = type(fsspec.filesystem("memory"))
    real = memory.find
    monkeypatch.setattr(
        memory,
        "find",
        lambda self, path, **options: {k: {**v, **facts} for k, v in real(self, path, **options).items()},
    )
    assert store.file_info(["meta/info.json"])["meta/info.json"].fingerprint == fingerprint


class _Remembering(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system that answers from listings it made earlier, as object stores' clients do."""

    protocol = "remembering"
    objects: dict[str, bytes] = {}  # noqa: RUF012  (the stored data, shared by all clients)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            inside = {name for name in self.objects if name.startswith(f"{path}/")}
            if not inside and path in self.objects:
                return [{"name": path, "size": len(self.objects[path]), "type": "file"}]
            if not inside:
                raise FileNotFoundError(path)
            heads = {name[len(path) + 1 :].partition("/")[0] for name in inside}
            self.dircache[path] = [
                {
                    "name": f"{path}/{head}",
                    "size": len(self.objects.get(f"{path}/{head}", b"")),
                    "type": "file" if f"{path}/{head}" in self.objects else "directory",
                    "ETag": f"{hash(self.objects.get(f'{path}/{head}'))}",
                }
                for head in sorted(heads)
            ]
        entries: list[Any] = self.dircache[path]
        return entries if detail else [entry["name"] for entry in entries]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


def test_what_others_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing made earlier must neither hide a new file (K24) nor a replaced one (K23)."""
    fsspec.register_implementation("remembering", _Remembering, clobber=True)
    monkeypatch.setattr(_Remembering, "objects", {"b/set/meta/info.json": b"{}"})
    store = open_store(parse_location("remembering://b/set"))
    before = store.list_files("meta")
    assert list(before) == ["meta/info.json"]
    assert not store.exists("meta/new.npz")
    _Remembering.objects["b/set/meta/new.npz"] = b"1"
    _Remembering.objects["b/set/meta/info.json"] = b"[]"
    assert store.exists("meta/new.npz")
    after = store.list_files("meta")
    assert list(after) == ["meta/info.json", "meta/new.npz"]
    assert after["meta/info.json"].size == before["meta/info.json"].size
    assert after["meta/info.json"].fingerprint != before["meta/info.json"].fingerprint


class NoCredentialsError(Exception):
    """Stands for the class of that name in a client library of an object store."""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (FileNotFoundError("x"), NotFoundError),
        (PermissionError("Forbidden"), AccessError),
        (NoCredentialsError("Unable to locate credentials"), AccessError),
        (TimeoutError(), TransferError),
        (ConnectionResetError(104, "reset"), TransferError),
        (RuntimeError("https://host/x?Signature=SENTINEL failed"), TransferError),
    ],
)
def test_errors_are_mapped_without_secrets(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[LrstreamError]
) -> None:
    def fail(*_: Any, **__: Any) -> bytes:
        raise raised

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", fail)
    with pytest.raises(expected, match=r"meta/info\.json") as caught:
        store.open("meta/info.json").read(0, 1)
    assert "SENTINEL" not in str(caught.value)


def test_a_mistake_in_the_call_is_not_called_a_transfer_failure(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", lambda: b"")
    with pytest.raises(TypeError):
        store.open("meta/info.json").read(0, 1)


def test_options_travel_with_the_store_and_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    location = Location("fsspec", f"file://{tmp_path}")
    store = open_store(location, storage_options={"auto_mkdir": False, "secret": "SENTINEL"})
    copy = pickle.loads(pickle.dumps(store))
    for each in (store, copy):
        assert each.open("a").read(1, 3) == b"23"
        assert "SENTINEL" not in repr(each)
    assert copy._open()[0].storage_options["secret"] == "SENTINEL"
    # Local files through fsspec have a modification time as identity.
    status = (tmp_path / "a").stat()
    assert store.list_files()["a"].fingerprint == str(status.st_mtime)


def test_stores_that_cannot_be_opened() -> None:
    with pytest.raises(UsageError, match="connections is 0, expected at least 1"):
        open_store(parse_location("memory://x"), connections=0)
    with pytest.raises(UsageError, match="subranges is 0, expected at least 1"):
        open_store(parse_location("memory://x"), subranges=0)


def test_a_missing_client_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> type:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", absent)
    with pytest.raises(UsageError, match=r"not installed \(Install s3fs .*lrstream\[s3\]"):
        open_store(parse_location("s3://bucket/set"))
