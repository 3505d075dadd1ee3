"""What a claim holds, and who holds what on this host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack

from . import procfs
from .coordination.host_lock import LockedHost
from .coordination.leases import Lease, LeaseRecord, inner_name, lease_name, probe, read_record
from .coordination.legacy import LegacyLock
from .devices import Gpu, Holder, HostSnapshot

__all__ = ["Claim", "describe_process", "survey"]


class Claim:
    """Leases held for these GPUs, as the driver showed them in the poll before any placeholder of ours.

    ``explained`` maps UUIDs to processes there that are the outer claim's own; ``token`` is set for claims inside.
    """

    def __init__(
        self,
        gpus: tuple[Gpu, ...],
        leases: list[Lease],
        before: HostSnapshot,
        *,
        token: str,
        inner: bool,
        explained: Mapping[str, Collection[int]],
    ) -> None:
        self.gpus = gpus
        self.leases = leases
        self.before = before
        self.token = token
        self.inner = inner
        self.explained = explained
        self.legacy: LegacyLock | None = None

    def release_legacy(self) -> None:
        """Let the older package look for GPUs again."""
        if self.legacy is not None:
            self.legacy.release()
            self.legacy = None

    def release(self) -> None:
        """Give everything back; safe to call twice."""
        with ExitStack() as steps:  # each step is taken, whatever becomes of the others
            for lease in self.leases:
                steps.callback(lease.release)
            steps.callback(self.release_legacy)


def describe_process(pid: int) -> tuple[str, str] | None:
    """(user, command) of a process, or None where the pid does not resolve here."""
    user = procfs.user_of(pid)
    return None if user is None else (user, procfs.command_of(pid) or "")


def survey(host: LockedHost, gpus: Collection[Gpu], *, inner: bool = False) -> dict[str, Holder]:
    """Who holds which of these GPUs' leases: UUID -> holder, for those that are held.

    A GPU counts as held by a claim inside another one when the outer claim is gone and the inner one lives.
    """
    held: dict[str, Holder] = {}
    for gpu in gpus:
        names = [inner_name(gpu.uuid)] if inner else [lease_name(gpu.uuid), inner_name(gpu.uuid)]
        for name in names:
            if probe(host, name):
                record = read_record(host.leases, name)
                held[gpu.uuid] = Holder() if record is None else _holder(record)
                break
    return held


def _holder(record: LeaseRecord) -> Holder:
    return Holder(record.pid, record.user, record.job, record.command, record.since, record.start)
