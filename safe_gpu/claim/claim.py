"""What a claim holds, from its first door to its release; the variables that limit it, and those that it sets."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

from ..coordination.directory import BorrowedDirectory
from ..coordination.doors import Doors, digest
from ..coordination.history import append, claim_line, end_line
from ..coordination.holders import gpus_of_scope
from ..coordination.host_lock import Host
from ..coordination.own_entry import OwnEntry
from ..coordination.silicon import keys_of
from ..errors import CudaInitializedError, UnsatisfiableRequestError
from ..gpus.devices import Gpu, HostSnapshot, VisibleLimit
from ..host.locks import ReadLock, keep_across_exec
from ..host.signals import DeferredSignals
from ..runtimes.library import Runtime
from ..runtimes.visible_devices import read_visible_once, visible_variables
from ..schedulers.job import current
from ..selection.sharing import MIB, share_capacity, share_fraction
from ..settings import variables as settings

initializers: dict[int, str] = {}
"""Pid of a process in which a claim's placeholder initialised CUDA -> the name of that placeholder. CUDA stays
initialised when the placeholder is released."""


def visible_limit_of(snapshot: HostSnapshot, nb_gpus: int, runtime: Runtime) -> VisibleLimit | None:
    """Return the GPUs that the variables of their vendor allow; None if these do not limit the choice.

    If the runtime is initialised in this process, the limit is the GPUs that it sees (``frozen``), in its order.

    Args:
        snapshot: the host's devices.
        nb_gpus: how many are asked for.
        runtime: of these devices.

    Raises:
        CudaInitializedError: CUDA is initialised and sees another number of GPUs than asked for.
        UnsatisfiableRequestError: the variable is ambiguous on this host.
    """
    visible = runtime.visible_if_initialized()
    if visible is not None:
        return _frozen(snapshot, nb_gpus, visible, runtime)
    if settings.ignores_fence(os.environ):
        return None
    limit = read_visible_once(os.environ, snapshot)
    if limit is None:
        return None
    enclosing = gpus_of_scope(os.environ.get("SAFE_GPU_SCOPE", ""))
    is_all_of_enclosing = bool(enclosing) and set(enclosing) <= set(limit.uuids)
    if current().scheduler is not None or is_all_of_enclosing:
        limit = limit._replace(lift="")
    if limit.ambiguous:
        problem = f"{limit.name}={limit.value} is ambiguous: {limit.doubt}; set {limit.clear_by}"
        if limit.lift:
            problem += f", or set {limit.lift}"
        raise UnsatisfiableRequestError(problem, value=limit.value)
    return limit


def _frozen(snapshot: HostSnapshot, nb_gpus: int, visible: tuple[str, ...], runtime: Runtime) -> VisibleLimit:
    """Return the limit of a process in which CUDA is initialised. It can claim exactly the GPUs that CUDA sees, no
    others."""
    uuids = [_uuid_in(snapshot, one, runtime) for one in visible]
    known = tuple(uuid for uuid in uuids if uuid is not None)
    if len(known) < len(uuids) or len(uuids) != nb_gpus:
        raise CudaInitializedError(_why_frozen(nb_gpus, len(visible), runtime.title), visible=visible)
    name = visible_variables(snapshot)[0]
    return VisibleLimit(os.environ.get(name, ""), known, frozen=True, name=name, library=runtime.title, lift="")


def _uuid_in(snapshot: HostSnapshot, visible: str, runtime: Runtime) -> str | None:
    """Return the UUID of a GPU that CUDA sees as the driver writes it; None of one that it does not list."""
    for gpu in reversed(snapshot.gpus):
        if runtime.is_same(visible, gpu):
            return gpu.uuid
    return None


def _why_frozen(nb_gpus: int, nb_visible: int, library: str) -> str:
    cannot = f"sees {nb_visible} GPU(s), so a claim of {nb_gpus} cannot change which ones it uses"
    placeholder = initializers.get(os.getpid())
    if placeholder:
        return (
            f"{library} was initialised in this process by the placeholder of an earlier claim ({placeholder}), and it "
            f"stays so after release_gpus(): it {cannot}: make one claim of {max(nb_gpus, nb_visible)}, or make the "
            "earlier claim with placeholder_fn=NoPlaceholder() and use no GPU before this one, or start a new process"
        )
    return (
        f"{library} is already initialised in this process and {cannot}: call claim_gpus() before "
        f"torch.cuda.is_available(), device_count() and anything else that initialises {library}, or start a new "
        "process"
    )


class ClaimVariables:
    """Variables of this process that a claim has set."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[str, str | None]] = {}  # name -> value, and value before

    def set(self, variables: Mapping[str, str]) -> None:
        """Set these variables."""
        for name, value in variables.items():
            self._set[name] = (value, os.environ.get(name))
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


def share_variables(share: int, gpus: Collection[Gpu], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep a program within its share of each GPU, in bytes."""
    fraction = f"{share_fraction(share, gpus):.6g}"
    for_frameworks = {
        "CUDA_DEVICE_MEMORY_LIMIT": str(share),
        "GPU_MEMORY_LIMIT": str(share),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    if "XLA_CLIENT_MEM_FRACTION" not in environ:  # JAX refuses both together
        for_frameworks["XLA_PYTHON_CLIENT_MEM_FRACTION"] = fraction
    if environ.get("SAFE_GPU_SHARE_TORCH") == "1":  # PyTorch before 2.10 refuses the option
        for_frameworks["PYTORCH_CUDA_ALLOC_CONF"] = f"per_process_memory_fraction:{fraction}"
    mps_pipe = environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    if os.path.exists(os.path.join(mps_pipe, "control")) and all(gpu.named_by_uuid for gpu in gpus):
        limits = ",".join(f"{gpu.uuid}={share // MIB}M" for gpu in gpus)
        for_frameworks["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = limits
    variables = {"SAFE_GPU_SHARE": str(share), "SAFE_GPU_SHARE_FRACTION": fraction}
    for name, value in for_frameworks.items():
        if name not in environ:
            variables[name] = value
    return variables


class ClaimEntry(OwnEntry):
    """The entry of a claim. Another attempt of the claim makes another one.

    Args:
        host: whose host.lock is held.
        facts: what the entry says.

    Attributes:
        is_final: whether the second listing found nobody in its way. Only then the history tells of it.

    Raises:
        StateDirError: it cannot be made (no space).
    """

    def __init__(self, host: Host, facts: Mapping[str, Any]) -> None:
        self.is_final = False
        self._facts = facts
        self._began = time.clock_gettime(time.CLOCK_BOOTTIME)  # which does not jump
        super().__init__(host, host.claims, host.claims.next_number, facts, by_children=True)
        host.claims.leave_out(self.name)  # the second listing is to find those of others

    def before_removal(self, state_dir: BorrowedDirectory) -> None:
        """Tell the history of the claim."""
        if not self.is_final:
            return
        line = claim_line(self._facts, uid=os.geteuid())
        if not line:
            return
        since = float(self._facts["since"])
        ended = round(since + time.clock_gettime(time.CLOCK_BOOTTIME) - self._began, 3)
        append([line, end_line(self._facts["pid"], since, ended, ended)], time.time(), state_dir)


class Claim:
    """What one claim holds. It is created empty and filled step by step, so that :meth:`release` works at any time.

    Args:
        facts: of this process, see :func:`~safe_gpu.coordination.entry.facts_of_this_process`; made before host.lock is
            taken.
        secret: lets child processes claim inside this claim; "" for none.

    Attributes:
        gpus: the claimed GPUs, as in ``before``.
        doors: of these GPUs, which keep off processes with another state directory.
        share: bytes of each GPU that it holds; None for whole GPUs, and inside another claim.
        inside: hash of the token of the enclosing claim; "" of a claim inside none.
        entry: by which processes with this state directory see the claim; None before it is made, and once it is
            released.
        before: the last poll before the placeholders are allocated.
        explained: UUID -> driver pids on that GPU that belong to the enclosing claim.
        older: the lock of the older package, while it is held.
    """

    def __init__(self, facts: Mapping[str, Any], secret: str = "") -> None:
        self.gpus: tuple[Gpu, ...] = ()
        self.doors = Doors()
        self.share: int | None = None
        self.inside = ""
        self.entry: ClaimEntry | None = None
        self.before = HostSnapshot(())
        self.explained: Mapping[str, Collection[int]] = {}
        self.older: ReadLock | None = None
        self._facts = facts
        self._secret = secret

    @property
    def token(self) -> str:
        """What child processes need to claim inside this claim, whose hash its entry has; "" if they cannot."""
        if self.inside:
            return ""
        return self._secret

    @property
    def file(self) -> tuple[int, int] | None:
        """Device and inode of its entry; None without one."""
        if self.entry is None:
            return None
        return self.entry.file

    @property
    def is_intact(self) -> bool:
        """Whether its entry and its doors are still held here. A program that closes descriptors that it did not open,
        as daemons do, gives its GPUs away."""
        return self.entry is not None and self.entry.is_locked and self.doors.are_intact

    def make_entry(
        self,
        host: Host,
        gpus: tuple[Gpu, ...],
        *,
        share: int | None = None,
        hold_for: float | None = None,
        queued: float | None = None,
        waited: float = 0.0,
        display: bool = False,
    ) -> None:
        """Make the entry of a claim of these GPUs, whose doors it has. host.lock is held.

        Args:
            hold_for: seconds that the claim will probably last; None is unknown.
            queued: when it joined the queue, in Unix seconds; None if it did not wait.
            waited: seconds since the call.
            display: whether it shares a display.

        Raises:
            StateDirError: the entry cannot be made (no space).
        """
        now = round(time.time(), 3)
        self.gpus = gpus
        self.share = share
        until = None
        if hold_for is not None:
            until = round(now + hold_for, 3)
        if queued is not None:
            queued = round(queued, 3)
        token = ""
        if self.token:
            token = digest(self.token)
        capacity = None
        if share is not None:
            capacity = _least_capacity(gpus)
        facts = {
            **self._facts,
            "since": now,
            "until": until,
            "queued": queued,
            "gpus": {gpu.uuid: share for gpu in gpus},
            "parts": self.doors.parts,
            **keys_of(gpus),
            "display": display,
            "token": token,
            "inside": self.inside,
            "waited": round(waited, 3),
            "labels": [gpu.label for gpu in gpus],
            "of": capacity,
        }
        self.entry = ClaimEntry(host, facts)

    def keep_across_exec(self) -> None:
        """Keep all that is held across exec(2) of this process."""
        with DeferredSignals():
            if self.entry is not None:
                keep_across_exec(self.entry.descriptors)
            self.doors.keep_across_exec()

    def release_older(self) -> None:
        """Release the lock of the older package, if it is held."""
        if self.older is not None:
            DeferredSignals().run_deferred(self.older.release)
            self.older = None

    def release(self) -> None:
        """Release everything, after which the claim is empty. Safe to call twice."""
        DeferredSignals().run_deferred(self._release_now)

    def _release_now(self) -> None:
        with ExitStack() as steps:  # each is made, even if another one raises; the last is the first
            # A door that is closed may be taken in another state directory, and must not count as that of a claim here.
            steps.callback(self.doors.release)
            if self.entry is not None:
                steps.callback(self.entry.release)
                self.entry = None
            steps.callback(self.release_older)


def _least_capacity(gpus: Collection[Gpu]) -> int | None:
    """Return the bytes that claims can share of the smallest of these GPUs; None if that is known of none."""
    capacities = []
    for gpu in gpus:
        capacity = share_capacity(gpu)
        if capacity:
            capacities.append(capacity)
    return min(capacities, default=None)
