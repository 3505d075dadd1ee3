"""One command on another host by ssh: what it prints is passed on, signals reach it, and how it ended is known."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

from .asking import ask
from .remote_shell import ssh_to
from .supervisor import mark

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_UNTIL_GONE = 2.0  # seconds for ssh to end after the command, whose daemons may keep its output open

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
        *parts, last = re.split(re.escape(begin) + rb"(\d*)\r?\n", self._rest + data)
        at = last.rfind(begin[:1])
        self._rest = last[at:] if at >= 0 and begin.startswith(last[at : at + len(begin)]) else b""
        for number, part in enumerate([*parts, last[: len(last) - len(self._rest)]]):
            if number % 2:
                sys.stderr.buffer.write(self.said)
                sys.stderr.flush()
                self.said, self.claimed, self.ended = b"", True, int(part) if part else None
            elif self.claimed:
                sys.stdout.buffer.write(part)
                sys.stdout.flush()
            else:
                self.said += part

    def end_there(self) -> bool:
        """End what the broken connection has left on the host; return whether nothing is left."""
        find = f"grep -ls {self.secret} /proc/[0-9]*/environ | cut -d/ -f3"
        ssh = ssh_to(self.host, f'while p=$({find}); [ "$p" ]; do kill $p; sleep 0.2; done')
        for _ in range(_TRIES):
            if ask(ssh).code == 0:
                return True
            time.sleep(1.0)
        return False
