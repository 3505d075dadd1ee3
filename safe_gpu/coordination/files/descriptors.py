"""What becomes of an open descriptor when the program forks, executes another or closes what it did not open."""

import os

from ...host import procfs


def survive_exec(fd: int) -> int:
    """Move a descriptor out of the way of shell redirections and let it survive exec(2); returns the new one.

    To 500 or above, or as high as RLIMIT_NOFILE allows, so that a script's ``exec 3>`` does no harm.
    """
    import fcntl

    soft = os.sysconf("SC_OPEN_MAX")  # -1 where there is no limit
    floor = 500 if soft < 0 or soft > 564 else max(soft - 64, soft // 2, 3)
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD, floor)
    except OSError:
        os.set_inheritable(fd, True)  # no room up there: it stays where it is
        return fd
    os.close(fd)
    return moved


def file_of(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of what a descriptor has open; None where it is closed.

    A program may close what it did not open, as daemons do. Then the number is soon that of a file of its own.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class ForkGuard:
    """Descriptors whose locks must not live on in a forked child: they are closed there.

    Leases are not among them: a child that outlives its parent keeps the parent's GPUs, since it may be using them.
    """

    def __init__(self) -> None:
        self._fds: dict[int, tuple[int, int] | None] = {}
        self._registered = False

    def add(self, fd: int) -> None:
        """Close this descriptor in children forked from now on."""
        if not self._registered:
            os.register_at_fork(after_in_child=self._close_all)
            self._registered = True
        self._fds[fd] = file_of(fd)

    def discard(self, fd: int) -> bool:
        """Forget a descriptor. Whether it is still the caller's, to unlock and close: neither in a forked child nor
        where the program has closed it."""
        file = self._fds.pop(fd, None)
        return file is not None and file == file_of(fd)

    def __contains__(self, fd: int) -> bool:
        file = self._fds.get(fd)
        return file is not None and file == file_of(fd)

    def _close_all(self) -> None:
        for fd in list(self._fds):
            if self.discard(fd):
                os.close(fd)


fork_guard = procfs.lasting("fork_guard", ForkGuard())
