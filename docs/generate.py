"""Write the files that are made from the program itself: completions/ and docs/reference/cli.md.

python docs/generate.py            write them
python docs/generate.py --check    write nothing; exit 1 and name the files that are out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from lrstream.cli.app import PROGRAM, app
from lrstream.cli.completions import completion_script
from lrstream.cli.describe import Command, Option, describe

ROOT = Path(__file__).resolve().parent.parent
# Where each shell looks for a completion of this program, by name.
COMPLETION_FILES = {
    "bash": "lrstream.bash",
    "zsh": "_lrstream",
    "fish": "lrstream.fish",
    "powershell": "lrstream.ps1",
}
HEAD = """\
# Command line

Made from the program's own options by `docs/generate.py`; not to be edited.

Options are written after the command's name. Exit statuses are listed in [exit-codes.md](exit-codes.md),
problem codes in [problems.md](problems.md). With `--json` every command prints exactly one document on
stdout, on failure too:

```json
{"schema": "lrstream.<command>/1", "version": "0.1.0", "ok": true, "result": {}, "problems": []}
```
"""


def generated_files() -> dict[Path, str]:
    """Text of every generated file by its path."""
    root = describe(typer.main.get_command(app), PROGRAM)
    files = {
        ROOT / "completions" / name: completion_script(shell, root)
        for shell, name in COMPLETION_FILES.items()
    }
    files[ROOT / "docs" / "reference" / "cli.md"] = reference(root)
    return files


def reference(root: Command) -> str:
    """The reference of all commands in Markdown."""
    return "\n".join([HEAD, *(line for command in root.walk() for line in section(command))])


def section(command: Command) -> Iterator[str]:
    """Lines of one command."""
    words = " ".join(command.words)
    usage = [words, *(f"[{item.name}]" if not item.required else item.name for item in command.arguments)]
    usage.append("COMMAND ..." if command.commands else "[OPTIONS]")
    yield from (f"## {words}", "", "```text", " ".join(usage), "```", "", command.help, "")
    if command.commands:
        yield from ("| command | |", "| --- | --- |")
        for child in command.commands:
            yield f"| [`{' '.join(child.words)}`](#{'-'.join(child.words)}) | {child.summary} |"
        yield ""
    if command.arguments:
        yield from ("| argument | |", "| --- | --- |")
        yield from (f"| `{item.name}` | {cell(item.help)} |" for item in command.arguments)
        yield ""
    yield from ("| option | default | |", "| --- | --- | --- |")
    for option in command.options:
        default = f"`{option.default}`" if option.default else ""
        yield f"| {spelling(option)} | {default} | {cell(option.help)} |"
    yield ""
    if command.examples:
        yield from ("```bash", *command.examples, "```", "")


def spelling(option: Option) -> str:
    """An option with its value as Markdown."""
    value = f" {option.metavar}" if option.metavar else ""
    return ", ".join(f"`{cell(flag + value)}`" for flag in option.flags)


def cell(text: str) -> str:
    """`text` as the content of a Markdown table cell."""
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write or check; returns the exit status."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write(__doc__ or "")
        return 2
    stale = []
    for path, text in generated_files().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if arguments:
            stale.append(str(path.relative_to(ROOT)))
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        sys.stderr.write(f"{name} is out of date; run python docs/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
