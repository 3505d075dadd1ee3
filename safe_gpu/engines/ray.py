"""Claims across the nodes of a Ray cluster.

    from safe_gpu.engines.ray import claim

    with claim(nodes=2, gpus_per_node=4) as held:
        ray.get([train.options(**held.options(gpu)).remote() for gpu in held.gpus])

One holder task per node claims GPUs there, as any other program does, and keeps them. Ray's own GPU resource is not
used, because Ray does not know which GPUs programs outside Ray use. Workers ask for ``num_gpus=0`` and are placed by
node. The claim sets their CUDA_VISIBLE_DEVICES, and Ray is told not to change it. Workers on AMD GPUs get
HIP_VISIBLE_DEVICES, and never ROCR_VISIBLE_DEVICES, with which Ray 2.45 and later cannot be imported.

Holders end when the driver program exits, for any reason, and the kernel releases their locks. If a holder dies, the
claim on its node is lost; :meth:`RayClaim.check` and :meth:`RayClaim.options` raise an error then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..claim.arguments import DEFAULT, DefaultTimeout
from ..claim.caller import called_by_users
from ..errors import MissingPackageError, UnsatisfiableRequestError, package_logger
from ..gpus.vendors import VENDORS
from ..selection.request import Conditions
from .claim import ClusterClaim, NodeFacts, choose_nodes, claim_through
from .connection import RemoteHolder, serve, start_all
from .holder import ClaimArguments, ClusterGpu, enter_worker

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..affinity.planner import AffinityOptions


# Ray does not change these variables in processes that have this. Before 2.45 it set ROCR_VISIBLE_DEVICES on AMD GPUs.
_KEEP_VISIBLE_DEVICES = {f"RAY_EXPERIMENTAL_NOSET_{name}_VISIBLE_DEVICES": "1" for name in ("CUDA", "HIP", "ROCR")}
# What _set_up_worker does before a worker's first task, as JSON: the binding, and the job's own setup hook, which
# _set_up_worker replaces and calls.
_WORKER = "SAFE_GPU_RAY_WORKER"
_SETUP = "safe_gpu.engines.ray._set_up_worker"


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
    visible_as: str = "index",
    vendor: str | None = None,
    **conditions: Unpack[Conditions],
) -> RayClaim:
    """Claim GPUs on nodes of the Ray cluster that this process is connected to: all of them, or none.

    Args:
        nodes: the number of nodes (live ones; those with enough free GPUs are preferred), or a list of Ray node ids,
            host names or addresses.
        gpus_per_node: the number of GPUs on each node.
        timeout: one deadline for all nodes, in seconds; 0 does not wait, None waits without limit. Default:
            SAFE_GPU_TIMEOUT, else 300 inside a batch job, else 10. The start of the holders does not count.
        placeholder_fn: the placeholder of each GPU on its node, picklable. Default: a context of CUDA or HIP. Where
            a claimed GPU is in compute mode EXCLUSIVE_PROCESS the default is no placeholder, because it would keep
            workers out.
        logger: gets a message at INFO when the claim waits for a node; default: the logger ``safe_gpu``.
        affinity: the CPUs of the workers, as in ``claim_gpus``.
        memory: the memory policy of the workers, as in ``claim_gpus``.
        visible_as: as in ``claim_gpus``.
        vendor: as in ``claim_gpus``, on every node, with conditions such as min_memory and only.

    Raises:
        NotEnoughGpusError: a node has too few free GPUs (ClaimTimeout: until the deadline). The message and the
            attribute ``host`` name the node; ``verdicts`` has the reasons.
        UnsatisfiableRequestError: there are too few nodes, a node can never satisfy the request, or Ray is not
            connected.
        MissingPackageError: Ray is not installed.
        HolderLostError: Ray could not start a holder, or a holder died.
        SafeGpuError: any other error of ``claim_gpus`` on a node. After any error nothing is held.
    """
    try:
        import ray
        from ray import is_initialized  # fails for a directory named ray, such as Ray's own in /tmp
    except ImportError:
        raise MissingPackageError("Ray is not installed here: pip install 'ray>=2.40'") from None

    if not is_initialized():
        raise UnsatisfiableRequestError("Ray is not connected: call ray.init(address=...) before the claim")
    arguments = ClaimArguments(
        placeholder_fn=placeholder_fn,
        affinity=affinity,
        memory=memory,
        visible_as=visible_as,
        selection={"vendor": vendor, **conditions},
    )
    options = arguments.read(gpus_per_node, timeout, logger)
    facts = {node["NodeID"]: _facts_of(node) for node in ray.nodes() if node["Alive"]}
    chosen = choose_nodes(nodes, facts, "the Ray cluster")
    holders = [_RayHolder(facts[node_id].names[0], node_id, arguments) for node_id in chosen.ids]
    start_all(holders)
    held = claim_through(holders, chosen.needed, options.request.nb_gpus, options.timeout, options.logger)
    return RayClaim(held, memory)


def _facts_of(node: Mapping[str, Any]) -> NodeFacts:
    """Return the facts of one of ``ray.nodes()``.

    A node may have GPUs although Ray was told of none (--num-gpus 0). Nodes of whose GPUs Ray knows are preferred all
    the same, so that no holder is started on a head node without GPUs.
    """
    names = (node["NodeManagerHostname"], node["NodeManagerAddress"])
    return NodeFacts(names, has_gpus=bool(node["Resources"].get("GPU")))


class _RayHolder(RemoteHolder):
    """A holder in a Ray task, whose process ends with the task."""

    def __init__(self, host: str, node_id: str, arguments: ClaimArguments) -> None:
        super().__init__(host, node_id)
        self._arguments = arguments

    def start_process(self, port: int, token: bytes) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        label = f"ray: claim of process {os.getpid()} on {os.uname().nodename}"
        task = ray.remote(num_cpus=0, num_gpus=0, max_retries=0, max_calls=1)(serve)
        task = task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.node_id, soft=False),
            runtime_env={"env_vars": _KEEP_VISIBLE_DEVICES},
        )
        self._result = task.remote((ray.util.get_node_ip_address(), port), token, self._arguments, label)

    def why_ended(self) -> str:
        import ray

        try:
            finished, _ = ray.wait([self._result], timeout=0)
            if not finished:
                return ""
            ray.get(self._result)
        except ray.exceptions.RayError as err:
            return " ".join(str(err).split())[:300]
        return "it was told to"


class RayClaim(ClusterClaim):
    """GPUs on nodes of a Ray cluster, held from :func:`claim` to :meth:`release`, the end of ``with``, or exit."""

    def options(
        self, gpu: ClusterGpu, *, runtime_env: Mapping[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return the options that run a task or an actor on one GPU of this claim:
        ``task.options(**claim.options(gpu))``.

        The worker runs on the GPU's node and sees only this GPU, as device 0. It is bound to the CPUs next to the GPU
        before its first task, and may claim the GPU for itself (``safe_gpu.claim_gpus(1)``). safe_gpu must be installed
        on the node.

        Args:
            gpu: one of ``claim.gpus``.
            runtime_env: your runtime environment, to which the variables of the claim are added. As always in Ray, it
                replaces the one given to ``@ray.remote`` and is merged with the job's.
            options: more options for Ray; they take precedence.

        Raises:
            HolderLostError: the holder of the node has exited, so the GPU is no longer held.
            UnsatisfiableRequestError: the GPU does not belong to this claim, or the claim was released.
        """
        import ray
        from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR as hook
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.checked(gpu)
        of_job = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        of_task = dict((runtime_env or {}).get("env_vars") or {})
        for name in VENDORS[gpu.vendor].variables:
            of_task.pop(name, None)  # a user's would limit the library beside the variables of the claim
        setup = {
            "cpus": sorted(gpu.cpus),
            "numa_node": gpu.numa_node,
            "memory": self._memory,
            "shows": next(iter(gpu.environment)),
            "then": _other_hook(of_task.get(hook), of_job.get(hook)),
        }
        of_claim = {**_KEEP_VISIBLE_DEVICES, **gpu.environment, hook: _SETUP, _WORKER: json.dumps(setup)}
        return {
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(gpu.node_id, soft=False),
            "runtime_env": {**(runtime_env or {}), "env_vars": {**of_task, **of_claim}},
            **options,
        }


def _other_hook(*hooks: str | None) -> str | None:
    """Return the first setup hook that is not the one of claims."""
    for hook in hooks:
        if hook and hook != _SETUP:
            return hook
    return None


def _set_up_worker() -> None:
    """Set up each worker of a claim before its first task."""
    setup = json.loads(os.environ[_WORKER])
    outcome = enter_worker(setup["cpus"], setup["numa_node"], setup["memory"])
    shows = setup["shows"]
    package_logger().info("%s=%s, %s", shows, os.environ[shows], outcome)
    if setup["then"]:
        from ray._private.runtime_env.setup_hook import load_and_execute_setup_hook

        error = load_and_execute_setup_hook(setup["then"])
        if error is not None:
            raise RuntimeError(error)
