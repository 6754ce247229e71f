"""A dataset on the Hub, from its first index to training, with the requests that it takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.errors import NotFoundError
from lrstream.storage.hub_pin import newest_compatible_tag, pin_location
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.cli.program import Program, run_process
from tests.support.datasets import DatasetCache
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
pytestmark = pytest.mark.timeout(60)

REPO = "robots/pick"
BRANCH = "lerobot-sidecars"
WRITES = ("PUT", "DELETE", "PATCH")


@pytest.fixture
def hub(
    loopback_hub: LoopbackHub, standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> LoopbackHub:
    """A Hub with the standard dataset, private; this process has a reader's token."""
    loopback_hub.create_dataset(REPO, standard_dataset.root, private=True)
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    hurry_retries(monkeypatch)
    return loopback_hub


@pytest.fixture
def lrstream(capsys: pytest.CaptureFixture[str]) -> Program:
    """The command line in this process."""
    return Program(capsys)


def published_by_maintainer(hub: LoopbackHub, home: Path, revision: str | None = None) -> Path:
    """Build and publish as a maintainer with a home of their own would; the sidecar that was built."""
    options = ["--revision", revision] if revision else []
    env = hub.env(hub.write_token, home=home)
    outcome = run_process("build", REPO, "--push", "--json", *options, env=env)
    assert outcome.code == 0, outcome.out + outcome.err
    return Path(outcome.document()["result"]["path"])


@pytest.mark.slow
def test_from_build_to_training(
    hub: LoopbackHub, standard_dataset: WrittenDataset, tmp_path: Path, isolated_home: Path
) -> None:
    maintainer = tmp_path / "maintainer"
    env = hub.env(hub.write_token, home=maintainer)
    built = run_process("build", REPO, "--json", env=env).document()["result"]
    assert (built["origin"], built["complete"], built["frames"]) == ("built", True, 123)
    assert run_process("validate", REPO, env=env).code == 0
    archive = Path(built["path"])
    published = run_process("publish", archive, REPO, "--json", env=env).document()["result"]
    assert (published["action"], published["branch_created"]) == ("published", True)
    assert hub.dataset_files(REPO, BRANCH)[published["path"]] == archive.read_bytes()
    references = hub.references(REPO)

    hub.log.clear()
    found = epoch(REPO, world_size=2, num_workers=2, native_http_subranges=2)
    assert_same_epoch(found, epoch(standard_dataset.root, world_size=2, num_workers=2))
    assert len(found) == 123

    # The published sidecar was downloaded, once for both ranks, and nothing was indexed here.
    assert hub.log.count(r"mp4-sidecars/.*\.npz", server="cdn") == 1
    payload = hub.log.records(r"videos/.*\.mp4$", server="cdn")
    spans = spans_by_file(standard_dataset.root, archive)
    assert ranges_by_file(payload) == spans
    needed = sum((stop - start) * times for file in spans.values() for (start, stop), times in file.items())
    assert abs(sum(record.bytes_sent for record in payload) - needed) <= 0.05 * needed
    # Training writes nothing (SC-12).
    assert not [record for record in hub.log if record.method in WRITES]
    assert {record.path for record in hub.log.records(method="POST")} <= set()
    assert hub.references(REPO) == references
    # The token goes to the Hub alone.
    assert all(record.authorization for record in hub.log.records(server="hub"))
    assert not [record for record in hub.log.records(server="cdn") if record.authorization]
    assert_no_credentials(hub, isolated_home)
    assert_no_credentials(hub, maintainer)


@pytest.mark.slow
def test_one_published_sidecar_for_branch_tag_and_commit(
    hub: LoopbackHub, standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    commit = hub.tag(REPO, "v3.0")
    published_by_maintainer(hub, tmp_path / "maintainer")
    expected = epoch(standard_dataset.root)
    for revision in (None, "main", "v3.0", commit):
        hub.log.clear()
        with StreamingLeRobotDataset(REPO, revision=revision) as dataset:
            assert dataset.root == f"hf://datasets/{REPO}@{commit}"
        assert hub.log.count(r"\.mp4$") == 0
    assert_same_epoch(epoch(REPO, revision=commit), expected)
    # A name for a commit does not matter to what is published.
    published = [path for path in hub.dataset_files(REPO, BRANCH) if path.endswith(".npz")]
    assert len(published) == 1


@pytest.mark.slow
def test_a_new_commit_leaves_the_old_one_usable(
    hub: LoopbackHub, standard_dataset: WrittenDataset, tmp_path: Path
) -> None:
    old = hub.references(REPO)["refs/heads/main"]
    published_by_maintainer(hub, tmp_path / "maintainer")
    files = hub.dataset_files(REPO)
    video = next(path for path in files if path.endswith(".mp4"))
    # Another video of the same length at the same path: boxes that nobody reads are appended.
    new = hub.commit_files(REPO, {video: files[video] + b"\0\0\0\x10free" + bytes(8)})

    hub.log.clear()
    assert_same_epoch(epoch(REPO, revision=old), epoch(standard_dataset.root))
    assert {
        part for record in hub.log.records("/resolve/") for part in record.path.split("/") if len(part) == 40
    } == {old}
    hub.log.clear()
    with StreamingLeRobotDataset(REPO) as dataset:
        assert dataset.root.endswith(new)
    # The other commit's sidecar is not even downloaded: its name tells.
    assert hub.log.count(r"\.npz") == 0
    # Of the videos only the one that changed is indexed again (SC-13).
    assert {record.path for record in hub.log.records(r"\.mp4$", server="cdn")} == {
        record.path for record in hub.log.records(f"{video}$", server="cdn")
    }
    assert hub.log.count(f"{video}$", server="cdn") == 1


def files_of(dataset: WrittenDataset) -> set[str]:
    return {path for paths in dataset.video_files.values() for path in paths}


@pytest.mark.slow
def test_a_dataset_inside_a_repository(
    loopback_hub: LoopbackHub,
    tiny_dataset: WrittenDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = loopback_hub
    folder = tmp_path / "repository"
    shutil.copytree(tiny_dataset.root, folder / "sets" / "a b")
    hub.create_dataset(REPO, folder)
    hub.connect_process(monkeypatch, hub.write_token)
    source = f"hf://datasets/{REPO}/sets/a b"
    env = hub.env(hub.write_token, home=tmp_path / "maintainer")
    result = run_process("build", source, "--push", "--json", env=env).document()["result"]
    commit = hub.references(REPO)["refs/heads/main"]
    path = result["publication"]["path"]
    assert path.startswith("sets/a b/meta/mp4-sidecars/mp4-v3-")
    hub.log.clear()
    assert_same_epoch(epoch(source), epoch(tiny_dataset.root))
    assert hub.log.count(r"\.npz", server="cdn") == 1
    assert open_store(parse_location(source)).location.root == f"hf://datasets/{REPO}@{commit}/sets/a b"


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_token_reaches_workers(
    hub: LoopbackHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    standard_dataset: WrittenDataset,
    start_method: str,
) -> None:
    # From a token file, which each worker reads for itself (LD-11).
    token_file = tmp_path / "token"
    token_file.write_text(hub.read_token)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", str(token_file))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(token_file))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    with StreamingLeRobotDataset(REPO) as dataset:
        next(iter(dataset))  # the parent has connections of its own by now (K16)
    workers = 1 if start_method == "spawn" else 2  # each that is spawned imports PyTorch anew
    found = epoch(REPO, num_workers=workers, start_method=start_method)
    assert_same_epoch(found, epoch(standard_dataset.root, num_workers=workers))


# Revisions


def test_the_newest_compatible_tag() -> None:
    assert (
        newest_compatible_tag(["v2.1", "v3.0", "v3.10", "v3.9", "v3.9.7", "v4.0", "v3.x", "v3.11-rc"])
        == "v3.10"
    )
    assert newest_compatible_tag(["v2.1", "first"]) is None
    assert newest_compatible_tag(["v3.0", "v3.0.1"]) == "v3.0.1"


def test_pinning(hub: LoopbackHub) -> None:
    first = hub.references(REPO)["refs/heads/main"]
    assert pin_location(parse_location(REPO)).revision == "main"
    hub.tag(REPO, "v3.0")
    hub.tag(REPO, "v2.1")
    hub.branch(REPO, "new/grip")
    second = hub.commit_files(REPO, {"README.md": b"more"})
    pinned = {
        revision: pin_location(parse_location(REPO, revision=revision))
        for revision in (None, "main", "v3.0", "new/grip", second)
    }
    roots = {revision: location.root.rpartition("@")[2] for revision, location in pinned.items()}
    assert roots == {None: first, "main": second, "v3.0": first, "new/grip": first, second: second}
    assert pinned[None].revision == "v3.0"
    hub.log.clear()
    assert pin_location(pinned["main"]).root == pinned["main"].root
    pin_location(parse_location(REPO, revision=first))
    assert len(hub.log) == 0, "a commit needs no request"
    with pytest.raises(NotFoundError, match="at v9: there is no such revision"):
        pin_location(parse_location(REPO, revision="v9"))


def test_a_commit_that_does_not_exist(hub: LoopbackHub, lrstream: Program) -> None:
    outcome = lrstream("build", REPO, "--revision", "0" * 40, "--json")
    assert (outcome.code, outcome.codes()) == (4, ["not-found"])


# Requests


@pytest.mark.parametrize(("name", "most_ranges"), [("standard", 1), ("h264", 3)])
def test_requests_of_indexing(
    loopback_hub: LoopbackHub,
    dataset_cache: DatasetCache,
    monkeypatch: pytest.MonkeyPatch,
    lrstream: Program,
    name: str,
    most_ranges: int,
) -> None:
    """One range for a front `moov`, at most three for one at the end; nothing else for each file (MP-4)."""
    hub = loopback_hub
    dataset = dataset_cache.get(name)
    hub.create_dataset(REPO, dataset.root)
    hub.connect_process(monkeypatch)
    result = lrstream("build", REPO, "--json").document()["result"]
    for path in files_of(dataset):
        assert hub.log.count(f"{path}$", server="hub") == 1, "one redirect"
        assert 1 <= hub.log.count(f"{path}$", server="cdn") <= most_ranges
    assert result["requests"] == hub.log.count(r"\.mp4$")
    assert hub.log.bytes_sent(r"\.mp4$", server="cdn") == result["bytes_read"]
    # Everything else is about the dataset as a whole: revision, metadata, published sidecars.
    others = [record for record in hub.log.records(server="hub") if not record.path.endswith(".mp4")]
    assert len(others) <= 12, [str(record) for record in others]


def test_metadata_come_from_the_client_s_cache(hub: LoopbackHub, isolated_home: Path) -> None:
    store = open_store(parse_location(REPO))
    path = store.local_path("meta/info.json")
    assert path.is_relative_to(isolated_home / "lerobot" / "hub")
    assert json.loads(store.read_bytes("meta/info.json"))["codebase_version"] == "v3.0"
    hub.log.clear()
    again = open_store(store.location)
    assert again.read_bytes("meta/info.json") == store.read_bytes("meta/info.json")
    assert len(hub.log) == 0
    with pytest.raises(NotFoundError):
        again.read_bytes("meta/absent.json")


def test_listings_are_paged_through(hub: LoopbackHub, standard_dataset: WrittenDataset) -> None:
    hub.settings.page_size = 3
    store = open_store(parse_location(REPO))
    local = open_store(parse_location(standard_dataset.root))
    listed, expected = store.list_files(), local.list_files()
    assert {path: info.size for path, info in listed.items()} == {
        path: info.size for path, info in expected.items()
    }
    assert list(listed) == sorted(listed)
    assert store.list_files("meta/episodes") == {
        path: info for path, info in listed.items() if path.startswith("meta/episodes/")
    }
    assert store.list_files("nothing/here") == {}
    assert store.exists("meta/info.json")
    assert not store.exists("meta")
    assert not store.exists("meta/none.json")
    with pytest.raises(NotFoundError, match=r"1 of 2 files do not exist.*videos/none.mp4"):
        store.file_info([min(files_of(standard_dataset)), "videos/none.mp4"])
