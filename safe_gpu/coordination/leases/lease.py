"""A lease: a locked file that the kernel holds for as long as the claim lives."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import StateDirError
from ..files.lease_dir import HOST_LOCK
from ..files.state_dir import StateDir, write_all
from ..held import file_of, survive_exec
from ..locks.flock import lock_file, lock_file_shared, unlock_file
from .claim_end import LONGEST, ClaimEnd
from .file_names import INNER_SUFFIX
from .previous_record import PreviousRecord

if TYPE_CHECKING:
    from ..locks.host_lock import LockedHost


class Lease:
    """A lease that this process holds. It ends by :meth:`release`, or with the last copy of its descriptor.

    Attributes:
        shared: others may hold it too, and the record is that of the last one.
        former: what the file said before the first :meth:`write`.
        noted: pid and beginning of this claim, once the history has been told of it.
    """

    def __init__(self, name: str, fd: int, path: str, *, shared: bool = False) -> None:
        self.name = name
        self.fd = fd
        self.path = path
        self.shared = shared
        self.owner = os.getpid()
        self.former = PreviousRecord()
        self.noted: tuple[int, float] | None = None
        self._written = False
        self._began = 0.0  # by the boot clock, which does not jump
        self._file = file_of(fd)

    def write(self, record: bytes) -> None:
        """Say who holds it. What was said of the claim before is kept in ``former``.

        Raises:
            StateDirError: no room, or the write failed.
        """
        if not self._written:
            self._written = True
            self._began = time.clock_gettime(time.CLOCK_BOOTTIME)
            self.former = PreviousRecord.of(self.fd)
        write_all(self.fd, record, self.path)

    def release(self) -> None:
        """Give it back, with its record replaced by the time of its end; safe to call twice.

        In a forked child this only closes the child's copy.
        """
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            if file_of(fd) != self._file:
                return  # the program has closed it, and with it the lock
            try:
                if os.getpid() == self.owner:
                    if self._written and not self.shared:
                        _leave(fd, self._last_words())
                    elif not self.shared:
                        _clear(fd, inner=self.inner)
                    unlock_file(fd)
            finally:
                os.close(fd)

    @property
    def inner(self) -> bool:
        """Whether it is of a claim inside another claim. The history does not tell of those."""
        return self.name.endswith(INNER_SUFFIX)

    def _last_words(self) -> bytes:
        """Return what to leave in the file: how this claim ended, or the one before, if the history knows nothing of
        this."""
        if self.inner:
            return b""

        if self.noted is None:
            return self.former.ending()
        pid, since = self.noted
        ended = round(since + time.clock_gettime(time.CLOCK_BOOTTIME) - self._began, 3)
        return ClaimEnd(pid, since, ended, ended).encode()

    def keep_across_exec(self) -> None:
        """Move the descriptor out of the way of shell redirections and let it survive exec(2).

        To 500 or above, or as high as RLIMIT_NOFILE allows, so that a script's ``exec 3>`` does no harm.
        """
        self.fd = survive_exec(self.fd)


def try_lease(host: LockedHost, name: str, *, shared: bool = False) -> Lease | None:
    """Take one lease without blocking; None where another holds it.

    Args:
        shared: take it beside other shared holders (a host whose only GPU drives the display).

    Raises:
        StateDirError: the file cannot be opened.
    """
    directory = host.leases
    while True:
        fd = directory.open_or_create(name)
        try:
            got = lock_file_shared(fd) if shared else lock_file(fd)
            current = directory.is_current(name, fd)
        except OSError as err:
            os.close(fd)
            path = os.path.join(directory.path, name)
            raise StateDirError(f"{path} cannot be locked ({err.strerror})", path=path, errno=err.errno) from err
        if got and current:
            return Lease(name, fd, os.path.join(directory.path, name), shared=shared)
        if got:
            unlock_file(fd)
        os.close(fd)
        if current:
            return None


def _leave(fd: int, line: bytes) -> None:
    """Replace the content of a lease file whose lock is ours; empty it if there is no room."""
    written = 0
    with suppress(OSError):
        written = os.pwrite(fd, line, 0) if line else 0
    with suppress(OSError):
        os.ftruncate(fd, written)


def _clear(fd: int, *, inner: bool) -> None:
    """Remove the record of a lease whose lock is ours, since it tells everybody what ran there. Its end stays.

    The record of a process that is only exiting stays too, since its memory is still on the GPU, and waiters have to
    know whose.
    """
    former = PreviousRecord.of(fd)
    if former.data:
        record = former.record()
        if record is None or record.of_the_dead:
            line = b"" if inner else former.ending()
            if line != former.data:
                _leave(fd, line)


def clear_record(lease: Lease) -> None:
    """Replace the record that a dead claim left in a lease that is locked shared. host.lock is held."""
    _clear(lease.fd, inner=False)


def is_empty(directory: StateDir, name: str, files: Collection[str] | None = None) -> bool:
    """Return whether a lease file holds no record, or does not exist: then probably nobody holds the lease.

    Records are longer than what a claim leaves when it ends (``records.LONGEST``). ``files`` are the names in the
    directory, if they are known.
    """
    if files is not None and name not in files:
        return True
    try:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_size <= LONGEST
    except OSError:
        return True


def probe(host: LockedHost, name: str) -> bool:
    """Return whether somebody holds this lease. A record that its dead holder left is replaced by when that ended.

    Raises:
        StateDirError: the file cannot be opened, or it is a link to host.lock, or to another lease that is free.
    """
    fd = StateDir.open(host.leases, name)
    if fd is None:
        return False
    try:
        other = host.leases.twin(name, os.fstat(fd))
        if other != HOST_LOCK:
            if not lock_file(fd):
                return True
            if not other:
                _clear(fd, inner=name.endswith(INNER_SUFFIX))
            unlock_file(fd)
        if other:
            raise host.leases.linked(name, other)
        return False
    finally:
        os.close(fd)


def may_be_held(host: LockedHost, name: str) -> bool:
    """Like :func:`probe`, and True where the file cannot be opened."""
    try:
        return probe(host, name)
    except StateDirError:
        return True
