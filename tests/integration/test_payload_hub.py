"""Checksums of payload over the Hub: flips on the way are noticed, pass or end training; publication."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from torch.utils.data import DataLoader

from lrstream import StreamingLeRobotDataset
from lrstream.demo import WrittenDataset
from lrstream.errors import CheckFailedError, PayloadError, TransferError
from lrstream.layout.layout import load_layout
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.checksum_build import ChecksumReport, build_checksums
from lrstream.sidecar.checksum_file import ChecksumFile, checksums_path, write_checksums
from lrstream.sidecar.publication import PUBLICATION_BRANCH
from lrstream.sidecar.publish import PublishReport, publish_sidecar, require_publishing_store
from lrstream.sidecar.resolve import resolve_sidecar
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.cli.program import Program, run_process
from tests.support.hub import LoopbackHub
from tests.support.loader import indices
from tests.support.remote import Sample, assert_same_epoch, epoch, hurry_retries, spans_by_file

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(120)

REPO = "robots/pick"
FLIPS = int(os.environ.get("LRSTREAM_FLIPS", "64"))
needs_buckets = pytest.mark.skipif(
    not hasattr(huggingface_hub.HfApi, "list_bucket_tree"), reason="this client knows no buckets"
)


@pytest.fixture
def empty(loopback_hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """A Hub to which this process may write. Uploads are plain PUTs."""
    loopback_hub.settings.xet = False
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    loopback_hub.connect_process(monkeypatch, loopback_hub.write_token)
    hurry_retries(monkeypatch)
    return loopback_hub


@pytest.fixture
def hub(empty: LoopbackHub, tiny_dataset: WrittenDataset) -> LoopbackHub:
    """With the tiny dataset."""
    empty.create_dataset(REPO, tiny_dataset.root)
    return empty


@pytest.fixture(scope="module")
def expected(tiny_dataset: WrittenDataset, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """The epoch as it is read from the local directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_LEROBOT_HOME", str(tmp_path_factory.mktemp("expected")))
        return epoch(tiny_dataset.root)


def make(source: str = REPO, **options: Any) -> tuple[Path, ChecksumReport]:
    store = open_store(parse_location(source))
    layout = load_layout(store)
    archive = resolve_sidecar(store, layout).path
    return archive, build_checksums(store, layout, archive, **options)


def publish(archive: Path, source: str = REPO, **options: Any) -> PublishReport:
    store = require_publishing_store(open_store(parse_location(source)))
    return publish_sidecar(archive, store, load_layout(store), **options)


def assert_right(archive: Path, root: Path) -> None:
    with contextlib.closing(ChecksumFile(checksums_path(archive))) as checksums:
        for path, spans in spans_by_file(root, archive).items():
            data, row = (root / path).read_bytes(), checksums.file(path)
            assert row is not None
            for start, stop in spans:
                assert row.find(start, stop) == zlib.crc32(data[start:stop])


# Every flipped bit is noticed


@pytest.mark.parametrize("name", ["h264", "hevc", "av1", "depth"])
def test_every_flipped_bit_is_noticed(empty: LoopbackHub, dataset_cache: Any, name: str) -> None:
    """Single bits anywhere in what is fetched for an episode, wrong in both readings."""
    written = dataset_cache.get(name)
    empty.create_dataset(REPO, written.root)
    make()
    dice = random.Random(name)
    with StreamingLeRobotDataset(REPO, payload_checksums="require") as dataset:
        loader, table = dataset._episode_loader(), dataset._layout.episodes
        camera = "observation.images.depth" if name == "depth" else "observation.images.front"
        noticed = 0
        for _ in range(FLIPS):
            position = dice.randrange(len(table))
            span = loader._spans.span(position, camera)
            offset, mask = dice.randrange(span.num_bytes), 1 << dice.randrange(8)
            fault = empty.faults.add(
                re.escape(table.cameras[camera].path(position)),
                "flip-byte",
                server="cdn",
                offset=offset,
                mask=mask,
            )
            with pytest.raises(PayloadError, match=rf"bytes \[{span.start_byte}, {span.stop_byte}\)"):
                loader.parts(position)[camera]()
            assert fault.hits == 2
            noticed += 1
            empty.faults.clear()
        assert dataset.metrics()["payload_checks"]["damaged"] == noticed == FLIPS
        # Nothing of it stays: the same episodes are right now.
        assert sorted(indices(dataset)) == list(range(written.num_frames))


@pytest.mark.parametrize("subranges", [1, 4])
def test_flips_that_pass(
    hub: LoopbackHub, expected: list[Sample], monkeypatch: pytest.MonkeyPatch, subranges: int
) -> None:
    """Read again, they are right: the epoch is exact. Parts of a range are checked as one."""
    monkeypatch.setattr("lrstream.storage.http_source._MIN_SUBRANGE_BYTES", 200)
    _, report = make()
    # Two parts of one range are read together; a range in one part is right when it is read again.
    times = min(subranges, 2)
    fault = hub.faults.add(r"side/.*\.mp4$", "flip-byte", times, server="cdn", offset=100, after=1)
    with StreamingLeRobotDataset(REPO, max_num_shards=1, native_http_subranges=subranges) as dataset:
        found = list(dataset)
        checks = dataset.metrics()["payload_checks"]
    assert fault.hits == times
    assert_same_epoch(found, expected)
    assert checks["damaged"] == 0
    assert checks["healed"] in (1, 2)
    assert checks["correct"] + checks["healed"] == report.num_spans


def test_flips_among_other_failures(hub: LoopbackHub, expected: list[Sample]) -> None:
    make()
    hub.faults.add(r"\.mp4$", "truncate", 3, server="cdn", after_bytes=50)
    hub.faults.add(r"front/.*\.mp4$", "flip-byte", 1, server="cdn", offset=33, mask=0x10)
    hub.faults.add(r"\.mp4$", "expired-url", 1, server="cdn")
    with StreamingLeRobotDataset(REPO) as dataset:
        assert_same_epoch(list(dataset), expected)
        assert dataset.metrics()["payload_checks"]["healed"] == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_flip_that_stays_is_one_error_in_training(hub: LoopbackHub, num_workers: int) -> None:
    make()
    hub.faults.add(r"side/.*/file-000\.mp4$", "flip-byte", server="cdn", offset=700, mask=0x04)
    dataset = StreamingLeRobotDataset(REPO)
    context = "fork" if num_workers else None
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=context)
    message = ""
    try:
        indices(loader)
    except PayloadError as error:
        message = str(error)  # and not its traceback, which would keep the workers
    for part in ("camera observation.images.side", "chunk-000/file-000.mp4, bytes [", "expected", "Restore"):
        assert part in message
    for secret in ("Signature=", "SENTINEL"):
        assert secret not in message
    dataset.close()


@needs_buckets
@pytest.mark.parametrize("inner", ["", "sets/a"])
def test_a_bucket(
    empty: LoopbackHub, tiny_dataset: WrittenDataset, expected: list[Sample], tmp_path: Path, inner: str
) -> None:
    folder = tmp_path / "bucket"
    shutil.copytree(tiny_dataset.root, folder / inner)
    empty.create_bucket("robots/store", folder)
    source = f"hf://buckets/robots/store/{inner}".rstrip("/")
    archive, report = make(source)
    assert report.num_verified == 0, "a bucket tells no hash that could be computed from the bytes"
    assert_right(archive, tiny_dataset.root)
    fault = empty.faults.add(r"front/.*\.mp4$", "flip-byte", 1, offset=50, mask=1, server="cdn")
    with StreamingLeRobotDataset(source, payload_checksums="require") as dataset:
        assert_same_epoch(list(dataset), expected)
        assert dataset.metrics()["payload_checks"]["healed"] == fault.hits == 1
    empty.faults.add(r"front/.*\.mp4$", "flip-byte", offset=50, mask=1, server="cdn")
    with pytest.raises(PayloadError, match="camera observation"):
        epoch(source)


# Making and publishing them


def test_the_pass_is_held_against_the_listing(
    hub: LoopbackHub, tiny_dataset: WrittenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit that flips while the checksums are made does not become the truth."""
    hub.faults.add(r"side/.*\.mp4$", "flip-byte", 1, server="cdn", offset=900, after=1)
    archive, report = make()
    assert "was damaged on the way; it is read again" in caplog.text
    assert report.num_verified == report.num_files == 3
    assert_right(archive, tiny_dataset.root)
    checksums_path(archive).unlink()
    hub.faults.add(r"side/.*\.mp4$", "flip-byte", server="cdn", offset=900)
    with pytest.raises(TransferError, match=r"side/.*has the hash sha256:.*expected sha256:.*twice"):
        make()
    assert not checksums_path(archive).exists()
    hub.faults.clear()
    assert make()[1].num_reused == 2


def test_small_files_outside_of_lfs(empty: LoopbackHub, tiny_dataset: WrittenDataset) -> None:
    """Their listing has Git's hash instead."""
    empty.create_dataset(REPO, tiny_dataset.root, lfs_mode="regular")
    archive, report = make()
    assert report.num_verified == 3
    assert_right(archive, tiny_dataset.root)


def test_published_and_found_in_a_fresh_home(
    hub: LoopbackHub,
    tiny_dataset: WrittenDataset,
    expected: list[Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    archive, _ = make()
    main = hub.references(REPO)["refs/heads/main"]
    report = publish(archive)
    assert report.checksums is not None
    assert report.checksums.path == checksums_path(Path(report.path)).as_posix()
    assert (report.action, report.checksums.action, report.checksums_refused) == (
        "published",
        "published",
        None,
    )
    files = hub.dataset_files(REPO, PUBLICATION_BRANCH)
    assert files[report.path] == archive.read_bytes()
    assert files[report.checksums.path] == checksums_path(archive).read_bytes()
    assert hub.log.count("/commit/", method="POST", status=200) == 1, "one commit for both"
    assert hub.references(REPO)["refs/heads/main"] == main
    hub.tag(REPO, "v3.0")
    for number, revision in enumerate((None, "main", main)):
        monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / f"fresh{number}"))
        hub.log.clear()
        with StreamingLeRobotDataset(REPO, revision=revision, payload_checksums="require") as dataset:
            assert [record for record in hub.log if ".mp4" in record.path] == [], "no header is read"
            found = list(dataset)
            assert dataset.metrics()["payload_checks"]["correct"] == 6
        assert_same_epoch(found, expected)
        assert [record for record in hub.log if record.method not in ("GET", "HEAD", "POST")] == []


def test_published_later_and_again(hub: LoopbackHub, tmp_path: Path) -> None:
    archive, _ = make()
    companion = checksums_path(archive)
    content = companion.read_bytes()
    companion.unlink()
    first = publish(archive)
    assert (first.action, first.checksums) == ("published", None)
    companion.write_bytes(content)
    dry = publish(archive, dry_run=True)
    assert dry.checksums is not None
    assert (dry.action, dry.checksums.action, dry.commit) == ("unchanged", "published", None)
    second = publish(archive)
    assert second.checksums is not None
    assert (second.action, second.checksums.action) == ("unchanged", "published")
    assert second.commit is not None
    third = publish(archive)
    assert third.checksums is not None
    assert (third.action, third.checksums.action, third.commit) == ("unchanged", "unchanged", None)
    # Those that are damaged are replaced, and those that say the same in other bytes are left alone.
    place = second.checksums.path
    hub.commit_files(REPO, {place: content[:-50]}, branch=PUBLICATION_BRANCH)
    again = publish(archive)
    assert again.checksums is not None
    assert again.checksums.action == "replaced"
    assert hub.dataset_files(REPO, PUBLICATION_BRANCH)[place] == content
    with ArchiveReader(archive) as reader, contextlib.closing(ChecksumFile(companion)) as checksums:
        rows = [row for path in checksums.paths if (row := checksums.file(path)) is not None]
        other = tmp_path / "other.checksums.arrow"
        write_checksums(other, reader.identity, rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lrstream.sidecar.checksum_file._BATCH_ROWS", 1)
            write_checksums(other, reader.identity, rows)
    hub.commit_files(REPO, {place: other.read_bytes()}, branch=PUBLICATION_BRANCH)
    assert other.read_bytes() != content
    kept = publish(archive)
    assert kept.checksums is not None
    assert kept.checksums.action == "equivalent"
    forced = publish(archive, force=True)
    assert forced.checksums is not None
    assert forced.checksums.action == "replaced"


def test_incomplete_ones_are_not_published(hub: LoopbackHub, caplog: pytest.LogCaptureFixture) -> None:
    archive, _ = make(positions=[0])
    report = publish(archive)
    assert (report.action, report.checksums) == ("published", None)
    assert report.checksums_refused is not None
    assert "lacks 4 of 6 spans" in report.checksums_refused
    assert "Payload checksums are not published" in caplog.text


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", None])
def test_damaged_published_ones_are_passed_over(
    hub: LoopbackHub,
    expected: list[Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    archive, _ = make()
    report = publish(archive)
    assert report.checksums is not None
    if content is None:
        # Made under another rule for spans, as a later release might.
        with ArchiveReader(archive) as reader:
            identity = reader.identity
        monkeypatch.setattr("lrstream.sidecar.checksum_file._SPAN_RULE", 2)
        write_checksums(tmp_path / "x.arrow", identity, [])
        monkeypatch.setattr("lrstream.sidecar.checksum_file._SPAN_RULE", 1)
        content = (tmp_path / "x.arrow").read_bytes()
    hub.commit_files(REPO, {report.checksums.path: content}, branch=PUBLICATION_BRANCH)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "fresh"))
    with StreamingLeRobotDataset(REPO) as dataset:
        assert_same_epoch(list(dataset), expected)
        assert dataset.metrics()["payload_checks"]["unchecked"] == 6
    assert "cannot be used" in caplog.text
    with pytest.raises(CheckFailedError, match=r"no payload checksums.*lrstream build --checksums"):
        StreamingLeRobotDataset(REPO, payload_checksums="require")
    # A commit of its own has none, whatever is published for another.
    hub.commit_files(REPO, {"README.md": b"new"})
    with pytest.raises(CheckFailedError):
        StreamingLeRobotDataset(REPO, payload_checksums="require")


def test_a_new_commit_reads_what_has_changed(hub: LoopbackHub, tiny_dataset: WrittenDataset) -> None:
    make()
    hub.commit_files(REPO, {"README.md": b"new"})
    hub.log.clear()
    archive, report = make()
    assert (report.num_reused, report.bytes_read) == (3, 0)
    assert [record for record in hub.log if ".mp4" in record.path] == []
    assert_right(archive, tiny_dataset.root)


@needs_buckets
def test_the_commands_in_a_bucket(
    loopback_hub: LoopbackHub, tiny_dataset: WrittenDataset, tmp_path: Path
) -> None:
    """Through the client's own upload: build, publish, and training elsewhere."""
    loopback_hub.create_bucket("robots/store", tiny_dataset.root)
    url = "hf://buckets/robots/store"
    env = loopback_hub.env(loopback_hub.write_token, home=tmp_path / "one")
    env["HF_LEROBOT_HOME"] = str(tmp_path / "one" / "lerobot")
    done = run_process("build", url, "--checksums", "--push", "--json", env=env)
    assert done.code == 0, done.out + done.err
    publication = done.document()["result"]["publication"]
    assert publication["checksums"]["action"] == "published"
    files = loopback_hub.bucket_files("robots/store")
    assert {publication["path"], publication["checksums"]["path"]} <= files.keys()
    env = loopback_hub.env(loopback_hub.read_token, home=tmp_path / "two")
    env["HF_LEROBOT_HOME"] = str(tmp_path / "two" / "lerobot")
    done = run_process("build", url, "--checksums", "--json", env=env)
    assert done.document()["result"]["origin"] == "published"


def test_the_commands_in_a_repository(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Program(capsys)("build", REPO, "--checksums", "--push")
    assert outcome.code == 0, outcome.err
    assert "3 files have their listed hash" in outcome.out
    assert outcome.out.count("(published)") == 2
