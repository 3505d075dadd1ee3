"""Who holds which GPU, from its lease, its record and its name."""

from __future__ import annotations

from collections.abc import Collection

from .. import procfs
from ..devices import Gpu, Holder
from ..errors import StateDirError
from . import names
from .files import StateDir
from .host_lock import LockedHost
from .leases import inner_name, lease_name, leases_of, probe, read_record

__all__ = ["recorded_holder", "survey"]


def survey(
    host: LockedHost, gpus: Collection[Gpu], *, inner: bool = False, prefix: str | None = None
) -> dict[str, Holder]:
    """Who holds which of these GPUs' leases: UUID -> holder, for those that are held or cannot be opened.

    A GPU counts as held by a claim inside another one when the outer claim is gone and the inner one lives.

    Args:
        prefix: what stands before UUIDs in names: GPUs that are held by name only are told too. None: they are not.
    """
    held: dict[str, Holder] = {}
    host.leases.names_of_host = leases_of(gpu.uuid for gpu in gpus)
    for gpu in gpus:
        files = [inner_name(gpu.uuid)] if inner else [lease_name(gpu.uuid), inner_name(gpu.uuid)]
        for name in files:
            try:
                if probe(host, name):
                    # Of a file with two names it is not known whose GPU its holder has claimed.
                    held[gpu.uuid] = Holder() if host.leases.twin(name) else recorded_holder(host.leases, name)
                    break
            except StateDirError as err:
                held[gpu.uuid] = Holder(closed=str(err))
    if prefix is not None:
        rest = [gpu.uuid for gpu in gpus if gpu.uuid not in held]
        held.update(dict.fromkeys(names.held_among(rest, prefix, inner=inner), Holder(elsewhere=True)))
    return held


def recorded_holder(directory: StateDir, *names: str) -> Holder:
    """Whom the first readable of these lease files names, whether or not it still holds it; that needs no lock."""
    record = next(filter(None, (read_record(directory, name) for name in names)), None)
    if record is None:
        return Holder()
    return Holder(
        record.pid,
        record.user,
        record.job,
        record.command,
        record.since,
        record.start,
        place=procfs.place_of(record.pidns),
        until=record.until,
    )
