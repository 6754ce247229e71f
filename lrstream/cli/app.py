"""The program `lrstream`: its commands, and what happens when its arguments make no sense."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from lrstream import __version__
from lrstream.cli import benchmark_group, build, convert, inspect_group, publish, validate
from lrstream.cli.options import Texts
from lrstream.cli.output import give_failure, write_stdout
from lrstream.cli.problems import EXIT_UNEXPECTED, EXIT_USAGE, Failure
from lrstream.cli.screen import make_encodable

__all__ = ["PROGRAM", "app", "main"]

PROGRAM = "lrstream"

# The base of every refusal of arguments, below Exception: named through a public descendant, since
# the class itself is Typer's own in some releases and Click's in others.
_Refusal: type[Exception] = next(
    cls
    for cls in reversed(typer.BadParameter.__mro__)
    if issubclass(cls, Exception) and hasattr(cls, "format_message")
)

# Every command has these, and people look for them in front.
_COMMANDS_OPTIONS = ("--json", "--quiet", "-q", "--verbose", "-v", "--debug", "--cache-dir")

app = typer.Typer(
    name=PROGRAM,
    help="Stream LeRobotDataset v3 into training without downloading it.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _need_command(context: typer.Context) -> None:
    """Without a command: the help, on stderr, since it is not an answer; exit 2."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(EXIT_USAGE)


def _register(group: typer.Typer, name: str, function: Callable[..., None], texts: Texts) -> None:
    # "\b" keeps the parser from filling the lines of a paragraph.
    examples = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in texts.examples)
    group.command(name, short_help=texts.summary, help=texts.help, epilog=examples)(function)


_register(app, "build", build.build, build.TEXTS)
_register(app, "convert", convert.convert, convert.TEXTS)
_inspect = typer.Typer(rich_markup_mode=None, add_completion=False)
app.add_typer(
    _inspect,
    name="inspect",
    help=inspect_group.GROUP_SUMMARY,
    short_help=inspect_group.GROUP_SUMMARY,
    callback=_need_command,
    invoke_without_command=True,
)
for _name, _function, _texts in inspect_group.COMMANDS:
    _register(_inspect, _name, _function, _texts)
_register(app, "validate", validate.validate, validate.TEXTS)
_benchmarks = typer.Typer(rich_markup_mode=None, add_completion=False)
app.add_typer(
    _benchmarks,
    name="benchmark",
    help=benchmark_group.GROUP_SUMMARY,
    short_help=benchmark_group.GROUP_SUMMARY,
    callback=_need_command,
    invoke_without_command=True,
)
for _name, _function, _texts in benchmark_group.COMMANDS:
    _register(_benchmarks, _name, _function, _texts)
_register(app, "publish", publish.publish, publish.TEXTS)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    show_completion: Annotated[
        str | None,
        typer.Option(
            "--show-completion",
            metavar="bash|zsh|fish|powershell",
            help="Print the completion script of a shell and exit.",
        ),
    ] = None,
) -> None:
    if version:
        write_stdout(lambda: typer.echo(f"{PROGRAM} {__version__}"))
        raise typer.Exit
    if show_completion is not None:
        from lrstream.cli.completions import completion_script
        from lrstream.cli.describe import describe

        script = completion_script(show_completion, describe(typer.main.get_command(app), PROGRAM))
        write_stdout(lambda: typer.echo(script, nl=False))
        raise typer.Exit
    _need_command(context)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments without the program's name; None for those of the process.

    Returns:
        The exit status of CL-4.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        make_encodable(stream)
    command = typer.main.get_command(app)
    try:
        # Without "standalone mode" the parser neither prints nor exits by itself, so that its
        # refusals too become a document under --json.
        returned = command.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
        code = returned if isinstance(returned, int) else 0
        write_stdout(lambda: None)
        return code
    except typer.Exit as leave:
        return leave.exit_code
    except SystemExit as leave:
        # The parser's own way out when the reader of its help has left, which is no failure.
        if isinstance(leave.__context__, BrokenPipeError):
            return 0
        return leave.code if isinstance(leave.code, int) else EXIT_UNEXPECTED
    except _Refusal as refusal:
        failure = Failure.usage(*_explain(refusal))
    except (KeyboardInterrupt, typer.Abort):
        failure = Failure.of(KeyboardInterrupt())
    except Exception as error:  # noqa: BLE001  (help, version and completion too never end in a traceback)
        failure = Failure.of(error)
    before_dashes = arguments[: arguments.index("--")] if "--" in arguments else arguments
    give_failure(_name_of(command, arguments), failure, as_json="--json" in before_dashes)
    return failure.exit_code


def _explain(refusal: Any) -> tuple[str, str]:
    """Message and hint for arguments that the parser refused."""
    context = getattr(refusal, "ctx", None)
    path = context.command_path if context is not None else PROGRAM
    option = getattr(refusal, "option_name", None)
    if option in _COMMANDS_OPTIONS and getattr(getattr(context, "command", None), "commands", None):
        return (
            f"{option} stands behind a command, not before it.",
            f"For example '{path} {'validate' if path == PROGRAM else 'COMMAND'} ./demo {option}'; "
            f"'{path} --help' lists the commands.",
        )
    return " ".join(refusal.format_message().split()), f"'{path} --help' lists what it takes."


def _name_of(command: Any, arguments: Sequence[str]) -> str:
    """Name of the command that `arguments` are for, as in the schema of its answer; ``cli`` if unclear."""
    names = []
    for argument in arguments:
        command = getattr(command, "commands", {}).get(argument)
        if command is None:
            break
        names.append(argument)
    return ".".join(names) or "cli"
