"""argparse as this command line wants it, and what its options may say."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..gpus.vendors import FIRST, VENDORS
from ..settings.values import parse_duration
from ..wording.style import as_option
from .mistakes import impossible_value, similar, unknown_argument
from .output import EX_USAGE, columns


def is_number(text: str) -> bool:
    """Return whether a text is a number of at most nine ASCII digits."""
    return text.isdecimal() and text.isascii() and len(text) < 10


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, up to 80 columns. argparse makes one for every option, and would import shutil."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(columns(), 80) - 2)


class Parser(argparse.ArgumentParser):
    """argparse, with ``-5s`` taken for the value that it is, no abbreviations, and suggestions for what is unknown."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=_Formatter, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-([0-9.].*|inf)$")

    def error(self, message: str) -> NoReturn:
        name, colon, problem = message.partition(": ")
        if colon and name.startswith("argument "):
            message = _usage_error(name.removeprefix("argument "), problem)
        self.exit(EX_USAGE, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as err:  # argparse has put a text of its own in place of our sentence
            raise argparse.ArgumentError(action, str(err.__context__)) from err

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self.error(_impossible_choice(action, str(value)))

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        options, unknown = self.parse_known_args(args)
        if unknown:
            _, _, after = " ".join(args).partition(f"{unknown[0]} ")
            self.error(unknown_argument(unknown[0], self.names(), after))
        return options

    def names(self) -> list[str]:
        """Return all options, under all their names."""
        return list(self._option_string_actions)


def _usage_error(option: str, problem: str) -> str:
    """Return the sentence for an option and what argparse, or our own parser of its value, says of it."""
    if problem == "expected one argument":
        return f"{option} needs a value"
    if problem.startswith("ignored explicit argument"):
        return f"{option} takes no value"
    if problem.startswith("-") or not option.startswith("-"):  # our own sentences name the option, or need none
        return problem
    return f"{option}: {problem}"


def _impossible_choice(action: argparse.Action, value: str) -> str:
    """Return the usage error for a value that is none of the choices."""
    from shlex import quote

    given = quote(value)
    if action.option_strings:
        given = f"{action.option_strings[-1]} {given}"
        hint = impossible_value(action.option_strings[-1], value)
        if hint:
            return f"{given} is not possible: {hint}"
    choices = [str(one) for one in action.choices or ()]
    listed = f"choose from {', '.join(choices)}"
    meant = similar(value, choices)
    if meant:
        return f"{given} is not possible: did you mean {meant}? {listed}"
    return f"{given} is not possible: {listed}"


def _hold_for(text: str) -> float | None:
    from ..claim.arguments import parse_hold_for
    from ..schedulers.job import JobContext

    return parse_hold_for(text, {}, JobContext()).seconds


def _count(text: str) -> int | str | tuple[int, int]:
    """Parse the value of ``-n``."""
    if text == "job":
        return text
    least, dash, most = text.partition("-")
    if dash and is_number(least) and is_number(most) and 0 < int(least) <= int(most):
        if int(least) == int(most):
            return int(least)
        return int(least), int(most)
    if is_number(text) and int(text) > 0:
        return int(text)
    problem = f"-n {text} is not a number of GPUs: a whole number from 1 up, a range such as 2-4, or job"
    if "," in text:
        problem += f"; for GPUs by index, write --only {text}"
    elif text == "0":
        problem += "; for GPU 0, write --only 0"
    raise ValueError(problem)


def gpu_list(text: str) -> tuple[str, ...]:
    """Parse the value of ``--gpu``: ``0,3``, ``4-7`` or UUIDs."""
    from ..settings.values import parse_names

    return parse_names(text, "gpu")


def whole_number(what: str, least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of numbers of ``what``, from ``least`` up, or to ``most``."""
    end = "up"
    if most is not None:
        end = f"to {most}"

    def parse(text: str) -> int:
        if is_number(text) and int(text) >= least and (most is None or int(text) <= most):
            return int(text)
        raise ValueError(f"{text!r} is not a number of {what}: a whole number from {least} {end}")

    return parse


_HOW_MANY = """number of GPUs; 2-4: at least two, and up to four if that many are free; job: as many as the batch job
asked for (default 1)"""

_HOW_LONG_TO_WAIT = """how long to wait: 90 (seconds), 15m, 1h30m, 01:30:00, 2-12:00:00 (days first), inf; 0 does not
wait (default: SAFE_GPU_TIMEOUT, else inf)"""

_HOW_LONG_TO_HOLD = """how long the GPUs will probably be held: 30m, 2h, unknown. With it a short job may start earlier.
No job is stopped when the time is up (default: SAFE_GPU_FOR, else the end of the batch job)"""


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

    modes = ("none", *MODES)
    unset = argparse.SUPPRESS
    which = f"CPUs to bind to (default node): {', '.join(modes)}"
    parser.add_argument("--affinity", choices=modes, default=unset, metavar="M", help=which)
    parser.add_argument("--mode", dest="affinity", choices=modes, default=unset, metavar="M", help=argparse.SUPPRESS)
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
        UnsatisfiableRequestError: the variable is not valid.
    """
    given = {name: value for name, value in vars(options).items() if name not in _NOT_OF_CLAIMS}
    if "timeout" not in given:
        given["timeout"] = None
        text = os.environ.get("SAFE_GPU_TIMEOUT")
        if text:
            given["timeout"] = parse_duration(text, "SAFE_GPU_TIMEOUT")
    return given


def hosts_of_option(text: str) -> tuple[str, ...]:
    """Parse the value of ``--host``."""
    from ..settings.config import host_names

    names = host_names(text)
    if not names:
        raise ValueError("--host needs the name of a host, such as gpu1,gpu2")
    return names


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose other hosts."""
    which = parser.add_argument_group("other hosts, by ssh").add_mutually_exclusive_group()
    which.add_argument("--host", type=hosts_of_option, metavar="H", help="these hosts: gpu1,gpu2")
    every = "those of SAFE_GPU_HOSTS, else of hosts in ~/.config/safe-gpu/config.ini, else of root's file"
    which.add_argument("--all-hosts", action="store_true", help=every)
    parser.add_argument("--sort", choices=("free",), help="with hosts: those with the most free GPUs first")
