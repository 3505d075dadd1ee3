"""Which of the processes that a poll listed have gone since, as waiters find out without asking the driver.

The second poll of a claim shows whether it was right: the driver is asked about each GPU before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..coordination.directory import SharedDirectory
from ..coordination.entry import is_alive
from ..gpus.devices import Gpu
from ..host import procfs
from .others import HeldByOthers

_MOST = 64  # processes that are looked at


class ListedProcess(NamedTuple):
    """A process that the driver lists on a GPU, and that lives here.

    Attributes:
        uuid: the GPU.
        claim: name of the entry by which it holds the GPU; "" of a process without a claim of it.
    """

    uuid: str
    pid: int
    claim: str = ""

    def has_gone(self, claims: SharedDirectory) -> bool:
        """Return whether it has ended, or given its claim back: what it held of the GPU went before that.

        A process that is exiting has not gone: the kernel may have closed its entry before what the driver keeps.
        """
        if procfs.has_ended(self.pid):
            return True
        return self.claim != "" and not is_alive(claims, self.claim) and not procfs.is_exiting(self.pid)


def listed_here(gpus: Iterable[Gpu], others: HeldByOthers) -> list[ListedProcess]:
    """Return the processes on these GPUs, as of the latest poll, that can be watched from here; of very many only some.

    A pid that means nothing here, such as one of the host in a container, is none of them.

    Args:
        others: by the latest attempt.
    """
    found: list[ListedProcess] = []
    for gpu in gpus:
        by_pid = {claim.pid: claim.name for claim in others.in_the_way(gpu)}
        for process in gpu.processes or ():
            if len(found) < _MOST and not procfs.has_ended(process.pid):
                found.append(ListedProcess(gpu.uuid, process.pid, by_pid.get(process.pid, "")))
    return found
