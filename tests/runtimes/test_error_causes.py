"""Causes of errors, from messages that CUDA, HIP and the frameworks have printed."""

import pytest

from safe_gpu.errors import PlaceholderError
from safe_gpu.runtimes import causes


def table(rows: str) -> list[tuple[str, str]]:
    """Of lines ``HINT | TEXT``, where "-" stands for no hint."""
    pairs = (row.split(" | ", 1) for row in rows.strip().splitlines())
    return [(text, hint.removeprefix("-")) for hint, text in pairs]


# What people have reported, word for word but for addresses; the last ones are hip_error.cpp's own texts.
OF_HIP = table("""
claim first | HIP error: hipErrorNoDevice
render and video | No HIP GPUs are available
render and video | HIP initialization: Unexpected error from hipGetDeviceCount(). Did you run some cuda functions \
before calling NumHipDevices() that might have already set an error? Error 101: hipErrorInvalidDevice
render and video | rocBLAS error: Could not initialize Tensile host: No devices found
--device=/dev/kfd | Unable to open /dev/kfd read-write: Permission denied
--device=/dev/kfd | HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources. This \
error may also occur when the core runtime library needs to spawn threads or create internal OS-specific events.
HSA_OVERRIDE_GFX_VERSION | hipErrorNoBinaryForGpu: Unable to find code object for all current devices!
HSA_OVERRIDE_GFX_VERSION | hip_code_object.cpp:92: guarantee(false && "hipErrorNoBinaryForGpu: Coudn't find binary \
for current devices!
uses most of the GPU | HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB of \
which 203.49 GiB is free. Of the allocated memory 68.63 GiB is allocated by PyTorch, and 14.93 GiB is reserved by \
PyTorch
HSA_OVERRIDE_GFX_VERSION | HIP error: no kernel image is available for execution on the device
- | hipErrorUnknown (999): unknown error
""")

OF_CUDA = table("""
nvidia_uvm | cuInit failed with CUDA_ERROR_NOT_INITIALIZED (3): initialization error
nvidia_uvm | CUDA driver initialization failed, you might not have a CUDA gpu.
spawn | Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the
must be reset | cuDevicePrimaryCtxRetain failed with CUDA_ERROR_DEVICE_UNAVAILABLE (46)
memory of the host | cuInit failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory
uses most of the GPU | cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory
EXCLUSIVE_PROCESS | cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable
uses most of the GPU | RESOURCE_EXHAUSTED: Out of memory while trying to allocate
CUDA_VISIBLE_DEVICES hides | cuInit failed with CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected
a container needs --gpus | No CUDA GPUs are available
CPUs only | Torch not compiled with CUDA enabled
CPUs only | Unknown backend: 'gpu' requested, but no platforms that are instances of gpu are present
reboot | CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
stubs | CUDA_ERROR_STUB_LIBRARY
reboot | cuInit failed with CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804): forward compatibility was attempted
do not match | cudaErrorInsufficientDriver
a container needs --gpus | Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU
nvidia-smi conf-compute -srs 1 | cuInit failed with CUDA_ERROR_SYSTEM_NOT_READY (802): system not yet initialized
lost /dev/nvidia* | cuInit failed with CUDA_ERROR_UNKNOWN (999): unknown error
MPS | CUDA_ERROR_MPS_CONNECTION_FAILED
hardware | CUDA_ERROR_ECC_UNCORRECTABLE
- | list index out of range
""")

OF_THE_GPU = """
HIP error: uncorrectable ECC error encountered
hipMalloc failed with hipErrorECCNotCorrectable (214)
HW Exception by GPU node-1 (Agent handle: 0x1b0fc990) reason :GPU Hang
cuDevicePrimaryCtxRetain failed with CUDA_ERROR_DEVICE_UNAVAILABLE (46)
cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable
cuDevicePrimaryCtxRetain failed with CUDA_ERROR_ECC_UNCORRECTABLE (214)
CUDA_ERROR_ECC_UNCORRECTABLE
CUDA_ERROR_HARDWARE_STACK_ERROR: hardware stack error
Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost
""".strip().splitlines()


@pytest.mark.parametrize(("text", "hint"), [*OF_HIP, *OF_CUDA])
def test_the_likely_cause(text: str, hint: str) -> None:
    explained = causes.likely_cause(RuntimeError(text))
    assert hint in explained
    assert bool(explained) is bool(hint)
    assert "spawn" not in explained or "fork" in text
    if (text, hint) in OF_HIP:
        assert "nvidia" not in explained.lower()
        assert "CUDA" not in explained


def test_what_a_build_for_rocm_says_in_the_words_of_cuda() -> None:
    """PyTorch for ROCm has these texts too, so that the advice must do for both."""
    forked = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the"
    full = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
    assert "spawn" in causes.likely_cause(RuntimeError(forked))
    assert "ROCm" in causes.likely_cause(AssertionError("Torch not compiled with CUDA enabled"))
    assert "nvidia" not in causes.likely_cause(RuntimeError(full))


def test_which_errors_speak_of_the_gpu() -> None:
    texts = {*dict(OF_HIP), *dict(OF_CUDA), *OF_THE_GPU}
    assert {text for text in texts if causes.blames_gpu(RuntimeError(text))} == set(OF_THE_GPU)
    wrapped = PlaceholderError("X could not hold CUDA device 0; the GPU is lost? uncorrectable ECC?")
    for text in (OF_THE_GPU[0], "list index out of range"):
        wrapped.__cause__ = RuntimeError(text)
        assert causes.blames_gpu(wrapped) is (text in OF_THE_GPU)


def test_a_rival_that_is_seen_explains_an_unavailable_gpu_but_no_broken_one() -> None:
    assert not causes.blames_gpu(RuntimeError("CUDA_ERROR_DEVICE_UNAVAILABLE"), rivals=True)
    assert causes.blames_gpu(RuntimeError("CUDA_ERROR_ECC_UNCORRECTABLE"), rivals=True)
