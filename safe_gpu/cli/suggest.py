"""What somebody probably meant who typed a command or an option that does not exist. Read after a mistake only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# What the tools that people come from call it.
_COMMANDS = {
    "check": "doctor",
    "claim": "run",
    "completions": "completion",
    "exec": "run",
    "free": "status",
    "gpustat": "status",
    "info": "status",
    "launch": "run",
    "list": "status",
    "ls": "status",
    "monitor": "status --watch",
    "numa": "affinity",
    "ps": "status",
    "queue": "status",
    "show": "status",
    "srun": "run",
    "start": "run",
    "submit": "run",
    "test": "doctor",
    "top": "status --watch",
    "topo": "affinity",
    "version": "--version",
    "watch": "status --watch",
}
_OPTIONS = {
    "-G": ["--gpus"],
    "-N": ["--gpus"],
    "-V": ["--version"],
    "-c": ["--min-cores"],
    "-f": ["--watch"],
    "-g": ["--gpus", "--gpu"],
    "-i": ["--only", "--gpu", "--interval"],
    "-j": ["--json"],
    "-l": ["--watch"],
    "-m": ["--min-memory", "--memory", "--mode"],
    "-v": ["--version"],
    "-w": ["--timeout", "--watch"],
    "--count": ["--gpus"],
    "--cpu-bind": ["--affinity", "--mode"],
    "--cpus": ["--affinity", "--allowed"],
    "--delay": ["--interval"],
    "--device": ["--only", "--gpu"],
    "--devices": ["--only", "--gpu"],
    "--follow": ["--watch"],
    "--gpu-memory": ["--min-memory"],
    "--gres": ["--gpus"],
    "--id": ["--only", "--gpu"],
    "--loop": ["--watch"],
    "--mem": ["--min-memory", "--memory"],
    "--ngpus": ["--gpus"],
    "--num-gpus": ["--gpus"],
    "--pid": ["--of"],
    "--silent": ["--quiet"],
    "--skip": ["--exclude"],
    "--type": ["--model"],
    "--vram": ["--min-memory"],
    "--wait": ["--timeout"],
}


def _similar(word: str, known: Iterable[str]) -> str:
    """The one of these words that looks most like it, dashes aside; "" where none does."""
    from difflib import get_close_matches

    bare = {option.lstrip("-"): option for option in known}
    close = get_close_matches(word.lstrip("-").lower().replace("_", "-"), bare, 1, 0.7)
    return bare[close[0]] if close else ""


def not_a_choice(option: Sequence[str], value: str, choices: Sequence[str]) -> str:
    """The usage error for a value that is none of a few words; ``option`` is its name, or nothing."""
    from shlex import quote

    close = _similar(value, choices)
    meant = f"did you mean {close}? " if close else ""
    return f"{' '.join([*option, quote(value)])} is not possible: {meant}choose from {', '.join(choices)}"


def unknown_option(word: str, options_of: Mapping[str, Sequence[str]]) -> str:
    """The usage error for an option where a command was expected.

    Args:
        word: as it was typed; options_of: command -> all its options, under all their names.
    """
    name = word.partition("=")[0]
    owner = next((command for command, options in options_of.items() if name in options), "")
    if owner:
        return f"{name} is an option of safe-gpu {owner}: write safe-gpu {owner} {word} ..."
    if name in _OPTIONS:
        for command, options in {"": ("--help", "--version"), **options_of}.items():
            meant = next((option for option in _OPTIONS[name] if option in options), "")
            if meant:
                return (
                    f"there is no option {name}: did you mean {' '.join(filter(None, ['safe-gpu', command, meant]))}?"
                )
    return unknown_argument(word, ("--help", "--version"))


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """The usage error for a first word that is no command."""
    from .become import CommandError, find_command

    text = f"there is no command {word!r}"
    meant = _COMMANDS.get(word.lower()) or _similar(word, commands)
    if meant:
        return f"{text}: did you mean safe-gpu {meant}?"
    try:
        find_command([word])
    except CommandError:
        return f"{text}: choose from {', '.join(commands)}"
    return f"{text}: to run it on a GPU, write safe-gpu run -- {word}"


def unknown_argument(word: str, known: Sequence[str]) -> str:
    """The usage error for an argument that a command does not take.

    Args:
        word: as it was typed; known: all options of the command, under all their names.
    """
    name = word.partition("=")[0]
    if word == "--":
        return "no command is run here: did you mean safe-gpu run?"
    if not word.startswith("-"):
        hint = f": did you mean -n {word}?" if word.isdecimal() and "-n" in known else ""
        return f"unexpected argument {word!r}{hint}"
    meant = next((option for option in _OPTIONS.get(name, ()) if option in known), "")
    if not meant and len(name) > 2:  # -timeout too
        meant = _similar(name, (option for option in known if option.startswith("--")))
    return f"there is no option {name}{f': did you mean {meant}?' if meant else ''}"
