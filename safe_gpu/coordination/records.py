"""What the files of the state directory say: bounded decoding, command lines, how a claim ended.

A claim that is released writes when. One that died leaves its record; the process that finds the lease free writes an
interval: when the lease was last seen held (the time of the file's last change), and when it was found free.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import procfs
from ..errors import StateDirError
from ..procfs import arguments_of, printable

if TYPE_CHECKING:
    from .files import StateDir


# What stands in files that anybody may have written: bounded, since others compute with it and show it.


LONGEST_FILE = 1 << 16
"""Bytes that are read of a ticket or a record at most."""

# No time of ours is later (the year 5138); time.localtime fails on numbers that JSON allows.
_LATEST = 1e11


def read_bounded(directory: StateDir, name: str, most: int) -> bytes:
    """Return the first ``most`` bytes of a file; none if it is missing or cannot be read."""
    try:
        fd = directory.open(name)
    except StateDirError:
        return b""
    if fd is None:
        return b""
    try:
        return os.pread(fd, most, 0)
    except OSError:
        return b""
    finally:
        os.close(fd)


def as_text(value: object, longest: int = 200) -> str:
    """Return printable text of at most ``longest`` characters.

    >>> as_text("a\\x1b[31m", 3)
    'a ['
    """
    return procfs.printable(str(value)[:longest])


def as_list(value: object) -> list[object]:
    """Return the first 1,024 entries of a list; none of anything else.

    >>> as_list("GPU-12")
    []
    """
    return value[:1024] if isinstance(value, list) else []


def as_int(value: object, least: int, most: int) -> int:
    """Return a whole number within these bounds.

    Raises:
        ValueError, TypeError, OverflowError: it is none, or beyond them.

    >>> as_int(8, 1, 4096)
    8
    """
    number = int(value)  # type: ignore[call-overload]
    if not least <= number <= most:
        raise ValueError("out of bounds")
    return int(number)


def as_time(value: object) -> float:
    """Return Unix seconds; 0 for a time that cannot be.

    Raises:
        ValueError, TypeError, OverflowError: it is no number.
    """
    seconds = float(value)  # type: ignore[arg-type]
    return seconds if 0 <= seconds < _LATEST else 0.0


def as_seconds(value: object, least: float) -> float | None:
    """Return a number of seconds from ``least`` up; None for anything else, and for a time that cannot be.

    >>> as_seconds("soon", 1) is None
    True
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < _LATEST:
        return float(value)
    return None


# What a record says of a command: everybody can read records, and arguments may hold a password.


_LONGEST = 200
_KERNEL = " ipykernel_launcher"

# Programs whose first argument is a script, unless it is an option.
_INTERPRETERS = frozenset(
    "sh bash dash zsh ksh fish csh tcsh perl ruby node nodejs Rscript julia lua php tclsh octave wish expect".split()
)
_SHELLS = frozenset("sh bash dash zsh ksh".split())
_SHELL_FLAGS = frozenset("abefhiklmnprstuvxBCEHPT")  # those that take no value


def command_for_record(arguments: Sequence[str]) -> str | None:
    """Return the command as it stands in a record: the names of program and script, or all of it, at most 200
    characters.

    ``SAFE_GPU_RECORD_COMMAND=full`` asks for all of it.
    """
    full = os.environ.get("SAFE_GPU_RECORD_COMMAND") == "full"
    return (" ".join(arguments) if full else program_names(arguments))[:_LONGEST] or None


def own_command() -> str | None:
    """Return the same of this process."""
    # Empty where Python is embedded. /proc takes longer to read than a lease to take.
    command = command_for_record(sys.orig_argv or arguments_of(os.getpid()))
    notebook = _base(os.environ.get("JPY_SESSION_NAME", ""))
    return f"{command} {notebook}"[:_LONGEST] if notebook and command and command.endswith(_KERNEL) else command


def command_of(pid: int, said: str | None) -> str | None:
    """Return the command of a living process for people: the names of program and script, as /proc shows them.

    Args:
        said: what its record says. If that is the whole command, its user wants it to be seen.
    """
    arguments = arguments_of(pid)
    # Only here is more believed than /proc shows: a kernel's record names the notebook, which is no argument.
    whole, short = (printable(text)[:_LONGEST] for text in (" ".join(arguments), program_names(arguments)))
    is_notebook = said and short.endswith(_KERNEL) and said.startswith(f"{short} ")
    return (said if whole == said or is_notebook else short) or None


def program_names(arguments: Sequence[str]) -> str:
    """Return the names of the program and of the script that it runs, without directories and other arguments.

    >>> program_names(["/usr/bin/python3.11", "-u", "jobs/train.py", "--password", "1234"])
    'python3.11 train.py'
    >>> program_names(["python", "-m", "train", "--epochs", "3"])
    'python -m train'
    >>> program_names(["bash", "-c", "curl -u anna:1234 example.org"])
    'bash'
    """
    first, *others = arguments or [""]
    if not others:
        first = first.partition(" ")[0]  # a title that the process has given itself
    program = _base(first)
    kind = program.rstrip("0123456789.")
    if kind in ("python", "pypy"):
        script = _python_script(others)
    elif kind in _INTERPRETERS:
        if kind in _SHELLS:
            others = _without_flags(others)
        script = _base(others[0]) if others and not others[0].startswith("-") else ""
    else:
        script = ""
    return f"{program} {script}" if script else program


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _without_flags(arguments: Sequence[str]) -> list[str]:
    rest = list(arguments)
    while rest and len(rest[0]) > 1 and rest[0][0] == "-" and _SHELL_FLAGS.issuperset(rest[0][1:]):
        del rest[0]
    return rest


def _python_script(arguments: Iterable[str]) -> str:
    """Return the script, or the module after ``-m``; "" for code that is given as an argument. See python(1)."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            return _base(argument)
        if argument in ("-", "--") or argument.startswith("--"):
            return ""
        for place, letter in enumerate(argument[1:], 2):
            value = argument[place:]
            if letter == "m":
                return f"-m {value or next(rest, '')}".rstrip()
            if letter == "c":
                return ""
            if letter in "WX":
                if not value:
                    next(rest, "")
                break
    return ""


# How a claim ended: one short line in its lease file, in place of the record, for the claim that takes the lease next.


LONGEST = 127
"""Bytes of such a line at most. A record is always longer, so the size of a lease file tells one from the other."""

_BEGINNING = b'{"v": 1, "claim": ['


class ClaimEnd(NamedTuple):
    """The end of the claim that process ``pid`` made at ``since``. Times are Unix seconds.

    It ended between ``seen``, when it was last known to be alive, and ``ended``, equal if that is known exactly.
    """

    pid: int
    since: float
    seen: float
    ended: float

    def encode(self) -> bytes:
        """Return one line of JSON, at most :data:`LONGEST` bytes."""
        when = f"{self.ended:.3f}" if self.seen == self.ended else f"[{self.seen:.3f}, {self.ended:.3f}]"
        return _BEGINNING + f'{self.pid}, {self.since:.3f}], "ended": {when}}}\n'.encode()

    @classmethod
    def decode(cls, data: bytes) -> ClaimEnd | None:
        """Return the line, or None if it is something else. Anybody may have written it."""
        if len(data) > LONGEST or not data.startswith(_BEGINNING):
            return None
        try:
            return cls.of(json.loads(data))
        except (ValueError, RecursionError):
            return None

    @classmethod
    def of(cls, raw: Any) -> ClaimEnd | None:
        """Return the end that a decoded line tells of, or None."""
        try:
            pid, since = raw["claim"]
            when = raw["ended"]
            seen, ended = map(as_time, when if isinstance(when, list) else (when, when))
            found = cls(as_int(pid, 1, (1 << 31) - 1), as_time(since), seen, ended)
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        return found if 0 < found.since <= found.seen <= found.ended else None


def end_of_dead_claim(pid: int, since: float, changed: float, now: float) -> ClaimEnd | None:
    """Return the end of a claim whose lease was found free at ``now``, its file last changed at ``changed``.

    None if the times in the record make no sense.
    """
    if not 0 < since <= now:
        return None
    return ClaimEnd(pid, since, min(max(since, changed), now), now)
