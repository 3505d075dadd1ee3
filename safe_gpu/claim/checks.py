"""The checks of a claim that holds its GPUs: still free, opened by CUDA, used by nobody else, not broken, and kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..coordination import older_package
from ..coordination.directory import doubt_of_entries, doubt_of_image, state_dir_path
from ..coordination.holders import living_claims
from ..coordination.notes import clear_fault
from ..coordination.older_package import take_older_package_lock
from ..errors import GpuContendedError, NotEnoughGpusError, WrongDeviceError
from ..gpus.devices import Gpu, GpuProcess, HostSnapshot
from ..host import procfs
from ..host.procfs import describe_process
from ..host.signals import DeferredSignals
from ..runtimes import placeholders
from ..runtimes.library import Runtime
from ..selection.request import Selection
from ..selection.verdicts import HIDDEN, NOT_YET, SHOWN, judge, possible_mps_servers, presence, users_of
from ..wording.text import in_brackets
from .arguments import ClaimOptions
from .claim import Claim
from .view import HostView

# The lock of the older package is held until the driver shows the placeholder, but at most this long, in seconds.
_SHOWING = 2.0


def older_package_counts() -> bool:
    """Return whether the lock of the older package is to be taken: where that package is present, or always
    (``SAFE_GPU_LEGACY_LOCK``)."""
    mode = os.environ.get("SAFE_GPU_LEGACY_LOCK") or "auto"
    return mode == "always" or (mode == "auto" and os.access(os.path.dirname(older_package.LOCK_FILE), os.F_OK))


def confirm(view: HostView, claim: Claim, options: ClaimOptions) -> bool:
    """Poll again, with the GPUs and the lock of the older package held. Return whether the GPUs are still free."""
    if older_package_counts():
        deadline = None if options.timeout is None else options.deadline
        with DeferredSignals() as signals:
            claim.older = take_older_package_lock(deadline, options.logger, signals)
    view.polls.poll_again(claim.gpus)
    claim.before, claim.explained = view.snapshot, view.explained
    if claim.share is not None:
        view.see(one for one in living_claims() if one.file != claim.file)
    now = (view.snapshot.by_uuid(gpu.uuid) for gpu in claim.gpus)
    verdicts = {verdict.gpu.uuid: verdict for verdict in view.judge({}, [gpu for gpu in now if gpu is not None])}
    for gpu in claim.gpus:
        verdict = verdicts.get(gpu.uuid)
        if verdict is not None and (verdict.gpu.names, verdict.gpu.mode) != (gpu.names, gpu.mode):
            verdict = None  # the name is that of another piece, or of all of the GPU
        if verdict is None or not verdict.free:
            reason = "it is gone" if verdict is None else verdict.reason
            options.logger.info("GPU %s was taken meanwhile (%s): starting over", gpu.label, reason)
            return False
    claim.gpus = tuple(verdicts[gpu.uuid].gpu for gpu in claim.gpus)
    return not _is_ill_by_choice(view, claim, options.logger)


def _is_ill_by_choice(view: HostView, claim: Claim, logger: Any) -> bool:
    """Return whether a GPU of the claim turns out to be ill while a healthy one is free, which the next look prefers.

    Only the chosen GPUs are examined, and the others if one of them is ill. That is here, since nobody behind in the
    queue waits any more for this claim.
    """
    found = view.examine(claim.gpus)
    if found:
        spare = [gpu for gpu in view.usable if gpu.uuid in view.spare]
        view.examine(spare)
        if not view.last.issuperset(gpu.uuid for gpu in spare):
            logger.info("GPU %s seems ill (%s): starting over", found[0].label, view.health.why_ill(found[0]))
            if claim.entry is not None:
                claim.entry.stays = False  # for the history it was none
            return True
    for gpu in claim.gpus:
        said = view.health.driver_says(gpu)
        if said:
            logger.warning("GPU %s seems ill, and no healthy one is free: %s; see safe-gpu doctor", gpu.label, said)
    return False


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


def verify_alone(view: HostView, claim: Claim, options: ClaimOptions, placeholder: Any) -> None:
    """Poll a third time: refuse foreign processes, and release the lock of the older package.

    That lock is held until the driver shows the placeholder, because the older package knows no entries. In a container
    that shows host pids, the host pid of this process is found here and added to ``view.own``. A driver that hides the
    placeholder is not waited for: it warns, because then others cannot see it either.

    Args:
        placeholder: made the placeholders of the claim.

    Raises:
        GpuContendedError: a process that is not this one has started on a claimed GPU since the second poll.
        NotEnoughGpusError: a claimed GPU was lost.
    """
    holding = placeholders.holds_gpu(placeholder)  # so the driver sees a process on the GPU
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
        if not placeholders.is_builtin(placeholder) and HIDDEN not in dict(shown).values():
            name = placeholders.name_of(placeholder)
            cause = f"{name} probably put nothing there: a placeholder allocates on device_no, and returns that"
        options.logger.warning(
            "the driver does not list this process on GPU %s, so that others who look at the GPUs, with nvidia-smi for "
            "example, cannot see that it is taken: only claims of safe_gpu keep off it (%s)",
            ",".join(hidden),
            cause,
        )


def doubts_of(claim: Claim) -> list[str]:
    """Return what is not certain about a claim, one sentence each; of a state directory once in a process."""
    path = state_dir_path()
    doubts = [doubt_of_image(path)]
    if not claim.before.shared_display:  # there doors keep nobody off
        doubts.append(doubt_of_entries(path, doors=not claim.doors.are_open))
    doubts = [one for one in doubts if one not in _told]
    _told.update(doubts)
    private = [one.process_error for one in claim.gpus if one.processes_private]
    doubts += [f"Whether other programs use the GPUs of this claim is not known: {error}" for error in private[:1]]
    return [*filter(None, [*doubts, claim.before.doubt])]


def _refuse_other_processes(view: HostView, claim: Claim, snapshot: HostSnapshot, holding: bool) -> None:
    """Raise if another process has started on a claimed GPU; if others share it, one of none of them."""
    mps_servers, own = possible_mps_servers(snapshot), view.own
    for gpu in claim.gpus:
        before, now = claim.before.by_uuid(gpu.uuid), snapshot.by_uuid(gpu.uuid)
        if now is None or now.lost:
            raise NotEnoughGpusError(
                f"the driver lost GPU {gpu.label} ({gpu.uuid}) while it was being claimed: everything was given back, "
                "claim again to get another",
                nb_gpus=len(claim.gpus),
                verdicts=judge(snapshot, Selection(), claimed={}, own=own, describe=describe_process),
            )
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
        new = users_of(now, others, describe_process, mps_servers=mps_servers)
        hidden = [process for process in new if process.elsewhere or not procfs.exists(process.pid)]
        # The driver may show host pids: one new pid that is not in /proc, in place of this process's, is this process.
        if holding and len(own) == 1 and len(hidden) == 1 and not any(p.pid in own for p in now.processes):
            own.add(hidden[0].pid)
            new = [process for process in new if process not in hidden]
        if new and not snapshot.shared_display:
            raise GpuContendedError(
                f"{', '.join(map(process_text, new))} started on GPU {gpu.label} ({gpu.uuid}) without safe_gpu, at "
                "the same moment as this claim: everything was given back, claim again",
                nb_gpus=len(claim.gpus),
                verdicts=judge(snapshot, Selection(), claimed={}, own=own, describe=describe_process),
                uuid=gpu.uuid,
                processes=new,
            )


def process_text(process: GpuProcess) -> str:
    """Return the name of a process for people: ``process 12 (anna, python train.py)``."""
    described = None if process.elsewhere else describe_process(process.pid)
    return f"process {process.pid}{in_brackets(*(described or (process.name,)))}"


def clear_notes(view: HostView, claim: Claim, logger: Any) -> None:
    """Clear the notes on the GPUs of a claim, on which a placeholder works."""
    noted = [gpu for gpu in claim.gpus if gpu.uuid in view.faults]
    if noted:
        change_notes(noted, clear_fault, logger)


def change_notes(gpus: Iterable[Gpu], change: Callable[[str, str], None], logger: Any) -> None:
    """Change the notes on these GPUs. A note that cannot be changed does no harm."""
    try:
        with DeferredSignals():
            for gpu in gpus:
                change(state_dir_path(), gpu.uuid)
    except OSError as err:
        logger.warning("the note that a GPU failed cannot be changed: %s", err)


_told: set[str] = set()
"""What a claim of this process was told of state directories."""
