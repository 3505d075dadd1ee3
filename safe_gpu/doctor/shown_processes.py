"""The check whether the driver lists the processes on the GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..claim.owner import GPUOwner
from ..drivers import opened_driver
from ..errors import SafeGpuError
from ..host.programs import IN_CHILD, Failed, call_in_child
from ..selection.verdicts import HIDDEN, NOT_YET, SHOWN, UNWATCHABLE, Rules, presence, why_memory_unexplained
from .check import CheckedHost, Finding, failed, labels, passed, warning, with_snapshot

if TYPE_CHECKING:
    from ..gpus.devices import HostSnapshot

# Seconds. CUDA may have to initialise every GPU of the host first.
_PATIENCE = 120.0

# How long a driver may take to list a process that has a context, in seconds.
_LISTING = 2.0

_LISTED = "the driver lists the processes of every GPU"

_IF_WARNED = (
    '; if a claim warns that "the driver does not list this process", its own placeholder_fn put nothing on the GPU'
)


@with_snapshot
def process_lists(host: CheckedHost, snapshot: HostSnapshot) -> Finding:
    """Check that the driver lists the processes on a GPU. Without that list it is not known whether the GPU is free."""
    rules = Rules.of(host.environ)
    whole = [gpu for gpu in snapshot.gpus if not gpu.lost and not gpu.mig_enabled]
    never = [gpu for gpu in whole if not gpu.processes_supported]
    if never:
        what = f"{labels(never)}: {never[0].process_error or 'no process list'}"
        if rules.lists_optional:
            return warning(
                f"{what}; such a GPU is claimed by lease and memory alone (SAFE_GPU_PROCESS_LIST=optional)",
                "make sure that nobody uses these GPUs without safe_gpu",
            )
        return failed(f"{what}; such a GPU cannot be claimed", UNWATCHABLE.partition("; ")[2])
    private = [gpu for gpu in whole if gpu.processes_private]
    if private:
        return warning(
            f"{labels(private)}: {private[0].process_error}; such a GPU is claimed by lease, and by memory where that "
            "is known",
            "make sure that nobody uses these GPUs without safe_gpu, or claim as root",
        )
    now = [gpu for gpu in whole if gpu.processes is None]
    if now:
        return warning(
            f"{labels(now)}: {now[0].process_error or 'the process list failed'}; such a GPU counts as busy",
            "try again; if it persists, see dmesg and restart the driver",
        )
    shown = SHOWN if host.simulated else _shown_in_child(host.environ)
    if shown in (HIDDEN, NOT_YET):
        return failed(
            "the driver does not list this process, nor others (tried with a CUDA context in a child process): nobody "
            "can see which GPUs are taken, and claims see other programs by their memory alone",
            "in a container, start it with --pid=host or update the driver; under WSL2 and some virtual machines it "
            "stays so: let everybody claim with safe_gpu",
        )
    unexplained = [gpu for gpu in whole if why_memory_unexplained(gpu, rules)]
    if unexplained:
        return warning(
            f"{labels(unexplained)}: {why_memory_unexplained(unexplained[0], rules)}; such a GPU counts as busy",
            "look from the host, outside of containers; if the memory is the driver's own, raise "
            "SAFE_GPU_UNEXPLAINED_MEMORY",
        )
    if shown != SHOWN:
        return passed(f"{_LISTED} (not tried with a context: {shown})")
    return passed(_LISTED if host.simulated else _LISTED + _IF_WARNED)


def _shown_in_child(environ: Mapping[str, str]) -> str:
    """Claim a free GPU in a child process; return ``SHOWN``, ``HIDDEN`` or ``NOT_YET``, or why that was not
    possible."""
    function = "safe_gpu.doctor.shown_processes _child"
    try:
        answer = call_in_child(function, env=environ, timeout=_PATIENCE, with_packages=True)
    except OSError as err:
        return f"a child process could not be started: {err}"
    except Failed as err:
        return str(err)
    return answer.strip().rpartition("\n")[2]


def _child() -> None:
    """Claim a free GPU in the child, and print whether the driver lists this process on it, or the error."""
    import logging

    os.environ.pop(IN_CHILD, None)  # this is the child that was meant, and its claim may need one of its own
    silent = logging.getLogger("safe_gpu.doctor")
    silent.disabled = True
    try:
        with opened_driver() as driver, GPUOwner(1, logger=silent, timeout=0, affinity=None) as owner:
            (before,) = owner.gpus
            known = {process.pid for process in before.processes or ()}
            until = time.monotonic() + _LISTING
            while True:
                (now,) = driver.usage(owner.gpus)
                # In a container the driver may list this process under a number of the host.
                came = {process.pid for process in now.processes or ()} - known
                shown = presence(before, now, came)
                if shown != NOT_YET or time.monotonic() >= until:
                    break
                time.sleep(0.02)
            print(shown)
    except SafeGpuError as err:
        print(str(err).partition("\n")[0])
