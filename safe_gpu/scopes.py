"""Claims inside claims: the outer one by its token, and what a child may not have of its parent.

``SAFE_GPU_SCOPE`` is honoured for the very GPUs whose outer lease is held and whose record carries it. The variable
leaks into places where that claim is not (``qsub -V``, ssh, tmux), so nothing else follows from it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from . import procfs
from .coordination.files import StateDir, state_dir_path
from .coordination.host_lock import LockedHost
from .coordination.leases import LeaseRecord, inner_name, lease_name, probe, read_record
from .devices import Gpu, GpuRequest, GpuVerdict, HostSnapshot
from .errors import NotEnoughGpusError, UnsatisfiableRequestError

__all__ = ["family_may_hold", "judged_inside", "outer_claim", "refuse_what_the_parent_holds", "usable_inside"]


def outer_claim(host: LockedHost, snapshot: HostSnapshot, token: str) -> dict[str, LeaseRecord]:
    """UUID -> record of the living claim with this token; empty where there is none on this host."""
    found = {}
    for gpu in snapshot.gpus:
        name = lease_name(gpu.uuid)
        record = read_record(host.leases, name) if probe(host, name) else None
        if record is not None and record.token == token:
            found[gpu.uuid] = record
    return found


def usable_inside(
    outer: Mapping[str, LeaseRecord], usable: Iterable[Gpu], request: GpuRequest, *, delegate: bool
) -> list[Gpu]:
    """Those of the usable GPUs that the outer claim has.

    Raises:
        UnsatisfiableRequestError: fewer than asked for, or the inner claim wants to delegate in its turn.
    """
    if delegate:
        raise UnsatisfiableRequestError(
            "delegate=True is not possible inside another claim (SAFE_GPU_SCOPE): one level only; claim without it",
            value=True,
        )
    inside = [gpu for gpu in usable if gpu.uuid in outer]
    if len(inside) < request.nb_gpus:
        raise UnsatisfiableRequestError(
            f"{request.nb_gpus} GPUs asked for inside the claim of process {_pid(outer)}, which can give "
            f"{len(inside)} of its {len(outer)}: ask for fewer, or make the outer claim larger",
            value=request.nb_gpus,
        )
    return inside


def judged_inside(outer: Mapping[str, LeaseRecord], verdicts: Iterable[GpuVerdict]) -> tuple[GpuVerdict, ...]:
    """The verdicts, with every GPU that the outer claim does not have put outside."""
    beyond = f"outside the claim of process {_pid(outer)}, inside which this one is made (SAFE_GPU_SCOPE)"
    return tuple(v if v.gpu.uuid in outer else GpuVerdict(v.gpu, "outside", beyond) for v in verdicts)


def _pid(outer: Mapping[str, LeaseRecord]) -> int:
    return next(iter(outer.values())).pid


def family_may_hold(gpus: Iterable[Gpu], *, inner: bool) -> bool:
    """Whether the record of one of these leases names this process or one above it. Records prove nothing, and reading
    them needs no lock."""
    family = {os.getpid(), *procfs.ancestors(os.getpid())}
    with StateDir(state_dir_path()) as root, StateDir("leases", root) as leases:
        names = (inner_name(gpu.uuid) if inner else lease_name(gpu.uuid) for gpu in gpus)
        records = (read_record(leases, name) for name in names)
        return any(record is not None and record.pid in family for record in records)


def refuse_what_the_parent_holds(
    verdicts: Iterable[GpuVerdict], usable: Collection[str], request: GpuRequest, *, inner: bool
) -> None:
    """A child that waits for its parent, which waits for the child, would wait for ever.

    Args:
        verdicts: with holders; usable: UUIDs that the request could ever be given.
        inner: whether the claim is made inside another one already.

    Raises:
        NotEnoughGpusError: without the GPUs of this process and its parents there are too few.
    """
    family = {pid: procfs.start_time(pid) for pid in (os.getpid(), *procfs.ancestors(os.getpid()))}
    all_verdicts = tuple(verdicts)
    held = [
        verdict
        for verdict in all_verdicts
        if verdict.state == "claimed"
        and verdict.pid in family
        and (verdict.holder is None or verdict.holder.start in (None, family[verdict.pid]))
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
