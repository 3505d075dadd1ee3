"""Checks of this process: its packages, its environment variables, its limits, its CPUs."""

from __future__ import annotations

import os
import sys

from ..errors import GPUAffinityError, UnsatisfiableRequestError
from .check import Finding, Host, failed, labels, passed, skipped, warning

__all__ = [
    "address_space",
    "batch_job",
    "cpu_mask",
    "device_order",
    "openmp",
    "packages",
    "platform",
    "scope",
    "variables",
    "visible_devices",
]


def platform(host: Host) -> Finding:
    """Linux, and which Python."""
    name = os.uname()
    detail = f"{name.sysname} {name.release} on {name.machine}, Python {'.'.join(map(str, sys.version_info[:3]))}"
    if name.sysname != "Linux":
        return failed(detail, "use Linux: the locks and /proc files that claims rest on are Linux's")
    return passed(detail)


def packages(host: Host) -> Finding:
    """The Python packages that are needed are there, and none that takes their place."""
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
            f"{' and '.join(colliding)} brings its own pynvml module in place of nvidia-ml-py's",
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
    """From 12 on, the project named pynvml depends on nvidia-ml-py and brings no module of that name."""
    major = version.split(".")[0]
    return name != "pynvml" or not major.isdecimal() or int(major) < 12


# Variables

_PREFIX = "SAFE_GPU_"
_VARIABLES = "DIR DRIVER TIMEOUT NB_GPUS FENCE FSROOT LEGACY_LOCK SCOPE SGE_RESOURCE".split()
_CHOICES = {"SAFE_GPU_FENCE": ("ignore",), "SAFE_GPU_LEGACY_LOCK": ("auto", "always", "never")}


def variables(host: Host) -> Finding:
    """Every SAFE_GPU_* variable is one that exists, with a value that means something."""
    from difflib import get_close_matches

    known = [_PREFIX + name for name in _VARIABLES]
    given = {name: value for name, value in sorted(host.environ.items()) if name.upper().startswith(_PREFIX)}
    for name, value in given.items():
        if name not in known:
            close = get_close_matches(name.upper(), known, 1, 0.6)
            hint = f"did you mean {close[0]}? " if close else ""
            return warning(f"{name} is not a variable of safe_gpu, and nobody reads it", f"{hint}unset {name}")
        trouble = _trouble_with_value(name, value)
        if trouble:
            return failed(trouble, f"set {name} to something that is understood, or unset it")
    if given.get("SAFE_GPU_FSROOT", "/") != "/":
        return warning(
            f"SAFE_GPU_FSROOT={given['SAFE_GPU_FSROOT']}: CPUs are bound by the topology of another host",
            "unset SAFE_GPU_FSROOT (it is for tests)",
        )
    if not given:
        return passed("none is set")
    return passed(", ".join(f"{name}={value}" for name, value in given.items()))


def _trouble_with_value(name: str, value: str) -> str:
    choices = _CHOICES.get(name)
    if choices and value not in ("", *choices):
        return f"{name}={value!r} is not understood: it takes {', '.join(choices)}"
    if name == "SAFE_GPU_TIMEOUT" and value:
        from ..durations import parse_duration

        try:
            parse_duration(value, name)
        except UnsatisfiableRequestError as err:
            return str(err)
    if name == "SAFE_GPU_NB_GPUS" and value.strip() and not (value.strip().isdecimal() and int(value)):
        return f"{name}={value!r} is no number of GPUs: a whole number from 1 up"
    if name == "SAFE_GPU_DIR" and value and not os.path.isabs(value):
        return f"{name}={value!r} is relative, so it names another directory wherever a process is started"
    if name == "SAFE_GPU_FSROOT" and value and not os.path.isdir(value):
        return f"{name}={value!r} is not a directory"
    return ""


def scope(host: Host) -> Finding:
    """SAFE_GPU_SCOPE, which a claim sets for claims inside it, belongs to a claim that lives."""
    token = host.environ.get("SAFE_GPU_SCOPE")
    if not token:
        return passed("not set: this is not inside another claim")
    inside = [one for one in host.status.gpus if one.claim is not None and one.claim.token == token]
    if inside:
        gpus = labels([one.gpu for one in inside])
        assert inside[0].claim is not None
        return passed(f"this is inside the claim of process {inside[0].claim.pid}, {gpus}")
    return warning(
        f"SAFE_GPU_SCOPE={token} names no living claim here (it leaks through qsub -V, ssh and tmux): it is ignored",
        "unset SAFE_GPU_SCOPE",
    )


def visible_devices(host: Host) -> Finding:
    """An inherited CUDA_VISIBLE_DEVICES limits what can be claimed: how far, and does it say what it seems to?"""
    value = host.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return passed("not set: claims choose among all GPUs")
    if host.snapshot is None:
        return skipped("there is no driver to compare it with")
    from ..visibility import parse

    fence = parse(value, host.snapshot, device_order=host.environ.get("CUDA_DEVICE_ORDER"))
    assert fence is not None
    lift = "unset CUDA_VISIBLE_DEVICES, or set SAFE_GPU_FENCE=ignore"
    if host.environ.get("SAFE_GPU_FENCE") == "ignore":
        return passed(f"{value!r} is disregarded (SAFE_GPU_FENCE=ignore)")
    if fence.ambiguous:
        return warning(
            f"{value!r} is ambiguous: {fence.doubt}",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID with numbers as nvidia-smi shows them, or name UUIDs",
        )
    if not fence.uuids:
        return failed(f"{value!r} shows no GPU to CUDA, so none can be claimed", lift)
    entries = [entry.strip() for entry in value.split(",")]
    if len(entries) > len(fence.uuids):
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


def device_order(host: Host) -> Finding:
    """CUDA_DEVICE_ORDER has a value that CUDA knows."""
    value = host.environ.get("CUDA_DEVICE_ORDER")
    if value in ("PCI_BUS_ID", "FASTEST_FIRST"):
        return passed(value)
    if value is None:
        return passed("not set: claims set it with the GPUs' numbers")
    return warning(
        f"CUDA_DEVICE_ORDER={value!r} is unknown to CUDA, which takes FASTEST_FIRST then",
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or unset it",
    )


def batch_job(host: Host) -> Finding:
    """The batch job and the rank that this is."""
    job = host.job
    if job.scheduler is None:
        rank = "" if job.local_rank is None else f"; rank {job.local_rank} of {job.local_size or '?'} on this host"
        return passed(f"not in a batch job{rank}")
    text = f"in {job.scheduler} job {job.job_label or 'of unknown number'}"
    if job.local_rank is not None:
        text += f", rank {job.local_rank} of {job.local_size or '?'} on this host"
    if job.requested_gpus == 0:
        return warning(
            f"{text}, which asked for no GPU: the scheduler may start others on the GPUs that it claims",
            "declare the GPUs that the job takes",
        )
    if job.requested_gpus is not None:
        text += f", {job.requested_gpus} GPU(s) asked for"
    return passed(text)


# Limits and CPUs


def address_space(host: Host) -> Finding:
    """A limit of the address space, which batch systems set for memory, may keep CUDA from starting."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return passed("not limited")
    return warning(
        f"limited to {limit / (1 << 30):.1f} GiB: CUDA reserves more address space than all memory of host and GPUs "
        "together, and may fail with out of memory",
        "ask for memory in another way than h_vmem or ulimit -v (such as m_mem_free, cgroups), or ulimit -v unlimited",
    )


def cpu_mask(host: Host) -> Finding:
    """May this process use the CPUs next to the GPUs?"""
    if host.driver is None or host.snapshot is None:
        return skipped("there is no driver to ask")
    if host.simulated:
        return skipped("the CPUs next to simulated GPUs are simulated, too")
    from ..affinity.topology import HostTopology

    try:
        topology = HostTopology.from_host(driver=host.driver)
    except GPUAffinityError as err:
        return warning(str(err), "claim with affinity=None (--affinity none)")
    mask = frozenset(os.sched_getaffinity(0))
    by_uuid = {gpu.uuid: gpu for gpu in host.snapshot.physical}
    remote, narrowed = [], []
    for place in topology.gpus:
        gpu = by_uuid.get(place.uuid)
        if gpu is None or not place.source:
            continue  # nobody knows what is next to it
        near = topology.node_set(place)
        if not near & mask:
            remote.append(gpu)
        elif near - mask:
            narrowed.append(gpu)
    fix = "ask the batch system for cores next to the GPUs, or lift the binding (taskset -pc, mpirun --bind-to none)"
    if remote:
        return warning(f"{labels(remote)}: this process may use no CPU next to it, {len(mask)} CPU(s) in all", fix)
    if narrowed:
        return warning(
            f"{labels(narrowed)}: this process may use a part of the CPUs next to it, {len(mask)} in all", fix
        )
    return passed(f"all CPUs next to the GPUs may be used, {len(mask)} in all")


_OPENMP = {
    "OMP_PROC_BIND": ("", "false"),
    "GOMP_CPU_AFFINITY": ("",),
    "KMP_AFFINITY": ("", "disabled", "none"),
}


def openmp(host: Host) -> Finding:
    """Do OpenMP's variables move threads off the CPUs that a claim binds them to?"""
    for name, harmless in _OPENMP.items():
        value = host.environ.get(name)
        if value is not None and value.lower() not in harmless:
            return warning(
                f"{name}={value} binds threads where OpenMP is loaded, against the binding of the claim",
                f"unset {name}, or claim with affinity=None (--affinity none)",
            )
    return passed("no variable binds threads against the claim")
