"""What the command line's options may say: each value checked where it is read, with one sentence for a bad one."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn

from .errors import SafeGpuError

__all__ = [
    "EX_USAGE",
    "Parser",
    "add_command",
    "add_request",
    "columns",
    "cores",
    "cpu_list",
    "gpu_list",
    "process_id",
    "timeout_of",
]

EX_USAGE = 2


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Knows its width by itself: argparse makes a formatter for every option and would import shutil for it."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": columns() - 2, **options})


def columns() -> int:
    """The width of the terminal that stdout is, or what COLUMNS says, or 80."""
    text = os.environ.get("COLUMNS", "")
    if _is_number(text) and int(text) > 0:
        return int(text)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


class Parser(argparse.ArgumentParser):
    """argparse, with usage errors of one line, and ``-5s`` taken for the value that it is."""

    def __init__(self, **options: Any) -> None:
        options.update(formatter_class=_Formatter, allow_abbrev=False)
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-([0-9.].*|inf)$")

    def error(self, message: str) -> NoReturn:
        self.exit(EX_USAGE, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


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
    from .durations import parse_duration

    return parse_duration(text)


def _count(text: str) -> int | str:
    if text == "job":
        return text
    if not _is_number(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs: a whole number from 1 up, or job")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 10


@_checked
def _memory_size(text: str) -> int:
    from .request import parse_bytes

    return parse_bytes(text, name="size")


@_checked
def _model(text: str) -> str | None:
    from .request import parse_request

    return parse_request(1, model=text).model


@_checked
def gpu_list(text: str) -> tuple[str, ...]:
    """``0,3``, ``4-7`` or UUIDs."""
    from .request import parse_request

    return parse_request(1, only=text).only


@_checked
def _excluded(text: str) -> tuple[str, ...]:
    from .request import parse_request

    return parse_request(1, exclude=text).exclude


def cores(text: str) -> int:
    """A number of physical cores."""
    if not _is_number(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of cores: a whole number from 1 up")
    return int(text)


def cpu_list(text: str) -> str:
    """A list of CPUs, as the kernel writes it."""
    from .affinity.cpulist import parse_cpulist

    if not parse_cpulist(text):
        raise argparse.ArgumentTypeError(f"{text!r} names no CPU: write a list such as 0-15,128-143")
    return text


def process_id(text: str) -> int:
    """A process that can be seen from here."""
    if not _is_number(text) or not os.path.exists(f"/proc/{int(text)}"):
        raise argparse.ArgumentTypeError(f"there is no process {text!r}")
    return int(text)


def add_request(parser: argparse.ArgumentParser) -> None:
    """The options of commands that ask for GPUs."""
    add = parser.add_argument
    add("-n", "--nb-gpus", type=_count, default=1, metavar="N", help="how many GPUs, or: job (default 1)")
    add(
        "--timeout",
        type=_duration,
        default=argparse.SUPPRESS,
        metavar="D",
        help="how long to wait: 90, 90s, 15m, 2h, 1d, inf; 0 does not wait (default: SAFE_GPU_TIMEOUT, else inf)",
    )
    add("--min-memory", type=_memory_size, metavar="S", help="free memory on each GPU, such as 20GiB")
    add("--model", type=_model, metavar="P", help="part of the GPU's name, such as A100, or a pattern: 'RTX*4090'")
    add("--exclude", type=_excluded, default=(), metavar="L", help="not these GPUs: 0,3 or 4-7 or UUIDs")
    add("--only", type=gpu_list, default=(), metavar="L", help="only these GPUs: likewise")


def add_command(parser: argparse.ArgumentParser) -> None:
    """The command to become."""
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command and its arguments")


def timeout_of(options: argparse.Namespace) -> float | None:
    """Seconds to wait, None for ever: ``--timeout``, else SAFE_GPU_TIMEOUT, else for ever.

    Raises:
        UnsatisfiableRequestError: the variable makes no sense.
    """
    if hasattr(options, "timeout"):
        timeout: float | None = options.timeout
        return timeout
    from .durations import parse_duration

    text = os.environ.get("SAFE_GPU_TIMEOUT")
    return parse_duration(text, "SAFE_GPU_TIMEOUT") if text else None
