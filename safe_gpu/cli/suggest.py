"""Guesses what was meant by a command or an option that does not exist."""

from collections.abc import Iterable, Mapping, Sequence

# Commands and options, and the words of other tools for them. If a word stands for several options, the first that the
# command has is meant.
_COMMANDS = {
    "affinity": "numa topo",
    "completion": "completions",
    "doctor": "check test",
    "run": "claim exec launch srun start submit",
    "status": "free gpustat info list ls ps queue show",
    "status --watch": "monitor top watch",
    "--version": "version",
}
_OPTIONS = {
    "--affinity": "--cpu-bind --cpus",
    "--allowed": "--cpus",
    "--exclude": "--skip",
    "--gpus": "-G -N -g --count --gres --ngpus --num-gpus",
    "--only": "-i --device --devices --id",
    "--gpu": "-g -i --device --devices --id",
    "--interval": "-i --delay",
    "--json": "-j",
    "--min-cores": "-c",
    "--min-memory": "-m --gpu-memory --mem --vram",
    "--memory": "-m --mem",
    "--mode": "-m --cpu-bind",
    "--model": "--type",
    "--of": "--pid",
    "--quiet": "--silent",
    "--timeout": "-w --wait",
    "--version": "-V -v",
    "--watch": "-f -l -w --follow --loop",
}


def _meant(word: str, table: Mapping[str, str], known: Iterable[str] | None = None) -> str:
    """Return what one of these tables has for a word; "" for nothing, or nothing that is known."""
    found = (name for name, words in table.items() if word in words.split())
    return next((name for name in found if known is None or name in known), "")


def _similar(word: str, known: Iterable[str]) -> str:
    """Return the one of these words that looks most like it, dashes aside; "" where none does."""
    from difflib import get_close_matches

    bare = {option.lstrip("-"): option for option in known}
    close = get_close_matches(word.lstrip("-").lower().replace("_", "-"), bare, 1, 0.7)
    return bare[close[0]] if close else ""


def not_a_choice(option: Sequence[str], value: str, choices: Sequence[str]) -> str:
    """Return the usage error for a value that is none of a few words; ``option`` is its name, or nothing."""
    from shlex import quote

    close = _similar(value, choices)
    meant = f"did you mean {close}? " if close else ""
    return f"{' '.join([*option, quote(value)])} is not possible: {meant}choose from {', '.join(choices)}"


def unknown_option(word: str, options_of: Mapping[str, Sequence[str]]) -> str:
    """Return the usage error for an option where a command was expected.

    Args:
        word: as it was typed.
        options_of: command -> all its options, under all their names.
    """
    name = word.partition("=")[0]
    owner = next((command for command, options in options_of.items() if name in options), "")
    if owner:
        return f"{name} is an option of safe-gpu {owner}: write safe-gpu {owner} {word} ..."
    for command, options in {"": ("--help", "--version"), **options_of}.items():
        if meant := _meant(name, _OPTIONS, options):
            return f"there is no option {name}: did you mean {' '.join(filter(None, ['safe-gpu', command, meant]))}?"
    return unknown_argument(word, ("--help", "--version"))


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """Return the usage error for a first word that is no command."""
    from .job.become import CommandError, find_command

    text = f"there is no command {word!r}"
    meant = _meant(word.lower(), _COMMANDS) or _similar(word, commands)
    if meant:
        return f"{text}: did you mean safe-gpu {meant}?"
    try:
        find_command([word])
    except CommandError:
        return f"{text}: choose from {', '.join(commands)}"
    return f"{text}: to run it on a GPU, write safe-gpu run -- {word}"


def unknown_argument(word: str, known: Sequence[str]) -> str:
    """Return the usage error for an argument that a command does not take.

    Args:
        word: as it was typed.
        known: all options of the command, under all their names.
    """
    name = word.partition("=")[0]
    if word == "--":
        return "no command is run here: did you mean safe-gpu run?"
    if not word.startswith("-"):
        hint = f": did you mean -n {word}?" if word.isdecimal() and "-n" in known else ""
        return f"unexpected argument {word!r}{hint}"
    meant = _meant(name, _OPTIONS, known)
    if not meant and len(name) > 2:  # -timeout too
        meant = _similar(name, (option for option in known if option.startswith("--")))
    return f"there is no option {name}{f': did you mean {meant}?' if meant else ''}"
