"""What becomes of an open descriptor when the program forks, executes another or closes what it did not open."""

import os

from ...host import procfs
from ..held import file_of


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
