"""The places where LeRobot's training is given another dataset, for as long as it runs.

Three names of `lerobot.scripts.lerobot_train` are replaced (the function that makes datasets, the one that
saves checkpoints, and the sampler of map-style datasets), and one method of Accelerate: the one that takes a
DataLoader apart to share it out among ranks, which leaves ours alone. All are put back afterwards. Before
anything is replaced, the compiled training function is asked whether it uses these names at all.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lrstream.errors import CheckFailedError, UsageError
from lrstream.integrations.epochs import EpochLoader
from lrstream.integrations.lerobot.factory import (
    LeRobotStreamingDataset,
    make_dataset,
    make_train_eval_datasets,
)
from lrstream.integrations.lerobot.options import PREFIX, TrainingOptions
from lrstream.integrations.lerobot.position import PositionRecord, TrainingPosition

__all__ = ["TESTED_RELEASES", "replaced", "streaming_training"]

logger = logging.getLogger("lrstream.lerobot")

TESTED_RELEASES = ("0.4.4", "0.6.1")
"""LeRobot releases that the tests of this integration run with."""

_SCRIPT = "lerobot.scripts.lerobot_train"
# The function that makes datasets, newest first; a release calls one of them.
_FACTORIES = ("make_train_eval_datasets", "make_dataset")
_SAVE = "save_checkpoint"
_SAMPLER = "EpisodeAwareSampler"


@contextmanager
def streaming_training(options: TrainingOptions | None = None) -> Iterator[ModuleType]:
    """Within this context LeRobot's training streams its dataset with lrstream.

    Not for several threads at once: names of modules are replaced.

    Args:
        options: What ``--lrstream.*`` said.

    Yields:
        `lerobot.scripts.lerobot_train`, whose ``train(cfg)`` or ``main()`` is to be called.

    Raises:
        UsageError: LeRobot is not installed, was not tested, or has no place for another dataset.
        CheckFailedError: At the end: training has run without taking its batches from lrstream.
    """
    options = options or TrainingOptions()
    _check_release(options.allow_untested)
    script = _import(_SCRIPT)
    factory = _seam_of(script)
    accelerate = _import("accelerate")
    run = _Run(options, getattr(script, _SAVE))
    original: Callable[..., Any] = accelerate.Accelerator.prepare_data_loader

    def prepare_data_loader(accelerator: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        own = run.prepare(accelerator, data_loader)
        return original(accelerator, data_loader, *args, **kwargs) if own is None else own

    makers = {"make_dataset": run.make_one, "make_train_eval_datasets": run.make_both}
    with ExitStack() as stack:
        stack.enter_context(replaced(script, factory, makers[factory]))
        stack.enter_context(replaced(script, _SAVE, run.save))
        stack.enter_context(replaced(script, _SAMPLER, run.no_sampler))
        stack.enter_context(replaced(accelerate.Accelerator, "prepare_data_loader", prepare_data_loader))
        yield script
    run.check_end()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value within this context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Run:
    """One training run: makes its dataset, hands its DataLoader on, and records where it stands.

    Args:
        options: What ``--lrstream.*`` said.
        save_checkpoint: LeRobot's own function.
    """

    def __init__(self, options: TrainingOptions, save_checkpoint: Callable[..., Any]) -> None:
        self._options = options
        self._save_checkpoint = save_checkpoint
        self._training: LeRobotStreamingDataset | None = None
        self._position: TrainingPosition | None = None
        self._is_prepared = False

    # -- what LeRobot's script calls -------------------------------------------------------------

    def make_one(self, cfg: Any) -> LeRobotStreamingDataset:
        """In the place of LeRobot's ``make_dataset``."""
        return self._begin(cfg, make_dataset(cfg, **self._loader_options(cfg)))

    def make_both(self, cfg: Any) -> tuple[LeRobotStreamingDataset, LeRobotStreamingDataset | None]:
        """In the place of LeRobot's ``make_train_eval_datasets``."""
        training, held_out = make_train_eval_datasets(cfg, **self._loader_options(cfg))
        return self._begin(cfg, training), held_out

    def no_sampler(self, *args: Any, drop_n_last_frames: int = 0, **kwargs: Any) -> None:
        """In the place of LeRobot's sampler: the order of a streaming dataset is its own."""
        if drop_n_last_frames:
            logger.warning(
                "The policy leaves out the last %d frames of each episode as anchors of map-style training. "
                "Streaming delivers every frame, its padding marked in action_is_pad.",
                drop_n_last_frames,
            )

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of LeRobot's ``save_checkpoint``: after it, the position is written."""
        arguments = inspect.signature(self._save_checkpoint).bind(*args, **kwargs).arguments
        saved = self._save_checkpoint(*args, **kwargs)
        assert self._position is not None, "training saves nothing before it has a dataset"
        self._position.record(arguments["step"]).write(Path(arguments["checkpoint_dir"]))
        return saved

    def prepare(self, accelerator: Any, loader: Any) -> EpochLoader | None:
        """The loader that training is given for a DataLoader of ours; None for any other."""
        dataset = getattr(loader, "dataset", None)
        if not isinstance(dataset, LeRobotStreamingDataset):
            return None

        def place(batch: Any) -> Any:
            return _import("accelerate.utils").send_to_device(batch, accelerator.device)

        if dataset is self._training:
            self._is_prepared = True
            return EpochLoader(dataset, loader, place=place)
        # Held out: the same number of batches on every rank, since all of them wait for each other's loss.
        report = dataset.partition_report(num_workers=loader.num_workers, batch_size=loader.batch_size)
        fewest = int(report.batches_per_rank(loader.batch_size, drop_last=False).min())
        return EpochLoader(dataset, loader, is_advancing=False, num_batches=fewest, place=place)

    # -- its own ---------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Refuse to call a run a success that was not fed by lrstream."""
        if self._training is not None and not self._is_prepared:
            raise CheckFailedError("LeRobot's training made a dataset but never asked for its batches.")

    def _loader_options(self, cfg: Any) -> dict[str, Any]:
        """Options of the loader: of this command, else those of the checkpoint that is resumed."""
        checkpoint = _checkpoint_of(cfg)
        record = None
        if checkpoint is not None and self._options.resume == "exact":
            record = PositionRecord.read(checkpoint)
        saved = {} if record is None else record.options
        return saved | dict(self._options.loader)

    def _begin(self, cfg: Any, dataset: LeRobotStreamingDataset) -> LeRobotStreamingDataset:
        self._training = dataset
        self._position = TrainingPosition(
            dataset,
            batch_size=cfg.batch_size,
            num_workers=cfg.num_workers,
            options=self._loader_options(cfg),
        )
        checkpoint = _checkpoint_of(cfg)
        if checkpoint is not None:
            self._position.resume(checkpoint, mode=self._options.resume, ignore=self._options.ignore)
        return dataset


def _checkpoint_of(cfg: Any) -> Path | None:
    """The checkpoint that a run resumes from."""
    return Path(cfg.checkpoint_path) if cfg.resume and cfg.checkpoint_path else None


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name} cannot be imported: {error}.",
            hint="Install LeRobot with what its training needs: pip install 'lerobot[training]' "
            "(releases before 0.6: pip install lerobot).",
        ) from error


def _check_release(allow_untested: bool) -> None:
    try:
        release = importlib.metadata.version("lerobot")
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            "LeRobot is not installed in this environment.",
            hint=f"Install it beside lrstream, in one of the releases {', '.join(TESTED_RELEASES)}.",
        ) from error
    if release in TESTED_RELEASES:
        return
    tested = ", ".join(TESTED_RELEASES)
    if not allow_untested:
        raise UsageError(
            f"LeRobot {release} is installed, but lrstream was tested with {tested}.",
            hint=f"Install one of these, or try this one with {PREFIX}allow_untested=true.",
        )
    logger.warning("LeRobot %s was not tested with this lrstream (tested: %s).", release, tested)


def _seam_of(script: ModuleType) -> str:
    """Name of the function by which the training script makes its datasets.

    Raises:
        UsageError: The script does not use the names that would be replaced.
    """
    train = getattr(script, "train", None)
    code = getattr(inspect.unwrap(train), "__code__", None) if callable(train) else None
    used = set() if code is None else set(code.co_names)
    factory = next((name for name in _FACTORIES if name in used and hasattr(script, name)), None)
    missing = [name for name in (_SAVE, _SAMPLER, "prepare") if name not in used]
    if factory is None or missing:
        names = " or ".join(_FACTORIES) if factory is None else ", ".join(missing)
        raise UsageError(
            f"{_SCRIPT}.train does not use {names}, so lrstream finds no place to give it a dataset.",
            hint=f"Use one of the releases {', '.join(TESTED_RELEASES)}, or call "
            "lrstream.integrations.lerobot.make_dataset in a training script of your own.",
        )
    return factory
