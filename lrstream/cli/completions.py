"""Completion scripts, made from the commands themselves (CL-5).

The scripts know all commands and options by heart: completing starts no Python. The files in
``completions/`` are what this module prints; ``docs/generate.py`` writes and checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lrstream.cli.describe import Command, Option
from lrstream.errors import UsageError

__all__ = ["SHELLS", "completion_script"]

_NOTICE = "Made from the program's own options by docs/generate.py; not to be edited."


def completion_script(shell: str, root: Command) -> str:
    """The script for `shell`, ending in a line end.

    Args:
        shell: One of `SHELLS`.
        root: The program.

    Raises:
        UsageError: No such shell.
    """
    make = _MAKERS.get(shell)
    if make is None:
        raise UsageError(f"There is no completion for {shell!r}.", hint=f"Choose one of {', '.join(SHELLS)}.")
    return make(root)


def _joined(command: Command) -> str:
    return " ".join(command.words)


def _below(root: Command) -> list[Command]:
    return [command for command in root.walk() if command is not root]


def _names(command: Command) -> list[str]:
    return [child.name for child in command.commands]


def _flags(command: Command) -> list[str]:
    return [flag for option in command.options for flag in option.flags]


# --- bash -------------------------------------------------------------------------------------------

_BASH = """\
# Bash completion of {name}. {notice}
_{name}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local path={name} i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${{COMP_WORDS[i]}}" in
            {known}) path+=" ${{COMP_WORDS[i]}}" ;;
        esac
    done
    # A value: one of its choices, or (an empty reply) a file name.
    case "$path $previous" in
{values}    esac
    case "$path" in
{words}    esac
}}
complete -o default -F _{name} {name}
"""


def _bash(root: Command) -> str:
    values, words = [], []
    for command in root.walk():
        for option in command.options:
            if option.metavar:
                pattern = " | ".join(f'"{_joined(command)} {flag}"' for flag in option.flags)
                reply = f"{_bash_reply(option.choices)}; " if option.choices else ""
                values.append(f"        {pattern}) {reply}return ;;\n")
        only_flags = "" if command.commands else '[[ "$current" != -* ]] || '
        reply = _bash_reply([*_names(command), *_flags(command)])
        words.append(f'        "{_joined(command)}")\n            {only_flags}{reply} ;;\n')
    known = " | ".join(f'"{_joined(command)}"' for command in _below(root))
    return _BASH.format(
        name=root.name, notice=_NOTICE, known=known, values="".join(values), words="".join(words)
    )


def _bash_reply(words: Iterable[str]) -> str:
    return f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$current"))'


# --- zsh --------------------------------------------------------------------------------------------

_ZSH_GROUP = """
_{function}() {{
    local state line
    local -a commands=(
{commands}    )
    _arguments -C \\
{options}        '1: :->command' \\
        '*:: :->rest'
    case $state in
        command) _describe command commands ;;
        rest)
            case $words[1] in
{cases}            esac ;;
    esac
}}
"""

_ZSH_LEAF = """
_{function}() {{
    _arguments \\
{options}        '*:{argument}:_files'
}}
"""


def _zsh(root: Command) -> str:
    parts = [f"#compdef {root.name}\n# {_NOTICE}\n"]
    for command in root.walk():
        function = "_".join(command.words)
        options = "".join(f"        {_zsh_option(option)} \\\n" for option in command.options)
        if command.commands:
            parts.append(
                _ZSH_GROUP.format(
                    function=function,
                    options=options,
                    commands="".join(
                        f"        {_quoted(f'{child.name}:{child.summary}')}\n" for child in command.commands
                    ),
                    cases="".join(
                        f"                {child.name}) _{function}_{child.name} ;;\n"
                        for child in command.commands
                    ),
                )
            )
        else:
            argument = command.arguments[0].name if command.arguments else "file"
            parts.append(_ZSH_LEAF.format(function=function, options=options, argument=_zsh_text(argument)))
    parts.append(f'\nif [ "$funcstack[1]" = "_{root.name}" ]; then\n    _{root.name} "$@"\nelse\n')
    parts.append(f"    compdef _{root.name} {root.name}\nfi\n")
    return "".join(parts)


def _zsh_option(option: Option) -> str:
    value = ""
    if option.choices:
        value = f":value:({' '.join(option.choices)})"
    elif option.metavar:
        value = f":{option.metavar}:{'_files' if option.takes_path else ''}"
    tail = _quoted(f"[{_zsh_text(option.help)}]{value}")
    if len(option.flags) == 1:
        return option.flags[0] + tail
    return f"'({' '.join(option.flags)})'{{{','.join(option.flags)}}}{tail}"


def _zsh_text(text: str) -> str:
    for char in "\\[]:":
        text = text.replace(char, "\\" + char)
    return text


def _quoted(text: str) -> str:
    """One word for sh, zsh and fish alike (fish too understands the closing and reopening)."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


# --- fish -------------------------------------------------------------------------------------------

_FISH = """\
# Fish completion of {name}. {notice}
function __{name}_path
    set -l path {name}
    for word in (commandline -opc)[2..-1]
        switch "$path $word"
            case {known}
                set path "$path $word"
        end
    end
    echo $path
end

"""


def _fish(root: Command) -> str:
    known = " ".join(_quoted(_joined(command)) for command in _below(root))
    lines = [_FISH.format(name=root.name, notice=_NOTICE, known=known)]
    for command in root.walk():
        here = f"complete -c {root.name} -n 'test (__{root.name}_path) = \"{_joined(command)}\"'"
        if command.commands:
            lines.append(f"{here} -f\n")
        lines += [f"{here} -a {child.name} -d {_quoted(child.summary)}\n" for child in command.commands]
        for option in command.options:
            flags = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags
            )
            value = ""
            if option.choices:
                value = f" -x -a {_quoted(' '.join(option.choices))}"
            elif option.metavar:
                value = " -r" if option.takes_path else " -x"
            lines.append(f"{here} {flags}{value} -d {_quoted(option.help)}\n")
    return "".join(lines)


# --- PowerShell -------------------------------------------------------------------------------------

_POWERSHELL = """\
# PowerShell completion of {name}. {notice}
Register-ArgumentCompleter -Native -CommandName {name} -ScriptBlock {{
    param($wordToComplete, $commandAst, $cursorPosition)
    $words = @{{
{words}    }}
    $values = @{{
{values}    }}
    $path = '{name}'
    $previous = ''
    foreach ($element in $commandAst.CommandElements | Select-Object -Skip 1) {{
        if ($element.Extent.EndOffset -ge $cursorPosition) {{ break }}
        $previous = $element.ToString()
        if ($words.ContainsKey("$path $previous")) {{ $path = "$path $previous" }}
    }}
    # A value: one of its choices, or (no result) a file name.
    if ($values.ContainsKey("$path $previous")) {{ $found = $values["$path $previous"] }}
    else {{ $found = $words[$path] }}
    $found | Where-Object {{ $_[0] -like "$wordToComplete*" }} | ForEach-Object {{
        [System.Management.Automation.CompletionResult]::new($_[0], $_[0], 'ParameterValue', $_[1])
    }}
}}
"""


def _powershell(root: Command) -> str:
    words, values = [], []
    for command in root.walk():
        pairs = [(child.name, child.summary) for child in command.commands]
        pairs += [(flag, option.help) for option in command.options for flag in option.flags]
        words.append(_powershell_entry(_joined(command), pairs))
        for option in command.options:
            if option.metavar:
                choices = [(choice, choice) for choice in option.choices]
                values += [_powershell_entry(f"{_joined(command)} {flag}", choices) for flag in option.flags]
    return _POWERSHELL.format(name=root.name, notice=_NOTICE, words="".join(words), values="".join(values))


def _powershell_entry(key: str, pairs: list[tuple[str, str]]) -> str:
    def text(value: str) -> str:
        return "'" + value.replace("'", "''") + "'"

    # The leading comma keeps a list of one pair a list of pairs.
    rows = "".join(f"            ,@({text(word)}, {text(about)})\n" for word, about in pairs)
    return f"        {text(key)} = @(\n{rows}        )\n" if rows else f"        {text(key)} = @()\n"


_MAKERS: dict[str, Callable[[Command], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
    "powershell": _powershell,
}
SHELLS = tuple(_MAKERS)
