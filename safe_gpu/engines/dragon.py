"""Claims across the nodes of a Dragon runtime.

from safe_gpu.engines.dragon import claim

    with claim(nodes=2, gpus_per_node=4) as held:
        pool = Pool(policy=held.policies(), processes_per_policy=1, initializer=held.check_worker)

One holder process per node claims GPUs there, as any other program does, and keeps them. The claim returns Policy
objects of Dragon, which work for Pool, ProcessGroup and Process, for Python functions, executables and MPI ranks.

Dragon does not reserve GPUs or CPUs, and it fails open: an unknown GPU or CPU number means all of them, and a process
without a policy sees all GPUs. So policies are checked against the numbers that Dragon knows, and
``held.check_worker`` checks in the worker that it sees the right GPU and CPUs. Executables and MPI ranks get
``held.template_env(policy)`` instead, which ``safe-gpu run`` and ``safe-gpu bind`` check.

Dragon places processes by GPU number. Dragon 0.14 counts the lines of ``nvidia-smi -L``, or takes the numbers in its
CUDA_VISIBLE_DEVICES. Dragon 0.15 asks ``libcudart.so`` and counts from 0 within that variable. Both agree with the
numbers of nvidia-smi only under CUDA_DEVICE_ORDER=PCI_BUS_ID. The claim therefore sets that variable in this process,
whose environment Dragon's processes inherit. On a host where only UUIDs are safe (MIG is on, or a GPU is lost), the
claim fails with an error.

On AMD GPUs, Dragon 0.14 counts the lines of ``rocm-smi --showuniqueid --csv``, or takes the numbers in its
ROCR_VISIBLE_DEVICES. Dragon 0.15 asks ``libamdhip64.so``. Both set ROCR_VISIBLE_DEVICES in a worker to the GPU of its
policy, and may leave a HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES of their own environment in it, which HIP would
count within that one GPU. ``held.check_worker`` and ``held.template_env`` set these two to 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from socket import AF_INET, SOCK_DGRAM, socket
from typing import TYPE_CHECKING, Any

from ..affinity.binding import present_mask
from ..affinity.planner import divide, union
from ..claim.arguments import DEFAULT, DefaultTimeout
from ..claim.caller import called_by_users
from ..claim.claim import ClaimVariables
from ..claim.worker import EXPECT, is_held
from ..errors import GPUAffinityError, HolderLostError, UnsatisfiableRequestError, WrongDeviceError
from ..gpus.vendors import VENDORS
from ..selection.request import Conditions
from ..topology.cpulist import format_cpulist
from .claim import ClusterClaim, NodeFacts, choose_nodes, claim_through
from .connection import RemoteHolder, serve, start_all
from .holder import ClaimArguments, ClusterGpu, enter_worker

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..affinity.planner import AffinityOptions


@called_by_users(*Conditions.__annotations__)
def claim(
    nodes: int | Sequence[str] = 1,
    gpus_per_node: int = 1,
    *,
    timeout: float | str | DefaultTimeout | None = DEFAULT,
    placeholder_fn: Callable[[int], Any] | None = None,
    logger: Any = None,
    affinity: str | AffinityOptions | None = "node",
    memory: str | None = None,
    vendor: str | None = None,
    **conditions: Unpack[Conditions],
) -> DragonClaim:
    """Claim GPUs on nodes of the Dragon runtime that this process belongs to: all of them, or none.

    Args:
        nodes: the number of nodes (those with enough free GPUs are preferred), or a list of host names or h_uids.
        gpus_per_node: the number of GPUs on each node.
        timeout: one deadline for all nodes, in seconds; 0 does not wait, None waits without limit. Default:
            SAFE_GPU_TIMEOUT, else 300 inside a batch job, else 10. The start of the holders does not count.
        placeholder_fn: the placeholder of each GPU on its node, picklable. Default: a context of CUDA or HIP. Where
            a claimed GPU is in compute mode EXCLUSIVE_PROCESS the default is no placeholder, because it would keep
            workers out.
        logger: gets a message at INFO when the claim waits for a node; default: the logger ``safe_gpu``.
        affinity: the CPUs of the workers, as in ``claim_gpus``.
        memory: the memory policy of the workers, which ``check_worker`` sets.
        vendor, and conditions such as min_memory and only: as in ``claim_gpus``, on every node. On hosts with GPUs of
            both vendors Dragon places by those of NVIDIA only.

    Raises:
        NotEnoughGpusError: a node has too few free GPUs (ClaimTimeout: until the deadline). The message and the
            attribute ``host`` name the node; ``verdicts`` has the reasons.
        UnsatisfiableRequestError: there are too few nodes, a node can never satisfy the request, Dragon sees no GPU on
            a node, or this program was not started by ``dragon``.
        HolderLostError: Dragon could not start a holder, or a holder died.
        SafeGpuError: any other error of ``claim_gpus`` on a node. After any error nothing is held.
    """
    if "DRAGON_MY_PUID" not in os.environ:
        raise UnsatisfiableRequestError("there is no Dragon runtime here: start this program with `dragon PROGRAM`")
    from dragon.native.machine import Node, System

    arguments = ClaimArguments(
        placeholder_fn=placeholder_fn,
        affinity=affinity,
        memory=memory,
        visible_as="index",
        selection={"vendor": vendor, **conditions},
    )
    options = arguments.read(gpus_per_node, timeout, logger)
    alive = {str(h_uid): Node(h_uid) for h_uid in System().nodes}
    facts = {node_id: NodeFacts((node.hostname,), has_gpus=bool(node.gpus)) for node_id, node in alive.items()}
    chosen = choose_nodes(nodes, facts, "the Dragon runtime")
    blind = [facts[node_id].names[0] for node_id in chosen.ids if not facts[node_id].has_gpus]
    if blind:
        raise UnsatisfiableRequestError(
            f"Dragon sees no GPU on {', '.join(blind)}: there, Dragon 0.14 needs nvidia-smi or rocm-smi on PATH, "
            "0.15 needs libcudart.so or libamdhip64.so on LD_LIBRARY_PATH, and CUDA_VISIBLE_DEVICES (for AMD GPUs "
            "ROCR_VISIBLE_DEVICES too) must not be empty",
            value=nodes,
        )
    holders = [_DragonHolder(alive[node_id], arguments) for node_id in chosen.ids]
    start_all(holders)
    held = claim_through(holders, chosen.needed, options.request.nb_gpus, options.timeout, options.logger)
    return DragonClaim(held, memory)


class _DragonHolder(RemoteHolder):
    """A holder in a Dragon process, which ends with its connection to this one.

    Attributes:
        node: Dragon's Node.
    """

    def __init__(self, node: Any, arguments: ClaimArguments) -> None:
        super().__init__(node.hostname, str(node.h_uid))
        self.node = node
        self._arguments = arguments

    def start_process(self, port: int, token: bytes) -> None:
        from dragon.infrastructure.policy import Policy
        from dragon.native.process import Process

        here = _address_towards(self.host)
        label = f"dragon: claim of process {os.getpid()} on {os.uname().nodename}"
        self._process = Process(
            target=serve,
            args=((here, port), token, self._arguments, label),
            # With this order the numbers in the CUDA_VISIBLE_DEVICES that Dragon sets are those of nvidia-smi.
            env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            policy=Policy(placement=Policy.Placement.HOST_NAME, host_name=self.host),
        )
        self._process.start()

    def why_ended(self) -> str:
        if self._process.is_alive:
            return ""
        return "Dragon lists it no more"


def _address_towards(host: str) -> str:
    """Return the address of this host by which that host reaches it."""
    with socket(AF_INET, SOCK_DGRAM) as route:
        route.connect((host, 9))  # a datagram socket: nothing is sent
        address: str = route.getsockname()[0]
        return address


class DragonClaim(ClusterClaim):
    """GPUs on nodes of a Dragon runtime, held from :func:`claim` to :meth:`release`, the end of ``with``, or exit."""

    def __init__(self, held: Mapping[ClusterGpu, _DragonHolder], memory: str | None = None) -> None:
        super().__init__(held, memory)
        try:
            self._gpu_at = {(gpu.host, _dragon_number(gpu, holder.node)): gpu for gpu, holder in held.items()}
        except BaseException:
            self.release()
            raise
        if not _claims:
            _order.set({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
        _claims.add(self)

    @property
    def check_worker(self) -> WorkerCheck:
        """A function for workers of this claim that checks their GPU and CPUs; see :class:`WorkerCheck`."""
        return WorkerCheck(self.gpus, self._memory)

    def find_gpus(self) -> list[tuple[str, int]]:
        """Return (host name, GPU number) of every held GPU, as Dragon's policies take them."""
        return list(self._gpu_at)

    def policies(self, processes_per_gpu: int = 1, nprocs: int | None = None) -> list[Any]:
        """Return a Policy for each of ``nprocs`` workers: for ``Pool(policy=..., processes_per_policy=1)``, or one for
        each ProcessTemplate of a ProcessGroup.

        Each policy names a host, a GPU and CPUs. Workers are assigned to GPUs as in :meth:`make_policies`.

        Args:
            processes_per_gpu: the number of workers on each GPU; they divide its cores.
            nprocs: the number of all workers; None: ``processes_per_gpu`` for every GPU.

        Raises:
            HolderLostError: the holder of a node has exited, so its GPUs are no longer held.
            UnsatisfiableRequestError: a number is below 1, the claim was released, or Dragon does not know the GPU.
        """
        if nprocs is None:
            nprocs = len(self.gpus) * processes_per_gpu
        return self.make_policies(None, nprocs)

    def make_policies(self, all_gpus: Sequence[tuple[str, int]] | None = None, nprocs: int = 32) -> list[Any]:
        """Return policies for ``nprocs`` workers, assigned round-robin to ``all_gpus``: some or all of
        :meth:`find_gpus`.

        Workers that share a GPU get different cores next to it, as long as there are enough cores.

        Raises:
            as :meth:`policies`; also UnsatisfiableRequestError: this claim does not hold one of the GPUs.
        """
        from dragon.infrastructure.policy import Policy

        self.check()
        if isinstance(nprocs, bool) or nprocs < 1:
            raise UnsatisfiableRequestError(f"{nprocs!r} workers asked for: it takes 1 or more", value=nprocs)
        if all_gpus is None:
            chosen = self.find_gpus()
        else:
            chosen = [(str(host), int(number)) for host, number in all_gpus]
        for place in chosen:
            if place not in self._gpu_at:
                raise UnsatisfiableRequestError(f"GPU {place[1]} of {place[0]} is not held by {self!r}", value=place)
        if not chosen:
            raise UnsatisfiableRequestError("no GPUs to make policies for", value=all_gpus)
        cpus_at = self._cpus_of_workers(chosen, nprocs)
        policies = []
        for worker in range(nprocs):
            nth_there, position = divmod(worker, len(chosen))
            place = chosen[position]
            host, number = place
            cpus = cpus_at[place][nth_there % len(cpus_at[place])]
            policy = Policy(
                placement=Policy.Placement.HOST_NAME, host_name=host, gpu_affinity=[number], cpu_affinity=list(cpus)
            )
            policies.append(policy)
        return policies

    def _cpus_of_workers(
        self, chosen: Sequence[tuple[str, int]], nprocs: int
    ) -> dict[tuple[str, int], list[tuple[int, ...]]]:
        """Return, for each GPU, the CPUs of its first worker, its second one, and so on."""
        on_each, more = divmod(nprocs, len(chosen))
        cpus_at: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        for position, place in enumerate(chosen):
            workers = on_each
            if position < more:
                workers += 1
            if place not in cpus_at:  # workers of a GPU that is named twice share cores
                cpus_at[place] = _split(self._gpu_at[place].cores, workers)
        return cpus_at

    def template_env(self, policy: Any) -> dict[str, str]:
        """Return the environment variables for a worker with this policy: ``ProcessTemplate(..., policy=policy,
        env=...)``.

        For executables and MPI ranks, which cannot call :attr:`check_worker`. The worker may claim its GPU, and
        ``safe-gpu run`` and ``safe-gpu bind`` check that it is the only one that it sees. Dragon adds these variables
        to the environment that the worker has anyway. A GPU number that Dragon does not know does then no harm.

        Args:
            policy: one of :meth:`policies` or :meth:`make_policies`.

        Raises:
            UnsatisfiableRequestError: the policy does not name exactly one GPU of this claim, or it was released.
        """
        self._check_unreleased()
        numbers = list(policy.gpu_affinity or ())
        gpu = None
        if len(numbers) == 1:
            gpu = self._gpu_at.get((policy.host_name, numbers[0]))
        if gpu is None:
            wrong = f"the policy names GPUs {numbers} of {policy.host_name!r} instead of one GPU of {self!r}"
            raise UnsatisfiableRequestError(f"{wrong}: take it from policies() or make_policies()", value=policy)
        return {**gpu.environment, EXPECT: gpu.uuid}

    def release(self) -> None:
        """Release all GPUs; safe to call twice."""
        _claims.discard(self)
        if not _claims:
            _order.restore()
        super().release()


_WAY_OUT = "start it with a policy of claim.policies() (to Dragon, no {0} number or an unknown one means all {0}s)"


@dataclass(frozen=True)
class WorkerCheck:
    """Checks a worker. Call it in the worker before CUDA is initialised: as the ``initializer`` of a Pool, or first in
    a function.

    It checks that the worker is on a host of the claim, sees exactly one GPU of the claim, may use only the CPUs next
    to that GPU, and that the GPU is still held. It sets the claim's memory policy, and allows the worker to claim the
    GPU for itself (``safe_gpu.claim_gpus(1)``). It can be pickled.
    """

    gpus: tuple[ClusterGpu, ...]
    memory: str | None = None

    def __call__(self) -> ClusterGpu:
        """Return the worker's GPU.

        Raises:
            WrongDeviceError: the host or the GPU does not belong to this claim, or the worker sees several GPUs.
            GPUAffinityError: the worker may use CPUs that are not next to the GPU.
            HolderLostError: the GPU is no longer held.
        """
        from dragon.native.machine import current

        return self.at(current().hostname)

    def at(self, host: str) -> ClusterGpu:
        """Call :meth:`__call__` with the name of the host as an argument."""
        gpu = self._visible_gpu(host)
        cpus = present_mask()
        if gpu.cpus and not cpus <= gpu.cpus:
            problem = f"this worker of GPU {gpu.index} on {host} may use CPUs {format_cpulist(cpus)}"
            raise GPUAffinityError(f"{problem} instead of {format_cpulist(gpu.cpus)}: {_WAY_OUT.format('CPU')}")
        if not is_held(gpu.uuid, gpu.environment.get("SAFE_GPU_SCOPE")):
            gone = f"{gpu.host}: GPU {gpu.index} is no longer held by this claim"
            raise HolderLostError(f"{gone}, because its holder has exited: claim again", host=gpu.host)
        os.environ.update(gpu.environment)
        if self.memory is not None:
            enter_worker((), gpu.numa_node, self.memory)
        return gpu

    def _visible_gpu(self, host: str) -> ClusterGpu:
        """Return the GPU of the claim on this host that alone is visible to this process.

        Raises:
            WrongDeviceError: there is none.
        """
        here = [gpu for gpu in self.gpus if gpu.host == host]
        name = "CUDA_VISIBLE_DEVICES"
        if here:
            name = _variable(here[0])
        shown = os.environ.get(name)
        for gpu in here:
            if shown in _values(gpu):
                return gpu
        held = "nothing"
        if here:
            held = f"GPU {' or '.join(str(gpu.index) for gpu in here)}"
        raise WrongDeviceError(
            f"this worker got {name}={shown} on {host}, and the claim holds {held} there: {_WAY_OUT.format('GPU')}",
            expected=", ".join(gpu.uuid for gpu in here),
            actual=shown or "",
        )


def _variable(gpu: ClusterGpu) -> str:
    """Return the variable that Dragon sets for a GPU of this vendor."""
    return VENDORS[gpu.vendor].variables[0]


def _values(gpu: ClusterGpu) -> tuple[str, ...]:
    """Return the values of Dragon's variable for this GPU alone."""
    return str(gpu.index), gpu.environment[_variable(gpu)]  # the latter if Dragon has inherited UUIDs


# The claims of this process, for which CUDA_DEVICE_ORDER is set to PCI_BUS_ID. Dragon's processes inherit it.
_claims: set[DragonClaim] = set()
_order = ClaimVariables()


def _dragon_number(gpu: ClusterGpu, node: Any) -> int:
    """Return Dragon's number of this GPU.

    A Dragon process without a GPU in its policy, such as the holder, sees all GPUs that Dragon knows, in the order of
    Dragon's numbers. So the position in the holder's CUDA_VISIBLE_DEVICES, or ROCR_VISIBLE_DEVICES, gives the number.
    """
    if node.gpu_env_str != _variable(gpu):
        problem = f"Dragon places there by {node.gpu_env_str}, and GPU {gpu.index} is one for {_variable(gpu)}"
        raise _not_placeable(gpu, f"{problem}: leave the host out of nodes, or claim GPUs of another vendor")
    if gpu.vendor == "nvidia" and not gpu.environment["CUDA_VISIBLE_DEVICES"].isdecimal():
        problem = "Dragon places by GPU number, and on this host only UUIDs are safe (MIG is on, or a GPU is lost)"
        raise _not_placeable(gpu, f"{problem}: leave it out of nodes")
    numbers = node.gpus
    position = gpu.inherited_position
    if position is None or position >= len(numbers):
        raise _not_placeable(gpu, f"GPU {gpu.index} is not among the GPUs {numbers} that Dragon sees there")
    return int(numbers[position])


def _not_placeable(gpu: ClusterGpu, problem: str) -> UnsatisfiableRequestError:
    return UnsatisfiableRequestError(f"{gpu.host}: {problem}", value=gpu.host)


def _split(cores: Sequence[Sequence[int]], workers: int) -> list[tuple[int, ...]]:
    """Split the cores of a GPU among its workers; there are fewer parts than workers if there are too few cores."""
    if not cores:
        return [()]
    parts = divide(cores, max(1, min(workers, len(cores))))
    return [tuple(sorted(union(part))) for part in parts]
