"""Causes of errors, from messages that CUDA, HIP and the frameworks have printed."""

from __future__ import annotations

import pytest

from safe_gpu.errors import PlaceholderError
from safe_gpu.runtimes import placeholders as causes

# What people have reported, word for word but for addresses; the last ones are hip_error.cpp's own texts.
SPAWN, MEMORY, PERMISSION, CLAIM_FIRST = "'spawn'", "uses most of the GPU", "--device=/dev/kfd", "claim first"
BUILD, DRIVER, FAULT, DMESG = "HSA_OVERRIDE_GFX_VERSION", "amdgpu driver is older", "reports a fault", "bad state"
OF_HIP = [
    ("HIP error: hipErrorNoDevice", CLAIM_FIRST),
    ("No HIP GPUs are available", CLAIM_FIRST),
    ("No HIP GPUs are available", "render and video"),
    ("hipGetDeviceCount failed with hipErrorNoDevice (100)", CLAIM_FIRST),
    (
        "HIP initialization: Unexpected error from hipGetDeviceCount(). Did you run some cuda functions before calling "
        "NumHipDevices() that might have already set an error? Error 101: hipErrorInvalidDevice",
        "render and video",
    ),
    ("error: 'hipErrorInvalidDevice'(101) at square.cpp:61", "render and video"),
    ("rocBLAS error: Could not initialize Tensile host: No devices found", "render and video"),
    ("Unable to open /dev/kfd read-write: Permission denied", PERMISSION),
    (
        "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources. This error may "
        "also occur when the core runtime library needs to spawn threads or create internal OS-specific events.",
        PERMISSION,
    ),
    ("HIP error: invalid device function", BUILD),
    ("hipErrorNoBinaryForGpu: Unable to find code object for all current devices!", BUILD),
    (
        "hip_code_object.cpp:92: guarantee(false && \"hipErrorNoBinaryForGpu: Coudn't find binary for current devices!",
        BUILD,
    ),
    (
        "rocBLAS error: Cannot read /opt/rocm/lib/rocblas/library/TensileLibrary.dat: Illegal seek for GPU arch : "
        "gfx1201",
        BUILD,
    ),
    (
        "HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB of which 203.49 GiB "
        "is free. Of the allocated memory 68.63 GiB is allocated by PyTorch, and 14.93 GiB is reserved by PyTorch",
        MEMORY,
    ),
    ("HW Exception by GPU node-1 (Agent handle: 0x1b0fc990) reason :GPU Hang", FAULT),
    ("hipErrorOutOfMemory (2): out of memory", MEMORY),
    ("hipErrorNotInitialized (3): initialization error", SPAWN),
    ("HIP error: no ROCm-capable device is detected", CLAIM_FIRST),
    ("HIP error: invalid device ordinal", CLAIM_FIRST),
    ("HIP error: no kernel image is available for execution on the device", BUILD),
    ("HIP error: device kernel image is invalid", BUILD),
    ("hipErrorInsufficientDriver (35): driver version is insufficient for runtime version", DRIVER),
    ("HIP error: uncorrectable ECC error encountered", FAULT),
    ("hipErrorUnknown (999): unknown error", DMESG),
    ("hipErrorOperatingSystem (304): OS call failed or operation not supported on this OS", DMESG),
    ("hipErrorPeerAccessNotEnabled (705): peer access has not been enabled", ""),
]


@pytest.mark.parametrize(("text", "hint"), OF_HIP)
def test_errors_of_hip(text: str, hint: str) -> None:
    explained = causes.likely_cause(RuntimeError(text))
    assert hint in explained
    assert bool(explained) is bool(hint)
    assert "nvidia" not in explained.lower()
    assert "CUDA" not in explained


def test_what_a_build_for_rocm_says_in_the_words_of_cuda() -> None:
    """PyTorch for ROCm has these texts too, so that the advice must do for both."""
    forked = (
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn'"
    )
    assert "spawn" in causes.likely_cause(RuntimeError(forked))
    assert "ROCm" in causes.likely_cause(AssertionError("Torch not compiled with CUDA enabled"))
    assert "nvidia" not in causes.likely_cause(
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    )


@pytest.mark.parametrize(
    ("text", "of_the_gpu"),
    [
        ("HIP error: uncorrectable ECC error encountered", True),
        ("hipMalloc failed with hipErrorECCNotCorrectable (214)", True),
        (
            "HIP could not be asked: HW Exception by GPU node-4 (Agent handle: 0x1) reason :GPU Hang",
            True,
        ),
        ("HIP error: invalid device function", False),
        ("hipErrorOutOfMemory (2): out of memory", False),
        ("No HIP GPUs are available", False),
        ("Unable to open /dev/kfd read-write: Permission denied", False),
    ],
)
def test_which_errors_of_hip_speak_of_the_gpu(text: str, of_the_gpu: bool) -> None:
    assert causes.blames_gpu(RuntimeError(text)) is of_the_gpu


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("cuInit failed with CUDA_ERROR_NOT_INITIALIZED (3)", "spawn"),
        ("CUDA_ERROR_DEVICE_UNAVAILABLE", "EXCLUSIVE_PROCESS"),
        ("cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable", "EXCLUSIVE_PROCESS"),
        ("cudaErrorMemoryAllocation: out of memory", "uses most of the GPU"),
        ("CUDA out of memory. Tried to allocate 2.00 MiB", "uses most of the GPU"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate", "uses most of the GPU"),
        ("cuInit failed: no CUDA-capable device is detected", "claim first"),
        ("cudaErrorInvalidDevice: invalid device ordinal", "claim first"),
        ("No CUDA GPUs are available", "claim first"),
        ("Torch not compiled with CUDA enabled", "CPUs only"),
        ("Unknown backend: 'gpu' requested, but no platforms that are instances of gpu are present", "CPUs only"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"),
        ("CUDA_ERROR_STUB_LIBRARY", "stubs"),
        ("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "data center"),
        ("cudaErrorInsufficientDriver", "do not match"),
        ("CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized", "Fabric Manager"),
        ("CUDA_ERROR_UNKNOWN", "nvidia-modprobe"),
        ("CUDA_ERROR_MPS_CONNECTION_FAILED", "MPS"),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", "hardware"),
        ("list index out of range", ""),
    ],
)
def test_explain(text: str, hint: str) -> None:
    explained = causes.likely_cause(RuntimeError(text))
    assert hint in explained
    assert bool(explained) is bool(hint)


@pytest.mark.parametrize(
    ("text", "of_the_gpu"),
    [
        ("cuDevicePrimaryCtxRetain failed with CUDA_ERROR_DEVICE_UNAVAILABLE (46)", True),
        ("cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable", True),
        ("cuDevicePrimaryCtxRetain failed with CUDA_ERROR_ECC_UNCORRECTABLE (214)", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA_ERROR_HARDWARE_STACK_ERROR: hardware stack error", True),
        ("CUDA_ERROR_NVLINK_UNCORRECTABLE", True),
        ("Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost", True),
        ("Torch not compiled with CUDA enabled", False),
        ("CUDA error: out of memory", False),
        ("No CUDA GPUs are available", False),
        ("CUDA_ERROR_UNKNOWN", False),
        ("CUDA_ERROR_SYSTEM_NOT_READY", False),
        ("list index out of range", False),
    ],
)
def test_which_errors_speak_of_the_gpu(text: str, of_the_gpu: bool) -> None:
    assert causes.blames_gpu(RuntimeError(text)) is of_the_gpu
    wrapped = PlaceholderError("X could not hold CUDA device 0; the GPU is lost? uncorrectable ECC?")
    wrapped.__cause__ = RuntimeError(text)
    assert causes.blames_gpu(wrapped) is of_the_gpu


def test_a_rival_that_is_seen_explains_an_unavailable_gpu_but_no_broken_one() -> None:
    assert not causes.blames_gpu(RuntimeError("CUDA_ERROR_DEVICE_UNAVAILABLE"), rivals=True)
    assert causes.blames_gpu(RuntimeError("CUDA_ERROR_ECC_UNCORRECTABLE"), rivals=True)
