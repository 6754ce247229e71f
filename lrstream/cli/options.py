"""Options that several commands share, written once (design.md: they sit on every command).

Every option with a value has a `metavar`: ``FILE``, ``DIR``, ``N``, ``SPEC``, or its choices as
``one|two``. Completions and the reference are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BatchSizeOption",
    "CacheDirOption",
    "CommonOptions",
    "DebugOption",
    "EpochOption",
    "JsonOption",
    "PoolOption",
    "ProgressMode",
    "ProgressOption",
    "QuietOption",
    "RepoIdOption",
    "RepoType",
    "RepoTypeOption",
    "RevisionOption",
    "SeedOption",
    "SourceArgument",
    "Texts",
    "VerboseOption",
    "WorldSizeOption",
]


class RepoType(StrEnum):
    """What OWNER/NAME means on the Hub."""

    dataset = "dataset"
    bucket = "bucket"


class ProgressMode(StrEnum):
    """How a command tells how far it is, on stderr."""

    auto = "auto"
    json = "json"


SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="Directory, OWNER/NAME or URL of a dataset.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress, warnings or notices; errors are still told.")
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Tell each step on stderr.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Everything, and tracebacks of failures.")]
CacheDirOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Local caches, instead of $HF_LEROBOT_HOME (default: ~/.cache/huggingface/lerobot).",
    ),
]
ProgressOption = Annotated[
    ProgressMode,
    typer.Option(
        "--progress",
        metavar="auto|json",
        help="On stderr: a bar if it is a terminal, or one JSON object on each line in any case.",
        show_default=True,
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a Hub dataset."),
]
RepoIdOption = Annotated[
    str | None,
    typer.Option(
        "--repo-id",
        metavar="ID",
        help="Name of the dataset in the sidecar's identity (default: derived from SOURCE).",
    ),
]
RepoTypeOption = Annotated[
    RepoType,
    typer.Option("--repo-type", metavar="dataset|bucket", help="What OWNER/NAME means on the Hub."),
]

PoolOption = Annotated[
    int | None,
    typer.Option(
        "--pool", metavar="N", min=1, help="Episodes that each worker mixes (default: 32 / workers)."
    ),
]
BatchSizeOption = Annotated[
    int,
    typer.Option("--batch-size", metavar="N", min=1, help="Samples of a batch.", show_default=True),
]
WorldSizeOption = Annotated[
    int,
    typer.Option("--world-size", metavar="N", min=1, help="Ranks.", show_default=True),
]
SeedOption = Annotated[
    int,
    typer.Option("--seed", metavar="N", min=0, help="Seed.", show_default=True),
]
EpochOption = Annotated[
    int,
    typer.Option("--epoch", metavar="N", min=0, help="Epoch.", show_default=True),
]


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """Values of the options that every command has.

    Attributes:
        as_json: ``--json``.
        quiet: ``--quiet``.
        verbose: ``--verbose``.
        debug: ``--debug``.
        cache_dir: ``--cache-dir``.
        progress: ``--progress``, of commands that have it.
    """

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    cache_dir: Path | None = None
    progress: ProgressMode = ProgressMode.auto


@dataclass(frozen=True, slots=True)
class Texts:
    """What the help of a command says; plain ASCII (K33).

    Attributes:
        summary: One line, for the list of commands.
        help: Paragraphs.
        examples: Command lines that work.
    """

    summary: str
    help: str
    examples: tuple[str, ...]
