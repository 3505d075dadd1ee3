"""Claims across the nodes of a Ray cluster.

    from safe_gpu.engines.ray import claim

    with claim(nodes=2, gpus_per_node=4) as held:
        ray.get([train.options(**held.options(gpu)).remote() for gpu in held.gpus])

One holder actor per node makes the node's claim, as any program there would, and keeps it. Ray numbers GPUs by itself
and knows nothing of programs outside Ray, so its own GPU resource plays no part: workers ask for ``num_gpus=0``, are
placed by node, and get their GPU from us, with Ray told to leave CUDA_VISIBLE_DEVICES alone.

Ray ends the holders when the driver ends, however it ends, and the kernel gives the GPUs back with them. A holder that
dies takes its node's claim along: :meth:`RayClaim.check` and :meth:`RayClaim.options` say so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..durations import DEFAULT, DefaultTimeout
from ..errors import HolderLostError, UnsatisfiableRequestError
from .cluster import ClusterGpu
from .holder import Holder, Wishes, enter_worker
from .remote import HeldClaim, claim_through, nodes_named

if TYPE_CHECKING:
    from ..affinity.options import AffinityOptions

__all__ = ["RayClaim", "claim"]

# Ray leaves CUDA_VISIBLE_DEVICES alone in processes that have this.
_HANDS_OFF = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
# What a worker is to do before its first task: for us, and for the job's own setup hook, whose place we take.
_WORKER = "SAFE_GPU_RAY_WORKER"
_SETUP = "safe_gpu.engines.ray._set_up_worker"


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
    visible_as: str = "index",
) -> RayClaim:
    """Claim GPUs on nodes of the Ray cluster that this process is connected to: all of them, or none.

    Args:
        nodes: how many, of those that are alive, the ones with enough free GPUs first; or which, each by its Ray node
            id, host name or address.
        gpus_per_node: how many on each.
        timeout: one deadline for all nodes, in seconds; 0 does not wait, None waits for ever. Default:
            SAFE_GPU_TIMEOUT, else 300 inside a batch job, else 10. The start of the holders does not count.
        placeholder_fn: what holds each GPU on its node, picklable. Default: a CUDA context, but nothing on a node
            where GPUs are in compute mode EXCLUSIVE_PROCESS: it would keep the workers out.
        logger: is told at INFO what is waited for; default: the logger ``safe_gpu``.
        affinity, memory: the CPUs and the memory policy of the workers, as in ``claim_gpus``.
        min_memory, model, exclude, only, visible_as: as in ``claim_gpus``, on every node.

    Raises:
        NotEnoughGpusError: a node has too few free GPUs (ClaimTimeout: until the deadline). The message and the
            attribute ``host`` say which node, ``verdicts`` what is in the way there.
        UnsatisfiableRequestError: there are not so many nodes, one of them can never do it, or Ray is not connected.
        HolderLostError: Ray could not start a holder, or it died.
        SafeGpuError: whatever else ``claim_gpus`` raises on a node. Whatever is raised, nothing is held.
    """
    try:
        import ray
        from ray import is_initialized  # a directory named ray, such as Ray's own in /tmp, imports as well
    except ImportError as err:
        raise UnsatisfiableRequestError("Ray is not installed here: pip install 'safe-gpu[ray]'") from err

    from ..preconditions import checked

    if logger is None:
        import logging

        logger = logging.getLogger("safe_gpu")
    if not is_initialized():
        raise UnsatisfiableRequestError("Ray is not connected: call ray.init(address=...) before the claim")
    request, wait, _ = checked(
        gpus_per_node, timeout, affinity, memory, min_memory, model, exclude, only, visible_as, logger
    )
    selection = {"min_memory": min_memory, "model": model, "exclude": exclude, "only": only}
    wishes = Wishes(placeholder_fn, affinity, memory, visible_as, selection)
    candidates = _candidates(nodes, [node for node in ray.nodes() if node["Alive"]])
    count = nodes if isinstance(nodes, int) else len(candidates)
    holders = [_RayHolder(node, wishes) for node in candidates]
    return RayClaim(claim_through(holders, count, request.nb_gpus, wait, logger), memory)


class RayClaim(HeldClaim["_RayHolder"]):
    """GPUs on nodes of a Ray cluster, held from :func:`claim` to :meth:`release`, the end of ``with``, or exit."""

    def __init__(self, held: Mapping[ClusterGpu, _RayHolder], memory: str | None = None) -> None:
        super().__init__(held)
        self._memory = memory

    def options(
        self, gpu: ClusterGpu, *, runtime_env: Mapping[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Options that put a task or an actor onto one GPU of this claim: ``task.options(**claim.options(gpu))``.

        The worker runs on the GPU's node, sees this GPU alone, as device 0, is bound to the CPUs next to it before its
        first task, and may claim the GPU for itself (``safe_gpu.claim_gpus(1)``). safe_gpu must be installed there.

        Args:
            gpu: one of ``claim.gpus``.
            runtime_env: a runtime environment of your own, to which ours is added. One that ``@ray.remote`` was given
                is replaced by what ``.options`` gets, that is how Ray does it; the job's is merged.
            options: more options for Ray; they win.

        Raises:
            HolderLostError: the node's holder is gone, so the GPU is no longer held.
            UnsatisfiableRequestError: not a GPU of this claim, or it was released.
        """
        import ray
        from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR as hook
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._known(gpu)
        job = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        theirs = (runtime_env or {}).get("env_vars") or {}
        setup = {
            "cpus": sorted(gpu.cpus),
            "numa_node": gpu.numa_node,
            "memory": self._memory,
            "then": next((name for name in (theirs.get(hook), job.get(hook)) if name and name != _SETUP), None),
        }
        ours = {**_HANDS_OFF, **gpu.environment, hook: _SETUP, _WORKER: json.dumps(setup)}
        return {
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(gpu.node_id, soft=False),
            "runtime_env": {**(runtime_env or {}), "env_vars": {**theirs, **ours}},
            **options,
        }


class _RayHolder:
    """A holder in an actor of its own."""

    def __init__(self, node: Mapping[str, Any], wishes: Wishes) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.host: str = node["NodeManagerHostname"]
        self.node_id: str = node["NodeID"]
        self._pending: Any = None
        # Not detached, so it ends with its driver; one thread, the main one, so it does one thing at a time.
        actor = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0)(Holder)
        self._actor = actor.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.node_id, soft=False),
            runtime_env={"env_vars": _HANDS_OFF},
        ).remote(wishes, f"ray: claim of process {os.getpid()} on {os.uname().nodename}")

    def call(self, method: str, *arguments: Any) -> None:
        self._pending = getattr(self._actor, method).remote(*arguments)

    def answer(self, limit: float | None) -> Any:
        import ray

        try:
            return ray.get(self._pending, timeout=limit)
        except ray.exceptions.RayTaskError:
            raise  # a defect of ours, and its traceback
        except ray.exceptions.GetTimeoutError as err:
            raise HolderLostError(
                f"{self.host}: the holder does not answer within {limit:g} s; is the node overloaded or cut off?",
                host=self.host,
            ) from err
        except ray.exceptions.RayError as err:
            raise HolderLostError(
                f"{self.host}: the process that holds the GPUs there is gone, another may have taken them: claim "
                f"again ({' '.join(str(err).split())[:300]})",
                host=self.host,
            ) from err

    def end(self) -> None:
        import ray

        try:
            ray.kill(self._actor)
        except Exception:
            pass  # Ray itself is gone, and all actors of this driver with it


def _candidates(nodes: int | Sequence[str], alive: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The nodes to choose from, in Ray's order, or in the order in which they were named."""
    if not isinstance(nodes, int):
        by_id = {node["NodeID"]: node for node in alive}
        names = {key: (node["NodeManagerHostname"], node["NodeManagerAddress"]) for key, node in by_id.items()}
        named = [nodes] if isinstance(nodes, str) else list(nodes)
        if not named:
            raise UnsatisfiableRequestError("nodes=[] names no node", value=nodes)
        return [by_id[key] for key in nodes_named(named, names)]
    if isinstance(nodes, bool) or nodes < 1:
        raise UnsatisfiableRequestError(f"nodes={nodes!r}: ask for 1 node or more, or name them", value=nodes)
    if nodes > len(alive):
        raise UnsatisfiableRequestError(
            f"{nodes} nodes asked for, and the Ray cluster has {len(alive)}: "
            f"{', '.join(node['NodeManagerHostname'] for node in alive)}",
            value=nodes,
        )
    # Ray may have been told of no GPUs (--num-gpus 0), which is fine; but a head node without any is not worth asking.
    with_gpus = [node for node in alive if node["Resources"].get("GPU")]
    return with_gpus if len(with_gpus) >= nodes else list(alive)


def _set_up_worker() -> None:
    """Runs in each worker of a claim before its first task."""
    import logging

    setup = json.loads(os.environ[_WORKER])
    outcome = enter_worker(setup["cpus"], setup["numa_node"], setup["memory"])
    logging.getLogger("safe_gpu").info("CUDA_VISIBLE_DEVICES=%s, %s", os.environ["CUDA_VISIBLE_DEVICES"], outcome)
    if setup["then"]:
        from ray._private.runtime_env.setup_hook import load_and_execute_setup_hook

        error = load_and_execute_setup_hook(setup["then"])
        if error is not None:
            raise RuntimeError(error)
