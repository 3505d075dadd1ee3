"""What was probably meant by a word that is no command, no option or no value here."""

import re
from collections.abc import Iterable, Mapping, Sequence

_MEANT = {
    **dict.fromkeys("claim exec launch srun start submit".split(), "run"),
    **dict.fromkeys("gpustat info list ls ps queue show".split(), "status"),
    **dict.fromkeys("monitor top watch".split(), "status --watch"),
}
"""Words of other tools for our commands."""

_GIVE_BACK = "abort cancel end free kill quit release return stop terminate unclaim unlock".split()

_BY_INDEX = r"-[dgi]|--cuda|--(cuda-|use-|visible-)*(gpu|device|id|index|indice|only|ordinal)(-(id|index|indice))?s?"
"""Options of other tools, and of our other commands, for GPUs by their indices."""


def similar(word: str, known: Iterable[str]) -> str:
    """Return the one of these words that looks most like it, dashes aside; "" where none does."""
    from difflib import get_close_matches

    bare = {}
    for one in known:
        is_short_option = one.startswith("-") and not one.startswith("--")
        if not is_short_option:
            bare[one.lstrip("-")] = one
    close = get_close_matches(word.lstrip("-").lower().replace("_", "-"), bare, n=1, cutoff=0.7)
    if not close:
        return ""
    return bare[close[0]]


def unknown_option(word: str, options_of: Mapping[str, Sequence[str]], after: str = "") -> str:
    """Return the usage error for an option where a command was expected.

    Args:
        options_of: command -> its options.
        after: what follows the option.
    """
    name = word.partition("=")[0]
    if name not in options_of["run"] and re.fullmatch(_BY_INDEX, name):
        return unknown_argument(word, options_of["run"], after)
    for command, options in options_of.items():
        if name in options:
            return f"{name} is an option of safe-gpu {command}: write safe-gpu {command} {word} ..."
    return unknown_argument(word, ("--help", "--version"))


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """Return the usage error for a first word that is no command."""
    from shutil import which

    text = f"there is no command {word!r}"
    if word.lower() in _GIVE_BACK:
        return f"{text}: a GPU is given back when its process ends: kill PID, which safe-gpu status -v shows"
    meant = _MEANT.get(word.lower()) or similar(word, commands)
    if meant:
        return f"{text}: did you mean safe-gpu {meant}?"
    if which(word):
        return f"{text}: to run it on a GPU, write safe-gpu run -- {word}"
    return f"{text}: choose from {', '.join(commands)}"


def unknown_argument(word: str, known: Sequence[str], after: str = "") -> str:
    """Return the usage error for an argument that a command with these options does not take, and what follows it."""
    if word == "--":
        return "no command is run here: did you mean safe-gpu run?"
    if not word.startswith("-"):
        if word.isdecimal() and "-n" in known:
            return f"unexpected argument {word!r}: did you mean -n {word}?"
        return f"unexpected argument {word!r}"
    name, _, value = word.partition("=")
    meant = _choosing_by_index(name, value or after, known)
    if not meant and len(name) > 2:
        meant = similar(name, known)
    if not meant:
        return f"there is no option {name}"
    return f"there is no option {name}: did you mean {meant}?"


def _choosing_by_index(name: str, value: str, known: Sequence[str]) -> str:
    """Return which of these options, with this value, does what an option of that name does elsewhere: it chooses GPUs
    by their indices; "" where it does not."""
    if not re.fullmatch(_BY_INDEX, name.lower().replace("_", "-")):
        return ""
    for option in ("--only", "--gpu"):
        if option in known:
            gpus = re.match(r"(cuda:)?((\d|GPU-|MIG-)[\w,:-]*)(?!\S)", value)
            if gpus is None:
                return f"{option} 0"
            return f"{option} {gpus[2]}"
    return ""
