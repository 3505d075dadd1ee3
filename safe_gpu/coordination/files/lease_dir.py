"""The directory of the leases, in which no file may stand in for another."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

from ...errors import StateDirError
from ..state_dir import refusal
from .state_dir import StateDir

HOST_LOCK = "../host.lock"
"""host.lock, from one of these:"""


class LeaseDir(StateDir):
    """The directory of the leases, each of which is a file of its own.

    Everybody may link files of mode 0666, so host.lock or another lease may stand in the place of a lease. It would be
    held always, or whenever the other one is.

    Attributes:
        names_of_host: returns the leases of this host's GPUs, as far as the caller knows them.
    """

    names_of_host: Callable[[], Iterable[str]] = tuple

    def open(self, name: str) -> int | None:
        """Open it as every StateDir does, but refuse a link to host.lock or to another lease too."""
        fd = super().open(name)
        if fd is not None and (other := self.twin(name, os.fstat(fd))):
            os.close(fd)
            raise self.linked(name, other)
        return fd

    def linked(self, name: str, other: str) -> StateDirError:
        """Return why a lease is not used that has a twin."""

        return linked(os.path.join(self.path, name), other)

    def twin(self, name: str, status: os.stat_result | None = None) -> str:
        """Return the name of the lock or of the other lease that is the same file, relative to this directory; "" for
        none."""
        status = status or self.status(name)
        if status is None or status.st_nlink < 2:
            return ""
        for other in (HOST_LOCK, *self.names_of_host()):
            if other != name and (found := self.status(other)) and os.path.samestat(found, status):
                return other
        return ""


def linked(path: str, other: str) -> StateDirError:
    """Return why a lease is not used that is the same file as another one. Its owner need not be who linked it."""
    what = f"{path} is closed: a hard link to {os.path.basename(other)}; who made it is not known"
    return refusal(what, path, errno.EMLINK, "ask root to remove this name")
