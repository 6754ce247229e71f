"""Threads, files, decoders and processes: bounded, never shared across a fork, and gone at the end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.streaming.dataset import StreamingLeRobotDataset
from tests.support.loader import indices, loader_threads, open_loader, samples_of, wait_for_no_threads
from tests.support.shared import PROJECT


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to count descriptors")


def run(script: str, *arguments: object, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=PROJECT,
        check=False,
    )


# -- ends -------------------------------------------------------------------------------------------


def test_threads_end_with_the_epoch_the_iterator_and_the_dataset(standard_dataset: WrittenDataset) -> None:
    dataset = open_loader(standard_dataset, episodes=[0, 1])
    assert loader_threads() == []
    indices(dataset)
    assert loader_threads() == []
    iterator = iter(dataset)
    next(iterator)
    assert loader_threads()
    del iterator
    wait_for_no_threads()
    kept = iter(dataset)
    next(kept)
    dataset.close()
    assert loader_threads() == []
    assert list(kept) == []
    dataset.close()
    assert len(indices(dataset)) == 30, "a closed dataset opens again when it is iterated"
    with open_loader(standard_dataset) as other:
        next(iter(other))
    assert loader_threads() == []


@needs_proc
def test_descriptors_and_decoders_are_bounded_and_given_back(standard_dataset: WrittenDataset) -> None:
    dataset = open_loader(standard_dataset, video_decoder_cache_size=2)
    indices(dataset)
    dataset.close()
    before = open_files()
    for epoch in range(3):
        dataset.set_epoch(epoch)
        for sample in dataset:
            assert sample
            assert dataset.metrics()["open_decoders"] <= 2
        assert open_files() <= before + 40
    dataset.close()
    assert open_files() <= before
    metrics = dataset.metrics()
    assert metrics["samples"] == 0, "counters belong to what is open"
    dataset.close()


def test_metrics_of_an_epoch(standard_dataset: WrittenDataset) -> None:
    dataset = open_loader(standard_dataset)
    found = indices(dataset)
    metrics = dataset.metrics()
    assert metrics["samples"] == len(found) == metrics["stages"]["decode"]["count"]
    assert metrics["episodes_loaded"] == metrics["stages"]["rows"]["count"] == 7
    assert metrics["stages"]["payload"]["count"] == 14
    assert 0 < metrics["fetched_bytes"] < metrics["peak_reserved_bytes"]
    assert metrics["fetched_bytes_per_sample"] == metrics["fetched_bytes"] / len(found)
    waits = metrics["wait_s"]
    assert 0 < waits["p50"] <= waits["p95"] <= waits["p99"] <= waits["max"]
    assert metrics["reserved_bytes"] == metrics["resident_bytes"] == 0
    assert 1 <= metrics["open_decoders"] <= 4
    dataset.close()


@needs_proc
def test_hundreds_of_files_with_sixty_four_descriptors(tmp_path: Path) -> None:
    """One tiny file per episode and camera; handles must not pile up (K27)."""
    camera = DemoCamera("observation.images.front", 16, 96, gop=1, episodes_per_file=1)
    written = write_dataset(
        tmp_path / "many", DemoSpec((1,) * 120, (camera,), episodes_per_data_file=1, episode_stats=False)
    )
    script = """
        import resource, sys
        from lrstream import StreamingLeRobotDataset
        dataset = StreamingLeRobotDataset("x", root=sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        print(sorted(int(sample["index"]) for sample in dataset) == list(range(120)))
        dataset.close()
    """
    done = run(script, written.root, timeout_s=90)
    assert done.stdout.strip() == "True", done.stderr[-3000:]
    assert done.returncode == 0


@pytest.mark.parametrize("how", ["in the middle", "interrupted", "failing"])
def test_the_interpreter_exits_with_its_own_code(standard_dataset: WrittenDataset, how: str) -> None:
    script = """
        import os, signal, sys
        from lrstream import StreamingLeRobotDataset
        dataset = StreamingLeRobotDataset("x", root=sys.argv[1], decode_threads=3)
        iterator = iter(dataset)
        next(iterator)
        if sys.argv[2] == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
            for sample in iterator:
                pass
        if sys.argv[2] == "failing":
            raise SystemExit(7)
        print("end")
    """
    done = run(script, standard_dataset.root, how)
    expected = {"in the middle": (0,), "interrupted": (1, 130, -2), "failing": (7,)}[how]
    assert done.returncode in expected, done.stderr[-3000:]
    assert ("KeyboardInterrupt" in done.stderr) == (how == "interrupted")
    assert "Fatal" not in done.stderr


# -- processes --------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_open", ["used before", "in use"])
def test_forked_workers_open_everything_anew(standard_dataset: WrittenDataset, is_open: str) -> None:
    """The parent has files, decoders and threads of its own when it forks (K16)."""
    dataset = open_loader(standard_dataset)
    iterator = iter(dataset)
    first = next(iterator)
    assert int(first["index"]) >= 0
    if is_open == "used before":
        del iterator
    found = indices(samples_of(dataset, num_workers=2, context="fork"))
    assert sorted(found) == list(range(standard_dataset.num_frames))
    assert dataset.metrics()["samples"] == 1, "the workers' counters are their own"
    dataset.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_of_other_start_methods(tiny_dataset: WrittenDataset, context: str) -> None:
    dataset = open_loader(tiny_dataset)
    next(iter(dataset))
    assert sorted(indices(samples_of(dataset, 1, context))) == list(range(tiny_dataset.num_frames))


def test_a_dataset_in_use_can_be_pickled(tiny_dataset: WrittenDataset) -> None:
    dataset = open_loader(tiny_dataset, delta_timestamps={"action": [0.0, 0.1]}, seed=9)
    dataset.set_epoch(4)
    iterator = iter(dataset)
    next(iterator)
    assert dataset.meta.stats
    assert dataset.meta.episodes[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.epoch == 4
    assert indices(copy) == indices(dataset)
    assert len(pickle.dumps(dataset)) < 20_000
    dataset.close()
    copy.close()


def test_an_inherited_epoch_does_not_touch_the_childs_exit(standard_dataset: WrittenDataset) -> None:
    dataset = open_loader(standard_dataset)
    iterator = iter(dataset)
    next(iterator)

    def child() -> None:
        nonlocal iterator
        del iterator  # the parent's pipeline ends here, without its threads

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert int(next(iterator)["index"]) >= 0
    dataset.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_a_data_loader_early_leaves_nothing(
    standard_dataset: WrittenDataset, num_workers: int
) -> None:
    dataset = open_loader(standard_dataset)
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=num_workers, **options)
    for _ in loader:
        break
    dataset.close()
    wait_for_no_threads()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_storage_options_reach_the_workers(tiny_dataset: WrittenDataset, num_workers: int) -> None:
    """A local directory behind fsspec's own wrapper, which needs its options in every process (LD-11)."""
    root = f"dir://{tiny_dataset.root}"
    with StreamingLeRobotDataset(root, storage_options={"path": "/", "target_protocol": "file"}) as dataset:
        found = indices(samples_of(dataset, num_workers))
    assert sorted(found) == list(range(tiny_dataset.num_frames))
