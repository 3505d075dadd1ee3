"""Programs: those that safe_gpu starts, found where no neighbour could have put them, with bounds of time and of bytes;
and what the command lines of others show.

Root relies only on paths that no other user can change: its ``PATH`` and other variables may be a user's, in a
scheduler's prolog or under sudo. Only the commands of users, and ssh for ``run --host``, are started elsewhere.

Everybody can read what a record says of a command, and arguments may hold a password.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile
from typing import TYPE_CHECKING

from .foreign_files import printable
from .procfs import arguments_of, has_all_ids

if TYPE_CHECKING:
    import subprocess


_UNKILLABLE = 1.0  # seconds that a killed program is waited for: a driver that hangs may keep it

_LEFT_OPEN = 0.1  # seconds without output after which it is looked whether a program has ended and left its output open

_MOST_LINKS = 40  # on the way to one path, as in the kernel

_FOR_PROGRAMS = frozenset(
    "LANG LC_ALL LC_CTYPE LC_MESSAGES LC_NUMERIC LC_TIME TERM JOB_ID SGE_TASK_ID SLURM_JOB_ID SLURM_JOBID "
    "SGE_CELL SGE_CLUSTER_NAME SGE_EXECD_PORT SGE_QMASTER_PORT".split()
)
"""What programs that root runs get of an environment, as far as it is no path: other variables may load code."""


def is_root() -> bool:
    """Return whether this process is root of the host or of a container whose root that is, rather than a user who
    became root of a user namespace and gains nothing from it."""
    return os.geteuid() == 0 and has_all_ids()


def others_can_change(path: str, *, within: bool = False) -> str | None:
    """Return the first part of a path, on the way through all links, that a user other than root can change or make.

    None: there is none, and root may rely on the path. Where an ACL lets somebody write, the bits of the group say so.
    In a sticky directory others may write, but not replace what is root's. The current directory may be anybody's.

    Args:
        within: whether the path is of a directory in which files are looked for, so that others must make none there.
    """
    if not path.startswith("/"):
        return path or "."
    place, ahead, links, shared = "/", _names(path), 0, False
    while True:
        try:
            status = os.lstat(place)
            target = os.readlink(place) if stat.S_ISLNK(status.st_mode) else None
        except FileNotFoundError:
            return place if shared else None
        except OSError:
            return place
        if status.st_uid:
            return place
        if target is not None:
            links += 1
            if links > _MOST_LINKS or place.startswith("/proc/"):  # those of /proc lead elsewhere than they say
                return place
            ahead += _names(target)
            place = "/" if target.startswith("/") else os.path.dirname(place)
            continue
        shared = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        if shared and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
            return place
        if not ahead:
            return place if within and shared else None
        name = ahead.pop()
        place = os.path.dirname(place) if name == ".." else f"{'' if place == '/' else place}/{name}"


def _names(path: str) -> list[str]:
    """Return the parts of a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def find_program(name: str, environ: Mapping[str, str], *more: str) -> str | None:
    """Return the path of a program, by ``PATH`` and then in ``more``; for root, the first that only root can change.

    Raises:
        PermissionError: there are only such that other users can change; the text is for root, with the way out.
    """
    root, refusal = is_root(), ""
    for place in (*environ.get("PATH", os.defpath).split(os.pathsep), *more):
        path = os.path.join(place or os.curdir, name)
        if not os.path.isfile(path) or not os.access(path, os.X_OK):
            continue
        part = others_can_change(path) if root else None
        if part is None:
            return path
        refusal = refusal or (
            f"{path} is not run as root, because other users can change {'it' if part == path else part}: put a {name} "
            "that only root can change on PATH"
        )
    if refusal:
        raise PermissionError(refusal)
    return None


IN_CHILD = "_SAFE_GPU_CHILD"
"""The variable in the environment of such children."""


def python_child(environ: Mapping[str, str], *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a child that is the Python of this process.

    Raises:
        FileNotFoundError: no such program is known. A program that is frozen or embeds Python may be its own
            ``sys.executable``, and children of it would start children without end.
    """
    python = sys.executable or ""
    if not os.path.basename(python).startswith(("python", "pypy")):
        python = os.path.join(sys.base_exec_prefix, "bin", "python{}.{}".format(*sys.version_info))
    if getattr(sys, "frozen", False) or IN_CHILD in os.environ or not os.path.isfile(python):
        raise FileNotFoundError(
            f"{sys.executable or 'this program'} is a program that contains Python, and a child of it would be that "
            "program once more: start it under `safe-gpu run`, which claims for it"
        )
    return [python, *arguments], {**environ, IN_CHILD: "1"}


class Failed(Exception):
    """A program did not do what it was started for; the text says why."""


class TooLate(Failed):
    """It did not end in time. It was killed, with its children."""


class TooMuch(Failed):
    """It printed more than is read. It was killed, with its children."""


def call_in_child(
    function: str, *arguments: str, env: Mapping[str, str], timeout: float, with_packages: bool = False
) -> str:
    """Call a function of this package in a child, without the PYTHON* variables, the current directory, the packages of
    the user and what sites load into each interpreter; return what it prints.

    Args:
        function: "MODULE NAME"; it takes strings, and returns an exit status or None.
        env: the whole environment of the child.
        with_packages: whether it needs other packages; for root, those that only root can change.

    Raises:
        OSError: it cannot be started, as of :func:`python_child`. Failed: it ends with an error.
    """
    module, name = function.split()
    places = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
    if with_packages:
        root = is_root()
        others = (one for one in sys.path if os.path.isdir(one) and not os.path.samefile(one, os.curdir))
        places += [one for one in others if not (root and others_can_change(one, within=True))]
    code = (
        "import sys; end = sys.argv.index('--'); sys.path += sys.argv[1:end]; "
        f"from {module} import {name}; sys.exit({name}(*sys.argv[end + 1 :]))"
    )
    command, env = python_child(env, "-I", "-S", "-c", code, *places, "--", *arguments)
    status, answer, trouble = output_of(command, env=env, timeout=timeout, most=1 << 20, apart=True, full=True)
    if status:
        raise Failed(trouble.strip().rpartition("\n")[2] or f"exit status {status}")
    return answer


def output_of(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout: float,
    most: int,
    apart: bool = False,
    full: bool = False,
) -> tuple[int, str, str]:
    """Return the exit status, output and error output; the last is in the output unless ``apart``.

    Bytes that are not UTF-8 become U+FFFD. A child that it leaves behind with its output open is not waited for, but
    killed, unless it has a session of its own.

    Args:
        arguments: the first is a path from :func:`find_program`.
        env: of which it gets what :func:`environment` returns, unless ``full``.
        timeout: seconds.
        most: bytes that are read.

    Raises:
        OSError: it cannot be started. TooLate, TooMuch: see there.
    """
    import subprocess

    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if apart else subprocess.STDOUT,
        env=env if full else environment(env),
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout
    try:
        out, err = _read(process, deadline, most)
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except BaseException as trouble:
        _abandon(process)
        if isinstance(trouble, subprocess.TimeoutExpired):
            raise TooLate("it does not end") from trouble
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a program gets of an environment: as root few variables, since those of another user may have it load
    code or read that user's settings."""
    if not is_root():
        return dict(env)
    kept = {name: value for name, value in env.items() if name in _FOR_PROGRAMS and "/" not in value}
    conf = env.get("SLURM_CONF", "")
    read = {
        "HOME": [env.get("HOME", "")],
        "SGE_ROOT": [f"{env.get('SGE_ROOT', '')}/{env.get('SGE_CELL') or 'default'}/common"],
        "SLURM_CONF": [conf, os.path.dirname(conf)],  # the other files of Slurm are beside it
        "SSH_AUTH_SOCK": [env.get("SSH_AUTH_SOCK", "")],
        "TZ": [os.path.join("/usr/share/zoneinfo", env.get("TZ", "").lstrip(":"))],
    }
    for name, paths in read.items():
        if name in env and not any(others_can_change(path, within=True) for path in paths):
            kept[name] = env[name]
    for name in ("PATH", "LD_LIBRARY_PATH"):
        places = env.get(name, "").replace(";", ":").split(":")
        # The loader puts something in the place of $ORIGIN.
        sure = [place for place in places if "$" not in place and not others_can_change(place, within=True)]
        if sure:
            kept[name] = ":".join(sure)
    return kept


def _read(process: subprocess.Popen[bytes], deadline: float, most: int) -> list[bytes]:
    """Return what it prints on its output and its error output, until both are closed or it has ended."""
    import selectors

    parts: list[list[bytes]] = [[], []]
    with selectors.DefaultSelector() as selector:
        for number, stream in enumerate((process.stdout, process.stderr)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, number)
        while selector.get_map():
            ended = process.poll() is not None  # before: what it has written by then is ready
            ready = selector.select(min(_LEFT_OPEN, max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                raise TooLate("it does not end")
            if not ready and ended:
                _abandon(process)
                break
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fileobj)
                most -= len(part)
                if most < 0:
                    raise TooMuch("it prints without end")
                parts[key.data].append(part)
    return [b"".join(one) for one in parts]


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Kill it with its children, and do not wait for it for long."""
    import signal
    import subprocess

    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_UNKILLABLE)


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
