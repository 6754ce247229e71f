"""Memory and open files over many epochs of many files, and what processes share (LD-5, SC-10, K27)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lrstream.demo import DemoCamera, DemoSpec, write_dataset
from tests.support import faults
from tests.support.shared import import_path

NUM_FILES = 500
# All twenty epochs take a minute of a processor; growth shows in fewer.
NUM_EPOCHS = 20 if os.environ.get("LRSTREAM_LONG_TESTS") else 10

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps").is_file(), reason="needs /proc to measure a process"
)


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 episodes of two frames, each of which reads an MP4 file of its own.

    Every file is a link to one that holds all episodes, so nothing has to be encoded 500 times, and every
    episode still finds its own pictures in its file.
    """
    root = tmp_path_factory.mktemp("many") / "dataset"
    camera = DemoCamera("observation.images.front", 16, 96, gop=2, episodes_per_file=NUM_FILES)
    write_dataset(root, DemoSpec((2,) * NUM_FILES, (camera,), episodes_per_data_file=100))
    (whole,) = (root / "videos").rglob("*.mp4")
    for number in range(1, NUM_FILES):
        os.link(whole, whole.with_name(f"file-{number:03d}.mp4"))

    def own_file(row: dict[str, Any]) -> None:
        row["videos/observation.images.front/file_index"] = row["episode_index"]

    faults.edit_episodes(root, own_file)
    return root


def run(script: str, root: Path, timeout_s: float) -> dict[str, Any]:
    """Run a script in a process of its own; what it prints as JSON."""
    path = import_path()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(root), str(NUM_EPOCHS)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_epochs_of_five_hundred_files_with_128_descriptors(many_files: Path) -> None:
    """The byte budget holds four episodes, the pool would like twelve."""
    script = """
        import json, os, resource, sys
        from lrstream import StreamingLeRobotDataset
        probe = StreamingLeRobotDataset("x", root=sys.argv[1])
        budget = 4 * int(probe._sizes().max())
        probe.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        dataset = StreamingLeRobotDataset(
            "x", root=sys.argv[1], byte_budget_gb=budget / 2**30, episode_pool_size=12, return_uint8=True
        )
        page = os.sysconf("SC_PAGE_SIZE")
        result = {"rss": [], "files": [], "whole": [], "budget": budget}
        for epoch in range(int(sys.argv[2])):
            dataset.set_epoch(epoch)
            found = sorted(int(sample["index"]) for sample in dataset)
            result["whole"].append(found == list(range(1000)))
            with open("/proc/self/statm") as statm:
                result["rss"].append(int(statm.read().split()[1]) * page)
            result["files"].append(len(os.listdir("/proc/self/fd")))
        result["peak"] = dataset.metrics()["peak_reserved_bytes"]
        result["decoders"] = dataset.metrics()["open_decoders"]
        dataset.close()
        json.dump(result, sys.stdout)
    """
    result = run(script, many_files, 380)
    assert all(result["whole"])
    assert max(result["files"]) < 100
    assert max(result["files"][NUM_EPOCHS // 5 :]) - min(result["files"][NUM_EPOCHS // 5 :]) <= 4
    growth = max(result["rss"][NUM_EPOCHS // 2 :]) - max(result["rss"][NUM_EPOCHS // 5 : NUM_EPOCHS // 2])
    assert growth < 6 * 2**20, [round(rss / 2**20, 1) for rss in result["rss"]]
    assert 0 < result["peak"] <= result["budget"]
    assert 1 <= result["decoders"] <= 12


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_four_workers_share_the_pages_of_the_index(
    many_files: Path, record_property: Callable[[str, object], None]
) -> None:
    """A page that n processes have mapped counts 1/n for each (PSS): the sum is the index, counted once."""
    script = """
        import json, multiprocessing, os, sys
        from torch.utils.data import DataLoader
        from lrstream import StreamingLeRobotDataset

        def measured(pid):
            kinds = {"rss": 0, "pss": 0, "index_rss": 0, "index_pss": 0, "index_dirty": 0}
            in_index = False
            with open(f"/proc/{pid}/smaps") as smaps:
                for line in smaps:
                    words = line.split()
                    if "-" in words[0] and not words[0].endswith(":"):
                        in_index = "streaming-indexes" in line
                    elif words[0] in ("Rss:", "Pss:", "Private_Dirty:"):
                        size = int(words[1]) * 1024
                        name = {"Rss:": "rss", "Pss:": "pss", "Private_Dirty:": "dirty"}[words[0]]
                        if name != "dirty":
                            kinds[name] += size
                        if in_index:
                            kinds["index_" + name] += size
            return kinds

        if __name__ == "__main__":
            dataset = StreamingLeRobotDataset("x", root=sys.argv[1], return_uint8=True)
            loader = DataLoader(
                dataset, batch_size=8, num_workers=4, persistent_workers=True, multiprocessing_context="fork",
                collate_fn=len,
            )
            count = sum(loader)
            pids = [process.pid for process in multiprocessing.active_children()]
            workers = [measured(pid) for pid in pids]
            root = os.path.join(os.environ["HF_LEROBOT_HOME"], "streaming-indexes")
            files = [os.path.join(path, name) for path, _, names in os.walk(root) for name in names]
            index = max(map(os.path.getsize, files))
            json.dump({"count": count, "workers": workers, "index": index}, sys.stdout)
    """
    result = run(script, many_files, 180)
    workers = result["workers"]
    assert result["count"] == 1000
    assert len(workers) == 4
    shared = sum(worker["index_pss"] for worker in workers)
    record_property("pss_of_workers", [worker["pss"] for worker in workers])
    record_property("index_bytes", result["index"])
    print({"pss_mib": [round(worker["pss"] / 2**20, 1) for worker in workers], "index_pss": shared, **result})
    assert all(worker["index_rss"] > 0 for worker in workers), "the index is not mapped"
    assert sum(worker["index_rss"] for worker in workers) > shared
    assert shared <= result["index"] + 4 * os.sysconf("SC_PAGE_SIZE")
    assert not any(worker["index_dirty"] for worker in workers)
