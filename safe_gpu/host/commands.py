"""What a record says of a command: everybody can read it, and arguments may hold a password."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import dropwhile

from .foreign_files import printable
from .procfs import arguments_of

_LONGEST = 200

_KERNEL = " ipykernel_launcher"

# Programs whose first argument is a script, unless it is an option.
_INTERPRETERS = frozenset(
    "sh bash dash zsh ksh fish csh tcsh perl ruby node nodejs Rscript julia lua php tclsh octave wish expect".split()
)

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")

_SHELL_FLAGS = "-[abefhiklmnprstuvxBCEHPT]+"  # those that take no value


def command_for_record(arguments: Sequence[str]) -> str | None:
    """Return the command as it stands in a record: the names of program and script, or all of it, at most 200
    characters.

    ``SAFE_GPU_RECORD_COMMAND=full`` asks for all of it.
    """
    full = os.environ.get("SAFE_GPU_RECORD_COMMAND") == "full"
    return (" ".join(arguments) if full else program_names(arguments))[:_LONGEST] or None


def own_command() -> str | None:
    """Return the same of this process."""
    # Empty where Python is embedded. /proc takes longer to read than a claim to make.
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
            others = list(dropwhile(re.compile(_SHELL_FLAGS).fullmatch, others))
        script = _base(others[0]) if others and not others[0].startswith("-") else ""
    else:
        script = ""
    return f"{program} {script}" if script else program


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _python_script(arguments: Iterable[str]) -> str:
    """Return the script, or the module after ``-m``; "" for code that is given as an argument. See python(1)."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            return _base(argument)
        letters = argument[1:]
        kind = "c" if letters[:1] in ("", "-") else next(filter("mcWX".__contains__, letters), "")
        value = letters.partition(kind)[2] if kind else ""
        if kind == "m":
            return f"-m {value or next(rest, '')}".rstrip()
        if kind == "c":
            return ""
        if kind and not value:
            next(rest, "")
    return ""
