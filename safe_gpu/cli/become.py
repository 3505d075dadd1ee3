"""Becomes the command: exec, or a child whose exit code is passed on.

exec(2) leaves no wrapper behind: pid, signals and exit code are the command's own.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import join, quote
from typing import NoReturn

from ..errors import SafeGpuError
from ..host.foreign_files import read_start


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

    from ..coordination.signals import ignore_again, restore_default_signals

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads it any more, and the command may not care
    try:
        try:
            restore_default_signals()  # after our last write: on a broken pipe it would be the end of this process
            os.execv(path, list(command))
        except OSError as err:
            if err.errno != errno.ENOEXEC or _is_binary(path):
                raise
            os.execv("/bin/sh", ["sh", path, *command[1:]])  # a script without #!: what a shell would do
    except BaseException as err:
        ignore_again()
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


# What only a shell knows: its builtins, and the functions that environments are set up with.
_OF_THE_SHELL = set(
    ". alias cd conda declare eval exec export function if for local ml module popd pushd set shopt source trap ulimit "
    "umask unalias unset while".split()
)

_SHELL_SYNTAX = re.compile(r"[;|&<>$`*?(){}#\n]")


def hint_for(command: Sequence[str], verb: str) -> str:
    """Return how the command is written so that it is found, as the tail of a sentence; "" where nobody can tell.

    Args:
        command: its name, which is not found, and its arguments.
        verb: ``safe-gpu run`` or ``safe-gpu bind``, for the advice.
    """
    name, *arguments = command
    if not name:
        return "the name is empty: is a variable not set?"
    if re.match(r"[A-Za-z_][A-Za-z0-9_]*=", name):
        return f"to set a variable, write {verb} -- env {join(command)}"
    if name in _OF_THE_SHELL:
        return f"{name} is part of the shell: write {verb} -- bash -c {quote(f'{join(command)} && ...')}"
    if not arguments and any(blank in name for blank in " \t\n"):
        if _SHELL_SYNTAX.search(name):
            return f"for shell syntax, write {verb} -- sh -c {quote(name)}"
        return f"drop the quotes: {verb} -- {name.strip()} (or write sh -c {quote(name)})"
    if name.isdecimal() and name.isascii():
        return f"for that many GPUs, write {verb} -n {name} -- ..." if verb.endswith(" run") else ""
    if name.startswith("-"):
        return f"options come before --: {verb} {name} ... -- COMMAND"
    if "/" not in name and os.path.isfile(name):
        program = {".py": "python ", ".sh": "sh "}.get(os.path.splitext(name)[1], "")
        return f"there is a file of that name here: write {verb} -- {program or './'}{quote(name)}"
    if name == "python" and shutil.which("python3"):
        return "there is a python3"
    return ""


_PROGRAM = (
    r"^(?:(?:\S*/)?(?:sudo|doas|env|nice|ionice|nohup|setsid|stdbuf|time|timeout)\s(?:-\S+\s|-?\w+=\S+\s|\d\w*\s|(?<=-[uknCog] )\S+\s)*)*"
    r"(?:\S*/)?"
)

_DAEMON = (
    rf"{_PROGRAM}(docker|docker-compose|nerdctl|podman-remote) (?:-\S+ \S+ |\S+ )??(?:.* )?(run|exec|start|up)(?: |$)"
)

_REMOTE = rf"{_PROGRAM}(podman) (?:.* )?(?:--remote|-r|--url|--connection|-c) (?:.* )?(run|exec|start|up)(?: |$)"

_SERVICE = rf"{_PROGRAM}(podman) (?:.* )?(run|exec|start|up)(?: |$)"

_OF_PODMAN = rf"{_PROGRAM}podman (?!.*(?:VISIBLE_DEVICES|AFFINITY_MASK|--env-host))(?:.* )?run .*(?:gpu|/dev/)"

_CLEAN = rf"{_PROGRAM}(?:apptainer|singularity) \S+ (?:-\S+ )*(?:-e|--cleanenv|-C|--containall) (?!.*VISIBLE_DEVICES)"

_DRAGON = rf"{_PROGRAM}dragon "


def warning_about(command: Sequence[str], path: str, state_dir: str) -> str:
    """Return a warning about a command that starts a container in which the claim would not hold or not be known, or a
    program that would use some of its GPUs only; "" for all other commands.

    Args:
        command: its name and arguments.
        path: the file that is run for it.
        state_dir: the state directory, which the container should have.
    """
    line = " ".join(command)
    client = re.match(_DAEMON, line) or re.match(_REMOTE, line)
    if client is None and os.environ.get("CONTAINER_HOST"):
        client = re.match(_SERVICE, line)
    if client and not (client[1] == "docker" and b"podman" in (read_start(path, 1024) or b"")):
        return (
            f"warning: the claim ends with `{client[1]} {client[2]}`, not with the container, which is not its child. "
            f"Claim inside it, with the state directory mounted: {client[1]} run -v {state_dir}:{state_dir} ... IMAGE "
            "safe-gpu run -- CMD. With --network=host the claim holds by file and by name, else by its file alone"
        )
    for pattern, cause, way_out in (
        (_OF_PODMAN, "without -e, podman", "add -e CUDA_VISIBLE_DEVICES -e CUDA_DEVICE_ORDER"),
        (_CLEAN, "with this option, apptainer", "leave out --cleanenv (-e) and --containall (-C)"),
    ):
        if re.match(pattern, line):
            return f"warning: {cause} passes no variables on, so the container may use GPUs that others hold: {way_out}"
    if re.match(_DRAGON, line) and any(b"gpu_policies" in (read_start(word) or b"") for word in command[1:]):
        places = Path(os.path.realpath(path)).parent.parent
        if any(places.glob("lib/python*/*-packages/dragonhpc-0.14*")):
            return (
                "warning: System().gpu_policies() of Dragon 0.14 counts GPUs from 0. In a claim of others, workers meet "
                "on one GPU while another is idle: claim in the program (safe_gpu.engines.dragon) and use "
                "held.policies(), or Dragon 0.15"
            )
    return ""
