"""``claim_gpus`` and its like: the claim of this process by function, and questions that claim nothing."""

from __future__ import annotations

import os
import time
from _thread import TIMEOUT_MAX, RLock
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from ..coordination.closed import closed_now
from ..drivers import opened_driver
from ..drivers.patience import Patience
from ..errors import ClaimTimeout
from ..gpus.devices import Gpu, GpuVerdict, HostSnapshot, VisibleLimit
from ..host.awaiting import Tell
from ..host.procfs import describe_process, process_global
from ..selection.request import Conditions, Selection, parse_request
from ..selection.verdicts import Known, Rules, judge
from ..wording.text import format_age
from .arguments import DEFAULT, DefaultTimeout, asks_for_none, read_options
from .caller import called_by_users, named_arguments
from .owner import NO_GPU, GPUOwner, already_claimed, current_owner, owners, refuse_lost, request_key
from .search import acquire
from .view import HostView

if TYPE_CHECKING:
    from typing import ParamSpec

    from typing_extensions import Unpack

    from .report import WaitStatus

    Arguments = ParamSpec("Arguments")

gpu_owner: GPUOwner | None


def __getattr__(name: str) -> Any:
    if name == "gpu_owner":
        return owners.get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _takes_arguments_of(
    owner: Callable[Arguments, GPUOwner],
) -> Callable[[Callable[..., GPUOwner]], Callable[Arguments, GPUOwner]]:
    """Return a decorator of functions that users call and that pass their arguments on to an owner: type checkers,
    ``help`` and ``inspect.signature`` show its signature."""
    init = owner.__init__.__wrapped__  # type: ignore[attr-defined]
    shown = FunctionType(init.__code__, init.__globals__, argdefs=init.__defaults__)
    shown.__kwdefaults__ = init.__kwdefaults__
    shown.__annotations__ = {**init.__annotations__, "return": "GPUOwner"}

    def decorate(function: Callable[..., GPUOwner]) -> Callable[Arguments, GPUOwner]:
        function.__wrapped__ = MethodType(shown, owner)  # type: ignore[attr-defined]
        return called_by_users(*named_arguments(init))(function)

    return decorate


@_takes_arguments_of(GPUOwner)
def claim_gpus(
    nb_gpus: Any = 1, placeholder_fn: Any = None, logger: Any = None, debug_sleep: float = 0.0, **options: Any
) -> GPUOwner:
    """Claim GPUs for this process. Call it before anything initialises CUDA.

    Args:
        nb_gpus: how many; ``(2, 4)`` for at least two, and up to four if these are free at once; ``"job"`` for the
            number that the batch job asked for.
        placeholder_fn: called with each CUDA ordinal from 0; returns what holds that GPU. Default: a CUDA context.
        logger: gets the steps at INFO; default: the logger ``safe_gpu``.
        debug_sleep: seconds between setting CUDA_VISIBLE_DEVICES and the placeholders.
        timeout: seconds to wait for GPUs; 0 does not wait, None waits without limit. Default: SAFE_GPU_TIMEOUT, else
            300 inside a batch job, else 10.
        affinity: CPUs to bind to: None, "node", "socket", "exclusive", "core-complex" or AffinityOptions.
        memory: NUMA memory policy next to the GPUs: None, "preferred" or "bind".
        min_memory: bytes that must be free on each GPU, or text such as "20GiB".
        model: pattern of the GPU's name.
        exclude, only: indices, UUIDs or prefixes of UUIDs.
        max_utilization: percent; busier GPUs are not free. GPUs whose driver does not report it are refused.
        near: "numa": all GPUs on one NUMA node; "nvlink": each connected to each by NVLink.
        share: not whole GPUs but this much memory of each, beside other claims that share: bytes, or text such as
            "20GiB" or "25%" of what claims can share.
        prefer: which models to take first, such as "H100,A100"; it takes others too.
        visible_as: write CUDA_VISIBLE_DEVICES as "index" (with CUDA_DEVICE_ORDER=PCI_BUS_ID) or as "uuid".
        delegate: let child processes claim from this claim; not with ``share``.
        hold_for: how long the GPUs will probably be held, in seconds or "2h"; None is unknown. It gets short claims in
            earlier and ends nothing. Default: SAFE_GPU_FOR, else until the end of the batch job, else unknown.
        vendor: such as "amd". Default: that of the claim that encloses this process, else the first that has GPUs here.

    Returns:
        The owner, which is also ``safe_gpu.gpu_owner`` until :func:`release_gpus`.

    Raises:
        NotEnoughGpusError: too few are free (ClaimTimeout after a wait; GpuContendedError if a process without safe_gpu
            started on a GPU during the claim).
        UnsatisfiableRequestError: this host can never satisfy the request, or an argument is invalid.
        AlreadyClaimedError, CudaInitializedError, NoDriverError, LockTimeout, StateDirError: as their names say.
        PlaceholderError, WrongDeviceError, GPUAffinityError: as their names say.

    After an error nothing stays claimed, and the environment is restored.
    """
    owner = GPUOwner(nb_gpus, placeholder_fn, logger, debug_sleep, **options)
    owners["gpu_owner"] = owner
    return owner


@_takes_arguments_of(GPUOwner)
def ensure_gpus(
    nb_gpus: Any = 1, placeholder_fn: Any = None, logger: Any = None, debug_sleep: float = 0.0, **options: Any
) -> GPUOwner:
    """Claim GPUs as :func:`claim_gpus` does, or keep those that this process holds by the same request.

    This is for code that runs more than once in a process, such as the first cell of a notebook, and in several of its
    threads. The same request is the same ``nb_gpus``, ``vendor``, ``visible_as``, ``delegate`` and conditions of the
    GPUs. A thread that comes while another one is in here waits for it, within its own timeout. If that one fails, it
    claims itself.

    Returns:
        The new owner, or the one that holds the GPUs.

    Raises:
        AlreadyClaimedError: this process holds GPUs by another request. ClaimTimeout: another thread still claims at
            the end of the timeout. HolderLostError: this process has closed the descriptors of its claim. Others as for
            :func:`claim_gpus`.
    """
    options.update(placeholder_fn=placeholder_fn, logger=logger, debug_sleep=debug_sleep)
    turn = _turns.setdefault(os.getpid(), RLock())
    try:
        if not turn.acquire(blocking=False):
            options["timeout"] = _wait_for_turn(turn, nb_gpus, options)
        return _ensured(nb_gpus, options)
    finally:
        with suppress(RuntimeError):  # this thread did not get it
            turn.release()


# Pid of this process -> what a thread holds while it is in ensure_gpus. A forked child has one of its own, since the
# thread that holds its parent's is not there.
_turns: dict[int, RLock] = process_global("turns", {})


def _wait_for_turn(turn: RLock, nb_gpus: Any, options: Mapping[str, Any]) -> float | None:
    """Wait until no other thread is in :func:`ensure_gpus`; return the seconds that are left of the timeout.

    Raises:
        ClaimTimeout: none are.
    """
    if asks_for_none(nb_gpus):
        nb_gpus = 1  # the number does not matter here, and 0 is refused
    asked = read_options(nb_gpus, **options)
    timeout = asked.timeout
    asked.logger.info("waiting for another thread of this process, which claims GPUs")
    if timeout is None:
        turn.acquire()
        return None
    if not turn.acquire(timeout=min(timeout, TIMEOUT_MAX)):
        raise ClaimTimeout(
            f"another thread of this process has been claiming GPUs for {format_age(timeout)}: wait longer, or share "
            "the GPUs that it gets",
            timeout=timeout,
        )
    return max(0.0, asked.deadline - time.monotonic())


def _ensured(nb_gpus: Any, options: dict[str, Any]) -> GPUOwner:
    holder = current_owner()
    if holder is None:
        holder = GPUOwner(nb_gpus, **options)
        owners["gpu_owner"] = holder
        return holder
    refuse_lost(holder)
    asked = NO_GPU
    if not asks_for_none(nb_gpus):
        asked = request_key(read_options(nb_gpus, **options))
    if asked == holder._asked:
        return holder
    raise already_claimed(holder, "by another request: release_gpus() first")


def release_gpus() -> None:
    """Release the GPUs that this process holds, through :func:`claim_gpus` or any owner; do nothing without any, and
    where another thread is still claiming them."""
    owner = owners.get("gpu_owner") or current_owner()
    if owner is not None and not owner._is_being_made_elsewhere:
        owner.release_gpus()


def wait_for_gpus(
    nb_gpus: int | str | tuple[int, int] = 1,
    *,
    timeout: float | str | DefaultTimeout | None = None,
    hold_for: float | str | DefaultTimeout | None = DEFAULT,
    vendor: str | None = None,
    logger: Any = None,
    on_wait: Callable[[WaitStatus], None] | None = None,
    on_delay: Tell | None = None,
    **conditions: Unpack[Conditions],
) -> tuple[Gpu, ...]:
    """Wait in the queue until a claim with these arguments would succeed, but claim nothing. The errors are the same.

    Args:
        conditions: ``min_memory``, ``model`` and the others of :func:`~safe_gpu.claim_gpus`.

    Returns:
        The GPUs that the claim would have got. Another process may take them at any time.
    """
    arguments = {name: value for name, value in locals().items() if name != "conditions"}
    options = read_options(**arguments, **conditions)
    patience = Patience(options.tell, options.deadline)
    with opened_driver(**options.request.driver, patience=patience) as driver:
        return acquire(HostView(driver, driver.snapshot(), options.request), options, None)


@called_by_users()
def get_free_gpus(*, vendor: str | None = None) -> list[str]:
    """Return the indices of the GPUs that nobody holds or uses, in numeric order. The result may be outdated at once.

    CUDA_VISIBLE_DEVICES is not considered, and GPUs that this process holds are not free. A MIG instance is ``"3:1"``.

    Args:
        vendor: as for :func:`~safe_gpu.claim_gpus`, whose default it has too.
    """
    request = parse_request(1, vendor=vendor)
    with opened_driver(**request.driver) as driver:
        snapshot = driver.snapshot()
    verdicts = current_verdicts(snapshot, Selection())
    return [verdict.gpu.label for verdict in verdicts if verdict.free]


def current_verdicts(
    snapshot: HostSnapshot, request: Selection, visible_limit: VisibleLimit | None = None, *, inside: str = ""
) -> tuple[GpuVerdict, ...]:
    """Return which GPUs of a new poll a request could have, with the holders of the others.

    Args:
        inside: hash of the token of the claim inside which it would be made; "" for none.

    Raises:
        StateDirError: the claims cannot be read.
        UnsatisfiableRequestError: a variable that sets a rule has no valid value.
    """
    from .report import holders_now

    claimed = holders_now(snapshot, inside)
    rules = Rules.of(os.environ)._replace(closed=closed_now())
    return judge(snapshot, request, Known(claimed, visible_limit, describe=describe_process, rules=rules))
