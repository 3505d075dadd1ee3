"""The process that holds one host's GPUs for a claim across hosts: what it does, whichever engine started it.

It makes the host's claim like any other program on that host, so everyone there sees the leases and, where a context
does no harm, the placeholder. It delegates: the claim's workers, which get its SAFE_GPU_SCOPE, may claim what it holds
once more for themselves, and a claim of theirs keeps a GPU theirs even when the holder dies first. It is not bound to
CPUs itself; it works out where its GPUs' workers belong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..affinity.options import AffinityOptions, parse_options
from ..devices import ComputeMode, Gpu, HostSnapshot
from ..errors import GPUAffinityError, SafeGpuError
from ..visibility import parse
from .cluster import ClusterGpu

if TYPE_CHECKING:
    from ..drivers.base import Driver
    from ..owner import GPUOwner

__all__ = ["Holder", "HostReport", "Wishes", "enter_worker"]


@dataclass(frozen=True)
class Wishes:
    """What a cluster claim asks of every host; the fields are arguments of ``claim_gpus``. Survives pickling.

    ``placeholder_fn`` None is the driver's own, and none at all where a context would keep the workers' out.
    """

    placeholder_fn: Callable[[int], Any] | None = None
    affinity: str | AffinityOptions | None = "node"
    memory: str | None = None
    visible_as: str = "index"
    selection: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HostReport:
    """A host as a holder finds it.

    Attributes:
        name: its own name for itself.
        place: what leases are made in there; two holders with the same place compete for the same GPUs.
        free: how many GPUs the request could take now; -1 where it never can.
    """

    name: str
    place: str
    free: int = 0

    @property
    def rank(self) -> tuple[str, ...]:
        """The host's place in the order of all hosts, the same whichever engine asks."""
        return (self.name, self.place)


class Holder:
    """Holds GPUs of its host from :meth:`claim` to :meth:`release` or the end of its process.

    Errors of safe_gpu are returned, not raised: engines wrap what is raised into something of their own.
    """

    def __init__(self, wishes: Wishes, label: str) -> None:
        self._wishes = wishes
        self._label = label
        self._owner: GPUOwner | None = None

    def report(self, count_for: int = 0) -> HostReport:
        """This host; with ``count_for``, also whether that many GPUs can be had here."""
        import socket

        from ..coordination.files import state_dir_path

        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
        except OSError:
            boot = socket.gethostname()
        place = f"{boot}:{os.path.realpath(state_dir_path())}"
        return HostReport(socket.gethostname(), place, self._free(count_for) if count_for else 0)

    def claim(self, nb_gpus: int, timeout: float | None) -> tuple[ClusterGpu, ...] | SafeGpuError:
        """The host's GPUs, host and node yet to be filled in, or why not."""
        from ..owner import GPUOwner

        wishes = self._wishes
        scope = os.environ.get("SAFE_GPU_SCOPE")
        try:
            with _driver() as driver:
                snapshot = driver.snapshot()
                fence = parse(
                    os.environ.get("CUDA_VISIBLE_DEVICES"),
                    snapshot,
                    device_order=os.environ.get("CUDA_DEVICE_ORDER"),
                )
                owner = GPUOwner(
                    nb_gpus,
                    wishes.placeholder_fn or _placeholder(snapshot),
                    timeout=timeout,
                    affinity=None,
                    visible_as=wishes.visible_as,
                    delegate=True,
                    _command=self._label,
                    **wishes.selection,
                )
                self._owner = owner
                try:
                    places = _near(owner.gpus, driver, wishes)
                except BaseException:
                    self.release()
                    raise
        except SafeGpuError as err:
            return err
        shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        common = {"SAFE_GPU_SCOPE": now} if (now := os.environ.get("SAFE_GPU_SCOPE", "")) != scope else {}
        if shown[0].isdigit():
            common["CUDA_DEVICE_ORDER"] = os.environ["CUDA_DEVICE_ORDER"]
        held = []
        for gpu, name in zip(owner.gpus, shown, strict=True):
            place = places[gpu.uuid]
            held.append(
                ClusterGpu(
                    "",
                    "",
                    gpu.index,
                    gpu.uuid,
                    cpus=frozenset(cpu for core in place.cores for cpu in core),
                    cores=place.cores,
                    numa_node=place.numa_node,
                    environment={"CUDA_VISIBLE_DEVICES": name, **common},
                    inherited_position=fence.uuids.index(gpu.uuid) if fence and gpu.uuid in fence.uuids else None,
                )
            )
        return tuple(sorted(held, key=lambda gpu: (gpu.index, gpu.uuid)))

    def release(self) -> None:
        """Give back what :meth:`claim` took; safe to call at any time."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.release_gpus()

    def ping(self) -> None:
        """Answer."""

    def _free(self, nb_gpus: int) -> int:
        import time

        from ..claims import describe_process, survey
        from ..coordination.host_lock import MINIMUM_PATIENCE, HostLock
        from ..preconditions import boundaries
        from ..request import parse_request
        from ..selection import check_possible, judge

        try:
            request = parse_request(nb_gpus, **self._wishes.selection)
            with _driver() as driver:
                snapshot = driver.snapshot()
                _, fence = boundaries(driver, snapshot, request)
            check_possible(snapshot, request, fence)
            with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
                leased = survey(host, snapshot.gpus, inner=bool(os.environ.get("SAFE_GPU_SCOPE")))
        except SafeGpuError:
            return -1
        verdicts = judge(snapshot, request, leased=leased, fence=fence, describe=describe_process)
        return sum(verdict.free for verdict in verdicts)


def enter_worker(cpus: Iterable[int], numa_node: int | None, memory: str | None) -> str:
    """Move this process, a worker of a claim, next to its GPU; what came of it, in one line.

    Never raises: a worker on the wrong cores is slow, one that does not start is lost.
    """
    from ..affinity.binding import bind_process

    wanted = frozenset(cpus)
    if not wanted and memory is None:
        return "not bound"
    try:
        return str(bind_process(wanted or None, () if numa_node is None else (numa_node,), memory))
    except GPUAffinityError as err:
        return f"not bound: {err}"


@dataclass(frozen=True)
class _Place:
    cores: tuple[tuple[int, ...], ...] = ()
    numa_node: int | None = None


class _driver:
    def __enter__(self) -> Driver:
        from ..drivers import open_driver

        self._driver = open_driver()
        return self._driver

    def __exit__(self, *exc: object) -> None:
        self._driver.close()


def _placeholder(snapshot: HostSnapshot) -> Callable[[int], Any] | None:
    """No context where it would be the only one allowed: the workers come in processes of their own."""
    from ..placeholders import NoPlaceholder

    exclusive = any(gpu.compute_mode == ComputeMode.EXCLUSIVE_PROCESS for gpu in snapshot.gpus)
    return NoPlaceholder() if exclusive else None


def _near(gpus: Sequence[Gpu], driver: Driver, wishes: Wishes) -> dict[str, _Place]:
    """Where the workers of each GPU belong."""
    options = parse_options(wishes.affinity, wishes.memory)
    if options is None and wishes.memory is None:
        return {gpu.uuid: _Place() for gpu in gpus}
    from ..affinity.shares import claim_shares, memory_nodes
    from ..affinity.topology import HostTopology

    indices = list(dict.fromkeys(gpu.index for gpu in gpus))
    try:
        topology = HostTopology.from_host(driver=driver)
        nodes = {index: next(iter(memory_nodes(topology, [index])), None) for index in indices}
        if options is None:
            return {gpu.uuid: _Place(numa_node=nodes[gpu.index]) for gpu in gpus}
        shares = claim_shares(topology, options, indices, os.sched_getaffinity(0)).shares
    except GPUAffinityError:
        if options is not None and options.mode == "node" and wishes.memory is None:  # nice to have, and the default
            return {gpu.uuid: _Place() for gpu in gpus}
        raise
    places = {}
    for gpu in gpus:
        left = set(shares[gpu.index])
        cores = [sorted(core & left) for core in topology.cores if core & left]
        cores += [[cpu] for cpu in left.difference(*cores)]
        places[gpu.uuid] = _Place(tuple(tuple(core) for core in sorted(cores)), nodes[gpu.index])
    return places
