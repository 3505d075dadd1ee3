"""``GPUOwner`` and ``claim_gpus``: the steps of a claim in their order, its placeholders and variables, its release."""

from __future__ import annotations

import os
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from ..coordination.leases import LeaseRecord
from ..coordination.signals import DeferredSignals
from ..devices import Gpu
from ..drivers import opened_driver
from ..errors import AlreadyClaimedError, GPUAffinityError, PlaceholderError, SafeGpuError
from ..procfs import lasting
from ..runtimes import placeholders
from ..runtimes.visible_devices import render_visible
from ..runtimes.visible_limit import prepare_only, remember_initializer
from .claim import BadGpuFallback, Claim, other_processes, verify_alone, verify_devices
from .options import NODE_BY_DEFAULT, read_options, warn_of_more_than_declared, warn_of_older_workers
from .search import acquire
from .times import DEFAULT, DefaultTimeout
from .view import HostView

if TYPE_CHECKING:
    from ..affinity import AffinityOptions, BindingReport
    from ..drivers.base import Driver
    from ..runtimes.runtime import Runtime
    from ..runtimes.visible_devices import VisibleLimit
    from .options import ClaimOptions


# The environment variables that a claim sets, and what they were before.


class ClaimVariables:
    """Variables of this process that a claim has set."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[str, str | None]] = {}  # name -> value, and value before

    def set(self, variables: Mapping[str, str]) -> None:
        """Set these variables."""
        for name, value in variables.items():
            self._set[name] = value, os.environ.get(name)
            os.environ[name] = value

    def restore(self) -> None:
        """Make them what they were; a value that the program has set since stays."""
        for name, (value, before) in self._set.items():
            if os.environ.get(name) == value:
                if before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before
        self._set = {}


# What holds the claimed GPUs: a placeholder on each. None is lost when a signal handler raises.


class PlaceholderSet:
    """The placeholders of a claim.

    Attributes:
        make: called with an ordinal; returns a placeholder.
        placed: the placeholders, by ordinal.
    """

    def __init__(self, signals: DeferredSignals) -> None:
        self.make: Any = None
        self.placed: list[Any] = []
        self._signals = signals

    def prepare(self, runtime: Runtime, placeholder_fn: Any, logger: Any) -> None:
        """Import what the placeholder needs; None is the default of the runtime. Errors as for ``prepare_only``."""
        self.make = runtime.default_placeholder(logger) if placeholder_fn is None else placeholder_fn
        prepare_only(self.make, runtime)

    @property
    def on_gpu(self) -> bool:
        """Whether the driver sees a process on the GPU because of it; not so of ``NoPlaceholder``."""
        return placeholders.holds_gpu(self.make)

    def place(self) -> None:
        """Make the placeholder of the next ordinal.

        Raises:
            PlaceholderError: it cannot be made.
        """
        with self._signals, self._passing():  # nothing comes between the context and its place in the list
            self.placed.append(placeholders.allocate(self.make, len(self.placed)))

    def give_back(self, placeholder: Any) -> None:
        """Release one that is no longer in ``placed``."""
        with self._passing():
            placeholders.release(self.make, placeholder)

    def _passing(self) -> AbstractContextManager[object]:
        """Let handlers of signals run in a placeholder of the program's own, which may take any time."""
        return nullcontext() if placeholders.is_builtin(self.make) else self._signals.delivering()


# ``GPUOwner`` and ``claim_gpus``: the steps of a claim in their order, and its release.


gpu_owner: GPUOwner | None
"""The owner that :func:`claim_gpus` made, until its release."""

# If the first poll is older than this, in seconds, it is repeated. Importing the placeholder's framework takes time.
_STALE = 1.0

# The affinity modes that divide the CPUs of a node among its GPUs.
_DIVIDING = ("exclusive", "core-complex")

# The owner that holds GPUs in this process, "current". There is at most one, because a process has one
# CUDA_VISIBLE_DEVICES. It is also "gpu_owner" if it was made by a function.
_owners: dict[str, GPUOwner | None] = lasting("owners", {})
_owners_lock = lasting("owners_lock", allocate_lock())


def __getattr__(name: str) -> Any:
    if name == "gpu_owner":
        return _owners.get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class GPUOwner:
    """GPUs that are claimed from construction until :meth:`release_gpus`, the end of ``with``, or process exit.

    Deleting the object releases nothing. The arguments are those of :func:`claim_gpus`.

    Attributes:
        devices_taken: indices as nvidia-smi shows them, in the order in which CUDA numbers the GPUs from 0.
        gpus: the same GPUs as :class:`~safe_gpu.devices.Gpu`, as polled before the placeholders were allocated.
        share: bytes of each GPU, if the claim shares its GPUs with others; None for whole GPUs.
        cpus: the CPUs that this process was bound to; empty if it was not bound.
        binding: the report of that binding, or None.
    """

    _internal: Mapping[str, Any] = {}  # see owner_type

    def __init__(
        self,
        nb_gpus: int | str | tuple[int, int] = 1,
        placeholder_fn: Callable[[int], Any] | None = None,
        logger: Any = None,
        debug_sleep: float = 0.0,
        *,
        timeout: float | str | DefaultTimeout | None = DEFAULT,
        affinity: str | AffinityOptions | None = NODE_BY_DEFAULT,
        memory: str | None = None,
        min_memory: int | str | None = None,
        model: str | None = None,
        exclude: str | int | Iterable[str | int] = (),
        only: str | int | Iterable[str | int] = (),
        max_utilization: int | str | None = None,
        near: str | None = None,
        share: int | str | None = None,
        prefer: str | Iterable[str] | None = None,
        visible_as: str = "index",
        delegate: bool = False,
        hold_for: float | str | DefaultTimeout | None = DEFAULT,
        vendor: str | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self.devices_taken: list[int] = []
        self.gpus: tuple[Gpu, ...] = ()
        self.share: int | None = None
        self.cpus: set[int] = set()
        self.binding: BindingReport | None = None

        self._pid = os.getpid()
        self._asked = ""
        self._claim: Claim | None = None
        self._environment = ClaimVariables()
        self._signals = DeferredSignals()
        self._holding = PlaceholderSet(self._signals)

        try:
            _become_current(self)
            options = read_options(**arguments, **self._internal)
            self.logger = options.logger
            with opened_driver(**options.request.driver) as driver:
                view = HostView.of(driver, driver.snapshot(), options.request)
                self._holding.prepare(driver.runtime, options.placeholder_fn, self.logger)
                if view.age > _STALE:
                    view.poll()
                bad = BadGpuFallback(view, self._holding.make, self.logger)
                claim = self._take_and_hold(view, options, bad)
                if driver.runtime.asks_library:
                    remember_initializer(view.visible_limit, self._holding.make, driver.runtime)
                    verify_devices(self.gpus, driver.runtime)
                verify_alone(view, claim, options, holding=self._holding.on_gpu)
                if private := [one.process_error for one in claim.gpus if one.processes_private]:
                    self.logger.warning(f"Whether other programs use the GPUs of this claim is not known: {private[0]}")
                view.remember_own_pids()
                bad.clear_notes(claim, holding=self._holding.on_gpu)
                self._bind(driver, options)
            if not options.by_job and options.job.scheduler is not None:
                warn_of_more_than_declared(len(self.gpus), self.logger)
            self._asked = _asked(options)
        except BaseException as err:
            __tracebackhide__ = True  # by pytest
            self._undo()
            if not isinstance(err, SafeGpuError):
                raise
            err.shorten()
            raise err

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles: a copy would give back the locks of this one."""
        raise TypeError(
            f"a GPUOwner cannot be copied or pickled, since process {self._pid} holds the GPUs: pass "
            "owner.devices_taken or owner.gpus instead, and call release_gpus() in that process"
        )

    def __enter__(self) -> GPUOwner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release_gpus()

    def __repr__(self) -> str:
        """Return ``<GPUOwner: GPU 0,1 (NVIDIA A100-SXM4-80GB), CPUs 0-15>``, for notebooks."""
        if not self.gpus:
            return "<GPUOwner: released>"
        from ..cpulist import format_cpulist
        from ..text import gpus_by_model

        parts = [gpus_by_model((gpu.label, gpu.name) for gpu in self.gpus)]
        if self.cpus:
            parts.append(f"{'CPU' if len(self.cpus) == 1 else 'CPUs'} {format_cpulist(self.cpus)}")
        if self._pid != os.getpid():
            parts.append(f"held by process {self._pid}")
        return f"<GPUOwner: {', '.join(parts)}>"

    @property
    def share_fraction(self) -> float | None:
        """What a framework may allocate of each GPU, from 0 to 1: the share without 512 MiB for CUDA's own context, of
        all memory of the GPU (of several the largest). None for whole GPUs."""
        if self.share is None:
            return None
        from ..selection.sharing import share_fraction

        return share_fraction(self.share, self.gpus)

    @property
    def placeholders(self) -> list[Any]:
        """What ``placeholder_fn`` returned, one per GPU."""
        return self._holding.placed

    def release_gpus(self) -> None:
        """Release placeholders and leases, and restore the environment and the affinity. Safe to call twice.

        In a forked child it only clears this object, because the GPUs, contexts and leases belong to the parent.
        """
        self._undo()

    def keep_across_exec(self) -> None:
        """Keep the claim across exec(2), so that the command that this process executes holds the GPUs."""
        assert self._claim is not None
        self._claim.keep_across_exec()

    # The steps of a claim

    def _take_and_hold(self, view: HostView, options: ClaimOptions, bad: BadGpuFallback) -> Claim:
        """Lease GPUs and put the placeholder on them; if one of them proves to be bad, give all back and try
        others."""
        record = LeaseRecord.of_this_process(options.job.job_label, options.command)
        while True:
            self._claim = claim = Claim(record, os.urandom(8).hex() if options.delegate else "")
            acquire(view, options, claim)
            self._take_over(claim, view.visible_limit)
            self._set_environment(claim, options.visible_as)
            if options.pause:  # even time.sleep(0) yields the CPU
                time.sleep(options.pause)
            try:
                bad.try_suspects(claim)
                self._hold(view, bad)
                return claim
            except PlaceholderError as err:
                bad.exclude(claim, err)
            self._give_back()

    def _take_over(self, claim: Claim, visible_limit: VisibleLimit | None) -> None:
        gpus = claim.gpus
        if visible_limit is not None and visible_limit.frozen:  # CUDA is initialised, so its numbering cannot change
            gpus = tuple(sorted(gpus, key=lambda gpu: visible_limit.uuids.index(gpu.uuid)))
        self.gpus = claim.gpus = gpus
        self.share = claim.share
        self.devices_taken = [gpu.index for gpu in gpus]
        self.logger.info(
            "Leased GPU %s (%s)",
            ",".join(gpu.label for gpu in gpus),
            ", ".join(gpu.uuid for gpu in gpus),
            extra={"safe_gpu_uuids": [gpu.uuid for gpu in gpus], "safe_gpu_devices": self.devices_taken},
        )

    def _set_environment(self, claim: Claim, visible_as: str) -> None:
        variables = render_visible(claim.gpus, visible_as=visible_as, snapshot=claim.before, environ=os.environ)
        if claim.share is not None:
            from .shares import share_variables

            variables.update(share_variables(claim.share, claim.gpus, os.environ))
        if claim.token:
            variables["SAFE_GPU_SCOPE"] = claim.token
        self._environment.set(variables)
        warn_of_older_workers(*next(iter(variables.items())), self.logger)
        self.logger.info(
            "Set %s=%s",
            *next(iter(variables.items())),
            extra={"safe_gpu_environment": variables},
        )

    def _hold(self, view: HostView, bad: BadGpuFallback) -> None:
        for device_no, gpu in enumerate(self.gpus):
            try:
                self._holding.place()
            except PlaceholderError as err:
                raise bad.described(err, gpu, device_no, other_processes(view, gpu)) from err
        if self._holding.on_gpu:
            self.logger.info("Placeholder holds GPU %s", ",".join(gpu.label for gpu in self.gpus))

    def _bind(self, driver: Driver, options: ClaimOptions) -> None:
        if options.binding is None and options.memory is None:
            return
        from ..affinity.cpu_shares import bind_claim

        try:
            self.binding = bind_claim(self.gpus, driver, options=options.binding, memory=options.memory)
            self.cpus = set(self.binding.cpus)
            if self.share is not None and options.binding is not None and options.binding.mode in _DIVIDING:
                note = "every claim that shares these GPUs gets the same CPUs"
                self.binding = self.binding._replace(notes=(*self.binding.notes, note))
            tell = self.logger.warning if self.binding.remote else self.logger.info
            tell("%s", self.binding)
        except GPUAffinityError as err:
            if options.binding_required:
                raise
            self.logger.warning("CPU affinity was left as it is: %s", err)

    # Release

    def _undo(self) -> None:
        """Release and restore everything, whichever steps of the claim have been done. Then handlers of signals run."""
        self._signals.run_deferred(self._undo_now)

    def _undo_now(self) -> None:
        with ExitStack() as steps:  # the steps run in reverse order, each even if an earlier one raised
            steps.callback(_clear_current, self)
            if self._pid == os.getpid() and self.binding is not None:
                from ..affinity.cpu_shares import undo_binding

                steps.callback(undo_binding)
            steps.callback(self._give_back)

    def _give_back(self) -> None:
        """Give back GPUs and environment, so that others can be claimed."""
        mine = self._pid == os.getpid()
        with ExitStack() as steps:
            steps.callback(self._forget)
            if mine:
                steps.callback(self._environment.restore)
            if self._claim is not None:
                steps.callback(self._claim.release)
            if mine:
                placed = self._holding.placed
                while placed:
                    steps.callback(self._release_placeholder, placed.pop(), len(placed))

    def _release_placeholder(self, placeholder: Any, device_no: int) -> None:
        self.logger.info("Releasing placeholder on CUDA device: %s", self.devices_taken[device_no])
        self._holding.give_back(placeholder)

    def _forget(self) -> None:
        self._claim = None
        self._holding.placed = []
        self.binding = None
        self.cpus = set()
        self.devices_taken = []
        self.gpus = ()
        self.share = None


def owner_type(**internal: Any) -> type[GPUOwner]:
    """Return GPUOwner with further arguments of :func:`~safe_gpu.claim.options.read_options`, for the rest of this
    package."""

    class InternalOwner(GPUOwner):
        _internal = internal

    return InternalOwner


def claim_gpus(
    nb_gpus: int | str | tuple[int, int] = 1,
    placeholder_fn: Callable[[int], Any] | None = None,
    logger: Any = None,
    debug_sleep: float = 0.0,
    *,
    timeout: float | str | DefaultTimeout | None = DEFAULT,
    affinity: str | AffinityOptions | None = NODE_BY_DEFAULT,
    memory: str | None = None,
    min_memory: int | str | None = None,
    model: str | None = None,
    exclude: str | int | Iterable[str | int] = (),
    only: str | int | Iterable[str | int] = (),
    max_utilization: int | str | None = None,
    near: str | None = None,
    share: int | str | None = None,
    prefer: str | Iterable[str] | None = None,
    visible_as: str = "index",
    delegate: bool = False,
    hold_for: float | str | DefaultTimeout | None = DEFAULT,
    vendor: str | None = None,
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
        max_utilization: percent; GPUs that are busier, and those of which the driver cannot tell, are not free.
        near: "numa": all GPUs on one NUMA node; "nvlink": each connected to each by NVLink.
        share: not whole GPUs but this much memory of each, beside other claims that share: bytes, or text such as
            "20GiB" or "25%" of what claims can share.
        prefer: which models to take first, such as "H100,A100"; it takes others too.
        visible_as: write CUDA_VISIBLE_DEVICES as "index" (with CUDA_DEVICE_ORDER=PCI_BUS_ID) or as "uuid".
        delegate: let child processes claim from this claim.
        hold_for: how long the GPUs will probably be held, in seconds or "2h"; None is unknown. It gets short claims in
            earlier and ends nothing. Default: SAFE_GPU_FOR, else until the end of the batch job, else unknown.
        vendor: such as "amd". Default: that of the claim around this process, else the first that has GPUs here.

    Returns:
        The owner, which is also ``safe_gpu.gpu_owner`` until :func:`release_gpus`.

    Raises:
        NotEnoughGpusError: too few are free (ClaimTimeout after a wait; GpuContendedError if a process without safe_gpu
            started on a GPU during the claim).
        UnsatisfiableRequestError: this host can never satisfy the request, or an argument is invalid.
        AlreadyClaimedError, CudaInitializedError, NoDriverError, LockTimeout, StateDirError, PlaceholderError,
            WrongDeviceError, GPUAffinityError: as their names say.

    After an error nothing stays claimed, and the environment is restored.
    """
    arguments = locals().copy()
    __tracebackhide__ = True
    _owners["gpu_owner"] = owner = GPUOwner(**arguments)
    return owner


def ensure_gpus(
    nb_gpus: int | str | tuple[int, int] = 1, placeholder_fn: Callable[[int], Any] | None = None, **options: Any
) -> GPUOwner:
    """Claim GPUs as :func:`claim_gpus` does, or keep those that this process holds by the same request.

    This is for code that runs more than once in a process, such as the first cell of a notebook. The same request is
    the same ``nb_gpus``, ``vendor``, ``visible_as``, ``delegate`` and conditions of the GPUs.

    Returns:
        The new owner, or the one that holds the GPUs.

    Raises:
        AlreadyClaimedError: this process holds GPUs by another request. Others as for :func:`claim_gpus`.
    """
    __tracebackhide__ = True
    holder = current_owner()
    if holder is None:
        _owners["gpu_owner"] = holder = GPUOwner(nb_gpus, placeholder_fn, **options)
        return holder
    try:
        if _asked(read_options(nb_gpus, placeholder_fn=placeholder_fn, **options)) == holder._asked:
            return holder
        raise _already_claimed(holder, "by another request: release_gpus() first")
    except SafeGpuError as err:
        err.shorten()
        raise err


def _asked(options: ClaimOptions) -> str:
    return repr((options.request, options.visible_as, options.delegate))  # text, which compares after a reload too


def release_gpus() -> None:
    """Release the GPUs that this process holds, through :func:`claim_gpus` or any owner; do nothing without any."""
    owner = _owners.get("gpu_owner") or current_owner()
    if owner is not None:
        owner.release_gpus()


def current_owner() -> GPUOwner | None:
    """Return the owner that holds GPUs in this process, or None. In a forked child the parent's owner does not
    count."""
    current = _owners.get("current")
    return current if current is not None and current._pid == os.getpid() else None


def latest_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process holds, or that its parent held when this process was forked."""
    current = _owners.get("current")
    return current.gpus if current is not None else ()


def _become_current(owner: GPUOwner) -> None:
    with _owners_lock:
        holder = current_owner()
        if holder is not None:
            raise _already_claimed(
                holder,
                "already: release_gpus() first, ask for all GPUs in one claim, or call ensure_gpus(), which keeps "
                "those of the same request",
            )
        _owners["current"] = owner


def _already_claimed(holder: GPUOwner, further: str) -> AlreadyClaimedError:
    devices = holder.devices_taken
    if not holder._asked:
        return AlreadyClaimedError("another thread of this process is claiming GPUs: wait for it, and share its GPUs")
    return AlreadyClaimedError(f"this process holds GPU {','.join(map(str, devices))} {further}", devices=devices)


def _clear_current(owner: GPUOwner) -> None:
    for name, one in list(_owners.items()):
        if one is owner:
            _owners[name] = None
