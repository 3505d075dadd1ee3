"""What ``run`` does on the other side of a connection: it tells of its claim, and ends the command with the connection.

The side that asked reads words on stdout, each a line that begins with what it alone knows. Without a terminal its
stdin is for signals, a byte each, and its end is that of the connection; the command has an empty stdin then.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from ...host.procfs import descendants

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL, less than the other side waits

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_LOOK = 100  # milliseconds, while the command is being ended

_PR_SET_CHILD_SUBREAPER = 36


def mark(session: str) -> str:
    """Return what begins each word of a session, at first a character that programs hardly print."""
    return f"\x1esafe-gpu-{session} "


def run_under(session: str, path: str, command: Sequence[str]) -> NoReturn:
    """Run the command, which holds the claim that this process has made, and end with its exit code.

    The claim is not released but left to the last process that has its descriptors, as after exec(2).
    """
    terminal = os.isatty(0)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whatever the command leaves is found below us
    news, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_FORWARDED):
        signal.signal(number, lambda *_: None)  # exec(2) sets it back
    _say(session, "claimed")
    apart = {} if terminal else {"setpgroup": 0, "file_actions": [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]}
    arguments = ["sh", "-c", 'exec "$0" "$@"', path, *command[1:]]
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by Python
    child = os.posix_spawn("/bin/sh", arguments, os.environ, setsigdef=ignored, **apart)  # type: ignore[arg-type]
    code = _wait(child, news, terminal)
    _say(session, f"ended {code}")
    os._exit(code)


def _say(session: str, word: str) -> None:
    with suppress(OSError):  # nobody listens any more, which stdin tells too
        os.write(1, f"{mark(session)}{word}\n".encode())


def _wait(child: int, news: int, terminal: bool) -> int:
    """Return the child's exit code once it has ended, or once it was ended with all that it has started."""
    poller = select.poll()
    poller.register(news, select.POLLIN)
    poller.register(0, 0 if terminal else select.POLLIN)  # on a terminal it is the command's, and a hangup still shows
    code, deadline = None, 0.0
    while True:
        lost = False
        for fd, _ in poller.poll(_LOOK if deadline else None):
            data = os.read(fd, 64) if fd == news or not terminal else b""
            if fd == news:
                lost |= signal.SIGTERM in data or signal.SIGHUP in data
            elif data:
                for number in set(data).intersection(_FORWARDED):
                    with suppress(ProcessLookupError):
                        os.killpg(child, number)
            else:
                lost = True
                poller.unregister(0)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
        left = descendants(os.getpid()) if lost or deadline else []
        if lost and not deadline:
            deadline = time.monotonic() + _GRACE
            _signal_all(left, signal.SIGTERM, signal.SIGCONT)
        elif deadline and time.monotonic() > deadline:
            _signal_all(left, signal.SIGKILL)
        if code is not None and not left:
            return code if code >= 0 else 128 - code


def _signal_all(pids: Sequence[int], *numbers: int) -> None:
    for pid in pids:
        for number in numbers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
