"""The loopback Hub, tried with the real huggingface_hub client and with a plain HTTP client."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import struct
import threading
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import hf_xet  # type: ignore[import-untyped]
import huggingface_hub
import pyarrow as pa
import pytest
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from tests.support.hub import LoopbackHub, run_python
from tests.support.hub.xet_format import xorb_chunks

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(30)

REPO = "robots/pick"
BUCKET = "robots/store"
VIDEO = "videos/front/chunk-000/file-000.mp4"
CLIENT_VERSION = tuple(int(part) for part in huggingface_hub.__version__.split(".")[:2])
needs_buckets = pytest.mark.skipif(CLIENT_VERSION < (1, 6), reason="this client has no buckets")


class Answer(NamedTuple):
    """What the plain client got."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(
    url: str, headers: Mapping[str, str] | None = None, *, method: str = "GET", body: bytes | None = None
) -> Answer:
    """One request over a connection of its own; redirects are not followed, nothing is retried."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=5)
    try:
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request(method, target, body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two small files, one LFS file of 300 kB and a directory with ten files."""
    root = tmp_path / "dataset"
    contents = {
        "README.md": b"# hello\n",
        "meta/info.json": b'{"codebase_version": "v3.0"}',
        VIDEO: random.Random(1).randbytes(300_000),
        **{f"notes/{number}.txt": b"%d" % number for number in range(10)},
    }
    for path, data in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


@pytest.fixture
def video(folder: Path) -> bytes:
    """Content of the LFS file."""
    return (folder / VIDEO).read_bytes()


@pytest.fixture
def hub(loopback_hub: LoopbackHub, folder: Path) -> LoopbackHub:
    """A Hub with the folder as dataset ``robots/pick``."""
    loopback_hub.create_dataset(REPO, folder)
    return loopback_hub


def api_of(hub: LoopbackHub, token: str | bool = False) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=token)


def resolve_url(hub: LoopbackHub, path: str = VIDEO, revision: str = "main") -> str:
    return f"{hub.endpoint}/datasets/{REPO}/resolve/{revision}/{path}"


def signed_url(hub: LoopbackHub, path: str = VIDEO) -> str:
    return ask(resolve_url(hub, path)).headers["location"]


# The client reads


def test_info_and_references(hub: LoopbackHub, folder: Path) -> None:
    first = hub.references(REPO)["refs/heads/main"]
    hub.tag(REPO, "v3.0")
    second = hub.commit_files(REPO, {"README.md": b"changed"}, title="Say more")
    api = api_of(hub)

    info = api.dataset_info(REPO, files_metadata=True)
    assert info.sha == second != first
    files = {item.rfilename: item for item in info.siblings or []}
    assert set(files) == {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files[VIDEO].size == 300_000
    assert api.dataset_info(REPO, revision="v3.0").sha == first
    assert api.dataset_info(REPO, revision=first).sha == first

    references = api.list_repo_refs(REPO, repo_type="dataset")
    assert [(ref.name, ref.target_commit) for ref in references.branches] == [("main", second)]
    assert [(ref.name, ref.target_commit) for ref in references.tags] == [("v3.0", first)]
    commits = api.list_repo_commits(REPO, repo_type="dataset")
    assert [commit.commit_id for commit in commits][:2] == [second, first]
    assert commits[0].title == "Say more"


def test_listings_and_paths(hub: LoopbackHub, folder: Path, video: bytes) -> None:
    api = api_of(hub)
    top = {item.path for item in api.list_repo_tree(REPO, repo_type="dataset")}
    assert top == {"README.md", "meta", "notes", "videos"}
    below = list(api.list_repo_tree(REPO, "videos", repo_type="dataset", recursive=True, expand=True))
    assert [item.path for item in below] == ["videos/front", "videos/front/chunk-000", VIDEO]
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "nowhere", repo_type="dataset"))

    found = api.get_paths_info(REPO, [VIDEO, "absent", "meta"], repo_type="dataset", expand=True)
    assert [item.path for item in found] == [VIDEO, "meta"]
    file = found[0]
    assert isinstance(file, RepoFile)
    assert file.size == len(video)
    assert file.lfs is not None
    assert file.lfs.sha256 == hashlib.sha256(video).hexdigest()
    assert file.last_commit is not None
    assert file.last_commit.oid == hub.references(REPO)["refs/heads/main"]
    [listed] = json.loads(ask(f"{hub.endpoint}/api/datasets/{REPO}/tree/main/videos/front/chunk-000").body)
    assert listed["xetHash"] == hf_xet.hash_files([str(folder / VIDEO)])[0].hash


def test_pages_follow_each_other(hub: LoopbackHub) -> None:
    hub.settings.page_size = 4
    api = api_of(hub)
    paths = [item.path for item in api.list_repo_tree(REPO, repo_type="dataset", recursive=True)]
    assert len(paths) == len(set(paths)) == 13 + 5
    assert hub.log.count("/tree/main", method="GET") == 5


@pytest.mark.parametrize("redirect", [False, True])
def test_small_file_comes_from_the_hub_itself(hub: LoopbackHub, tmp_path: Path, redirect: bool) -> None:
    hub.settings.regular_redirect = redirect
    path = hf_hub_download(
        REPO, "meta/info.json", repo_type="dataset", endpoint=hub.endpoint, cache_dir=tmp_path, token=False
    )
    assert json.loads(Path(path).read_text()) == {"codebase_version": "v3.0"}
    assert hub.references(REPO)["refs/heads/main"] in path
    assert hub.log.count(server="cdn") == 0
    assert (hub.log.count(status=307) > 0) == redirect


def test_lfs_file_comes_from_the_other_host_without_the_token(
    hub: LoopbackHub, tmp_path: Path, video: bytes
) -> None:
    hub.settings.xet = False
    path = hf_hub_download(
        REPO, VIDEO, repo_type="dataset", endpoint=hub.endpoint, cache_dir=tmp_path, token=hub.read_token
    )
    assert Path(path).read_bytes() == video
    asked = hub.log.records(VIDEO, server="hub")
    assert {record.authorization for record in asked} == {f"Bearer {hub.read_token}"}
    fetched = hub.log.records(server="cdn")
    assert [(record.status, record.bytes_sent) for record in fetched] == [(200, len(video))]
    assert fetched[0].authorization is None
    assert fetched[0].host == hub.cdn_host != urlsplit(hub.endpoint).netloc


def test_ranged_read_through_the_redirect(hub: LoopbackHub, video: bytes) -> None:
    fs = HfFileSystem(endpoint=hub.endpoint, token=hub.read_token, skip_instance_cache=True)
    with fs.open(f"datasets/{REPO}/{VIDEO}", block_size=1000) as file:
        file.seek(200_000)
        assert file.read(99) == video[200_000:200_099]
    [fetched] = hub.log.records(server="cdn")
    assert fetched.range is not None
    assert fetched.range.startswith("bytes=200000-")
    assert fetched.status == 206
    assert fetched.authorization is None


def test_commits_are_immutable(hub: LoopbackHub, video: bytes) -> None:
    first = hub.references(REPO)["refs/heads/main"]
    hub.commit_files(REPO, {"new.txt": b"new"}, delete=[VIDEO])
    assert ask(resolve_url(hub)).status == 404
    assert ask(ask(resolve_url(hub, revision=first)).headers["location"]).body == video
    assert "new.txt" not in hub.dataset_files(REPO, first)


# Access


def test_who_may_do_what(hub: LoopbackHub, folder: Path) -> None:
    hub.create_dataset("robots/secret", folder, private=True)
    hub.create_dataset("robots/gated", folder, gated=True)
    reader, writer, stranger = (api_of(hub, t) for t in (hub.read_token, hub.write_token, hub.stranger_token))

    assert reader.whoami()["auth"]["accessToken"]["role"] == "read"
    assert writer.whoami()["name"] == "writer"
    assert reader.dataset_info("robots/secret").private
    for api, status in ((api_of(hub), 401), (stranger, 404)):
        with pytest.raises(RepositoryNotFoundError) as hidden:
            api.dataset_info("robots/secret")
        assert hidden.value.response.status_code == status
        assert hidden.value.response.headers["X-Error-Code"] == "RepoNotFound"
    with pytest.raises(HfHubHTTPError, match="Invalid credentials") as unknown:
        api_of(hub, "hf_nobody").dataset_info(REPO)
    assert not isinstance(unknown.value, RepositoryNotFoundError)

    assert stranger.dataset_info("robots/gated").gated == "manual"
    with pytest.raises(GatedRepoError):
        list(stranger.list_repo_tree("robots/gated", repo_type="dataset"))
    assert list(reader.list_repo_tree("robots/gated", repo_type="dataset"))

    with pytest.raises(RevisionNotFoundError):
        reader.dataset_info(REPO, revision="v9")
    with pytest.raises(EntryNotFoundError):
        reader.hf_hub_download(REPO, "absent.json", repo_type="dataset")


def test_writing_needs_a_write_token(hub: LoopbackHub) -> None:
    before = hub.references(REPO)
    for token, status in ((hub.read_token, 403), (hub.stranger_token, 403), (False, 401)):
        with pytest.raises(HfHubHTTPError) as refused:
            api_of(hub, token).create_branch(REPO, branch="lerobot-sidecars", repo_type="dataset")
        assert refused.value.response.status_code == status
    with pytest.raises(HfHubHTTPError, match="write token"):
        api_of(hub, hub.read_token).upload_file(
            path_or_fileobj=b"x", path_in_repo="x.txt", repo_id=REPO, repo_type="dataset"
        )
    assert hub.references(REPO) == before
    with pytest.raises(HfHubHTTPError) as refused:
        api_of(hub, hub.read_token).create_branch(REPO, branch="main", repo_type="dataset")
    assert refused.value.response.status_code == 403


# The client writes

UPLOAD = """
from huggingface_hub import HfApi, hf_hub_download
repo, revision, source = {arguments!r}
api = HfApi()
api.create_branch(repo, branch="lerobot-sidecars", revision=revision, repo_type="dataset")
done = api.upload_file(path_or_fileobj=source, path_in_repo="meta/a.npz", repo_id=repo, repo_type="dataset",
                       revision="lerobot-sidecars", parent_commit=revision)
back = hf_hub_download(repo, "meta/a.npz", repo_type="dataset", revision=done.oid)
assert open(back, "rb").read() == open(source, "rb").read()
print(done.oid)
"""


@pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])
def test_upload_to_a_new_branch(hub: LoopbackHub, tmp_path: Path, xet: bool) -> None:
    # Noise, text and floats: stored, compressed, and compressed by groups of bytes.
    noise = random.Random(2)
    floats = struct.pack("<50000f", *(1 + number / 5e4 + noise.random() * 1e-4 for number in range(50_000)))
    content = noise.randbytes(100_000) + b"lerobot " * 50_000 + floats
    source = tmp_path / "a.npz"
    source.write_bytes(content)
    base = hub.references(REPO)["refs/heads/main"]
    env = hub.env(hub.write_token, extra={} if xet else {"HF_HUB_DISABLE_XET": "1"})
    hub.log.clear()

    child = run_python(UPLOAD.format(arguments=(REPO, base, str(source))), env)

    assert child.returncode == 0, child.stderr
    commit = child.stdout.strip()
    assert hub.references(REPO) == {"refs/heads/main": base, "refs/heads/lerobot-sidecars": commit}
    assert hub.dataset_files(REPO, commit)["meta/a.npz"] == content
    assert "meta/a.npz" not in hub.dataset_files(REPO, "main")
    assert ask(signed_url(hub)).status == 200
    used = {"xorbs": hub.log.count("/v1/xorbs/"), "batch": hub.log.count("/objects/batch")}
    assert (used["xorbs"] > 0) is xet
    assert (used["batch"] > 0) is not xet
    assert hub.log.count(server="cdn", method="PUT") == (0 if xet else 1)
    leaks = [r for r in hub.log if r.server != "hub" and hub.write_token in (r.authorization or "")]
    assert leaks == []


@pytest.mark.parametrize("mode", ["lfs", "regular"])
def test_the_server_chooses_the_upload_mode(loopback_hub: LoopbackHub, mode: Any) -> None:
    loopback_hub.create_dataset(REPO, lfs_mode=mode)
    answer = ask(
        f"{loopback_hub.endpoint}/api/datasets/{REPO}/preupload/main",
        method="POST",
        body=json.dumps({"files": [{"path": "a.npz", "size": 3, "sample": ""}]}).encode(),
        headers={"Authorization": f"Bearer {loopback_hub.write_token}"},
    )
    assert [file["uploadMode"] for file in json.loads(answer.body)["files"]] == [mode]


def test_regular_commit_and_its_conflicts(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.connect_process(monkeypatch, hub.write_token)
    api = HfApi()
    base = hub.references(REPO)["refs/heads/main"]
    done = api.upload_file(
        path_or_fileobj=b"one", path_in_repo="a.txt", repo_id=REPO, repo_type="dataset", parent_commit=base
    )
    assert hub.dataset_files(REPO)["a.txt"] == b"one"
    assert hub.references(REPO)["refs/heads/main"] == done.oid
    with pytest.raises(HfHubHTTPError) as conflict:
        api.upload_file(
            path_or_fileobj=b"2", path_in_repo="a.txt", repo_id=REPO, repo_type="dataset", parent_commit=base
        )
    assert conflict.value.response.status_code == 412
    api.delete_folder("notes", REPO, repo_type="dataset")
    assert not any(path.startswith("notes/") for path in hub.dataset_files(REPO))
    with pytest.raises(HfHubHTTPError) as conflict:
        api.create_branch(REPO, branch="main", repo_type="dataset")
    assert conflict.value.response.status_code == 409
    api.create_branch(REPO, branch="main", repo_type="dataset", exist_ok=True)
    api.create_tag(REPO, tag="v1", revision=base, repo_type="dataset")
    assert hub.references(REPO)["refs/tags/v1"] == base
    assert api.create_repo("robots/other", repo_type="dataset").repo_id == "robots/other"
    api.create_repo("robots/other", repo_type="dataset", exist_ok=True)


@pytest.mark.parametrize("_time", [1, 2])
def test_this_process_as_a_client(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, video: bytes, _time: int
) -> None:
    """Twice: the file system and its settings must not be those of the Hub before."""
    hub.connect_process(monkeypatch, hub.read_token)
    assert HfFileSystem().cat_file(f"hf://datasets/{REPO}@main/{VIDEO}", start=10, end=20) == video[10:20]
    path = hf_hub_download(REPO, "README.md", repo_type="dataset", cache_dir=tmp_path)
    assert Path(path).read_bytes() == b"# hello\n"
    assert {r.authorization for r in hub.log if r.server == "hub"} == {f"Bearer {hub.read_token}"}


def test_a_lost_reply_leaves_the_commit(hub: LoopbackHub) -> None:
    base = hub.references(REPO)["refs/heads/main"]
    fault = hub.faults.add(f"/api/datasets/{REPO}/commit/main", "lose-reply", times=1)
    with pytest.raises(Exception, match=r"(?i)reset|disconnect|aborted"):
        api_of(hub, hub.write_token).upload_file(
            path_or_fileobj=b"one", path_in_repo="a.txt", repo_id=REPO, repo_type="dataset"
        )
    assert fault.hits == 1
    assert hub.references(REPO)["refs/heads/main"] != base
    assert hub.dataset_files(REPO)["a.txt"] == b"one"


def test_commit_of_an_lfs_file_that_was_never_uploaded_is_refused(hub: LoopbackHub) -> None:
    lines = [
        {"key": "header", "value": {"summary": "s"}},
        {"key": "lfsFile", "value": {"path": "a.npz", "algo": "sha256", "oid": "0" * 64, "size": 3}},
    ]
    answer = ask(
        f"{hub.endpoint}/api/datasets/{REPO}/commit/main",
        method="POST",
        body="\n".join(map(json.dumps, lines)).encode(),
        headers={"Authorization": f"Bearer {hub.write_token}"},
    )
    assert answer.status == 400
    assert "a.npz" not in hub.dataset_files(REPO)


# Buckets

BUCKET_SCRIPT = """
import json
from huggingface_hub import HfApi
bucket, video, target = {arguments!r}
api = HfApi()
api.batch_bucket_files(bucket, add=[(b"sidecar" * 1000, "meta/mp4-sidecars/a.npz")], delete=["README.md"])
api.download_bucket_files(bucket, [(video, target + "/v"), ("meta/mp4-sidecars/a.npz", target + "/a")])
listed = list(api.list_bucket_tree(bucket, recursive=True))
print(json.dumps({{item.path: [item.size, item.xet_hash, item.mtime.timestamp()] for item in listed}}))
"""


@needs_buckets
def test_bucket_listing_upload_download(loopback_hub: LoopbackHub, folder: Path, tmp_path: Path) -> None:
    loopback_hub.create_bucket(BUCKET, folder)
    loopback_hub.settings.page_size = 5
    target = tmp_path / "got"
    script = BUCKET_SCRIPT.format(arguments=(BUCKET, VIDEO, str(target)))

    child = run_python(script, loopback_hub.env(loopback_hub.write_token))

    assert child.returncode == 0, child.stderr
    assert (target / "v").read_bytes() == (folder / VIDEO).read_bytes()
    assert (target / "a").read_bytes() == b"sidecar" * 1000
    kept = loopback_hub.bucket_files(BUCKET)
    assert kept["meta/mp4-sidecars/a.npz"] == b"sidecar" * 1000
    assert "README.md" not in kept
    listed = json.loads(child.stdout)
    assert {path: size for path, (size, _, _) in listed.items()} == {p: len(d) for p, d in kept.items()}
    assert loopback_hub.log.count("/tree") == 3
    assert loopback_hub.log.count("/xet-write-token", method="GET") == 1
    assert loopback_hub.log.count("/batch", method="POST") == 1


@needs_buckets
def test_bucket_read_by_file_system(loopback_hub: LoopbackHub, folder: Path, video: bytes) -> None:
    loopback_hub.create_bucket(BUCKET, folder, private=True)
    loopback_hub.put_bucket_file(BUCKET, "metadata.txt", b"m")
    fs = HfFileSystem(endpoint=loopback_hub.endpoint, token=loopback_hub.read_token, skip_instance_cache=True)
    assert fs.ls(f"buckets/{BUCKET}/meta", detail=False) == [f"buckets/{BUCKET}/meta/info.json"]
    with fs.open(f"buckets/{BUCKET}/{VIDEO}", block_size=1000) as file:
        file.seek(1234)
        assert file.read(10) == video[1234:1244]
    # The Hub compares the prefix as text.
    api = api_of(loopback_hub, loopback_hub.read_token)
    found = [item.path for item in api.list_bucket_tree(BUCKET, "meta", recursive=True)]
    assert found == ["meta/info.json", "metadata.txt"]
    with pytest.raises(HfHubHTTPError) as hidden:
        api_of(loopback_hub).bucket_info(BUCKET)
    assert hidden.value.response.status_code == 401
    with pytest.raises(HfHubHTTPError) as refused:
        api.batch_bucket_files(BUCKET, delete=["metadata.txt"])
    assert refused.value.response.status_code == 403


@needs_buckets
def test_bucket_file_replaced_at_equal_size_and_time(
    loopback_hub: LoopbackHub, folder: Path, video: bytes
) -> None:
    loopback_hub.create_bucket(BUCKET, folder)
    api = api_of(loopback_hub)
    [before] = api.get_bucket_paths_info(BUCKET, [VIDEO])
    loopback_hub.replace_bucket_file(BUCKET, VIDEO, video[::-1])
    [after] = api.get_bucket_paths_info(BUCKET, [VIDEO])
    assert (after.size, after.mtime) == (before.size, before.mtime)
    assert after.xet_hash != before.xet_hash
    location = ask(f"{loopback_hub.endpoint}/buckets/{BUCKET}/resolve/{VIDEO}").headers["location"]
    assert ask(location).body == video[::-1]


# Ranges and signed URLs


@pytest.mark.parametrize(
    ("asked", "status", "content_range", "part"),
    [
        (None, 200, None, slice(None)),
        ("bytes=0-0", 206, "bytes 0-0/300000", slice(0, 1)),
        ("bytes=100-199", 206, "bytes 100-199/300000", slice(100, 200)),
        ("bytes=299990-400000", 206, "bytes 299990-299999/300000", slice(299_990, None)),
        ("bytes=299999-", 206, "bytes 299999-299999/300000", slice(299_999, None)),
        ("bytes=-10", 206, "bytes 299990-299999/300000", slice(299_990, None)),
        ("bytes=300000-300001", 416, "bytes */300000", slice(0, 0)),
    ],
)
def test_ranges(
    hub: LoopbackHub, video: bytes, asked: str | None, status: int, content_range: str | None, part: slice
) -> None:
    answer = ask(signed_url(hub), {"Range": asked} if asked else None)
    assert answer.status == status
    assert answer.headers.get("content-range") == content_range
    assert answer.body == video[part]
    assert answer.headers["content-length"] == str(len(answer.body))


def test_signed_urls_expire_and_cannot_be_changed(hub: LoopbackHub) -> None:
    url = signed_url(hub)
    assert ask(url).status == 200
    assert ask(url.split("?")[0]).status == 403
    assert ask(url.replace("front", "side")).status == 403
    hub.signer.expire_all()
    assert ask(url).status == 403
    renewed = signed_url(hub)
    assert renewed != url
    assert ask(renewed).status == 200
    hub.signer.lifetime_s = 0.05
    short = signed_url(hub)
    time.sleep(0.1)
    assert ask(short).status == 403


def test_head_of_an_lfs_file(hub: LoopbackHub) -> None:
    answer = ask(resolve_url(hub), method="HEAD")
    assert answer.status == 302
    assert answer.headers["x-linked-size"] == "300000"
    assert len(answer.headers["x-linked-etag"].strip('"')) == 64
    assert len(answer.headers["x-xet-hash"]) == 64
    assert answer.headers["x-repo-commit"] == hub.references(REPO)["refs/heads/main"]
    assert urlsplit(answer.headers["location"]).hostname == "localhost"
    assert answer.body == b""


# Faults, as a plain client sees them


@pytest.mark.parametrize(
    ("kind", "arguments", "status", "headers"),
    [
        ("rate-limit", {"retry_after": 2}, 429, {"retry-after": "2"}),
        ("rate-limit", {"ratelimit": 3}, 429, {"ratelimit": '"resolvers";r=0;t=3'}),
        ("timeout", {}, 408, {}),
        ("server-error", {}, 503, {}),
        ("server-error", {"status": 500, "retry_after": 1}, 500, {"retry-after": "1"}),
        ("status", {"status": 404, "headers": {"X-Error-Code": "EntryNotFound"}}, 404, {}),
        ("expired-url", {}, 403, {}),
    ],
)
def test_faults_that_replace_the_reply(
    hub: LoopbackHub, kind: Any, arguments: dict[str, Any], status: int, headers: dict[str, str]
) -> None:
    fault = hub.faults.add(r"file-000\.mp4$", kind, times=1, server="cdn", **arguments)
    url = signed_url(hub)
    answer = ask(url)
    assert answer.status == status
    assert headers.items() <= answer.headers.items()
    assert ask(url).status == 200
    assert fault.hits == 1
    assert [record.status for record in hub.log.records(fault=kind)] == [status]


def test_retry_after_as_a_date(hub: LoopbackHub) -> None:
    hub.faults.add("file-000", "rate-limit", retry_after=5, http_date=True)
    date = parsedate_to_datetime(ask(resolve_url(hub)).headers["retry-after"])
    assert 4.0 < date.timestamp() - time.time() < 6.5


def test_forbidden_for_ever(hub: LoopbackHub) -> None:
    hub.faults.add("file-000", "forbidden", server="cdn")
    answers = [ask(signed_url(hub)) for _ in range(3)]
    assert [(answer.status, answer.body) for answer in answers] == [(403, b"SignatureError")] * 3


@pytest.mark.parametrize("after", [0, 1000])
def test_reset_after_headers(hub: LoopbackHub, after: int) -> None:
    hub.faults.add("file-000", "reset-after-headers", server="cdn", after_bytes=after)
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        ask(signed_url(hub))
    hub.log.wait_until_idle()
    [record] = hub.log.records(server="cdn")
    assert (record.status, record.bytes_sent) == (200, after)


def test_reset_before_headers(hub: LoopbackHub) -> None:
    hub.faults.add("file-000", "reset", times=1)
    with pytest.raises(ConnectionResetError):
        ask(resolve_url(hub))
    assert [record.status for record in hub.log.records(fault="reset")] == [0]
    assert ask(resolve_url(hub)).status == 302


def test_truncated_body(hub: LoopbackHub) -> None:
    hub.faults.add("file-000", "truncate", server="cdn", after_bytes=700)
    with pytest.raises(http.client.IncompleteRead) as cut:
        ask(signed_url(hub), {"Range": "bytes=0-999"})
    assert len(cut.value.partial) == 700


def test_wrong_ranges_and_bytes(hub: LoopbackHub, video: bytes) -> None:
    url = signed_url(hub)
    asked = {"Range": "bytes=100-199"}
    right = video[100:200]

    hub.faults.add("file-000", "ignore-range", times=1)
    answer = ask(url, asked)
    assert (answer.status, answer.body) == (200, video)
    assert "content-range" not in answer.headers

    hub.faults.add("file-000", "wrong-content-range", times=1, shift=7)
    answer = ask(url, asked)
    assert (answer.status, answer.body) == (206, right)
    assert answer.headers["content-range"] == "bytes 107-206/300000"

    hub.faults.add("file-000", "short-body", times=1, missing_bytes=3)
    answer = ask(url, asked)
    assert (answer.status, answer.body) == (206, right[:-3])
    assert answer.headers["content-range"] == "bytes 100-199/300000"

    hub.faults.add("file-000", "flip-byte", times=1, offset=5)
    answer = ask(url, asked)
    assert [index for index in range(100) if answer.body[index] != right[index]] == [5]

    hub.faults.add("file-000", "wrong-etag", times=1, etag='"other"')
    assert ask(url, asked).headers["etag"] == '"other"'

    hub.faults.add("file-000", "drop-headers", times=1, names=["ETag"])
    assert "etag" not in ask(url, asked).headers
    assert ask(url, asked).body == right


def test_slow_replies_combine_with_others(hub: LoopbackHub) -> None:
    url = signed_url(hub)
    hub.faults.add("file-000", "slow", latency_s=0.2, bytes_per_s=1_000_000)
    begun = time.monotonic()
    assert len(ask(url).body) == 300_000
    assert time.monotonic() - begun >= 0.45
    hub.faults.add("file-000", "timeout")
    begun = time.monotonic()
    assert ask(url).status == 408
    assert time.monotonic() - begun >= 0.19


def test_faults_by_chance_repeat_with_the_seed(hub: LoopbackHub) -> None:
    fault = hub.faults.add("info.json", "timeout", probability=0.5, after=2)

    def statuses() -> list[int]:
        hub.faults.seed(7)
        return [ask(resolve_url(hub, "meta/info.json")).status for _ in range(20)]

    first = statuses()
    assert first[:2] == [200, 200]
    assert 0 < fault.hits < 20
    assert statuses()[:18] == first[2:]
    hub.faults.clear()
    assert set(statuses()) == {200}
    with pytest.raises(TypeError, match="bytes"):
        hub.faults.add("x", "timeout", bytes=3)
    with pytest.raises(ValueError, match="unknown fault"):
        hub.faults.add("x", "gremlin")  # type: ignore[arg-type]


def test_real_client_meets_a_fault(hub: LoopbackHub) -> None:
    hub.faults.add("/api/datasets/", "rate-limit", retry_after=30)
    with pytest.raises(HfHubHTTPError) as limited:
        api_of(hub).dataset_info(REPO)
    assert limited.value.response.status_code == 429
    assert limited.value.response.headers["Retry-After"] == "30"


# The log, and the life of the servers


def test_log(hub: LoopbackHub) -> None:
    url = signed_url(hub)
    ask(url, {"Range": "bytes=0-9", "Authorization": "Bearer leaked"})
    ask(f"{hub.endpoint}/api/datasets/{REPO}/tree/main/videos%2Ffront?recursive=true")
    redirected, fetched, listed = hub.log
    assert (redirected.server, redirected.method, redirected.status) == ("hub", "GET", 302)
    assert redirected.authorization is None
    assert redirected.range is None
    assert fetched.url == url.removeprefix(hub.cdn_url)
    assert "Signature=" in fetched.query
    assert (fetched.range, fetched.authorization) == ("bytes=0-9", "Bearer leaked")
    assert (fetched.status, fetched.bytes_sent, fetched.host) == (206, 10, hub.cdn_host)
    assert listed.path == f"/api/datasets/{REPO}/tree/main/videos/front"
    assert listed.raw_path.endswith("videos%2Ffront")
    assert listed.query == "recursive=true"
    assert hub.log.count("file-000", server="cdn", status=206) == 1
    assert hub.log.bytes_sent(server="cdn") == 10
    hub.log.clear()
    assert len(hub.log) == 0


def test_connections_are_kept_alive(hub: LoopbackHub) -> None:
    connection = http.client.HTTPConnection(urlsplit(hub.endpoint).netloc, timeout=5)
    sockets = set()
    for path in ("meta/info.json", "README.md", "absent", "meta/info.json"):
        connection.request("GET", urlsplit(resolve_url(hub, path)).path)
        connection.getresponse().read()
        sockets.add(connection.sock)
    connection.close()
    assert len(sockets) == 1
    assert None not in sockets


def test_sixteen_readers_at_once(hub: LoopbackHub, video: bytes) -> None:
    wrong: list[int] = []

    def read(number: int) -> None:
        start = number * 10_000
        answer = ask(signed_url(hub), {"Range": f"bytes={start}-{start + 9_999}"})
        if answer.body != video[start : start + 10_000]:
            wrong.append(number)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(16)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert hub.log.bytes_sent(server="cdn") == 160_000


def test_nothing_is_left_behind(folder: Path) -> None:
    before = set(threading.enumerate())
    hub = LoopbackHub.start()
    hub.create_dataset(REPO, folder)
    hub.faults.add("README", "slow", latency_s=60)
    idle = http.client.HTTPConnection(urlsplit(hub.endpoint).netloc, timeout=5)
    idle.request("GET", urlsplit(resolve_url(hub, "meta/info.json")).path)
    idle.getresponse().read()
    waiting = http.client.HTTPConnection(urlsplit(hub.endpoint).netloc, timeout=5)
    waiting.request("GET", urlsplit(resolve_url(hub, "README.md")).path)

    begun = time.monotonic()
    hub.stop()

    assert time.monotonic() - begun < 3
    assert {thread for thread in set(threading.enumerate()) - before if "loopback" in thread.name} == set()
    assert not hub.home.exists()
    with pytest.raises(ConnectionRefusedError):
        ask(hub.endpoint)
    idle.close()
    waiting.close()


def test_a_bug_of_the_double_is_reported() -> None:
    hub = LoopbackHub.start()
    hub.create_bucket(BUCKET)
    answer = ask(f"{hub.endpoint}/api/buckets/{BUCKET}/paths-info", method="POST", body=b"not json")
    assert answer.status == 500
    with pytest.raises(AssertionError, match="JSONDecodeError"):
        hub.stop()


# Formats


def test_chunks_of_an_uploaded_xorb() -> None:
    raw = bytes(range(256)) * 4 + b"\x01\x02\x03"
    lanes = [[raw[index] for index in range(lane, len(raw), 4)] for lane in range(4)]
    grouped = bytes(value for lane in lanes for value in lane)

    def chunk(scheme: int, stored: bytes) -> bytes:
        return (
            b"\0"
            + struct.pack("<I", len(stored))[:3]
            + bytes([scheme])
            + struct.pack("<I", len(raw))[:3]
            + stored
        )

    lz4 = pa.compress(raw, codec="lz4", asbytes=True)
    grouped_lz4 = pa.compress(grouped, codec="lz4", asbytes=True)
    xorb = chunk(0, raw) + chunk(1, lz4) + chunk(2, grouped_lz4)
    assert xorb_chunks(xorb) == [raw, raw, raw]
    assert xorb_chunks(xorb + b"XETBLOB footer") == [raw, raw, raw]
    with pytest.raises(ValueError, match="cut off"):
        xorb_chunks(xorb[:-1])
    with pytest.raises(ValueError, match="compression"):
        xorb_chunks(chunk(9, raw))
