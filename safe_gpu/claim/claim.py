"""What a claim holds, the checks once it holds it, and what happens when a GPU turns out bad.

CUDA reads CUDA_VISIBLE_DEVICES once. After a context was attempted in this process the choice of GPUs is fixed, so
another GPU needs another process. What can be known before is asked in a child process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .. import procfs
from ..coordination.history import append
from ..coordination.legacy import take_legacy_lock
from ..coordination.locks import StateDirGuard, opened
from ..coordination.records import program_names
from ..coordination.signals import DeferredSignals
from ..devices import Gpu, GpuProcess, HostSnapshot
from ..errors import (
    CudaInitializedError,
    GpuContendedError,
    NoDriverError,
    NotEnoughGpusError,
    PlaceholderError,
    SafeGpuError,
    StateDirError,
    WrongDeviceError,
)
from ..procfs import describe_process, printable, well_formed
from ..selection.choice import capacity
from ..selection.request import Selection
from ..selection.sharing import share_capacity
from ..selection.verdicts import HIDDEN, NOT_YET, SHOWN, computes, has_mps_clients, judge, presence
from ..text import in_brackets

if TYPE_CHECKING:
    from ..coordination.files import StateDir
    from ..coordination.leases import Lease, LeaseRecord
    from ..coordination.legacy import LegacyLock
    from ..coordination.locks import LockedHost
    from ..coordination.socket_names import SocketName
    from ..runtimes.runtime import Runtime
    from .options import ClaimOptions
    from .view import HostView


# What the history is told when a claim begins: the claim, and how those before it on its GPUs ended.


def append_history(record: LeaseRecord, gpus: Sequence[Gpu], leases: Sequence[Lease]) -> None:
    """Append a claim that holds these leases to the history. No error of it reaches the claim.

    Claims inside claims and claims that are shared have no line.
    """
    if any(lease.inner or lease.shared for lease in leases):
        return
    former = dict.fromkeys(line for lease in leases for line in _of_former(lease))
    line = _line(record, labels=[gpu.label for gpu in gpus])
    if append([*former, line], time.time()):
        for lease in leases:
            lease.noted = (record.pid, record.since)


def _of_former(lease: Lease) -> list[bytes]:
    """Return how the claim before ended; with all that is known of it if it died, perhaps before it wrote its own
    line."""
    if not lease.former.data:
        return []
    ending = lease.former.ending()
    if ending == lease.former.data:  # written by the claim itself, as almost always
        return [ending]
    record = lease.former.record()
    return [_line(record), ending] if record is not None and ending else [ending]


def _line(record: LeaseRecord, labels: Sequence[str] = ()) -> bytes:
    fields: dict[str, Any] = {"v": 1, "claim": [record.pid, record.since], "uid": record.uid}
    for key in ("user", "host", "job"):
        value = getattr(record, key)
        fields[key] = value and well_formed(value)
    # The record may have the whole command, by the wish of its user, and is soon gone; this line stays.
    fields["command"] = record.command and printable(well_formed(program_names(record.command.split())))
    fields.update(gpus=record.gpus, labels=labels, until=record.until)
    if record.share is not None:
        fields.update(share=record.share, of=record.of)
    return json.dumps(fields).encode() + b"\n"


# What a claim holds: its leases, the text of their records, and the lock of the older package.


class Claim:
    """The leases of one claim. It is created empty and filled step by step, so that :meth:`release` works at any time.

    Args:
        record: the record of this process for the lease files, made before host.lock is taken.
        token: a secret that lets child processes claim inside this claim; "" for none. Records have its hash.

    Attributes:
        gpus: the claimed GPUs, as in ``before``.
        leases: the leases of these GPUs, or of the slots in which the claim shares them.
        beneath: the GPUs' leases, locked shared, of a claim that shares them or is inside one that does.
        names: the names of these GPUs, which exclude processes with another state directory.
        before: the last poll before the placeholders are allocated.
        kept: the lock that keeps cleaners of temporary files out of the state directory.
        share: bytes of each GPU that it holds; None for whole GPUs, and inside another claim.
        inner: whether this claim is made inside another one. Such a claim cannot delegate.
        explained: UUID -> driver pids on that GPU that belong to the outer claim.
        legacy: the lock of the older package, while it is held.
    """

    def __init__(self, record: LeaseRecord, token: str = "") -> None:
        self.gpus: tuple[Gpu, ...] = ()
        self.leases: list[Lease] = []
        self.beneath: list[Lease] = []
        self.share: int | None = None
        self.names: list[SocketName] = []
        self.kept = StateDirGuard(by_children=True)
        self.before = HostSnapshot(())
        self.inner = False
        self.explained: Mapping[str, Collection[int]] = {}
        self.legacy: LegacyLock | None = None
        self._record = record
        self._taken = record  # with GPUs and times, once they are known
        self._token = token

    @property
    def token(self) -> str:
        """What child processes need to claim inside this claim; "" if they cannot."""
        return "" if self.inner else self._token

    def take(
        self,
        host: LockedHost,
        gpus: tuple[Gpu, ...],
        leases: dict[str, Lease],
        names: dict[str, list[SocketName]],
        beneath: dict[str, Lease],
        hold_for: float | None = None,
        *,
        share: int | None = None,
    ) -> None:
        """Move the leases and names of these GPUs, by UUID, into this claim, and write their records. ``inner`` has
        been set before. ``hold_for``: seconds that the claim will probably last.

        Raises:
            StateDirError: a record cannot be written (no space). The claim holds the leases even then.
        """
        self.gpus = gpus
        for gpu in gpus:
            self.leases.append(leases[gpu.uuid])
            del leases[gpu.uuid]
            if gpu.uuid in beneath:
                self.beneath.append(beneath[gpu.uuid])
                del beneath[gpu.uuid]
            self.names.extend(names.get(gpu.uuid, ()))
            names.pop(gpu.uuid, None)
        self._taken = self._record.claiming(tuple(gpu.uuid for gpu in gpus), self.token, hold_for)
        self.share = None if self.inner else share
        if share is not None:
            self._taken = self._taken._replace(
                share=share, of=min(filter(None, map(share_capacity, gpus)), default=None)
            )
        line = self._taken.encode()
        for lease in self.leases:
            lease.write(line)
        self.kept.hold(host)

    def _held(self) -> tuple[list[Lease] | list[SocketName], ...]:
        """Return all that is held. What is released last comes first.

        Names go before leases: whose lease is free has no name any more. A share frees its slots first, since who comes
        through another state directory asks for names alone. So does a claim that allows claims inside it: one of them
        may just have found its lease.
        """
        if self.beneath or self.token:
            return self.beneath, self.names, self.leases
        return self.leases, self.names

    def note(self) -> None:
        """Tell the history of this claim, and how those before it ended. It holds its GPUs; host.lock is not held."""
        with DeferredSignals():
            append_history(self._taken, self.gpus, self.leases)

    def keep_across_exec(self) -> None:
        """Keep the leases and locks across exec(2) of this process.

        The kernel closes the lowest descriptor of a dead process first, so those take it that are released first.
        """
        with DeferredSignals():
            for held in reversed(self._held()):
                for one in held:
                    one.keep_across_exec()
            self.kept.keep_across_exec()

    def release_legacy(self) -> None:
        """Release the lock of the older package, if it is held."""
        if self.legacy is not None:
            DeferredSignals().run_deferred(self.legacy.release)
            self.legacy = None

    def release(self) -> None:
        """Release everything, after which the claim is empty. Safe to call twice."""
        DeferredSignals().run_deferred(self._release_now)

    def _release_now(self) -> None:
        with ExitStack() as steps:  # every step runs, even if another one raises
            steps.callback(self.kept.release)
            for held in self._held():
                steps.callback(held.clear)
                for one in held:
                    steps.callback(one.release)
            steps.callback(self.release_legacy)


# Checks after the leases are taken: two more polls for processes without a lease, and which GPUs CUDA opened.


# The lock of the older package is held until the driver shows the placeholder, but at most this long, in seconds.
_SHOWING = 2.0


def confirm(view: HostView, claim: Claim, options: ClaimOptions) -> bool:
    """Poll again, with the leases and the lock of the older package held. Return whether the GPUs are still
    free.

    If they are not, the claim is released.
    """
    with DeferredSignals() as signals:
        claim.legacy = take_legacy_lock(None if options.timeout is None else options.deadline, options.logger, signals)
    view.poll_again(claim.gpus)
    claim.before, claim.explained = view.snapshot, view.explained
    if claim.beneath:
        with opened("leases") as leases:
            view.see_sharers(leases, claim.gpus)
    now = (view.snapshot.by_uuid(gpu.uuid) for gpu in claim.gpus)
    verdicts = {verdict.gpu.uuid: verdict for verdict in view.judge({}, [gpu for gpu in now if gpu is not None])}
    for gpu in claim.gpus:
        verdict = verdicts.get(gpu.uuid)
        if verdict is None or not verdict.free:
            reason = "it is gone" if verdict is None else verdict.reason
            options.logger.info("GPU %s was taken meanwhile (%s): starting over", gpu.label, reason)
            claim.release()
            view.poll()  # before others are chosen
            return False
    claim.gpus = tuple(verdicts[gpu.uuid].gpu for gpu in claim.gpus)
    return True


def verify_devices(gpus: Sequence[Gpu], runtime: Runtime) -> None:
    """Compare each CUDA ordinal with the GPU that was claimed for it. Does nothing while CUDA is not initialised.

    Raises:
        WrongDeviceError: an ordinal is another GPU or missing, or CUDA sees more GPUs than were claimed.
    """
    title = runtime.title
    for device_no, gpu in enumerate(gpus):
        actual = runtime.shown_at(device_no)
        if actual is not None and not runtime.is_same(actual, gpu):
            raise WrongDeviceError(
                f"{title} device {device_no} is {actual or 'missing'}, but GPU {gpu.label} ({gpu.uuid}) was claimed: "
                f"{title} was probably initialised before the claim, or CUDA_DEVICE_ORDER was changed since; claim "
                'first in the program, or with visible_as="uuid"',
                device_no=device_no,
                expected=gpu.uuid,
                actual=actual,
            )
    further = runtime.shown_at(len(gpus))
    if further:
        raise WrongDeviceError(
            f"{title} device {len(gpus)} is {further}, which was not claimed: {title} was probably initialised while "
            "this process claimed, or CUDA_VISIBLE_DEVICES was changed since; claim first in the program",
            device_no=len(gpus),
            actual=further,
        )


def verify_alone(view: HostView, claim: Claim, options: ClaimOptions, *, holding: bool) -> None:
    """Poll a third time: refuse foreign processes, and release the lock of the older package.

    That lock is held until the driver shows the placeholder, because the older package knows no leases. In a container
    that shows host pids, the host pid of this process is found here and added to ``view.own``. A driver that hides the
    placeholder is not waited for: it warns, because then others cannot see it either.

    Args:
        holding: whether there is a placeholder that the driver can show.

    Raises:
        GpuContendedError: a process that is not this one has started on a claimed GPU since the second poll.
        NotEnoughGpusError: a claimed GPU was lost.
    """
    until = time.monotonic() + _SHOWING
    while True:
        snapshot = claim.before.updated(view.driver.usage(claim.gpus))
        _refuse_other_processes(view, claim, snapshot, holding)
        shown = []
        for gpu in claim.gpus if holding else ():
            before, now = claim.before.by_uuid(gpu.uuid), snapshot.by_uuid(gpu.uuid)
            shown.append((gpu.label, presence(before or gpu, now or gpu, view.own)))
        waiting = claim.legacy is not None and any(one not in (SHOWN, HIDDEN) for _, one in shown)
        late = time.monotonic() >= until
        if not waiting or late:
            break
        time.sleep(0.02)
    claim.release_legacy()
    hidden = [label for label, one in shown if one == HIDDEN or (late and one == NOT_YET)]
    if hidden and not snapshot.shared_display:
        options.logger.warning(
            "the driver does not list this process on GPU %s, so that others who look at the GPUs, with nvidia-smi for "
            "example, cannot see that it is taken: only claims of safe_gpu keep off it (safe-gpu doctor says more)",
            ",".join(hidden),
        )


def _refuse_other_processes(view: HostView, claim: Claim, snapshot: HostSnapshot, holding: bool) -> None:
    """Raise if another process has started on a claimed GPU; if others share it, one of none of them."""
    mps_clients, own = has_mps_clients(snapshot), view.own
    for gpu in claim.gpus:
        before, now = claim.before.by_uuid(gpu.uuid), snapshot.by_uuid(gpu.uuid)
        if now is None or now.lost:
            raise _lost(gpu, claim, snapshot, own)
        if now.processes is None or before is None or before.processes is None:
            continue  # one of the two process lists failed, so they cannot be compared
        others = [process for process in now.processes if process.pid not in own]
        known = set(claim.explained.get(gpu.uuid, ()))
        if others:
            known |= {process.pid for process in _computing(before.processes)}
        new = [process for process in _computing(others, mps_clients=mps_clients) if process.pid not in known]
        if claim.beneath and new:
            with opened("leases") as leases:
                new = view.strangers(leases, gpu, new)
        hidden = [process for process in new if process.elsewhere or not procfs.exists(process.pid)]
        # The driver may show host pids: one new pid that is not in /proc, in place of this process's, is this process.
        if holding and len(own) == 1 and len(hidden) == 1 and not any(p.pid in own for p in now.processes):
            own.add(hidden[0].pid)
            new = [process for process in new if process not in hidden]
        if new and not snapshot.shared_display:
            raise _contended(gpu, new, claim, snapshot, own)


def _contended(
    gpu: Gpu, others: list[GpuProcess], claim: Claim, snapshot: HostSnapshot, own: Collection[int]
) -> GpuContendedError:
    names = ", ".join(_process_text(process) for process in others)
    return GpuContendedError(
        f"{names} started on GPU {gpu.label} ({gpu.uuid}) without safe_gpu, at the same moment as this claim: "
        "everything was given back, claim again",
        nb_gpus=len(claim.gpus),
        verdicts=judge(snapshot, Selection(), leased={}, own=own, describe=describe_process),
        uuid=gpu.uuid,
        processes=others,
    )


def _lost(gpu: Gpu, claim: Claim, snapshot: HostSnapshot, own: Collection[int]) -> NotEnoughGpusError:
    return NotEnoughGpusError(
        f"the driver lost GPU {gpu.label} ({gpu.uuid}) while it was being claimed: everything was given back, claim "
        "again to get another",
        nb_gpus=len(claim.gpus),
        verdicts=judge(snapshot, Selection(), leased={}, own=own, describe=describe_process),
    )


def other_processes(view: HostView, gpu: Gpu) -> str:
    """Return the other processes on a GPU whose placeholder failed, for the message; "" if there is none."""
    try:
        (now,) = view.driver.usage((gpu,))
    except SafeGpuError as err:
        return str(err)
    others = [process for process in _computing(now.processes or ()) if process.pid not in view.own]
    return ", ".join(_process_text(process) for process in others)


def _computing(processes: Iterable[GpuProcess], *, mps_clients: bool = False) -> list[GpuProcess]:
    """Return the processes that make a GPU busy, one entry for each pid; ``mps_clients`` as in ``computes``.

    The MPS server is left out, because the placeholder may have started it.
    """
    found = {
        process.pid: process for process in processes if computes(process, describe_process, mps_clients=mps_clients)
    }
    return list(found.values())


def _process_text(process: GpuProcess) -> str:
    described = None if process.elsewhere else describe_process(process.pid)
    return f"process {process.pid}{in_brackets(*(described or (process.name,)))}"


# A claim that gets a bad GPU: it notes that for the claims to come, and takes other GPUs if it still can.


class BadGpuFallback:
    """What one claim learns of bad GPUs, from its first lease to its last placeholder.

    Args:
        view: of this claim.
        placeholder_fn: its placeholder.
        logger: gets a warning for each bad GPU.
    """

    def __init__(self, view: HostView, placeholder_fn: Any, logger: Any) -> None:
        self._view = view
        self._placeholder_fn = placeholder_fn
        self._logger = logger
        self._sound: set[str] = set()  # worked in a child of this process
        self._failed_here = False  # a placeholder has failed in this process
        self._of_the_gpu = False  # the latest failure speaks of the GPU

    def try_suspects(self, claim: Claim) -> None:
        """Try the claimed GPUs of which an earlier claim noted a failure, before this process touches them.

        CUDA_VISIBLE_DEVICES has been set. After a failure in this process, all GPUs of the next claim are tried.

        Raises:
            PlaceholderError: one of them still fails.
        """
        doubtful = [
            (device_no, gpu)
            for device_no, gpu in enumerate(claim.gpus)
            if self._failed_here or gpu.uuid in self._view.faults
        ]
        if not doubtful or self._is_fixed():  # this process may be on the GPU already, and keep a child out
            return
        for device_no, gpu in doubtful:
            reason = self._try(gpu, device_no)
            if reason:
                self._of_the_gpu = True
                raise _error(f"GPU {gpu.label} was tried first and failed: {reason}", gpu, device_no)

    def described(self, err: PlaceholderError, gpu: Gpu, device_no: int, others: str) -> PlaceholderError:
        """Return the error of a placeholder in this process, with the GPU and the ``others`` on it."""
        from ..runtimes.placeholders import blames_gpu

        self._failed_here = True
        self._logger.error("Failed to acquire placeholder on GPU %s: %s", gpu.label, err)
        self._of_the_gpu = blames_gpu(err, rivals=bool(others))
        return _error(str(err), gpu, device_no, others)

    def exclude(self, claim: Claim, err: PlaceholderError) -> None:
        """Note which of the claimed GPUs is bad, and return if the claim may try others.

        Raises:
            PlaceholderError: the error as it is, if it does not speak of a GPU; or with what to do about that GPU.
        """
        bad = self._bad(claim, err)
        if not bad:
            raise err
        from ..coordination.leases import write_fault
        from ..devices import GpuFault
        from ..selection.verdicts import LAST_CHOICE_TEXT

        fault = GpuFault(time.time(), str(err))
        self._with_notes(bad, lambda leases, uuid: write_fault(leases, uuid, fault))
        last = f"GPU {_labels(bad)} is taken last for {LAST_CHOICE_TEXT}"
        uuids = {gpu.uuid for gpu in bad}
        if capacity([gpu for gpu in self._view.usable if gpu.uuid not in uuids]) < self._view.request.nb_gpus:
            raise _further(err, f"{last}, but this claim can get too few others") from err
        if self._is_fixed():
            raise _further(err, f"{last}: start a new process") from err
        self._logger.warning("%s; %s, and this claim tries others", err, last)
        self._view.give_up(dict.fromkeys(uuids, f"it failed in this claim: {err}"))

    def clear_notes(self, claim: Claim, *, holding: bool) -> None:
        """Clear the notes on the GPUs of a claim that works.

        Args:
            holding: whether a placeholder is on them.
        """
        noted = [gpu for gpu in claim.gpus if gpu.uuid in self._view.faults]
        sound = [gpu for gpu in noted if holding or gpu.uuid in self._sound]
        if sound:
            from ..coordination.leases import clear_fault

            self._with_notes(sound, clear_fault)

    # What is bad

    def _bad(self, claim: Claim, err: PlaceholderError) -> list[Gpu]:
        if not self._of_the_gpu:
            return []
        suspects = [gpu for gpu in claim.gpus if gpu.uuid == err.uuid]
        if len(claim.gpus) > 1 and _of_init(err):  # cuInit looks at all visible GPUs and does not say which is bad
            suspects = [gpu for device_no, gpu in enumerate(claim.gpus) if self._try(gpu, device_no)]
        bad = [gpu for gpu in suspects if gpu.uuid not in self._sound]
        if suspects and not bad:
            raise _further(err, f"GPU {_labels(suspects)} works in another process: start a new process") from err
        return bad

    def _is_fixed(self) -> bool:
        """Return whether CUDA is initialised in this process, so that its GPUs cannot be changed any more."""
        try:
            return self._view.driver.runtime.visible_if_initialized() is not None
        except CudaInitializedError:
            return True

    # Trials

    def _try(self, gpu: Gpu, device_no: int) -> str:
        """Try a claimed GPU without touching CUDA in this process. Returns what is wrong with it, or ""."""
        if gpu.uuid in self._sound:
            return ""
        try:
            self._view.driver.runtime.try_gpu(gpu, device_no, self._logger)
        except (NoDriverError, PlaceholderError) as err:
            from ..runtimes.placeholders import blames_gpu

            if blames_gpu(err) or "did not answer" in str(err):
                return str(err)
            self._logger.warning("GPU %s could not be tried: %s", gpu.label, err)
            return ""
        self._sound.add(gpu.uuid)
        return ""

    def _with_notes(self, gpus: Iterable[Gpu], change: Callable[[StateDir, str], None]) -> None:
        """Change the notes on these GPUs. A note that cannot be changed does no harm."""
        try:
            with opened("leases") as leases:
                for gpu in gpus:
                    change(leases, gpu.uuid)
        except (StateDirError, OSError) as err:
            self._logger.warning("the note that a GPU failed cannot be changed: %s", err)


def _of_init(err: BaseException) -> bool:
    while err.__cause__ is not None:
        err = err.__cause__
    return "cuInit" in str(err)


def _labels(gpus: Iterable[Gpu]) -> str:
    return ",".join(gpu.label for gpu in gpus)


def _error(text: str, gpu: Gpu, device_no: int, others: str = "") -> PlaceholderError:
    on_it = f"; on it: {others}" if others else ""
    return PlaceholderError(f"{text} [GPU {gpu.label}, {gpu.uuid}{on_it}]", device_no=device_no, uuid=gpu.uuid)


def _further(err: PlaceholderError, text: str) -> PlaceholderError:
    return PlaceholderError(f"{err}; {text}", device_no=err.device_no, uuid=err.uuid)
