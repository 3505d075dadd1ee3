"""``safe-gpu run --host``: the command on the first of several hosts that can give it GPUs now."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import NoReturn

from ..host.procfs import descendants
from ..host.programs import environment
from ..wording.text import plural
from .commands import EX_CANNOT_RUN, EX_CONNECTION, EX_NO_HOST, EX_TRY_AGAIN
from .hosts import (
    NEWLINE_FOR_SH,
    answers_of,
    arranged,
    ask,
    last_line,
    remote_command,
    script_of_status,
    ssh_to,
    words_of_sh,
)
from .output import say

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


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_UNTIL_GONE = 2.0  # seconds for ssh to end after the command, whose daemons may keep its output open

_MOST_SAID = 1 << 16  # bytes

_TRIES = 6  # to reach a host again to which the connection has broken


@dataclass
class Session:
    """A try to claim and run on one host, and what has become of it.

    Attributes:
        secret: begins each line for this process, and is in the environment of the process that claims there.
        claimed: whether the host has said so.
        ended: the command's own exit code; None if it is not known to have ended.
        code: of ssh, once it has ended.
        stopped: the signal that has come here, or 0.
        said: what was printed before the claim.
    """

    host: str
    terminal: bool
    secret: str = field(default_factory=lambda: os.urandom(8).hex())
    claimed: bool = False
    ended: int | None = None
    code: int = 0
    stopped: int = 0
    said: bytes = b""
    _rest: bytes = b""

    @property
    def broken(self) -> bool:
        """Whether the connection has broken, and it is not known that the host has not claimed."""
        return self.ended is None and (self.claimed or self.code == 255 or self.code < 0)

    def run(self, script: str) -> None:
        """Run the script there to its end.

        Raises:
            BrokenPipeError: nobody reads what it prints; it was ended there.
        """
        options = ("-tt", "-oLogLevel=ERROR") if self.terminal else ("-T",)
        ssh = subprocess.Popen(
            ssh_to(self.host, script, *options, "-oServerAliveInterval=15"),
            stdin=None if self.terminal else subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(os.environ),
            start_new_session=not self.terminal,
        )

        def stop(number: int, frame: object) -> None:
            self.stopped = self.stopped or number
            if self.terminal or not self.claimed:
                ssh.terminate()
            elif ssh.stdin is not None:
                with suppress(OSError):
                    os.write(ssh.stdin.fileno(), bytes([number]))

        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in before:
            if before[number] is not signal.SIG_IGN:  # under nohup
                signal.signal(number, stop)
        with ssh:
            try:
                assert ssh.stdout is not None
                while self.ended is None and (data := os.read(ssh.stdout.fileno(), 1 << 16)):
                    self._show(data)
                with suppress(subprocess.TimeoutExpired):
                    self.code = ssh.wait(_UNTIL_GONE)
            except BrokenPipeError:
                ssh.terminate()
                self.end_there()
                raise
            finally:
                ssh.terminate()  # does nothing where it has ended
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _show(self, data: bytes) -> None:
        """Print what has come, or keep it until the claim, without the lines that are for this process."""
        begin = mark(self.secret).encode()
        *parts, last = re.split(re.escape(begin) + rb"(\d{0,3})\r?\n", self._rest + data)
        tail = last[max(0, last.rfind(begin[:1])) :]
        self._rest = tail if begin.startswith(tail[: len(begin)]) and len(tail) < 2 * len(begin) else b""
        for number, part in enumerate([*parts, last[: len(last) - len(self._rest)]]):
            if number % 2:
                sys.stderr.buffer.write(self.said)
                sys.stderr.flush()
                self.said, self.claimed, self.ended = b"", True, int(part) if part else None
            elif self.claimed:
                sys.stdout.buffer.write(part)
                sys.stdout.flush()
            else:
                self.said = (self.said + part)[-_MOST_SAID:]

    def end_there(self) -> bool:
        """End what the broken connection has left on the host; return whether nothing is left."""
        find = f"grep -ls {self.secret} /proc/[0-9]*/environ | cut -d/ -f3"
        ssh = ssh_to(self.host, f'while p=$({find}); [ "$p" ]; do kill $p; sleep 0.2; done')
        for _ in range(_TRIES):
            if ask(ssh).code == 0:
                return True
            time.sleep(1.0)
        return False


def run_on_hosts(options: argparse.Namespace) -> int:
    """Try one host after the other, the one with the most free GPUs first, until one has claimed; return the command's
    exit code, or why there is none."""
    if getattr(options, "timeout", 0) != 0:
        options.usage_error("--host takes GPUs that are free now: only --timeout 0 goes with it")
    if options.nb_gpus == "job":
        options.usage_error("-n job does not go with --host: the batch job is on this host")
    answers = arranged(answers_of(options.host, script_of_status(options.vendor)), most_free_first=True)
    told = {name: one.error for name, one in answers.items()}
    codes = {EX_NO_HOST for one in answers.values() if one.status is None}
    for host, answer in answers.items():
        if answer.figures is None:
            continue
        session = Session(host, _on_terminal())
        if sys.stderr.isatty() and not options.quiet:
            say(f"on {host}")
        session.run(_script(session.secret, options))
        if session.ended is not None:
            return session.ended
        if session.broken:
            is_over = session.end_there()
            if not (is_over and session.stopped):
                what = (
                    "the command was ended there" if is_over else f"is not back: the command ends when {host} notices"
                )
                say(f"the connection to {host} broke, and {what}")
                return EX_CONNECTION
        if session.stopped:
            return 128 + session.stopped
        codes.add(session.code)
        told[host] = last_line(session.said) or f"exit code {session.code}"
        if session.code == EX_TRY_AGAIN:
            told[host] = f"{answer.figures.free} of {plural(answer.figures.total)} free"
            if answer.figures.waiting:
                told[host] += f", {answer.figures.waiting} waiting: {answer.figures.waiters}"
    lines = [f"  {host}: {why}" for host, why in told.items()]
    say("\n".join(["no host gives the GPUs now, and run --host does not wait:", *lines]))
    return codes.pop() if len(codes) == 1 else EX_TRY_AGAIN


def _on_terminal() -> bool:
    """Return whether the command is to have the terminal of this process, which is in its foreground."""
    return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()


def _script(secret: str, options: argparse.Namespace) -> str:
    """Return what ``sh`` is to run on the other host, in the directory of this process there."""
    here = os.environ.get("PWD", "")  # by the name that it has on all hosts, rather than where its links lead here
    directory = here if os.path.isabs(here) and os.path.isdir(here) and os.path.samefile(here, ".") else os.getcwd()
    missing = words_of_sh([f"there is no directory {directory}"])
    # A version that tells nothing of a claim refuses --supervised.
    words = words_of_sh([*options.words, "--supervised", "--timeout", "0", "--", *options.command])
    steps = [
        NEWLINE_FOR_SH,
        f"cd {words_of_sh([directory])} 2>/dev/null || {{ echo {missing}; exit {EX_CANNOT_RUN}; }}",
        f"exec env SAFE_GPU_SESSION={secret} {remote_command()} run {words}",
    ]
    return "; ".join(steps)
