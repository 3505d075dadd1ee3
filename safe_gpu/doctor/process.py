"""Checks of this process: its Python packages, environment variables, limits and CPU mask."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from .. import settings
from ..devices import HostSnapshot
from ..errors import GPUAffinityError, SafeGpuError
from ..schedulers.gpu_count import number_for_job
from ..selection.request import MEMORY_VARIABLE, Rules
from ..text import plural
from .check import CheckedHost, Finding, failed, gpus_named, labels, passed, skipped, warning, with_snapshot


def platform(host: CheckedHost) -> Finding:
    """Check that this is Linux, and name the versions of the kernel and of Python."""
    name = os.uname()
    detail = f"{name.sysname} {name.release} on {name.machine}, Python {'.'.join(map(str, sys.version_info[:3]))}"
    if name.sysname != "Linux":
        return failed(detail, "use Linux: claims need its file locks and its /proc")
    return passed(detail)


def packages(host: CheckedHost) -> Finding:
    """Check that the required Python packages are installed, and none that replaces their modules."""
    import re
    from importlib import metadata

    found: dict[str, list[str]] = {}
    for distribution in metadata.distributions():
        versions = found.setdefault(re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower(), [])
        if distribution.version not in versions:
            versions.append(distribution.version)
    try:
        from filelock import lock_descriptor  # noqa: F401
    except ImportError as err:
        return failed(f"filelock is missing or too old ({err})", "pip install 'filelock>=3.30'")
    # The project pynvml installs no module of this name since version 12.
    colliding = [name for name in ("nvidia-ml-py3", "pynvml") for one in found.get(name, ()) if _major(one) < 12]
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
    if own and _major(own[0]) < 3:
        return warning(
            f"the older safe-gpu {own[0]} is installed beside this one", "pip uninstall safe-gpu, then install this one"
        )
    known = [f"{name} {found[name][0]}" for name in ("safe-gpu", "filelock", "nvidia-ml-py") if name in found]
    return passed(", ".join(known) or "run from a source tree")


def _major(version: str) -> int:
    major = version.split(".")[0]
    return int(major) if major.isdecimal() else 0


def for_all_users(host: CheckedHost) -> Finding:
    """Check that other users can run this interpreter and read this package, where root has installed it."""
    import stat

    import filelock

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.stat(package).st_uid:
        return skipped(f"{package} does not belong to root, so other users need no access")
    files = [(os.path.realpath(sys.executable), stat.S_IXOTH)]
    files += [(os.path.join(package, "__init__.py"), stat.S_IROTH), (filelock.__file__, stat.S_IROTH)]
    for path, bit in files:
        above, needed = path, bit
        while above != "/":
            mode = os.stat(above).st_mode
            if not mode & needed:
                return warning(
                    f"other users cannot use {path}: {above} has mode {stat.S_IMODE(mode):04o}",
                    "install with /usr/bin/python3 and umask 022, outside of home directories",
                )
            above, needed = os.path.dirname(above), stat.S_IXOTH
    return passed(f"{files[0][0]} and {package} can be used by all users")


# Variables


def variables(host: CheckedHost) -> Finding:
    """Check that every SAFE_GPU_* variable exists and has a value that its reader accepts."""
    for name, meant in settings.unknown(host.environ).items():
        hint = f"did you mean {meant}? " if meant else ""
        return warning(f"{name} is not a variable of safe_gpu and has no effect", f"{hint}unset {name}")
    given = {name: value for name, value in sorted(host.environ.items()) if name in settings.VARIABLES}
    for name, value in given.items():
        try:
            settings.check({name: value})
            if name in _READERS and value.strip():
                _READERS[name](name, value)
        except SafeGpuError as err:
            return failed(str(err), f"set {name} to a valid value, or unset it")
    for doubt in settings.doubts(host.environ):
        return warning(doubt, f"unset {doubt.partition('=')[0]}")
    if given.get("SAFE_GPU_FSROOT", "/") != "/":
        return warning(
            f"SAFE_GPU_FSROOT={given['SAFE_GPU_FSROOT']}: CPUs are bound by the topology of another host",
            "unset SAFE_GPU_FSROOT (it is for tests)",
        )
    return passed(", ".join(f"{name}={value}" for name, value in given.items()) or "none is set")


def _check_path(name: str, value: str) -> None:
    if name == "SAFE_GPU_DIR" and not os.path.isabs(value):
        way = "relative, so processes with different working directories use different directories"
    elif name == "SAFE_GPU_FSROOT" and not os.path.isdir(value):
        way = "not a directory"
    else:
        return
    raise SafeGpuError(f"{name}={value!r} is {way}")


_READERS: dict[str, Callable[[str, str], object]] = {
    "SAFE_GPU_TIMEOUT": lambda name, value: settings.parse_duration(value, name),
    "SAFE_GPU_NB_GPUS": lambda name, value: number_for_job({name: value}),
    MEMORY_VARIABLE: lambda name, value: Rules.of({name: value}),
    "SAFE_GPU_DIR": _check_path,
    "SAFE_GPU_FSROOT": _check_path,
}


def scope(host: CheckedHost) -> Finding:
    """Check that SAFE_GPU_SCOPE, which a claim sets for claims inside it, belongs to a claim that is held."""
    token = host.environ.get("SAFE_GPU_SCOPE")
    if not token:
        return passed("not set: this is not inside another claim")
    from ..coordination.socket_names import digest

    secret = digest(token)
    inside = {one.label: one.claim for one in host.status.gpus if one.claim is not None and one.claim.token == secret}
    for claim in inside.values():
        if claim.uid not in (None, os.geteuid()):
            return warning(
                f"SAFE_GPU_SCOPE belongs to the claim of process {claim.pid} of {claim.user}, another user: it is "
                "ignored",
                "unset SAFE_GPU_SCOPE, and claim as that user",
            )
    for claim in inside.values():
        return passed(f"this is inside the claim of process {claim.pid}, {gpus_named(list(inside))}")
    return warning(
        f"SAFE_GPU_SCOPE={token} belongs to no held claim of this host (it leaks through qsub -V, ssh, sudo and tmux): "
        "it is ignored",
        "unset SAFE_GPU_SCOPE",
    )


def visible_devices(host: CheckedHost) -> Finding:
    """Check whether an inherited variable such as CUDA_VISIBLE_DEVICES limits claims, and whether its value is
    clear."""
    from ..runtimes.visible_devices import read_visible_once

    known = host.vendor.variables
    name = next((name for name in known if name in host.environ), "")
    if not name:
        return passed("not set: claims choose among all GPUs")
    if host.snapshot is None:
        return skipped("there is no driver to compare it with")
    value = host.environ[name]
    visible_limit = read_visible_once(host.environ, host.snapshot)
    assert visible_limit is not None
    lift = f"unset {name}, or set SAFE_GPU_FENCE=ignore"
    if settings.ignores_fence(host.environ):
        return passed(f"{value!r} is ignored (SAFE_GPU_FENCE=ignore)")
    if visible_limit.ambiguous:
        return warning(
            f"{value!r} is ambiguous: {visible_limit.doubt}",
            f"set {visible_limit.clear_by}",
        )
    if not visible_limit.uuids:
        return failed(f"with {value!r} {visible_limit.library} shows no GPU, so none can be claimed", lift)
    entries = [entry.strip() for entry in value.split(",")]
    if len(entries) > len(visible_limit.uuids) and visible_limit.library == "CUDA":
        return warning(
            f"{value!r}: CUDA stops reading at {entries[len(visible_limit.uuids)]!r}, which names no GPU",
            "correct it, or " + lift,
        )
    usable = [gpu for gpu in host.snapshot.gpus if not gpu.unusable]
    limits = f"{value!r} limits claims to {len(visible_limit.uuids)} of {len(usable)} GPUs"
    if len(visible_limit.uuids) >= len(usable):
        return passed(f"{value!r} shows all GPUs")
    if host.job.scheduler is not None or host.environ.get("SAFE_GPU_SCOPE"):
        return passed(f"{limits}, as the job's share")
    return warning(limits, lift)


def device_order(host: CheckedHost) -> Finding:
    """Check that CUDA_DEVICE_ORDER has a value that CUDA knows."""
    if host.vendor.library != "CUDA":
        return skipped(f"{host.vendor.library} does not read it")
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
    """Report the batch job and the rank of this process."""
    job = host.job
    rank = "" if job.local_rank is None else f"rank {job.local_rank} of {job.local_size or '?'} on this host"
    if job.scheduler is None:
        return passed("not in a batch job" + (rank and f"; {rank}"))
    text = f"in {job.scheduler} job {job.job_label or 'of unknown number'}" + (rank and f", {rank}")
    if job.requested_gpus == 0:
        return warning(
            f"{text}, which asked for no GPU: the scheduler may start other jobs on the GPUs that this one claims",
            "ask the scheduler for the GPUs that the job uses",
        )
    given = set((host.environ.get("SLURM_STEP_GPUS") or host.environ.get("SLURM_JOB_GPUS") or "").split(",")) - {""}
    visible = set(host.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) - {""}
    shown = [] if host.snapshot is None else [gpu.label for gpu in host.snapshot.physical]
    # In a device cgroup the driver shows the GPUs of the job alone, numbered anew.
    if given and len(shown) > len(given) and visible <= set(shown) and not visible <= given:
        return warning(
            f"{text}: CUDA_VISIBLE_DEVICES={','.join(sorted(visible))} names other GPUs than Slurm gave it "
            f"({','.join(sorted(given))}), and the driver shows {len(shown)}",
            "compare gres.conf with the driver's numbers (AutoDetect=nvml), or set CUDA_VISIBLE_DEVICES as Slurm says",
        )
    return passed(text if job.requested_gpus is None else f"{text}, {plural(job.requested_gpus)} asked for")


# Limits and CPUs


def address_space(host: CheckedHost) -> Finding:
    """Check that the address space is not limited. Batch systems set that limit for memory, and CUDA may fail under
    it."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return passed("not limited")
    return warning(
        f"limited to {limit / (1 << 30):.1f} GiB: CUDA reserves more address space than the memory of the host and its "
        "GPUs together, and may fail with an out-of-memory error",
        "limit memory in another way than h_vmem or ulimit -v (such as m_mem_free, cgroups), or ulimit -v unlimited",
    )


@with_snapshot
def cpu_mask(host: CheckedHost, snapshot: HostSnapshot) -> Finding:
    """Check that this process may use the CPUs next to the GPUs."""
    if host.simulated:
        return skipped("the CPUs next to simulated GPUs are simulated too")
    from ..topology import read_topology

    try:
        topology = read_topology(driver=host.driver)
    except GPUAffinityError as err:
        return warning(str(err), "claim with affinity=None (--affinity none)")
    mask = frozenset(os.sched_getaffinity(0))
    by_uuid = {gpu.uuid: gpu for gpu in snapshot.physical}
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
            f"{labels(narrowed)}: this process may use only some of the CPUs next to it, {len(mask)} in all", fix
        )
    return passed(f"all CPUs next to the GPUs may be used, {len(mask)} in all")


_OPENMP = {
    "OMP_PROC_BIND": ("", "false"),
    "GOMP_CPU_AFFINITY": ("",),
    "KMP_AFFINITY": ("", "disabled", "none"),
}


def openmp(host: CheckedHost) -> Finding:
    """Check that no variable of OpenMP moves threads away from the CPUs to which a claim binds them."""
    for name, harmless in _OPENMP.items():
        value = host.environ.get(name)
        if value is not None and value.lower() not in harmless:
            return warning(
                f"{name}={value}: OpenMP binds threads itself when it is loaded, which undoes the binding of the claim",
                f"unset {name}, or claim with affinity=None (--affinity none)",
            )
    return passed("no variable makes OpenMP bind threads")
