"""Why a placeholder fails: the likely cause, from the text of the error, and whether the GPU itself is to blame.

HIP's names and texts are those of ``hip_error.cpp`` in ROCm's clr. Older versions have the name as the text.
"""

import re

# What the errors mean that CUDA, HIP and the frameworks raise when a placeholder fails: a pattern in the text of the
# error, over one line or more, and indented the likely cause. The first match counts.
_CAUSES = r"""
forked subprocess
    this process was forked from one in which CUDA was initialised: start it with the 'spawn' method
CUDA_ERROR_NOT_INITIALIZED|initialization error|InitializationError|driver initialization failed
    the NVIDIA driver cannot start CUDA: see dmesg, and load its module nvidia_uvm (nvidia-modprobe -u as root)
DEVICE_UNAVAILABLE|DevicesUnavailable|busy or unavailable
    another process holds the GPU in compute mode EXCLUSIVE_PROCESS, its mode is PROHIBITED, or it must be reset: see
    nvidia-smi, safe-gpu status and dmesg
cuInit failed.*([Oo]ut of memory|OUT_OF_MEMORY)
    CUDA gets too little memory of the host to start: raise the limit of this process's address space (ulimit -v) or
    the memory of the job or container
[Oo]ut of memory|OUT_OF_MEMORY|MemoryAllocation|RESOURCE_EXHAUSTED
    another process uses most of the GPU's memory, or a limit on this process's address space is too low: see
    safe-gpu status and ulimit -v
not compiled with CUDA|Unknown backend
    this build of the framework is for CPUs only: install the one for CUDA (for ROCm on AMD GPUs), or leave
    placeholder_fn out
sees 0 GPUs|on the CPU
    this build of the framework may be for CPUs only, or CUDA (HIP on AMD GPUs) was initialised before the claim:
    install the build for it and claim first
NO_DEVICE|no CUDA-capable device|NoDevice|INVALID_DEVICE|InvalidDevice|[Ii]nvalid device|No CUDA GPUs|sees \d+ GPU
    CUDA was initialised in this process before the claim, which fixes what it sees (claim first), or
    CUDA_VISIBLE_DEVICES hides the GPU, or this process may not open /dev/nvidia* (a container needs --gpus)
STUB_LIBRARY|StubLibrary|is a stub library
    the libcuda.so.1 that was loaded is the CUDA toolkit's stub, which is only for linking: take the directory
    lib64/stubs out of LD_LIBRARY_PATH, and install the NVIDIA driver if this host has none
SYSTEM_NOT_READY|SystemNotReady|system not yet initialized
    the GPUs of this host wait for the NVIDIA Fabric Manager (start nvidia-fabricmanager, of the same version as the
    driver) or, with confidential computing, for their ready state (nvidia-smi conf-compute -srs 1 as root)
SYSTEM_DRIVER_MISMATCH|SystemDriverMismatch|unsupported display driver / cuda driver combination
    libcuda.so.1 and the kernel module are of different versions: after an update of the driver reboot the host or
    reload its modules; in a container remove the CUDA compat package (/usr/local/cuda/compat) from LD_LIBRARY_PATH
COMPAT_NOT_SUPPORTED|CompatNotSupported|forward compatibility was attempted
    libcuda.so.1 is newer than the kernel module, which works on data center GPUs only: remove the CUDA compat package
    (/usr/local/cuda/compat) from LD_LIBRARY_PATH, update the driver, or reboot the host if that was done
INSUFFICIENT_DRIVER|InsufficientDriver|driver version is insufficient|NVIDIA driver on your system is too old|
Found no NVIDIA driver
    the versions of the NVIDIA driver and the CUDA libraries do not match, or this process sees no driver (a container
    needs --gpus): see safe-gpu doctor
ERROR_UNKNOWN|OPERATING_SYSTEM|unknown error
    the driver is in a bad state, its nvidia-uvm module is not loaded (nvidia-modprobe -u), or a container has lost
    /dev/nvidia* (start it again): see dmesg
ERROR_MPS_|ErrorMps
    the MPS server of this GPU refused or failed: see the log of its control daemon
ECC_UNCORRECTABLE|ECCUncorrectable|[Uu]ncorrectable|NVLINK_UNCORRECTABLE|HARDWARE_STACK|ERROR_CONTAINED
    the GPU reports a hardware fault: see nvidia-smi -q and dmesg, and exclude it
"""

# An error with one of these words comes from HIP, ROCR or a build of a framework for ROCm.
_OF_HIP = r"\bhip[A-Z]|\bHIP\b|\bHSA_STATUS|ROCm|rocBLAS|/dev/kfd|\bGPU node-\d"

_HIP_CAUSES = r"""
hipErrorOutOfMemory|[Oo]ut of memory|hipErrorRuntimeMemory
    another process uses most of the GPU's memory, or a limit on this process's address space is too low: see
    safe-gpu status and ulimit -v
hipErrorNoDevice|no ROCm-capable device|No HIP GPUs|hipErrorInvalidDevice\b|invalid device ordinal|No devices found|
/dev/kfd|/dev/dri|HSA_STATUS_ERROR_OUT_OF_RESOURCES
    HIP was probably initialised in this process before the claim, which fixes what it sees (claim first), or the
    user may not open /dev/kfd and /dev/dri/renderD*: join the groups that own them, render and video; a container
    needs --device=/dev/kfd --device=/dev/dri and these groups by number (--group-add)
hipErrorNoBinaryForGpu|no kernel image is available|find code object|find binary for current|
hipErrorInvalidDeviceFunction|invalid device function|hipErrorInvalidImage|kernel image is invalid|TensileLibrary
    this build has no code for the architecture of the GPU: install one that has (rocminfo shows the gfx number),
    and unset HSA_OVERRIDE_GFX_VERSION where it names another architecture
"""

# A GPU that answers so will answer the next claim so too. Memory that is short, a framework built for CPUs, CUDA that
# was initialised too early and a driver that is not ready are not the fault of one GPU.
_BUSY = r"DEVICE_UNAVAILABLE|DevicesUnavailable|busy or unavailable"
_BROKEN = (
    r"ECC_UNCORRECTABLE|ECCUncorrectable|NVLINK_UNCORRECTABLE|NvlinkUncorrectable|uncorrectable (ECC|NVLink)|"
    r"HARDWARE_STACK|HardwareStack|hardware stack error|CUDA_ERROR_CONTAINED|cudaErrorContained|"
    r"GPU is lost|GPU_IS_LOST|fallen off the bus|hipErrorECCNotCorrectable|HW Exception by GPU node"
)


def blames_gpu(err: BaseException, *, rivals: bool = False) -> bool:
    """Return whether an error of a placeholder says that the GPU itself is bad or is kept by a process that is not
    shown.

    Args:
        err: the error of the placeholder, whose innermost cause counts.
        rivals: whether the driver shows other processes on the GPU. Then it is no wonder that the GPU is unavailable.
    """
    while err.__cause__ is not None:
        err = err.__cause__
    text = f"{type(err).__name__}: {err}"
    return bool(re.search(_BROKEN, text) or (not rivals and re.search(_BUSY, text)))


def likely_cause(err: BaseException) -> str:
    """Return the likely cause of a failed placeholder, to append to a sentence: "; ...", or "" if none is known."""
    text = f"{type(err).__name__}: {err}"
    causes = _HIP_CAUSES if re.search(_OF_HIP, text) else _CAUSES
    for signs, meaning in re.findall(r"^((?:\S.*\n)+)((?: +.*\n)+)", causes, re.MULTILINE):
        if re.search(signs.replace("\n", ""), text):
            return f"; {' '.join(meaning.split())}"
    return ""
