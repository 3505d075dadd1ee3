"""What ``run`` does on the other side of a connection: it tells of its claim, and ends the command with the connection.

The side that asked reads words on stdout, each a line that begins with what it alone knows. Without a terminal its
stdin is for signals, a byte each, and its end is that of the connection; the command has an empty stdin then.
"""

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import NoReturn

from ...host.procfs import descendants

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL

_LOOK = 0.1  # seconds, while the command is being ended

_PR_SET_CHILD_SUBREAPER = 36

_NEWS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def mark(session: str) -> str:
    """Return what begins each word of a session, at first a character that programs hardly print."""
    return f"\x1esafe-gpu-{session} "


def run_under(session: str, path: str, command: Sequence[str]) -> NoReturn:
    """Run the command, which holds the claim that this process has made, and end with its exit code.

    The claim is not released but left to the last process that has its descriptors, as after exec(2).
    """
    terminal = os.isatty(0)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whatever the command leaves is found below us
    signal.pthread_sigmask(signal.SIG_BLOCK, _NEWS)
    _say(session, "claimed")
    apart = {} if terminal else {"setpgroup": 0, "file_actions": [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]}
    arguments = ["sh", "-c", 'exec "$0" "$@"', path, *command[1:]]
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by Python
    child = os.posix_spawn("/bin/sh", arguments, os.environ, setsigmask=(), setsigdef=ignored, **apart)  # type: ignore[arg-type]
    if not terminal:
        Thread(target=_listen, args=(child,), daemon=True).start()
    while (code := _exit_code(child)) is None:
        if signal.sigwait(_NEWS) in (signal.SIGTERM, signal.SIGHUP):
            _end_all()
            code = 128 + signal.SIGTERM
            break
    _say(session, f"ended {code}")
    os._exit(code)


def _say(session: str, word: str) -> None:
    with suppress(OSError):  # nobody listens any more, which stdin tells too
        print(f"{mark(session)}{word}", flush=True)


def _listen(child: int) -> None:
    """Pass on the signals that come, to the end of the connection."""
    while number := os.read(0, 1):
        with suppress(ProcessLookupError):
            os.killpg(child, number[0])
    os.kill(os.getpid(), signal.SIGTERM)


def _exit_code(child: int) -> int | None:
    """Return the child's exit code once it has ended; what it has left behind and has ended too is forgotten."""
    while (ended := os.waitpid(-1, os.WNOHANG))[0] not in (0, child):
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    return None if not ended[0] else code if code >= 0 else 128 - code


def _end_all() -> None:
    """End the command with all that it has started."""
    number, deadline = int(signal.SIGTERM), time.monotonic() + _GRACE
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
        signal.sigtimedwait((signal.SIGCHLD,), _LOOK)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        number = signal.SIGKILL if time.monotonic() > deadline else 0
