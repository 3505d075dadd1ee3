"""What the errors of CUDA and of the frameworks mean for a claim."""

from __future__ import annotations

import re

__all__ = ["explain"]

# Signs in their messages, and the meaning. The first that matches counts.
_CAUSES = (
    (
        r"CUDA_ERROR_NOT_INITIALIZED|forked subprocess|initialization error|InitializationError",
        "this process was probably forked from one in which CUDA was awake: start it with the 'spawn' method",
    ),
    (
        r"DEVICE_UNAVAILABLE|DevicesUnavailable|busy or unavailable",
        "another process holds the GPU in compute mode EXCLUSIVE_PROCESS, or its mode is PROHIBITED: "
        "see nvidia-smi and safe-gpu status",
    ),
    (
        r"[Oo]ut of memory|OUT_OF_MEMORY|MemoryAllocation|RESOURCE_EXHAUSTED",
        "another process fills the memory of the GPU, or this one may not use enough address space: "
        "see nvidia-smi and ulimit -v",
    ),
    (
        r"not compiled with CUDA|Unknown backend",
        "this build of the framework is for CPUs only: install the CUDA build, or leave placeholder_fn out",
    ),
    (
        r"sees 0 GPUs|on the CPU",
        "this build of the framework may be for CPUs only, or CUDA was initialised before the claim: install the CUDA "
        "build and claim first",
    ),
    (
        r"NO_DEVICE|no CUDA-capable device|NoDevice|INVALID_DEVICE|InvalidDevice|[Ii]nvalid device|No CUDA GPUs|"
        r"sees \d+ GPU",
        "CUDA was probably initialised in this process before the claim, which fixes what it sees: claim first",
    ),
    (
        r"INSUFFICIENT_DRIVER|InsufficientDriver|driver version is insufficient|SYSTEM_DRIVER_MISMATCH|STUB_LIBRARY|"
        r"COMPAT_NOT_SUPPORTED|NVIDIA driver on your system is too old|Found no NVIDIA driver",
        "the NVIDIA driver and the CUDA libraries do not fit together: see safe-gpu doctor",
    ),
    (
        r"SYSTEM_NOT_READY|system not yet initialized",
        "the GPUs of this host wait for the NVIDIA Fabric Manager: start nvidia-fabricmanager",
    ),
    (
        r"ERROR_UNKNOWN|OPERATING_SYSTEM|unknown error",
        "the driver is in a bad state, or its nvidia-uvm module is not loaded (nvidia-modprobe -u): see dmesg",
    ),
    (r"ERROR_MPS_|ErrorMps", "the MPS server of this GPU is in the way: see the log of its control daemon"),
    (
        r"ECC_UNCORRECTABLE|ECCUncorrectable|uncorrectable ECC|HARDWARE_STACK|ERROR_CONTAINED",
        "the GPU reports a hardware fault: see nvidia-smi -q and dmesg, and exclude it",
    ),
)


def explain(err: BaseException) -> str:
    """The likely cause of a failed placeholder as the end of a sentence, "; ...", or "" where nothing is known."""
    text = f"{type(err).__name__}: {err}"
    return next((f"; {meaning}" for signs, meaning in _CAUSES if re.search(signs, text)), "")
