"""Checks of the GPUs and their driver.

In some containers and virtual machines, and under WSL2, the lists can be read and are empty. A claim is then safe among
users of safe_gpu, but others see its GPUs as free.
"""

from collections.abc import Callable

from ..coordination.closed import closed_now, ignored_closed
from ..errors import NoDriverError
from ..gpus.devices import MIG_IS_ON, ComputeMode, HostSnapshot, ProcessKind
from ..gpus.vendors import VENDORS
from ..host import procfs
from ..settings.variables import real_driver
from ..wording.text import plural
from .check import CheckedHost, Finding, failed, labels, passed, skipped, warning, with_snapshot

# A poll of eight initialised GPUs takes milliseconds. Without persistence mode the kernel driver initialises each GPU
# first, which takes seconds.
_SLOW_POLL = 1.0


def _of_nvidia(check: Callable[[CheckedHost, HostSnapshot], Finding]) -> Callable[[CheckedHost], Finding]:
    return with_snapshot(lambda host, snapshot: _not_of(host) or check(host, snapshot))


def _not_of(host: CheckedHost) -> Finding | None:
    """Return the finding about a feature of NVIDIA's where a claim would get GPUs of another vendor; else None."""
    is_first = host.vendor is VENDORS["nvidia"]
    return None if is_first else skipped(f"it does not apply to {host.vendor.title} GPUs")


def _described(snapshot: HostSnapshot) -> str:
    names = ", ".join(sorted({gpu.name for gpu in snapshot.physical if gpu.name})) or "no names"
    return f"{snapshot.driver} {snapshot.driver_version}".strip() + f": {plural(len(snapshot.physical))}, {names}"


def driver(host: CheckedHost) -> Finding:
    """Check that there is a driver, and name it and its GPUs."""
    snapshot = host.snapshot
    if snapshot is None:
        detail, _, _ = host.driver_error.partition(". On a GPU host, ")  # which is the fix
        return failed(detail, f"{host.vendor.install}, or try SAFE_GPU_DRIVER=simulated:{host.vendor.preset}")
    if not snapshot.gpus:
        whose = next((one for one in VENDORS.values() if snapshot.driver in one.drivers), host.vendor)
        return failed(f"{snapshot.driver} {snapshot.driver_version} shows no GPU", whose.pass_in)
    detail = _described(snapshot)
    if host.simulated and (maker := real_driver(host.root)):
        return warning(
            f"{detail}, on a host with real {maker} GPUs: claims do not protect the real ones", "unset SAFE_GPU_DRIVER"
        )
    if snapshot.driver == "nvidia-smi" and host.environ.get("SAFE_GPU_DRIVER", "auto") in ("", "auto"):
        from ..drivers.nvidia.nvml import why_missing

        reason = why_missing() or "NVML is not available"
        return warning(f"{detail}, polled through nvidia-smi: {reason}", "pip install nvidia-ml-py")
    return passed(detail)


def other_vendor(host: CheckedHost) -> Finding:
    """Check the drivers of GPUs of further vendors."""
    others, broken = host.others
    if broken:
        return warning(
            f"a driver of one vendor does not work, and only claims of other GPUs can be made: {broken[0]}",
            "repair that driver; --vendor (vendor=) chooses the GPUs of one that works",
        )
    if host.snapshot is None or not others:
        return passed("no GPUs of a second vendor")
    found = (
        f"{_described(one)}; claims get those with --vendor {one.vendor} (vendor={one.vendor!r})" for one in others
    )
    return passed("; ".join(found))


@with_snapshot
def driver_speed(host: CheckedHost, snapshot: HostSnapshot) -> Finding:
    """Check that a poll does not delay claims."""
    took = f"opening and polling the driver took {host.poll_seconds:.2f} s"
    if host.poll_seconds <= _SLOW_POLL:
        return passed(took)
    return warning(took, host.vendor.is_slow)


@with_snapshot
def cuda_starts(host: CheckedHost, snapshot: HostSnapshot) -> Finding:
    """Check in a short-lived child that CUDA can be initialised and sees the GPUs that the driver shows."""
    if host.simulated:
        return skipped(f"simulated GPUs have no {host.vendor.library}")
    assert host.driver is not None
    title, chosen_by = host.driver.runtime.title, host.vendor.variables
    without_fence = {name: value for name, value in host.environ.items() if name not in chosen_by}
    try:
        seen = host.driver.runtime.visible_in_child(without_fence)
    except NoDriverError as err:
        return failed(str(err), host.vendor.no_library)
    usable = [gpu for gpu in snapshot.physical if not gpu.lost]
    plain = not any(gpu.mig_enabled for gpu in usable)
    if len(seen) < len(usable) and plain:
        return warning(
            f"{title} can be initialised and sees {plural(len(seen))}, but the driver shows {len(usable)}",
            f"see dmesg for the others ({host.vendor.log}); claims of them fail with "
            "WrongDeviceError or PlaceholderError",
        )
    return passed(f"{title} can be initialised and sees {plural(len(seen))}")


def drained(host: CheckedHost) -> Finding:
    """Check whether root, or the owner of the state directory, has taken GPUs out of use."""
    reasons = closed_now()
    found = {one.label: reasons[one.gpu.uuid] for one in host.status.gpus if one.gpu.uuid in reasons}
    texts = "; ".join([*(f"GPU {label} {reason}" for label, reason in found.items()), *(ignored := ignored_closed())])
    fixes = [f"safe-gpu resume {' '.join(found)}, when they may be claimed again"] if found else []
    fixes += ["remove what is ignored, and drain again with safe-gpu drain"] if ignored else []
    return warning(texts, "; ".join(fixes)) if texts else passed("no GPU is drained")


@with_snapshot
def lost_gpus(host: CheckedHost, snapshot: HostSnapshot) -> Finding:
    """Check that the driver can reach all GPUs."""
    lost = [gpu for gpu in snapshot.gpus if gpu.lost]
    if lost:
        return warning(f"{labels(lost)}: {lost[0].unusable or 'the driver lost it'}", host.vendor.recover)
    closed = [gpu for gpu in snapshot.gpus if bool(gpu.unusable) and not gpu.mig_enabled]
    if closed:
        return warning(f"{labels(closed)}: {closed[0].unusable}", "ask the scheduler or the container for these GPUs")
    return passed("the driver reaches all of them")


@_of_nvidia
def compute_mode(host: CheckedHost, snapshot: HostSnapshot) -> Finding:
    """Check that compute modes neither prevent claims nor keep out the child processes of a claim."""
    prohibited = [gpu for gpu in snapshot.gpus if gpu.compute_mode == ComputeMode.PROHIBITED]
    if prohibited:
        return warning(
            f"{labels(prohibited)}: compute mode PROHIBITED, no process can claim it", "nvidia-smi -c DEFAULT, as root"
        )
    exclusive = [gpu for gpu in snapshot.gpus if gpu.compute_mode == ComputeMode.EXCLUSIVE_PROCESS]
    if exclusive:
        return warning(
            f"{labels(exclusive)}: compute mode EXCLUSIVE_PROCESS, so the placeholder of a claim also keeps the "
            "claim's own child processes out",
            "claim in the process that computes, or use `safe-gpu run` or NoPlaceholder; or nvidia-smi -c DEFAULT",
        )
    return passed("DEFAULT on every GPU")


@_of_nvidia
def mig(host: CheckedHost, snapshot: HostSnapshot) -> Finding:
    """Check that GPUs in MIG mode have instances."""
    split = [gpu for gpu in snapshot.gpus if gpu.mig_enabled]
    if not split:
        return passed("off")
    reason = split[0].unusable or ""
    if reason != MIG_IS_ON:
        detail, _, fix = reason.partition(": ")
        return warning(f"{labels(split)}: {detail}", fix)
    parents = {gpu.mig_parent for gpu in snapshot.gpus if gpu.is_mig_instance}
    empty = [gpu for gpu in split if gpu.uuid not in parents]
    if empty:
        return warning(
            f"{labels(empty)}: MIG mode is on and there is no instance, so there is nothing to claim",
            "make instances (nvidia-smi mig -cgi ... -C), or turn MIG off (nvidia-smi -mig 0), as root",
        )
    instances = sum(gpu.is_mig_instance for gpu in snapshot.gpus)
    return passed(
        f"on for {labels(split)}: {plural(instances, 'instance')}; CUDA uses one per process, and UUIDs name them"
    )


def mps(host: CheckedHost) -> Finding:
    """Check whether the Multi-Process Service runs."""
    if other := _not_of(host):
        return other
    servers = [
        pid
        for pid in procfs.pids()
        if (procfs.command_of(pid) or "").split(" ")[0].rpartition("/")[2].startswith("nvidia-cuda-mps")
    ]
    gpus = host.snapshot.gpus if host.snapshot else ()
    clients = [gpu for gpu in gpus if any(one.kind == ProcessKind.MPS for one in gpu.processes or ())]
    if not servers and not clients:
        return passed("not running")
    sign = f"process {servers[0]}" if servers else f"clients on {labels(clients)}"
    return warning(
        f"the Multi-Process Service runs ({sign}); CUDA numbers GPUs differently under it, and exclusive compute modes "
        "apply to the server, not to its clients",
        "claim with visible_as='uuid' (--visible-as uuid), or stop it: echo quit | nvidia-cuda-mps-control",
    )
