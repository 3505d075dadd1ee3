"""How messages name the arguments of a claim: as Python writes them, or as the command line does where that runs.

``argument`` is always the name in Python, or a variable of the environment, whose name is upper case.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_command_lines: list[None] = []  # one while the command line runs


@contextmanager
def on_command_line() -> Iterator[None]:
    """Let messages name arguments as options meanwhile."""
    _command_lines.append(None)
    try:
        yield
    finally:
        _command_lines.pop()


def option(argument: str) -> str:
    """Return an argument without a value: ``timeout=`` or ``--timeout``, and ``-n`` for the number of GPUs."""
    return as_option(argument) if _command_lines else f"{argument}="


def as_option(argument: str) -> str:
    """Return the option of an argument: ``--timeout``."""
    return {"nb_gpus": "-n", "hold_for": "--for"}.get(argument) or f"--{argument.replace('_', '-')}"


def setting(argument: str, text: str) -> str:
    """Return an argument with a value, which is not quoted: ``exclude=0,3`` or ``--exclude 0,3``."""
    return f"{option(argument)} {text}" if _command_lines and not argument.isupper() else f"{argument}={text}"


def value(value: object) -> str:
    """Return a value as the caller writes it: ``'20GiB'``, or as a shell takes it: ``20GiB``, ``'RTX*4090'``; ``inf``
    for no limit."""
    if not _command_lines:
        return repr(value)
    from shlex import quote

    return "inf" if value is None else quote(str(value))


def written(argument: str, value_given: object) -> str:
    """Return an argument with a value, both as the caller writes them: ``model='A100'`` or ``--model A100``."""
    return setting(argument, value(value_given))
