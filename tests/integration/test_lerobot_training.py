"""LeRobot's own training on streamed data, where LeRobot is installed.

A tiny ACT policy without pretrained weights is trained for a few steps on the processor. What the script
takes and the losses that it computes are compared with the same script on LeRobot's map-style reader.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
import pytest
import torch

from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.errors import UsageError
from lrstream.integrations.lerobot import launcher, make_dataset, streaming_training
from lrstream.integrations.lerobot.factory import delta_timestamps_of
from lrstream.integrations.lerobot.options import take_options
from tests.support.hub import LoopbackHub
from tests.support.loader import open_loader
from tests.support.ranks import run_ranks, torchrun
from tests.support.shared import PROJECT

script = pytest.importorskip("lerobot.scripts.lerobot_train", reason="LeRobot is not installed here")
reader = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason="LeRobot is not installed here")

pytest_plugins = ["tests.support.hub.plugin"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPO = "robots/pick"
Item = TypeVar("Item")


def options(prefix: str = "", **values: object) -> list[str]:
    """Arguments ``--{prefix}name=value``."""
    return [f"--{prefix}{name}={value}" for name, value in values.items()]


POLICY = options(
    "policy.",
    type="act",
    device="cpu",
    push_to_hub="false",
    pretrained_backbone_weights="null",
    dim_model=32,
    n_heads=2,
    dim_feedforward=32,
    n_encoder_layers=1,
    n_vae_encoder_layers=1,
    latent_dim=8,
    chunk_size=4,
    n_action_steps=4,
)
COMMON = ["--batch_size=4", "--log_freq=0", "--num_workers=0", "--wandb.enable=false"]
HAS_EVALUATION_SPLIT = hasattr(script, "make_train_eval_datasets")


@dataclass
class Recorded:
    """What one run took and computed, step by step."""

    indices: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order, so that equal pictures give equal losses to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """Four episodes, 43 frames, two cameras in MP4 files of two episodes each."""
    cameras = tuple(
        DemoCamera(f"observation.images.{name}", 32, 96, episodes_per_file=2) for name in ("front", "side")
    )
    spec = DemoSpec((12, 9, 15, 7), cameras, fps=10, episodes_per_data_file=2)
    return write_dataset(tmp_path_factory.mktemp("video") / "dataset", spec)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """Three episodes, 19 frames, images in tables."""
    camera = DemoCamera("observation.images.front", 32, 96, kind="image")
    spec = DemoSpec((6, 9, 4), (camera,), fps=10, episodes_per_data_file=2)
    return write_dataset(tmp_path_factory.mktemp("images") / "dataset", spec)


@contextmanager
def recording() -> Iterator[Recorded]:
    """Note what LeRobot's script hands to its policy, and the losses."""
    recorded = Recorded()
    update = script.update_policy

    def noted(metrics: Any, policy: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.indices.append(batch["index"].tolist())
        result = update(metrics, policy, batch, *args, **kwargs)
        recorded.losses.append(metrics.loss.val)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update_policy", noted)
        yield recorded


def streamed(*arguments: str) -> Recorded:
    """A run of `lrstream-lerobot-train`."""
    with recording() as recorded:
        assert launcher.main([*POLICY, *COMMON, *arguments]) == 0
    return recorded


def resumed(checkpoint: Path, *arguments: str) -> Recorded:
    """A run that continues from a checkpoint, with nothing else said."""
    config = checkpoint / "pretrained_model" / "train_config.json"
    with recording() as recorded:
        assert launcher.main([f"--config_path={config}", "--resume=true", *arguments]) == 0
    return recorded


def mapped(order: Iterable[int], *arguments: str) -> Recorded:
    """A run of LeRobot's training on its map-style reader, whose frames come in a given order."""
    frames = list(order)

    class Ordered(torch.utils.data.DataLoader[Item]):  # generic, as the one that it replaces
        def __init__(self, dataset: Any, **given: Any) -> None:
            if "sampler" in given:  # that of the frames to train with
                places = getattr(dataset, "absolute_to_relative_idx", None)
                order = frames if places is None else [places[frame] for frame in frames]
                given |= {"shuffle": False, "sampler": order}
            super().__init__(dataset, **given)

    with recording() as recorded, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data, "DataLoader", Ordered)
        patch.setattr(sys, "argv", ["lerobot-train", *POLICY, *COMMON, *arguments])
        script.main()
    return recorded


def decode_with_pyav(
    path: Path | str, timestamps: list[float], tolerance_s: float, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Pictures at some times, from a decode of the whole file in order: float32 in [0, 1], TCHW.

    For releases whose own PyAV path needs a torchvision that still reads videos.
    """
    with av.open(str(path)) as container:
        decoded = [
            (float(picture.time), picture.to_ndarray(format="rgb24"))
            for picture in container.decode(video=0)
            if picture.time is not None
        ]
    times = np.array([time for time, _ in decoded])
    places = [int(np.abs(times - time).argmin()) for time in timestamps]
    assert all(abs(times[place] - time) < tolerance_s for place, time in zip(places, timestamps, strict=True))
    pictures = torch.from_numpy(np.stack([decoded[place][1] for place in places])).permute(0, 3, 1, 2)
    return pictures.type(torch.float32) / 255


@pytest.fixture
def pyav_reader(monkeypatch: pytest.MonkeyPatch) -> str:
    """Option by which LeRobot's map-style reader decodes with PyAV, in this environment."""
    import torchvision

    if not HAS_EVALUATION_SPLIT and not hasattr(torchvision.io, "VideoReader"):
        monkeypatch.setattr(reader, "decode_video_frames", decode_with_pyav)
    return "--dataset.video_backend=pyav"


def source(dataset: WrittenDataset) -> list[str]:
    """Options that name a local dataset."""
    return [f"--dataset.repo_id={REPO}", f"--dataset.root={dataset.root}"]


def configuration(*arguments: str) -> Any:
    """LeRobot's configuration of some arguments, as its script gets it."""
    import draccus
    from lerobot.configs.train import TrainPipelineConfig

    return draccus.parse(TrainPipelineConfig, args=[*POLICY, *COMMON, *arguments])


# -- equal to the map-style reader ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["video", "images"])
def test_losses_equal_those_of_the_map_style_reader(
    kind: str, tmp_path: Path, pyav_reader: str, request: pytest.FixtureRequest
) -> None:
    """Bit for bit: the same pictures, windows and masks in the same order, the same seed."""
    dataset: WrittenDataset = request.getfixturevalue(kind)
    where = [*source(dataset), "--steps=4", "--save_checkpoint=false"]
    ours = streamed(*where, f"--output_dir={tmp_path / 'ours'}")
    assert len(ours.losses) == len(ours.indices) == 4
    assert len({*itertools.chain(*ours.indices)}) == 16
    order = list(itertools.chain(*ours.indices))
    theirs = mapped(order, *where, pyav_reader, f"--output_dir={tmp_path / 'theirs'}")
    assert theirs.indices == ours.indices
    assert theirs.losses == ours.losses
    # And it is the data that decides them.
    other = mapped(reversed(order), *where, pyav_reader, f"--output_dir={tmp_path / 'other'}")
    assert other.losses != ours.losses


@pytest.mark.parametrize("kind", ["video", "images"])
def test_samples_and_metadata_equal_those_of_the_map_style_reader(
    kind: str, pyav_reader: str, request: pytest.FixtureRequest
) -> None:
    dataset: WrittenDataset = request.getfixturevalue(kind)
    config = configuration(*source(dataset), pyav_reader, "--dataset.streaming=false")
    factory = pytest.importorskip("lerobot.datasets.factory")
    theirs = factory.make_dataset(config)
    ours = make_dataset(config)
    assert (ours.num_frames, ours.num_episodes) == (theirs.num_frames, theirs.num_episodes)
    assert ours.meta.camera_keys == theirs.meta.camera_keys
    assert ours.meta.fps == theirs.meta.fps
    assert ours.meta.total_episodes == theirs.meta.total_episodes
    assert {k: (v["dtype"], tuple(v["shape"])) for k, v in ours.meta.features.items()} == {
        k: (v["dtype"], tuple(v["shape"])) for k, v in theirs.meta.features.items()
    }
    assert ours.meta.tasks.equals(theirs.meta.tasks)
    assert set(ours.meta.stats) == set(theirs.meta.stats)
    for key, values in theirs.meta.stats.items():
        assert set(ours.meta.stats[key]) == set(values), key
        for name, value in values.items():
            mine = ours.meta.stats[key][name]
            assert type(mine) is type(value)
            assert mine.dtype == value.dtype
            assert bool((mine == value).all()), (key, name)
    assert delta_timestamps_of(config.policy, ours.features, ours.fps) == factory.resolve_delta_timestamps(
        config.policy, theirs.meta
    )
    for sample in ours:
        other = theirs[int(sample["index"])]
        assert set(sample) == set(other)
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                assert (sample[key].dtype, sample[key].shape) == (value.dtype, value.shape), key
                assert torch.equal(sample[key], value), key
            else:
                assert sample[key] == value, key


# -- resume -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_goes_on_with_the_next_sample(
    images: WrittenDataset, tmp_path: Path, num_workers: int
) -> None:
    """19 frames in batches of 4: one of the checkpoints lies in the first epoch, one in the second."""
    whole = streamed(
        *source(images),
        f"--output_dir={tmp_path / 'run'}",
        "--steps=8",
        "--save_freq=3",
        f"--num_workers={num_workers}",
        "--lrstream.sampling_strategy=round_robin",
    )
    length = 5 if num_workers == 0 else 6
    assert Counter(itertools.chain(*whole.indices[:length])) == Counter(range(19))
    for step in (3, 6):
        rest = resumed(tmp_path / "run" / "checkpoints" / f"{step:06d}", f"--output_dir={tmp_path / 'again'}")
        assert rest.indices == whole.indices[step:]


def test_the_commands_of_the_guide(
    images: WrittenDataset, tmp_path: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide gives them, on a dataset recorded here, with a tiny policy and few steps."""
    shutil.copytree(images.root, isolated_home / "lerobot/OWNER/NAME")
    monkeypatch.chdir(tmp_path)
    guide = (PROJECT / "docs/how-to/train-with-lerobot.md").read_text(encoding="utf-8")
    calls = [
        shlex.split(block.replace("\\\n", " "))[1:]
        for block in re.findall(r"^```sh\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
        if block.startswith("lrstream-lerobot-train")
    ]
    start, again = calls
    few = [*POLICY, *COMMON, "--num_workers=1", "--save_freq=2"]
    assert launcher.main([*start, *few, "--steps=2"]) == 0
    with recording() as recorded:
        assert launcher.main([*again, "--steps=3"]) == 0
    order = [int(sample["index"]) for sample in open_loader(images, seed=1000)]
    assert recorded.indices == [order[8:12]]


def test_a_training_script_of_one_s_own(images: WrittenDataset) -> None:
    """The block of the guide, with a step in the place of its dots."""
    factory = pytest.importorskip("lerobot.policies.factory")
    guide = (PROJECT / "docs/how-to/train-with-lerobot.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    losses: list[float] = []
    indices: list[int] = []

    def step(policy: Any, batch: dict[str, Any]) -> None:
        indices.extend(batch["index"].tolist())
        losses.append(float(policy.forward(batch)[0]))

    names = {
        "cfg": configuration(*source(images)),
        "make_policy": factory.make_policy,
        "epochs": 2,
        "step": step,
    }
    exec(compile(block.replace("...", "step(policy, batch)"), "guide", "exec"), names)
    assert Counter(indices) == Counter([*range(19)] * 2)
    assert all(math.isfinite(loss) for loss in losses)


def test_other_numbers_are_refused_unless_a_new_epoch_is_asked_for(
    images: WrittenDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = streamed(*source(images), f"--output_dir={tmp_path / 'run'}", "--steps=2", "--save_freq=2")
    config = tmp_path / "run/checkpoints/000002/pretrained_model/train_config.json"
    again = [f"--config_path={config}", "--resume=true", "--batch_size=3", "--steps=5"]
    assert launcher.main(again) == 2
    assert "batch_size: saved 4, now 3" in capsys.readouterr().err
    with recording() as recorded:
        assert launcher.main([*again, "--lrstream.resume=next-epoch"]) == 0
    assert [len(batch) for batch in recorded.indices] == [3, 3, 3]
    assert recorded.indices[0][:3] != first.indices[0][:3]


# -- the Hub ----------------------------------------------------------------------------------------


def test_a_dataset_on_the_hub_trains_as_a_local_one(
    video: WrittenDataset,
    tmp_path: Path,
    loopback_hub: LoopbackHub,
    monkeypatch: pytest.MonkeyPatch,
    isolated_home: Path,
) -> None:
    """The same losses; nothing but metadata, rows and the ranges of episodes is read; sidecars lie where
    LeRobot's tools look for them."""
    loopback_hub.create_dataset(REPO, video.root)
    loopback_hub.tag(REPO, "v3.0")
    loopback_hub.connect_process(monkeypatch, loopback_hub.read_token)
    run = ["--steps=3", "--save_freq=2"]
    local = streamed(*source(video), f"--output_dir={tmp_path / 'local'}", *run)
    hub = streamed(f"--dataset.repo_id={REPO}", f"--output_dir={tmp_path / 'hub'}", *run)
    assert hub == local
    identity = {
        "schema_version": 3,
        "repo_id": REPO,
        "revision": "v3.0",
        "data_root": f"hf://datasets/{REPO}@{loopback_hub.references(REPO)['refs/tags/v3.0']}",
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    name = f"mp4-v3-v3.0-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    with np.load(isolated_home / "lerobot/streaming-sidecars/robots--pick" / name) as archive:
        manifest = json.loads(archive["manifest_json"].item())
    assert manifest["version"] == 3
    assert len(manifest["files"]) == 4
    rest = resumed(tmp_path / "hub/checkpoints/000002", f"--output_dir={tmp_path / 'again'}")
    assert rest.indices == hub.indices[2:]
    videos = [record for record in loopback_hub.log.records(method="GET") if record.path.endswith(".mp4")]
    assert {record.range is not None for record in videos if record.bytes_sent} == {True}


# -- held out episodes, other policies, several ranks -----------------------------------------------


@pytest.mark.skipif(not HAS_EVALUATION_SPLIT, reason="this release of LeRobot holds no episodes out")
def test_losses_of_held_out_episodes_are_those_of_the_map_style_reader(
    video: WrittenDataset, tmp_path: Path, pyav_reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out frames come in another order, so their mean is compared, of batches of one frame."""
    told: list[str] = []
    monkeypatch.setattr(logging, "info", lambda message, *args: told.append(str(message)))
    where = [*source(video), "--dataset.eval_split=0.3", "--eval_steps=2", "--steps=2", "--batch_size=1"]
    where.append("--save_checkpoint=false")
    ours = streamed(*where, f"--output_dir={tmp_path / 'ours'}")
    order = itertools.chain(*ours.indices)
    theirs = mapped(order, *where, pyav_reader, f"--output_dir={tmp_path / 'theirs'}")
    assert theirs == ours
    losses = [re.findall(r"eval_loss=([\d.]+)", message) for message in told]
    found = [float(loss) for matches in losses for loss in matches]
    assert len(found) == 2
    assert found[0] == pytest.approx(found[1], abs=2e-4)


def test_a_policy_that_leaves_frames_out_is_told(
    images: WrittenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers", reason="LeRobot's extra for diffusion is not installed here")
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("lrstream.lerobot"), "warning", lambda *args: told.append(args[0]))
    diffusion = options(
        "policy.",
        type="diffusion",
        device="cpu",
        push_to_hub="false",
        pretrained_backbone_weights="null",
        down_dims="[16,32]",
        n_groups=4,
        horizon=8,
        n_action_steps=4,
        num_train_timesteps=4,
        crop_shape="null",
        spatial_softmax_num_keypoints=4,
        diffusion_step_embed_dim=16,
    )
    with recording() as recorded:
        where = [*source(images), f"--output_dir={tmp_path / 'run'}", "--steps=2", "--save_checkpoint=false"]
        assert launcher.main([*diffusion, *COMMON, *where]) == 0
    assert len(recorded.losses) == 2
    if not HAS_EVALUATION_SPLIT:
        assert "Streaming delivers every frame" in told[0]


RANK = """
import json, os, sys
import lerobot.scripts.lerobot_train as script
update = script.update_policy
def noted(metrics, policy, batch, *args, **kwargs):
    with open(os.path.join({directory!r}, f"rank-{{os.environ['RANK']}}.jsonl"), "a") as file:
        file.write(json.dumps(batch["index"].tolist()) + "\\n")
    return update(metrics, policy, batch, *args, **kwargs)
script.update_policy = noted
from lrstream.integrations.lerobot.launcher import main
sys.exit(main())
"""


def test_two_ranks_share_an_epoch_and_resume(images: WrittenDataset, tmp_path: Path) -> None:
    """Episodes of 9 and of 6 + 4 frames: 3 batches each; then a resume in the second epoch."""
    program = tmp_path / "rank.py"
    program.write_text(RANK.format(directory=str(tmp_path)), encoding="utf-8")

    # As in the guide on several ranks: without a GPU, too, this option starts several processes.
    accelerate = ["accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2"]
    accelerate += ["--main_process_port=0"]

    def ranks(launcher: list[str], *arguments: str) -> list[list[list[int]]]:
        run_ranks(launcher, program, *arguments, timeout_s=280)
        files = [tmp_path / f"rank-{rank}.jsonl" for rank in range(2)]
        found = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        for file in files:
            file.unlink()
        return found

    run = [*source(images), f"--output_dir={tmp_path / 'run'}", "--steps=6", "--save_freq=4"]
    whole = ranks(accelerate, *POLICY, *COMMON, *run)
    for epoch in range(2):
        delivered = [index for rank in whole for batch in rank[epoch * 3 : epoch * 3 + 3] for index in batch]
        assert Counter(delivered) == Counter(range(19))
    config = tmp_path / "run/checkpoints/000004/pretrained_model/train_config.json"
    rest = ranks(
        torchrun(2), f"--config_path={config}", "--resume=true", f"--output_dir={tmp_path / 'again'}"
    )
    assert rest == [rank[4:] for rank in whole]


def test_the_installed_release_has_the_place(images: WrittenDataset) -> None:
    with streaming_training() as module:
        assert module is script
    with pytest.raises(UsageError, match="is not an option"):
        take_options(["--lrstream.nonsense=1"])
