"""Checks of the GPUs and their driver."""

from __future__ import annotations

import os
from collections.abc import Callable

from .. import procfs
from ..devices import ComputeMode, Gpu, HostSnapshot, ProcessKind
from ..errors import NoDriverError
from .check import Finding, Host, failed, labels, passed, skipped, warning

__all__ = [
    "compute_mode",
    "cuda_starts",
    "driver",
    "driver_speed",
    "lost_gpus",
    "mig",
    "mps",
    "process_lists",
]

_NO_DRIVER = "there is no driver to ask"

# A poll of eight awake cards takes milliseconds; without persistence mode each is woken up first, for seconds.
_SLOW_POLL = 1.0


def driver(host: Host) -> Finding:
    """Is there a driver, which one, with how many GPUs?"""
    snapshot = host.snapshot
    if snapshot is None:
        return failed(
            host.driver_error, "install the NVIDIA driver and nvidia-ml-py, or try SAFE_GPU_DRIVER=simulated:dgx-a100"
        )
    what = f"{snapshot.driver} {snapshot.driver_version}".strip()
    if not snapshot.gpus:
        return failed(f"{what} shows no GPU", "pass GPUs into the container (docker run --gpus all), or see nvidia-smi")
    names = sorted({gpu.name for gpu in snapshot.physical if gpu.name})
    detail = f"{what}: {len(snapshot.physical)} GPU(s), {', '.join(names) or 'no names'}"
    if host.simulated and os.path.exists(os.path.join(host.root, "dev/nvidia0")):
        return warning(
            f"{detail}, on a host with real GPUs: claims protect none of these",
            "unset SAFE_GPU_DRIVER",
        )
    if snapshot.driver == "nvidia-smi" and host.environ.get("SAFE_GPU_DRIVER", "auto") in ("", "auto"):
        from ..drivers.nvml import why_missing

        reason = why_missing() or "NVML was not to be had"
        return warning(f"{detail}, asked through nvidia-smi: {reason}", "pip install nvidia-ml-py")
    return passed(detail)


def driver_speed(host: Host) -> Finding:
    """Does a poll take so long that claims wait for it?"""
    if host.snapshot is None:
        return skipped(_NO_DRIVER)
    took = f"opening and polling the driver took {host.poll_seconds:.2f} s"
    if host.poll_seconds > _SLOW_POLL:
        return warning(took, "turn persistence mode on: start nvidia-persistenced, or `nvidia-smi -pm 1` as root")
    return passed(took)


def cuda_starts(host: Host) -> Finding:
    """Does CUDA start, and does it see the GPUs that the driver shows? Asked in a short-lived child."""
    if host.snapshot is None:
        return skipped(_NO_DRIVER)
    if host.simulated:
        return skipped("simulated GPUs have no CUDA")
    from ..cuda import visible_in_child

    without_fence = {name: value for name, value in host.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        seen = visible_in_child(without_fence)
    except NoDriverError as err:
        return failed(
            str(err),
            "install the driver's CUDA library of the same version as the kernel module; on NVSwitch hosts start "
            "nvidia-fabricmanager; see dmesg",
        )
    usable = [gpu for gpu in host.snapshot.physical if not gpu.lost]
    plain = not any(gpu.mig_enabled for gpu in usable)
    if len(seen) < len(usable) and plain:
        return warning(
            f"CUDA starts and sees {len(seen)} GPU(s), where the driver shows {len(usable)}",
            "see dmesg for the others (Xid); claims of them end in WrongDeviceError or PlaceholderError",
        )
    return passed(f"CUDA starts and sees {len(seen)} GPU(s)")


def _gpus_where(host: Host, condition: Callable[[Gpu], bool]) -> list[Gpu]:
    return [gpu for gpu in (host.snapshot or HostSnapshot(())).gpus if condition(gpu)]


def lost_gpus(host: Host) -> Finding:
    """Are there GPUs that the driver cannot reach?"""
    if host.snapshot is None:
        return skipped(_NO_DRIVER)
    lost = _gpus_where(host, lambda gpu: gpu.lost)
    if lost:
        return warning(
            f"{labels(lost)}: {lost[0].unusable or 'the driver lost it'}",
            "look for Xid in dmesg, then `nvidia-smi -r` as root, or reboot the host",
        )
    closed = _gpus_where(host, lambda gpu: bool(gpu.unusable) and not gpu.mig_enabled)
    if closed:
        return warning(f"{labels(closed)}: {closed[0].unusable}", "ask the scheduler or the container for these GPUs")
    return passed("the driver reaches all of them")


def process_lists(host: Host) -> Finding:
    """Does the driver say who is on a GPU? Without that nobody can tell whether it is free."""
    if host.snapshot is None:
        return skipped(_NO_DRIVER)
    whole = _gpus_where(host, lambda gpu: not gpu.lost and not gpu.mig_enabled)
    never = [gpu for gpu in whole if not gpu.processes_supported]
    if never:
        return failed(
            f"{labels(never)}: {never[0].process_error or 'no process list'}; claims of these are refused",
            "update the NVIDIA driver, or try SAFE_GPU_DRIVER=nvml or SAFE_GPU_DRIVER=nvidia-smi",
        )
    now = [gpu for gpu in whole if gpu.processes is None]
    if now:
        return warning(
            f"{labels(now)}: {now[0].process_error or 'the process list failed'}; such a GPU counts as busy",
            "try again; if it stays, see dmesg and restart the driver",
        )
    return passed("the driver lists the processes of every GPU")


def compute_mode(host: Host) -> Finding:
    """Do compute modes keep claims out, or a claim's own children?"""
    if host.snapshot is None:
        return skipped(_NO_DRIVER)
    prohibited = _gpus_where(host, lambda gpu: gpu.compute_mode == ComputeMode.PROHIBITED)
    if prohibited:
        return warning(
            f"{labels(prohibited)}: compute mode PROHIBITED, nobody can claim it", "nvidia-smi -c DEFAULT, as root"
        )
    exclusive = _gpus_where(host, lambda gpu: gpu.compute_mode == ComputeMode.EXCLUSIVE_PROCESS)
    if exclusive:
        return warning(
            f"{labels(exclusive)}: compute mode EXCLUSIVE_PROCESS, so the placeholder of a claim keeps even its own "
            "child processes out",
            "claim in the process that computes, or use `safe-gpu run` or NoPlaceholder; or nvidia-smi -c DEFAULT",
        )
    return passed("DEFAULT on every GPU")


def mig(host: Host) -> Finding:
    """Which GPUs are split, and is there an instance to claim?"""
    if host.snapshot is None:
        return skipped(_NO_DRIVER)
    split = _gpus_where(host, lambda gpu: gpu.mig_enabled)
    if not split:
        return passed("off")
    parents = {gpu.mig_parent for gpu in host.snapshot.gpus if gpu.is_mig_instance}
    empty = [gpu for gpu in split if gpu.uuid not in parents]
    if empty:
        return warning(
            f"{labels(empty)}: MIG mode is on and there is no instance, so there is nothing to claim",
            "make instances (nvidia-smi mig -cgi ... -C), or turn MIG off (nvidia-smi -mig 0), as root",
        )
    instances = sum(gpu.is_mig_instance for gpu in host.snapshot.gpus)
    return passed(f"on for {labels(split)}: {instances} instance(s), one for each process; GPUs are named by UUID")


def mps(host: Host) -> Finding:
    """Does the Multi-Process Service run?"""
    servers = [
        pid
        for pid in procfs.pids()
        if (procfs.command_of(pid) or "").split(" ")[0].rpartition("/")[2].startswith("nvidia-cuda-mps")
    ]
    clients = _gpus_where(host, lambda gpu: any(one.kind == ProcessKind.MPS for one in gpu.processes or ()))
    if not servers and not clients:
        return passed("not running")
    who = f"process {servers[0]}" if servers else f"clients on {labels(clients)}"
    return warning(
        f"the Multi-Process Service runs ({who}); under it CUDA numbers GPUs its own way, and exclusivity binds the "
        "server, not its clients",
        "claim with visible_as='uuid' (--visible-as uuid), or stop it: echo quit | nvidia-cuda-mps-control",
    )
