"""Publishing beside a dataset repository: what is refused, what is written, and what happens in between."""

from __future__ import annotations

import pickle
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from lrstream.demo import WrittenDataset
from lrstream.errors import CheckFailedError, NotFoundError, SidecarError, TransferError, UsageError
from lrstream.layout.layout import load_layout
from lrstream.sidecar.archive import ArchiveReader, write_archive
from lrstream.sidecar.publication import PUBLICATION_BRANCH, list_published, published_name
from lrstream.sidecar.publish import PublishReport, publish_sidecar
from lrstream.sidecar.published import PublishedSidecars
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.storage import hub_write
from lrstream.storage.hub_store import HubStore
from lrstream.storage.location import parse_location
from lrstream.storage.retry import RetryPolicy
from lrstream.storage.store import open_store
from tests.cli.program import Program
from tests.support.hub import LoopbackHub
from tests.support.remote import hurry_retries

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(60)

REPO = "robots/pick"
QUICK = RetryPolicy(max_attempts=4, first_wait_s=0.01, longest_wait_s=0.02, deadline_s=20)


@pytest.fixture
def hub(
    loopback_hub: LoopbackHub, tiny_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> LoopbackHub:
    """A Hub with the tiny dataset; this process may write. Uploads are plain PUTs."""
    loopback_hub.settings.xet = False
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    loopback_hub.create_dataset(REPO, tiny_dataset.root)
    loopback_hub.connect_process(monkeypatch, loopback_hub.write_token)
    hurry_retries(monkeypatch)
    return loopback_hub


def open_hub(revision: str | None = None) -> HubStore:
    store = open_store(parse_location(REPO, revision=revision))
    assert isinstance(store, HubStore)
    return store


@pytest.fixture
def archive(hub: LoopbackHub) -> Path:
    """A complete sidecar of the dataset."""
    store = open_hub()
    path = resolve_sidecar(store, load_layout(store)).path
    hub.log.clear()
    return path


def publish(archive: Path, **options: Any) -> PublishReport:
    store = open_hub()
    return publish_sidecar(archive, store, load_layout(store), policy=QUICK, **options)


def published(hub: LoopbackHub) -> dict[str, bytes]:
    """Published sidecars by path."""
    if f"refs/heads/{PUBLICATION_BRANCH}" not in hub.references(REPO):
        return {}
    files = hub.dataset_files(REPO, PUBLICATION_BRANCH)
    return {path: data for path, data in files.items() if path.endswith(".npz")}


def writes(hub: LoopbackHub) -> list[str]:
    return [str(record) for record in hub.log if record.method not in ("GET", "HEAD")]


def rewritten(archive: Path, destination: Path, **changes: Any) -> Path:
    """A copy of an archive with another identity."""
    with ArchiveReader(archive) as reader:
        identity = replace(reader.identity, **changes)
        tracks = [track for track in reader.tracks() if track.file_path in identity.paths]
    write_archive(destination, identity, tracks)
    return destination


def test_first_publication(hub: LoopbackHub, archive: Path) -> None:
    commit = hub.references(REPO)["refs/heads/main"]
    hub.tag(REPO, "v3.0")
    main_files = hub.dataset_files(REPO)
    report = publish(archive)
    with ArchiveReader(archive) as reader:
        name = published_name(reader.identity)
    assert name.startswith(f"mp4-v3-{commit[:32]}-")
    assert report.path == f"meta/mp4-sidecars/{name}"
    assert (report.action, report.branch_created, report.branch) == ("published", True, PUBLICATION_BRANCH)
    assert published(hub) == {report.path: archive.read_bytes()}
    references = hub.references(REPO)
    assert report.commit == references.pop(f"refs/heads/{PUBLICATION_BRANCH}")
    # Source branches and tags stay where they were; the new branch begins at the source commit.
    assert references == {"refs/heads/main": commit, "refs/tags/v3.0": commit}
    assert hub.dataset_files(REPO, PUBLICATION_BRANCH).keys() - {report.path} == main_files.keys()


def test_once_more_is_no_commit(hub: LoopbackHub, archive: Path) -> None:
    first = publish(archive)
    references = hub.references(REPO)
    hub.log.clear()
    again = publish(archive)
    assert (again.action, again.commit, again.branch_created) == ("unchanged", None, False)
    assert again.path == first.path
    assert hub.references(REPO) == references
    assert writes(hub) == []


def test_dry_run_writes_nothing(hub: LoopbackHub, archive: Path) -> None:
    report = publish(archive, dry_run=True)
    assert (report.action, report.dry_run, report.branch_created) == ("published", True, True)
    assert writes(hub) == []
    publish(archive)
    hub.log.clear()
    assert publish(archive, dry_run=True).action == "unchanged"
    assert writes(hub) == []


def test_other_bytes_of_the_same_snapshot(hub: LoopbackHub, archive: Path, tmp_path: Path) -> None:
    """A build under another name of the commit has other bytes but says the same."""
    hub.tag(REPO, "v3.0")
    other = rewritten(archive, tmp_path / "other.npz", revision="v3.0")
    assert other.read_bytes() != archive.read_bytes()
    publish(archive)
    before = hub.references(REPO)
    assert publish(other).action == "equivalent"
    assert hub.references(REPO) == before
    forced = publish(other, force=True)
    assert (forced.action, published(hub)) == ("replaced", {forced.path: other.read_bytes()})


@pytest.mark.parametrize("content", [b"", b"not a zip at all", b"PK\x05\x06" + bytes(18)])
def test_a_broken_publication_is_replaced(hub: LoopbackHub, archive: Path, content: bytes) -> None:
    path = publish(archive).path
    hub.commit_files(REPO, {path: content}, branch=PUBLICATION_BRANCH)
    report = publish(archive)
    assert (report.action, published(hub)) == ("replaced", {path: archive.read_bytes()})


# What is refused, before anything is written


def test_invalid_archives(hub: LoopbackHub, archive: Path, tmp_path: Path) -> None:
    data = archive.read_bytes()
    broken = tmp_path / "broken.npz"
    with zipfile.ZipFile(archive) as members:
        last = members.infolist()[-1]
    # Behind the local header, whose extra fields nobody reads, and the beginning of the packed data.
    at = last.header_offset + 30 + len(last.filename) + 40
    for content in (b"", data[:-100], data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]):
        broken.write_bytes(content)
        with pytest.raises(SidecarError):
            publish(broken)
    with pytest.raises(NotFoundError):
        publish(tmp_path / "absent.npz")
    assert writes(hub) == []


def test_subsets_and_supersets(
    hub: LoopbackHub, archive: Path, tmp_path: Path, lrstream_program: Program
) -> None:
    part = tmp_path / "part.npz"
    assert lrstream_program("build", REPO, "--episodes", "0", "-o", part).code == 0
    with pytest.raises(CheckFailedError, match=r"covers 2 of the dataset's 3 video files.*file-001"):
        publish(part)
    outcome = lrstream_program("publish", part, REPO, "--json")
    assert (outcome.code, outcome.codes()) == (3, ["check-failed"])
    assert lrstream_program("build", REPO, "--episodes", "0", "-o", part, "--push").code == 2
    assert writes(hub) == []


@pytest.fixture
def lrstream_program(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


def test_sidecars_of_something_else(hub: LoopbackHub, archive: Path, tmp_path: Path) -> None:
    with ArchiveReader(archive) as reader:
        identity = reader.identity
    for changes, said in (
        ({"data_root": str(tmp_path)}, "is not pinned to a commit"),
        ({"data_root": identity.data_root.partition("@")[0]}, "is not pinned to a commit"),
        ({"data_root": identity.data_root.partition("@")[0] + "@" + "1" * 40}, "data_root is"),
        ({"repo_id": "robots/other"}, "repo_id is 'robots/other', expected 'robots/pick'"),
    ):
        with pytest.raises(CheckFailedError, match=said):
            publish(rewritten(archive, tmp_path / "changed.npz", **changes))
    assert writes(hub) == []


def test_sizes_are_compared_with_the_listing(hub: LoopbackHub, archive: Path) -> None:
    """A sidecar that was made from files of other sizes is none of this commit, whatever it says."""
    store = open_hub()
    layout = load_layout(store)
    path = layout.video_files()[0]
    longer = hub.dataset_files(REPO)[path] + b"\0\0\0\x08free"
    new = hub.commit_files(REPO, {path: longer})
    forged = rewritten(archive, archive.with_name("forged.npz"), data_root=f"hf://datasets/{REPO}@{new}")
    with pytest.raises(CheckFailedError, match=r"of another size: .*file-000.mp4"):
        publish(forged)


def test_places_where_nothing_can_be_published(
    archive: Path, tiny_dataset: WrittenDataset, lrstream_program: Program
) -> None:
    for source in (str(tiny_dataset.root), "memory://pick"):
        outcome = lrstream_program("publish", archive, source, "--json")
        assert (outcome.code, outcome.codes()) == (2, ["usage"])
        outcome = lrstream_program("build", source, "--push", "--json")
        assert (outcome.code, outcome.codes()) == (2, ["usage"])


def test_a_revision_that_is_not_the_sidecar_s(
    hub: LoopbackHub, archive: Path, lrstream_program: Program
) -> None:
    old = hub.references(REPO)["refs/heads/main"]
    hub.commit_files(REPO, {"README.md": b"moved on"})
    outcome = lrstream_program("publish", archive, REPO, "--revision", "main", "--json")
    assert (outcome.code, outcome.codes()) == (3, ["check-failed"])
    assert published(hub) == {}
    # Without a revision it is published for its own commit.
    outcome = lrstream_program("publish", archive, REPO, "--json")
    assert outcome.code == 0, outcome.out
    assert old[:32] in outcome.document()["result"]["path"]


# Lost replies and others who publish


@pytest.mark.parametrize("where", ["/branch/", "/commit/", "/preupload/"])
@pytest.mark.parametrize("kind", ["lose-reply", "reset", "server-error"])
def test_failures_between(hub: LoopbackHub, archive: Path, where: str, kind: Any) -> None:
    """Whether a request took effect before its reply was lost is looked up, not guessed."""
    hub.faults.add(where, kind, times=1, method="POST")
    report = publish(archive)
    assert report.action == "published"
    assert published(hub) == {report.path: archive.read_bytes()}
    commits = hub.log.records("/commit/", method="POST")
    if (where, kind) == ("/commit/", "lose-reply"):
        assert len(commits) == 1, "it had landed"


def test_failures_that_stay(hub: LoopbackHub, archive: Path) -> None:
    hub.faults.add("/commit/", "reset", method="POST")
    with pytest.raises(TransferError, match=r"publish mp4-v3-.*given up after 4 attempts.*commit meta/"):
        publish(archive)
    assert published(hub) == {}
    hub.faults.clear()
    assert publish(archive).action == "published"


def test_a_branch_that_moves_meanwhile(
    hub: LoopbackHub, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else commits between the look and the commit: the Hub refuses, and it is tried again."""
    hub.branch(REPO, PUBLICATION_BRANCH)
    moves = iter(range(2))
    upload = hub_write.commit_files

    def after_another(*arguments: Any, **options: Any) -> str:
        if next(moves, None) is not None:
            hub.commit_files(REPO, {"notes.txt": str(len(hub.log)).encode()}, branch=PUBLICATION_BRANCH)
        return upload(*arguments, **options)

    monkeypatch.setattr("lrstream.sidecar.publish.commit_files", after_another)
    report = publish(archive)
    assert report.action == "published"
    assert hub.log.count("/commit/", method="POST", status=412) == 2
    files = hub.dataset_files(REPO, PUBLICATION_BRANCH)
    assert files[report.path] == archive.read_bytes()
    assert "notes.txt" in files, "what the other one committed is still there"


def test_two_at_the_same_time(hub: LoopbackHub, archive: Path, tmp_path: Path) -> None:
    copies = [Path(shutil.copy(archive, tmp_path / f"{number}.npz")) for number in range(2)]
    together = threading.Barrier(2)

    def run(path: Path) -> PublishReport:
        together.wait()
        return publish(path)

    with ThreadPoolExecutor(2) as threads:
        reports = list(threads.map(run, copies))
    assert {report.action for report in reports} <= {"published", "unchanged"}
    assert "published" in {report.action for report in reports}
    assert published(hub) == {reports[0].path: archive.read_bytes()}


# Looking it up


def test_a_publication_by_another_process_is_seen(hub: LoopbackHub, archive: Path) -> None:
    """A process that has looked before sees what was published since (K24)."""
    store = pickle.loads(pickle.dumps(open_hub()))
    assert list_published(store) == {}
    report = publish(archive)
    assert [f"meta/mp4-sidecars/{name}" for name in list_published(store)] == [report.path]


def test_candidates_are_judged_by_content(
    hub: LoopbackHub, archive: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another name does no harm; a right name does no good."""
    store = open_hub()
    layout = load_layout(store)
    hub.branch(REPO, PUBLICATION_BRANCH)
    with ArchiveReader(archive) as reader:
        name = published_name(reader.identity)
    wrong = rewritten(archive, tmp_path / "wrong.npz", repo_id="robots/other")
    files = {
        f"meta/mp4-sidecars/{name}": wrong.read_bytes(),
        "meta/mp4-sidecars/ours.npz": archive.read_bytes(),
        "meta/mp4-sidecars/notes.txt": b"no sidecar",
        f"meta/mp4-sidecars/mp4-v3-{'a' * 32}-{'b' * 16}.npz": b"of another commit",
    }
    hub.commit_files(REPO, files, branch=PUBLICATION_BRANCH)
    hub.log.clear()
    found = resolve_sidecar(store, layout, home=tmp_path / "home")
    assert found.origin == "published"
    assert found.path.read_bytes() == archive.read_bytes()
    assert "repo_id is 'robots/other'" in caplog.text
    assert hub.log.count("aaaaaaaa") == 0, "another commit's is not downloaded"
    with ArchiveReader(archive) as reader:
        candidates = [file.name for file in PublishedSidecars(store)(reader.identity)]
    assert candidates == [name, "ours.npz"]


def test_stores_that_cannot_publish(tiny_dataset: WrittenDataset) -> None:
    from lrstream.sidecar.publish import require_publishing_store

    with pytest.raises(UsageError, match="neither a Hub dataset repository nor a bucket"):
        require_publishing_store(open_store(parse_location(tiny_dataset.root)))
