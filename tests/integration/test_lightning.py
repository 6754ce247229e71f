"""The recipe for Lightning, started as users start it: coverage, checkpoints, resume."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from tests.support.ranks import run_ranks, torchrun
from tests.support.shared import PROJECT, import_path

pytest.importorskip("lightning", reason="Lightning is not installed here")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

# Importing Lightning takes most of the time: all runs of a rank are in one process, its workers forks of
# a server that imports Lightning once.
PRELOAD = """
import multiprocessing
multiprocessing.set_forkserver_preload(["lightning", "lrstream.streaming.dataset"])
"""

# Written behind the recipe's classes: what training got, without changing the recipe.
RECORD = """
import glob, json, os
steps = []
def _recorded(step):
    def noted(self, batch, batch_idx):
        steps.append([self.current_epoch, *batch["index"].tolist()])
        return step(self, batch, batch_idx)
    return noted
Model.training_step = _recorded(Model.training_step)

"""

# In the place of the recipe's last lines: a whole run, then one resumed from each of some steps.
RUNS = """
if __name__ == "__main__":
    import sys
    root, work, *resumed = sys.argv[1:]
    runs = []
    for number, step in enumerate([None, *map(int, resumed)]):
        found = [] if step is None else glob.glob(f"{work}/run-0/*-step={step}.ckpt")
        main(root, f"{work}/run-{number}", 2, *found)
        runs.append(list(steps))
        steps.clear()
    with open(os.path.join(work, f"rank-{os.environ.get('RANK', 0)}.json"), "w") as file:
        json.dump(runs, file)
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """42 frames; of two ranks one has 20 frames, the other 22."""
    camera = DemoCamera("observation.images.front", 16, 96, kind="image")
    spec = DemoSpec((20, 12, 5, 5), (camera,), fps=10)
    return write_dataset(tmp_path_factory.mktemp("lightning") / "dataset", spec)


def run(
    dataset: WrittenDataset, work: Path, *resumed: int, world_size: int = 1
) -> list[list[list[list[int]]]]:
    """What each rank trained with, run by run and step by step: the epoch, then the frames."""
    guide = (PROJECT / "docs/how-to/train-with-lightning.md").read_text(encoding="utf-8")
    found = re.search(r"^```py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert found is not None
    classes, rest = found.group(1).split("def main(")
    main, _ = rest.split("if __name__")
    script = work / "train.py"
    script.write_text(f"{PRELOAD}{classes}{RECORD}def main({main}{RUNS}", encoding="utf-8")
    arguments = [str(dataset.root), str(work), *map(str, resumed)]
    if world_size > 1:
        run_ranks(torchrun(world_size), script, *arguments, timeout_s=180)
    else:
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()},
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((work / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def test_every_frame_once_an_epoch_and_the_next_one_after_a_resume(
    dataset: WrittenDataset, tmp_path: Path
) -> None:
    """Two workers have 20 and 22 frames, so 6 batches: resumed inside an epoch, at its end, in the next."""
    ((whole, *rests),) = run(dataset, tmp_path, 2, 6, 9)
    assert len(whole) == 12
    for epoch in (0, 1):
        steps = whole[epoch * 6 : (epoch + 1) * 6]
        assert {step[0] for step in steps} == {epoch}
        assert Counter(index for step in steps for index in step[1:]) == Counter(range(42))
    assert whole[:6] != [[0, *step[1:]] for step in whole[6:]]
    for step, rest in zip((2, 6, 9), rests, strict=True):
        assert rest == whole[step:], step


@pytest.mark.skipif(
    not os.environ.get("LRSTREAM_LONG_TESTS"), reason="takes a minute; LRSTREAM_LONG_TESTS=1 runs it"
)
def test_ranks_end_together_and_resume(dataset: WrittenDataset, tmp_path: Path) -> None:
    ranks = run(dataset, tmp_path, 4, world_size=2)
    assert [len(whole) for whole, _ in ranks] == [6, 6]
    for epoch in (0, 1):
        frames = [index for whole, _ in ranks for step in whole if step[0] == epoch for index in step[1:]]
        assert len(frames) == len(set(frames)) >= 40
    for whole, rest in ranks:
        assert rest == whole[4:]
