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
        return f"{gpus}, {self.how}" if self.how else gpus

    @property
    def notes(self) -> tuple[str, ...]:
        """The doubt as a sentence for a report."""
        return (f"it is not certain which GPU is meant: {self.doubt}",) if self.doubt else ()


def named(names: Names | None, ordinal: int | None, snapshot: HostSnapshot, environ: Mapping[str, str]) -> ResolvedGpus:
    """Return the GPUs that are named in one of the two ways.

    Raises:
        GPUAffinityError: both are given; as for :func:`by_name` and :func:`by_ordinal`.
    """
    if names is not None and ordinal is not None:
        raise GPUAffinityError("name the GPU once: gpus= as nvidia-smi shows it, or ordinal= as CUDA numbers it")
    if ordinal is not None:
        return by_ordinal(ordinal, snapshot, environ)
    return by_name(() if names is None else names, snapshot)


def by_name(names: Names, snapshot: HostSnapshot) -> ResolvedGpus:
    """Return GPUs by index as nvidia-smi shows it, range, or UUID (or its first characters).

    Raises:
        GPUAffinityError: this host has no such GPU. UnsatisfiableRequestError: a name has none of these forms.
    """
    wanted = parse_names(names, "gpus")
    found = [gpu for gpu in snapshot.gpus if any(names_device(name, gpu) for name in wanted)]
    missing = [name for name in wanted if not any(names_device(name, gpu) for gpu in found)]
    if missing or not found:
        has = f"GPU {gpu_ranges(gpu.label for gpu in snapshot.gpus)}" if snapshot.gpus else "none"
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
    shown, given = visible(snapshot, environ), _with_variables(snapshot, environ)
    if ordinal >= len(shown.gpus):
        number = f"{len(shown.gpus)} {'is' if len(shown.gpus) == 1 else 'are'} visible"
        raise GPUAffinityError(f"{library} shows no GPU {ordinal}: {number}{given}")
    how = f"{library} ordinal {ordinal}{also}{given}"
    return ResolvedGpus((shown.gpus[ordinal],), how, shown.doubt)


def visible(snapshot: HostSnapshot, environ: Mapping[str, str]) -> ResolvedGpus:
    """Return the GPUs that CUDA shows to a process with this environment, in CUDA's order. CUDA is not asked.

    On a host with GPUs of several models, CUDA numbers the fastest first unless ``CUDA_DEVICE_ORDER`` says otherwise.
    PCI bus order is assumed there, as in gpu_affinity, and ``doubt`` says so.

    Raises:
        GPUAffinityError: CUDA_VISIBLE_DEVICES names no GPU of this host.
    """
    has_order = VENDORS[snapshot.vendor].library == "CUDA"
    order = environ.get("CUDA_DEVICE_ORDER") if has_order else "PCI_BUS_ID"
    visible_limit = read_visible(environ, snapshot)
    doubt = visible_limit.doubt if visible_limit is not None else ""
    counted = visible_limit is None or visible_limit.uses_indices
    mixed = are_mixed(gpu for gpu in snapshot.physical if not gpu.lost)
    if counted and not doubt and mixed and order != "PCI_BUS_ID":
        doubt = "the GPUs of this host are of different models; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    if visible_limit is None:
        return ResolvedGpus(tuple(gpu for gpu in snapshot.physical if not gpu.lost), "", doubt)
    found = tuple(gpu for uuid in visible_limit.uuids if (gpu := snapshot.by_uuid(uuid)) is not None)
    if not found:
        has = f"this host, which has {len(snapshot.physical)}"
        raise GPUAffinityError(f"{visible_limit.name}={visible_limit.value} shows no GPU of {has}")
    return ResolvedGpus(found, f"all that {visible_limit.name}={visible_limit.value} shows", doubt)


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
    gpus = tuple(gpu for uuid in uuids if (gpu := snapshot.by_uuid(uuid)) is not None)
    try:
        shown = visible(snapshot, environ).gpus
    except GPUAffinityError:
        return None
    names = {uuid for gpu in shown for uuid in (gpu.uuid, gpu.mig_parent)}  # an instance shows its GPU
    parents = {gpu.uuid for gpu in shown}  # a GPU shows its instances
    if len(gpus) < len(uuids) or not all(gpu.uuid in names or gpu.mig_parent in parents for gpu in gpus):
        return None
    return ResolvedGpus(gpus, f"as in the binding before this one ({BOUND})")


def _with_variables(snapshot: HostSnapshot, environ: Mapping[str, str]) -> str:
    given = " ".join(f"{name}={environ[name]}" for name in visible_variables(snapshot) if name in environ)
    return f" with {given}" if given else ""
