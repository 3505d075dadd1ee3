"""Questions to many hosts at once, each a process of ssh."""

import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from queue import SimpleQueue
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryFile
from threading import Semaphore, Thread
from typing import NamedTuple

from .remote_shell import ssh_to

AT_ONCE = 16

SECONDS = 10.0
"""That a host has for its answer, once it is asked."""

TOO_LATE = 124  # what timeout(1) ends with


class Said(NamedTuple):
    """What a host has answered. ``code`` is ssh's exit code: 255 of its own, else the other side's."""

    code: int
    out: bytes
    err: bytes


def ask(ssh: Sequence[str]) -> Said:
    """Return what a host says to this command of ssh.

    ssh has a session of its own, so that no helper of it can ask on this terminal; timeout(1) ends it also where this
    process has ended.
    """
    try:
        with TemporaryFile() as err:  # a ControlMaster that ssh leaves behind would keep a pipe open
            done = subprocess.run(
                ["timeout", str(SECONDS), *ssh], stdin=DEVNULL, stdout=PIPE, stderr=err, start_new_session=True
            )
            err.seek(0)
            return Said(done.returncode, done.stdout, err.read())
    except OSError as error:
        return Said(255, b"", str(error).encode())


def answers(hosts: Collection[str], script: str, interval: float | None = None) -> Iterator[tuple[str, Said]]:
    """Yield what each host says, as it comes; with an interval again and again, that long after its last answer."""
    slots, news = Semaphore(AT_ONCE), SimpleQueue[tuple[str, Said]]()

    def follow(host: str, ssh: Sequence[str]) -> None:
        while True:
            with slots:
                news.put((host, ask(ssh)))
            if interval is None:
                return
            time.sleep(interval)

    for host in hosts:
        Thread(target=follow, args=(host, ssh_to(host, script)), daemon=True).start()
    for _ in hosts if interval is None else repeat(None):
        yield news.get()
