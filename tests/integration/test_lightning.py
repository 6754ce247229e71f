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
from tests.support.shared import PROJECT

pytest.importorskip("lightning", reason="Lightning is not installed here")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# Written behind the recipe's classes: what training got, without changing the recipe.
RECORD = """
def _recorded(step):
    def noted(self, batch, batch_idx):
        import json, os
        with open(os.path.join({directory!r}, f"rank-{{self.global_rank}}.jsonl"), "a") as file:
            file.write(json.dumps([self.current_epoch, *batch["index"].tolist()]) + "\\n")
        return step(self, batch, batch_idx)
    return noted
Model.training_step = _recorded(Model.training_step)

"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """42 frames; of two ranks one has 20 frames in 3 batches, the other 22 in 4."""
    camera = DemoCamera("observation.images.front", 16, 96, kind="image")
    spec = DemoSpec((20, 12, 5, 5), (camera,), fps=10)
    return write_dataset(tmp_path_factory.mktemp("lightning") / "dataset", spec)


def run(work: Path, *arguments: object, world_size: int = 1) -> list[list[list[int]]]:
    """What each rank trained with, step by step: the epoch, then the frames."""
    guide = (PROJECT / "docs/how-to/train-with-lightning.md").read_text(encoding="utf-8")
    found = re.search(r"^```py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert found is not None
    head, main = found.group(1).split("def main(")
    script = work / "train.py"
    script.write_text(head + RECORD.format(directory=str(work)) + "def main(" + main, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [sys.executable, *(launcher if world_size > 1 else []), script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    files = [work / f"rank-{rank}.jsonl" for rank in range(world_size)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for file in files:
        file.unlink()
    return lines


def checkpoint(directory: Path, step: int) -> Path:
    """The checkpoint of a step, whatever epoch it is of."""
    return next(directory.glob(f"*-step={step}.ckpt"))


def test_every_frame_once_an_epoch_and_the_next_one_after_a_resume(
    dataset: WrittenDataset, tmp_path: Path
) -> None:
    """7 batches of two workers in an epoch: resumed inside of one, at its end, and inside of the next."""
    (whole,) = run(tmp_path, dataset.root, tmp_path / "run")
    assert len(whole) == 14 or len(whole) == 12
    length = len(whole) // 2
    for epoch in (0, 1):
        steps = whole[epoch * length : (epoch + 1) * length]
        assert {step[0] for step in steps} == {epoch}
        assert Counter(index for step in steps for index in step[1:]) == Counter(range(42))
    for step in (2, length, length + 3):
        (rest,) = run(tmp_path, dataset.root, tmp_path / "again", checkpoint(tmp_path / "run", step))
        assert rest == whole[step:], step


def test_ranks_end_together_and_resume(dataset: WrittenDataset, tmp_path: Path) -> None:
    ranks = run(tmp_path, dataset.root, tmp_path / "run", world_size=2)
    assert [len(steps) for steps in ranks] == [6, 6]
    for epoch in (0, 1):
        frames = [index for steps in ranks for step in steps if step[0] == epoch for index in step[1:]]
        assert len(frames) == len(set(frames)) >= 40
    rest = run(tmp_path, dataset.root, tmp_path / "again", checkpoint(tmp_path / "run", 4), world_size=2)
    assert rest == [steps[4:] for steps in ranks]
