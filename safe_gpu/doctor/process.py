"""Checks of this process: its Python packages, environment variables, limits and CPU mask."""

from __future__ import annotations

import os
import sys

from .. import settings
from ..errors import GPUAffinityError, UnsatisfiableRequestError
from ..selection.request import MEMORY_VARIABLE, Rules
from .check import CheckedHost, Finding, failed, gpus_named, labels, passed, skipped, warning


def platform(host: CheckedHost) -> Finding:
    """Is this Linux? Shows the versions of the kernel and of Python."""
    name = os.uname()
    detail = f"{name.sysname} {name.release} on {name.machine}, Python {'.'.join(map(str, sys.version_info[:3]))}"
    if name.sysname != "Linux":
        return failed(detail, "use Linux: claims need its file locks and its /proc")
    return passed(detail)


def packages(host: CheckedHost) -> Finding:
    """Are the required Python packages installed, and none that replaces their modules?"""
    import re
    from importlib import metadata

    found: dict[str, list[str]] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if distribution.version not in found.setdefault(name, []):
            found[name].append(distribution.version)
    try:
        from filelock import lock_descriptor  # noqa: F401
    except ImportError as err:
        return failed(f"filelock is missing or too old ({err})", "pip install 'filelock>=3.30'")
    colliding = [name for name in ("nvidia-ml-py3", "pynvml") if any(_is_old(name, v) for v in found.get(name, ()))]
    if colliding:
        return warning(
            f"{' and '.join(colliding)} installs its own pynvml module in place of that of nvidia-ml-py",
            f"pip uninstall {' '.join(colliding)} && pip install --force-reinstall nvidia-ml-py",
        )
    own = found.get("safe-gpu", [])
    if len(own) > 1:
        return warning(
            f"safe-gpu is installed {len(own)} times ({', '.join(own)})", "pip uninstall safe-gpu, then install"
        )
    if own and own[0].split(".")[0] in ("0", "1", "2"):
        return warning(
            f"the older safe-gpu {own[0]} is installed beside this one", "pip uninstall safe-gpu, then install this one"
        )
    versions = [f"{name} {found[name][0]}" for name in ("safe-gpu", "filelock", "nvidia-ml-py") if name in found]
    return passed(", ".join(versions) or "run from a source tree")


def _is_old(name: str, version: str) -> bool:
    """Whether a distribution installs a module pynvml. The project pynvml does not since version 12."""
    major = version.split(".")[0]
    return name != "pynvml" or not major.isdecimal() or int(major) < 12


# Variables


def variables(host: CheckedHost) -> Finding:
    """Does every SAFE_GPU_* variable exist, and does it have a valid value?"""
    for name, meant in settings.unknown(host.environ).items():
        hint = f"did you mean {meant}? " if meant else ""
        return warning(f"{name} is not a variable of safe_gpu and has no effect", f"{hint}unset {name}")
    given = {name: value for name, value in sorted(host.environ.items()) if name in settings.VARIABLES}
    for name, value in given.items():
        trouble = _trouble_with_value(name, value)
        if trouble:
            return failed(trouble, f"set {name} to a valid value, or unset it")
    for doubt in settings.doubts(host.environ):
        return warning(doubt, f"unset {doubt.partition('=')[0]}")
    if given.get("SAFE_GPU_FSROOT", "/") != "/":
        return warning(
            f"SAFE_GPU_FSROOT={given['SAFE_GPU_FSROOT']}: CPUs are bound by the topology of another host",
            "unset SAFE_GPU_FSROOT (it is for tests)",
        )
    if not given:
        return passed("none is set")
    return passed(", ".join(f"{name}={value}" for name, value in given.items()))


def _trouble_with_value(name: str, value: str) -> str:
    try:
        settings.check({name: value})
    except UnsatisfiableRequestError as err:
        return str(err)
    if name == "SAFE_GPU_TIMEOUT" and value:
        from ..settings import parse_duration

        try:
            parse_duration(value, name)
        except UnsatisfiableRequestError as err:
            return str(err)
    if name == MEMORY_VARIABLE:
        try:
            Rules.of({name: value})
        except UnsatisfiableRequestError as err:
            return str(err)
    if name == "SAFE_GPU_NB_GPUS" and value.strip() and not (value.strip().isdecimal() and int(value)):
        return f"{name}={value!r} is not a number of GPUs: a whole number from 1 up"
    if name == "SAFE_GPU_DIR" and value and not os.path.isabs(value):
        return (
            f"{name}={value!r} is relative, so processes with different working directories use different directories"
        )
    if name == "SAFE_GPU_FSROOT" and value and not os.path.isdir(value):
        return f"{name}={value!r} is not a directory"
    return ""


def scope(host: CheckedHost) -> Finding:
    """Does SAFE_GPU_SCOPE, which a claim sets for claims inside it, belong to a claim that is held?"""
    token = host.environ.get("SAFE_GPU_SCOPE")
    if not token:
        return passed("not set: this is not inside another claim")
    from ..coordination.socket_names import digest

    secret = digest(token)
    inside = [one for one in host.status.gpus if one.claim is not None and one.claim.token == secret]
    others = [one.claim for one in inside if one.claim is not None and one.claim.uid not in (None, os.geteuid())]
    if others:
        return warning(
            f"SAFE_GPU_SCOPE belongs to the claim of process {others[0].pid} of {others[0].user}, another user: it is "
            "ignored",
            "unset SAFE_GPU_SCOPE, and claim as that user",
        )
    if inside:
        gpus = gpus_named([one.label for one in inside])
        assert inside[0].claim is not None
        return passed(f"this is inside the claim of process {inside[0].claim.pid}, {gpus}")
    return warning(
        f"SAFE_GPU_SCOPE={token} belongs to no held claim of this host (it leaks through qsub -V, ssh, sudo and tmux): "
        "it is ignored",
        "unset SAFE_GPU_SCOPE",
    )


def visible_devices(host: CheckedHost) -> Finding:
    """Does an inherited CUDA_VISIBLE_DEVICES, or ROCR_ or HIP_ for AMD GPUs, limit claims, and is its value clear?"""
    from ..runtimes.visible_devices import visible_variables

    known = visible_variables(host.snapshot) if host.snapshot is not None else ("CUDA_VISIBLE_DEVICES",)
    name, value = next(((name, value) for name in known if (value := host.environ.get(name)) is not None), ("", None))
    if value is None:
        return passed("not set: claims choose among all GPUs")
    if host.snapshot is None:
        return skipped("there is no driver to compare it with")
    from ..runtimes.visible_devices import read_visible_once

    fence = read_visible_once(host.environ, host.snapshot)
    assert fence is not None
    lift = f"unset {name}, or set SAFE_GPU_FENCE=ignore"
    if settings.ignores_fence(host.environ):
        return passed(f"{value!r} is ignored (SAFE_GPU_FENCE=ignore)")
    if fence.ambiguous:
        return warning(
            f"{value!r} is ambiguous: {fence.doubt}",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID with numbers as nvidia-smi shows them, or name UUIDs",
        )
    if not fence.uuids:
        return failed(f"with {value!r} {fence.library} shows no GPU, so none can be claimed", lift)
    entries = [entry.strip() for entry in value.split(",")]
    if len(entries) > len(fence.uuids) and fence.library == "CUDA":
        return warning(
            f"{value!r}: CUDA stops reading at {entries[len(fence.uuids)]!r}, which names no GPU",
            "correct it, or " + lift,
        )
    usable = [gpu for gpu in host.snapshot.gpus if not gpu.unusable]
    limits = f"{value!r} limits claims to {len(fence.uuids)} of {len(usable)} GPUs"
    if len(fence.uuids) >= len(usable):
        return passed(f"{value!r} shows all GPUs")
    if host.job.scheduler is not None or host.environ.get("SAFE_GPU_SCOPE"):
        return passed(f"{limits}, as the job's share")
    return warning(limits, lift)


def device_order(host: CheckedHost) -> Finding:
    """Does CUDA_DEVICE_ORDER have a value that CUDA knows?"""
    if host.is_amd:
        return skipped("HIP does not read it")
    value = host.environ.get("CUDA_DEVICE_ORDER")
    if value in ("PCI_BUS_ID", "FASTEST_FIRST"):
        return passed(value)
    if value is None:
        return passed("not set: a claim sets it together with CUDA_VISIBLE_DEVICES")
    return warning(
        f"CUDA_DEVICE_ORDER={value!r} is unknown to CUDA, which uses FASTEST_FIRST then",
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or unset it",
    )


def batch_job(host: CheckedHost) -> Finding:
    """The batch job and the rank of this process."""
    job = host.job
    if job.scheduler is None:
        rank = "" if job.local_rank is None else f"; rank {job.local_rank} of {job.local_size or '?'} on this host"
        return passed(f"not in a batch job{rank}")
    text = f"in {job.scheduler} job {job.job_label or 'of unknown number'}"
    if job.local_rank is not None:
        text += f", rank {job.local_rank} of {job.local_size or '?'} on this host"
    if job.requested_gpus == 0:
        return warning(
            f"{text}, which asked for no GPU: the scheduler may start other jobs on the GPUs that this one claims",
            "ask the scheduler for the GPUs that the job uses",
        )
    if job.requested_gpus is not None:
        text += f", {job.requested_gpus} GPU(s) asked for"
    return passed(text)


# Limits and CPUs


def address_space(host: CheckedHost) -> Finding:
    """Is the address space limited? Batch systems set that limit for memory, and CUDA may fail under it."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return passed("not limited")
    return warning(
        f"limited to {limit / (1 << 30):.1f} GiB: CUDA reserves more address space than the memory of the host and its "
        "GPUs together, and may fail with out of memory",
        "limit memory in another way than h_vmem or ulimit -v (such as m_mem_free, cgroups), or ulimit -v unlimited",
    )


def cpu_mask(host: CheckedHost) -> Finding:
    """May this process use the CPUs next to the GPUs?"""
    if host.driver is None or host.snapshot is None:
        return skipped("there is no driver")
    if host.simulated:
        return skipped("the CPUs next to simulated GPUs are simulated too")
    from ..topology import read_topology

    try:
        topology = read_topology(driver=host.driver)
    except GPUAffinityError as err:
        return warning(str(err), "claim with affinity=None (--affinity none)")
    mask = frozenset(os.sched_getaffinity(0))
    by_uuid = {gpu.uuid: gpu for gpu in host.snapshot.physical}
    remote, narrowed = [], []
    for place in topology.gpus:
        gpu = by_uuid.get(place.uuid)
        if gpu is None or not place.source:
            continue  # it is not known which CPUs are next to it
        near = topology.node_set(place)
        if not near & mask:
            remote.append(gpu)
        elif near - mask:
            narrowed.append(gpu)
    fix = "ask the batch system for cores next to the GPUs, or lift the binding (taskset -pc, mpirun --bind-to none)"
    if remote:
        return warning(f"{labels(remote)}: this process may use no CPU next to it, but {len(mask)} elsewhere", fix)
    if narrowed:
        return warning(
            f"{labels(narrowed)}: this process may use only some of the CPUs next to it, {len(mask)} CPU(s) in all", fix
        )
    return passed(f"all CPUs next to the GPUs may be used, {len(mask)} in all")


_OPENMP = {
    "OMP_PROC_BIND": ("", "false"),
    "GOMP_CPU_AFFINITY": ("",),
    "KMP_AFFINITY": ("", "disabled", "none"),
}


def openmp(host: CheckedHost) -> Finding:
    """Does a variable of OpenMP move threads away from the CPUs to which a claim binds them?"""
    for name, harmless in _OPENMP.items():
        value = host.environ.get(name)
        if value is not None and value.lower() not in harmless:
            return warning(
                f"{name}={value}: OpenMP binds threads itself when it is loaded, which undoes the binding of the claim",
                f"unset {name}, or claim with affinity=None (--affinity none)",
            )
    return passed("no variable makes OpenMP bind threads")
