"""A descriptor that this process holds something by: the lock of an entry, a door, a directory.

The kernel gives back what is held with the last copy of the descriptor. So a copy in a forked child counts: the entry
of a claim is kept there, since the child may be using the GPUs, and everything else is closed.
"""

import fcntl
import os
from collections.abc import Callable, Iterable

from . import procfs

_closed_in_children: "set[Held]" = procfs.lasting("closed_in_children", set())


class Held:
    """An open descriptor, until :meth:`release`, or until the program closes it as daemons do.

    Args:
        fd: belongs to this object from now on.
        file: device and inode of what is open, if they are known.
        by_children: whether forked children keep their copy.
        unlock: called with the descriptor before it is closed. A child that was forked meanwhile may still have a copy
            of it.

    Attributes:
        file: device and inode of what is open.
    """

    def __init__(
        self,
        fd: int,
        *,
        file: tuple[int, int] | None = None,
        by_children: bool = False,
        unlock: Callable[[int], None] | None = None,
    ) -> None:
        self._fd, self.file, self._owner, self._unlock = fd, file or file_of(fd), _this_process[0], unlock
        if not by_children:
            _closed_in_children.add(self)

    @property
    def fd(self) -> int:
        """The descriptor; -1 once it was closed, by :meth:`release` or by the program, whose number it may be now."""
        return self._fd if self._fd >= 0 and file_of(self._fd) == self.file else -1

    def release(self, first: Callable[[], object] | None = None) -> None:
        """Give it back; safe to call twice. A forked child only closes its copy.

        Args:
            first: called before, if this process holds it.
        """
        fd, self._fd = self.fd, -1
        _closed_in_children.discard(self)
        if fd < 0:
            return
        # Asked of the kernel, which knows of children that were not forked by Python.
        is_ours = (first or self._unlock) and os.getpid() == self._owner
        try:
            if first and is_ours:
                first()
        finally:
            try:
                if self._unlock and is_ours:
                    self._unlock(fd)
            finally:
                os.close(fd)


_this_process = [os.getpid()]


def close_in_child() -> None:
    """Close what forked children do not keep; called in the child."""
    _this_process[0] = os.getpid()
    for held in list(_closed_in_children):
        held.release()


os.register_at_fork(after_in_child=close_in_child)


def keep_across_exec(several: Iterable[Held]) -> None:
    """Move descriptors out of the way of shell redirections, in their order, and let them survive exec(2).

    To 500 and above, or as high as RLIMIT_NOFILE allows, so that a script's ``exec 3>`` does no harm.
    """
    soft = os.sysconf("SC_OPEN_MAX")  # -1 where there is no limit
    floor = 500 if soft < 0 or soft > 564 else max(soft - 64, soft // 2, 3)
    there = [held for held in several if held.fd >= 0]
    moved: list[int] = []
    try:
        for held in there:  # none is closed before the last is moved, or a later one could get a lower number
            moved.append(fcntl.fcntl(held.fd, fcntl.F_DUPFD, floor))
    except OSError:
        for fd in moved:
            os.close(fd)
        for held in there:
            os.set_inheritable(held.fd, True)  # no room up there: they stay where they are
        return
    for held, fd in zip(there, moved, strict=True):
        os.close(held._fd)
        held._fd = fd


def file_of(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of what a descriptor has open; None where it is closed.

    A program may close what it did not open, as daemons do. Then the number is soon that of a file of its own.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino
