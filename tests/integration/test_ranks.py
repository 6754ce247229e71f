"""Two ranks with two workers each, started as users start them: coverage, ends, counts (K15, K17)."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.errors import UsageError
from tests.support.loader import indices, open_loader
from tests.support.ranks import run_ranks
from tests.support.shared import PROJECT

GUIDE = PROJECT / "docs/how-to/train-on-several-ranks.md"

# Written beside each recipe: what training got, rank by rank, without changing the recipe.
# The fork server of each rank imports PyTorch once for its workers.
RECORD = """
import json, multiprocessing, os
multiprocessing.set_forkserver_preload(["torch", "torch.utils.data"])
from lrstream.streaming.resumable import ResumableDataset
follow = ResumableDataset.follow
def recorded(self, loader):
    assert loader.num_workers == 2
    with open(os.path.join({directory!r}, f"rank-{{os.environ['RANK']}}.jsonl"), "a") as file:
        counts = self.partition_report(num_workers=2, batch_size=8)
        promised = counts.batches_per_rank(8, drop_last=False).tolist()
        file.write(json.dumps({{"promised": promised, "len": len(self)}}) + "\\n")
        for batch in follow(self, loader):
            file.write(json.dumps([self.epoch, *batch["index"].tolist()]) + "\\n")
            yield batch
ResumableDataset.follow = recorded
"""

# The programs of the guide as modules of this interpreter, each on a port that is free.
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
    "accelerate": ["accelerate.commands.accelerate_cli"],
}
FREE_PORT = {"torchrun": [], "accelerate": ["--main_process_port=0"]}


def launcher(name: str) -> list[str]:
    """The command of a section of the guide, as a module with its arguments, without the script."""
    found = re.search(r"^```sh\n(.*?) train\.py\n```$", section(name), re.MULTILINE | re.DOTALL)
    assert found is not None
    program, *words = found.group(1).split()
    return [*LAUNCHERS[program], *words, *FREE_PORT[program]]


def section(name: str) -> str:
    """A section of the guide."""
    parts = re.split(r"^## ", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return next(part for part in parts if part.startswith(name))


def recipe(name: str) -> str:
    """The script of a section of the guide."""
    found = re.search(r"^```py\n(.*?)^```$", section(name), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def check(lines: list[list[Any]], num_frames: int) -> None:
    """`lines`: of each rank what it recorded over two epochs."""
    for epoch in (0, 1):
        delivered: Counter[int] = Counter()
        for rank, recorded in enumerate(lines):
            heads = [line for line in recorded if isinstance(line, dict)]
            batches = [line[1:] for line in recorded if isinstance(line, list) and line[0] == epoch]
            assert len(heads) == 2
            assert len(batches) == heads[0]["promised"][rank]
            assert sum(map(len, batches)) == heads[0]["len"]
            for batch in batches:
                delivered.update(batch)
        assert delivered == Counter(range(num_frames))
    assert sorted(lines[0][0]["promised"]) == [3, 4]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["torchrun", "Accelerate"])
def test_recipes_give_every_frame_once_and_end(tmp_path: Path, name: str) -> None:
    """One rank has 20 frames in 3 batches and an idle worker, the other 22 frames in 4 batches."""
    camera = DemoCamera("observation.images.front", 16, 96, kind="image")
    written = write_dataset(tmp_path / "dataset", DemoSpec((20, 12, 5, 5), (camera,), fps=10))
    if name == "Accelerate":
        pytest.importorskip("accelerate", reason="accelerate is needed by this recipe alone")
    script = tmp_path / "train.py"
    script.write_text(RECORD.format(directory=str(tmp_path)) + recipe(name), encoding="utf-8")
    run_ranks(launcher(name), script, written.root, timeout_s=360)
    lines = [
        [json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(2)
    ]
    check(lines, written.num_frames)


# -- before the start -------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(120)
def test_batches_of_a_rank_are_known_before_it_starts(
    image_dataset: WrittenDataset, num_workers: int, drop_last: bool
) -> None:
    for rank in range(2):
        dataset = open_loader(image_dataset, rank=rank, world_size=2)
        report = dataset.partition_report(num_workers=num_workers, batch_size=4, drop_last=drop_last)
        fork: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=4, num_workers=num_workers, drop_last=drop_last, collate_fn=indices, **fork
        )
        assert sum(report.rank_frames) == image_dataset.num_frames
        assert report.rank_frames[rank] == len(dataset)
        assert len(list(loader)) == report.batches_per_rank(4, drop_last=drop_last)[rank]


def test_the_shares_are_logged(image_dataset: WrittenDataset, caplog: pytest.LogCaptureFixture) -> None:
    dataset = open_loader(image_dataset, rank=1, world_size=2)
    with caplog.at_level("INFO", logger="lrstream.loader"):
        dataset.partition_report(num_workers=1, batch_size=4)
    frames = dataset.partition_report().rank_frames
    line = caplog.messages[0]
    assert line.startswith(f"Rank 1 of 2: {frames[1]} frames of ")
    assert f"frames of all ranks {min(frames)} to {max(frames)}" in line


# -- a second sharding ------------------------------------------------------------------------------


class IterableDatasetShard(IterableDataset[Any]):
    """Stands in for the class of this name in Accelerate."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return (sample for number, sample in enumerate(self.dataset) if number % 2 == 0)


@pytest.mark.timeout(60)
def test_workers_refuse_to_be_shared_out_again(image_dataset: WrittenDataset) -> None:
    shard = IterableDatasetShard(open_loader(image_dataset))
    loader: DataLoader[Any] = DataLoader(
        shard, num_workers=1, collate_fn=indices, multiprocessing_context="fork"
    )
    with pytest.raises(UsageError, match=r"share them out once more.*Accelerate prepare the model"):
        list(loader)


def test_prepared_loaders_are_not_followed(image_dataset: WrittenDataset) -> None:
    accelerate = pytest.importorskip(
        "accelerate.data_loader", reason="accelerate is an optional test package"
    )
    dataset = open_loader(image_dataset, rank=0, world_size=2)
    plain: DataLoader[Any] = DataLoader(dataset, batch_size=4)
    prepared = accelerate.prepare_data_loader(plain, num_processes=2, process_index=0)
    assert type(prepared.dataset).__name__ == "IterableDatasetShard"
    with pytest.raises(UsageError, match="share them out once more"):
        dataset.follow(prepared)
    dispatching = accelerate.prepare_data_loader(
        plain, num_processes=2, process_index=0, put_on_device=True, dispatch_batches=True
    )
    with pytest.raises(UsageError, match="DataLoaderDispatcher are not those of a DataLoader"):
        dataset.follow(dispatching)
