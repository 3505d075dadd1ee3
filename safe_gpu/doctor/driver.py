"""Checks of the GPUs and their driver."""

import time

from ..coordination.directory import state_dir_path
from ..coordination.notes import read_faults
from ..errors import NoDriverError
from ..gpus.devices import recent_faults
from ..selection.verdicts import MEMORY_VARIABLE, UNWATCHABLE, Rules, why_last, why_memory_unexplained
from ..wording.text import plural
from .check import Check, CheckedHost, failed, labels, passed, skipped, warning

# A poll of eight initialised GPUs takes milliseconds. Without persistence mode the kernel driver initialises each GPU
# first, which takes seconds.
_SLOW_POLL = 1.0

# Their process lists have rows of another width than NVML's header says.
_ODD_ROWS = ("535.43", "535.54", "535.86")


def driver(host: CheckedHost) -> Check:
    """Check that there is a driver, and name it and its GPUs."""
    snapshot = host.snapshot
    if not snapshot.driver:
        if host.driver_hangs:
            return failed(host.driver_error, f"{host.vendor.recover}; if it only takes long, {host.vendor.is_slow}")
        detail, _, _ = host.driver_error.partition(". On a GPU host, ")  # which is the fix
        return failed(detail, f"{host.vendor.install}, or try SAFE_GPU_DRIVER=simulated:{host.vendor.preset}")
    if not snapshot.gpus:
        return failed(f"{snapshot.driver} {snapshot.driver_version} shows no GPU", host.vendor.pass_in)
    names = ", ".join(sorted({gpu.name for gpu in snapshot.physical if gpu.name})) or "no names"
    detail = f"{snapshot.driver} {snapshot.driver_version}".strip() + f": {plural(len(snapshot.physical))}, {names}"
    if snapshot.driver == "nvidia-smi" and host.environ.get("SAFE_GPU_DRIVER", "auto") in ("", "auto"):
        from ..drivers.nvml import why_missing

        reason = why_missing() or "NVML is not available"
        return warning(f"{detail}, polled through nvidia-smi: {reason}", "pip install nvidia-ml-py")
    if snapshot.driver == "nvml" and snapshot.driver_version[:6] in _ODD_ROWS:
        what = f"{detail}; NVML of this version lists several processes of a GPU with wrong numbers and memory"
        return warning(what, "upgrade the driver to 535.98 or newer, or set SAFE_GPU_DRIVER=nvidia-smi")
    if host.poll_seconds > _SLOW_POLL:  # which delays claims
        return warning(f"{detail}; opening and polling it took {host.poll_seconds:.2f} s", host.vendor.is_slow)
    return passed(detail)


def cuda_starts(host: CheckedHost) -> Check:
    """Check in a short-lived child that CUDA can be initialised and sees the GPUs that the driver shows."""
    assert host.driver is not None
    if not host.driver.runtime.asks_library:
        return skipped(f"safe_gpu does not ask {host.vendor.library} about these GPUs")
    without_fence = {name: value for name, value in host.environ.items() if name not in host.vendor.variables}
    try:
        seen = host.driver.runtime.visible_in_child(without_fence)
    except NoDriverError as err:
        return failed(str(err), host.vendor.no_library)
    return passed(f"{host.vendor.library} can be initialised and sees {plural(len(seen))}")


def lost_gpus(host: CheckedHost) -> Check:
    """Check that the driver can reach all GPUs."""
    lost = [gpu for gpu in host.snapshot.gpus if gpu.lost]
    if lost:
        return warning(f"{labels(lost)}: {lost[0].unusable or 'the driver lost it'}", host.vendor.recover)
    closed = [gpu for gpu in host.snapshot.gpus if bool(gpu.unusable) and not gpu.mig_enabled]
    if closed:
        return warning(f"{labels(closed)}: {closed[0].unusable}", "ask the scheduler or the container for these GPUs")
    return passed("the driver reaches all of them")


def ill_gpus(host: CheckedHost) -> Check:
    """Check that no GPU seems ill, by the driver, by its utilisation, or by the claims that failed on it. Claims take
    such GPUs last."""
    gpus, rules = host.snapshot.gpus, Rules.of(host.environ)
    faults = recent_faults(read_faults(state_dir_path(), [gpu.uuid for gpu in gpus]), time.time())
    found = []
    for gpu in gpus:
        reason = why_last(gpu, faults.get(gpu.uuid), rules)
        if reason:
            found.append(f"GPU {gpu.label} is {reason}")
    if not found:
        return passed("no GPU seems ill, and no claim has failed on one lately")
    return warning("; ".join(found), f"{host.vendor.recover}; until then safe-gpu drain keeps claims off such a GPU")


def process_lists(host: CheckedHost) -> Check:
    """Check that the driver lists the processes on a GPU. Without that list it is not known whether the GPU is free.

    Where lists can be read and are empty, as under WSL2, a claim says so.
    """
    rules = Rules.of(host.environ)
    whole = [gpu for gpu in host.snapshot.gpus if not gpu.lost and not gpu.mig_enabled]
    blind = [gpu for gpu in whole if not gpu.processes_supported]
    if blind and not rules.lists_optional:
        what = f"{labels(blind)}: {blind[0].process_error or 'no process list'}; such a GPU cannot be claimed"
        return failed(what, UNWATCHABLE.partition("; ")[2])
    blind += [gpu for gpu in whole if gpu.processes_private]
    if blind:
        what = f"{labels(blind)}: {blind[0].process_error or 'no process list'}"
        effect = "such a GPU is claimed by its memory alone, where that is known"
        return warning(f"{what}; {effect}", "make sure that nobody uses these GPUs without safe_gpu, or claim as root")
    busy = [gpu for gpu in whole if gpu.processes is None or why_memory_unexplained(gpu, rules)]
    if busy:
        why = busy[0].process_error or why_memory_unexplained(busy[0], rules) or "the process list failed"
        fix = "try again, and from the host, outside of containers; see dmesg; if the memory is the driver's own"
        return warning(f"{labels(busy)}: {why}; such a GPU counts as busy", f"{fix}, raise {MEMORY_VARIABLE}")
    return passed("the driver has a list of processes for every GPU")
