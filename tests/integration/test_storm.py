"""Many processes build, open, convert, prune and replace one dataset at the same time (SC-3, SC-5, SC-9).

``LRSTREAM_STORM=16x60`` makes it 16 processes for a minute; the suite has fewer, for a few seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lrstream.commands.inspect_cache import inspect_cache
from lrstream.commands.inspect_prune import prune_cache
from lrstream.index.open import MappedIndex, open_index
from lrstream.layout.layout import load_layout
from lrstream.sidecar.archive import ArchiveReader
from lrstream.sidecar.build import SourcesChangedError
from lrstream.sidecar.resolve import build_locked, resolve_sidecar
from lrstream.storage.location import parse_location
from lrstream.storage.store import open_store
from tests.support.many_files import video_path, write_many_files
from tests.support.media import demux

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked"),
]

PROCESSES, SECONDS = map(int, os.environ.get("LRSTREAM_STORM", "6x5").split("x"))
COUNT = 10
# Superseded files go after this long. What a process has resolved it opens sooner.
IDLE_S = 10.0


class Storm:
    """What one process does, and what it checks."""

    def __init__(self, root: Path, place: Path, seed: int) -> None:
        self.root = root
        self.home = place / "home"
        self.output = place / "x.npz"
        self.dice = random.Random(seed)
        self.packets = demux(root / video_path(0))
        self.deadline = 0.0

    def run(self, replaces: bool) -> Counter[str]:
        done: Counter[str] = Counter()
        works: list[Callable[[], None]] = [
            self.open,
            self.open,
            self.build,
            self.convert,
            self.rebuild,
            self.prune,
        ]
        self.deadline = time.monotonic() + SECONDS
        while time.monotonic() < self.deadline:
            if replaces:
                # Slower than a build, as datasets are: faster than that no index could ever be right.
                time.sleep(self.dice.uniform(0.5, 1.5))
                self.replace()
                done["replace"] += 1
                continue
            work = self.dice.choice(works)
            try:
                work()
            except SourcesChangedError:
                # Twice in a row, and it says so: the one outcome that is not a result.
                done["sources changed"] += 1
            else:
                done[work.__name__] += 1
        return done

    def open(self) -> None:
        store = open_store(parse_location(self.root))
        index = open_index(resolve_sidecar(store, load_layout(store), home=self.home), home=self.home)
        sizes = {source.path: source.size for source in index.identity.source_files}
        assert list(sizes) == [video_path(number) for number in range(COUNT)]
        for _ in range(5):
            track = index.track(video_path(self.dice.randrange(COUNT)))
            assert track.file_size == sizes[track.file_path]
            assert track.samples.sizes_bytes.tolist() == self.packets.sizes
            assert track.samples.offsets_bytes.tolist() == self.packets.positions
        index.close()

    def build(self) -> None:
        store = open_store(parse_location(self.root))
        build_locked(store, load_layout(store), destination=self.output, workers=2, home=self.home)
        self.check_output()

    def rebuild(self) -> None:
        store = open_store(parse_location(self.root))
        resolve_sidecar(store, load_layout(store), home=self.home, workers=2, rebuild=True)

    def convert(self) -> None:
        if self.output.exists():
            index = open_index(self.output, home=self.home)
            assert isinstance(index, MappedIndex)
            assert len(index.paths) == COUNT
            index.close()

    def check_output(self) -> None:
        with ArchiveReader(self.output) as reader:
            sizes = {source.path: source.size for source in reader.identity.source_files}
            for track in reader.tracks():
                assert track.file_size == sizes[track.file_path]
                assert track.samples.sizes_bytes.tolist() == self.packets.sizes

    def prune(self) -> None:
        prune_cache(inspect_cache(home=self.home, idle_s=IDLE_S))

    def replace(self) -> None:
        """Another video of another size in the place of one, in one step."""
        path = self.root / video_path(self.dice.randrange(COUNT))
        data = path.read_bytes()
        other = path.with_name(f"{path.name}.{os.getpid()}")
        other.write_bytes(data + (8).to_bytes(4, "big") + b"free")
        other.replace(path)


def child(root: Path, place: Path, seed: int, results: Any) -> None:
    try:
        results.put(Storm(root, place, seed).run(replaces=seed == 0))
    except BaseException:
        results.put(traceback.format_exc())
        raise


def test_everything_at_once(tmp_path: Path) -> None:
    root = write_many_files(tmp_path / "d", COUNT)
    place = tmp_path / "place"
    place.mkdir()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=child, args=(root, place, seed, results)) for seed in range(PROCESSES)]
    for process in children:
        process.start()
    reports = [results.get(timeout=SECONDS + 120) for _ in children]
    for process in children:
        process.join(60)
    failures = [report for report in reports if isinstance(report, str)]
    assert not failures, "\n".join(failures)
    total: Counter[str] = sum(reports, Counter())
    print(dict(total))
    for work in ("open", "build", "convert", "rebuild", "prune", "replace"):
        assert total[work] > 0, total
    assert total["sources changed"] <= total["open"]

    store = open_store(parse_location(root))
    resolved = resolve_sidecar(store, load_layout(store), home=place / "home")
    with ArchiveReader(resolved.path) as reader:
        assert reader.verify() == 2 * COUNT
    prune_cache(inspect_cache(home=place / "home", idle_s=0))
    assert [path for path in place.rglob("*") if path.name.endswith((".tmp", ".journal"))] == []
