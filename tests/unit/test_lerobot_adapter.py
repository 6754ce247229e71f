"""lrstream in LeRobot's training, without LeRobot: configurations and a training loop that stand in for it.

`tests/integration/test_lerobot_training.py` runs the real one where it is installed.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lrstream import StreamingLeRobotDataset
from lrstream.demo import DemoCamera, DemoSpec, WrittenDataset, write_dataset
from lrstream.errors import CheckFailedError, DatasetFormatError, InputError, NotFoundError, UsageError
from lrstream.integrations.epochs import EpochLoader
from lrstream.integrations.lerobot import launcher, make_dataset, make_train_eval_datasets, streaming_training
from lrstream.integrations.lerobot.factory import delta_timestamps_of, recorded_here
from lrstream.integrations.lerobot.options import (
    LOADER_OPTIONS,
    TrainingOptions,
    storage_options,
    take_options,
)
from lrstream.integrations.lerobot.position import TrainingPosition
from tests.support.datasets import copy_dataset
from tests.support.lerobot_stand_in import Config, Policy, data_config, forget, install
from tests.support.loader import indices, open_loader
from tests.support.workers import SMALL

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> WrittenDataset:
    """Ten unequal episodes, 49 frames, images in tables."""
    return write_dataset(tmp_path_factory.mktemp("small") / "dataset", SMALL)


@pytest.fixture
def lerobot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where `install` may write a stand-in for LeRobot."""
    pytest.importorskip("accelerate", reason="accelerate is needed by LeRobot's training alone")
    with monkeypatch.context():
        yield tmp_path / "site"
        forget()


# -- options ----------------------------------------------------------------------------------------


def test_options_are_taken_out_of_the_arguments() -> None:
    options, others = take_options([
        "--policy.type=act", "--lrstream.byte_budget_gb=4", "--steps", "5", "--lrstream.sampling_strategy",
        "round_robin", "--lrstream.exclude_episodes=[0, 3]", "--lrstream.resume=next-epoch",
        "--lrstream.video_decoder_cache_size=null", "--lrstream.ignore=revision", "--resume=true",
    ])  # fmt: skip
    assert others == ["--policy.type=act", "--steps", "5", "--resume=true"]
    assert options.loader == {
        "byte_budget_gb": 4,
        "sampling_strategy": "round_robin",
        "exclude_episodes": [0, 3],
        "video_decoder_cache_size": None,
    }
    assert (options.resume, options.ignore, options.allow_untested) == ("next-epoch", ("revision",), False)
    assert take_options([]) == (TrainingOptions(), [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lrstream.byte_budget=4"], r"Did you mean --lrstream\.byte_budget_gb\?"),
        (["--lrstream.nonsense=4"], "is not an option. There are: allow_untested, byte_budget_gb"),
        (["--lrstream.seed=4"], "LeRobot's own options or the job decide it"),
        (["--lrstream.decode_threads"], "has no value"),
        (["--lrstream.decode_threads", "--steps=3"], "has no value"),
        (["--lrstream.decode_threads=1", "--lrstream.decode_threads=2"], "more than once"),
        (["--lrstream.resume=sometimes"], "expected 'exact' or 'next-epoch'"),
        (["--lrstream.ignore=seed"], "expected data_root or revision"),
        (["--lrstream.allow_untested=maybe"], "expected true or false"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        take_options(arguments)


def test_every_argument_of_the_dataset_is_set_by_someone() -> None:
    arguments = set(inspect.signature(StreamingLeRobotDataset).parameters)
    elsewhere = {
        "repo_id", "root", "episodes", "image_transforms", "delta_timestamps", "tolerance_s", "revision",
        "seed", "return_uint8", "storage_options", "repeat", "rank", "world_size",
    }  # fmt: skip
    assert set(LOADER_OPTIONS) | elsewhere == arguments
    assert {"byte_budget_gb", "repo_type", "depth_output_unit", "exclude_episodes"} <= set(LOADER_OPTIONS)


def test_storage_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_options() is None
    monkeypatch.setenv("LRSTREAM_STORAGE_OPTIONS", '{"key": "SENTINEL"}')
    assert storage_options() == {"key": "SENTINEL"}
    monkeypatch.setenv("LRSTREAM_STORAGE_OPTIONS", "key=SENTINEL")
    with pytest.raises(UsageError, match="is no JSON object") as refusal:
        storage_options()
    assert "SENTINEL" not in str(refusal.value)


# -- from a configuration to a dataset --------------------------------------------------------------


def test_the_configuration_is_obeyed(small: WrittenDataset, caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy(observation_delta_indices=[-1, 0], action_delta_indices=[0, 1, 2])
    data = data_config(
        small.root, episodes=[1, 4, 7], exclude_episodes=[4], streaming_sampling_strategy="round_robin"
    )
    with caplog.at_level(logging.DEBUG, logger="lrstream.lerobot"):
        dataset = make_dataset(Config(data, policy, seed=7), decode_threads=1)
    assert "video_backend=pyav is ignored" in caplog.text
    assert dataset.episodes == [1, 7]
    assert (dataset.num_episodes, dataset.num_frames) == (2, 3 + 5)
    sample = next(iter(dataset))
    picture = sample["observation.images.front"]
    assert (picture.dtype, picture.shape) == (torch.float32, (2, 3, 16, 96))
    assert sample["action"].shape[0] == 3
    assert set(sample) >= {"action_is_pad", "observation.state_is_pad", "observation.images.front_is_pad"}
    expected = open_loader(small, episodes=[1, 7], seed=7, sampling_strategy="round_robin")
    assert [int(one["index"]) for one in dataset] == [int(one["index"]) for one in expected]


def test_arguments_come_before_the_configuration(small: WrittenDataset) -> None:
    data = data_config(small.root, streaming_sampling_strategy="round_robin", depth_output_unit="m")
    dataset = make_dataset(Config(data), sampling_strategy="remaining", delta_timestamps=None, episodes=[0])
    expected = open_loader(small, seed=1000, episodes=[0])
    assert [int(one["index"]) for one in dataset] == [int(one["index"]) for one in expected]


def test_features_left_out_have_no_window(small: WrittenDataset) -> None:
    config = Config(data_config(small.root), Policy([-1, 0], [0, 1]))
    dataset = make_dataset(config, features=["observation.state", "action"])
    sample = next(iter(dataset))
    assert sample["observation.state"].shape[0] == sample["action"].shape[0] == 2
    assert not [key for key in (*sample, *dataset.meta.features) if key.startswith("observation.images")]


def test_releases_that_convert_get_uint8(demo_dataset: WrittenDataset) -> None:
    """A release whose configuration has `return_uint8` divides by 255 in its loop."""
    key = "observation.images.top"
    for data, dtype in (
        (data_config(demo_dataset.root, episodes=[0]), torch.float32),
        (data_config(demo_dataset.root, episodes=[0], return_uint8=False), torch.uint8),
    ):
        with make_dataset(Config(data)) as dataset:
            assert next(iter(dataset))[key].dtype == dtype


def test_windows_are_those_of_the_policy() -> None:
    features = ["observation.state", "observation.images.top", "action", "next.reward", "timestamp"]
    policy = Policy(None, [0, 1], None)
    assert delta_timestamps_of(policy, features, 10) == {"action": [0.0, 0.1]}
    policy = Policy([-2, 0], None, [5])
    assert delta_timestamps_of(policy, features, 10) == {
        "observation.state": [-0.2, 0.0],
        "observation.images.top": [-0.2, 0.0],
        "next.reward": [0.5],
    }
    assert delta_timestamps_of(Policy(), features, 10) is None


def test_a_reward_model_may_be_trained(small: WrittenDataset) -> None:
    config = SimpleNamespace(**vars(Config(data_config(small.root))), trainable_config=Policy([0, 1]))
    sample = next(iter(make_dataset(config)))
    assert sample["observation.state"].shape[0] == 2


def test_several_datasets_are_refused(small: WrittenDataset) -> None:
    data = data_config(small.root, repo_id=["one/two", "three/four"])
    with pytest.raises(UsageError, match="expected the name of one dataset"):
        make_dataset(Config(data))


def test_a_recorded_dataset_is_found_by_its_name(
    small: WrittenDataset, isolated_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = isolated_home / "lerobot" / "robots" / "pick"
    here.parent.mkdir(parents=True)
    shutil.copytree(small.root, here)
    assert make_dataset(Config(data_config(None))).root == str(here)
    (here / small.data_files[-1]).unlink()
    with caplog.at_level(logging.INFO, logger="lrstream.lerobot"):
        assert recorded_here("robots/pick", None, "dataset") is None
    assert "is not complete; reading robots/pick from the Hub" in caplog.text
    (here / "meta/info.json").write_text("{")
    with caplog.at_level(logging.INFO, logger="lrstream.lerobot"):
        assert recorded_here("robots/pick", None, "dataset") is None
    assert "cannot be used" in caplog.text


def test_a_revision_or_a_bucket_is_not_looked_for_here(small: WrittenDataset, isolated_home: Path) -> None:
    here = isolated_home / "lerobot" / "robots" / "pick"
    here.parent.mkdir(parents=True)
    shutil.copytree(small.root, here)
    assert recorded_here("robots/pick", None, "dataset") == here
    assert recorded_here("robots/pick", "v3.0", "dataset") is None
    assert recorded_here("robots/pick", None, "bucket") is None
    assert recorded_here("robots/place", None, "dataset") is None


def test_metadata_have_what_training_asks(small: WrittenDataset) -> None:
    meta = make_dataset(Config(data_config(small.root))).meta
    key = "observation.images.front"
    assert meta.camera_keys == [key]
    assert meta.stats[key]["mean"].flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert meta.stats[key]["std"].shape == (3, 1, 1)
    assert isinstance(meta.stats["action"]["mean"], np.ndarray)
    assert not meta.has_language_columns
    plain = make_dataset(Config(data_config(small.root, use_imagenet_stats=False))).meta
    recorded = json.loads((small.root / "meta/stats.json").read_text())
    np.testing.assert_array_equal(plain.stats[key]["mean"], recorded[key]["mean"])


def test_language_columns_are_told(rich_dataset: WrittenDataset) -> None:
    assert make_dataset(Config(data_config(rich_dataset.root, episodes=[0]))).meta.has_language_columns


def test_tasks_are_a_table(small: WrittenDataset) -> None:
    pytest.importorskip("pandas", reason="pandas comes with LeRobot")
    tasks = make_dataset(Config(data_config(small.root))).meta.tasks
    assert list(tasks.index) == list(small.spec.tasks)
    assert tasks.loc[small.spec.tasks[1]].task_index == 1


def test_missing_statistics_are_told(small: WrittenDataset, tmp_path: Path) -> None:
    root = copy_dataset(small, tmp_path / "copy")
    (root / "meta/stats.json").unlink()
    meta = make_dataset(Config(data_config(root))).meta
    with pytest.raises(DatasetFormatError, match=r"has no meta/stats\.json, which LeRobot normalises with"):
        _ = meta.stats


def test_episodes_are_held_out_by_task(small: WrittenDataset) -> None:
    """Ten episodes, three tasks in turn: of 4, 3 and 3 episodes the last 2 are held out."""
    config = Config(data_config(small.root, eval_split=0.34))
    training, held_out = make_train_eval_datasets(config)
    assert held_out is not None
    assert held_out.episodes == [4, 5, 6, 7, 8, 9]
    assert training.episodes == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="streamed whole"):
        make_train_eval_datasets(SimpleNamespace(**vars(config), max_eval_samples=5))
    with pytest.raises(UsageError, match="leaves no episode of 1 to train with"):
        make_train_eval_datasets(Config(data_config(small.root, episodes=[2], eval_split=0.5)))
    training, held_out = make_train_eval_datasets(Config(data_config(small.root, eval_split=0.0)))
    assert held_out is None
    assert training.num_episodes == 10


# -- epochs -----------------------------------------------------------------------------------------


def test_each_iteration_is_the_next_epoch(small: WrittenDataset) -> None:
    dataset = open_loader(small)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=5, collate_fn=indices)
    epochs = EpochLoader(dataset, loader)
    dataset.set_epoch(3)
    found = [[list(batch) for batch in epochs] for _ in range(2)]
    assert dataset.epoch == 4
    for epoch, batches in zip((3, 4), found, strict=True):
        other = open_loader(small)
        other.set_epoch(epoch)
        assert list(itertools.chain(*batches)) == [int(sample["index"]) for sample in other]
    held = EpochLoader(dataset, loader, is_advancing=False, num_batches=2, place=tuple)
    assert list(held) == list(held) == [tuple(batch) for batch in found[1][:2]]
    assert dataset.epoch == 4
    # An end that is the same on all ranks holds wherever an iteration has begun, and what is over is passed.
    for done, rest in ((2, found[0][2:4]), (4, found[1][:4]), (6, found[1][:4])):
        dataset.set_epoch(0)
        dataset.set_epoch(3)
        dataset.resume(batches=done, batch_size=5)
        assert list(EpochLoader(dataset, loader, num_batches=4)) == rest
    dataset.set_epoch(3)
    dataset.resume(batches=len(found[0]), batch_size=5)
    epochs = EpochLoader(dataset, loader)
    assert list(epochs) == found[1]
    assert dataset.epoch == 4
    # Lightning makes an iterator that it never asks for a batch: that is no epoch.
    dataset.set_epoch(0)
    dataset.set_epoch(3)
    dataset.resume(batches=2, batch_size=5)
    epochs = EpochLoader(dataset, loader)
    iter(epochs)
    assert list(epochs) == found[0][2:]
    iter(epochs)
    assert list(epochs) == found[1]
    with pytest.raises(UsageError, match="num_batches is 0"):
        EpochLoader(dataset, loader, num_batches=0)


# -- the whole of it, with a training loop that stands in -------------------------------------------


def trained(config: Config, options: TrainingOptions | None = None) -> list[list[int]]:
    """Values of ``index`` of the batches that one run took."""
    with streaming_training(options) as script:
        script.taken.clear()
        script.train(config)
        return list(script.taken)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumes_at_the_next_sample(
    small: WrittenDataset, lerobot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """49 frames in batches of 4, 13 in an epoch: checkpoints lie in it, at its end, and behind it."""
    install(lerobot, monkeypatch)
    config = Config(
        data_config(small.root), num_workers=num_workers, steps=30, save_freq=1, output_dir=tmp_path / "run"
    )
    whole = trained(config)
    for epoch in range(2):
        delivered = itertools.chain(*whole[epoch * 13 : (epoch + 1) * 13])
        assert Counter(delivered) == Counter(range(49)), epoch
    for step in (1, 12, 13, 14, 27) if num_workers == 0 else (5, 14):
        again = dataclasses.replace(
            config,
            resume=True,
            checkpoint_path=tmp_path / "run" / f"{step:06d}",
            output_dir=tmp_path / f"again-{step}",
        )
        assert trained(again) == whole[step:]
        # And from a checkpoint of the resumed run.
        if step == 13:
            third = dataclasses.replace(
                again, checkpoint_path=tmp_path / "again-13" / "000016", output_dir=tmp_path / "third"
            )
            assert trained(third) == whole[16:]


def test_what_has_changed_is_refused_or_begins_a_new_epoch(
    small: WrittenDataset, lerobot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lerobot, monkeypatch)
    config = Config(data_config(small.root), steps=15, save_freq=5, output_dir=tmp_path / "run")
    trained(config, TrainingOptions({"sampling_strategy": "round_robin"}))
    checkpoint = tmp_path / "run" / "000005"
    again = dataclasses.replace(
        config, resume=True, checkpoint_path=checkpoint, output_dir=tmp_path / "again", batch_size=7
    )
    with pytest.raises(UsageError, match=r"step 5 cannot be resumed exactly.* batch_size: saved 4, now 7"):
        trained(again)
    with pytest.raises(UsageError, match=r"seed: saved 1000, now 1"):
        trained(dataclasses.replace(again, batch_size=4, seed=1))
    remaining = TrainingOptions({"sampling_strategy": "remaining"})
    with pytest.raises(UsageError, match=r"strategy: saved 'round_robin', now 'remaining'"):
        trained(dataclasses.replace(again, batch_size=4), remaining)

    moved = copy_dataset(small, tmp_path / "moved")
    with pytest.raises(UsageError, match="data_root"):
        trained(dataclasses.replace(again, batch_size=4, dataset=data_config(moved)))
    exact = dataclasses.replace(
        again, batch_size=4, dataset=data_config(moved), output_dir=tmp_path / "elsewhere"
    )
    rest = trained(exact, TrainingOptions(ignore=("data_root",)))
    other = open_loader(small, seed=1000, sampling_strategy="round_robin")
    order = [int(sample["index"]) for sample in other]
    assert list(itertools.chain(*rest))[: 49 - 20] == order[20:], "the strategy of the checkpoint is used"

    fresh = trained(again, TrainingOptions(resume="next-epoch"))
    other = open_loader(small, seed=1000)
    other.set_epoch(1)
    assert list(itertools.chain(*fresh))[:49] == [int(sample["index"]) for sample in other]
    # The new epoch began at step 5, so its checkpoint resumes exactly.
    last = dataclasses.replace(
        again, checkpoint_path=tmp_path / "again" / "000010", output_dir=tmp_path / "last"
    )
    assert trained(last) == fresh[5:]


def test_a_checkpoint_of_another_loader(
    small: WrittenDataset, lerobot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lerobot, monkeypatch)
    checkpoint = tmp_path / "run" / "000004"
    state = checkpoint / "training_state"
    state.mkdir(parents=True)
    config = Config(
        data_config(small.root),
        steps=9,
        save_freq=9,
        resume=True,
        checkpoint_path=checkpoint,
        output_dir=tmp_path / "again",
    )
    with pytest.raises(UsageError, match="was not fed by lrstream"):
        trained(config)
    with pytest.raises(NotFoundError, match=r"training_step\.json does not exist"):
        trained(config, TrainingOptions(resume="next-epoch"))
    (state / "training_step.json").write_text('{"step": 4}')
    begun = trained(config, TrainingOptions(resume="next-epoch"))
    expected = [int(sample["index"]) for sample in open_loader(small, seed=1000)]
    assert list(itertools.chain(*begun)) == expected[:20]
    for text, message in (("{", "is no JSON"), ('{"format_version": 9}', "format version 9"), ("3", "None")):
        (state / "lrstream.json").write_text(text)
        with pytest.raises(InputError, match=message):
            trained(config)


def test_samplers_are_left_out(
    small: WrittenDataset,
    lerobot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(lerobot, monkeypatch)
    policy = SimpleNamespace(**vars(Policy()), drop_n_last_frames=7)
    config = Config(data_config(small.root), policy, steps=2, output_dir=tmp_path / "run")
    assert len(trained(config)) == 2
    assert "leaves out the last 7 frames of each episode" in caplog.text


def test_held_out_episodes_are_the_same_every_time(
    small: WrittenDataset, lerobot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        lerobot,
        monkeypatch,
        release="0.6.1",
        make="(pair := make_train_eval_datasets(cfg))[0]",
        prepare="accelerator.prepare(loader); "
        "held = accelerator.prepare(torch.utils.data.DataLoader(pair[1], batch_size=4)); "
        "evaluated.extend([[batch['index'].tolist() for batch in held] for _ in range(2)])",
    )
    script = lerobot / "lerobot" / "scripts" / "lerobot_train.py"
    script.write_text(
        "evaluated = []\ndef make_train_eval_datasets(cfg):\n    raise AssertionError\n" + script.read_text()
    )
    config = Config(data_config(small.root, eval_split=0.34), steps=2, output_dir=tmp_path / "run")
    with streaming_training() as module:
        module.train(config)
        first, second = module.evaluated
    assert first == second
    lengths = small.episode_lengths
    starts = np.cumsum([0, *lengths])
    expected = [index for e in (4, 5, 6, 7, 8, 9) for index in range(starts[e], starts[e + 1])]
    assert sorted(itertools.chain(*first)) == expected


@pytest.mark.parametrize("step", [0, 3, 4, 8, 20])
def test_ranks_of_unequal_length_resume_by_their_own_counts(tmp_path: Path, step: int) -> None:
    """One rank has 3 batches in an epoch, the other 4; in a job without end they drift apart."""
    spec = DemoSpec((20, 13, 6, 6), (DemoCamera("observation.images.front", 16, 96, kind="image"),), fps=10)
    root = write_dataset(tmp_path / "dataset", spec).root

    def opened(rank: int) -> tuple[StreamingLeRobotDataset, TrainingPosition]:
        dataset = open_loader(root, rank=rank, world_size=2)
        return dataset, TrainingPosition(dataset, batch_size=8, num_workers=0, options={})

    def steps(dataset: StreamingLeRobotDataset, count: int) -> list[list[int]]:
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=8, collate_fn=indices)
        epochs = EpochLoader(dataset, loader)
        return list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(epochs)), count))

    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "training_state").mkdir(parents=True)
    batches = [steps(opened(rank)[0], 30) for rank in range(2)]
    position = opened(0)[1]
    assert sorted(position.batches_per_rank) == [3, 4]
    position.record(step).write(checkpoint)
    for rank in range(2):
        dataset, position = opened(rank)
        position.resume(checkpoint)
        assert steps(dataset, 30 - step) == batches[rank][step:]


# -- refusals ---------------------------------------------------------------------------------------


def test_an_untested_release_is_refused_unless_asked_for(
    small: WrittenDataset,
    lerobot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(lerobot, monkeypatch, release="0.9.0")
    config = Config(data_config(small.root), steps=2, output_dir=tmp_path / "run")
    with pytest.raises(UsageError, match=r"LeRobot 0\.9\.0 is installed, but .* tested with 0\.4\.4"):
        trained(config)
    assert len(trained(config, TrainingOptions(allow_untested=True))) == 2
    assert "was not tested" in caplog.text


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"make": "open_data(cfg)"}, "does not use make_train_eval_datasets or make_dataset"),
        ({"prepare": "loader"}, "does not use prepare"),
    ],
)
def test_a_release_without_the_place_is_refused(
    lerobot: Path, monkeypatch: pytest.MonkeyPatch, replaced: dict[str, str], message: str
) -> None:
    install(lerobot, monkeypatch, **replaced)
    with pytest.raises(UsageError, match=message), streaming_training():
        pytest.fail("not reached")


def test_everything_is_put_back(lerobot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate

    install(lerobot, monkeypatch)
    before = accelerate.Accelerator.prepare_data_loader

    def names(script: ModuleType) -> list[Any]:
        return [script.make_dataset, script.save_checkpoint, script.EpisodeAwareSampler]

    def fail(script: ModuleType) -> None:
        own.extend(names(script))
        raise RuntimeError("in training")

    own: list[Any] = []
    with pytest.raises(RuntimeError, match="in training"), streaming_training() as script:
        fail(script)
    assert accelerate.Accelerator.prepare_data_loader is before
    assert not set(own) & set(names(script))


def test_a_run_that_took_nothing_is_no_success(
    small: WrittenDataset, lerobot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lerobot, monkeypatch)
    with pytest.raises(CheckFailedError, match="never asked for its batches"), streaming_training() as script:
        script.make_dataset(Config(data_config(small.root)))


def test_other_data_loaders_are_prepared_as_ever(lerobot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate

    install(lerobot, monkeypatch)
    plain: DataLoader[Any] = DataLoader([1, 2, 3])  # type: ignore[arg-type]
    with streaming_training():
        prepared = accelerate.Accelerator(cpu=True).prepare(plain)
    assert type(prepared).__name__ == "DataLoaderShard"


# -- the program ------------------------------------------------------------------------------------


def test_the_program_hands_the_other_arguments_on(
    small: WrittenDataset, lerobot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lerobot, monkeypatch)
    with streaming_training() as script:
        script.calls.config = Config(data_config(small.root), steps=2, output_dir=tmp_path / "second")
    before = list(sys.argv)
    assert launcher.main(["--steps=2", "--lrstream.decode_threads=1"]) == 0
    assert script.calls.arguments == ["lrstream-lerobot-train", "--steps=2", "--dataset.streaming=true"]
    assert sys.argv == before
    record = json.loads((tmp_path / "second/000002/training_state/lrstream.json").read_text())
    assert record["options"] == {"decode_threads": 1}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--dataset.streaming=false"], 2, "contradicts this program"),
        (["--dataset.streaming", "false"], 2, "contradicts this program"),
        (["--job.target=a10g-small"], 2, "without lrstream, on another machine"),
        (["--lrstream.nonsense=1"], 2, "is not an option"),
    ],
)
def test_the_program_refuses(
    lerobot: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    install(lerobot, monkeypatch)
    assert launcher.main(arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("lrstream-lerobot-train: ")
    assert captured.out == ""


def test_the_help_lists_the_options(
    lerobot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lerobot, monkeypatch, make="sys.exit(0); make_dataset(cfg)")
    with pytest.raises(SystemExit):
        launcher.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"--lrstream.{name}" in text for name in LOADER_OPTIONS)


def test_without_lerobot_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert launcher.main(["--steps=2"]) == 2
    assert "LeRobot is not installed in this environment" in capsys.readouterr().err
