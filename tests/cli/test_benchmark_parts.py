"""`lrstream benchmark build|open|fetch`: their figures against the request log, the files, and the system."""

from __future__ import annotations

import io
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest

from lrstream.cli import benchmark_build, benchmark_fetch, benchmark_open, benchmark_plan
from lrstream.cli.screen import Screen
from lrstream.commands.benchmark_build import BuildOptions
from lrstream.commands.benchmark_build import benchmark_build as run_build
from lrstream.commands.benchmark_common import ChosenEpisodes, choose_episodes
from lrstream.commands.benchmark_fetch import FetchOptions
from lrstream.commands.benchmark_fetch import benchmark_fetch as run_fetch
from lrstream.commands.benchmark_open import OpenOptions
from lrstream.commands.benchmark_open import benchmark_open as run_open
from lrstream.commands.benchmark_plan import PlanOptions
from lrstream.commands.benchmark_plan import benchmark_plan as run_plan
from lrstream.demo import WrittenDataset
from lrstream.index.open import open_index
from tests.cli.program import Program
from tests.support.hub import LoopbackHub
from tests.support.remote import hurry_retries, spans_by_file

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = pytest.mark.timeout(60)

REPO = "robots/pick"


@pytest.fixture
def hub(
    loopback_hub: LoopbackHub, standard_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> LoopbackHub:
    loopback_hub.create_dataset(REPO, standard_dataset.root)
    loopback_hub.connect_process(monkeypatch)
    hurry_retries(monkeypatch)
    return loopback_hub


def result_of(lrstream: Program, command: str, source: object, *words: str) -> dict[str, Any]:
    outcome = lrstream("benchmark", command, str(source), *words, "--json")
    assert outcome.code == 0, outcome.out
    document = outcome.document()
    assert document["schema"] == f"lrstream.benchmark.{command}/1"
    return dict(document["result"])


def moov_bytes(path: Path) -> int:
    data = path.read_bytes()
    at = 0
    while data[at + 4 : at + 8] != b"moov":
        at += int.from_bytes(data[at : at + 4], "big")
    return int.from_bytes(data[at : at + 4], "big")


def packets(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(packet.size > 0 for packet in container.demux(video=0))


def test_building_is_counted_as_the_hub_counts_it(
    hub: LoopbackHub, standard_dataset: WrittenDataset, lrstream: Program, isolated_home: Path
) -> None:
    result = result_of(lrstream, "build", REPO)
    records = hub.log.records(r"\.mp4$")
    videos = sorted(standard_dataset.root.rglob("*.mp4"))
    assert result["videos"] == len(videos) == 7
    assert result["requests"] == len(records)
    assert result["bytes_read"] == sum(record.bytes_sent for record in records if record.server == "cdn")
    assert result["moov_bytes"] == sum(map(moov_bytes, videos))
    assert result["bytes_over_moov"] == pytest.approx(result["bytes_read"] / result["moov_bytes"])
    assert result["frames"] == sum(map(packets, videos)) == 2 * standard_dataset.num_frames
    assert result["source_bytes"] == sum(path.stat().st_size for path in videos)
    assert 1 <= result["most_reads_at_once"] <= 7
    assert 1 <= result["reads_at_once"] <= result["most_reads_at_once"]
    assert all(seconds > 0 for seconds in result["stages"].values())
    indexing_s = result["stages"]["transfer"] + result["stages"]["parse"]
    assert indexing_s <= 7 * result["elapsed_s"], "seven threads at most"
    kept = {path.suffix for path in (isolated_home / "lerobot").rglob("*") if path.is_file()}
    assert not kept & {".npz", ".arrow"}, "metadata are cached, as always; no sidecar is"


def test_one_at_a_time_and_some_only(
    standard_dataset: WrittenDataset, lrstream: Program, isolated_home: Path
) -> None:
    result = result_of(lrstream, "build", standard_dataset.root, "--videos", "3", "--workers", "1")
    assert result["videos"] == 3
    assert result["most_reads_at_once"] == 1
    assert result["reads_at_once"] == pytest.approx(1.0)
    assert result["stages"]["transfer"] + result["stages"]["parse"] <= result["elapsed_s"]
    assert not (isolated_home / "lerobot").exists()


def test_the_moov_behind_the_pictures_is_found_too(dataset_cache: Any, lrstream: Program) -> None:
    dataset = dataset_cache.get("h264")  # written without "faststart"
    result = result_of(lrstream, "build", dataset.root)
    assert result["moov_bytes"] == sum(map(moov_bytes, dataset.root.rglob("*.mp4")))


def test_opening(standard_dataset: WrittenDataset, lrstream: Program, tmp_path: Path) -> None:
    archive = tmp_path / "set.npz"
    assert lrstream("build", standard_dataset.root, "-o", archive).code == 0
    result = result_of(lrstream, "open", standard_dataset.root, "--world-size", "2", "--workers", "2")
    index = open_index(archive, home=tmp_path / "home")
    assert result["files"] == len(index.paths) == 7
    # Not the very same bytes: the sidecar says where it belongs and when it was made.
    assert result["index_bytes"] == pytest.approx(index.path.stat().st_size, rel=0.05)
    assert result["archive_bytes"] == pytest.approx(archive.stat().st_size, rel=0.05)
    index.close()
    assert 0 < result["share_episodes"] < 4
    assert 0 < result["share_files"] <= 2 * result["share_episodes"]
    assert result["frames"] == 2 * standard_dataset.num_frames
    assert result["index_bytes_per_frame"] == pytest.approx(result["index_bytes"] / result["frames"])
    largest_child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert result["peak_rss_bytes"] <= largest_child
    for name in ("convert", "open", "records", "sizes"):
        step = result[name]
        assert 0 < step["seconds"] < 60
        assert 0 <= step["cpu_s"] < 60
        assert step["rss_growth_bytes"] < result["peak_rss_bytes"]


def test_fetching_is_counted_as_the_hub_counts_it(
    hub: LoopbackHub, standard_dataset: WrittenDataset, lrstream: Program, tmp_path: Path
) -> None:
    archive = tmp_path / "set.npz"
    assert lrstream("build", standard_dataset.root, "-o", archive).code == 0
    assert lrstream("build", REPO).code == 0
    hub.faults.add(r"\.mp4$", "slow", server="cdn", latency_s=0.03)
    hub.faults.add(r"\.mp4$", "server-error", times=2, server="cdn")
    hub.log.clear()
    result = result_of(lrstream, "fetch", REPO)
    ranges = [
        item for spans in spans_by_file(standard_dataset.root, archive).values() for item in spans.elements()
    ]
    cold, repeated = result["cold"], result["repeated"]
    assert cold["reads"] == repeated["reads"] == len(ranges) == 14
    assert cold["bytes"] == repeated["bytes"] == sum(stop - start for start, stop in ranges)
    records = hub.log.records(r"\.mp4$")
    assert cold["requests"] + repeated["requests"] == len(records)
    assert repeated["requests"] == 14, "every URL is resolved by then"
    assert (cold["retries"], repeated["retries"]) == (2, 0)
    assert hub.log.count(r"\.mp4$", fault="server-error") == 2
    for item in (cold, repeated):
        assert 0.03 <= item["latency_s"]["p50"] <= item["latency_s"]["p95"] <= item["latency_s"]["p99"]
        assert item["elapsed_s"] >= item["latency_s"]["largest"]
        assert item["mib_per_s"] == pytest.approx(item["bytes"] / 2**20 / item["elapsed_s"])
    assert 2 <= cold["connections"] <= cold["requests"]
    assert repeated["connections"] <= 14
    assert (result["episodes"], result["frames"]) == (7, standard_dataset.num_frames)


def test_one_fetch_at_a_time(hub: LoopbackHub, lrstream: Program) -> None:
    result = result_of(
        lrstream,
        "fetch",
        REPO,
        *("--count", "3", "--at-once", "1", "--connections", "1", "--episodes", "0-4"),
    )
    assert result["episodes"] == 3
    assert result["cold"]["reads"] == 6
    assert result["cold"]["connections"] == 2, "one to the Hub, one to where it leads"
    assert result["repeated"]["connections"] == 0
    assert result["cold"]["at_once"] <= 2.05, "both cameras of an episode"


@pytest.mark.parametrize("command", ["build", "fetch", "plan"])
def test_comparison_and_plot(
    command: str,
    standard_dataset: WrittenDataset,
    tiny_dataset: WrittenDataset,
    lrstream: Program,
    tmp_path: Path,
) -> None:
    before, plot = tmp_path / "before.json", tmp_path / "plot.html"
    words = ("benchmark", command, standard_dataset.root)
    before.write_text(lrstream(*words, "--json").out)
    outcome = lrstream(*words, "--compare", before, "--plot", plot)
    assert outcome.code == 0, outcome.err
    assert f"Compared with {before}:" in outcome.out
    assert "warning" not in outcome.out, "nothing differs"
    assert plot.read_text().count("<svg") >= 1
    refused = lrstream("benchmark", command, tiny_dataset.root, "--compare", before)
    assert refused.code == 2
    assert "not about what was chosen now" in refused.err
    other = lrstream("benchmark", "loader", standard_dataset.root, "--compare", before)
    assert other.code == 2
    assert f"benchmark.{command}/1" in other.err


@pytest.mark.parametrize("command", ["build", "open", "fetch"])
def test_datasets_without_video_have_nothing_to_measure(
    command: str, image_dataset: WrittenDataset, lrstream: Program
) -> None:
    outcome = lrstream("benchmark", command, image_dataset.root).without_traceback()
    assert (outcome.code, outcome.out) == (2, "")
    assert "no video" in outcome.err


@pytest.mark.parametrize("command", ["build", "open", "fetch", "plan", "loader"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["{absent}"], 4),
        (["{dataset}", "--plot", "x.txt"], 2),
        (["{dataset}", "--plot", "/proc/no/such.html"], 4),
        (["{dataset}", "--compare", "{absent}"], 4),
        (["{dataset}", "--compare", "{broken}"], 6),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    command: str,
    words: list[str],
    code: int,
    tiny_dataset: WrittenDataset,
    lrstream: Program,
    tmp_path: Path,
    isolated_home: Path,
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    places = {"absent": tmp_path / "absent", "broken": broken, "dataset": tiny_dataset.root}
    arguments = [word.format(**places) for word in words]
    outcome = lrstream("benchmark", command, *arguments).without_traceback()
    assert outcome.code == code
    assert len(outcome.err.splitlines()) <= 2
    assert not (isolated_home / "lerobot").exists()
    document = lrstream("benchmark", command, *arguments, "--json").document()
    assert document["schema"] == f"lrstream.benchmark.{command}/1"
    assert document["result"] == {}


def test_a_plot_that_fails_does_not_hide_the_figures(
    standard_dataset: WrittenDataset, lrstream: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lrstream.commands import benchmark_charts
    from lrstream.errors import DiskFullError

    def full(*_: object, **__: object) -> None:
        raise DiskFullError("No space is left.")

    monkeypatch.setattr(benchmark_charts, "write_atomically", full)
    plot = tmp_path / "plot.html"
    outcome = lrstream("benchmark", "plan", standard_dataset.root, "--plot", plot, "--json")
    assert outcome.code == 7
    assert outcome.codes() == ["disk-full"]
    assert outcome.document()["result"]["frames"] == standard_dataset.num_frames


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_reports_can_be_read_on_any_terminal(
    columns: str, tiny_dataset: WrittenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    chosen: ChosenEpisodes = choose_episodes(str(tiny_dataset.root), None, repo_type="dataset", revision=None)
    plan = run_plan(chosen, PlanOptions(latency_ms=5, decode_rate=100))
    build = run_build(chosen.layout, BuildOptions())
    fetch = run_fetch(chosen, FetchOptions())
    reports: list[tuple[Callable[[Screen, Any], None], Any, str]] = [
        (benchmark_plan._show, plan, "consumer"),
        (benchmark_build._show, build, "transfer"),
        (benchmark_fetch._show, fetch, "repetitions"),
    ]
    if columns == "80":
        reports.append((benchmark_open._show, run_open(chosen, OpenOptions()), "sizes"))
    for show, report, word in reports:
        stream = Terminal()
        show(Screen(stream), report)
        lines = stream.getvalue().splitlines()
        assert "…" not in stream.getvalue(), "no figure is cut"
        assert word in stream.getvalue()
        if columns != "20":
            assert max(map(len, lines)) <= 80
    assert os.environ["COLUMNS"] == columns
