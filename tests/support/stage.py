"""Where processes race for GPUs, and who watches that no GPU has two."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from safe_gpu.host import procfs

UNITS = 8  # flocks of a GPU
DYING = 1.0  # seconds that a process takes to close its descriptors at most


class Referee:
    """Notes who has which GPU, in files of its own, and knows nothing of claims.

    There are eight flocks for each GPU, of which a claim takes as many as it has of the GPU, one for a claim inside
    another, and a counter that is read at the begin of a whole claim and written at its end.

    Args:
        directory: where its files are, and the log of what is noted.
        capacity: of each GPU, in the unit of shares.
    """

    def __init__(self, directory: Path, capacity: int) -> None:
        self.directory, self.capacity = directory, capacity

    def note(self, *words: object) -> None:
        fd = os.open(self.directory / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
        os.close(fd)

    def begin(self, uuid: str, share: int | None) -> list[int]:
        """Take what a claim has of a GPU. Whoever else holds it has to be dying just now."""
        number = UNITS if share is None else share * UNITS // self.capacity
        until = time.monotonic() + DYING
        while True:
            locks = [fd for unit in range(UNITS) if (fd := self.lock(uuid, unit))]
            inside = self.is_held(uuid, "inside")
            if not inside and len(locks) >= number:
                self.end(locks[number:])
                return locks[:number]
            self.end(locks)
            if time.monotonic() > until or self.lives(
                uuid, *(["inside"] if inside else []), *range(UNITS * (not share))
            ):
                self.note("DOUBLE", uuid, share, os.getpid())
                return []
            time.sleep(0.001)

    def lock(self, uuid: str, what: object) -> int:
        """Take one lock, and note in it whose it is; 0 where another process has it."""
        fd = self._open(uuid, what)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return 0
        os.pwrite(fd, b"%20d" % os.getpid(), 0)
        return fd

    def is_held(self, uuid: str, what: object) -> bool:
        """Return whether a lock is held; several may ask at once."""
        fd = self._open(uuid, what)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def lives(self, uuid: str, *whats: object) -> bool:
        """Return whether a process that has one of these locks lives."""
        for what in whats:
            pid = int((self.directory / f"{uuid}.{what}").read_bytes() or 0)
            if pid not in (0, os.getpid()) and not procfs.is_exiting(pid) and not procfs.has_ended(pid):
                return True
        return False

    def _open(self, uuid: str, what: object) -> int:
        fd = os.open(self.directory / f"{uuid}.{what}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with suppress(PermissionError):  # another user's, who has opened it to all
            os.fchmod(fd, 0o666)
        return fd

    def end(self, locks: list[int]) -> None:
        for fd in locks:
            os.pwrite(fd, b"%20d" % 0, 0)
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def count(self, uuid: str, new: int | None = None) -> int:
        """Return the counter of a GPU, or write it, so that a process may be killed at any time."""
        fd = self._open(uuid, "count")
        try:
            if new is not None:
                os.pwrite(fd, b"%20d" % new, 0)
            return int(os.pread(fd, 20, 0) or 0)
        finally:
            os.close(fd)


def words(directory: Path) -> list[str]:
    log = directory / "log"
    return [line.partition(" ")[0] for line in log.read_text().split("\n")[:-1]] if log.exists() else []
