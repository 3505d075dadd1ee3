"""The story of a claim: what happens between ``claim_gpus(2)`` and two GPUs that nobody else will touch."""

from __future__ import annotations

import os
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from . import cuda, placeholders
from .acquisition import Acquisition
from .claims import Claim
from .devices import Gpu
from .drivers import opened_driver
from .durations import DEFAULT, DefaultTimeout
from .errors import (
    AlreadyClaimedError,
    CudaInitializedError,
    GPUAffinityError,
    PlaceholderError,
)
from .preconditions import (
    boundaries,
    check_placeholder,
    checked,
    checked_pause,
    job_label,
    warn_of_more_than_declared,
)
from .verification import own_pids, remember_own_pids, rivals, verify_alone, verify_devices
from .visibility import render

if TYPE_CHECKING:
    from .affinity import AffinityOptions, BindingReport
    from .drivers.base import Driver
    from .report import WaitNews

__all__ = ["GPUOwner", "claim_gpus", "current_owner", "latest_gpus", "release_gpus"]

gpu_owner: GPUOwner | None = None
"""The implicit owner, made by :func:`claim_gpus`."""

# A first poll older than this (the placeholder's framework was imported meanwhile) is taken again.
_STALE = 0.1


class _ByDefault(str):
    """The default of ``affinity``: the same mode as when asked for, but a failure only warns."""


_NODE_BY_DEFAULT = _ByDefault("node")

# The owner that holds GPUs in this process, implicit or not: CUDA_VISIBLE_DEVICES is one per process.
_current: GPUOwner | None = None
_current_lock = allocate_lock()


class GPUOwner:
    """GPUs that are claimed from construction until :meth:`release_gpus`, the end of ``with``, or exit.

    Dropping the object lets go of nothing. The arguments are those of :func:`claim_gpus`.

    Attributes:
        devices_taken: indices as nvidia-smi shows them, in the order in which CUDA numbers the GPUs from 0.
        gpus: the same as :class:`~safe_gpu.devices.Gpu`, as the driver showed them before the placeholder.
        placeholders: what ``placeholder_fn`` returned, one per GPU.
        cpus: the CPUs that this process was bound to; empty where it was not bound.
        binding: the report of that binding, or None.
    """

    def __init__(
        self,
        nb_gpus: int | str = 1,
        placeholder_fn: Callable[[int], Any] | None = None,
        logger: Any = None,
        debug_sleep: float = 0.0,
        *,
        timeout: float | str | DefaultTimeout | None = DEFAULT,
        affinity: str | AffinityOptions | None = _NODE_BY_DEFAULT,
        memory: str | None = None,
        min_memory: int | str | None = None,
        model: str | None = None,
        exclude: str | int | Iterable[str | int] = (),
        only: str | int | Iterable[str | int] = (),
        visible_as: str = "index",
        delegate: bool = False,
        _on_wait: Callable[[WaitNews], None] | None = None,
        _command: str | None = None,
    ) -> None:
        began = time.monotonic()
        if logger is None:
            import logging

            logger = logging.getLogger("safe_gpu")
        self.logger = logger
        self.devices_taken: list[int] = []
        self.gpus: tuple[Gpu, ...] = ()
        self.placeholders: list[Any] = []
        self.cpus: set[int] = set()
        self.binding: BindingReport | None = None

        self._pid = os.getpid()
        self._claim: Claim | None = None
        self._environment: dict[str, tuple[str, str | None]] = {}
        self._placeholder_fn: Any = None
        self._own = {os.getpid()}

        try:
            _become_current(self)
            request, wait, options = checked(
                nb_gpus, timeout, affinity, memory, min_memory, model, exclude, only, visible_as, logger
            )
            pause = checked_pause(debug_sleep)
            check_placeholder(placeholder_fn)
            with opened_driver() as driver:
                snapshot, polled = driver.snapshot(), time.monotonic()
                frozen, fence = boundaries(driver, snapshot, request)
                self._own = own_pids(snapshot)
                self._prepare(driver, placeholder_fn)
                acquisition = Acquisition(
                    driver,
                    snapshot if time.monotonic() - polled < _STALE else driver.snapshot(),
                    request,
                    fence=fence,
                    timeout=wait,
                    began=began,
                    scope=os.environ.get("SAFE_GPU_SCOPE"),
                    token=os.urandom(8).hex() if delegate else "",
                    must_delegate=delegate and _command is None,
                    own=self._own,
                    near=self._near_nodes(driver),
                    job=job_label(),
                    command=_command,
                    logger=logger,
                    on_wait=_on_wait or _log_waiting(logger),
                )
                claim = acquisition.claim(self._keep)
                self._take_over(claim, frozen)
                self._set_environment(claim, visible_as)
                time.sleep(pause)
                self._hold(driver)
                if driver.uses_cuda:
                    verify_devices(claim.gpus)
                verify_alone(driver, claim, self._own, holding=self._holds_gpu())
                remember_own_pids(self._own)
                self._bind(driver, options, memory, required=affinity is not _NODE_BY_DEFAULT or memory is not None)
            if nb_gpus != "job":
                warn_of_more_than_declared(len(claim.gpus), logger)
        except BaseException:
            self._undo()
            raise

    def __enter__(self) -> GPUOwner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release_gpus()

    def release_gpus(self) -> None:
        """Give everything back: placeholders, leases, environment and affinity as they were. Safe to call twice.

        In a forked child it only forgets: GPUs, context and leases are the parent's.
        """
        self._undo()

    def keep_across_exec(self) -> None:
        """Let the leases survive exec(2) of this process, so that the command which it becomes holds the GPUs."""
        assert self._claim is not None
        for lease in self._claim.leases:
            lease.keep_across_exec()

    # The steps of a claim

    def _keep(self, claim: Claim) -> None:
        self._claim = claim

    def _near_nodes(self, driver: Driver) -> frozenset[int] | None:
        """NUMA nodes of the CPUs that this process may use, where its mask is narrower than the host."""
        if len(os.sched_getaffinity(0)) >= (os.cpu_count() or 1):
            return None
        from .affinity.shares import nodes_of_cpus

        return nodes_of_cpus(os.sched_getaffinity(0), driver)

    def _prepare(self, driver: Driver, placeholder_fn: Any) -> None:
        self._placeholder_fn = driver.default_placeholder(self.logger) if placeholder_fn is None else placeholder_fn
        asleep = driver.uses_cuda and cuda.visible_if_awake() is None
        placeholders.prepare(self._placeholder_fn)
        if asleep and cuda.visible_if_awake() is not None:
            raise CudaInitializedError(
                "the placeholder's prepare() initialised CUDA, which fixed the GPUs that this process sees: let it "
                "only import, and leave the rest to its call"
            )

    def _take_over(self, claim: Claim, frozen: tuple[str, ...] | None) -> None:
        if frozen is not None:  # CUDA is awake: its numbering stands
            claim.gpus = tuple(sorted(claim.gpus, key=lambda gpu: frozen.index(gpu.uuid)))
        self.gpus = claim.gpus
        self.devices_taken = [gpu.index for gpu in claim.gpus]
        self.logger.info(
            "Leased GPU %s (%s)",
            ",".join(gpu.label for gpu in claim.gpus),
            ", ".join(gpu.uuid for gpu in claim.gpus),
            extra={"safe_gpu_uuids": [gpu.uuid for gpu in claim.gpus], "safe_gpu_devices": self.devices_taken},
        )

    def _set_environment(self, claim: Claim, visible_as: str) -> None:
        variables = render(claim.gpus, visible_as=visible_as, snapshot=claim.before)
        if claim.token:
            variables["SAFE_GPU_SCOPE"] = claim.token
        for name, value in variables.items():
            self._environment[name] = (value, os.environ.get(name))
            os.environ[name] = value
        self.logger.info(
            "Set CUDA_VISIBLE_DEVICES=%s",
            variables["CUDA_VISIBLE_DEVICES"],
            extra={"safe_gpu_environment": variables},
        )

    def _hold(self, driver: Driver) -> None:
        for device_no, gpu in enumerate(self.gpus):
            try:
                self.placeholders.append(placeholders.allocate(self._placeholder_fn, device_no))
            except PlaceholderError as err:
                self.logger.error("Failed to acquire placeholder on GPU %s: %s", gpu.label, err)
                others = rivals(driver, gpu, self._own)
                raise PlaceholderError(
                    f"{err} [GPU {gpu.label}, {gpu.uuid}{f'; on it: {others}' if others else ''}]",
                    device_no=device_no,
                    uuid=gpu.uuid,
                ) from err
        if self._holds_gpu():
            self.logger.info("Placeholder holds GPU %s", ",".join(gpu.label for gpu in self.gpus))

    def _holds_gpu(self) -> bool:
        return placeholders.holds_gpu(self._placeholder_fn)

    def _bind(self, driver: Driver, options: AffinityOptions | None, memory: str | None, *, required: bool) -> None:
        if options is None and memory is None:
            return
        from .affinity.shares import bind_claim

        try:
            self.binding = bind_claim(self.gpus, driver, options=options, memory=memory)
            self.cpus = set(self.binding.cpus)
            self.logger.info("%s", self.binding)
        except GPUAffinityError as err:
            if required:
                raise
            self.logger.warning("CPU affinity was left as it is: %s", err)

    # The way back

    def _undo(self) -> None:
        """Put everything back, in whatever state the claim is."""
        mine = self._pid == os.getpid()
        with ExitStack() as steps:  # the last one first, and each is taken whatever becomes of those before it
            steps.callback(_resign, self)
            steps.callback(self._forget)
            if mine and self.binding is not None:
                from .affinity.shares import undo_binding

                steps.callback(undo_binding)
            if mine:
                steps.callback(self._restore_environment)
            if self._claim is not None:
                steps.callback(self._claim.release)
            if mine:
                while self.placeholders:
                    steps.callback(self._let_go, self.placeholders.pop(), len(self.placeholders))

    def _let_go(self, placeholder: Any, device_no: int) -> None:
        self.logger.info("Releasing placeholder on CUDA device: %s", self.devices_taken[device_no])
        placeholders.release(self._placeholder_fn, placeholder)

    def _restore_environment(self) -> None:
        for name, (ours, earlier) in self._environment.items():
            if os.environ.get(name) == ours:  # what the program set since is its own
                if earlier is None:
                    del os.environ[name]
                else:
                    os.environ[name] = earlier

    def _forget(self) -> None:
        self._claim = None
        self._environment = {}
        self.placeholders = []
        self.binding = None
        self.cpus = set()
        self.devices_taken = []
        self.gpus = ()


def claim_gpus(
    nb_gpus: int | str = 1,
    placeholder_fn: Callable[[int], Any] | None = None,
    logger: Any = None,
    debug_sleep: float = 0.0,
    *,
    timeout: float | str | DefaultTimeout | None = DEFAULT,
    affinity: str | AffinityOptions | None = _NODE_BY_DEFAULT,
    memory: str | None = None,
    min_memory: int | str | None = None,
    model: str | None = None,
    exclude: str | int | Iterable[str | int] = (),
    only: str | int | Iterable[str | int] = (),
    visible_as: str = "index",
    delegate: bool = False,
) -> GPUOwner:
    """Claim GPUs for this process; call it before anything touches CUDA.

    Args:
        nb_gpus: how many, or ``"job"`` for the number that the batch job asked for.
        placeholder_fn: called with each CUDA ordinal from 0, returns what holds that GPU; default: a CUDA context.
        logger: gets the steps at INFO; default: the logger ``safe_gpu``.
        debug_sleep: seconds between setting CUDA_VISIBLE_DEVICES and the placeholders.
        timeout: seconds to wait for GPUs; 0 does not wait, None waits for ever. Default: SAFE_GPU_TIMEOUT, else 300
            inside a batch job, else 10.
        affinity: CPUs to bind to: None, "node", "socket", "exclusive", "core-complex" or AffinityOptions.
        memory: NUMA memory policy next to the GPUs: None, "preferred" or "bind".
        min_memory: bytes that must be free on each GPU, or text such as "20GiB".
        model: pattern of the GPU's name. exclude, only: indices, UUIDs or prefixes of UUIDs.
        visible_as: write CUDA_VISIBLE_DEVICES as "index" (with CUDA_DEVICE_ORDER=PCI_BUS_ID) or as "uuid".
        delegate: let child processes claim from this claim.

    Returns:
        The owner, which is also ``safe_gpu.gpu_owner`` until :func:`release_gpus`.

    Raises:
        NotEnoughGpusError: too few are free (ClaimTimeout after a wait, GpuContendedError when a stranger came along).
        UnsatisfiableRequestError: this host can never do it, or an argument makes no sense.
        AlreadyClaimedError, CudaInitializedError, NoDriverError, LockTimeout, StateDirError, PlaceholderError,
        WrongDeviceError, GPUAffinityError: as their names say. Whatever is raised, nothing is left behind.
    """
    global gpu_owner
    gpu_owner = GPUOwner(
        nb_gpus,
        placeholder_fn,
        logger,
        debug_sleep,
        timeout=timeout,
        affinity=affinity,
        memory=memory,
        min_memory=min_memory,
        model=model,
        exclude=exclude,
        only=only,
        visible_as=visible_as,
        delegate=delegate,
    )
    return gpu_owner


def release_gpus() -> None:
    """Release what this process holds, through :func:`claim_gpus` or an owner it lost sight of; else do nothing."""
    owner = gpu_owner or current_owner()
    if owner is not None:
        owner.release_gpus()


def current_owner() -> GPUOwner | None:
    """The owner that holds GPUs in this process, implicit or not; None in a forked child of such a process."""
    return _current if _current is not None and _current._pid == os.getpid() else None


def _log_waiting(logger: Any) -> Callable[[WaitNews], None] | None:
    """Tell the logger about a wait, where anybody listens: among hundreds of waiters the news has a price."""
    is_enabled = getattr(logger, "isEnabledFor", None)  # the module logging is a logger for the older package
    if is_enabled is not None and not is_enabled(20):
        return None

    def tell(news: WaitNews) -> None:
        from .report import waiting_message

        data = {
            "safe_gpu_position": news.position,
            "safe_gpu_free": news.free,
            "safe_gpu_needed": news.needed,
            "safe_gpu_verdicts": news.verdicts,
        }
        logger.info("%s", waiting_message(news), extra=data)

    return tell


def latest_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process holds, or that the one held from which it was forked."""
    return _current.gpus if _current is not None else ()


def _become_current(owner: GPUOwner) -> None:
    global _current
    with _current_lock:
        holder = current_owner()
        if holder is not None:
            devices = holder.devices_taken
            what = f"GPU {','.join(map(str, devices))}" if devices else "a claim in another thread that is not done yet"
            raise AlreadyClaimedError(
                f"this process holds {what} already: release_gpus() first, or ask for all GPUs in one claim",
                devices=devices,
            )
        _current = owner


def _resign(owner: GPUOwner) -> None:
    global _current, gpu_owner
    if gpu_owner is owner:
        gpu_owner = None
    if _current is owner:
        _current = None
