"""`lrstream inspect cache`: what is there, and that prune removes nothing else (K26, K34)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from lrstream.commands.inspect_cache import inspect_cache
from lrstream.commands.inspect_prune import prune_cache
from lrstream.demo import WrittenDataset
from lrstream.index.open import open_index
from lrstream.sidecar.install import PendingFile
from lrstream.sidecar.journal import journal_path
from lrstream.sidecar.lock import ProcessLock, lock_path
from tests.cli.program import Program
from tests.support.datasets import copy_dataset
from tests.support.faults import replace_mp4

FRONT = "observation.images.front"
DAY_S = 86400


@pytest.fixture
def home(isolated_home: Path) -> Path:
    return isolated_home / "lerobot"


@pytest.fixture
def dataset(standard_dataset: WrittenDataset, tmp_path: Path) -> Path:
    return copy_dataset(standard_dataset, tmp_path / "set")


def built(root: Path, lrstream: Program) -> Path:
    return Path(lrstream("build", root, "--json").document()["result"]["path"])


def states(lrstream: Program, *arguments: str) -> dict[str, tuple[str, bool]]:
    """(state, removable) of every entry by file name."""
    outcome = lrstream("inspect", "cache", *arguments, "--json")
    assert outcome.code == 0
    entries = outcome.document()["result"]["entries"]
    return {Path(entry["path"]).name: (entry["state"], entry["is_removable"]) for entry in entries}


def age(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAY_S,) * 2)


def tree(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def leave_unfinished(destination: Path) -> Path:
    """What a killed process leaves of the file that it was writing."""
    code = (
        "import os, sys; from pathlib import Path; from lrstream.sidecar.install import PendingFile\n"
        "pending = PendingFile(Path(sys.argv[1])); pending.file.write(b'half'); pending.file.flush()\n"
        "print(pending.temporary, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(destination)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    path = Path(done.stdout.strip())
    assert path.read_bytes() == b"half"
    return path


def test_an_empty_cache_is_told_and_not_created(lrstream: Program, home: Path) -> None:
    outcome = lrstream("inspect", "cache", "--json")
    assert outcome.code == 0
    assert outcome.document()["result"]["entries"] == []
    assert lrstream("inspect", "cache").code == 0
    assert "nothing to remove" in lrstream("inspect", "cache", "--prune").out
    assert not home.exists()


def test_generations_are_told_apart(
    dataset: Path, standard_dataset: WrittenDataset, lrstream: Program
) -> None:
    first = built(dataset, lrstream)
    [generation] = first.parents[2].rglob("*.arrow")
    assert states(lrstream) == {first.name: ("current", False), generation.name: ("current", False)}

    replace_mp4(dataset / standard_dataset.video_files[FRONT][0])
    second = built(dataset, lrstream)
    assert second != first
    found = states(lrstream)
    assert found[second.name] == ("current", False)
    assert found[first.name] == ("superseded", False), "it was used a moment ago"
    age(first, 8)
    assert states(lrstream)[first.name] == ("superseded", False), "its index was used a moment ago"
    age(generation, 8)
    assert states(lrstream)[first.name] == ("superseded", True)
    assert states(lrstream, "--idle-days", "9")[first.name] == ("superseded", False)

    # Setting its times made the archive another one for the note beside its index.
    assert states(lrstream)[generation.name] == ("superseded", True)

    outcome = lrstream("inspect", "cache", "--prune", "--yes", "--json")
    removed = outcome.document()["result"]["pruned"]["removed"]
    assert sorted(removed) == sorted([str(first), str(generation)])
    assert not first.exists()
    assert second.exists()
    assert not generation.parent.exists(), "an index directory goes with its last generation"
    assert built(dataset, lrstream) == second


def test_a_replaced_sidecar_makes_an_old_generation(
    standard_dataset: WrittenDataset, tiny_dataset: WrittenDataset, tmp_path: Path, lrstream: Program
) -> None:
    sidecar = tmp_path / "some.npz"
    for dataset in (standard_dataset, tiny_dataset):
        assert lrstream("build", dataset.root, "-o", sidecar, "--force").code == 0
        open_index(sidecar).close()
    found = [state for name, state in states(lrstream).items() if name.endswith(".arrow")]
    assert sorted(found) == [("current", False), ("superseded", False)]


def test_files_of_killed_builds_are_removed_and_those_under_way_kept(
    dataset: Path, lrstream: Program, home: Path
) -> None:
    sidecar = built(dataset, lrstream)
    half = leave_unfinished(sidecar)
    with PendingFile(sidecar.with_name("mp4-v3-other.npz")) as pending:
        found = states(lrstream)
        assert found[half.name] == ("abandoned", True)
        assert found[pending.temporary.name] == ("in progress", False)
        outcome = lrstream("inspect", "cache", "--prune", "--yes", "--json")
        pruned = outcome.document()["result"]["pruned"]
        assert (pruned["removed"], pruned["freed_bytes"]) == ([str(half)], 4)
        assert pending.temporary.exists()
    assert not half.exists()
    assert sidecar.exists()


def test_damaged_sidecars_are_named_and_removed_unless_locked(
    dataset: Path, lrstream: Program, home: Path
) -> None:
    sidecar = built(dataset, lrstream)
    sidecar.write_bytes(sidecar.read_bytes()[:100])
    outcome = lrstream("inspect", "cache", "--json")
    assert outcome.codes() == ["cache-damaged"]
    with ProcessLock(lock_path(sidecar)) as lock:
        lock.acquire(1)
        pruned = lrstream("inspect", "cache", "--prune", "--yes", "--json").document()["result"]["pruned"]
        assert pruned["removed"] == []
        assert pruned["kept"] == [[str(sidecar), "it is being made just now"]]
    lrstream("inspect", "cache", "--prune", "--yes")
    assert not sidecar.exists()


def test_prune_shows_first_and_asks(
    dataset: Path, lrstream: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = leave_unfinished(built(dataset, lrstream))
    for arguments in (["--prune"], ["--prune", "--json"]):
        outcome = lrstream("inspect", "cache", *arguments)
        assert outcome.code == 2, "there is nobody to ask"
        assert half.exists()
    assert lrstream("inspect", "cache", "--yes", "--json").codes() == ["usage"]
    assert lrstream("inspect", "cache", "--prune", "--yes", "--idle-days", "-1").code == 2
    assert half.exists()

    answers = iter([False, True])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: next(answers))
    refused = lrstream("inspect", "cache", "--prune")
    assert refused.code == 0
    assert half.exists()
    assert str(half) in refused.err, "it is shown before the question"
    assert "Nothing was removed" in refused.out
    agreed = lrstream("inspect", "cache", "--prune")
    assert "Removed 1 files" in agreed.out
    assert not half.exists()


def test_nothing_of_others_is_ever_touched(dataset: Path, lrstream: Program, home: Path) -> None:
    sidecar = built(dataset, lrstream)
    precious = [
        home / "streaming-indexes" / "v1-of-another-program" / "a.bin",
        home / "streaming-indexes" / "lrstream-arrow-0" / "x" / "old.arrow",
        sidecar.with_name("mp4-v2-main-0123456789abcdef.npz"),
        sidecar.with_name("notes.txt"),
        home / "owner" / "dataset" / "meta" / "info.json",
        home / "owner" / "dataset" / ".half.tmp",
    ]
    for path in precious:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
        age(path, 1000)
    before = tree(home)
    found = states(lrstream)
    assert found["v1-of-another-program"] == ("foreign", False)
    assert found["lrstream-arrow-0"] == ("foreign", False)
    assert found["mp4-v2-main-0123456789abcdef.npz"] == ("foreign", False)
    lrstream("inspect", "cache", "--prune", "--yes", "--idle-days", "0")
    after = tree(home)
    assert {name: data for name, data in before.items() if data == b"precious"} == {
        name: data for name, data in after.items() if data == b"precious"
    }
    assert sidecar.exists()


def test_a_cache_that_is_a_link_to_a_dataset_is_safe(
    dataset: Path, lrstream: Program, home: Path, tmp_path: Path
) -> None:
    half = leave_unfinished(dataset / "videos" / "mp4-v3-main-0.npz")
    (dataset / "mp4-v3-main-0123456789abcdef.npz").write_bytes(b"a sidecar that is none")
    before = tree(dataset)
    home.mkdir()
    (home / "streaming-sidecars").symlink_to(dataset, target_is_directory=True)
    (home / "streaming-indexes").mkdir()
    (home / "streaming-indexes" / "lrstream-arrow-1").symlink_to(dataset, target_is_directory=True)
    outcome = lrstream("inspect", "cache", "--prune", "--yes", "--json")
    assert outcome.code == 0
    assert "cache-link" in outcome.codes()
    assert tree(dataset) == before
    assert half.exists()

    # A link inside of a directory of our own is not followed either.
    (home / "streaming-sidecars").unlink()
    (home / "streaming-sidecars").mkdir()
    (home / "streaming-sidecars" / "set").symlink_to(dataset, target_is_directory=True)
    lrstream("inspect", "cache", "--prune", "--yes")
    assert tree(dataset) == before


def test_what_changed_since_it_was_shown_is_kept(dataset: Path, lrstream: Program, home: Path) -> None:
    sidecar = built(dataset, lrstream)
    good = sidecar.read_bytes()
    sidecar.write_bytes(b"broken")
    report = inspect_cache()
    assert [entry.path for entry in report.removable] == [sidecar]
    sidecar.write_bytes(good)
    pruned = prune_cache(report)
    assert pruned.removed == ()
    assert pruned.kept == ((sidecar, "it has changed meanwhile"),)
    # The same size, but a later time.
    sidecar.write_bytes(b"broken")
    report = inspect_cache()
    sidecar.write_bytes(b"mended")
    assert prune_cache(report).removed == ()
    assert sidecar.exists()


def test_the_text_says_what_prune_would_do(dataset: Path, lrstream: Program) -> None:
    leave_unfinished(built(dataset, lrstream))
    text: Any = lrstream("inspect", "cache").out
    assert "abandoned *" in text
    assert "--prune" in text
    assert "streaming-sidecars/set/" in text


def test_journals_are_kept_for_the_next_build(dataset: Path, lrstream: Program) -> None:
    sidecar = built(dataset, lrstream)
    journal = journal_path(sidecar)
    journal.write_bytes(b"some records")
    assert states(lrstream)[journal.name] == ("abandoned", True), "its sidecar is complete"
    sidecar.unlink()
    assert states(lrstream)[journal.name] == ("resumable", False)
    with ProcessLock(lock_path(sidecar)) as lock:
        lock.acquire(1)
        age(journal, 8)
        assert states(lrstream)[journal.name] == ("in progress", False)
    report = inspect_cache()
    assert [entry.path for entry in report.removable] == [journal]
    with ProcessLock(lock_path(sidecar)) as lock:
        lock.acquire(1)
        assert prune_cache(report).kept == ((journal, "it is being made just now"),)
    assert prune_cache(report).removed == (journal,)


def test_an_index_without_its_sidecar_is_an_orphan(dataset: Path, lrstream: Program) -> None:
    sidecar = built(dataset, lrstream)
    [generation] = sidecar.parents[2].rglob("*.arrow")
    sidecar.unlink()
    assert states(lrstream)[generation.name] == ("orphan", False)
    age(generation, 8)
    assert states(lrstream)[generation.name] == ("orphan", True)
    lrstream("inspect", "cache", "--prune", "--yes")
    assert not generation.parent.exists()
