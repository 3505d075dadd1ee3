"""Questions to many hosts at once, each a process of ssh."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from .remote_shell import ssh_to

AT_ONCE = 16

SECONDS = 10.0
"""That a host has for its answer, once it is asked."""

_MOST = 8 << 20  # bytes of an answer: a host may write without end

_PART = 1 << 16

_LEAVING = 0.01  # seconds between looks at a process that has closed its output


class Said(NamedTuple):
    """What a host has answered. ``code`` is ssh's exit code: 255 of its own, else the other side's; None: too late."""

    code: int | None
    out: bytes
    err: bytes


class _Question:
    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C here is for us, and no helper of ssh can ask on this terminal
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.out, self.err = bytearray(), bytearray()
        self.parts = {self.process.stdout.fileno(): self.out, self.process.stderr.fileno(): self.err}
        self.deadline = time.monotonic() + SECONDS
        for fd in self.parts:
            os.set_blocking(fd, False)

    def has_ended(self) -> bool:
        """Read what there is; return whether no more will come. A ControlMaster may keep stderr open after that."""
        ended = self.process.poll() is not None
        for fd, part in self.parts.items():
            with suppress(BlockingIOError):
                while len(part) < _MOST and (data := os.read(fd, _PART)):
                    part += data
        too_much = max(len(self.out), len(self.err)) >= _MOST
        return ended or too_much or time.monotonic() >= self.deadline

    def answer(self) -> Said:
        """Return what was said, and end what still runs."""
        code = self.process.poll()
        if code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return Said(code, bytes(self.out), bytes(self.err))


class Asking:
    """Asks hosts, at most 16 at a time, and hands out answers as they come. The end of ``with`` ends the open ones.

    Args:
        script: the line that ``sh`` there runs.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._waiting: deque[str] = deque()
        self._asked: dict[str, _Question] = {}

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *exc: object) -> None:
        for question in self._asked.values():
            question.answer()

    def ask(self, hosts: Iterable[str]) -> None:
        """Ask these, as soon as others have answered."""
        self._waiting.extend(hosts)
        self._start()

    def answers(self, timeout: float | None = None) -> dict[str, Said]:
        """Return the answers that have come, after at most that many seconds; none in time, or none asked, is empty."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            ended = [host for host, question in self._asked.items() if question.has_ended()]
            found = {host: self._asked.pop(host).answer() for host in ended}
            self._start()
            if found or time.monotonic() >= end or (not self._asked and timeout is None):
                return found
            self._wait(end)

    def all_answers(self) -> Iterator[tuple[str, Said]]:
        """Yield each answer once it has come."""
        while found := self.answers():
            yield from found.items()

    def _start(self) -> None:
        while self._waiting and len(self._asked) < AT_ONCE:
            host = self._waiting.popleft()
            self._asked[host] = _Question(ssh_to(host, self._script))

    def _wait(self, end: float) -> None:
        """Return when something has been written or ended, or a deadline has come."""
        until = min([end, *(question.deadline for question in self._asked.values())])
        with selectors.DefaultSelector() as selector:
            for question in self._asked.values():
                for fd in question.parts:
                    selector.register(fd, selectors.EVENT_READ)
            if selector.select(max(0.0, until - time.monotonic())):
                time.sleep(_LEAVING)  # a stream at its end is always ready, some time before the process has ended
