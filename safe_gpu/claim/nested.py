"""Claims inside claims: find the outer claim by its token, and refuse waits of a child for its own parent.

The token in ``SAFE_GPU_SCOPE`` is valid only for GPUs whose lease is held by a process of this user and whose record
contains the hash of that token. The variable also reaches processes outside that claim (``qsub -V``, ssh, tmux), so it
has no other meaning.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from .. import procfs
from ..coordination import socket_names as names
from ..coordination.files import StateDir, state_dir_path
from ..coordination.holders import leases_of_this_user, socket_of_this_user
from ..coordination.leases import LeaseRecord, inner_name, lease_name, may_be_held, read_record
from ..coordination.locks import LockedHost
from ..coordination.signals import DeferredSignals
from ..devices import Gpu, GpuRequest, GpuVerdict, HostSnapshot
from ..errors import NotEnoughGpusError, UnsatisfiableRequestError


def outer_claim(host: LockedHost, snapshot: HostSnapshot, token: str) -> dict[str, LeaseRecord]:
    """UUID -> record of this user's claim with this token, for each lease that it holds; empty if there is none.

    If a lease file is not in this state directory, the name of the claim decides. Its record is then that of another
    GPU of the claim, or has pid 0.
    """
    secret = names.digest(token)
    carriers = {}
    for gpu in snapshot.gpus:
        name = lease_name(gpu.uuid)
        record = read_record(host.leases, name) if may_be_held(host, name) else None
        if record is not None and record.token == secret:
            carriers[name] = gpu.uuid, record
    ours = leases_of_this_user(host.leases, {name: record.uid for name, (_, record) in carriers.items()})
    found = {uuid: record for name, (uuid, record) in carriers.items() if name in ours}
    if not found or any(uuid not in found for record in found.values() for uuid in record.gpus):
        sockets = names.sockets()
        record = next(iter(found.values()), _UNKNOWN)
        for gpu in snapshot.gpus:
            inode = sockets.get(names.scope_of(gpu.uuid, token, snapshot.names))
            if inode is not None and gpu.uuid not in found and socket_of_this_user(inode):
                found[gpu.uuid] = record
    return found


_UNKNOWN = LeaseRecord(0, None, -1, "", "", None, None, (), 0.0, "")


def end_of_outer(outer: Mapping[str, LeaseRecord]) -> float | None:
    """When the outer claim will probably end, in Unix seconds; None if that is not known or there is none."""
    return next((record.until for record in outer.values() if record.until is not None), None)


def pids_of_outer(record: LeaseRecord) -> tuple[int, ...]:
    """The processes that are the outer claim's own: who inherited its token has them for parents."""
    return (record.pid,) if record.pid and record.here else tuple(procfs.ancestors(os.getpid()))


def check_possible_inside(
    outer: Mapping[str, LeaseRecord], usable: Collection[Gpu], request: GpuRequest, *, delegate: bool
) -> None:
    """Refuse a request that the outer claim can never satisfy.

    Args:
        usable: the GPUs of the outer claim that the request could ever get.
        delegate: whether the inner claim asks to delegate too.

    Raises:
        UnsatisfiableRequestError: too few usable GPUs, or ``delegate``.
    """
    if delegate:
        raise UnsatisfiableRequestError(
            "delegate=True is not possible inside another claim (SAFE_GPU_SCOPE): one level only; claim without it",
            value=True,
        )
    if len(usable) < request.nb_gpus:
        raise UnsatisfiableRequestError(
            f"{request.nb_gpus} GPUs asked for inside {_whose(outer)}, which can give "
            f"{len(usable)} of its {len(outer)}: ask for fewer, or make the outer claim larger",
            value=request.nb_gpus,
        )


def judged_inside(outer: Mapping[str, LeaseRecord], verdicts: Iterable[GpuVerdict]) -> tuple[GpuVerdict, ...]:
    """The verdicts, in which every GPU that the outer claim does not hold has the state ``outside``."""
    beyond = f"outside {_whose(outer)}, inside which this one is made (SAFE_GPU_SCOPE)"
    return tuple(v if v.gpu.uuid in outer else GpuVerdict(v.gpu, "outside", beyond) for v in verdicts)


def _whose(outer: Mapping[str, LeaseRecord]) -> str:
    record = next(iter(outer.values()))
    place = procfs.place_of(record.pidns)
    return f"the claim of process {record.pid}{place and f' {place}'}" if record.pid else "the outer claim"


def ancestor_may_hold(gpus: Iterable[Gpu], *, inner: bool) -> bool:
    """Whether the record of one of these leases names this process or one of its ancestors.

    A record alone does not prove that the lease is held. Reading records needs no lock.
    """
    family = {os.getpid(), *procfs.ancestors(os.getpid())}
    with DeferredSignals(), StateDir(state_dir_path()) as root, StateDir("leases", root) as leases:
        files = (inner_name(gpu.uuid) if inner else lease_name(gpu.uuid) for gpu in gpus)
        records = (read_record(leases, name) for name in files)
        return any(record is not None and record.here and record.pid in family for record in records)


def refuse_gpus_of_ancestors(
    verdicts: Iterable[GpuVerdict], usable: Collection[str], request: GpuRequest, *, inner: bool
) -> None:
    """Refuse to wait for GPUs that an ancestor holds: if the ancestor waits for this process, both wait for ever.

    Args:
        verdicts: with the holders that the kernel names: anybody may write a parent of all (process 1) into a record.
        usable: UUIDs that the request could ever get.
        inner: whether the claim is made inside another one.

    Raises:
        NotEnoughGpusError: without the GPUs of this process and its ancestors there are too few.
    """
    family = {pid: procfs.start_time(pid) for pid in (os.getpid(), *procfs.ancestors(os.getpid()))}
    all_verdicts = tuple(verdicts)
    held = [
        verdict
        for verdict in all_verdicts
        if verdict.state == "claimed"
        and verdict.pid in family
        and verdict.holder is not None
        and verdict.holder.start is not None
        and verdict.holder.start == family[verdict.pid]
    ]
    if not held or len(set(usable) - {verdict.gpu.uuid for verdict in held}) >= request.nb_gpus:
        return
    labels = ", ".join(verdict.gpu.label for verdict in held)
    who = "this process itself" if held[0].pid == os.getpid() else f"process {held[0].pid}, a parent of this one,"
    way_out = (
        "claims inside claims go one level deep, so use its GPUs without claiming"
        if inner
        else "claim there with delegate=True (or start this under `safe-gpu run`) so that its children may claim from "
        "it, or use its GPUs without claiming"
    )
    raise NotEnoughGpusError(f"{who} holds GPU {labels}: {way_out}", nb_gpus=request.nb_gpus, verdicts=all_verdicts)
