"""The claim inside which this process claims, what this takes of its GPUs, and whether it still has them."""

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...coordination import socket_names as names
from ...coordination.leases.file_names import inner_name, lease_name, slot_name
from ...coordination.leases.lease import may_be_held
from ...coordination.leases.record import LeaseRecord, read_record
from ...coordination.scope_names import outer_name
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
        now = {uuid: (lease_file(uuid, one.slot), one) for uuid, one in self.gpus.items()}
        gpus = {
            uuid: one
            for uuid, (file, one) in now.items()
            if read_record(host.leases, file) == one and may_be_held(host, file)
        }
        return self._replace(gpus=gpus)

    def still_has(self, gpus: "Collection[Gpu]", token: str) -> bool:
        """Return whether it has these GPUs, whose inner names are ours, and this token.

        Under host.lock its names were asked for, and could be those of another one by then.
        """
        if not self or not self.by_name:
            return True
        from ...coordination.name_table import read_names
        from ...coordination.scope import slots_of_scope

        slots = slots_of_scope(read_names(), [gpu.uuid for gpu in gpus], token, self.prefix)
        return slots == {gpu.uuid: self.slot(gpu.uuid) for gpu in gpus}

    def slot(self, uuid: str) -> int | None:
        """Return its slot on a GPU; None if it has the whole GPU, or there is no such claim."""
        return self.gpus[uuid].slot if uuid in self.gpus else None

    def stem(self, uuid: str) -> str:
        """Return the name of a GPU in tickets of requests that compete with this one."""
        slot = self.slot(uuid)
        return uuid + ("" if slot is None else f".share.{slot}") + (".inner" if self else "")

    def lease_name(self, uuid: str) -> str:
        """Return the name of the lease that a request takes for a GPU; a claim that shares it locks that lease
        shared."""
        slot = self.slot(uuid)
        if slot is not None:
            return slot_name(uuid, slot, inner=True)
        return inner_name(uuid) if self else lease_name(uuid)

    def name(self, uuid: str) -> str:
        """Return the name that a request is to take for a GPU."""
        slot = self.slot(uuid)
        if slot is not None:
            return names.slot_of(uuid, slot, self.prefix, inner=True)
        return names.inner_of(uuid, self.prefix) if self else names.name_of(uuid, self.prefix)

    def is_named(self, uuid: str) -> bool:
        """Return whether it may have the name of a GPU, or of the slot in which it shares it.

        Raises:
            OSError: there are no sockets here.
        """
        return names.is_held(outer_name(uuid, self.prefix, self.slot(uuid)))


def lease_file(uuid: str, slot: int | None) -> str:
    return lease_name(uuid) if slot is None else slot_name(uuid, slot)


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
