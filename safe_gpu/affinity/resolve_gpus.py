"""Which GPUs a caller means: by nvidia-smi's index, by CUDA's ordinal, or those next to which it was bound before.

nvidia-smi numbers the GPUs of the host. CUDA numbers the GPUs that it shows to one process, from 0 and in the order of
CUDA_VISIBLE_DEVICES. The two differ as soon as that variable is set. On AMD GPUs the ordinal is HIP's, after
ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES.
"""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import GPUAffinityError
from ..gpus.devices import Gpu, HostSnapshot, are_mixed
from ..gpus.vendors import VENDORS
from ..runtimes.visible_devices import read_visible, visible_variables
from ..settings.values import names_device, parse_names
from ..wording.text import gpu_ranges

BOUND = "SAFE_GPU_BOUND"
"""The variable that holds the UUIDs of the GPUs next to which a process was bound by number. Children inherit it."""

Names = int | str | Iterable[int | str]
"""GPUs as nvidia-smi shows them: an index, a UUID or its first characters, or several of these."""


class ResolvedGpus(NamedTuple):
    """GPUs that a caller means.

    Attributes:
        gpus: the devices, in the caller's order.
        how: how they were found, as a clause; "" if they were named.
        doubt: why CUDA may number the GPUs in another way, as a clause; "" if it cannot.
    """

    gpus: tuple[Gpu, ...]
    how: str = ""
    doubt: str = ""

    @property
    def title(self) -> str:
        """For a log line: ``GPU 2 (GPU-5a...), CUDA ordinal 1 with CUDA_VISIBLE_DEVICES=7,2``."""
        gpus = f"GPU {gpu_ranges(gpu.label for gpu in self.gpus)}"
        if len(self.gpus) == 1:
            gpus += f" ({self.gpus[0].uuid})"
        if self.how:
            gpus += f", {self.how}"
        return gpus

    @property
    def notes(self) -> tuple[str, ...]:
        """The doubt as a sentence for a report."""
        if not self.doubt:
            return ()
        return (f"it is not certain which GPU is meant: {self.doubt}",)


def named(names: Names | None, ordinal: int | None, snapshot: HostSnapshot, environ: Mapping[str, str]) -> ResolvedGpus:
    """Return the GPUs that are named in one of the two ways.

    Raises:
        GPUAffinityError: both are given; as for :func:`by_name` and :func:`by_ordinal`.
    """
    if names is not None and ordinal is not None:
        raise GPUAffinityError("name the GPU once: gpus= as nvidia-smi shows it, or ordinal= as CUDA numbers it")
    if ordinal is not None:
        return by_ordinal(ordinal, snapshot, environ)
    if names is None:
        names = ()
    return by_name(names, snapshot)


def by_name(names: Names, snapshot: HostSnapshot) -> ResolvedGpus:
    """Return GPUs by index as nvidia-smi shows it, range, or UUID (or its first characters).

    Raises:
        GPUAffinityError: this host has no such GPU. UnsatisfiableRequestError: a name has none of these forms.
    """
    wanted = parse_names(names, "gpus")
    found = [gpu for gpu in snapshot.gpus if any(names_device(name, gpu) for name in wanted)]
    missing = [name for name in wanted if not any(names_device(name, gpu) for gpu in found)]
    if missing or not found:
        has = "none"
        if snapshot.gpus:
            has = f"GPU {gpu_ranges(gpu.label for gpu in snapshot.gpus)}"
        raise GPUAffinityError(f"this host has no GPU {', '.join(missing) or repr(names)}: it has {has}")
    uuids = {gpu.uuid for gpu in found}
    return ResolvedGpus(tuple(gpu for gpu in found if gpu.mig_parent not in uuids))


def by_ordinal(ordinal: int, snapshot: HostSnapshot, environ: Mapping[str, str], *, also: str = "") -> ResolvedGpus:
    """Return the GPU with CUDA's (HIP's) number ``ordinal`` in a process with this environment; ``also`` is for the
    report.

    Raises:
        GPUAffinityError: it is not a number from 0 on, or CUDA shows fewer GPUs.
    """
    library = VENDORS[snapshot.vendor].library
    if isinstance(ordinal, bool) or not isinstance(ordinal, int) or ordinal < 0:
        raise GPUAffinityError(f"ordinal={ordinal!r} is not a number of {library}'s: pass 0 or a greater whole number")
    shown = visible(snapshot, environ)
    given = _with_variables(snapshot, environ)
    if ordinal >= len(shown.gpus):
        visible_ones = f"{len(shown.gpus)} are visible"
        if len(shown.gpus) == 1:
            visible_ones = "1 is visible"
        raise GPUAffinityError(f"{library} shows no GPU {ordinal}: {visible_ones}{given}")
    how = f"{library} ordinal {ordinal}{also}{given}"
    return ResolvedGpus((shown.gpus[ordinal],), how, shown.doubt)


def visible(snapshot: HostSnapshot, environ: Mapping[str, str]) -> ResolvedGpus:
    """Return the GPUs that CUDA shows to a process with this environment, in CUDA's order. CUDA is not asked.

    On a host with GPUs of several models, CUDA numbers the fastest first unless ``CUDA_DEVICE_ORDER`` says otherwise.
    PCI bus order is assumed there, as in gpu_affinity, and ``doubt`` says so.

    Raises:
        GPUAffinityError: CUDA_VISIBLE_DEVICES names no GPU of this host.
    """
    visible_limit = read_visible(environ, snapshot)
    if visible_limit is None:
        reachable = tuple(gpu for gpu in snapshot.physical if not gpu.lost)
        return ResolvedGpus(reachable, doubt=_doubt_of_order(snapshot, environ))
    found = _gpus_by_uuid(snapshot, visible_limit.uuids)
    if not found:
        has = f"this host, which has {len(snapshot.physical)}"
        raise GPUAffinityError(f"{visible_limit.name}={visible_limit.value} shows no GPU of {has}")
    doubt = visible_limit.doubt
    if not doubt and visible_limit.uses_indices:
        doubt = _doubt_of_order(snapshot, environ)
    return ResolvedGpus(found, f"all that {visible_limit.name}={visible_limit.value} shows", doubt)


def _doubt_of_order(snapshot: HostSnapshot, environ: Mapping[str, str]) -> str:
    """Return why CUDA may not number the GPUs in PCI bus order; "" if it does."""
    if VENDORS[snapshot.vendor].library != "CUDA" or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return ""
    if not are_mixed(gpu for gpu in snapshot.physical if not gpu.lost):
        return ""
    return "the GPUs of this host are of different models; set CUDA_DEVICE_ORDER=PCI_BUS_ID"


def _gpus_by_uuid(snapshot: HostSnapshot, uuids: Iterable[str]) -> tuple[Gpu, ...]:
    gpus = [snapshot.by_uuid(uuid) for uuid in uuids]
    return tuple(gpu for gpu in gpus if gpu is not None)


def remember(gpus: Iterable[Gpu]) -> None:
    """Write GPUs to this process's environment, from which :func:`remembered` reads them here and in children."""
    os.environ[BOUND] = ",".join(gpu.uuid for gpu in gpus)


def remembered(snapshot: HostSnapshot, environ: Mapping[str, str]) -> ResolvedGpus | None:
    """Return the GPUs next to which a process with this environment was bound by number.

    None if it was not, and if CUDA does not show all of them: then the variable is older than CUDA_VISIBLE_DEVICES.
    """
    value = environ.get(BOUND)
    if not value:
        return None
    uuids = value.split(",")
    gpus = _gpus_by_uuid(snapshot, uuids)
    if len(gpus) < len(uuids):
        return None
    try:
        shown = visible(snapshot, environ).gpus
    except GPUAffinityError:
        return None
    shown_uuids = {gpu.uuid for gpu in shown}
    parents_of_shown = {gpu.mig_parent for gpu in shown}  # an instance shows its GPU
    for gpu in gpus:
        is_shown = gpu.uuid in shown_uuids or gpu.uuid in parents_of_shown
        if not is_shown and gpu.mig_parent not in shown_uuids:  # a GPU shows its instances
            return None
    return ResolvedGpus(gpus, f"as in the binding before this one ({BOUND})")


def _with_variables(snapshot: HostSnapshot, environ: Mapping[str, str]) -> str:
    given = [f"{name}={environ[name]}" for name in visible_variables(snapshot) if name in environ]
    if not given:
        return ""
    return f" with {' '.join(given)}"
