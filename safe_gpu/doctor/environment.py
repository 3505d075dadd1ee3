"""Checks of what a claim finds around it: packages, settings, variables and the batch job."""

from collections.abc import Callable
from contextlib import suppress
from importlib import metadata

from ..gpus.devices import VisibleLimit
from ..runtimes.visible_devices import CONTAINER, read_visible_once
from ..schedulers.gpu_count import number_for_job
from ..schedulers.job import JobContext, count, current
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
        why, _, _ = ignored.partition(";")
        return warning(why, f"as root: replace {path} by a file of root's with mode 644")
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
        read = _READERS.get(name)
        if read is not None and value.strip():
            read(value)
    for doubt in settings.doubts(host.environ):
        name, _, _ = doubt.split()[0].partition("=")
        return warning(doubt, f"unset {name}")
    if not given:
        return passed("none is set")
    return passed(", ".join(f"{name}={value}" for name, value in given.items()))


def _read_timeout(value: str) -> None:
    values.parse_duration(value, "SAFE_GPU_TIMEOUT")


def _read_number_of_gpus(value: str) -> None:
    environ = {"SAFE_GPU_NB_GPUS": value}
    if count(environ, "SAFE_GPU_NB_GPUS") != 0:
        number_for_job(environ)


def _read_memory_limit(value: str) -> None:
    Rules.of({MEMORY_VARIABLE: value})


# Those that only a claim reads. Each raises an error that names the value.
_READERS: dict[str, Callable[[str], None]] = {
    "SAFE_GPU_TIMEOUT": _read_timeout,
    "SAFE_GPU_NB_GPUS": _read_number_of_gpus,
    MEMORY_VARIABLE: _read_memory_limit,
}


def visible_devices(host: CheckedHost) -> Check:
    """Check whether an inherited variable such as CUDA_VISIBLE_DEVICES limits claims, and whether its value is
    clear."""
    limit = read_visible_once(host.environ, host.snapshot)
    if limit is None:
        return passed("not set: claims choose among all GPUs")
    value = host.environ[limit.name]
    if settings.ignores_fence(host.environ):
        return passed(f"{value!r} is ignored (SAFE_GPU_FENCE=ignore)")
    if limit.ambiguous:
        return warning(f"{value!r} is ambiguous: {limit.doubt}", f"set {limit.clear_by}")
    if limit.name == CONTAINER:
        shown = [gpu for gpu in host.snapshot.gpus if not gpu.mig_enabled]
        given = f"{len(limit.uuids)} of the {plural(len(shown))} that it shows"
        return passed(f"not set: this container was given {given} ({CONTAINER}), and claims choose among these")
    return _visible_gpus(host, limit)


def _visible_gpus(host: CheckedHost, limit: VisibleLimit) -> Check:
    """Check how many GPUs a variable leaves to claims."""
    name = limit.name
    value = host.environ[name]
    in_job = current(host.environ).scheduler is not None
    lift = f"unset {name}, or set SAFE_GPU_FENCE=ignore"
    if host.environ.get("SAFE_GPU_SCOPE"):
        lift = f"unset {name}"  # inside a claim its GPUs are the limit, whatever SAFE_GPU_FENCE says
    if in_job:
        lift = f"ask the scheduler of the job, which may have set {name}, for GPUs"
    misread = how_misread(limit, host.snapshot.gpus)
    if not limit.uuids:
        return failed(misread or f"with {value!r} {limit.library} shows no GPU, so none can be claimed", lift)
    if misread:
        return warning(misread, f"correct it, or {lift}")
    usable = [gpu for gpu in host.snapshot.gpus if not gpu.unusable]
    if len(limit.uuids) >= len(usable):
        return passed(f"{value!r} shows all GPUs")
    limits = f"{value!r} limits claims to {len(limit.uuids)} of {len(usable)} GPUs"
    if in_job or host.environ.get("SAFE_GPU_SCOPE"):
        return passed(f"{limits}, as the job's share")
    return warning(limits, lift)


def batch_job(host: CheckedHost) -> Check:
    """Report the batch job and the rank of this process."""
    job = current(host.environ)
    rank = ""
    if job.local_rank is not None:
        rank = f"rank {job.local_rank} of {job.local_size or '?'} on this host"
    if job.scheduler is None:
        return passed("; ".join(text for text in ("not in a batch job", rank) if text))
    text = f"in {job.scheduler} job {job.job_label or 'of unknown number'}"
    if rank:
        text += f", {rank}"
    if job.requested_gpus == 0:
        what = f"{text}, which asked for no GPU: the scheduler may start other jobs on the GPUs that this one claims"
        return warning(what, "ask the scheduler for the GPUs that the job uses")
    return _other_gpus_than_given(host, text) or passed(_with_number(text, job))


def _with_number(text: str, job: JobContext) -> str:
    if job.requested_gpus is None:
        return text
    return f"{text}, {plural(job.requested_gpus)} asked for"


def _other_gpus_than_given(host: CheckedHost, job: str) -> Check | None:
    """Return a finding if CUDA_VISIBLE_DEVICES names other GPUs than Slurm gave the job."""
    given = _listed(host.environ.get("SLURM_STEP_GPUS") or host.environ.get("SLURM_JOB_GPUS", ""))
    visible = _listed(host.environ.get("CUDA_VISIBLE_DEVICES", ""))
    shown = [gpu.label for gpu in host.snapshot.physical]
    if not given or len(shown) <= len(given):
        return None  # in a device cgroup the driver shows the GPUs of the job alone, numbered anew
    if visible <= given or not visible <= set(shown):
        return None
    return warning(
        f"{job}: CUDA_VISIBLE_DEVICES={','.join(sorted(visible))} names other GPUs than Slurm gave it "
        f"({','.join(sorted(given))}), and the driver shows {len(shown)}",
        "compare gres.conf with the driver's numbers (AutoDetect=nvml), or set CUDA_VISIBLE_DEVICES as Slurm says",
    )


def _listed(text: str) -> set[str]:
    """Return what stands between the commas."""
    return {entry for entry in text.split(",") if entry}


def packages(host: CheckedHost) -> Check:
    """Check that the required Python packages are installed."""
    found = []
    for name in ("safe-gpu", "filelock", "nvidia-ml-py"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    try:
        from filelock import lock_descriptor  # noqa: F401
    except ImportError as err:
        return failed(f"filelock is missing or too old ({err})", "pip install -U filelock")
    return passed(", ".join(found))
