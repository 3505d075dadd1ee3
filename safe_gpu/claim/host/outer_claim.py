"""The claim inside which this process claims, what this takes of its GPUs, and whether it still has them."""

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...coordination import socket_names as names
from ...coordination.leases.file_names import inner_name, lease_name
from ...coordination.leases.lease import may_be_held
from ...coordination.leases.record import LeaseRecord, read_record
from ...gpus.devices import Gpu, GpuVerdict
from ...host import procfs

if TYPE_CHECKING:
    from ...coordination.locks.host_lock import LockedHost


class OuterClaim(NamedTuple):
    """The claim around this one, and what this one takes of its GPUs; false if there is no such claim.

    Attributes:
        gpus: UUID -> its record of the GPU.
        by_name: whether it was found by its names, else by its leases.
        listed: whether the kernel lists the names of this host.
        known: False if others have too many locks or sockets for the kernel's tables to be read to their end.
    """

    gpus: Mapping[str, LeaseRecord] = {}
    by_name: bool = False
    listed: bool = True
    known: bool = True
    prefix: str = ""

    def __bool__(self) -> bool:
        return bool(self.gpus)

    def held(self, host: "LockedHost") -> "OuterClaim":
        """Return it with the GPUs that it may still have. If it was found by its names, it is asked for again later."""
        if self.by_name:
            return self
        held = {
            uuid: one
            for uuid, one in self.gpus.items()
            if read_record(host.leases, lease_name(uuid)) == one and may_be_held(host, lease_name(uuid))
        }
        return self._replace(gpus=held)

    def still_has(self, gpus: "Collection[Gpu]", token: str) -> bool:
        """Return whether it has these GPUs, whose inner names are ours, and this token.

        Under host.lock its names were asked for, and could be those of another one by then.
        """
        if not self or not self.by_name:
            return True
        from ...coordination.name_table import read_names
        from ...coordination.scope import named_in_scope

        uuids = frozenset(gpu.uuid for gpu in gpus)
        return named_in_scope(read_names(), uuids, token, self.prefix) == uuids

    def stem(self, uuid: str) -> str:
        """Return the name of a GPU in tickets of requests that compete with this one."""
        return f"{uuid}.inner" if self else uuid

    def lease_name(self, uuid: str) -> str:
        """Return the name of the lease that a request takes for a GPU; a claim that shares it locks that lease
        shared."""
        return inner_name(uuid) if self else lease_name(uuid)

    def is_named(self, uuid: str) -> bool:
        """Return whether it may have the name of a GPU.

        Raises:
            OSError: there are no sockets here.
        """
        return names.is_held(names.outer_of(uuid, self.prefix))


def end_of_outer(outer: OuterClaim) -> float | None:
    """Return when the outer claim will probably end, in Unix seconds; None if that is not known or there is none."""
    return next((record.until for record in outer.gpus.values() if record.until is not None), None)


def pids_of_outer(record: LeaseRecord) -> tuple[int, ...]:
    """Return the processes that are the outer claim's own: who inherited its token has them for parents."""
    return (record.pid,) if record.pid and record.here else tuple(procfs.ancestors(os.getpid()))


def judged_inside(outer: OuterClaim, verdicts: Iterable[GpuVerdict]) -> tuple[GpuVerdict, ...]:
    """Return the verdicts, in which every GPU that the outer claim does not hold has the state ``outside``."""
    beyond = f"outside {owner_of_outer(outer)}, inside which this one is made (SAFE_GPU_SCOPE)"
    return tuple(v if v.gpu.uuid in outer.gpus else GpuVerdict(v.gpu, "outside", beyond) for v in verdicts)


def owner_of_outer(outer: OuterClaim) -> str:
    record = next(iter(outer.gpus.values()))
    namespace = procfs.namespace_text(record.pidns)
    return f"the claim of process {record.pid or '?'}{namespace and f' {namespace}'}"
