"""argparse with suggestions, and the options that several commands share."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..argument_style import ArgumentStyle
from ..errors import SafeGpuError
from .output import columns

# argparse as this command line wants it: usage errors of one line that say what was probably meant, its own width.


EX_USAGE = 2


def is_number(text: str) -> bool:
    """Whether a text is a number of at most nine ASCII digits."""
    return text.isdecimal() and text.isascii() and len(text) < 10


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Knows its width by itself: argparse makes a formatter for every option and would import shutil for it."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": columns() - 2, **options})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # The value once, not after each of the names: -n N, --gpus N.
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class Parser(argparse.ArgumentParser):
    """argparse, with ``-5s`` taken for the value that it is, no abbreviations, and suggestions for what is unknown."""

    def __init__(self, **options: Any) -> None:
        options.update(formatter_class=_Formatter, allow_abbrev=False)
        super().__init__(**options)
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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from .suggest import not_a_choice

            self.error(not_a_choice(action.option_strings[-1:], str(value), tuple(map(str, action.choices))))

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            from .suggest import unknown_argument

            self.error(unknown_argument(unknown[0], self.names()))
        return options

    def names(self) -> list[str]:
        """Every option, under all its names."""
        return list(self._option_string_actions)


# What the command line's options may say: each value checked where it is read, with one sentence for a bad one.


class CommandLine(ArgumentStyle):
    """How the arguments of a claim are written here."""

    @staticmethod
    def option(argument: str) -> str:
        """``--timeout``; ``-n`` for the number of GPUs."""
        return {"nb_gpus": "-n", "hold_for": "--for"}.get(argument) or f"--{argument.replace('_', '-')}"

    @staticmethod
    def setting(argument: str, value: str) -> str:
        """``--exclude 0,3``; variables of the environment, which are upper case, are ``NAME=value`` as everywhere."""
        return f"{argument}={value}" if argument.isupper() else f"{CommandLine.option(argument)} {value}"

    @staticmethod
    def value(value: object) -> str:
        """As a shell takes it: ``20GiB``, ``'RTX*4090'``."""
        from shlex import quote

        return quote(str(value))


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type whose error is our own sentence."""

    def check(text: str) -> Any:
        try:
            return parse(text)
        except SafeGpuError as err:
            raise argparse.ArgumentTypeError(str(err)) from err

    return check


@_checked
def _duration(text: str) -> float | None:
    from ..settings import parse_duration

    return parse_duration(text, spelling=CommandLine)


@_checked
def _hold_for(text: str) -> float | None:
    from ..claim.times import parse_hold_for
    from ..schedulers import JobContext

    return parse_hold_for(text, {}, JobContext(), spelling=CommandLine).seconds


def _count(text: str) -> int | str:
    if text == "job":
        return text
    if not is_number(text) or int(text) < 1:
        hint = f"; for GPUs by index, write --only {text}" if "," in text else ""
        raise argparse.ArgumentTypeError(f"-n {text} is not a number of GPUs: a whole number from 1 up, or job{hint}")
    return int(text)


@_checked
def seconds(text: str) -> float:
    """The value of --interval."""
    from ..settings import parse_duration

    found = parse_duration(text, "interval", spelling=CommandLine)
    if not found or found < 0.1:
        raise argparse.ArgumentTypeError(f"--interval {text} is not possible: a tenth of a second is the least")
    return found


@_checked
def _memory_size(text: str) -> int | None:
    from ..selection.request import parse_request

    return parse_request(1, min_memory=text, spelling=CommandLine).min_memory


@_checked
def _model(text: str) -> str | None:
    from ..selection.request import parse_request

    return parse_request(1, model=text, spelling=CommandLine).model


def gpu_list(argument: str) -> Callable[[str], tuple[str, ...]]:
    """``0,3``, ``4-7`` or UUIDs, as the value of this argument."""

    @_checked
    def names(text: str) -> tuple[str, ...]:
        from ..selection.request import parse_names

        return parse_names(text, argument, spelling=CommandLine)

    return names


def cores(text: str) -> int:
    """A number of physical cores."""
    if not is_number(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cores: a whole number from 1 up")
    return int(text)


def cuda_number(text: str) -> int:
    """The number that CUDA gives to a GPU in one process."""
    if not is_number(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of CUDA's: a whole number from 0 up")
    return int(text)


def cpu_list(text: str) -> str:
    """A list of CPUs, as the kernel writes it."""
    from ..cpulist import parse_cpulist

    if not parse_cpulist(text):
        raise argparse.ArgumentTypeError(f"{text!r} names no CPU: write a list such as 0-15,128-143")
    return text


def process_id(text: str) -> int:
    """A process that can be seen from here."""
    if not is_number(text) or not os.path.exists(f"/proc/{int(text)}"):
        raise argparse.ArgumentTypeError(f"there is no process {text!r}")
    return int(text)


def add_request(parser: argparse.ArgumentParser) -> None:
    """The options of commands that ask for GPUs."""
    add = parser.add_argument
    add(
        "-n",
        "--gpus",
        "--nb-gpus",
        dest="nb_gpus",
        type=_count,
        default=1,
        metavar="N",
        help="how many GPUs, or: job for the number that the batch job asked for (default 1)",
    )
    add(
        "-t",
        "--timeout",
        type=_duration,
        default=argparse.SUPPRESS,
        metavar="D",
        help="how long to wait: 90 (seconds), 15m, 1h30m, 01:30:00, 2-12:00:00 (days first), inf; 0 does not wait "
        "(default: SAFE_GPU_TIMEOUT, else inf)",
    )
    add(
        "--for",
        dest="hold_for",
        type=_hold_for,
        default=argparse.SUPPRESS,
        metavar="D",
        help="for how long the GPUs will probably be held, such as 30m or 2h, or: unknown; short jobs get in earlier, "
        "and nothing ends when the time is over (default: SAFE_GPU_FOR, else the end of the batch job)",
    )
    add("--min-memory", type=_memory_size, metavar="S", help="free memory on each GPU, such as 20GiB")
    add("--model", type=_model, metavar="P", help="part of the GPU's name, such as A100, or a pattern: 'RTX*4090'")
    add("--exclude", type=gpu_list("exclude"), default=(), metavar="L", help="not these GPUs: 0,3 or 4-7 or UUIDs")
    add("--only", type=gpu_list("only"), default=(), metavar="L", help="only these GPUs: 0,3 or 4-7 or UUIDs")
    add_vendor(parser, "GPUs of this vendor (default: NVIDIA's where there are some)")


def add_vendor(parser: argparse.ArgumentParser, meaning: str) -> None:
    """``--vendor``, which matters on hosts with GPUs of both."""
    parser.add_argument("--vendor", type=str.lower, choices=("nvidia", "amd"), default=None, help=meaning)


def add_quiet(parser: argparse.ArgumentParser, meaning: str) -> None:
    """``-q``; warnings and errors are said all the same."""
    parser.add_argument("-q", "--quiet", action="store_true", help=meaning)


def add_which_gpus(parser: argparse.ArgumentParser, gpu: str, ordinal: str) -> None:
    """``--gpu L`` and ``--ordinal N``, of which one may be given; the texts are their help."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gpu", type=gpu_list("gpu"), default=None, metavar="L", help=gpu)
    which.add_argument("--ordinal", type=cuda_number, default=None, metavar="N", help=ordinal)


def all_modes() -> tuple[str, ...]:
    """Every affinity mode."""
    from ..affinity.options import MODES

    return MODES


def add_command(parser: argparse.ArgumentParser) -> None:
    """The command to become."""
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command and its arguments")


def hold_for_of(options: argparse.Namespace) -> dict[str, float | None]:
    """``--for`` as an argument of a claim; nothing where it is not given."""
    return {"hold_for": options.hold_for} if hasattr(options, "hold_for") else {}


def timeout_of(options: argparse.Namespace) -> float | None:
    """Seconds to wait, None for ever: ``--timeout``, else SAFE_GPU_TIMEOUT, else for ever.

    Raises:
        UnsatisfiableRequestError: the variable makes no sense.
    """
    if hasattr(options, "timeout"):
        timeout: float | None = options.timeout
        return timeout
    from ..settings import parse_duration

    text = os.environ.get("SAFE_GPU_TIMEOUT")
    return parse_duration(text, "SAFE_GPU_TIMEOUT") if text else None
