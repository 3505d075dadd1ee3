"""What the command line's options may say."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..gpus.vendors import FIRST, VENDORS
from ..wording.argument_style import ArgumentStyle
from .parser import is_number

if TYPE_CHECKING:
    from ..selection.request import Condition


class CommandLine(ArgumentStyle):
    """How the arguments of a claim are written here."""

    @staticmethod
    def option(argument: str) -> str:
        """Return ``--timeout``; ``-n`` for the number of GPUs."""
        return {"nb_gpus": "-n", "hold_for": "--for"}.get(argument) or f"--{argument.replace('_', '-')}"

    @staticmethod
    def setting(argument: str, value: str) -> str:
        """Return ``--exclude 0,3``; variables of the environment, which are upper case, are ``NAME=value`` as
        everywhere."""
        return f"{argument}={value}" if argument.isupper() else f"{CommandLine.option(argument)} {value}"

    @staticmethod
    def value(value: object) -> str:
        """Return a value as a shell takes it: ``20GiB``, ``'RTX*4090'``."""
        from shlex import quote

        return quote(str(value))


def duration(text: str) -> float | None:
    """Parse the value of ``--timeout``, in seconds; None is ``inf``."""
    from ..settings.durations import parse_duration

    return parse_duration(text, spelling=CommandLine)


def _hold_for(text: str) -> float | None:
    from ..claim.arguments.hold_for import parse_hold_for
    from ..schedulers import JobContext

    return parse_hold_for(text, {}, JobContext(), spelling=CommandLine).seconds


def _count(text: str) -> int | str | tuple[int, int]:
    if text == "job":
        return text
    least, dash, most = text.partition("-")
    if dash and is_number(least) and is_number(most) and 0 < int(least) <= int(most):
        return int(least) if int(least) == int(most) else (int(least), int(most))
    if not is_number(text) or int(text) < 1:
        hint = f"; for GPUs by index, write --only {text}" if "," in text else ""
        raise ValueError(
            f"-n {text} is not a number of GPUs: a whole number from 1 up, a range such as 2-4, or job{hint}"
        )
    return int(text)


def _of(condition: type[Condition]) -> Callable[[str], Any]:
    """Return the parser of a condition, which a claim has too."""
    return lambda text: condition.parse(text, CommandLine)


def gpu_list(text: str) -> tuple[str, ...]:
    """Parse the value of ``--gpu``: ``0,3``, ``4-7`` or UUIDs."""
    from ..selection.values import parse_names

    return parse_names(text, "gpu", spelling=CommandLine)


def whole_number(what: str, least: int) -> Callable[[str], int]:
    """Return a parser of numbers of ``what``, from ``least`` up."""

    def parse(text: str) -> int:
        if not is_number(text) or int(text) < least:
            raise ValueError(f"{text!r} is not a number of {what}: a whole number from {least} up")
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
        which.add_argument(CommandLine.option(one.argument), type=_of(one), metavar=one.metavar, help=one.help)
    add_vendor(which, f"GPUs of this vendor (default: {VENDORS[FIRST].title}'s where there are some)")
    add = parser.add_argument_group("how long").add_argument
    add("-t", "--timeout", type=duration, default=argparse.SUPPRESS, metavar="D", help=_HOW_LONG_TO_WAIT)
    add("--for", dest="hold_for", type=_hold_for, default=argparse.SUPPRESS, metavar="D", help=_HOW_LONG_TO_HOLD)


def add_vendor(parser: argparse._ActionsContainer, meaning: str) -> None:
    """Add ``--vendor``, which matters on hosts with GPUs of several vendors."""
    parser.add_argument("--vendor", type=str.lower, choices=tuple(VENDORS), default=None, help=meaning)


def add_affinity(parser: argparse._ActionsContainer) -> None:
    """Add ``--affinity M``, which ``--mode M`` means too; unset by default."""
    from ..affinity.options import MODES

    modes, none = ("none", *MODES), argparse.SUPPRESS
    which = f"CPUs to bind to (default node): {', '.join(modes)}"
    parser.add_argument("--affinity", choices=modes, default=none, metavar="M", help=which)
    parser.add_argument("--mode", dest="affinity", choices=modes, default=none, metavar="M", help=none)


def add_which_gpus(parser: argparse.ArgumentParser, gpu: str, ordinal: str, node: str = "") -> None:
    """Add ``--gpu L``, ``--ordinal N`` and perhaps ``--node N``, of which one may be given; the texts are their
    help."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gpu", type=gpu_list, default=None, metavar="L", help=gpu)
    which.add_argument("--ordinal", type=whole_number("CUDA's", 0), default=None, metavar="N", help=ordinal)
    if node:
        which.add_argument("--node", type=whole_number("a NUMA node", 0), default=None, metavar="N", help=node)


_NOT_OF_CLAIMS = ("handler", "command", "words", "host", "supervised", "usage_error", "quiet", "refused_exit")


def claim_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a command that asks for GPUs as keyword arguments of a claim, which have the same names."""
    given = {name: value for name, value in vars(options).items() if name not in _NOT_OF_CLAIMS}
    return {**given, "timeout": timeout_of(options)}


def timeout_of(options: argparse.Namespace) -> float | None:
    """Return the seconds to wait: ``--timeout``, else SAFE_GPU_TIMEOUT; None waits without limit, as by default.

    Raises:
        UnsatisfiableRequestError: the variable makes no sense.
    """
    if hasattr(options, "timeout"):
        timeout: float | None = options.timeout
        return timeout
    from ..settings.durations import parse_duration

    text = os.environ.get("SAFE_GPU_TIMEOUT")
    return parse_duration(text, "SAFE_GPU_TIMEOUT") if text else None


def hosts_of_option(text: str) -> tuple[str, ...]:
    """Parse the value of ``--host``."""
    from ..settings.host_file import host_names

    names = host_names(text)
    if not names:
        raise ValueError("--host needs the name of a host, such as gpu1,gpu2")
    return names
