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
from typing import TYPE_CHECKING, NamedTuple

from .foreign_files import printable
from .procfs import arguments_of, has_all_ids

if TYPE_CHECKING:
    import subprocess


_UNKILLABLE = 1.0  # seconds that a killed program is waited for: a driver that hangs may keep it

_LEFT_OPEN = 0.1  # seconds without output after which it is looked whether a program has ended and left its output open

_MOST_OF_CHILD = 1 << 20  # bytes that a child of ours prints

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
    place = "/"
    ahead = _names(path)
    links = 0
    others_can_make = False  # something in the directory that was passed last
    while True:
        try:
            status = os.lstat(place)
            is_link = stat.S_ISLNK(status.st_mode)
            target = ""
            if is_link:
                target = os.readlink(place)
        except FileNotFoundError:
            if others_can_make:
                return place
            return None
        except OSError:
            return place
        if status.st_uid != 0:
            return place
        if is_link:
            links += 1
            if links > _MOST_LINKS or place.startswith("/proc/"):  # those of /proc lead elsewhere than they say
                return place
            ahead += _names(target)
            if target.startswith("/"):
                place = "/"
            else:
                place = os.path.dirname(place)
            continue
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        others_can_make = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        if others_can_make and not is_sticky:
            return place
        if not ahead:
            if within and others_can_make:
                return place
            return None
        name = ahead.pop()
        if name == "..":
            place = os.path.dirname(place)
        else:
            place = os.path.join(place, name)


def _names(path: str) -> list[str]:
    """Return the parts of a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def find_program(name: str, environ: Mapping[str, str], *more: str) -> str | None:
    """Return the path of a program, by ``PATH`` and then in ``more``; for root, the first that only root can change.

    Raises:
        PermissionError: there are only such that other users can change; the text is for root, with the way out.
    """
    user_is_root = is_root()
    refusal: PermissionError | None = None
    for directory in (*environ.get("PATH", os.defpath).split(os.pathsep), *more):
        path = os.path.join(directory or os.curdir, name)
        if not os.path.isfile(path) or not os.access(path, os.X_OK):
            continue
        if not user_is_root:
            return path
        part = others_can_change(path)
        if part is None:
            return path
        if refusal is None:
            what = part
            if part == path:
                what = "it"
            refusal = PermissionError(
                f"{path} is not run as root, because other users can change {what}: put a {name} that only root can "
                "change on PATH"
            )
    if refusal is not None:
        raise refusal
    return None


IN_CHILD = "_SAFE_GPU_CHILD"
"""The variable in the environment of children that are the Python of this process."""


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


class Output(NamedTuple):
    """The exit status of a program, and what it printed on its output and its error output."""

    status: int
    text: str
    errors: str


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
        places += _places_of_packages()
    code = (
        "import sys; end = sys.argv.index('--'); sys.path += sys.argv[1:end]; "
        f"from {module} import {name}; sys.exit({name}(*sys.argv[end + 1 :]))"
    )
    command, env = python_child(env, "-I", "-S", "-c", code, *places, "--", *arguments)
    answer = output_of(
        command, env=env, timeout=timeout, most=_MOST_OF_CHILD, separate_stderr=True, whole_environment=True
    )
    if answer.status != 0:
        last_line = answer.errors.strip().rpartition("\n")[2]
        raise Failed(last_line or f"exit status {answer.status}")
    return answer.text


def _places_of_packages() -> list[str]:
    """Return where this process finds modules: not in the current directory, and for root only where root can make
    them."""
    found = []
    for place in sys.path:
        if not os.path.isdir(place) or os.path.samefile(place, os.curdir):
            continue
        if is_root() and others_can_change(place, within=True):
            continue
        found.append(place)
    return found


def output_of(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout: float,
    most: int,
    separate_stderr: bool = False,
    whole_environment: bool = False,
) -> Output:
    """Run a program, and return what it ended with and printed.

    Bytes that are not UTF-8 become U+FFFD. A child that it leaves behind with its output open is not waited for, but
    killed, unless it has a session of its own.

    Args:
        arguments: the first is a path from :func:`find_program`.
        env: of which it gets what :func:`environment` returns, unless ``whole_environment``.
        timeout: seconds.
        most: bytes that are read.
        separate_stderr: whether its error output is returned apart; else it is in ``text``.

    Raises:
        OSError: it cannot be started. TooLate, TooMuch: see there.
    """
    import subprocess

    if not whole_environment:
        env = environment(env)
    stderr = subprocess.STDOUT
    if separate_stderr:
        stderr = subprocess.PIPE
    process = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=env, start_new_session=True
    )
    deadline = time.monotonic() + timeout
    try:
        text, errors = _read(process, deadline, most)
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as trouble:
        _abandon(process)
        raise TooLate("it does not end") from trouble
    except BaseException:
        _abandon(process)
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return Output(status, text.decode("utf-8", "replace"), errors.decode("utf-8", "replace"))


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a program gets of an environment: as root few variables, since those of another user may have it load
    code or read that user's settings."""
    if not is_root():
        return dict(env)
    kept = {name: value for name, value in env.items() if name in _FOR_PROGRAMS and "/" not in value}
    slurm_conf = env.get("SLURM_CONF", "")
    read_by = {
        "HOME": [env.get("HOME", "")],
        "SGE_ROOT": [f"{env.get('SGE_ROOT', '')}/{env.get('SGE_CELL') or 'default'}/common"],
        "SLURM_CONF": [slurm_conf, os.path.dirname(slurm_conf)],  # the other files of Slurm are beside it
        "SSH_AUTH_SOCK": [env.get("SSH_AUTH_SOCK", "")],
        "TZ": [os.path.join("/usr/share/zoneinfo", env.get("TZ", "").lstrip(":"))],
    }
    for name, paths in read_by.items():
        if name in env and all(_only_root_can_make(path) for path in paths):
            kept[name] = env[name]
    for name in ("PATH", "LD_LIBRARY_PATH"):
        places = env.get(name, "").replace(";", ":").split(":")
        # The loader puts something in the place of $ORIGIN.
        sure = [place for place in places if "$" not in place and _only_root_can_make(place)]
        if sure:
            kept[name] = ":".join(sure)
    return kept


def _only_root_can_make(path: str) -> bool:
    return others_can_change(path, within=True) is None


def _read(process: subprocess.Popen[bytes], deadline: float, most: int) -> tuple[bytes, bytes]:
    """Return what it prints on its output and its error output, until both are closed or it has ended."""
    import selectors

    text = bytearray()
    errors = bytearray()
    with selectors.DefaultSelector() as selector:
        for stream, read in ((process.stdout, text), (process.stderr, errors)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, read)
        while selector.get_map():
            has_ended = process.poll() is not None  # asked first: what it has written by then is ready
            ready = selector.select(min(_LEFT_OPEN, max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                raise TooLate("it does not end")
            if not ready and has_ended:
                _abandon(process)
                break
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fileobj)
                key.data.extend(part)
            if len(text) + len(errors) > most:
                raise TooMuch("it prints without end")
    return bytes(text), bytes(errors)


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
    command = program_names(arguments)
    if os.environ.get("SAFE_GPU_RECORD_COMMAND") == "full":
        command = " ".join(arguments)
    return command[:_LONGEST] or None


def own_command() -> str | None:
    """Return the same of this process, and the name of the notebook whose kernel it is."""
    arguments = sys.orig_argv or arguments_of(os.getpid())  # empty where Python is embedded
    command = command_for_record(arguments)
    notebook = _base(os.environ.get("JPY_SESSION_NAME", ""))
    if command is None or not command.endswith(_KERNEL) or not notebook:
        return command
    return f"{command} {notebook}"[:_LONGEST]


def command_of(pid: int, recorded: str | None) -> str | None:
    """Return the command of a living process for people: the names of program and script, as /proc shows them.

    Args:
        recorded: what its record says. It is believed where its user wants the whole command to be seen, as /proc shows
            it, and where it adds to a kernel the name of the notebook, which is no argument.
    """
    arguments = arguments_of(pid)
    whole = printable(" ".join(arguments))[:_LONGEST]
    short = printable(program_names(arguments))[:_LONGEST]
    is_notebook = recorded is not None and short.endswith(_KERNEL) and recorded.startswith(f"{short} ")
    if recorded == whole or is_notebook:
        return recorded or None
    return short or None


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
    script = _script(_without_version(program), others)
    if not script:
        return program
    return f"{program} {script}"


def _without_version(program: str) -> str:
    """Return the name of an interpreter: "python" of "python3.14t". Python adds t without the GIL, d for debugging."""
    versioned = program.rstrip("td")
    if versioned[-1:].isdigit():
        return versioned.rstrip("0123456789.")
    return program


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _script(interpreter: str, arguments: Iterable[str]) -> str:
    """Return the name of the script that an interpreter runs; "" if it runs none, or is no interpreter."""
    if interpreter in ("python", "pypy"):
        return _python_script(arguments)
    if interpreter not in _INTERPRETERS:
        return ""
    for argument in arguments:
        if interpreter in _SHELLS and re.fullmatch(_SHELL_FLAGS, argument):
            continue
        if argument.startswith("-"):
            return ""
        return _base(argument)
    return ""


def _python_script(arguments: Iterable[str]) -> str:
    """Return the script, or the module after ``-m``; "" for code that is given as an argument. See python(1)."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            return _base(argument)
        if argument == "-" or argument.startswith("--"):
            return ""
        option, value = _option_with_value(argument)
        if option == "c":
            return ""
        if option and not value:
            value = next(rest, "")
        if option == "m":
            return f"-m {value}".rstrip()
    return ""


def _option_with_value(argument: str) -> tuple[str, str]:
    """Return which of Python's options that take a value is among these letters, and what follows it there.

    >>> _option_with_value("-Im"), _option_with_value("-uWignore"), _option_with_value("-u")
    (('m', ''), ('W', 'ignore'), ('', ''))
    """
    for position, letter in enumerate(argument):
        if letter in "cmWX":
            return letter, argument[position + 1 :]
    return "", ""
