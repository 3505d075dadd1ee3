"""``safe-gpu completion``: a script for the user's shell, made from the parsers, so that it knows what they know."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """One option under all its names: ``value`` names what it takes, "" for nothing; ``choices`` are words for it."""

    names: tuple[str, ...]
    help: str
    value: str
    choices: tuple[str, ...]


class Command(NamedTuple):
    """One command. ``words`` may follow its options; ``runs`` says that a command line of any other program does."""

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    runs: bool


def configure_completion(parser: argparse.ArgumentParser) -> None:
    """Its argument and its handler."""
    parser.description = "Print a script that completes commands, options and their values."
    parser.epilog = """examples:
  echo 'eval "$(safe-gpu completion bash)"' >> ~/.bashrc
  echo 'eval "$(safe-gpu completion zsh)"' >> ~/.zshrc            after compinit
  safe-gpu completion fish > ~/.config/fish/completions/safe-gpu.fish"""
    parser.add_argument("shell", nargs="?", choices=tuple(SHELLS), help="for which shell")
    parser.set_defaults(handler=_completion, usage_error=parser.error)


def _completion(options: argparse.Namespace) -> int:
    if options.shell is None:
        options.usage_error(f"for which shell? {', '.join(SHELLS)}")
    print(SHELLS[options.shell](commands()))
    return 0


def commands() -> list[Command]:
    """Every command, as its parser has it."""
    from .commands import COMMANDS, parser_of

    found = [_command(name, summary, parser_of(name)) for name, summary in COMMANDS.items()]
    return [*found, Command("help", "show the options of a command", (), tuple(COMMANDS), False)]


def _command(name: str, summary: str, parser: argparse.ArgumentParser) -> Command:
    options = []
    words: tuple[str, ...] = ()
    runs = False
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        if action.option_strings:
            value = "" if action.nargs == 0 else str(action.metavar or action.dest).upper()
            options.append(Option(tuple(action.option_strings), action.help or "", value, choices))
        elif action.nargs == argparse.REMAINDER:
            runs = True
        else:
            words += choices
    return Command(name, summary, tuple(options), words, runs)


def _taking_values(command: Command) -> list[str]:
    return [name for option in command.options if option.value for name in option.names]


# bash


def _bash(all_commands: Sequence[Command]) -> str:
    cases = "\n".join(_bash_case(command) for command in all_commands)
    names = " ".join(command.name for command in all_commands)
    return f"""# bash completion for safe-gpu, written by: safe-gpu completion bash
_safe_gpu() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} i start=0
    local takes=" " flags="" words="" choices="" runs=""
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    *) return ;;
    esac
    # bash splits at the = of --option=value
    if [[ $word == "=" ]]; then
        word=""
    elif [[ $before == "=" ]]; then
        before=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    if [[ $runs ]]; then
        # where does the command of the user's own begin?
        for ((i = 2; i <= COMP_CWORD; i++)); do
            case ${{COMP_WORDS[i]}} in
            --) start=$((i + 1)); break ;;
            -*)
                if [[ $takes == *" ${{COMP_WORDS[i]}} "* ]]; then
                    ((i++))
                    [[ ${{COMP_WORDS[i]-}} == "=" ]] && ((i++))
                fi ;;
            *) start=$i; break ;;
            esac
        done
        if ((start && COMP_CWORD >= start)); then
            local IFS=$'\\n'
            if declare -F _command_offset >/dev/null; then
                _command_offset "$start"
            elif ((COMP_CWORD == start)); then
                compopt -o filenames 2>/dev/null
                COMPREPLY=($(compgen -A command -A file -- "$word"))
            else
                compopt -o filenames 2>/dev/null
                COMPREPLY=($(compgen -A file -- "$word"))
            fi
            return
        fi
    fi
    if [[ $takes == *" $before "* ]]; then
        case "${{COMP_WORDS[1]}} $before" in
{_bash_values(all_commands)}
        esac
        COMPREPLY=($(compgen -W "$choices" -- "$word"))
    else
        COMPREPLY=($(compgen -W "$flags $words" -- "$word"))
    fi
}}
complete -F _safe_gpu safe-gpu"""


def _bash_case(command: Command) -> str:
    flags = " ".join(name for option in command.options for name in option.names)
    settings = [f'takes=" {" ".join(_taking_values(command))} "', f'flags="{flags}"']
    if command.words:
        settings.append(f'words="{" ".join(command.words)}"')
    if command.runs:
        settings.append("runs=yes")
    return f"    {command.name}) {'; '.join(settings)} ;;"


def _bash_values(all_commands: Iterable[Command]) -> str:
    lines = []
    for command in all_commands:
        for option in command.options:
            if option.choices:
                patterns = "|".join(f'"{command.name} {name}"' for name in option.names)
                lines.append(f'        {patterns}) choices="{" ".join(option.choices)}" ;;')
    return "\n".join(lines)


# zsh


def _zsh(all_commands: Sequence[Command]) -> str:
    names = "\n".join(f"            {_quoted(f'{one.name}:{one.help}')}" for one in all_commands)
    cases = "\n".join(_zsh_case(command) for command in all_commands)
    return f"""#compdef safe-gpu
# zsh completion for safe-gpu, written by: safe-gpu completion zsh
_safe_gpu() {{
    local -a names
    if ((CURRENT == 2)); then
        names=(
{names}
            '--help:show help' '--version:show the version'
        )
        _describe command names
        return
    fi
    local verb=$words[2]
    shift words
    ((CURRENT--))
    case $verb in
{cases}
    esac
}}
if [ "$funcstack[1]" = _safe_gpu ]; then
    _safe_gpu "$@"
else
    compdef _safe_gpu safe-gpu
fi"""


def _zsh_case(command: Command) -> str:
    specs = [_zsh_option(option) for option in command.options]
    if command.words:
        specs.append(_quoted(f"1:word:({' '.join(command.words)})"))
    if command.runs:
        specs += ["'(-)1:command: _command_names -e'", "'*::arguments: _normal'"]
    listed = " \\\n".join(f"            {spec}" for spec in specs)
    return f"    {command.name})\n        _arguments -s -S \\\n{listed}\n        ;;"


def _zsh_option(option: Option) -> str:
    help_text = option.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    tail = f"[{help_text}]"
    if option.value:
        tail += f":{option.value}:" + (f"({' '.join(option.choices)})" if option.choices else "")
    if len(option.names) == 1:
        return _quoted(option.names[0] + tail)
    return f"'({' '.join(option.names)})'{{{','.join(option.names)}}}{_quoted(tail)}"


def _quoted(text: str) -> str:
    """In single quotes, for sh and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


# fish


def _fish(all_commands: Sequence[Command]) -> str:
    takes = "\n".join(
        f"        case {command.name}\n            set takes {' '.join(_taking_values(command))}"
        for command in all_commands
        if command.runs
    )
    lines = [
        f"""# fish completion for safe-gpu, written by: safe-gpu completion fish
function __safe_gpu_skip --description 'how many words stand before the command that safe-gpu is to run'
    set -l words (commandline -opc)
    set -l takes
    switch "$words[2]"
{takes}
        case '*'
            return 1
    end
    set -l i 3
    while test $i -le (count $words)
        switch $words[$i]
            case --
                echo $i
                return 0
            case '-*'
                contains -- $words[$i] $takes; and set i (math $i + 1)
            case '*'
                echo (math $i - 1)
                return 0
        end
        set i (math $i + 1)
    end
    test $i -eq (math (count $words) + 1); and echo (count $words)
end
function __safe_gpu_inside --description 'whether the command that safe-gpu is to run has begun'
    set -l skip (__safe_gpu_skip); and test $skip -lt (count (commandline -opc))
    or contains -- -- (commandline -opc)
end
complete -c safe-gpu -f
complete -c safe-gpu -n __fish_use_subcommand -l help -d 'show help'
complete -c safe-gpu -n __fish_use_subcommand -s V -l version -d 'show the version'"""
    ]
    for command in all_commands:
        lines.append(f"complete -c safe-gpu -n __fish_use_subcommand -a {command.name} -d {_fish_quoted(command.help)}")
        here = f"complete -c safe-gpu -n '__fish_seen_subcommand_from {command.name}; and not __safe_gpu_inside'"
        lines += [_fish_option(here, option) for option in command.options]
        if command.words:
            lines.append(f"{here} -a {_fish_quoted(' '.join(command.words))}")
    lines.append(
        "complete -c safe-gpu -n __safe_gpu_skip -a '(__fish_complete_subcommand --fcs-skip=(__safe_gpu_skip))'"
    )
    return "\n".join(lines)


def _fish_option(here: str, option: Option) -> str:
    words = [here]
    for name in option.names:
        words.append(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}")
    if option.value:
        words.append("-x")
    if option.choices:
        words.append(f"-a {_fish_quoted(' '.join(option.choices))}")
    words.append(f"-d {_fish_quoted(option.help)}")
    return " ".join(words)


def _fish_quoted(text: str) -> str:
    """In single quotes, for fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""The script for each shell."""
