"""The program `lrstream-lerobot-train`: LeRobot's training, its dataset streamed by lrstream."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lrstream.errors import LrstreamError, UsageError

__all__ = ["main"]

_PROGRAM = "lrstream-lerobot-train"
_STREAMING = "--dataset.streaming"

_HELP = """\
usage: lrstream-lerobot-train [LeRobot's options] [--lrstream.NAME=VALUE ...]

Runs LeRobot's training; its dataset is streamed by lrstream. Options of lrstream:
  {options}
  --lrstream.resume=exact|next-epoch   what --resume=true does with the data (default: exact)
  --lrstream.ignore=data_root|revision what may differ in an exact resume
  --lrstream.allow_untested=true       try an untested LeRobot release

LeRobot's own options follow.

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as `lerobot-train` does, with streamed data.

    Args:
        arguments: LeRobot's options, and ``--lrstream.*``; None = those of this process.

    Returns:
        Exit status: 0, or that of the error, which has been written to stderr.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(given)
    except LrstreamError as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        return error.exit_code
    return 0


def _run(given: list[str]) -> None:
    from lrstream.integrations.lerobot.options import LOADER_OPTIONS, take_options
    from lrstream.integrations.lerobot.seam import replaced, streaming_training

    if {"-h", "--help"} & set(given):
        sys.stdout.write(_HELP.format(options="\n  ".join(f"--lrstream.{name}" for name in LOADER_OPTIONS)))
        sys.stdout.flush()
    options, others = take_options(given)
    others = _with_streaming(others)
    _refuse_remote_jobs(others)
    # LeRobot reads the arguments of the process again and again while it runs.
    with streaming_training(options) as script, replaced(sys, "argv", [_PROGRAM, *others]):
        script.main()


def _with_streaming(arguments: list[str]) -> list[str]:
    """The arguments, with the option by which LeRobot makes a DataLoader fit for a streaming dataset."""
    value = _option(arguments, _STREAMING)
    if value is None:
        return [*arguments, f"{_STREAMING}=true"]
    if value.lower() not in ("true", "1", "yes"):
        raise UsageError(
            f"{_STREAMING}={value} contradicts this program, which streams.",
            hint="Use lerobot-train instead.",
        )
    return arguments


def _refuse_remote_jobs(arguments: list[str]) -> None:
    target = _option(arguments, "--job.target")
    if target not in (None, "local"):
        raise UsageError(
            f"--job.target={target} would start lerobot-train, without lrstream, on another machine.",
            hint="Start lrstream-lerobot-train there.",
        )


def _option(arguments: list[str], name: str) -> str | None:
    """Value of an option, "true" where it has none; None where it is not given."""
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
        if argument == name:
            following = arguments[place + 1 : place + 2]
            return following[0] if following and not following[0].startswith("--") else "true"
    return None
