"""An entry of this process: made under host.lock, and kept until it is released."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from ..host.locks import Held
from .directory import BorrowedDirectory
from .entries import Entries
from .entry import make_entry
from .host_lock import Host


class OwnEntry:
    """An entry of this process, from when it is made. The state directory is kept from cleaners as long.

    Args:
        host: whose host.lock is held.
        entries: the claims or the queue of that host.
        number: :attr:`~safe_gpu.coordination.entries.Entries.next_number`, or that of a place that was kept.
        content: what it says, see :class:`~safe_gpu.coordination.entry.Entry`.
        by_children: whether forked children keep it: that of a claim they do, since they may be using the GPUs.

    Attributes:
        name, number: of its file.
        file: device and inode of that.

    Raises:
        StateDirError: it cannot be made (no space), or others would not count it.
    """

    def __init__(
        self, host: Host, entries: Entries, number: int, content: Mapping[str, Any], *, by_children: bool
    ) -> None:
        assert host.directory is not None
        entries.refuse_if_full()
        with ExitStack() as undo:
            self._kept = host.directory.keep_from_cleaners(by_children=by_children)  # the state directory
            undo.callback(self._kept.release)
            self.name, self._lock = make_entry(entries.directory, number, content, by_children=by_children)
            undo.pop_all()
        self.number = number
        self.file = self._lock.file
        self._path = host.path
        self._part = os.path.basename(entries.directory.path)

    @property
    def is_locked(self) -> bool:
        """Whether it is still locked here. A program that closes descriptors that it did not open ends that."""
        return self._lock.fd >= 0

    @property
    def descriptors(self) -> list[Held]:
        """What a command must have that this process becomes."""
        return [self._lock, self._kept]

    def release(self) -> None:
        """Remove it, and give it back; safe to call twice. A forked child only closes its copy."""
        try:
            self._lock.release(self._remove)
        finally:
            self._kept.release()

    def _remove(self) -> None:
        state_dir = BorrowedDirectory(self._path, self._kept.fd)
        self.before_removal(state_dir)
        with suppress(OSError):  # no file of this name exists elsewhere, whatever the owner makes of the directory
            os.unlink(f"{self._part}/{self.name}", dir_fd=state_dir.fd)

    def before_removal(self, state_dir: BorrowedDirectory) -> None:
        """Do what is to be done first, in the process that made it. Nothing here."""
