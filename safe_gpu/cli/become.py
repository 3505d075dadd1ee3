"""Becomes the command: exec, or a child whose exit code is passed on.

exec(2) leaves no wrapper behind: pid, signals and exit code are the command's own.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import SafeGpuError
from .advice import hint_for


class CommandError(SafeGpuError):
    """The command cannot be run; ``code`` is what shells exit with: 127 not found, 126 found and not runnable."""

    def __init__(self, message: str = "", *, code: int = 127) -> None:
        super().__init__(message)
        self.code = code


def find_command(command: Sequence[str], verb: str = "run") -> str:
    """Return the file that a shell would run for this command; a name with a slash is the file itself.

    Args:
        command: its name and arguments.
        verb: the command of safe-gpu that runs it, for advice.

    Raises:
        CommandError: no such command, or only files that cannot be executed.
    """
    name = command[0]
    if "/" in name:
        paths = [name]
    else:
        paths = [os.path.join(place or ".", name) for place in os.environ.get("PATH", os.defpath).split(os.pathsep)]
    closed = "/" in name and os.path.isdir(name)
    for path in paths:
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            closed = True

    if closed:
        what = "it is a directory" if os.path.isdir(name) else "it is not an executable file (chmod +x makes it one)"
        raise CommandError(f"{name} cannot be run: {what}", code=126)
    hint = hint_for(command, f"safe-gpu {verb}")
    raise CommandError(f"{name or repr(name)}: command not found{hint and f'; {hint}'}", code=127)


def become(path: str, command: Sequence[str]) -> NoReturn:
    """Turn into the command; ``path`` is its file, ``command`` its arguments from the name on.

    Raises:
        CommandError: the kernel refused; everything is as before then.
    """
    import errno

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads it any more, and the command may not care
    try:
        try:
            _set_signals_of_python(
                _signal.SIG_DFL
            )  # after our last write: on a broken pipe it would be the end of this process
            os.execv(path, list(command))
        except OSError as err:
            if err.errno != errno.ENOEXEC or _is_binary(path):
                raise
            os.execv("/bin/sh", ["sh", path, *command[1:]])  # a script without #!: what a shell would do
    except BaseException as err:
        _set_signals_of_python(_signal.SIG_IGN)
        if not isinstance(err, OSError):  # a handler of a signal has raised
            raise
        reason = err.strerror
        if err.errno == errno.ENOENT and os.path.exists(path):
            reason = "its interpreter (after #!, or the dynamic loader) does not exist"
        code = 126 if os.path.exists(path) else 127
        raise CommandError(f"{command[0]} cannot be run: {reason}", code=code) from err


def _is_binary(path: str) -> bool:
    """Return whether a file that the kernel knows no way to execute is no script either (a program for another
    machine)."""
    with open(path, "rb", buffering=0) as file:
        return b"\0" in file.read(128)


def _set_signals_of_python(action: int) -> None:
    """Set the action of the two signals that Python ignores, which exec(2) would hand on."""
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, action)
