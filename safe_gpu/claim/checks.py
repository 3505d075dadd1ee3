"""The checks of a claim that holds its GPUs: still free, opened by CUDA, used by nobody else, not broken, and kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..coordination import older_package
from ..coordination.directory import state_dir_path, warning_about_container_dir, warning_about_removable_entries
from ..coordination.faults import clear_fault
from ..coordination.holders import Claims, living_claims
from ..coordination.older_package import take_older_package_lock
from ..errors import GpuContendedError, NotEnoughGpusError, WrongDeviceError
from ..gpus.devices import Gpu, GpuProcess, HostSnapshot
from ..host import procfs
from ..host.procfs import describe_process
from ..host.signals import DeferredSignals
from ..runtimes import placeholders
from ..runtimes.library import Runtime
from ..selection.request import Selection
from ..selection.sharing import strangers
from ..selection.verdicts import HIDDEN, NOT_YET, SHOWN, Known, judge, possible_mps_servers, presence, users_of
from ..wording.text import in_brackets
from .arguments import ClaimOptions
from .claim import Claim
from .view import HostView

SHOWING = 2.0
"""The lock of the older package is held until the driver shows the placeholder, but at most this long, in seconds."""

given_doubts: set[str] = set()
"""Warnings about state directories that claims of this process have given already."""


def older_package_counts() -> bool:
    """Return whether the lock of the older package is to be taken: where that package is present, or always
    (``SAFE_GPU_LEGACY_LOCK``)."""
    mode = os.environ.get("SAFE_GPU_LEGACY_LOCK") or "auto"
    if mode == "auto":
        return os.access(os.path.dirname(older_package.LOCK_FILE), os.F_OK)
    return mode == "always"


def confirm(view: HostView, claim: Claim, options: ClaimOptions, spare: Collection[str]) -> bool:
    """Take the lock of the older package, poll again, and return whether the GPUs are still free.

    The claim keeps that lock until :func:`verify_alone`, or its own release.

    Args:
        spare: UUIDs of the GPUs that the claim could have had instead.
    """
    if older_package_counts():
        deadline = None
        if options.timeout is not None:
            deadline = options.deadline
        with DeferredSignals() as signals:
            claim.older = take_older_package_lock(deadline, options.logger, signals)
    view.polls.poll_again(claim.gpus)
    claim.before = view.snapshot
    claim.explained = view.explained
    if claim.share is not None:
        living = [one for one in living_claims() if one.file != claim.file]
        view.update_others(Claims(living, view.snapshot.gpus), view.enclosing)
    free = _still_free(view, claim, options.logger)
    if free is None:
        return False
    claim.gpus = free
    return not _is_ill_by_choice(view, claim, spare, options.logger)


def _still_free(view: HostView, claim: Claim, logger: Any) -> tuple[Gpu, ...] | None:
    """Return the GPUs of a claim as the latest poll shows them; None if one is gone or not free."""
    now = [view.snapshot.by_uuid(gpu.uuid) for gpu in claim.gpus]
    verdicts = {verdict.gpu.uuid: verdict for verdict in view.judge({}, [gpu for gpu in now if gpu is not None])}
    free = []
    for gpu in claim.gpus:
        verdict = verdicts.get(gpu.uuid)
        if verdict is not None and (verdict.gpu.names, verdict.gpu.mode) != (gpu.names, gpu.mode):
            verdict = None  # the name is that of another piece, or of all of the GPU
        if verdict is None or not verdict.free:
            reason = "no longer shown by the driver"
            if verdict is not None:
                reason = verdict.reason
            logger.info("GPU %s was taken meanwhile (%s): starting over", gpu.label, reason)
            return None
        free.append(verdict.gpu)
    return tuple(free)


def _is_ill_by_choice(view: HostView, claim: Claim, spare: Collection[str], logger: Any) -> bool:
    """Return whether a GPU of the claim turns out to be ill while a healthy one is free, which the next attempt
    prefers.

    Only the chosen GPUs are examined, and the others if one of them is ill. That is here, since nobody behind in the
    queue waits any more for this claim.
    """
    health = view.health
    driver = view.polls.driver
    found = health.examine(claim.gpus, driver, view.snapshot)
    if found:
        others = [gpu for gpu in view.usable if gpu.uuid in spare]
        health.examine(others, driver, view.snapshot)
        if not health.last_choices(view.usable).issuperset(gpu.uuid for gpu in others):
            logger.info("GPU %s seems ill (%s): starting over", found[0].label, health.why_ill(found[0]))
            if claim.entry is not None:
                claim.entry.is_final = False  # for the history it was none
            return True
    for gpu in claim.gpus:
        said = health.driver_says(gpu)
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
    until = time.monotonic() + SHOWING
    while True:
        snapshot = claim.before.updated(view.polls.driver.usage(claim.gpus))
        _refuse_other_processes(view, claim, snapshot, holding)
        shown: dict[str, str] = {}
        if holding:
            shown = _presence(view, claim, snapshot)
        is_undecided = any(state not in (SHOWN, HIDDEN) for state in shown.values())
        is_late = time.monotonic() >= until
        if claim.older is None or not is_undecided or is_late:
            break
        time.sleep(0.02)
    claim.release_older()
    hidden = []
    for label, state in shown.items():
        if state == HIDDEN or (is_late and state == NOT_YET):
            hidden.append(label)
    if not hidden or snapshot.shared_display:
        return
    cause = "in a container, start it with --pid=host; under WSL2 and some virtual machines it stays so"
    if not placeholders.is_builtin(placeholder) and HIDDEN not in shown.values():
        name = placeholders.name_of(placeholder)
        cause = f"{name} probably put nothing there: a placeholder allocates on device_no, and returns that"
    options.logger.warning(
        "the driver does not list this process on GPU %s, so that others who look at the GPUs, with nvidia-smi for "
        "example, cannot see that it is taken: only claims of safe_gpu keep off it (%s)",
        ",".join(hidden),
        cause,
    )


def _presence(view: HostView, claim: Claim, snapshot: HostSnapshot) -> dict[str, str]:
    """Return label of a GPU of the claim -> whether the driver shows this process there, see ``presence``."""
    shown = {}
    for gpu in claim.gpus:
        before = claim.before.by_uuid(gpu.uuid) or gpu
        now = snapshot.by_uuid(gpu.uuid) or gpu
        shown[gpu.label] = presence(before, now, view.own)
    return shown


def doubts_of(claim: Claim) -> list[str]:
    """Return what is not certain about a claim, one sentence each; of a state directory once in a process."""
    path = state_dir_path()
    of_directory = [warning_about_container_dir(path)]
    if not claim.before.shared_display:  # there doors keep nobody off
        of_directory.append(warning_about_removable_entries(path, doors=claim.doors.holds_any))
    doubts = []
    for doubt in of_directory:
        if doubt and doubt not in given_doubts:
            given_doubts.add(doubt)
            doubts.append(doubt)
    for gpu in claim.gpus:
        if gpu.processes_private:
            doubts.append(f"it is not known whether other programs use the GPUs of this claim: {gpu.process_error}")
            break
    if claim.before.doubt:
        doubts.append(claim.before.doubt)
    return doubts


def _refuse_other_processes(view: HostView, claim: Claim, snapshot: HostSnapshot, holding: bool) -> None:
    """Raise if another process has started on a claimed GPU; if others share it, one of none of them."""
    mps_servers = possible_mps_servers(snapshot)
    for gpu in claim.gpus:
        before = claim.before.by_uuid(gpu.uuid)
        now = snapshot.by_uuid(gpu.uuid)
        if now is None or now.lost:
            raise NotEnoughGpusError(
                f"the driver lost GPU {gpu.label} ({gpu.uuid}) while it was being claimed: everything was given back, "
                "claim again to get another",
                nb_gpus=len(claim.gpus),
                verdicts=judge(snapshot, Selection(), Known(own=view.own, describe=describe_process)),
            )
        if now.processes is None or before is None or before.processes is None:
            continue  # one of the two process lists failed, so they cannot be compared
        others = _unknown_processes(view, claim, before, now)
        # The MPS server does not count: the placeholder may have started it.
        new = users_of(now, others, describe_process, mps_servers=mps_servers)
        if holding:
            new = _without_own(new, now, view.own)
        if new and not snapshot.shared_display:
            names = ", ".join(process_text(process) for process in new)
            raise GpuContendedError(
                f"{names} started on GPU {gpu.label} ({gpu.uuid}) without safe_gpu, at "
                "the same moment as this claim: everything was given back, claim again",
                nb_gpus=len(claim.gpus),
                verdicts=judge(snapshot, Selection(), Known(own=view.own, describe=describe_process)),
                uuid=gpu.uuid,
                processes=new,
            )


def _unknown_processes(view: HostView, claim: Claim, before: Gpu, now: Gpu) -> list[GpuProcess]:
    """Return the processes on a GPU of a claim that are not this one, were not there before, and are of no claim
    that encloses this one or shares the GPU."""
    others = [process for process in now.processes or () if process.pid not in view.own]
    if not others:
        return []
    known = set(claim.explained.get(now.uuid, ()))
    known.update(process.pid for process in users_of(before, before.processes or (), describe_process))
    others = [process for process in others if process.pid not in known]
    if claim.share is None or not others:
        return others
    holder = Claims(living_claims(), [now]).holders_as_written().get(now.uuid)
    if holder is None:
        return strangers(others, (), procfs.family_of)
    return strangers(others, holder.sharers, procfs.family_of)


def _without_own(processes: list[GpuProcess], gpu: Gpu, own: set[int]) -> list[GpuProcess]:
    """Return these new processes on a GPU without the one that is this process, whose pid is added to ``own``.

    The driver may show host pids: one new pid that is not in /proc, in place of this process's, is this process.
    """
    hidden = [process for process in processes if process.elsewhere or not procfs.exists(process.pid)]
    is_shown = any(process.pid in own for process in gpu.processes or ())
    if len(own) > 1 or len(hidden) != 1 or is_shown:
        return processes
    own.add(hidden[0].pid)
    return [process for process in processes if process not in hidden]


def process_text(process: GpuProcess) -> str:
    """Return the name of a process for people: ``process 12 (anna, python train.py)``."""
    described = None
    if not process.elsewhere:
        described = describe_process(process.pid)
    if described is None:
        return f"process {process.pid}{in_brackets(process.name)}"
    return f"process {process.pid}{in_brackets(*described)}"


def clear_notes(view: HostView, claim: Claim, logger: Any) -> None:
    """Clear the notes on the GPUs of a claim, on which a placeholder works."""
    noted = [gpu for gpu in claim.gpus if gpu.uuid in view.health.faults]
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
