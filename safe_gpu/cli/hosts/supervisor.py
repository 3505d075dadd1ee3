"""What ``run`` does on the other side of a connection: it tells of its claim, and ends the command with the connection.

The side that asked reads two lines on stdout that begin with what it alone knows: one before the command, and one with
its exit code. Without a terminal stdin is for signals, a byte each, and its end is that of the connection; the command
has an empty stdin then.
"""

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import NoReturn

from ...host.procfs import descendants

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL

_PR_SET_CHILD_SUBREAPER = 36


def mark(session: str) -> str:
    """Return what begins both lines of a session, at first a character that programs hardly print."""
    return f"\x1esafe-gpu-{session} "


def run_under(session: str, path: str, command: Sequence[str]) -> NoReturn:
    """Run the command, which holds the claim that this process has made, and end with its exit code.

    The claim is not released but left to the last process that has its descriptors, as after exec(2).
    """
    terminal = os.isatty(0)
    is_lost = Event()

    def lose(*_: object) -> None:
        if not is_lost.is_set():
            is_lost.set()
            Thread(target=_end_all, daemon=True).start()

    def listen() -> None:
        while number := os.read(0, 1):
            with suppress(ProcessLookupError):
                os.killpg(child, number[0])
        lose()

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whatever the command leaves is found below us
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lose)  # exec(2) sets it back
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # on a terminal they are the command's too
    _say(session, "")
    apart = {} if terminal else {"setpgroup": 0, "file_actions": [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]}
    arguments = ["sh", "-c", 'exec "$0" "$@"', path, *command[1:]]
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by Python
    child = os.posix_spawn("/bin/sh", arguments, os.environ, setsigdef=ignored, **apart)  # type: ignore[arg-type]
    if not terminal:
        Thread(target=listen, daemon=True).start()
    pid = code = 0
    with suppress(ChildProcessError):  # nothing is left
        while pid != child or is_lost.is_set():
            pid, status = os.waitpid(-1, 0)
            code = os.waitstatus_to_exitcode(status) if pid == child else code
    _say(session, str(code if code >= 0 else 128 - code))
    os._exit(0)


def _say(session: str, word: str) -> None:
    with suppress(OSError):  # nobody listens any more, which stdin tells too
        print(f"{mark(session)}{word}", flush=True)


def _end_all() -> None:
    """End the command with all that it has started, for as long as this process lives."""
    number = signal.SIGTERM
    while True:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
        time.sleep(_GRACE if number == signal.SIGTERM else 0.1)
        number = signal.SIGKILL
