"""A stand-in for an installed LeRobot: its training loop in small, with the names that lrstream replaces.

It has no model; it notes the values of ``index`` of each batch. The order of the calls, the arguments of the
DataLoader and the use of Accelerate are those of LeRobot's script.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

__all__ = ["Config", "Policy", "data_config", "forget", "install"]


@dataclass
class Policy:
    """Windows of a policy, in frames."""

    observation_delta_indices: list[int] | None = None
    action_delta_indices: list[int] | None = None
    reward_delta_indices: list[int] | None = None


@dataclass
class Config:
    """What the adapter reads of `TrainPipelineConfig`."""

    dataset: Any
    policy: Any = field(default_factory=Policy)
    seed: int | None = 1000
    tolerance_s: float = 1e-4
    batch_size: int = 4
    num_workers: int = 0
    steps: int = 6
    save_freq: int = 3
    resume: bool = False
    checkpoint_path: Path | None = None
    output_dir: Path | None = None


def data_config(root: Path | None, **others: Any) -> SimpleNamespace:
    """What the adapter reads of `DatasetConfig`, as release 0.4 has it; `others` adds to it."""
    values: dict[str, Any] = {
        "repo_id": "robots/pick",
        "root": None if root is None else str(root),
        "episodes": None,
        "revision": None,
        "image_transforms": SimpleNamespace(enable=False),
        "use_imagenet_stats": True,
        "video_backend": "pyav",
        "streaming": True,
    }
    return SimpleNamespace(**values | others)


_SCRIPT = """
import functools, json, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from accelerate import Accelerator

taken = []
calls = SimpleNamespace(config=None, arguments=None)

def make_dataset(cfg):
    raise AssertionError("LeRobot's own function")

class EpisodeAwareSampler:
    def __init__(self, *args, **kwargs):
        raise AssertionError("LeRobot's own sampler")

def save_checkpoint(checkpoint_dir, step, cfg):
    state = Path(checkpoint_dir) / "training_state"
    state.mkdir(parents=True)
    (state / "training_step.json").write_text(json.dumps({{"step": step}}))

def cycle(iterable):
    iterator = iter(iterable)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            iterator = iter(iterable)

def wrap(function):
    @functools.wraps(function)
    def wrapped(cfg=None):
        calls.arguments = list(sys.argv)
        return function(cfg or calls.config)
    return wrapped

@wrap
def train(cfg):
    accelerator = Accelerator(cpu=True)
    dataset = {make}
    shuffle = sampler = None
    if hasattr(cfg.policy, "drop_n_last_frames"):
        sampler = EpisodeAwareSampler(
            dataset.meta.episodes["dataset_from_index"],
            dataset.meta.episodes["dataset_to_index"],
            episode_indices_to_use=dataset.episodes,
            drop_n_last_frames=cfg.policy.drop_n_last_frames,
            shuffle=True,
        )
    step = 0
    if cfg.resume:
        saved = cfg.checkpoint_path / "training_state" / "training_step.json"
        step = json.loads(saved.read_text())["step"]
    loader = torch.utils.data.DataLoader(
        dataset, num_workers=cfg.num_workers, batch_size=cfg.batch_size, shuffle=False, sampler=sampler,
        pin_memory=False, drop_last=False, prefetch_factor=2 if cfg.num_workers > 0 else None,
    )
    loader = {prepare}
    batches = cycle(loader)
    for _ in range(step, cfg.steps):
        batch = next(batches)
        taken.append(batch["index"].tolist())
        step += 1
        if step % cfg.save_freq == 0 or step == cfg.steps:
            save_checkpoint(checkpoint_dir=cfg.output_dir / f"{{step:06d}}", step=step, cfg=cfg)

def main():
    train()
"""


def install(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    release: str = "0.4.4",
    make: str = "make_dataset(cfg)",
    prepare: str = "accelerator.prepare(loader)",
) -> None:
    """Make ``import lerobot`` find the stand-in, until the test is over.

    Args:
        directory: Where it is written.
        monkeypatch: Of the test.
        release: What it says its version is.
        make: How the script makes its dataset.
        prepare: How it prepares its DataLoader.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "lerobot"]:
        monkeypatch.delitem(sys.modules, name)
    scripts = directory / "lerobot" / "scripts"
    scripts.mkdir(parents=True)
    for package in (scripts.parent, scripts):
        (package / "__init__.py").write_text("")
    (scripts / "lerobot_train.py").write_text(_SCRIPT.format(make=make, prepare=prepare))
    metadata = directory / f"lerobot-{release}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lerobot\nVersion: {release}\n")
    monkeypatch.syspath_prepend(directory)


def forget() -> None:
    """Take the stand-in's modules out again."""
    for name in [name for name in sys.modules if name.split(".")[0] == "lerobot"]:
        del sys.modules[name]
