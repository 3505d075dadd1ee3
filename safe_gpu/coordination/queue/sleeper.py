"""A thread that sleeps on one lock: flock(2) knows no deadline, and a thread can be left behind."""

import os

from ..files.descriptors import fork_guard
from ..locks.flock import unlock_file


class Sleeper:
    """Waits in a daemon thread for one lock: flock(2) knows no deadline, and a thread can be left behind.

    The next sleeper on that lock finds the one that was left behind, so that there is never more than one for each.
    """

    def __init__(self, key: tuple[int, int, int], fd: int) -> None:
        import threading

        self.key = key
        # Not an Event: of two signals in a row the second may come while Event.wait() takes its lock back, and then it
        # raises an error of its own.
        self.sleeps = threading.Lock()
        self.sleeps.acquire()
        fork_guard.add(fd)
        try:
            threading.Thread(target=self._run, args=(fd,), name="safe_gpu-waiter", daemon=True).start()
        except RuntimeError:
            fork_guard.discard(fd)
            os.close(fd)
            raise
        sleepers[key] = self

    def wait(self, seconds: float) -> bool:
        """Return whether the lock was given back within that time. Several threads may wait."""
        if not self.sleeps.acquire(timeout=seconds):
            return False
        self.sleeps.release()
        return True

    def _run(self, fd: int) -> None:
        import fcntl

        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if fd in fork_guard:
                unlock_file(fd)
        except OSError:
            pass  # the waiter looks again
        finally:
            if fork_guard.discard(fd):
                os.close(fd)
            self.sleeps.release()
            sleepers.pop(self.key, None)


sleepers: dict[tuple[int, int, int], Sleeper] = {}
"""Process, device and inode -> who sleeps on that ticket."""
