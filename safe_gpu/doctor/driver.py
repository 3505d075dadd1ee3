"""Checks of the GPUs and their driver."""

import time

from ..coordination.directory import state_dir_path
from ..coordination.faults import read_faults
from ..errors import MissingDriverPackageError, NoDriverError
from ..gpus.devices import HostSnapshot, recent_faults
from ..selection.verdicts import MEMORY_VARIABLE, UNWATCHABLE, Rules, why_last, why_memory_unexplained
from ..settings.variables import real_driver
from ..wording.text import plural
from .check import Check, CheckedHost, failed, is_loaded, labels, passed, skipped, warning

# A poll of eight initialised GPUs takes milliseconds. Without persistence mode the kernel driver initialises each GPU
# first, which takes seconds.
_SLOW_POLL = 1.0

# Their process lists have rows of another width than NVML's header says.
_ODD_ROWS = ("535.43", "535.54", "535.86")


def driver(host: CheckedHost) -> Check:
    """Check that there is a driver, and name it and its GPUs."""
    snapshot = host.snapshot
    if not snapshot.driver:
        return _no_driver(host)
    if not snapshot.gpus:
        return failed(f"{snapshot.driver} {snapshot.driver_version} shows no GPU", host.vendor.pass_in)
    detail = _driver_and_gpus(snapshot)
    if snapshot.driver == "nvidia-smi" and host.environ.get("SAFE_GPU_DRIVER", "auto") in ("", "auto"):
        return _without_nvml(detail)
    if snapshot.driver == "nvml" and snapshot.driver_version.startswith(_ODD_ROWS):
        what = f"{detail}; NVML of this version lists several processes of a GPU with wrong numbers and memory"
        return warning(what, "upgrade the driver to 535.98 or newer, or set SAFE_GPU_DRIVER=nvidia-smi")
    if host.poll_seconds > _SLOW_POLL:  # which delays claims
        return warning(f"{detail}; opening and polling it took {host.poll_seconds:.2f} s", host.vendor.is_slow)
    if snapshot.driver.startswith("simulated") and not real_driver():  # where there are real ones, every claim warns
        what = f"{detail}: these GPUs are simulated, and claims of them hold no real one"
        return warning(what, "unset SAFE_GPU_DRIVER")
    return passed(detail)


def _without_nvml(detail: str) -> Check:
    from ..drivers.nvml_calls import LIBRARY, missing

    error = missing()
    reason = "NVML is not available"
    if error is not None:
        reason = str(error)
    fix = f"let the loader find the driver's {LIBRARY} (ldconfig, or its directory in LD_LIBRARY_PATH)"
    if isinstance(error, MissingDriverPackageError):
        fix = error.install
    return warning(f"{detail}, polled through nvidia-smi: {reason}", fix)


def _no_driver(host: CheckedHost) -> Check:
    """Return the finding.

    Raises:
        PolicyError, StateDirError: the driver was not looked for.
    """
    if host.settings_error is not None:
        raise host.settings_error
    vendor = host.vendor
    if host.driver_hangs:
        return failed(host.driver_error, f"{vendor.recover}; if it only takes long, {vendor.is_slow}")
    detail, _, _ = host.driver_error.partition(". On a GPU host, ")  # which is the fix
    if is_loaded(vendor):  # and does not work
        return failed(detail, "do what the message says, and check again")
    return failed(detail, f"{vendor.install}, or try SAFE_GPU_DRIVER=simulated:{vendor.preset}")


def _driver_and_gpus(snapshot: HostSnapshot) -> str:
    """Return ``nvml 550.54.15: 8 GPUs, NVIDIA A100-SXM4-80GB``."""
    name = f"{snapshot.driver} {snapshot.driver_version}".strip()
    products = sorted({gpu.name for gpu in snapshot.physical if gpu.name})
    return f"{name}: {plural(len(snapshot.physical))}, {', '.join(products) or 'no names'}"


def cuda_starts(host: CheckedHost) -> Check:
    """Check in a short-lived child that CUDA can be initialised and sees the GPUs that the driver shows."""
    assert host.driver is not None
    runtime = host.driver.runtime
    library = host.vendor.library
    if not runtime.asks_library:
        return skipped(f"safe_gpu does not ask {library} about these GPUs")
    without_limit = {name: value for name, value in host.environ.items() if name not in host.vendor.variables}
    try:
        seen = runtime.visible_in_child(without_limit)
    except NoDriverError as err:
        return failed(str(err), host.vendor.no_library)
    return passed(f"{library} can be initialised and sees {plural(len(seen))}")


def lost_gpus(host: CheckedHost) -> Check:
    """Check that the driver can reach all GPUs."""
    lost = [gpu for gpu in host.snapshot.gpus if gpu.lost]
    if lost:
        return warning(f"{labels(lost)}: {lost[0].unusable or 'lost by the driver'}", host.vendor.recover)
    closed = [gpu for gpu in host.snapshot.gpus if gpu.unusable and not gpu.mig_enabled]
    if closed:
        return warning(f"{labels(closed)}: {closed[0].unusable}", "ask the scheduler or the container for these GPUs")
    return passed("the driver reaches all of them")


def ill_gpus(host: CheckedHost) -> Check:
    """Check that no GPU seems ill, by the driver, by its utilisation, or by the claims that failed on it. Claims take
    such GPUs last."""
    gpus = host.snapshot.gpus
    rules = Rules.of(host.environ)
    faults = recent_faults(read_faults(state_dir_path(), [gpu.uuid for gpu in gpus]), time.time())
    found = []
    for gpu in gpus:
        reason = why_last(gpu, faults.get(gpu.uuid), rules)
        if reason:
            found.append(f"GPU {gpu.label} is {reason}")
    if not found:
        return passed("no GPU seems ill, and no claim has failed on one lately")
    fix = f"{host.vendor.recover}; until then safe-gpu drain keeps claims off such a GPU"
    noted = [gpu.label for gpu in gpus if gpu.uuid in faults]
    if noted:
        again = f"""python3 -c 'import safe_gpu; safe_gpu.claim_gpus(only="{noted[0]}")'"""
        fix += f"; your note that a claim failed there goes once one works there ({again}), and those of others in time"
    return warning("; ".join(found), fix)


def process_lists(host: CheckedHost) -> Check:
    """Check that the driver lists the processes on a GPU. Without that list it is not known whether the GPU is free.

    Where lists can be read and are empty, as under WSL2, a claim says so.
    """
    rules = Rules.of(host.environ)
    whole = [gpu for gpu in host.snapshot.gpus if not gpu.lost and not gpu.mig_enabled]
    without_list = [gpu for gpu in whole if not gpu.processes_supported]
    if without_list and not rules.lists_optional:
        what = f"{labels(without_list)}: {without_list[0].process_error or 'no process list'}"
        _, _, way_out = UNWATCHABLE.partition("; ")
        return failed(f"{what}; such a GPU cannot be claimed", way_out)
    unwatched = without_list + [gpu for gpu in whole if gpu.processes_private]
    if unwatched:
        what = f"{labels(unwatched)}: {unwatched[0].process_error or 'no process list'}"
        effect = "such a GPU is claimed by its memory alone, where that is known"
        return warning(f"{what}; {effect}", "make sure that nobody uses these GPUs without safe_gpu, or claim as root")
    busy = [gpu for gpu in whole if gpu.processes is None or why_memory_unexplained(gpu, rules)]
    if busy:
        first = busy[0]
        why = first.process_error or why_memory_unexplained(first, rules) or "the process list failed"
        fix = "try again, and from the host, outside of containers; see dmesg; if the memory is the driver's own, raise"
        return warning(f"{labels(busy)}: {why}; such a GPU counts as busy", f"{fix} {MEMORY_VARIABLE}")
    return passed("the driver has a list of processes for every GPU")
