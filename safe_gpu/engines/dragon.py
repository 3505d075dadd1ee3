"""Claims across the nodes of a Dragon runtime.

    from safe_gpu.engines.dragon import claim

    with claim(nodes=2, gpus_per_node=4) as held:
        pool = Pool(policy=held.policies(), processes_per_policy=1, initializer=held.check_worker)

One holder process per node makes the node's claim, as any program there would, and keeps it. What comes back are
Dragon's own Policy objects, for Pool, ProcessGroup and Process, for Python functions, executables and MPI ranks.

Dragon reserves nothing and fails open: a GPU or CPU number that it does not know means all of them, and a process
without a policy sees all GPUs. So policies are checked against what Dragon knows, and ``held.check_worker`` checks,
in the worker, that it got what was promised.

Dragon places by GPU number. Dragon 0.14 counts the lines of ``nvidia-smi -L`` and takes the numbers that its own
CUDA_VISIBLE_DEVICES lists; 0.15 asks ``libcudart.so`` and counts from 0 within that variable. Both are numbers as
nvidia-smi shows them only with CUDA_DEVICE_ORDER=PCI_BUS_ID, which the claim therefore sets in this process, whose
environment Dragon's processes inherit. Where only UUIDs are safe (MIG on, a GPU lost), a claim says so and ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..durations import DEFAULT, DefaultTimeout
from ..errors import GPUAffinityError, HolderLostError, UnsatisfiableRequestError, WrongDeviceError
from .cluster import ClusterGpu
from .dragon_holder import DragonHolder, start_holders
from .holder import Wishes, enter_worker
from .remote import HeldClaim, claim_through, nodes_named

if TYPE_CHECKING:
    from ..affinity.options import AffinityOptions

__all__ = ["DragonClaim", "WorkerCheck", "claim"]


def claim(
    nodes: int | Sequence[str] = 1,
    gpus_per_node: int = 1,
    *,
    timeout: float | str | DefaultTimeout | None = DEFAULT,
    placeholder_fn: Callable[[int], Any] | None = None,
    logger: Any = None,
    affinity: str | AffinityOptions | None = "node",
    memory: str | None = None,
    min_memory: int | str | None = None,
    model: str | None = None,
    exclude: str | int | Iterable[str | int] = (),
    only: str | int | Iterable[str | int] = (),
) -> DragonClaim:
    """Claim GPUs on nodes of the Dragon runtime that this process belongs to: all of them, or none.

    Args:
        nodes: how many, the ones with enough free GPUs first; or which, each by its host name or Dragon's h_uid.
        gpus_per_node: how many on each.
        timeout: one deadline for all nodes, in seconds; 0 does not wait, None waits for ever. Default:
            SAFE_GPU_TIMEOUT, else 300 inside a batch job, else 10. The start of the holders does not count.
        placeholder_fn: what holds each GPU on its node, picklable. Default: a CUDA context, but nothing on a node
            where GPUs are in compute mode EXCLUSIVE_PROCESS: it would keep the workers out.
        logger: is told at INFO what is waited for; default: the logger ``safe_gpu``.
        affinity: the CPUs of the workers, as in ``claim_gpus``; memory: their memory policy, set by ``check_worker``.
        min_memory, model, exclude, only: as in ``claim_gpus``, on every node.

    Raises:
        NotEnoughGpusError: a node has too few free GPUs (ClaimTimeout: until the deadline). The message and the
            attribute ``host`` say which node, ``verdicts`` what is in the way there.
        UnsatisfiableRequestError: there are not so many nodes, one of them can never do it, Dragon sees no GPU there,
            or this program was not started by ``dragon``.
        HolderLostError: Dragon could not start a holder, or it died.
        SafeGpuError: whatever else ``claim_gpus`` raises on a node. Whatever is raised, nothing is held.
    """
    if "DRAGON_MY_PUID" not in os.environ:
        raise UnsatisfiableRequestError("there is no Dragon runtime here: start this program with `dragon PROGRAM`")
    from dragon.native.machine import Node, System

    from ..preconditions import checked

    if logger is None:
        import logging

        logger = logging.getLogger("safe_gpu")
    request, wait, _ = checked(
        gpus_per_node, timeout, affinity, memory, min_memory, model, exclude, only, "index", logger
    )
    selection = {"min_memory": min_memory, "model": model, "exclude": exclude, "only": only}
    wishes = Wishes(placeholder_fn, affinity, memory, "index", selection)
    candidates = _candidates(nodes, [Node(h_uid) for h_uid in System().nodes])
    count = nodes if isinstance(nodes, int) else len(candidates)
    held = claim_through(start_holders(candidates, wishes), count, request.nb_gpus, wait, logger)
    return DragonClaim(held, memory)


class DragonClaim(HeldClaim[DragonHolder]):
    """GPUs on nodes of a Dragon runtime, held from :func:`claim` to :meth:`release`, the end of ``with``, or exit."""

    def __init__(self, held: Mapping[ClusterGpu, DragonHolder], memory: str | None = None) -> None:
        super().__init__(held)
        self._memory = memory
        try:
            self._numbers = {gpu: _dragon_number(gpu, holder.node) for gpu, holder in held.items()}
        except BaseException:
            self.release()
            raise
        _DeviceOrder.enter(self)

    @property
    def check_worker(self) -> WorkerCheck:
        """Checks, in a worker of this claim, that it got what was promised; see :class:`WorkerCheck`."""
        return WorkerCheck(self.gpus, self._memory)

    def find_gpus(self) -> list[tuple[str, int]]:
        """(host name, GPU number) of every GPU that is held, as Dragon's policies want them."""
        return [(gpu.host, self._numbers[gpu]) for gpu in self.gpus]

    def policies(self, processes_per_gpu: int = 1, nprocs: int | None = None) -> list[Any]:
        """A Policy for each of ``nprocs`` workers: for ``Pool(policy=..., processes_per_policy=1)``, or one for each
        ProcessTemplate of a ProcessGroup.

        Each names host, GPU and CPUs. Workers go round the GPUs, as in :meth:`make_policies`.

        Args:
            processes_per_gpu: workers on each GPU, which share its cores.
            nprocs: their number where it is not ``processes_per_gpu`` for every GPU.

        Raises:
            HolderLostError: a node's holder is gone, so its GPUs are no longer held.
            UnsatisfiableRequestError: a number below 1, a claim that was released, CPUs or GPUs unknown to Dragon.
        """
        return self.make_policies(None, len(self.gpus) * processes_per_gpu if nprocs is None else nprocs)

    def make_policies(self, all_gpus: Sequence[tuple[str, int]] | None = None, nprocs: int = 32) -> list[Any]:
        """Policies for ``nprocs`` workers that go round ``all_gpus``, some or all of what :meth:`find_gpus` gave.

        Workers that share a GPU get cores of their own of those next to it, until there are no more.

        Raises:
            as :meth:`policies`; also UnsatisfiableRequestError: a GPU that this claim does not hold.
        """
        from dragon.infrastructure.policy import Policy

        self.check()
        if isinstance(nprocs, bool) or nprocs < 1:
            raise UnsatisfiableRequestError(f"{nprocs!r} workers asked for: it takes 1 or more", value=nprocs)
        ours = dict(zip(self.find_gpus(), self.gpus, strict=True))
        chosen = list(ours) if all_gpus is None else [(str(host), int(number)) for host, number in all_gpus]
        for place in chosen:
            if place not in ours:
                raise UnsatisfiableRequestError(f"GPU {place[1]} of {place[0]} is not held by {self!r}", value=place)
        if not chosen:
            raise UnsatisfiableRequestError("no GPUs to make policies for", value=all_gpus)
        shares = {
            place: _split(ours[place].cores, -(-(nprocs - chosen.index(place)) // len(chosen))) for place in chosen
        }
        policies = []
        for worker in range(nprocs):
            host, number = place = chosen[worker % len(chosen)]
            cpus = shares[place][worker // len(chosen) % len(shares[place])]
            policies.append(
                Policy(
                    placement=Policy.Placement.HOST_NAME,
                    host_name=host,
                    gpu_affinity=[number],
                    cpu_affinity=list(cpus),
                )
            )
        return policies

    def _release(self) -> None:
        _DeviceOrder.leave(self)
        super()._release()


@dataclass(frozen=True)
class WorkerCheck:
    """Call it in a worker, before CUDA wakes up: as the ``initializer`` of a Pool, or first thing in a function.

    It makes sure that the worker is on a host of the claim, sees one of its GPUs alone, may use none but the CPUs next
    to it, and that the GPU is still held. It sets the memory policy that the claim was asked for, and lets the worker
    claim the GPU for itself (``safe_gpu.claim_gpus(1)``). It survives pickling.
    """

    gpus: tuple[ClusterGpu, ...]
    memory: str | None = None

    def __call__(self) -> ClusterGpu:
        """The worker's GPU.

        Raises:
            WrongDeviceError: a host or a GPU that is not of this claim, or more GPUs than one.
            GPUAffinityError: CPUs besides those next to the GPU.
            HolderLostError: the GPU is no longer held.
        """
        from dragon.native.machine import current

        return self.at(current().hostname)

    def at(self, host: str) -> ClusterGpu:
        """The same, on the host of this name."""
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        here = {gpu.environment["CUDA_VISIBLE_DEVICES"]: gpu for gpu in self.gpus if gpu.host == host}
        gpu = here.get(shown or "")
        if gpu is None:
            raise WrongDeviceError(
                f"this worker got CUDA_VISIBLE_DEVICES={shown} on {host}, and the claim holds "
                f"{'GPU ' + ' or '.join(sorted(here)) if here else 'nothing'} there: start it with a policy of "
                "claim.policies() (to Dragon, no GPU number or an unknown one means all GPUs)",
                expected=", ".join(gpu.uuid for gpu in here.values()),
                actual=shown or "",
            )
        cpus = os.sched_getaffinity(0)
        if gpu.cpus and not cpus <= gpu.cpus:
            from ..affinity.cpulist import format_cpulist

            raise GPUAffinityError(
                f"this worker of GPU {gpu.index} on {host} may use CPUs {format_cpulist(cpus)} instead of "
                f"{format_cpulist(gpu.cpus)}: start it with a policy of claim.policies() (to Dragon, no CPU number or "
                "an unknown one means all CPUs)"
            )
        _check_held(gpu)
        os.environ.update(gpu.environment)
        if self.memory is not None:
            enter_worker((), gpu.numa_node, self.memory)
        return gpu


def _check_held(gpu: ClusterGpu) -> None:
    from ..coordination.host_lock import MINIMUM_PATIENCE, HostLock
    from ..coordination.leases import lease_name, probe, read_record

    with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
        held = probe(host, lease_name(gpu.uuid))
        record = read_record(host.leases, lease_name(gpu.uuid)) if held else None
    token = gpu.environment.get("SAFE_GPU_SCOPE")
    if not held or (token is not None and (record is None or record.token != token)):
        raise HolderLostError(
            f"{gpu.host}: GPU {gpu.index} is no longer held by this claim, its holder is gone: claim again",
            host=gpu.host,
        )


class _DeviceOrder:
    """CUDA_DEVICE_ORDER=PCI_BUS_ID in this process for as long as it has a claim: Dragon's processes inherit it."""

    _claims: ClassVar[set[DragonClaim]] = set()
    _before: ClassVar[str | None] = None

    @classmethod
    def enter(cls, claim: DragonClaim) -> None:
        if not cls._claims:
            cls._before = os.environ.get("CUDA_DEVICE_ORDER")
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        cls._claims.add(claim)

    @classmethod
    def leave(cls, claim: DragonClaim) -> None:
        if claim not in cls._claims:
            return
        cls._claims.discard(claim)
        if not cls._claims:
            if cls._before is None:
                os.environ.pop("CUDA_DEVICE_ORDER", None)
            else:
                os.environ["CUDA_DEVICE_ORDER"] = cls._before


def _candidates(nodes: int | Sequence[str], alive: Sequence[Any]) -> list[Any]:
    """The nodes to choose from, in Dragon's order, or in the order in which they were named."""
    if not isinstance(nodes, int):
        by_id = {str(node.h_uid): node for node in alive}
        named = [nodes] if isinstance(nodes, str) else [str(node) for node in nodes]
        if not named:
            raise UnsatisfiableRequestError("nodes=[] names no node", value=nodes)
        chosen = [by_id[key] for key in nodes_named(named, {key: (node.hostname,) for key, node in by_id.items()})]
    else:
        if isinstance(nodes, bool) or nodes < 1:
            raise UnsatisfiableRequestError(f"nodes={nodes!r}: ask for 1 node or more, or name them", value=nodes)
        if nodes > len(alive):
            raise UnsatisfiableRequestError(
                f"{nodes} nodes asked for, and the Dragon runtime has {len(alive)}: "
                f"{', '.join(node.hostname for node in alive)}",
                value=nodes,
            )
        with_gpus = [node for node in alive if node.gpus]
        chosen = with_gpus if len(with_gpus) >= nodes else list(alive)
    blind = [node.hostname for node in chosen if not node.gpus]
    if blind:
        raise UnsatisfiableRequestError(
            f"Dragon sees no GPU on {', '.join(blind)}: there, Dragon 0.14 needs nvidia-smi on PATH, 0.15 needs "
            "libcudart.so on LD_LIBRARY_PATH, and neither an empty CUDA_VISIBLE_DEVICES",
            value=nodes,
        )
    return chosen


def _dragon_number(gpu: ClusterGpu, node: Any) -> int:
    """What Dragon calls this GPU. Its processes without a GPU of their own, as the holder is one, see all that Dragon
    knows, in the order of its numbers."""
    numbers = node.gpus
    if not gpu.environment["CUDA_VISIBLE_DEVICES"].isdecimal():
        raise UnsatisfiableRequestError(
            f"{gpu.host}: Dragon places by GPU number, and on this host only UUIDs are safe (MIG is on, or a GPU is "
            "lost): leave it out of nodes",
            value=gpu.host,
        )
    position = gpu.inherited_position
    if position is None or position >= len(numbers):
        raise UnsatisfiableRequestError(
            f"{gpu.host}: GPU {gpu.index} is not among the GPUs {numbers} that Dragon sees there", value=gpu.index
        )
    return int(numbers[position])


def _split(cores: Sequence[Sequence[int]], workers: int) -> list[tuple[int, ...]]:
    """The CPUs of each of some workers that share a GPU; fewer parts than workers where there are too few cores."""
    from ..affinity.shares import split_share
    from ..affinity.topology import HostTopology

    if not cores:
        return [()]
    cpus = frozenset(cpu for core in cores for cpu in core)
    topology = HostTopology(cpus, tuple(frozenset(core) for core in cores))
    return [tuple(sorted(part)) for part in split_share(cpus, topology, max(1, min(workers, len(cores))))]
