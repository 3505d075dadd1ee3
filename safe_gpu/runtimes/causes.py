"""Why a placeholder fails: the likely cause, by the error and by what else is known, and whether that is the GPU
itself.

The codes are those of the CUDA driver API (cuda.h). HIP's names and texts are those of ``hip_error.cpp`` in ROCm's clr.
Older versions have the name as the text.
"""

import os
import re
import resource
from typing import NamedTuple

from ..errors import SafeGpuError
from ..gpus.devices import LAST_CHOICE, Gpu
from ..gpus.vendors import VENDORS
from ..host.procfs import memory_left_in_cgroup
from ..wording.text import format_bytes


class _Cause(NamedTuple):
    """What an error means that CUDA, HIP or a framework raises when a placeholder fails.

    Attributes:
        signs: a pattern in the text of the error.
        meaning: the likely cause, and the way out.
    """

    signs: str
    meaning: str


# The first whose signs are found counts.
_CAUSES: tuple[_Cause, ...] = (
    _Cause(
        r"forked subprocess",
        "this process was forked from one in which CUDA was initialised: start it with the 'spawn' method",
    ),
    _Cause(
        r"CUDA_ERROR_NOT_INITIALIZED|initialization error|InitializationError|driver initialization failed",
        "the NVIDIA driver cannot start CUDA: see dmesg, and load its module nvidia_uvm (nvidia-modprobe -u as root)",
    ),
    _Cause(
        r"DEVICE_UNAVAILABLE|DevicesUnavailable|busy or unavailable",
        "another process holds the GPU in compute mode EXCLUSIVE_PROCESS, its mode is PROHIBITED, or it must "
        "be reset: see nvidia-smi, safe-gpu status and dmesg",
    ),
    _Cause(
        r"cuInit failed.*([Oo]ut of memory|OUT_OF_MEMORY)",
        "CUDA gets too little memory of the host to start: raise the limit of this process's address space "
        "(ulimit -v) or the memory of the job or container",
    ),
    _Cause(
        r"[Oo]ut of memory|OUT_OF_MEMORY|MemoryAllocation|RESOURCE_EXHAUSTED",
        "another process uses most of the GPU's memory, or a limit on this process's address space is too "
        "low: see safe-gpu status and ulimit -v",
    ),
    _Cause(
        r"not compiled with CUDA|Unknown backend",
        "this build of the framework is for CPUs only: install the one for CUDA (for ROCm on AMD GPUs), or "
        "leave placeholder_fn out",
    ),
    _Cause(
        r"sees 0 GPUs|on the CPU",
        "this build of the framework may be for CPUs only, or CUDA (HIP on AMD GPUs) was initialised before "
        "the claim: install the build for it and claim first",
    ),
    _Cause(
        r"NO_DEVICE|no CUDA-capable device|NoDevice|INVALID_DEVICE|InvalidDevice|[Ii]nvalid device|"
        r"No CUDA GPUs|sees \d+ GPU",
        "CUDA was initialised in this process before the claim, which fixes what it sees (claim first), or "
        "CUDA_VISIBLE_DEVICES hides the GPU, or this process may not open /dev/nvidia* (a container needs "
        "--gpus)",
    ),
    _Cause(
        r"STUB_LIBRARY|StubLibrary|is a stub library",
        "the libcuda.so.1 that was loaded is the CUDA toolkit's stub, which is only for linking: take the "
        "directory lib64/stubs out of LD_LIBRARY_PATH, and install the NVIDIA driver if this host has none",
    ),
    _Cause(
        r"SYSTEM_NOT_READY|SystemNotReady|system not yet initialized",
        "the GPUs of this host wait for the NVIDIA Fabric Manager (start nvidia-fabricmanager, of the same "
        "version as the driver) or, with confidential computing, for their ready state (nvidia-smi "
        "conf-compute -srs 1 as root)",
    ),
    _Cause(
        r"SYSTEM_DRIVER_MISMATCH|SystemDriverMismatch|unsupported display driver / cuda driver combination",
        "libcuda.so.1 and the kernel module are of different versions: after an update of the driver reboot "
        "the host or reload its modules; in a container remove the CUDA compat package "
        "(/usr/local/cuda/compat) from LD_LIBRARY_PATH",
    ),
    _Cause(
        r"COMPAT_NOT_SUPPORTED|CompatNotSupported|forward compatibility was attempted",
        "libcuda.so.1 is newer than the kernel module, which works on data center GPUs only: remove the CUDA "
        "compat package (/usr/local/cuda/compat) from LD_LIBRARY_PATH, update the driver, or reboot the host "
        "if that was done",
    ),
    _Cause(
        r"INSUFFICIENT_DRIVER|InsufficientDriver|driver version is insufficient|"
        r"NVIDIA driver on your system is too old|Found no NVIDIA driver",
        "the versions of the NVIDIA driver and the CUDA libraries do not match, or this process sees no "
        "driver (a container needs --gpus): see safe-gpu doctor",
    ),
    _Cause(
        r"ERROR_UNKNOWN|OPERATING_SYSTEM|unknown error",
        "the driver is in a bad state, its nvidia-uvm module is not loaded (nvidia-modprobe -u), or a "
        "container has lost /dev/nvidia* (start it again): see dmesg",
    ),
    _Cause(r"ERROR_MPS_|ErrorMps", "the MPS server of this GPU refused or failed: see the log of its control daemon"),
    _Cause(
        r"ECC_UNCORRECTABLE|ECCUncorrectable|[Uu]ncorrectable|NVLINK_UNCORRECTABLE|HARDWARE_STACK|"
        r"ERROR_CONTAINED",
        "the GPU reports a hardware fault: see nvidia-smi -q and dmesg, and exclude it",
    ),
)

# An error with one of these words comes from HIP, ROCR or a build of a framework for ROCm.
_OF_HIP = r"\bhip[A-Z]|\bHIP\b|\bHSA_STATUS|ROCm|rocBLAS|/dev/kfd|\bGPU node-\d"

_HIP_CAUSES = (
    _Cause(
        r"hipErrorOutOfMemory|[Oo]ut of memory|hipErrorRuntimeMemory",
        "another process uses most of the GPU's memory, or a limit on this process's address space is too "
        "low: see safe-gpu status and ulimit -v",
    ),
    _Cause(
        r"hipErrorNoDevice|no ROCm-capable device|No HIP GPUs|hipErrorInvalidDevice\b|"
        r"invalid device ordinal|No devices found|/dev/kfd|/dev/dri|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        "HIP was probably initialised in this process before the claim, which fixes what it sees (claim "
        "first), or the user may not open /dev/kfd and /dev/dri/renderD*: join the groups that own them, "
        "render and video; a container needs --device=/dev/kfd --device=/dev/dri and these groups by number "
        "(--group-add)",
    ),
    _Cause(
        r"hipErrorNoBinaryForGpu|no kernel image is available|find code object|find binary for current|"
        r"hipErrorInvalidDeviceFunction|invalid device function|hipErrorInvalidImage|"
        r"kernel image is invalid|TensileLibrary",
        "this build has no code for the architecture of the GPU: install one that has (rocminfo shows the "
        "gfx number), and unset HSA_OVERRIDE_GFX_VERSION where it names another architecture",
    ),
)

# A GPU that answers so will answer the next claim so too, whatever process asks.
_BUSY = r"DEVICE_UNAVAILABLE|DevicesUnavailable|busy or unavailable"
_BROKEN = (
    r"ECC_UNCORRECTABLE|ECCUncorrectable|NVLINK_UNCORRECTABLE|NvlinkUncorrectable|uncorrectable (ECC|NVLink)|"
    r"HARDWARE_STACK|HardwareStack|hardware stack error|CUDA_ERROR_CONTAINED|cudaErrorContained|"
    r"GPU is lost|GPU_IS_LOST|fallen off the bus|hipErrorECCNotCorrectable|HW Exception by GPU node"
)
_SHORT_OF_MEMORY = (
    r"[Oo]ut of memory|OUT_OF_MEMORY|MemoryAllocation|RESOURCE_EXHAUSTED|hipErrorOutOfMemory|hipErrorRuntimeMemory"
)

# Results of CUDA and HIP, which have the same numbers, that speak of the process, its libraries, its variables or the
# whole host: a function that is missing, an argument, a library that is not initialised, was shut down, is a stub or
# does not match the driver; a GPU that another process has; a number that no GPU has; code for another GPU; a call that
# is not allowed; a host that is not ready; MPS.
_OF_THE_PROCESS = frozenset({0, 1, 3, 4, 34, 35, 46, 98, 101, 200, 201, 209, 800, 801, *range(802, 810)})

_NO_DEVICE = 100

_NO_DEVICE_FILE = (_NO_DEVICE, 304, 999)  # what CUDA answers where it cannot open one

# Bytes. A context of CUDA or HIP takes less of a GPU, and of the host.
_CONTEXT = 1 << 30

_LIMITS_OF_GPU_MEMORY = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT")  # of MPS, and of HAMi

UNEXPLAINED = 3600.0
"""Seconds for which a GPU is taken last after a failure that nothing but the GPU explains."""


class Circumstances(NamedTuple):
    """What is known of the failure of a placeholder, besides its error.

    Attributes:
        gpu: as the driver shows it after the failure.
        others: the processes of others on it, for people; "" if none is listed.
        own_context: whether the placeholder makes a context of safe_gpu's own, with no framework.
        was_initialized: whether CUDA was initialised in this process before the claim.
    """

    gpu: Gpu
    others: str = ""
    own_context: bool = False
    was_initialized: bool = False


def root_of(err: BaseException) -> BaseException:
    """Return the innermost cause of an error."""
    while err.__cause__ is not None:
        err = err.__cause__
    return err


def blames_gpu(err: BaseException, *, rivals: bool = False) -> bool:
    """Return whether an error of a placeholder says that the GPU itself is bad or is kept by a process that is not
    shown.

    Args:
        err: the error of the placeholder, whose innermost cause counts.
        rivals: whether the driver shows other processes on the GPU. Then it is no wonder that the GPU is unavailable.
    """
    text = _text_of(root_of(err))
    if re.search(_BROKEN, text):
        return True
    return not rivals and re.search(_BUSY, text) is not None


def is_explained(err: BaseException, where: Circumstances) -> bool:
    """Return whether this process or the host explains the failure of a context, so that the GPU need not be ill: a
    limit, a library, a device file, a GPU that others use, or what the program has done with CUDA before the claim."""
    cause = root_of(err)
    code = getattr(cause, "code", None)
    if where.was_initialized or code in _OF_THE_PROCESS or not isinstance(cause, SafeGpuError):
        return True  # else the library has spoken
    if code == _NO_DEVICE and getattr(cause, "call", "").startswith("hip"):
        return True  # so it is for a user who may not open the device files
    if re.search(_SHORT_OF_MEMORY, _text_of(cause)):
        return why_short_of_memory(where.gpu) != ""
    return _may_lack_device_file(cause) and why_no_device_file() != ""


def seconds_last(err: BaseException, where: Circumstances) -> float:
    """Return for how many seconds claims are to take the GPU last on which a placeholder failed; 0 if it is not to
    blame."""
    if blames_gpu(err, rivals=where.others != ""):
        return LAST_CHOICE
    if where.own_context and not is_explained(err, where):
        return UNEXPLAINED
    return 0.0


def why_short_of_memory(gpu: Gpu) -> str:
    """Return why a context on a GPU may get too little memory, a clause with the way out; "" if nothing explains
    that."""
    if gpu.memory_free is not None and gpu.memory_free < _CONTEXT:
        return f"{_free_of(gpu)}: see safe-gpu status"
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        size = format_bytes(address_space)
        return f"the address space of this process is limited to {size}: raise it (ulimit -v, h_vmem of Grid Engine)"
    left = memory_left_in_cgroup()
    if left is not None and left < _CONTEXT:
        return f"the job or container has {format_bytes(left)} of its memory left: ask for more"
    for name, value in os.environ.items():
        if name.startswith(_LIMITS_OF_GPU_MEMORY) and not _is_of_share(value):
            return f"{name}={value} limits what this process gets of the GPU's memory"
    return ""


def _is_of_share(limit: str) -> bool:
    """Return whether a limit is that of this claim's share, which has room for a context."""
    share = os.environ.get("SAFE_GPU_SHARE", "")
    if not share.isdecimal():
        return False
    of_mps = f"={int(share) >> 20}M"
    return limit == share or all(part.endswith(of_mps) for part in limit.split(","))


def why_no_device_file() -> str:
    """Return which device file CUDA may lack here, a clause with the way out; "" if it lacks none."""
    devices = os.path.join(os.environ.get("SAFE_GPU_FSROOT") or "/", "dev")
    has_files = os.path.exists(f"{devices}/nvidiactl")  # WSL2 and Jetson have others
    if has_files and not os.access(f"{devices}/nvidia-uvm", os.R_OK | os.W_OK):
        return (
            "this process cannot open /dev/nvidia-uvm: load that module (nvidia-modprobe -u as root), or pass the file "
            "into the container"
        )
    return ""


def likely_cause(err: BaseException, where: Circumstances | None = None) -> str:
    """Return the likely cause of a failed placeholder, to append to a sentence: "; ...", or "" if none is known.

    Args:
        where: what is known besides the error; without it the cause is guessed by the text of the error.
    """
    if where is not None:
        known = _cause_by_facts(err, where)
        if known:
            return f"; {known}"
    text = _text_of(err)
    causes = _CAUSES
    if re.search(_OF_HIP, text):
        causes = _HIP_CAUSES
    for cause in causes:
        if re.search(cause.signs, text):
            return f"; {cause.meaning}"
    return ""


def _cause_by_facts(err: BaseException, where: Circumstances) -> str:
    """Return the cause of an error as far as facts tell it; "" if they do not."""
    if _may_lack_device_file(err):
        return why_no_device_file()
    if not re.search(_SHORT_OF_MEMORY, _text_of(err)):
        return ""
    reason = why_short_of_memory(where.gpu)
    if reason or where.gpu.memory_free is None:
        return reason
    if not where.own_context:
        return f"{_free_of(where.gpu)}: the program asked for more than that, or the GPU has failed"
    way_out = VENDORS[where.gpu.vendor].recover
    return f"{_free_of(where.gpu)}, and nothing limits this process, so the GPU has probably failed: {way_out}"


def _may_lack_device_file(err: BaseException) -> bool:
    return getattr(err, "code", None) in _NO_DEVICE_FILE and getattr(err, "call", "").startswith("cu")


def _free_of(gpu: Gpu) -> str:
    free = format_bytes(gpu.memory_free or 0)
    if gpu.memory_total is not None:
        free += f" of {format_bytes(gpu.memory_total)}"
    return f"{free} of the GPU's memory are free"


def _text_of(err: BaseException) -> str:
    return f"{type(err).__name__}: {err}"
