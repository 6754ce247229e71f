"""SIGKILL at random moments (SC-3, SC-13, K26): nothing valid is lost, nothing invalid is left to be found.

``LRSTREAM_KILLS=100`` makes a longer run of it; the suite kills a few times for each operation.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from lrstream.commands.inspect_cache import inspect_cache
from lrstream.commands.inspect_prune import prune_cache
from lrstream.commands.publish import publish_archive
from lrstream.index.open import MappedIndex, open_index
from lrstream.layout.layout import load_layout
from lrstream.sidecar.archive import ArchiveReader, write_archive
from lrstream.sidecar.build import request_identity
from lrstream.sidecar.identity import SidecarIdentity, cache_path
from lrstream.sidecar.resolve import PublishedCandidate, build_locked, resolve_sidecar
from lrstream.storage.local import LocalStore
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.support.hub import LoopbackHub
from tests.support.many_files import change_video, write_many_files
from tests.support.tracks import identity_of, make_tracks

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked"),
]

KILLS = int(os.environ.get("LRSTREAM_KILLS", "8"))
COUNT = 40
WORKERS = 3


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many_files(tmp_path_factory.mktemp("crash") / "d", COUNT)


class NotingStore(LocalStore):
    """Notes every video that is read in a file, which survives the process."""

    def __init__(self, root: Path, log: Path) -> None:
        super().__init__(parse_location(root))
        self._log = log

    def open(self, path: str, size: int | None = None) -> Any:
        if path.endswith(".mp4"):
            time.sleep(0.004)  # so that the build takes long enough to be killed in the middle
            descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, b"x")
            os.close(descriptor)
        return super().open(path, size)


def in_child(work: Callable[[], object]) -> Any:
    def run() -> None:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    return child


def duration_s(work: Callable[[], object]) -> float:
    start = time.monotonic()
    child = in_child(work)
    child.join(60)
    assert child.exitcode == 0
    return time.monotonic() - start


def kill_at(work: Callable[[], object], delay_s: float) -> bool:
    """Run `work` in a child and kill it after `delay_s`; True if it had finished before."""
    child = in_child(work)
    time.sleep(delay_s)
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL)
    return bool(child.exitcode == 0)


def assert_all_valid(home: Path) -> None:
    """Everything that has a name under which somebody looks for it is complete."""
    for path in home.rglob("*.npz"):
        with ArchiveReader(path) as reader:
            assert reader.verify() == 2 * COUNT
    for path in home.rglob("*.arrow"):
        index = MappedIndex(path)
        assert sum(index.track(name).samples.num_samples for name in index.paths) == 2 * COUNT
        index.close()


def debris(home: Path) -> list[str]:
    """Files that neither a finished run nor pruning leaves.

    A process that is killed behind its last step leaves a journal that nobody needs, or the note of who held
    the lock. Opening writes nothing, so the first is for pruning, and the second for the next holder.
    """
    prune_cache(inspect_cache(home=home))
    known = (".npz", ".arrow", ".lock", ".lock.holder", "current.json")
    return [
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and not path.name.endswith(known)
    ]


def test_build_and_conversion(many: Path, tmp_path: Path) -> None:
    """Killed again and again until it is done: each source is read once, and those in hand at each kill."""
    dice = random.Random(1)
    kills = rounds = 0
    span_s = duration_s(lambda: resolve(many, tmp_path / "timing", tmp_path / "timing.log"))
    while kills < KILLS:
        rounds += 1
        home, log = tmp_path / f"home{rounds}", tmp_path / f"log{rounds}"
        work = functools.partial(resolve, many, home, log)
        kills_now = 0
        while kills < KILLS and not kill_at(work, dice.uniform(0, span_s)):
            kills += 1
            kills_now += 1
            assert_all_valid(home)
        resolve(many, home, log)
        assert_all_valid(home)
        assert debris(home) == []
        # A killed process loses at most what its threads had in hand; the journal has the rest.
        assert COUNT <= len(log.read_bytes()) <= COUNT + kills_now * 2 * WORKERS
        shutil.rmtree(home)


def resolve(root: Path, home: Path, log: Path) -> None:
    store = NotingStore(root, log)
    resolve_sidecar(store, load_layout(store), workers=WORKERS, home=home)


def test_the_previous_file_stays_until_the_new_one_is_there(many: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(many, tmp_path / "d"))
    output, log, dice = tmp_path / "out" / "x.npz", tmp_path / "log", random.Random(2)

    def build() -> None:
        store = NotingStore(root, log)
        build_locked(store, load_layout(store), destination=output, workers=WORKERS, home=tmp_path / "home")

    span_s = duration_s(build)
    before = output.read_bytes()
    for number in range(KILLS):
        change_video(root, number % COUNT, number + 1)
        finished = kill_at(build, dice.uniform(0, span_s))
        now = output.read_bytes()
        assert now == before or identity_at(output) == current_identity(root)
        assert not finished or now != before
        build()
        assert identity_at(output) == current_identity(root)
        before = output.read_bytes()
        assert sorted(path.name for path in output.parent.iterdir()) == ["x.npz", "x.npz.lock"]


def identity_at(path: Path) -> SidecarIdentity:
    with ArchiveReader(path) as reader:
        reader.verify()
        return reader.identity


def current_identity(root: Path) -> SidecarIdentity:
    store = open_store(parse_location(root))
    return request_identity(store, load_layout(store))


def test_conversion_of_a_replaced_archive(tmp_path: Path) -> None:
    """Generations: the one of the previous archive stays valid, the new one is complete or absent."""
    dice, archive, home = random.Random(3), tmp_path / "x.npz", tmp_path / "home"
    tracks = make_tracks(60, num_samples=200)
    write_archive(archive, identity_of(tracks), tracks)
    span_s = duration_s(lambda: open_index(archive, home=home).close())
    old = next(home.rglob("*.arrow"))
    old_content = old.read_bytes()
    for number in range(KILLS):
        tracks[number % 60] = replace(tracks[number % 60], duration_ticks=number + 1)
        write_archive(archive, identity_of(tracks), tracks)
        kill_at(lambda: open_index(archive, home=home).close(), dice.uniform(0, span_s))
        for path in home.rglob("*.arrow"):
            index = MappedIndex(path)
            assert len([index.track(name) for name in index.paths]) == 60
            index.close()
        current = open_index(archive, home=home)
        assert isinstance(current, MappedIndex)
        assert current.track(tracks[number % 60].file_path).duration_ticks == number + 1
        current.close()
        assert debris(home) == []
        for path in home.rglob("*.arrow"):
            if path not in (old, current.path):
                path.unlink()
    assert old.read_bytes() == old_content


@dataclass
class SlowDownload:
    """A published sidecar that comes in small pieces."""

    name: str
    content: bytes

    def write_to(self, file: BinaryIO) -> None:
        for start in range(0, len(self.content), 2000):
            file.write(self.content[start : start + 2000])
            file.flush()
            time.sleep(0.002)


def test_installing_a_published_sidecar(many: Path, tmp_path: Path) -> None:
    dice = random.Random(4)
    store = open_store(parse_location(many))
    layout = load_layout(store)
    content = resolve_sidecar(store, layout, home=tmp_path / "source").path.read_bytes()

    def published(identity: SidecarIdentity) -> Iterable[PublishedCandidate]:
        return [SlowDownload("published.npz", content)]

    def install(home: Path) -> str:
        return resolve_sidecar(store, layout, home=home, published=published).origin

    span_s = duration_s(lambda: install(tmp_path / "timing"))
    for number in range(KILLS):
        home = tmp_path / f"home{number}"
        kill_at(functools.partial(install, home), dice.uniform(0, span_s))
        assert_all_valid(home)
        assert install(home) in ("published", "cache")
        assert cache_path(request_identity(store, layout), home).read_bytes() == content
        assert debris(home) == []
        shutil.rmtree(home)


def test_publication(
    loopback_hub: LoopbackHub, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the Hub there is nothing, or the branch, or the whole file; source branches never move."""
    repo, dice = "robots/crash", random.Random(5)
    loopback_hub.connect_process(monkeypatch, loopback_hub.write_token)
    loopback_hub.settings.xet = False  # hf_xet keeps threads that do not survive a fork
    commit = loopback_hub.create_dataset(repo, many)
    store = open_store(parse_location(repo))
    archive = resolve_sidecar(store, load_layout(store), home=tmp_path / "home").path
    content = archive.read_bytes()

    def publish() -> None:
        publish_archive(archive, repo)

    span_s = None
    for number in range(max(2, KILLS // 2)):
        references = loopback_hub.references(repo)
        if "refs/heads/lerobot-sidecars" in references:
            loopback_hub.settings.datasets[repo].branches.pop("lerobot-sidecars")
        if span_s is None:
            span_s = duration_s(publish)
            loopback_hub.settings.datasets[repo].branches.pop("lerobot-sidecars")
        kill_at(publish, dice.uniform(0, span_s))
        references = loopback_hub.references(repo)
        assert references.pop("refs/heads/main") == commit
        if references:
            assert list(references) == ["refs/heads/lerobot-sidecars"]
            assert set(sidecars_of(loopback_hub, repo)) <= {content}
        publish_archive(archive, repo)
        assert sidecars_of(loopback_hub, repo) == [content], number
        assert loopback_hub.references(repo)["refs/heads/main"] == commit


def sidecars_of(hub: LoopbackHub, repo: str) -> list[bytes]:
    return [
        data for path, data in hub.dataset_files(repo, "lerobot-sidecars").items() if path.endswith(".npz")
    ]
