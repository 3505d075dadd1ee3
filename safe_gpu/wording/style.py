"""How messages name arguments of a claim: as Python writes them, or as the command line does where that runs.

``argument`` is always the name in Python, or a variable of the environment, whose name is upper case.
"""

from collections.abc import Iterator
from contextlib import contextmanager

# Of arguments whose option is not named like them.
_OPTIONS = {"nb_gpus": "-n", "hold_for": "--for"}

_command_lines = 0  # that run in this process


@contextmanager
def on_command_line() -> Iterator[None]:
    """Let messages name arguments as options meanwhile."""
    global _command_lines
    _command_lines += 1
    try:
        yield
    finally:
        _command_lines -= 1


def option(argument: str) -> str:
    """Return an argument without a value: ``timeout=`` or ``--timeout``, and ``-n`` for the number of GPUs."""
    if _command_lines:
        return as_option(argument)
    return f"{argument}="


def as_option(argument: str) -> str:
    """Return the option of an argument: ``--timeout``."""
    if argument in _OPTIONS:
        return _OPTIONS[argument]
    return f"--{argument.replace('_', '-')}"


def setting(argument: str, text: str) -> str:
    """Return an argument with a value, which is not quoted: ``exclude=0,3`` or ``--exclude 0,3``."""
    is_variable = argument.isupper()
    if _command_lines and not is_variable:
        return f"{as_option(argument)} {text}"
    return f"{argument}={text}"


def value(value: object) -> str:
    """Return a value as the caller writes it: ``'20GiB'``, or as a shell takes it: ``20GiB``, ``'RTX*4090'``; ``inf``
    for no limit."""
    if not _command_lines:
        return repr(value)
    if value is None:
        return "inf"
    return _for_shells(str(value))


def _for_shells(text: str) -> str:
    from shlex import quote

    return quote(text)


def written(argument: str, value_given: object) -> str:
    """Return an argument with a value, both as the caller writes them: ``model='A100'`` or ``--model A100``."""
    return setting(argument, value(value_given))
