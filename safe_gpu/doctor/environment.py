"""Checks of what a claim finds around it: packages, settings, variables and the batch job."""

from collections.abc import Callable
from contextlib import suppress
from importlib import metadata

from ..runtimes.visible_devices import read_visible_once
from ..schedulers.gpu_count import number_for_job
from ..schedulers.job import count, current
from ..selection.verdicts import MEMORY_VARIABLE, Rules, how_misread
from ..settings import config, values
from ..settings import variables as settings
from ..wording.text import plural
from .check import Check, CheckedHost, failed, passed, skipped, warning


def policy(host: CheckedHost) -> Check:
    """Check that the policy file is read, and that every line of it is right."""
    path = settings.policy_file(host.environ)
    found, ignored = config.read(path)
    if ignored:
        return warning(ignored.partition(";")[0], f"as root: write {path} anew, a file of root's with mode 644")
    if found is not None:
        return passed(f"{path}, {plural(len(found.sections), 'section')}")
    if host.environ.get("SAFE_GPU_POLICY"):
        return warning(f"SAFE_GPU_POLICY={path} does not exist: nothing is limited", "unset SAFE_GPU_POLICY")
    return skipped(f"there is no {path}: nothing is limited")


def variables(host: CheckedHost) -> Check:
    """Check that every SAFE_GPU_* variable exists and has a value that its reader accepts."""
    given = {name: value for name, value in sorted(host.environ.items()) if name in settings.VARIABLES}
    settings.check(given)
    for name, value in given.items():
        if name in _READERS and value.strip():
            _READERS[name](name, value)
    for doubt in settings.doubts(host.environ):
        return warning(doubt, f"unset {doubt.split()[0].partition('=')[0]}")
    return passed(", ".join(f"{name}={value}" for name, value in given.items()) or "none is set")


_READERS: dict[str, Callable[[str, str], object]] = {
    "SAFE_GPU_TIMEOUT": lambda name, value: values.parse_duration(value, name),
    "SAFE_GPU_NB_GPUS": lambda name, value: count({name: value}, name) == 0 or number_for_job({name: value}),
    MEMORY_VARIABLE: lambda name, value: Rules.of({name: value}),
}


def visible_devices(host: CheckedHost) -> Check:
    """Check whether an inherited variable such as CUDA_VISIBLE_DEVICES limits claims, and whether its value is
    clear."""
    name = next((name for name in host.vendor.variables if name in host.environ), "")
    if not name:
        return passed("not set: claims choose among all GPUs")
    value = host.environ[name]
    visible_limit = read_visible_once(host.environ, host.snapshot)
    assert visible_limit is not None
    in_job = current(host.environ).scheduler is not None
    lift = f"unset {name}, or set SAFE_GPU_FENCE=ignore"
    if in_job:
        lift = f"ask the scheduler of the job, which may have set {name}, for GPUs"
    if settings.ignores_fence(host.environ):
        return passed(f"{value!r} is ignored (SAFE_GPU_FENCE=ignore)")
    if visible_limit.ambiguous:
        return warning(f"{value!r} is ambiguous: {visible_limit.doubt}", f"set {visible_limit.clear_by}")
    how = how_misread(visible_limit, host.snapshot.gpus)
    if not visible_limit.uuids:
        return failed(how or f"with {value!r} {visible_limit.library} shows no GPU, so none can be claimed", lift)
    if how:
        return warning(how, "correct it, or " + lift)
    usable = [gpu for gpu in host.snapshot.gpus if not gpu.unusable]
    limits = f"{value!r} limits claims to {len(visible_limit.uuids)} of {len(usable)} GPUs"
    if len(visible_limit.uuids) >= len(usable):
        return passed(f"{value!r} shows all GPUs")
    if in_job or host.environ.get("SAFE_GPU_SCOPE"):
        return passed(f"{limits}, as the job's share")
    return warning(limits, lift)


def batch_job(host: CheckedHost) -> Check:
    """Report the batch job and the rank of this process."""
    job = current(host.environ)
    rank = "" if job.local_rank is None else f"rank {job.local_rank} of {job.local_size or '?'} on this host"
    if job.scheduler is None:
        return passed("not in a batch job" + (rank and f"; {rank}"))
    text = f"in {job.scheduler} job {job.job_label or 'of unknown number'}" + (rank and f", {rank}")
    if job.requested_gpus == 0:
        what = f"{text}, which asked for no GPU: the scheduler may start other jobs on the GPUs that this one claims"
        return warning(what, "ask the scheduler for the GPUs that the job uses")
    given = set((host.environ.get("SLURM_STEP_GPUS") or host.environ.get("SLURM_JOB_GPUS") or "").split(",")) - {""}
    visible = set(host.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) - {""}
    shown = [gpu.label for gpu in host.snapshot.physical]
    # In a device cgroup the driver shows the GPUs of the job alone, numbered anew.
    if given and len(shown) > len(given) and visible <= set(shown) and not visible <= given:
        return warning(
            f"{text}: CUDA_VISIBLE_DEVICES={','.join(sorted(visible))} names other GPUs than Slurm gave it "
            f"({','.join(sorted(given))}), and the driver shows {len(shown)}",
            "compare gres.conf with the driver's numbers (AutoDetect=nvml), or set CUDA_VISIBLE_DEVICES as Slurm says",
        )
    return passed(text if job.requested_gpus is None else f"{text}, {plural(job.requested_gpus)} asked for")


def packages(host: CheckedHost) -> Check:
    """Check that the required Python packages are installed."""
    found = {}
    for name in ("safe-gpu", "filelock", "nvidia-ml-py"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    try:
        from filelock import lock_descriptor  # noqa: F401
    except ImportError as err:
        return failed(f"filelock is missing or too old ({err})", "pip install -U filelock")
    return passed(", ".join(f"{name} {version}" for name, version in found.items()))
