"""Run one command: surroundings, progress, answer or failure, exit status."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from lrstream.cli.interrupt import Interruption, two_step_interrupt
from lrstream.cli.options import CommonOptions, ProgressMode
from lrstream.cli.output import Answer, give_answer, give_failure
from lrstream.cli.problems import EXIT_INTERRUPTED, Failure
from lrstream.cli.progress import ProgressLine
from lrstream.cli.progress_json import ProgressLines
from lrstream.cli.redaction import redact
from lrstream.cli.screen import Screen
from lrstream.errors import LrstreamError

__all__ = ["run_command"]

_LOGGER = "lrstream"


def run_command(command: str, options: CommonOptions, work: Callable[[ProgressLine], Answer]) -> NoReturn:
    """Do the work of a command and leave with its exit status.

    Args:
        command: Name in the schema of the answer (``build``, ``benchmark.loader``).
        options: Values of the common options.
        work: Does it, imports what it needs, and returns the answer.

    Raises:
        typer.Exit: Always, with the exit status of CL-4.
    """
    raise typer.Exit(_exit_code(command, options, work))


def _exit_code(command: str, options: CommonOptions, work: Callable[[ProgressLine], Answer]) -> int:
    received = Interruption()
    with _surroundings(options):
        try:
            with two_step_interrupt() as received, _progress(command, options) as progress:
                answer = work(progress)
            give_answer(command, answer, as_json=options.as_json)
        # The one place where everything ends up: no failure may reach the user as a traceback (CL-4).
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
            code = _fail(command, options, error)
            # SIGTERM ends a command like Ctrl-C, and has a status of its own.
            is_interrupted = code == EXIT_INTERRUPTED and received.exit_code is not None
            return received.exit_code if is_interrupted and received.exit_code else code
        return answer.exit_code


def _progress(command: str, options: CommonOptions) -> ProgressLine:
    if options.progress == ProgressMode.json:
        return ProgressLines(command)
    return ProgressLine(enabled=not options.quiet and not options.as_json)


def _fail(command: str, options: CommonOptions, error: BaseException) -> int:
    if options.debug:
        sys.stderr.write(redact("".join(traceback.format_exception(error))))
    failure = Failure.of(error)
    # Where stdout itself is what failed, not even the failure's document can be written there.
    is_stdout_lost = isinstance(error, LrstreamError) and error.fields.get("stream") == "stdout"
    give_failure(command, failure, as_json=options.as_json and not is_stdout_lost)
    return failure.exit_code


@contextmanager
def _surroundings(options: CommonOptions) -> Iterator[None]:
    """Caches, log lines and warnings of one command; everything is put back afterwards."""
    changes = {
        # Bars of the Hub's client would mix with ours, and would also appear without a terminal.
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if options.cache_dir is not None:
        changes["HF_LEROBOT_HOME"] = str(options.cache_dir.expanduser().absolute())
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    logger = logging.getLogger(_LOGGER)
    handler = _StderrHandler()
    level_before, propagate_before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(_log_level(options))
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning(options)
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        logger.propagate = propagate_before
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _log_level(options: CommonOptions) -> int:
    if options.debug:
        return logging.DEBUG
    if options.verbose:
        return logging.INFO
    return logging.ERROR if options.quiet else logging.WARNING


class _StderrHandler(logging.Handler):
    """Log records as one line each, ``warning: text``."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            Screen(sys.stderr).line(f"{record.levelname.lower()}: {record.getMessage()}")
        except Exception:  # noqa: BLE001  (logging's own contract: a handler never breaks its caller)
            self.handleError(record)


def _show_warning(options: CommonOptions) -> Callable[..., None]:
    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if not options.quiet:
            Screen(sys.stderr).line(f"warning: {' '.join(str(message).split())}")

    return show
