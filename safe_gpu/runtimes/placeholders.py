"""Placeholders: a small allocation on a GPU, by which other tools see it in use; and why one fails.

A placeholder is a callable that takes ``device_no`` (0-based, as CUDA numbers the GPUs after CUDA_VISIBLE_DEVICES) and
returns the object that holds the GPU. Two methods are optional. ``prepare()`` is called before any lock is taken. It
does the slow part that must not touch a GPU, such as importing a framework. ``release(thing)`` is called on release.
The functions :func:`prepare`, :func:`allocate`, :func:`release` and :func:`holds_gpu` accept a callable with or without
these methods.

``CudaPlaceholder`` is the default. It needs no package, shares its context with the frameworks of the same process, and
frees everything on release. The other placeholders initialise their framework before the claim returns.

HIP's names and texts are those of ``hip_error.cpp`` in ROCm's clr. Older versions have the name as the text.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from ..errors import PlaceholderError, SafeGpuError, package_logger

Placeholder = Callable[[int], Any]
"""What a claim requires of a placeholder. The methods ``prepare()`` and ``release(thing)`` are optional."""


# ---------------------------------------------------------------------------------------------------------------------
# What a claim calls


def prepare(placeholder: Placeholder) -> None:
    """Call the placeholder's ``prepare()``, if it has one.

    Raises:
        PlaceholderError: it is a class rather than an instance, or ``prepare()`` failed (a framework is missing).
    """
    if isinstance(placeholder, type) and issubclass(placeholder, Base):
        name = placeholder.__name__
        raise PlaceholderError(f"placeholder_fn is the class {name}, which would hold no GPU: pass {name}() instead")
    method = getattr(placeholder, "prepare", None)
    if not callable(method):
        return
    try:
        method()
    except SafeGpuError:
        raise
    except Exception as err:
        raise PlaceholderError(f"{name_of(placeholder)} could not be prepared: {_first_line(err)}") from err


def allocate(placeholder: Placeholder, device_no: int) -> Any:
    """Put the placeholder on the GPU that CUDA knows as ``device_no`` and return the object that holds it.

    Raises:
        PlaceholderError: it failed. The message gives the likely cause; ``__cause__`` is the original error.
    """
    return _allocated(placeholder, name_of(placeholder), device_no)


def _allocated(
    hold: Placeholder, name: str, device_no: int, library: str = "CUDA", of_library: tuple[type[Exception], ...] = ()
) -> Any:
    """Return what a call returns; its errors become PlaceholderError, but those of this package and not
    ``of_library``."""
    try:
        return hold(device_no)
    except Exception as err:
        if isinstance(err, SafeGpuError) and not isinstance(err, of_library):
            raise
        message = f"{name} could not hold {library} device {device_no}: {_first_line(err)}{likely_cause(err)}"
        raise PlaceholderError(message, device_no=device_no) from err


def release(placeholder: Placeholder, thing: Any) -> None:
    """Call the placeholder's ``release()``, if it has one. Otherwise the caller's reference was what held the GPU.

    An error is logged and not raised, because the rest of the claim must still be released.
    """
    method = getattr(placeholder, "release", None)
    if not callable(method):
        return
    try:
        method(thing)
    except Exception as err:
        logger = getattr(placeholder, "logger", None) or package_logger()
        logger.warning("%s could not release its GPU: %s", name_of(placeholder), _first_line(err))


def holds_gpu(placeholder: Placeholder) -> bool:
    """Return whether the placeholder occupies the GPU, so that the driver shows this process there."""
    return bool(getattr(placeholder, "holds_gpu", True))


def is_builtin(placeholder: Placeholder) -> bool:
    """Return whether it is one of this package, which waits for nothing but the driver."""
    return type(placeholder).__module__.startswith(f"{__package__.partition('.')[0]}.")


def _first_line(err: BaseException) -> str:
    """Return the first line of an error's text; frameworks add long advice after it.

    The type of the error comes first, unless the error is of this package.
    """
    line = str(err).strip().partition("\n")[0]
    if isinstance(err, SafeGpuError):
        return line
    return f"{type(err).__name__}: {line}" if line else type(err).__name__


def name_of(placeholder: object) -> str:
    """Return how messages call a placeholder: the name of its function or class."""
    return getattr(placeholder, "__qualname__", None) or type(placeholder).__name__


# ---------------------------------------------------------------------------------------------------------------------
# The placeholders


class Base:
    """Common to the placeholders of this module: the logger, the import of the framework, and the errors."""

    holds_gpu: bool = True
    _module = ""  # the module that prepare() imports
    _install = ""  # the package to install, as an argument of pip

    def __init__(self, logger: Any = None) -> None:
        self._logger = logger

    @property
    def logger(self) -> Any:
        """The logger given to the constructor, else the logger ``safe_gpu``."""
        return self._logger or package_logger()

    def prepare(self) -> None:
        """Import the framework. This does not initialise CUDA.

        Raises:
            PlaceholderError: it is not installed, or its import fails.
        """
        if self._module:
            self._import()

    def __call__(self, device_no: int) -> Any:
        """Allocate a little memory on the GPU and return the object that holds it.

        Raises:
            PlaceholderError: with ``device_no`` and the likely cause.
        """
        return _allocated(self._allocate, name_of(self), device_no)

    def release(self, placeholder: Any) -> None:
        """Free what the framework can free."""

    def _allocate(self, device_no: int) -> Any:
        raise NotImplementedError

    def _import(self) -> Any:
        import importlib

        try:
            return importlib.import_module(self._module)
        except Exception as err:
            package = self._module.partition(".")[0]
            if isinstance(err, ModuleNotFoundError) and (err.name or "").partition(".")[0] == package:
                problem = f"needs {package}, which is not installed: pip install {self._install}"
            else:
                problem = f"cannot import {self._module} ({_first_line(err)}): repair that installation"
            raise PlaceholderError(
                f"{name_of(self)} {problem}, or leave placeholder_fn out to hold the GPU through the CUDA driver"
            ) from err


def module_of(title: str) -> Any:
    """Return the module that calls a library: ``hip`` for "HIP", ``_`` for a blank."""
    return import_module(f".{title.lower().replace(' ', '_')}", __package__)


class CudaPlaceholder(Base):
    """The default: a primary context with a small allocation, made through the CUDA driver and freed on release."""

    _library = "CUDA"

    def prepare(self) -> None:
        """Map the vendor's library. This does not initialise it.

        Raises:
            NoDriverError: this host has none.
        """
        module_of(self._library).load()

    def __call__(self, device_no: int) -> Any:
        from .cuda import CudaCallError

        return _allocated(self._allocate, name_of(self), device_no, self._library, (CudaCallError,))

    def _allocate(self, device_no: int) -> Any:
        return module_of(self._library).hold(device_no)

    def release(self, placeholder: Any) -> None:
        """Free the allocation and release the context. The context stays if a framework of this process uses it."""
        placeholder.release()


class HipPlaceholder(CudaPlaceholder):
    """The default on AMD GPUs: a small allocation through HIP, freed on release.

    HIP stays initialised in this process, so that the kernel may list it on the GPU until it ends.
    """

    _library = "HIP"


class LevelZeroPlaceholder(CudaPlaceholder):
    """The default on Intel GPUs where Level Zero is installed: a context with a small allocation, freed on release."""

    _library = "Level Zero"


class NoPlaceholder(Base):
    """Nothing on the GPU. Only the lease protects the claim; nvidia-smi shows the GPU as free.

    For processes that fork workers which use CUDA: a CUDA context in the parent would break CUDA in the workers.
    """

    holds_gpu = False

    def _allocate(self, device_no: int) -> None:
        return None


class PytorchPlaceholder(Base):
    """A tensor of one element. PyTorch keeps its context (some hundred MB) until the process ends."""

    _module = "torch"
    _install = "torch"

    def _allocate(self, device_no: int) -> Any:
        torch = self._import()
        if share := os.environ.get("SAFE_GPU_SHARE_FRACTION"):  # set by this claim, if it shares its GPUs
            torch.cuda.set_per_process_memory_fraction(float(share), device_no)
        return torch.zeros((1,), device=f"cuda:{device_no}")

    def release(self, placeholder: Any) -> None:
        """Return the tensor's memory to the driver. The context stays, because PyTorch cannot destroy it."""
        with suppress(AttributeError):
            placeholder.set_()  # an empty storage, which frees the memory even if other references remain
        self._import().cuda.empty_cache()
        self.logger.info("Freed a PyTorch tensor; PyTorch keeps its CUDA context until this process ends")


class TensorflowPlaceholder(Base):
    """A tensor of one element, with memory growth on. Without it TensorFlow takes all memory of every visible GPU."""

    _module = "tensorflow"
    _install = "tensorflow"

    def _allocate(self, device_no: int) -> Any:
        tensorflow = self._import()
        gpus = tensorflow.config.list_physical_devices("GPU")
        if device_no >= len(gpus):
            raise RuntimeError(f"TensorFlow sees {len(gpus)} GPUs")
        for number, gpu in enumerate(gpus):
            try:
                tensorflow.config.experimental.set_memory_growth(gpu, True)
            except (RuntimeError, ValueError) as err:  # TensorFlow has started already, or has logical devices set up
                if number == device_no:
                    self.logger.warning(
                        "TensorFlow may take all memory of CUDA device %d, because memory growth cannot be set: %s",
                        device_no,
                        _first_line(err),
                    )
        with tensorflow.device(f"GPU:{device_no}"):
            tensor = tensorflow.constant([1.0])
        # TensorFlow's soft placement falls back to the CPU without an error.
        if "CPU" in str(getattr(tensor, "device", "")):
            raise RuntimeError(f"TensorFlow put the tensor on the CPU ({tensor.device})")
        return tensor

    def release(self, placeholder: Any) -> None:
        """Do nothing: TensorFlow keeps its memory and its context until the process exits."""
        self.logger.info("Did nothing, TensorFlow doesn't expose interface for releasing GPUs")


class PyCudaPlaceholder(Base):
    """A separate context, current in the calling thread, as after ``import pycuda.autoinit``."""

    _module = "pycuda.driver"
    _install = "pycuda"

    def __init__(self, logger: Any = None) -> None:
        super().__init__(logger)
        self._held: list[Any] = []

    def _allocate(self, device_no: int) -> Any:
        import atexit

        driver = self._import()
        driver.init()
        context = driver.Device(device_no).make_context()
        self._held.append(context)
        atexit.register(self._at_exit, os.getpid())  # PyCUDA aborts a process that exits with a context on its stack
        return context

    def release(self, placeholder: Any) -> None:
        """Detach the context; PyCUDA removes it from any position in its context stack."""
        self._held = [context for context in self._held if context is not placeholder]
        placeholder.detach()
        self.logger.info("Released a CUDA context")

    def _at_exit(self, pid: int) -> None:
        if pid == os.getpid():  # a forked child must not detach its parent's contexts
            while self._held:
                self._held.pop().detach()


class CupyPlaceholder(Base):
    """An array of one byte. CuPy uses the primary context, which stays until the process ends."""

    _module = "cupy"
    _install = "cupy-cuda12x"

    def _allocate(self, device_no: int) -> Any:
        cupy = self._import()
        with cupy.cuda.Device(device_no):
            return cupy.zeros(1, dtype="uint8")

    def release(self, placeholder: Any) -> None:
        """Return the array's memory and all unused blocks of CuPy's pool on that GPU to the driver."""
        with suppress(AttributeError):
            placeholder.data.mem.free()  # frees the memory even if other references remain
        with placeholder.device:
            self._import().get_default_memory_pool().free_all_blocks()
        self.logger.info("Freed a CuPy array; the CUDA context stays until this process ends")


_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


class JaxPlaceholder(Base):
    """An array of one element. JAX initialises all visible GPUs, and keeps its contexts until the process exits.

    By default JAX allocates 75% of the memory of every visible GPU when it starts. Unless the user has set
    XLA_PYTHON_CLIENT_PREALLOCATE, this placeholder sets it to false while JAX starts and then removes it again. JAX
    reads the variable only once, so preallocation stays off in this process.
    """

    _module = "jax"
    _install = "'jax[cuda12]'"

    def _allocate(self, device_no: int) -> Any:
        jax = self._import()
        chosen = _PREALLOCATE in os.environ
        os.environ.setdefault(_PREALLOCATE, "false")
        try:
            devices = jax.local_devices(backend="gpu")
        finally:
            if not chosen:
                os.environ.pop(_PREALLOCATE, None)
        if device_no >= len(devices):
            raise RuntimeError(f"JAX sees {len(devices)} GPUs")
        return jax.device_put(1.0, devices[device_no]).block_until_ready()

    def release(self, placeholder: Any) -> None:
        """Delete the array. JAX keeps its memory pool and context, because it cannot free them."""
        placeholder.delete()
        self.logger.info("Freed a JAX array; JAX keeps its CUDA context until this process ends")


pytorch_placeholder = PytorchPlaceholder()
tensorflow_placeholder = TensorflowPlaceholder()


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
hipErrorNotInitialized|initialization error
    the amdgpu driver cannot start HIP (see dmesg), or this process was forked from one in which HIP was initialised
    (start it with the 'spawn' method)
/dev/kfd|/dev/dri|HSA_STATUS_ERROR_OUT_OF_RESOURCES
    ROCm could not open the GPUs: the user needs read and write access to /dev/kfd and /dev/dri/renderD* (join the
    groups that own them, render and video, and log in again), and a container needs --device=/dev/kfd
    --device=/dev/dri and these groups by number (--group-add)
hipErrorNoDevice|no ROCm-capable device|No HIP GPUs|hipErrorInvalidDevice\b|invalid device ordinal|No devices found
    HIP was probably initialised in this process before the claim, which fixes what it sees (claim first), or the
    user may not open /dev/kfd and /dev/dri/renderD* (join the groups that own them, render and video)
hipErrorNoBinaryForGpu|no kernel image is available|find code object|find binary for current|
hipErrorInvalidDeviceFunction|invalid device function|hipErrorInvalidImage|kernel image is invalid|TensileLibrary
    this build has no code for the architecture of the GPU: install one that has (rocminfo shows the gfx number),
    and unset HSA_OVERRIDE_GFX_VERSION where it names another architecture
hipErrorInsufficientDriver|driver version is insufficient
    the amdgpu driver is older than this version of ROCm needs: update the driver, or install the ROCm that belongs
    to it
hipErrorECCNotCorrectable|uncorrectable ECC|GPU Hang
    the GPU reports a fault: see dmesg, and exclude it
hipErrorUnknown|unknown error|hipErrorOperatingSystem|OS call failed|HSA_STATUS_ERROR
    the amdgpu driver is in a bad state: see dmesg
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
