"""One command on another host by ssh: what it prints is passed on, signals reach it, and how it ended is known."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from .asking import Asking
from .remote_shell import ssh_to
from .supervisor import mark

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_UNTIL_CLAIMED = 60.0  # seconds: a driver may take half of them to start

_UNTIL_GONE = 2.0  # seconds for ssh to end after the command, whose daemons may keep its output open

_TRIES = 6  # to reach a host again to which the connection has broken

_MOST_HELD = 1 << 16  # bytes of what was written before the claim


@dataclass
class Session:
    """A try to claim and run on one host, and what has become of it.

    Attributes:
        secret: begins each word of the other side, and is in the environment of the process that claims there.
        words: those that have come: ``here``, then ``missing`` (the directory) or ``claimed``, then ``ended CODE``.
        code: of ssh, once it has ended.
        stopped: the signal that has come here, or 0.
        held: what was printed before the claim.
    """

    host: str
    terminal: bool
    secret: str = field(default_factory=lambda: os.urandom(8).hex())
    words: list[str] = field(default_factory=list)
    code: int = 0
    stopped: int = 0
    held: bytearray = field(default_factory=bytearray)
    _rest: bytes = b""

    @property
    def ended(self) -> int | None:
        """The command's own exit code; None if it is not known to have ended."""
        return next((int(word.split()[1]) for word in self.words if word.startswith("ended ")), None)

    @property
    def broken(self) -> bool:
        """Whether the connection has broken when the other side had begun, so that it may have claimed."""
        lost = "claimed" in self.words or self.code == 255 or self.code < 0
        return "here" in self.words and self.ended is None and lost

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
            stderr=subprocess.PIPE,
            start_new_session=not self.terminal,
        )
        with ssh, _signals() as news:
            try:
                self._attend(ssh, news)
            except BrokenPipeError:
                ssh.terminate()
                self.end_there()
                raise
            finally:
                ssh.terminate()  # does nothing where it has ended
        self.code = ssh.returncode

    def _attend(self, ssh: subprocess.Popen[bytes], news: int) -> None:
        """Pass on what comes, until ssh has ended or has kept us waiting for too long."""
        assert ssh.stdout is not None
        assert ssh.stderr is not None
        streams = {ssh.stdout.fileno(): 1, ssh.stderr.fileno(): 2}
        deadline = time.monotonic() + _UNTIL_CLAIMED
        with selectors.DefaultSelector() as selector:
            for fd in (news, *streams):
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                gone = ssh.poll() is not None  # what it has written is in the pipes by now
                ready = [key.fd for key, _ in selector.select(0.0 if gone else min(60.0, deadline - time.monotonic()))]
                for fd in ready:
                    data = os.read(fd, 1 << 16)
                    if fd == news:
                        self._pass_on(ssh, data)
                    elif data:
                        self._show(data, streams[fd])
                    else:
                        selector.unregister(fd)
                if gone and not [fd for fd in ready if fd != news]:
                    return
                if "claimed" in self.words:
                    deadline = float("inf") if self.ended is None else min(deadline, time.monotonic() + _UNTIL_GONE)

    def _pass_on(self, ssh: subprocess.Popen[bytes], numbers: bytes) -> None:
        for number in numbers:
            if number not in _SIGNALS:
                continue
            self.stopped = self.stopped or number
            if ssh.stdin is not None:
                with suppress(OSError):
                    os.write(ssh.stdin.fileno(), bytes([number]))
            elif number != signal.SIGINT:  # on a terminal that comes to the command as a character
                ssh.terminate()

    def _show(self, data: bytes, stream: int) -> None:
        """Print what has come, or keep it until the claim."""
        text = self._without_words(data) if stream == 1 else data
        if "claimed" not in self.words:
            if "here" in self.words or stream == 2:
                self.held += text[: _MOST_HELD - len(self.held)]
            return
        early, self.held = bytes(self.held), bytearray()
        for part, fd in ((early, 1 if self.terminal else 2), (text, stream)):
            while part:
                part = part[os.write(fd, part) :]

    def _without_words(self, data: bytes) -> bytes:
        """Take the words out of the output; what may be the beginning of one stays for the next time."""
        begin, data, shown = mark(self.secret).encode(), self._rest + data, b""
        while (at := data.find(begin)) >= 0 and (end := data.find(b"\n", at)) >= 0:
            self.words.append(data[at + len(begin) : end].decode("ascii", "replace").strip())
            shown, data = shown + data[:at], data[end + 1 :]
        if at < 0:
            at = next((len(data) - n for n in range(len(begin) - 1, 0, -1) if data.endswith(begin[:n])), len(data))
        self._rest = data[at:]
        return shown + data[:at]

    def end_there(self) -> bool:
        """End what the broken connection has left on the host; return whether nothing is left."""
        find = f"grep -ls {self.secret} /proc/[0-9]*/environ | cut -d/ -f3"
        script = f'while p=$({find}); [ "$p" ]; do kill $p; sleep 0.2; done'
        for _ in range(_TRIES):
            with Asking(script) as asking:
                asking.ask([self.host])
                if any(said.code == 0 for _, said in asking.all_answers()):
                    return True
            time.sleep(1.0)
        return False


@contextmanager
def _signals() -> Iterator[int]:
    """Give a descriptor from which the numbers of signals are read that would end this process."""
    news, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    handlers = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGCHLD)}
    before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:  # under nohup
                signal.signal(number, lambda *_: None)
        yield news
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(news)
        os.close(wakeup)
