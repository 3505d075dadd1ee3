"""The variables that choose among GPUs, of whatever vendor: which they are, what limits a claim, and what a claim sets.
Pure.
"""

from collections.abc import Collection, Mapping, Sequence

from ..gpus.devices import Gpu, HostSnapshot, VisibleLimit
from ..gpus.vendors import VENDORS
from .cuda_variables import CUDA, parse_cuda, render_cuda
from .level_zero_variables import read_level_zero, render_level_zero
from .rocm_variables import HIP, ROCR, read_rocm, render_rocm

CONTAINER = "NVIDIA_VISIBLE_DEVICES"


def visible_variables(snapshot: HostSnapshot) -> tuple[str, ...]:
    """Return the variables that choose among these GPUs."""
    return VENDORS[snapshot.vendor].variables


def read_visible(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs to which an environment limits a process; None if no variable does."""
    library = VENDORS[snapshot.vendor].library
    if library == "CUDA":
        return parse_cuda(environ.get(CUDA), snapshot, device_order=environ.get("CUDA_DEVICE_ORDER"))
    if library == "HIP":
        return read_rocm(environ, snapshot)
    return read_level_zero(environ, snapshot)


def read_visible_once(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs to which an environment limits a claim: as :func:`read_visible`, but a list that a batch
    scheduler has written into several variables counts once. HIP would take Slurm's second copy for numbers within the
    list. Where none of these variables is set, the GPUs that a container was given are the limit
    (:func:`read_container`)."""
    if snapshot.vendor == "amd" and "SLURM_JOB_ID" in environ and CUDA in environ:
        copied = environ[CUDA] == environ.get(ROCR) and not environ.get(HIP)
        if copied and "GPU-" not in environ[CUDA]:
            environ = {name: value for name, value in environ.items() if name != CUDA}
    limit = read_visible(environ, snapshot)
    if limit is None:
        return read_container(environ, snapshot)
    return limit


def read_container(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs that this container was given, where it shows more than these; None where it does not, or where
    they are not told.

    A privileged container shows all GPUs of the host (kubernetes#81256). Kubernetes and Nomad name those that they have
    given to it by UUIDs in NVIDIA_VISIBLE_DEVICES. Numbers are not read: they are those of the host, and a container
    numbers its GPUs anew.
    """
    value = environ.get(CONTAINER, "")
    names = [name.strip() for name in value.split(",")]
    shown = [gpu for gpu in snapshot.gpus if not gpu.mig_enabled]
    given = tuple(gpu.uuid for gpu in shown if gpu.uuid in names or gpu.mig_parent in names)
    if not given or len(given) == len(shown):
        return None
    return VisibleLimit(value, given, name=CONTAINER, library="the NVIDIA Container Toolkit", lift="")


def render_visible(
    gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that make exactly these GPUs visible, in this order, to a process with this environment
    (None: an empty one). The first one names them.

    Raises:
        UnsatisfiableRequestError: as for :func:`render_cuda`, which every claim calls to check its arguments.
    """
    library = VENDORS[snapshot.vendor].library
    if library == "CUDA":
        return render_cuda(gpus, visible_as=visible_as, snapshot=snapshot)
    if library == "Level Zero":
        return render_level_zero(gpus, snapshot=snapshot, environ=environ or {})
    return render_rocm(gpus, visible_as=visible_as, snapshot=snapshot, environ=environ or {})


def hide_all() -> dict[str, str]:
    """Return the variables that hide all GPUs."""
    variables: dict[str, str] = {}
    for vendor in VENDORS.values():
        variables.update(dict.fromkeys(vendor.variables, vendor.hides))
    return variables


def stale_indices(value: str | None, device_order: str | None, claimed: Collection[str], snapshot: HostSnapshot) -> str:
    """Return what is wrong with the indices, and what to do: a sentence without the full stop. "" if nothing is wrong.

    Args:
        value, device_order: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER of this process; None if not set.
        claimed: UUIDs of the GPUs of the claim inside which this process runs.
        snapshot: the host now.
    """
    if VENDORS[snapshot.vendor].library != "CUDA":
        return ""  # the others do not renumber
    visible_limit = parse_cuda(value, snapshot, device_order=device_order)
    if visible_limit is None or not visible_limit.uses_indices or not claimed:
        return ""
    foreign = [gpu.label for gpu in snapshot.gpus if gpu.uuid in visible_limit and gpu.uuid not in claimed]
    entries = [entry.strip() for entry in visible_limit.value.split(",")]
    number_of_entries = sum(entry[:1].isdigit() for entry in entries)
    if foreign:
        meant = f"GPU {','.join(foreign)}, which this claim does not hold"
    elif number_of_entries > len(visible_limit.uuids):
        meant = "fewer GPUs than this claim holds"
    else:
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES={visible_limit.value} now means {meant}{_why_shifted(claimed, snapshot)}: "
        f"{_way_out_of_stale(claimed, snapshot)} (--visible-as uuid keeps a claim from this)"
    )


def _why_shifted(claimed: Collection[str], snapshot: HostSnapshot) -> str:
    """Return why indices no longer mean the GPUs of a claim, a clause; "" if that is not known."""
    causes = []
    lost = [gpu.label for gpu in snapshot.gpus if gpu.lost]
    if lost:
        causes.append(f"GPU {','.join(lost)} is lost")
    if any(snapshot.by_uuid(uuid) is None for uuid in claimed):
        causes.append("a claimed GPU is gone")
    if not causes:
        return ""
    return f", since {' and '.join(causes)}"


def _way_out_of_stale(claimed: Collection[str], snapshot: HostSnapshot) -> str:
    left = [gpu for gpu in snapshot.gpus if gpu.uuid in claimed and not gpu.lost]
    if not left:
        return "end this claim"
    names = render_cuda(left, visible_as="uuid", snapshot=snapshot)[CUDA]
    return f"set CUDA_VISIBLE_DEVICES={names} before CUDA starts"
