"""``GPUOwner``: the steps of a claim in their order, and its release."""

from __future__ import annotations

import os
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from ..affinity.binding import BindingReport, bind_claim, restore_state
from ..affinity.planner import PER_GPU_MODES, AffinityOptions
from ..coordination.entry import facts_of_this_process
from ..drivers import opened_driver
from ..drivers.base import Driver
from ..drivers.patience import Patience, why_late
from ..errors import AlreadyClaimedError, CudaInitializedError, GPUAffinityError, HolderLostError, PlaceholderError
from ..gpus.devices import Gpu
from ..host.awaiting import Awaited, Tell, Watchdog
from ..host.procfs import process_global
from ..host.signals import DeferredSignals
from ..runtimes import placeholders
from ..runtimes.library import Runtime
from ..runtimes.visible_devices import hide_all, render_visible
from ..selection.choice import in_listed_order
from ..selection.sharing import share_fraction
from ..settings.variables import is_simulated
from ..topology.cpulist import format_cpulist
from ..wording.text import gpus_by_model
from .arguments import DEFAULT, NODE_BY_DEFAULT, ClaimOptions, DefaultTimeout, asks_for_none, read_options, warn_worker
from .caller import called_by_users
from .checks import clear_notes, doubts_of, verify_alone, verify_devices
from .claim import Claim, ClaimVariables, initializers, share_variables
from .polls import driver_pids
from .search import acquire
from .view import HostView

# The owner that holds GPUs in this process, "current". There is at most one, because a process has one
# CUDA_VISIBLE_DEVICES. It is also "gpu_owner" if it was made by a function.
owners: dict[str, GPUOwner | None] = process_global("owners", {})

_owners_lock = process_global("owners_lock", allocate_lock())


class GPUOwner:
    """GPUs that are claimed from construction until :meth:`release_gpus`, the end of ``with``, or process exit.

    Deleting the object releases nothing. The arguments are those of :func:`claim_gpus`.

    Attributes:
        devices_taken: indices as nvidia-smi shows them, in the order in which CUDA numbers the GPUs from 0.
        gpus: the same GPUs as :class:`~safe_gpu.gpus.devices.Gpu`, as polled before the placeholders were allocated.
        share: bytes of each GPU, if the claim shares its GPUs with others; None for whole GPUs.
        cpus: the CPUs that this process was bound to; empty if it was not bound.
        binding: the report of that binding, or None.
        placeholders: what ``placeholder_fn`` returned, one per GPU.
    """

    _internal: Mapping[str, Any] = {}  # see owner_type

    @called_by_users()
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
        arguments = {**locals()}
        del arguments["self"]
        self._pid = os.getpid()
        self._forked = False
        self._thread = get_ident()
        self._asked = ""  # the request_key, or NO_GPU, once the claim is whole
        self._environment = ClaimVariables()
        self._signals = DeferredSignals()
        self._placeholder: Any  # called with an ordinal; returns what holds that GPU
        self._forget()
        self._undo = ExitStack()  # before a step of the claim begins, it gets what takes the step back
        try:
            self._undo.callback(_clear_current, self)
            _become_current(self)
            self._undo.callback(self._forget)
            if asks_for_none(nb_gpus):
                self._asked = NO_GPU
                self._undo.callback(self._unless_forked, self._environment.restore)
                self._environment.set(hide_all())
                return
            options = read_options(**arguments, **self._internal)
            self.logger: Any = options.logger
            warn_worker(options.logger)
            patience = Patience(options.tell, options.deadline)
            with opened_driver(**options.request.driver, patience=patience) as driver:
                self._claim_by(driver, options)
            if nb_gpus != "job" and options.job.scheduler is not None:
                warn_of_more_than_declared(len(self.gpus), self.logger)
            self._asked = request_key(options)
        except BaseException:
            self.release_gpus()
            raise

    def _claim_by(self, driver: Driver, options: ClaimOptions) -> None:
        """Make the claim, step by step, each after what takes it back; only the binding takes itself back."""
        self._prepare_placeholder(driver, options.placeholder_fn)
        view = HostView(driver, driver.snapshot(), options.request)
        claim = self._new_claim(options)

        self._undo.callback(claim.release)
        acquire(view, options, claim)
        self._take_over(claim, view)

        self._undo.callback(self._unless_forked, self._environment.restore)
        self._set_environment(claim, options.visible_as)
        if options.pause:  # even time.sleep(0) yields the CPU
            time.sleep(options.pause)

        self._undo.callback(self._unless_forked, self._release_placeholders)
        self._fit_placeholder(claim, is_default=options.placeholder_fn is None)
        self._hold(view, claim, driver, options.tell)

        self._verify(view, claim, driver.runtime, options)

        if options.binding is not None or options.memory is not None:
            self._bind(driver, options)

    def _forget(self) -> None:
        """Make this object one that holds nothing."""
        self._claim: Claim | None = None
        self.placeholders: list[Any] = []
        self.binding: BindingReport | None = None
        self.cpus: set[int] = set()
        self.devices_taken: list[int] = []
        self.gpus: tuple[Gpu, ...] = ()
        self.share: int | None = None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles: a copy would give back the locks of this one."""
        raise TypeError(
            f"a GPUOwner cannot be copied or pickled, since process {self._pid} holds the GPUs: pass "
            "owner.devices_taken or owner.gpus instead, and call release_gpus() in that process"
        )

    if not TYPE_CHECKING:  # checkers know that there is no such attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to write instead of a name that means something here."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{_instead_of(name)}"
            raise AttributeError(text, name=name, obj=self)

    def __enter__(self) -> GPUOwner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release_gpus()

    def __repr__(self) -> str:
        """Return ``<GPUOwner: GPU 0,1 (NVIDIA A100-SXM4-80GB), CPUs 0-15>``, for notebooks."""
        if not self.gpus:
            state = "released"
            if current_owner() is self:
                state = self._asked
            return f"<GPUOwner: {state}>"
        parts = [gpus_by_model((gpu.label, gpu.name) for gpu in self.gpus)]
        if len(self.cpus) == 1:
            parts.append(f"CPU {format_cpulist(self.cpus)}")
        elif self.cpus:
            parts.append(f"CPUs {format_cpulist(self.cpus)}")
        if self._pid != os.getpid():
            parts.append(f"held by process {self._pid}")
        return f"<GPUOwner: {', '.join(parts)}>"

    @property
    def share_fraction(self) -> float | None:
        """What a framework may allocate of each GPU, from 0 to 1. That is the share without 512 MiB for CUDA's own
        context, of all memory of the GPU (of several the largest). None for whole GPUs."""
        if self.share is None:
            return None
        return share_fraction(self.share, self.gpus)

    @property
    def _is_whole(self) -> bool:
        """Whether the claim was made; False while a thread is still making it, and if an interrupt came in between."""
        return self._asked != ""

    @property
    def _is_being_made_elsewhere(self) -> bool:
        """Whether another thread is still making the claim."""
        return not self._is_whole and self._thread != get_ident()

    def release_gpus(self) -> None:
        """Release placeholders and GPUs, and restore the environment and the affinity. Safe to call twice.

        In a forked child it only clears this object, because the GPUs and contexts belong to the parent.
        """
        self._signals.run_deferred(self._release_now)

    def keep_across_exec(self) -> None:
        """Keep the claim across exec(2), so that the command that this process executes holds the GPUs."""
        if self._claim is not None:
            self._claim.keep_across_exec()

    # The steps of a claim

    def _prepare_placeholder(self, driver: Driver, placeholder_fn: Any) -> None:
        """Import what the placeholder needs, and check that this does no more; None is the default of the driver."""
        runtime = driver.runtime
        self._placeholder = placeholder_fn
        if placeholder_fn is None:
            self._placeholder = runtime.default_placeholder(self.logger)
        was_initialized = runtime.visible_if_initialized() is not None
        placeholders.prepare(self._placeholder)
        if not was_initialized and runtime.visible_if_initialized() is not None:
            raise CudaInitializedError(
                "the placeholder's prepare() initialised CUDA, which fixed the GPUs that this process sees: prepare() "
                "may only import; initialise CUDA when the placeholder is called"
            )

    def _new_claim(self, options: ClaimOptions) -> Claim:
        """Make an empty claim, which is that of this process."""
        facts = facts_of_this_process(options.job.job_label, options.command)
        secret = ""
        if options.delegate:
            secret = os.urandom(8).hex()
        self._claim = Claim(facts, secret)
        return self._claim

    def _take_over(self, claim: Claim, view: HostView) -> None:
        """Tell of the GPUs that were claimed, in the order in which CUDA will number them."""
        claim.gpus = in_listed_order(claim.gpus, view.request, view.visible_limit)
        self.gpus = claim.gpus
        self.share = claim.share
        self.devices_taken = [gpu.index for gpu in claim.gpus]
        simulated = ""
        if is_simulated(os.environ):
            simulated = " (simulated)"
        self.logger.info(
            "Leased GPU %s (%s)%s",
            ",".join(gpu.label for gpu in claim.gpus),
            ", ".join(gpu.uuid for gpu in claim.gpus),
            simulated,
            extra={"safe_gpu_uuids": [gpu.uuid for gpu in claim.gpus], "safe_gpu_devices": self.devices_taken},
        )

    def _set_environment(self, claim: Claim, visible_as: str) -> None:
        """Make the GPUs those that this process sees."""
        variables = render_visible(claim.gpus, visible_as=visible_as, snapshot=claim.before, environ=os.environ)
        if claim.share is not None:
            variables.update(share_variables(claim.share, claim.gpus, os.environ))
        if claim.token:
            variables["SAFE_GPU_SCOPE"] = claim.token
        self._environment.set(variables)
        name, value = next(iter(variables.items()))
        self.logger.info("Set %s=%s", name, value, extra={"safe_gpu_environment": variables})

    def _fit_placeholder(self, claim: Claim, *, is_default: bool) -> None:
        self._placeholder = placeholders.fit_to_compute_mode(
            self._placeholder, claim.gpus, is_default=is_default, logger=self.logger
        )

    def _hold(self, view: HostView, claim: Claim, driver: Driver, tell: Tell) -> None:
        """Put a placeholder on each GPU, and say so where that takes long."""
        is_builtin = placeholders.is_builtin(self._placeholder)
        cause = "it has not returned"
        if is_builtin:
            cause = why_late(driver.name)
        awaited = Awaited(placeholders.name_of(self._placeholder), tell, lambda: cause)
        if is_builtin and (driver.is_simulated or type(self._placeholder) is placeholders.NoPlaceholder):
            self._allocate(view, claim, driver, awaited)  # which takes no time
        else:
            with Watchdog(awaited):
                self._allocate(view, claim, driver, awaited)

    def _allocate(self, view: HostView, claim: Claim, driver: Driver, awaited: Awaited) -> None:
        make = self._placeholder
        for device_no, gpu in enumerate(claim.gpus):
            awaited.what = f"{placeholders.name_of(make)} to hold GPU {gpu.label}"
            try:
                # Nothing comes between the context and its place in the list.
                with self._deferring(), self._passing():
                    self.placeholders.append(placeholders.allocate(make, device_no))
            except PlaceholderError as err:
                awaited.what = f"the cause of a failure of {placeholders.name_of(make)}"
                raise self._failure(view, claim, driver, device_no, err) from err
        if placeholders.holds_gpu(make):
            self.logger.info("Placeholder holds GPU %s", ",".join(gpu.label for gpu in self.gpus))

    def _deferring(self) -> AbstractContextManager[object]:
        """Hold handlers of signals back, unless nothing is allocated."""
        if type(self._placeholder) is placeholders.NoPlaceholder:
            return nullcontext()
        return self._signals

    def _passing(self) -> AbstractContextManager[object]:
        """Let handlers of signals run in a placeholder of the program's own, which may take any time."""
        if placeholders.is_builtin(self._placeholder):
            return nullcontext()
        return self._signals.delivering()

    def _failure(
        self, view: HostView, claim: Claim, driver: Driver, device_no: int, err: PlaceholderError
    ) -> PlaceholderError:
        """Return the error of this claim, whose placeholder failed on a GPU."""
        from .failure import FailedPlaceholder

        failed = FailedPlaceholder(view, claim, driver, self._placeholder, device_no, err)
        return failed.error(self._works_on, self.logger)

    def _works_on(self, device_no: int) -> bool:
        """Return whether the placeholder works on a GPU of this claim, which it leaves again."""
        try:
            with self._signals:
                placeholders.release(self._placeholder, placeholders.allocate(self._placeholder, device_no))
        except PlaceholderError:
            return False
        return True

    def _verify(self, view: HostView, claim: Claim, runtime: Runtime, options: ClaimOptions) -> None:
        """Check that the GPUs are those that were claimed, and nobody else's. What is not certain is told."""
        if runtime.asks_library:
            if not view.is_frozen and runtime.shown_at(0) is not None:  # for the error of a later claim
                initializers[os.getpid()] = placeholders.name_of(self._placeholder)
            verify_devices(self.gpus, runtime)
        verify_alone(view, claim, options, self._placeholder)
        for doubt in doubts_of(claim):
            self.logger.warning("%s", doubt)
        driver_pids[self._pid] = frozenset(view.own)  # for its next claim
        if placeholders.holds_gpu(self._placeholder):
            clear_notes(view, claim, self.logger)

    def _bind(self, driver: Driver, options: ClaimOptions) -> None:
        """Bind this process to CPUs next to the GPUs."""
        try:
            report = bind_claim(self.gpus, driver, options=options.binding, memory=options.memory)
        except GPUAffinityError as err:
            if options.binding_required:
                raise
            self.logger.warning("CPU affinity was left as it is: %s", err)
            return
        # Only now, unlike the other steps: bind_claim takes itself back where it fails.
        self._undo.callback(self._unless_forked, restore_state)
        if self.share is not None and options.binding is not None and options.binding.mode in PER_GPU_MODES:
            note = "every claim that shares these GPUs gets the same CPUs"
            report = report._replace(notes=(*report.notes, note))
        self.binding = report
        self.cpus = set(report.cpus)
        report.log(self.logger)

    # Release

    def _release_now(self) -> None:
        self._forked = self._pid != os.getpid()
        self._undo.close()

    def _unless_forked(self, step: Callable[[], None]) -> None:
        if not self._forked:
            step()

    def _release_placeholders(self) -> None:
        with ExitStack() as steps:  # each is released, even if another one raises; the last is the first
            while self.placeholders:
                device_no = len(self.placeholders) - 1
                steps.callback(self._release_placeholder, self.placeholders.pop(), device_no)

    def _release_placeholder(self, placeholder: Any, device_no: int) -> None:
        self.logger.info("Releasing placeholder on CUDA device: %s", self.devices_taken[device_no])
        with self._passing():
            placeholders.release(self._placeholder, placeholder)


def _instead_of(attribute: str) -> str:
    """Return the end of an error: what to write instead of an attribute that an owner does not have."""
    from ..wording.elsewhere import GIVE_BACK, chooses_by_index

    if attribute in GIVE_BACK or attribute == "close":
        return ": call release_gpus()"
    if chooses_by_index(attribute):
        return ": read devices_taken or gpus"
    return ""


def owner_type(**internal: Any) -> type[GPUOwner]:
    """Return GPUOwner with further arguments of ``read_options``, for the rest of this package."""

    class InternalOwner(GPUOwner):
        _internal = internal

    return InternalOwner


NO_GPU = "no GPU"


def request_key(options: ClaimOptions) -> str:
    """Return what two claims for the same have in common; see :func:`~safe_gpu.claim.functions.ensure_gpus`."""
    # Text: after a reload of the modules an object would be of another class, and equal to none.
    return repr((*options.request, options.visible_as, options.delegate))


def current_owner() -> GPUOwner | None:
    """Return the owner that holds GPUs in this process, or None. In a forked child the parent's owner does not
    count."""
    current = owners.get("current")
    if current is None or current._pid != os.getpid():
        return None
    return current


def latest_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process holds, or that its parent held when this process was forked."""
    current = owners.get("current")
    if current is None:
        return ()
    return current.gpus


def refuse_lost(owner: GPUOwner) -> None:
    """Refuse to go on with GPUs that others can have, since the program has closed the descriptors of its claim.

    Raises:
        HolderLostError: so it is.
    """
    claim = owner._claim
    if claim is None or not owner._is_whole or claim.is_intact:
        return
    labels = ",".join(gpu.label for gpu in owner.gpus)
    raise HolderLostError(
        f"this process no longer holds GPU {labels}, which it claimed: it has closed the descriptors of that claim, as "
        "os.closerange() and programs that become daemons do; call release_gpus(), and claim again when that is done",
        host=os.uname().nodename,
    )


def _become_current(owner: GPUOwner) -> None:
    with _owners_lock:
        holder = current_owner()
        if holder is not None:
            raise already_claimed(
                holder,
                "already: release_gpus() first, ask for all GPUs in one claim, or call ensure_gpus(), which keeps "
                "those of the same request",
            )
        owners["current"] = owner


def already_claimed(holder: GPUOwner, further: str) -> AlreadyClaimedError:
    devices = holder.devices_taken
    if not holder._is_whole:
        return AlreadyClaimedError("another thread of this process is claiming GPUs: wait for it, and share its GPUs")
    held = "has claimed 0 GPUs"
    if devices:
        held = f"holds GPU {','.join(str(device) for device in devices)}"
    return AlreadyClaimedError(f"this process {held} {further}", devices=devices)


def _clear_current(owner: GPUOwner) -> None:
    for name, one in list(owners.items()):
        if one is owner:
            owners[name] = None


def warn_of_more_than_declared(taken: int, logger: Any) -> None:
    """Warn if a batch job takes more GPUs than it asked its scheduler for; other jobs would then lack them."""
    # For a claim of one GPU the scheduler is not asked, because thousands of array tasks would ask it.
    from ..schedulers.gpu_count import declared_gpus

    declared = declared_gpus(os.environ, ask=taken > 1, patience=2.0)
    if declared is not None and taken > declared:
        logger.warning(
            "this claim takes %d GPUs, but the job asked its scheduler for %d: ask it for %d, or claim fewer",
            taken,
            declared,
            taken,
        )
