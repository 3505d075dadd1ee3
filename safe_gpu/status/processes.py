"""What /proc says of the processes that have claims, and of those that the driver lists."""

import os
from collections.abc import Collection, Iterable, Mapping
from functools import cache, cached_property

from ..coordination.entry import Entry
from ..coordination.holders import holder_of, keepers_of, lives_here
from ..gpus.devices import GpuProcess, Holder
from ..host import procfs
from ..wording.text import left_behind


class ProcessTable:
    """What /proc says of processes. Each is read once, however many entries there are.

    Args:
        entries: of which processes are looked for.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = list(entries)
        self.stopped: dict[int | bytes, bool] = {}
        self.describe = cache(procfs.describe_process)
        self.ancestors = cache(procfs.ancestors)
        self.family_of = cache(procfs.family_of)

    def is_stopped(self, pid: int) -> bool:
        """As :func:`~safe_gpu.host.procfs.is_stopped`."""
        return procfs.is_stopped(pid, known=self.stopped)

    @cached_property
    def keepers(self) -> Mapping[str, list[int]]:
        """As of :func:`~safe_gpu.coordination.holders.keepers_of`. The first query reads all of /proc."""
        return keepers_of(self._entries)

    def surviving_process_of(self, entry: Entry) -> int | None:
        """As :func:`~safe_gpu.coordination.holders.surviving_process_of`."""
        if os.geteuid() not in (0, entry.uid) or entry.name not in self.keepers:
            return None
        first, *_ = self.keepers[entry.name]
        return first

    def pid_of(self, entry: Entry) -> int | None:
        """Return the process that has an entry, in this PID namespace; None where it cannot be seen."""
        if lives_here(entry):
            return entry.pid
        return self.surviving_process_of(entry)

    def holder_of(self, entry: Entry) -> Holder:
        """Return who has an entry, with a process of this PID namespace or none; a note says what is unusual."""
        holder = holder_of(entry, self.surviving_process_of)
        note = ""
        if holder.namespace:
            surviving = self.surviving_process_of(entry)
            note = place(holder.namespace, entry, surviving)
            holder = holder._replace(pid=surviving, namespace="")
        elif holder.left_by is not None:
            is_reused = not procfs.has_ended(holder.left_by)
            note = left_behind(holder.pid, holder.left_by, reused=is_reused)
        stopped = holder.pid is not None and self.is_stopped(holder.pid)
        return holder._replace(left_by=None, stopped=stopped, note=note)

    def described(self, process: GpuProcess) -> tuple[str, str] | None:
        """Return (user, command) of a process that the driver lists; None if it cannot be seen here."""
        if process.elsewhere:
            return None
        return self.describe(process.pid)

    def is_of(self, process: GpuProcess, claims: Iterable[Holder]) -> bool:
        """Return whether a process is that of one of the claims, or a descendant of it."""
        if process.elsewhere:
            return False
        family = (process.pid, *self.ancestors(process.pid))
        return any(claim.pid in family for claim in claims)

    def may_be_of(self, process: GpuProcess, claims: Collection[Holder]) -> bool:
        """Return whether a process may belong to one of the claims: a descendant, one of its user, one in a container,
        or an unknown one."""
        described = self.described(process)
        if described is None or self.family_of(process.pid) is None:
            return True
        user, _ = described
        if any(claim.uid < 0 or claim.user == user for claim in claims):
            return True
        return self.is_of(process, claims)


def place(namespace: str, entry: Entry, pid: int | None) -> str:
    """Return where the process of an entry is that is in another PID namespace.

    Args:
        pid: its number here; None if it cannot be seen.
    """
    place = f"{namespace}, as process {entry.pid} there"
    if pid is None:
        place += ", which cannot be seen from here"
    return place
