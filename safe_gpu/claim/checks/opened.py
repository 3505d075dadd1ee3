"""The checks with the placeholders on the GPUs: CUDA opened those, and nobody else uses them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ...errors import GpuContendedError, NotEnoughGpusError, SafeGpuError, WrongDeviceError
from ...host import procfs
from ...host.procfs import describe_process
from ...selection.request import Selection
from ...selection.verdicts import HIDDEN, NOT_YET, SHOWN, has_mps_clients, judge, presence, users_of
from ...wording.text import in_brackets

if TYPE_CHECKING:
    from ...gpus.devices import Gpu, GpuProcess, HostSnapshot
    from ...runtimes.library import Runtime
    from ..arguments import ClaimOptions
    from ..claim import Claim
    from ..host.host_view import HostView

# The lock of the older package is held until the driver shows the placeholder, but at most this long, in seconds.
_SHOWING = 2.0


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


def verify_alone(view: HostView, claim: Claim, options: ClaimOptions, *, holding: bool, own_function: str = "") -> None:
    """Poll a third time: refuse foreign processes, and release the lock of the older package.

    That lock is held until the driver shows the placeholder, because the older package knows no entries. In a container
    that shows host pids, the host pid of this process is found here and added to ``view.own``. A driver that hides the
    placeholder is not waited for: it warns, because then others cannot see it either.

    Args:
        holding: whether there is a placeholder that the driver can show.
        own_function: the name of the program's own placeholder; "" for one of this package.

    Raises:
        GpuContendedError: a process that is not this one has started on a claimed GPU since the second poll.
        NotEnoughGpusError: a claimed GPU was lost.
    """
    until = time.monotonic() + _SHOWING
    while True:
        snapshot = claim.before.updated(view.polls.driver.usage(claim.gpus))
        _refuse_other_processes(view, claim, snapshot, holding)
        shown = []
        for gpu in claim.gpus if holding else ():
            before, now = claim.before.by_uuid(gpu.uuid), snapshot.by_uuid(gpu.uuid)
            shown.append((gpu.label, presence(before or gpu, now or gpu, view.own)))
        waiting = claim.older is not None and any(one not in (SHOWN, HIDDEN) for _, one in shown)
        late = time.monotonic() >= until
        if not waiting or late:
            break
        time.sleep(0.02)
    claim.release_older()
    hidden = [label for label, one in shown if one == HIDDEN or (late and one == NOT_YET)]
    if hidden and not snapshot.shared_display:
        cause = "in a container, start it with --pid=host; under WSL2 and some virtual machines it stays so"
        if own_function and HIDDEN not in dict(shown).values():
            cause = f"{own_function} probably put nothing there: a placeholder allocates on device_no, and returns that"
        options.logger.warning(
            "the driver does not list this process on GPU %s, so that others who look at the GPUs, with nvidia-smi for "
            "example, cannot see that it is taken: only claims of safe_gpu keep off it (%s)",
            ",".join(hidden),
            cause,
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
            known |= {process.pid for process in users_of(before, before.processes, describe_process)}
        others = [process for process in others if process.pid not in known]
        if claim.share is not None and others:
            others = view.strangers(gpu, others)
        # The MPS server does not count: the placeholder may have started it.
        new = users_of(now, others, describe_process, mps_clients=mps_clients)
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
        verdicts=judge(snapshot, Selection(), claimed={}, own=own, describe=describe_process),
        uuid=gpu.uuid,
        processes=others,
    )


def _lost(gpu: Gpu, claim: Claim, snapshot: HostSnapshot, own: Collection[int]) -> NotEnoughGpusError:
    return NotEnoughGpusError(
        f"the driver lost GPU {gpu.label} ({gpu.uuid}) while it was being claimed: everything was given back, claim "
        "again to get another",
        nb_gpus=len(claim.gpus),
        verdicts=judge(snapshot, Selection(), claimed={}, own=own, describe=describe_process),
    )


def other_processes(view: HostView, gpu: Gpu) -> str:
    """Return the other processes on a GPU whose placeholder failed, for the message; "" if there is none."""
    try:
        (now,) = view.polls.driver.usage((gpu,))
    except SafeGpuError as err:
        return str(err)
    others = [process for process in now.processes or () if process.pid not in view.own]
    return ", ".join(map(_process_text, users_of(now, others, describe_process)))


def _process_text(process: GpuProcess) -> str:
    described = None if process.elsewhere else describe_process(process.pid)
    return f"process {process.pid}{in_brackets(*(described or (process.name,)))}"
