"""The process that holds one host's GPUs for a claim across hosts.

The holder claims GPUs like any other program on its host, so all users there see its claims and, unless the compute
mode forbids it, its placeholder. It delegates: the workers of the claim get its SAFE_GPU_SCOPE and may claim its GPUs
for themselves. Such an inner claim keeps the GPU even if the holder dies first. The holder does not bind itself to
CPUs; it computes the CPUs of the workers.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..affinity.binding import bind_process, cores_of_share, memory_nodes, near, present_mask, with_memory
from ..affinity.planner import AffinityOptions, parse_options
from ..claim.arguments import ClaimOptions, DefaultTimeout, read_options
from ..claim.claim import visible_limit_of
from ..claim.owner import GPUOwner, owner_type
from ..coordination.directory import state_dir_path
from ..coordination.doors import digest
from ..drivers import opened_driver
from ..drivers.base import Driver
from ..errors import GPUAffinityError, SafeGpuError, UnsatisfiableRequestError, package_logger
from ..gpus.devices import Gpu
from ..gpus.vendors import FIRST
from ..host.foreign_files import read_start
from ..runtimes.visible_devices import read_visible, render_visible, visible_variables
from ..selection.choice import check_possible
from ..selection.request import parse_request
from ..selection.verdicts import Rules
from ..topology.host import read_topology

_Place = tuple[tuple[tuple[int, ...], ...], int | None]


@dataclass(frozen=True)
class ClaimArguments:
    """The arguments of a cluster claim for ``claim_gpus`` on every host. It can be pickled.

    ``placeholder_fn`` None is the driver's default.
    """

    placeholder_fn: Callable[[int], Any] | None = None
    affinity: str | AffinityOptions | None = "node"
    memory: str | None = None
    visible_as: str = "index"
    selection: Mapping[str, Any] = field(default_factory=dict)

    def read(self, nb_gpus: int, timeout: float | str | DefaultTimeout | None, logger: Any) -> ClaimOptions:
        """Check the arguments of a claim of ``nb_gpus`` on one host, before any holder is started.

        Raises:
            UnsatisfiableRequestError, GPUAffinityError: an argument is wrong.
        """
        numbers = nb_gpus if isinstance(nb_gpus, tuple) else None
        for name, value in (("gpus_per_node", numbers), ("share", self.selection.get("share"))):
            if value is not None:
                problem = f"{name}={value!r} is not possible across hosts: claim whole GPUs, as many on each"
                raise UnsatisfiableRequestError(problem, value=value)
        given = {name: getattr(self, name) for name in ("affinity", "memory", "visible_as")}
        return read_options(nb_gpus, logger=logger, timeout=timeout, **given, **self.selection)


@dataclass(frozen=True)
class ClusterGpu:
    """One GPU of a cluster claim.

    Attributes:
        host: the engine's name of the host.
        node_id: the engine's id of the node.
        index: as nvidia-smi shows it on that host; ROCR's number of an AMD GPU.
        uuid: as nvidia-smi or ROCR shows it.
        cpus: the CPUs next to it, for its workers; empty: no preference.
        cores: the same CPUs, as the hardware threads of each physical core.
        numa_node: the NUMA node next to it; None is unknown.
        vendor: a key of :data:`~safe_gpu.gpus.vendors.VENDORS`.
        environment: the variables that make only this GPU visible to CUDA or HIP, and allow its workers to claim it.
        inherited_position: its position in the CUDA_VISIBLE_DEVICES, or ROCR_VISIBLE_DEVICES for an AMD GPU, that the
            holder inherited; None without one.
    """

    host: str
    node_id: str
    index: int
    uuid: str
    cpus: frozenset[int] = frozenset()
    cores: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    numa_node: int | None = field(default=None, repr=False)
    vendor: str = field(default=FIRST, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    inherited_position: int | None = field(default=None, repr=False)


class HostReport(NamedTuple):
    """A holder's report on its host.

    Attributes:
        rank: the host name, and what identifies the boot and the state directory: two holders with the same rank
            compete for the same GPUs. Claims of all engines sort hosts by it.
        free: the number of GPUs that the request could take now; -1 if it can never be satisfied.
    """

    rank: tuple[str, ...]
    free: int = 0


class HolderProcess:
    """Holds GPUs of its host from :meth:`claim` to :meth:`release` or the end of its process.

    Errors of safe_gpu are returned, not raised, because engines wrap raised exceptions in their own types.
    """

    def __init__(self, arguments: ClaimArguments, label: str) -> None:
        self._arguments = arguments
        self._label = label
        self._owner: GPUOwner | None = None

    def report(self, count_for: int = 0) -> HostReport:
        """Return the report on this host; with ``count_for`` it has the number of free GPUs for a claim of that
        many."""
        import socket

        boot = (read_start("/proc/sys/kernel/random/boot_id") or b"").decode().strip() or socket.gethostname()
        place = f"{boot}:{os.path.realpath(state_dir_path())}"
        return HostReport((socket.gethostname(), place), self._free(count_for) if count_for else 0)

    def claim(self, nb_gpus: int, timeout: float | None) -> tuple[ClusterGpu, ...] | SafeGpuError:
        """Claim GPUs; the result has no host and node yet. Returns the error if the claim fails."""
        arguments = self._arguments
        inherited = dict(os.environ)
        try:
            with opened_driver(**parse_request(nb_gpus, **arguments.selection).driver) as driver:
                more = {**arguments.selection, "visible_as": arguments.visible_as, "affinity": None, "delegate": True}
                more["placeholder_fn"] = arguments.placeholder_fn
                self._owner = owner = owner_type(command=self._label)(nb_gpus, timeout=timeout, **more)
                try:
                    snapshot = driver.snapshot()  # the claim may have waited, and a GPU may be lost since
                    places = _near(owner.gpus, driver, arguments)
                except BaseException:
                    self.release()
                    raise
        except SafeGpuError as err:
            return err
        # The GPUs in the variable that Dragon sets: CUDA_VISIBLE_DEVICES, or ROCR_VISIBLE_DEVICES on AMD hosts.
        alone = (visible_variables(snapshot)[0], "CUDA_DEVICE_ORDER")
        visible_limit = read_visible({name: inherited[name] for name in alone if name in inherited}, snapshot)
        order = () if visible_limit is None else visible_limit.uuids
        scope = os.environ.get("SAFE_GPU_SCOPE", "")  # which lets the workers claim the GPUs of this process
        inside = {} if scope == inherited.get("SAFE_GPU_SCOPE") else {"SAFE_GPU_SCOPE": scope}
        held = []
        for gpu in owner.gpus:
            cores, numa_node = places[gpu.index]
            shown = render_visible([gpu], visible_as=arguments.visible_as, snapshot=snapshot, environ=inherited)
            cpus, position = frozenset[int]().union(*cores), order.index(gpu.uuid) if gpu.uuid in order else None
            place = (cpus, cores, numa_node, snapshot.vendor, {**shown, **inside}, position)
            held.append(ClusterGpu("", "", gpu.index, gpu.uuid, *place))
        return tuple(sorted(held, key=lambda gpu: (gpu.index, gpu.uuid)))

    def release(self) -> None:
        """Release the GPUs of :meth:`claim`; safe to call at any time."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.release_gpus()

    def ping(self) -> None:
        """Do nothing; the answer shows that the holder is alive."""

    def _free(self, nb_gpus: int) -> int:
        from ..claim.functions import current_verdicts
        from ..claim.limits import remaining_quota

        try:
            request = parse_request(nb_gpus, **self._arguments.selection)
            with opened_driver(**request.driver) as driver:
                snapshot = driver.snapshot()
                request = request.resolved(snapshot)
                visible_limit = visible_limit_of(snapshot, nb_gpus, driver.runtime)
            check_possible(snapshot, request, visible_limit, rules=Rules.of(os.environ))
            scope = os.environ.get("SAFE_GPU_SCOPE")
            verdicts = current_verdicts(snapshot, request, visible_limit, inside=digest(scope) if scope else "")
            room = math.inf if scope else remaining_quota(snapshot, nb_gpus)
        except SafeGpuError:
            return -1
        return int(max(0, min(sum(verdict.free for verdict in verdicts), room)))


def enter_worker(cpus: Iterable[int], numa_node: int | None, memory: str | None) -> str:
    """Bind this process, a worker of a claim, next to its GPU; return one line for a log.

    It never raises: an unbound worker is slow, but one that does not start is worse.
    """
    wanted = frozenset(cpus)
    if not wanted and memory is None:
        return "not bound"
    try:
        nodes, lacks = frozenset[int](), list[str]()
        if memory is not None and numa_node is not None:
            nodes, lacks = with_memory(read_topology(), [numa_node])
        report = bind_process(wanted or None, nodes, memory, lacks=lacks)
        if not report.as_asked:
            report.log(package_logger())
        return str(report)
    except GPUAffinityError as err:
        return f"not bound: {err}"


def _near(gpus: Sequence[Gpu], driver: Driver, arguments: ClaimArguments) -> dict[int, _Place]:
    """Return, by GPU index, the cores and the NUMA node for its workers."""
    places: dict[int, _Place] = {gpu.index: ((), None) for gpu in gpus}
    options = parse_options(arguments.affinity, arguments.memory)
    if options is None and arguments.memory is None:
        return places
    try:
        there = near(gpus, driver, options, None, present_mask())
    except GPUAffinityError:
        is_default = options is not None and options.mode == "node" and arguments.memory is None
        if not is_default:
            raise
        return places
    for index in places:
        share = cores_of_share(there.shares.get(index, ()), there.topology)
        cores = sorted(tuple(sorted(core)) for core in share)
        places[index] = tuple(cores), next(iter(memory_nodes(there.topology, [index])), None)
    return places
