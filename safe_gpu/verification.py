"""After the placeholder: did CUDA open the claimed GPUs, and is anybody else there?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from . import cuda, procfs
from .claims import Claim, describe_process
from .devices import Gpu, GpuProcess, GpuRequest, HostSnapshot
from .errors import GpuContendedError, NotEnoughGpusError, SafeGpuError, WrongDeviceError
from .selection import computes, judge

if TYPE_CHECKING:
    from .drivers.base import Driver

__all__ = ["own_pids", "remember_own_pids", "rivals", "verify_alone", "verify_devices"]

# Pid -> the driver's pids of that process, this one or one that it was forked from. Where a container shows host pids,
# a first placeholder teaches ours; a framework may keep its context there, which a later claim must know for our own.
_learnt: dict[int, frozenset[int]] = {}

# The older package's lock is held until the driver shows our placeholder, or so long where it never does.
_SHOWING = 2.0


def verify_devices(gpus: Sequence[Gpu], uuid_of_ordinal: Callable[[int], str | None] = cuda.uuid_of_ordinal) -> None:
    """Compare each CUDA ordinal with the GPU that was claimed for it, as far as CUDA is awake.

    Raises:
        WrongDeviceError: CUDA has another GPU there, or none, or sees more than was claimed.
    """
    for device_no, gpu in enumerate(gpus):
        actual = uuid_of_ordinal(device_no)
        if actual is not None and not cuda.same_device(actual, gpu.uuid):
            raise WrongDeviceError(
                f"CUDA device {device_no} is {actual or 'missing'}, but GPU {gpu.label} ({gpu.uuid}) was claimed: CUDA "
                "was probably initialised before the claim, or CUDA_DEVICE_ORDER was changed since; claim first in the "
                'program, or with visible_as="uuid"',
                device_no=device_no,
                expected=gpu.uuid,
                actual=actual,
            )
    further = uuid_of_ordinal(len(gpus))
    if further:
        raise WrongDeviceError(
            f"CUDA device {len(gpus)} is {further}, which was not claimed: CUDA was probably initialised while this "
            "process claimed, or CUDA_VISIBLE_DEVICES was changed since; claim first in the program",
            device_no=len(gpus),
            actual=further,
        )


def verify_alone(driver: Driver, claim: Claim, own: set[int], *, holding: bool) -> None:
    """Look once more for strangers, and keep the older package away until it can see our placeholder.

    Args:
        own: driver pids that are this process; one learnt here (a container that shows host pids) is added.
        holding: whether there is a placeholder to be seen.

    Raises:
        GpuContendedError: a process came since the last poll that is not us.
        NotEnoughGpusError: a claimed GPU was lost.
    """
    until = time.monotonic() + _SHOWING
    while True:
        snapshot = driver.snapshot()
        shown = _refuse_strangers(claim, snapshot, own, holding)
        if shown or not holding or claim.legacy is None or time.monotonic() >= until:
            break
        time.sleep(0.02)
    claim.release_legacy()


def _refuse_strangers(claim: Claim, snapshot: HostSnapshot, own: set[int], holding: bool) -> bool:
    """Raise for a stranger; True when this process shows on every claimed GPU."""
    shown = True
    for gpu in claim.gpus:
        before, now = claim.before.by_uuid(gpu.uuid), snapshot.by_uuid(gpu.uuid)
        if now is None or now.lost:
            raise _lost(gpu, claim, snapshot, own)
        if now.processes is None or before is None or before.processes is None:
            shown = False  # the driver does not tell just now: there is nothing to compare
            continue
        known = {process.pid for process in _computing(before.processes)} | set(claim.explained.get(gpu.uuid, ()))
        new = [process for process in _computing(now.processes) if process.pid not in known | own]
        hidden = [process for process in new if not procfs.exists(process.pid)]
        if holding and len(own) == 1 and len(hidden) == 1 and not any(p.pid in own for p in now.processes):
            own.add(hidden[0].pid)
            new = [process for process in new if process not in hidden]
        if new and not snapshot.shared_display:
            raise _contended(gpu, new, claim, snapshot, own)
        shown = shown and any(process.pid in own for process in now.processes)
    return shown


def _contended(
    gpu: Gpu, strangers: list[GpuProcess], claim: Claim, snapshot: HostSnapshot, own: Collection[int]
) -> GpuContendedError:
    names = ", ".join(_process_text(process) for process in strangers)
    return GpuContendedError(
        f"{names} came onto GPU {gpu.label} ({gpu.uuid}) at the same moment as this claim, without safe_gpu: "
        "everything was given back, claim again",
        nb_gpus=len(claim.gpus),
        verdicts=judge(snapshot, GpuRequest(), leased={}, own=own, describe=describe_process),
        uuid=gpu.uuid,
        processes=strangers,
    )


def _lost(gpu: Gpu, claim: Claim, snapshot: HostSnapshot, own: Collection[int]) -> NotEnoughGpusError:
    return NotEnoughGpusError(
        f"the driver lost GPU {gpu.label} ({gpu.uuid}) while it was being claimed: everything was given back, claim "
        "again to get another",
        nb_gpus=len(claim.gpus),
        verdicts=judge(snapshot, GpuRequest(), leased={}, own=own, describe=describe_process),
    )


def rivals(driver: Driver, gpu: Gpu, own: Collection[int]) -> str:
    """Who else is on a GPU whose placeholder failed, for the message; "" where nobody is."""
    try:
        now = driver.snapshot().by_uuid(gpu.uuid)
    except SafeGpuError as err:
        return str(err)
    strangers = [process for process in _computing((now.processes if now else None) or ()) if process.pid not in own]
    return ", ".join(_process_text(process) for process in strangers)


def _computing(processes: Iterable[GpuProcess]) -> list[GpuProcess]:
    """One entry a pid. Not those that only draw, and not the MPS server, which our own placeholder may have started."""
    found = {process.pid: process for process in processes if computes(process, describe_process)}
    return list(found.values())


def _process_text(process: GpuProcess) -> str:
    described = describe_process(process.pid)
    who = ", ".join(part for part in described or (process.name,) if part)
    return f"process {process.pid}{f' ({who})' if who else ''}"


def own_pids(snapshot: HostSnapshot) -> set[int]:
    """The numbers by which the driver knows this process. One that it shows no more may be anybody's tomorrow."""
    pid = os.getpid()
    shown = {process.pid for gpu in snapshot.gpus for process in gpu.processes or ()}
    _learnt[pid] = _learnt.get(pid, frozenset()) & shown
    return {pid, *_learnt[pid]}


def remember_own_pids(pids: Collection[int]) -> None:
    """Keep what was learnt for the next claim of this process."""
    _learnt[os.getpid()] = frozenset(pids)
