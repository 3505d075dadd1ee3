"""ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES: what they mean, and how they are written. Pure.

Two libraries read them, one on top of the other (``amd_filter_device.cpp`` of ROCR, ``rocdevice.cpp`` of HIP):

* ROCR reads ROCR_VISIBLE_DEVICES: a list of indices, in the order of the kernel's GPU nodes, and of UUIDs
  (``GPU-<16 hex digits>``, in any case; a prefix that matches one GPU will do). Numbers are read as by C's strtol with
  base 0, and nothing may follow them. The list ends at the first entry that names no GPU, or names one again. A list
  that is set and empty selects no GPU.
* HIP reads HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES if that is unset or empty. Its indices count what ROCR has
  left. They are plain decimal numbers without blanks or leading zeros. Newer versions take UUIDs too. The list ends
  at the first entry that names no GPU. A second mention of a GPU has no effect. An empty value is as good as none.

OpenCL programs read GPU_DEVICE_ORDINAL instead of the latter two. HIP does not.

Two programs need exceptions:

* Slurm writes one list of indices into ROCR_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES and GPU_DEVICE_ORDINAL, unless
  gres.conf has ``Flags=amd_gpu_env`` or AutoDetect=rsmi (gres.conf(5)). HIP would count the list twice, so that the
  second of two jobs sees no GPU. For a claim, which writes all of them anew, the list counts once.
* Ray 2.45 and later cannot be imported where ROCR_VISIBLE_DEVICES is set; 2.46 to some later ones only where
  HIP_VISIBLE_DEVICES is not. Some refuse a CUDA_VISIBLE_DEVICES that differs from HIP_VISIBLE_DEVICES
  (``amd_gpu.py`` of Ray). So in processes that Ray starts only HIP_VISIBLE_DEVICES is written.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from ..gpus.devices import Gpu, HostSnapshot, VisibleLimit
from .cuda_variables import BLANKS, CUDA

ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
OPENCL = "GPU_DEVICE_ORDINAL"

# Ray sets it for its workers, and their child processes inherit it.
_RAY = "RAY_RAYLET_PID"

_STRTOL = r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)"

_SHORTEST_PREFIX = len("GPU-0")
_LONGEST = len("GPU-0123456789abcdef")


def read_rocm(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs that these variables leave to a program that uses HIP, in its order; None if none of them is
    set."""
    of_hip = _variable_of_hip(environ)
    left = list(snapshot.physical)
    if ROCR in environ:
        name = ROCR
        value = environ[ROCR]
        by_index = "GPU-" not in value.upper()
        left = _by_rocr(value, left)
        if of_hip is not None:
            value += f" {of_hip}={environ[of_hip]}"
    elif of_hip is not None:
        name = of_hip
        value = environ[of_hip]
        by_index = "GPU-" not in value
    else:
        return None
    if of_hip is not None:
        left = _by_hip(environ[of_hip], left)
    return VisibleLimit(value, tuple(gpu.uuid for gpu in left), uses_indices=by_index, name=name, library="HIP")


def _variable_of_hip(environ: Mapping[str, str]) -> str | None:
    """Return the variable that HIP reads; None if neither is set, or both are empty."""
    for name in (HIP, CUDA):
        if environ.get(name):
            return name
    return None


def _by_rocr(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in value.removesuffix(",").split(",")[: len(gpus)]:  # as C++'s getline
        found = _by_entry_of_rocr(entry.upper().strip(BLANKS), gpus)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen


def _by_entry_of_rocr(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.startswith("G"):
        if not _SHORTEST_PREFIX <= len(entry) <= _LONGEST:
            return None
        matches = [gpu for gpu in gpus if gpu.uuid.upper().startswith(entry)]
        if len(matches) != 1:
            return None
        return matches[0]
    number = re.fullmatch(_STRTOL, entry)
    if number is None:
        return None
    sign, digits = number.groups()
    index = _as_strtol(digits.lower())
    is_negative = sign == "-" and index > 0
    if is_negative or index >= len(gpus):
        return None
    return gpus[index]


def _as_strtol(digits: str) -> int:
    """Return a number as C's strtol reads it with base 0."""
    if digits.startswith("0x"):
        return int(digits, 16)
    if digits.startswith("0"):
        return int(digits, 8)
    return int(digits)


def _by_hip(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in value.split(","):
        found = _by_entry_of_hip(entry, gpus)
        if found is None:
            break
        if found not in chosen:
            chosen.append(found)
    return chosen


def _by_entry_of_hip(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if "GPU-" in entry:
        for gpu in gpus:
            if entry in gpu.uuid:
                return gpu
        return None
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", entry) or int(entry) >= len(gpus):
        return None
    return gpus[int(entry)]


def render_rocm(
    gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that make exactly these GPUs visible, in this order, to a process with this environment.

    ROCR gets UUIDs whatever ``visible_as`` says, and the index of a GPU that has no UUID. HIP then sees nothing else,
    and its own variables count from 0: an inherited one would count GPUs that are no longer there. OpenCL's variable
    is written if it is set.

    Under Ray an inherited ROCR_VISIBLE_DEVICES stays as it is, and HIP's variable counts what it leaves.
    """
    written = {}
    if _RAY in environ:
        left = list(snapshot.physical)
        if ROCR in environ:
            left = _by_rocr(environ[ROCR], left)
        places = {gpu.uuid: place for place, gpu in enumerate(left)}
        numbers = ",".join(str(places[gpu.uuid]) for gpu in gpus)
        written[HIP] = numbers
        if visible_as == "uuid":
            written[HIP] = _uuids_or_numbers(gpus, places)
        if CUDA in environ:
            written[CUDA] = written[HIP]
    else:
        numbers = ",".join(str(number) for number in range(len(gpus)))
        written[ROCR] = _uuids_or_numbers(gpus, {gpu.uuid: gpu.index for gpu in gpus})
        written[HIP] = numbers
        written[CUDA] = numbers
    if OPENCL in environ:
        written[OPENCL] = numbers
    return written


def _uuids_or_numbers(gpus: Iterable[Gpu], numbers: Mapping[str, int]) -> str:
    """Return a list of UUIDs, with the number of each GPU that has none.

    Args:
        numbers: by UUID, or by what else names a GPU.
    """
    names = []
    for gpu in gpus:
        if gpu.uuid.startswith("GPU-"):
            names.append(gpu.uuid)
        else:
            names.append(str(numbers[gpu.uuid]))
    return ",".join(names)
