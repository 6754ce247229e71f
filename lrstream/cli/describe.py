"""The program's commands and options as plain records, for completions and the reference.

Only what Typer's command objects have had in all supported releases is read: names, help, metavar,
whether an option is a flag. Choices are taken from the metavar (see `lrstream.cli.options`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Argument", "Command", "Option", "describe"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        flags: All spellings, long ones first.
        help: One or two sentences.
        metavar: Name of the value; empty for a flag.
        default: The value if it is not given; empty if there is none.
    """

    flags: tuple[str, ...]
    help: str
    metavar: str = ""
    default: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """Possible values, where they are few and known."""
        return tuple(self.metavar.split("|")) if "|" in self.metavar else ()

    @property
    def takes_path(self) -> bool:
        """Whether the value is a file or directory."""
        return self.metavar in ("FILE", "DIR")


@dataclass(frozen=True, slots=True)
class Argument:
    """One positional argument.

    Attributes:
        name: Its name in the usage line.
        help: What it is.
        required: Whether it must be given.
    """

    name: str
    help: str
    required: bool


@dataclass(frozen=True, slots=True)
class Command:
    """One command, or a group of them.

    Attributes:
        words: Program name and command names, as typed.
        summary: One line.
        help: Full text; paragraphs are separated by empty lines.
        examples: Command lines.
        arguments: Positional arguments in order.
        options: Options in order.
        commands: Commands below this one.
    """

    words: tuple[str, ...]
    summary: str
    help: str
    examples: tuple[str, ...]
    arguments: tuple[Argument, ...]
    options: tuple[Option, ...]
    commands: tuple[Command, ...] = ()

    @property
    def name(self) -> str:
        """Last word."""
        return self.words[-1]

    def walk(self) -> Iterator[Command]:
        """This command and all below it, depth first."""
        yield self
        for command in self.commands:
            yield from command.walk()


def describe(command: Any, *words: str) -> Command:
    """Records of a command object made by `typer.main.get_command`, called as `words`."""
    options = [_option(item) for item in command.params if item.param_type_name == "option"]
    arguments = [_argument(item) for item in command.params if item.param_type_name == "argument"]
    full = " ".join(words)
    return Command(
        words=words,
        summary=_one_line(command.short_help or command.help),
        help=(command.help or "").strip(),
        examples=tuple(
            line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith(full)
        ),
        arguments=tuple(arguments),
        options=(*options, Option(("--help", "-h"), "Show this message and exit.")),
        commands=tuple(
            describe(child, *words, name) for name, child in getattr(command, "commands", {}).items()
        ),
    )


def _option(parameter: Any) -> Option:
    flags = sorted((*parameter.opts, *parameter.secondary_opts), key=lambda flag: not flag.startswith("--"))
    metavar = "" if parameter.is_flag else parameter.metavar
    if metavar is None:
        raise TypeError(f"Option {flags[0]} takes a value but has no metavar.")
    default = str(parameter.default) if metavar and parameter.default is not None else ""
    return Option(tuple(flags), _one_line(parameter.help), metavar, default)


def _argument(parameter: Any) -> Argument:
    return Argument(parameter.metavar, _one_line(parameter.help), bool(parameter.required))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
