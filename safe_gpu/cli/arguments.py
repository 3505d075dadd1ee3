"""argparse as this command line wants it, and what its options may say."""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from ..gpus.vendors import FIRST, VENDORS
from ..settings.values import parse_duration
from ..wording.style import as_option
from .output import EX_USAGE, columns


def is_number(text: str) -> bool:
    """Return whether a text is a number of at most nine ASCII digits."""
    return text.isdecimal() and text.isascii() and len(text) < 10


class Parser(argparse.ArgumentParser):
    """argparse, with ``-5s`` taken for the value that it is, no abbreviations, and suggestions for what is unknown."""

    def __init__(self, **options: Any) -> None:
        # argparse makes a formatter for every option, and would import shutil for its width.
        formatter = partial(argparse.RawDescriptionHelpFormatter, width=min(columns(), 80) - 2)
        super().__init__(**options, formatter_class=formatter, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-([0-9.].*|inf)$")

    def error(self, message: str) -> NoReturn:
        name, colon, rest = message.partition(": ")
        if colon and name.startswith("argument "):
            name = name.removeprefix("argument ")
            if rest == "expected one argument":
                message = f"{name} needs a value"
            elif rest.startswith("ignored explicit argument"):
                message = f"{name} takes no value"
            else:  # our own sentences name the option
                message = rest if rest.startswith("-") else f"{name}: {rest}"
        self.exit(EX_USAGE, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as err:  # argparse has put a text of its own in place of our sentence
            raise argparse.ArgumentError(action, str(err.__context__)) from err

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from shlex import quote

            choices = tuple(map(str, action.choices))
            close = _similar(str(value), choices)
            meant = f"did you mean {close}? " if close else ""
            given = " ".join([*action.option_strings[-1:], quote(str(value))])
            self.error(f"{given} is not possible: {meant}choose from {', '.join(choices)}")

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        options, unknown = self.parse_known_args(args)
        if unknown:
            _, _, after = " ".join(args).partition(f"{unknown[0]} ")
            self.error(unknown_argument(unknown[0], self.names(), after))
        return options

    def names(self) -> list[str]:
        """Return all options, under all their names."""
        return list(self._option_string_actions)


def _hold_for(text: str) -> float | None:
    from ..claim.arguments import parse_hold_for
    from ..schedulers.job import JobContext

    return parse_hold_for(text, {}, JobContext()).seconds


def _count(text: str) -> int | str | tuple[int, int]:
    if text == "job":
        return text
    least, dash, most = text.partition("-")
    if dash and is_number(least) and is_number(most) and 0 < int(least) <= int(most):
        return int(least) if int(least) == int(most) else (int(least), int(most))
    if not is_number(text) or int(text) < 1:
        hint = f"; for GPUs by index, write --only {text}" if "," in text else ""
        forms = f"a whole number from 1 up, a range such as 2-4, or job{hint}"
        raise ValueError(f"-n {text} is not a number of GPUs: {forms}")
    return int(text)


def gpu_list(text: str) -> tuple[str, ...]:
    """Parse the value of ``--gpu``: ``0,3``, ``4-7`` or UUIDs."""
    from ..settings.values import parse_names

    return parse_names(text, "gpu")


def whole_number(what: str, least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of numbers of ``what``, from ``least`` up, or to ``most``."""

    def parse(text: str) -> int:
        if not is_number(text) or not least <= int(text) <= (most or int(text)):
            end = "up" if most is None else f"to {most}"
            raise ValueError(f"{text!r} is not a number of {what}: a whole number from {least} {end}")
        return int(text)

    return parse


_HOW_MANY = """number of GPUs; 2-4: at least two, and up to four if that many are free; job: as many as the batch job
asked for (default 1)"""

_HOW_LONG_TO_WAIT = """how long to wait: 90 (seconds), 15m, 1h30m, 01:30:00, 2-12:00:00 (days first), inf; 0 does not
wait (default: SAFE_GPU_TIMEOUT, else inf)"""

_HOW_LONG_TO_HOLD = """how long the GPUs will probably be held: 30m, 2h, unknown; short jobs get in earlier, and no job
ends when the time is over (default: SAFE_GPU_FOR, else the end of the batch job)"""


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that ask for GPUs."""
    from ..selection.request import CONDITIONS

    which = parser.add_argument_group("which GPUs")
    which.add_argument("-n", "--gpus", "--nb-gpus", dest="nb_gpus", type=_count, default=1, metavar="N", help=_HOW_MANY)
    for one in CONDITIONS:
        which.add_argument(as_option(one.argument), type=one.parse, metavar=one.metavar, help=one.help)
    add_vendor(which, f"GPUs of this vendor (default: {VENDORS[FIRST].title}'s where there are some)")
    add = parser.add_argument_group("how long").add_argument
    add("-t", "--timeout", type=parse_duration, default=argparse.SUPPRESS, metavar="D", help=_HOW_LONG_TO_WAIT)
    add("--for", dest="hold_for", type=_hold_for, default=argparse.SUPPRESS, metavar="D", help=_HOW_LONG_TO_HOLD)


def add_vendor(parser: argparse._ActionsContainer, meaning: str) -> None:
    """Add ``--vendor``, which matters on hosts with GPUs of several vendors."""
    parser.add_argument("--vendor", type=str.lower, choices=tuple(VENDORS), default=None, help=meaning)


def add_affinity(parser: argparse._ActionsContainer) -> None:
    """Add ``--affinity M``, which ``--mode M`` means too, unset by default, and ``--memory``."""
    from ..affinity.planner import MODES

    modes, none = ("none", *MODES), argparse.SUPPRESS
    which = f"CPUs to bind to (default node): {', '.join(modes)}"
    parser.add_argument("--affinity", choices=modes, default=none, metavar="M", help=which)
    parser.add_argument("--mode", dest="affinity", choices=modes, default=none, metavar="M", help=none)
    parser.add_argument("--memory", choices=("preferred", "bind"), help="NUMA memory policy next to the GPUs")


def add_which_gpus(parser: argparse.ArgumentParser, gpu: str, ordinal: str, node: str = "") -> None:
    """Add ``--gpu L``, ``--ordinal N`` and perhaps ``--node N``, of which one may be given; the texts are their
    help."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gpu", type=gpu_list, default=None, metavar="L", help=gpu)
    which.add_argument("--ordinal", type=whole_number("CUDA's", 0), default=None, metavar="N", help=ordinal)
    if node:
        which.add_argument("--node", type=whole_number("a NUMA node", 0), default=None, metavar="N", help=node)


_NOT_OF_CLAIMS = ("handler", "command", "words", "host", "pending", "usage_error", "quiet", "refused_exit")


def claim_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a command that asks for GPUs as keyword arguments of a claim, which have the same names.

    Without ``--timeout`` the claim waits as long as SAFE_GPU_TIMEOUT says, else without limit.

    Raises:
        UnsatisfiableRequestError: the variable makes no sense.
    """
    given = {name: value for name, value in vars(options).items() if name not in _NOT_OF_CLAIMS}
    if "timeout" not in given:
        text = os.environ.get("SAFE_GPU_TIMEOUT")
        given["timeout"] = parse_duration(text, "SAFE_GPU_TIMEOUT") if text else None
    return given


def hosts_of_option(text: str) -> tuple[str, ...]:
    """Parse the value of ``--host``."""
    from ..settings.config import host_names

    names = host_names(text)
    if not names:
        raise ValueError("--host needs the name of a host, such as gpu1,gpu2")
    return names


_MEANT = {
    **dict.fromkeys("claim exec launch srun start submit".split(), "run"),
    **dict.fromkeys("gpustat info list ls ps queue show".split(), "status"),
    **dict.fromkeys("monitor top watch".split(), "status --watch"),
}
"""Words of other tools for our commands."""

_GIVE_BACK = "abort cancel end free kill quit release return stop terminate unclaim unlock".split()

_BY_INDEX = r"-[dgi]|--cuda|--(cuda-|use-|visible-)*(gpu|device|id|index|indice|only|ordinal)(-(id|index|indice))?s?"
"""Options of other tools, and of our other commands, for GPUs by their indices."""


def _similar(word: str, known: Iterable[str]) -> str:
    """Return the one of these words that looks most like it, dashes aside; "" where none does."""
    from difflib import get_close_matches

    bare = {option.lstrip("-"): option for option in known if option[:2] == "--" or option[:1] != "-"}
    close = get_close_matches(word.lstrip("-").lower().replace("_", "-"), bare, 1, 0.7)
    return bare[close[0]] if close else ""


def unknown_option(word: str, options_of: Mapping[str, Sequence[str]], after: str = "") -> str:
    """Return the usage error for an option where a command was expected; ``options_of``: command -> its options."""
    name = word.partition("=")[0]
    if name not in options_of["run"] and re.fullmatch(_BY_INDEX, name):
        return unknown_argument(word, options_of["run"], after)
    for owner in (command for command, options in options_of.items() if name in options):
        return f"{name} is an option of safe-gpu {owner}: write safe-gpu {owner} {word} ..."
    return unknown_argument(word, ("--help", "--version"))


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """Return the usage error for a first word that is no command."""
    from shutil import which

    text = f"there is no command {word!r}"
    if word.lower() in _GIVE_BACK:
        return f"{text}: a GPU is given back when its process ends: kill PID, which safe-gpu status -v shows"
    if meant := _MEANT.get(word.lower()) or _similar(word, commands):
        return f"{text}: did you mean safe-gpu {meant}?"
    hint = f"to run it on a GPU, write safe-gpu run -- {word}" if which(word) else f"choose from {', '.join(commands)}"
    return f"{text}: {hint}"


def unknown_argument(word: str, known: Sequence[str], after: str = "") -> str:
    """Return the usage error for an argument that a command with these options does not take, and what follows it."""
    if word == "--":
        return "no command is run here: did you mean safe-gpu run?"
    if not word.startswith("-"):
        hint = f": did you mean -n {word}?" if word.isdecimal() and "-n" in known else ""
        return f"unexpected argument {word!r}{hint}"
    name, _, value = word.partition("=")
    meant = _similar(name, known) if len(name) > 2 else ""
    option = next((one for one in ("--only", "--gpu") if one in known), "")
    if option and re.fullmatch(_BY_INDEX, name.lower().replace("_", "-")):
        gpus = re.match(r"(cuda:)?((\d|GPU-|MIG-)[\w,:-]*)(?!\S)", value or after)
        meant = f"{option} {gpus[2] if gpus else 0}"
    return f"there is no option {name}{f': did you mean {meant}?' if meant else ''}"


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose other hosts."""
    which = parser.add_argument_group("other hosts, by ssh").add_mutually_exclusive_group()
    which.add_argument("--host", type=hosts_of_option, metavar="H", help="these hosts: gpu1,gpu2")
    every = "those of SAFE_GPU_HOSTS, else of hosts in ~/.config/safe-gpu/config.ini, else of root's file"
    which.add_argument("--all-hosts", action="store_true", help=every)
    parser.add_argument("--sort", choices=("free",), help="with hosts: those with the most free GPUs first")
