"""What ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES mean on AMD GPUs, and how to write them.

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

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import UnsatisfiableRequestError
from .visible_devices import VisibleLimit

if TYPE_CHECKING:
    from ..devices import Gpu, HostSnapshot


ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
OPENCL = "GPU_DEVICE_ORDINAL"
# Ray sets it for its workers, and their child processes inherit it.
_RAY = "RAY_RAYLET_PID"

_BLANKS = " \t\n\v\f\r"
_STRTOL = r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)"
_SHORTEST_PREFIX, _LONGEST = len("GPU-0"), len("GPU-0123456789abcdef")


def read(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """The GPUs that these variables leave to a program that uses HIP, in its order; None if none of them is set."""
    left = list(snapshot.physical)
    shown = []
    by_index = False
    rocr = environ.get(ROCR)
    if rocr is not None:
        left, by_index = _by_rocr(rocr, left), "GPU-" not in rocr.upper()
        shown.append((ROCR, rocr))
    above = next((name for name in (HIP, CUDA) if environ.get(name)), None)
    if above is not None:
        left = _by_hip(environ[above], left)
        by_index = by_index or (rocr is None and "GPU-" not in environ[above])
        shown.append((above, environ[above]))
    if not shown:
        return None
    name, value = shown[0]
    value = " ".join([value, *(f"{further}={text}" for further, text in shown[1:])])
    return VisibleLimit(value, tuple(gpu.uuid for gpu in left), uses_indices=by_index, name=name, library="HIP")


def once(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without Slurm's second copy of its list, which HIP would take for numbers within the list."""
    copied = CUDA in environ and environ.get(CUDA) == environ.get(ROCR) and not environ.get(HIP)
    if not copied or "SLURM_JOB_ID" not in environ or "GPU-" in environ[CUDA]:
        return environ
    return {name: value for name, value in environ.items() if name != CUDA}


def _by_rocr(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    if not value:
        return chosen
    entries = value.split(",")
    if not entries[-1]:
        entries.pop()  # as C++'s getline
    for entry in entries[: len(gpus)]:
        found = _by_entry(entry.upper().strip(_BLANKS), gpus)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen


def _by_entry(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.startswith("G"):
        if not _SHORTEST_PREFIX <= len(entry) <= _LONGEST:
            return None
        matches = [gpu for gpu in gpus if gpu.uuid.upper().startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.fullmatch(_STRTOL, entry)
    if number is None:
        return None
    digits = number[2].lower()
    index = int(digits, 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10)
    return gpus[index] if index < len(gpus) and (number[1] != "-" or index == 0) else None


def _by_hip(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in value.split(","):
        if "GPU-" in entry:
            found = next((gpu for gpu in gpus if entry in gpu.uuid), None)
        else:
            plain = re.fullmatch(r"0|[1-9][0-9]{0,8}", entry)
            found = gpus[int(entry)] if plain and int(entry) < len(gpus) else None
        if found is None:
            break
        if found not in chosen:
            chosen.append(found)
    return chosen


def render(
    gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables that make exactly these GPUs visible, in this order, to a process with this environment.

    ROCR gets UUIDs whatever ``visible_as`` says, and the index of a GPU that has no UUID. HIP then sees nothing else,
    and its own variables count from 0: an inherited one would count GPUs that are no longer there. OpenCL's variable
    is written if it is set.

    Under Ray an inherited ROCR_VISIBLE_DEVICES stays as it is, and HIP's variable counts what it leaves.

    Raises:
        UnsatisfiableRequestError: ``visible_as`` is neither "index" nor "uuid".
    """
    if visible_as not in ("index", "uuid"):
        raise UnsatisfiableRequestError(
            f'visible_as={visible_as!r} is unknown: use "index" or "uuid"', value=visible_as
        )
    if _RAY in environ:
        return _render_for_hip(gpus, visible_as, snapshot, environ)
    numbers = ",".join(str(number) for number in range(len(gpus)))
    by_uuid = (gpu.uuid if gpu.uuid.startswith("GPU-") else str(gpu.index) for gpu in gpus)
    opencl = {OPENCL: numbers} if OPENCL in environ else {}
    return {ROCR: ",".join(by_uuid), HIP: numbers, CUDA: numbers, **opencl}


def _render_for_hip(
    gpus: Sequence[Gpu], visible_as: str, snapshot: HostSnapshot, environ: Mapping[str, str]
) -> dict[str, str]:
    left = list(snapshot.physical)
    if ROCR in environ:
        left = _by_rocr(environ[ROCR], left)
    places = {gpu.uuid: str(place) for place, gpu in enumerate(left)}
    numbers = ",".join(places[gpu.uuid] for gpu in gpus)
    names = (gpu.uuid if gpu.uuid.startswith("GPU-") else places[gpu.uuid] for gpu in gpus)
    chosen = ",".join(names) if visible_as == "uuid" else numbers
    inherited = {CUDA: chosen} if CUDA in environ else {}
    opencl = {OPENCL: numbers} if OPENCL in environ else {}
    return {HIP: chosen, **inherited, **opencl}
