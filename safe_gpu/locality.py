"""CPUs and memory next to GPUs, for whoever asks after the claim: a worker, a rank, a person at the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import owner
from .drivers import opened_driver
from .errors import GPUAffinityError

if TYPE_CHECKING:
    from .affinity.binding import BindingReport
    from .affinity.options import AffinityOptions
    from .devices import Gpu, HostSnapshot
    from .drivers.base import Driver

__all__ = ["affinity_text", "bind", "bind_rank", "placement_text"]

_Gpus = int | str | Iterable[int | str]


def bind(
    gpus: _Gpus | None = None,
    *,
    mode: str | AffinityOptions = "node",
    memory: str | None = None,
    strict: bool = True,
) -> BindingReport:
    """Bind all threads of this process next to some GPUs; in a DataLoader's ``worker_init_fn`` it repeats the claim's.

    Starts from the mask before any earlier binding, so a second call is no narrower than the first.

    Args:
        gpus: indices or UUIDs, as nvidia-smi shows them; None: what this process claimed, or the process that it was
            forked from, else what CUDA_VISIBLE_DEVICES shows.
        mode: as ``affinity`` of a claim. memory: None, "preferred" or "bind"; a refused policy is only reported.
        strict: False puts into the report what would raise.

    Raises:
        GPUAffinityError: the CPUs cannot be planned or bound. NoDriverError, UnsatisfiableRequestError: the GPUs cannot
            be found out. With ``strict=False`` none of these.
    """
    return _bind(gpus, mode, memory, strict, rank=None)


def bind_rank(gpus: _Gpus | None, *, mode: str, memory: str | None) -> BindingReport:
    """:func:`bind` for one rank under a launcher: of several visible GPUs, next to the one with its local rank."""
    from .schedulers import current

    return _bind(gpus, mode, memory, True, rank=current(os.environ).local_rank if gpus is None else None)


def _bind(
    gpus: _Gpus | None, mode: str | AffinityOptions, memory: str | None, strict: bool, *, rank: int | None
) -> BindingReport:
    from .affinity.binding import BindingReport, PartReport
    from .affinity.options import parse_options
    from .affinity.shares import bind_near
    from .errors import SafeGpuError

    try:
        options = parse_options(mode, memory)
        with opened_driver() as driver:
            chosen = _named(gpus, driver.snapshot())
            if rank is not None and rank < len(chosen):
                chosen = chosen[rank : rank + 1]
            return bind_near(chosen, driver, options=options, memory=memory, strict=strict)
    except SafeGpuError as err:
        if strict:
            raise
        now = frozenset(os.sched_getaffinity(0))
        return BindingReport(now, PartReport(refused=(str(err),)), memory_mode=memory)


def _named(gpus: _Gpus | None, snapshot: HostSnapshot) -> list[Gpu]:
    if gpus is None:
        claimed = owner.latest_gpus()
        return list(claimed) if claimed else _visible(snapshot)
    from .request import names_device, parse_request

    names = parse_request(1, only=gpus).only
    found = [gpu for gpu in snapshot.gpus if any(names_device(name, gpu) for name in names)]
    missing = [name for name in names if not any(names_device(name, gpu) for gpu in found)]
    if missing or not found:
        raise GPUAffinityError(
            f"this host has no GPU {', '.join(missing) or gpus!r}: it has "
            f"{', '.join(gpu.label for gpu in snapshot.gpus) or 'none'}"
        )
    return found


def _visible(snapshot: HostSnapshot) -> list[Gpu]:
    from .affinity.gpu_affinity import visible_indices

    indices = visible_indices(snapshot, os.environ.get("CUDA_VISIBLE_DEVICES"))
    by_index = {gpu.index: gpu for gpu in snapshot.physical}
    return [by_index[index] for index in indices]


def affinity_text(
    *,
    mode: str,
    scope: str,
    multithreading: str,
    balanced: bool,
    min_physical_cores: int,
    max_physical_cores: int | None,
    allowed: str | None,
    as_json: bool,
) -> str:
    """The CPUs of each GPU of the host, as a table or as JSON.

    ``allowed`` is a CPU list; None is this process's mask, or every CPU of a simulated host.
    """
    from .affinity.cpulist import parse_cpulist
    from .affinity.describe import affinity_json, affinity_table
    from .affinity.options import AffinityOptions
    from .affinity.policies import plan
    from .affinity.topology import HostTopology

    options = AffinityOptions(mode, scope, multithreading, balanced, min_physical_cores, max_physical_cores)
    with opened_driver() as driver:
        topology = HostTopology.from_host(None, driver)
        usable = _usable(driver) if allowed is None else parse_cpulist(allowed)
    if allowed is not None and not usable:
        raise GPUAffinityError(f"--allowed={allowed} names no CPU: write a list such as 0-15,128-143")
    shares = plan(
        topology,
        mode=mode,
        scope=scope,
        multithreading=multithreading,
        balanced=balanced,
        min_physical_cores=min_physical_cores,
        max_physical_cores=max_physical_cores,
        allowed=usable,
    )
    if as_json:
        return _json(affinity_json(topology, options, shares))
    return affinity_table(topology, options, shares)


def _usable(driver: Driver) -> frozenset[int] | None:
    """This process's mask, where the topology is this host's."""
    from .affinity.binding import original_mask
    from .affinity.near import fsroot_or_default

    foreign = fsroot_or_default(None) != "/" or driver.host_topology() is not None
    return None if foreign else original_mask()


def placement_text(pid: int, *, as_json: bool) -> str:
    """Where a process, its threads and its children really run."""
    from .affinity.placements import placement

    report = placement(pid)
    if not as_json:
        return str(report)
    return _json(report.as_dict())


def _json(value: dict[str, Any]) -> str:
    import json

    return json.dumps(value, indent=2, default=sorted)
